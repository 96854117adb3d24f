"""Agreement before any exchange whose sizes could differ between ranks.

One gather of a fixed size carries, from every rank: whether it met an error (with its sentence),
the digests of everything that its plan depends on, and its sequence lengths. So all ranks either
hold the same facts afterwards, or raise the same error.
"""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import torch

from bascule.arrays import Ints
from bascule.comm.collectives import all_gather
from bascule.comm.groups import RankGroup, device_of
from bascule.errors import CommError, ConfigError, PlanError, RemoteConfigError

_TEXT_WORDS = 48  # 384 bytes: one sentence
_MOST_WORDS = 2**16  # of a setting, to show where ranks differ
_SHOWN = 160  # characters of a long one
_OK, _INPUT_ERROR, _OTHER_ERROR = 0, 1, 2
_STATUS, _COUNT, _NUM_DIGESTS, _FIXED = 0, 1, 2, 3
_CALL = "the call"


@dataclass(frozen=True, slots=True)
class Statement:
    """What one rank says in an agreement.

    Attributes:
        settings: Everything that must be the same on all ranks, by name, as text.
        values: This rank's own integers, any number of them.
        error: What went wrong on this rank, if anything; all ranks then raise it.
    """

    settings: Mapping[str, str]
    values: Ints
    error: Exception | None = None


def agree(
    group: RankGroup, statement: Statement, *, what: str, step: int, capacity: int
) -> list[Ints]:
    """Exchange statements; return every rank's values, or raise the same error on every rank.

    One all-gather of `capacity` integers a rank. A rank with more values makes all of them gather a
    second time with room for the longest (return lists tell the caller, who may raise `capacity`),
    and settings that differ are gathered as text for the message.

    Args:
        group: A group whose collectives take CPU tensors.
        statement: This rank's part.
        what: Name of the agreement in errors.
        step: Step number in errors.
        capacity: Values a rank that fit into the first gather; the same on all ranks.

    Raises:
        RemoteConfigError: A rank met bad input.
        CommError: A rank met another error, the settings differ, or the gather failed.
        The error of the statement: the gather failed.
    """
    settings = {_CALL: f"{what}, step {step}", **statement.settings}
    statement = replace(statement, settings=settings)
    try:
        table = _gather(group, _message(statement, capacity), what, step)
    except CommError as lost:
        if statement.error is None:
            raise
        raise statement.error from lost
    _raise_differences(table, group, settings, [_CALL], what, step)
    _raise_reported(table, group, what, step)
    _raise_differences(table, group, settings, sorted(settings), what, step)
    most = int(table[:, _COUNT].max())
    if most > capacity:
        table = _gather(group, _message(statement, most), what, step)
    first = table.shape[1] - max(most, capacity)
    return [row[first : first + row[_COUNT]] for row in table]


def agree_on(
    group: RankGroup,
    settings: Mapping[str, str],
    error: Exception | None = None,
    *,
    what: str,
    step: int = 0,
) -> None:
    """Make sure that all ranks mean the same, and that none has met an error; see `agree`."""
    agree(
        group, Statement(settings, np.zeros(0, np.int64), error), what=what, step=step, capacity=0
    )


def first_use(
    group: RankGroup | None,
    form: Hashable,
    say: Callable[[], tuple[str, Exception | None]],
    *,
    what: str,
    step: int = 0,
) -> None:
    """Make sure that all ranks mean the same, the first time that a group makes a call of a form.

    One gather of a fixed size; none later. Gloo aborts a process that gets a message of another
    size than it waits for, so the text that `say` gives must hold all that decides sizes.

    Args:
        group: Whose call. None: this rank alone, which raises its own error.
        form: What tells the forms of calls apart.
        say: Gives what this rank means, as text, and what is wrong with it.
        what: Name of the call in errors.
        step: Step number in errors.
    """
    if group is not None and group.calls.has_agreed(form):
        return
    text, error = say()
    if group is not None:
        agree_on(group.control or group, {f"the form of {what}": text}, error, what=what, step=step)
        group.calls.agree(form)
    elif error is not None:
        raise error


def _message(statement: Statement, capacity: int) -> Ints:
    names = sorted(statement.settings)
    message = np.zeros(_FIXED + len(names) + _TEXT_WORDS + capacity, dtype=np.int64)
    message[_COUNT] = statement.values.size
    message[_NUM_DIGESTS] = len(names)
    for place, name in enumerate(names, start=_FIXED):
        message[place] = _digest(statement.settings[name])
    if statement.error is not None:
        is_input = isinstance(statement.error, ConfigError | PlanError)
        message[_STATUS] = _INPUT_ERROR if is_input else _OTHER_ERROR
        text = str(statement.error) if is_input else repr(statement.error)
        text_at = _FIXED + len(names)
        message[text_at : text_at + _TEXT_WORDS] = _to_words(text, _TEXT_WORDS)
    kept = statement.values[:capacity]
    values_at = message.size - capacity
    message[values_at : values_at + kept.size] = kept
    return message


def _gather(group: RankGroup, message: Ints, what: str, step: int) -> Ints:
    """(size, words) the messages of all ranks."""
    own = torch.from_numpy(message).to(device_of(group))
    return all_gather(group, f"step {step}: all_gather ({what})", own).cpu().numpy()


def _raise_reported(table: Ints, group: RankGroup, what: str, step: int) -> None:
    failed = np.flatnonzero(table[:, _STATUS])
    if failed.size == 0:
        return
    row = table[failed[0]]
    text_at = _FIXED + int(row[_NUM_DIGESTS])
    text = _from_words(row[text_at : text_at + _TEXT_WORDS])
    others = f" (also on ranks {failed[1:].tolist()})" if failed.size > 1 else ""
    message = f"step {step}, {what}: rank {failed[0]} of group {group.name!r}{others}: {text}"
    raise (RemoteConfigError if row[_STATUS] == _INPUT_ERROR else CommError)(message)


def _raise_differences(
    table: Ints,
    group: RankGroup,
    settings: Mapping[str, str],
    names: Sequence[str],
    what: str,
    step: int,
) -> None:
    places = [_FIXED + sorted(settings).index(name) for name in names]
    digests = table[:, places]
    differing = np.flatnonzero((digests != digests[0]).any(axis=0))
    if differing.size == 0:
        return
    name = names[int(differing[0])]
    num_words = -(-len(settings[name].encode(errors="replace")) // 8)
    most = int(_gather(group, np.array([num_words]), what, step).max())
    words = _gather(group, _to_words(settings[name], min(most, _MOST_WORDS)), what, step)
    said: dict[str, list[int]] = {}
    for rank, text in enumerate(_around_difference([_from_words(row) for row in words])):
        said.setdefault(text, []).append(rank)
    parts = "; ".join(f"ranks {ranks}: {text}" for text, ranks in said.items())
    raise CommError(
        f"step {step}, {what}: ranks of group {group.name!r} disagree on {name}: {parts}. "
        "Give every rank the same"
    )


def _around_difference(texts: Sequence[str]) -> list[str]:
    """The texts; of long ones the part in which they differ first."""
    if max(map(len, texts)) <= _SHOWN:
        return list(texts)
    unlike = (at for at, chars in enumerate(zip_longest(*texts)) if len(set(chars)) > 1)
    first = max(next(unlike, 0) - _SHOWN // 4, 0)
    before = ".. " if first else ""
    after = [" .." if len(text) > first + _SHOWN else "" for text in texts]
    parts = [text[first : first + _SHOWN] for text in texts]
    return [before + part + end for part, end in zip(parts, after, strict=True)]


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _to_words(text: str, num_words: int) -> Ints:
    kept = text.encode(errors="replace")[: num_words * 8].ljust(num_words * 8, b"\0")
    return np.frombuffer(kept, dtype="<i8").astype(np.int64)


def _from_words(words: Ints) -> str:
    return words.astype("<i8").tobytes().rstrip(b"\0").decode(errors="replace")
