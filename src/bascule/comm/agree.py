"""Agreement before any exchange whose sizes could differ between ranks.

One gather of a fixed size carries each rank's error, a digest of all that must be the same, and its
own numbers. All ranks then have the same facts, or raise the same error.
"""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

import numpy as np
import torch

from bascule.arrays import Ints
from bascule.comm.collectives import all_gather
from bascule.comm.groups import RankGroup, device_of
from bascule.errors import CommError, ConfigError, PlanError, RemoteConfigError

_MOST_WORDS = 2**16  # of a setting's text that ranks gather to show where they differ
_SHOWN = 160  # characters of a long text that an error shows
_INPUT_ERROR, _OTHER_ERROR = 1, 2
# A message: status, how many values, digests of the call and of its settings, a sentence, values.
_STATUS, _COUNT, _CALL, _SETTINGS, _TEXT, _VALUES = 0, 1, 2, 3, 4, 52
_NO_VALUES = np.zeros(0, np.int64)
Made = TypeVar("Made")


def agree(
    group: RankGroup,
    settings: Mapping[str, str],
    error: Exception | None = None,
    *,
    what: str,
    step: int = 0,
    values: Ints = _NO_VALUES,
    capacity: int = 0,
) -> list[Ints]:
    """Check that settings are the same on all ranks and no rank has an error; gather `values`.

    One all-gather with room for `capacity` integers of each rank; a second one if a rank has more,
    or settings differ. If a rank has bad input, all ranks raise RemoteConfigError; for any other
    error CommError, whose cause on that rank is its own error.
    """
    call = f"{what}, step {step}"
    message = np.zeros(_VALUES + capacity, np.int64)
    message[_COUNT], message[_CALL] = values.size, _digest(call)
    message[_SETTINGS] = _digest(str(sorted(settings.items())))
    if error is not None:
        is_input = isinstance(error, ConfigError | PlanError)
        message[_STATUS] = _INPUT_ERROR if is_input else _OTHER_ERROR
        text = str(error) if is_input else repr(error)
        message[_TEXT:_VALUES] = _to_words(text, _VALUES - _TEXT)
    first = values[:capacity]
    message[_VALUES : _VALUES + first.size] = first
    try:
        table = _gather(group, message, what, step)
    except CommError as lost:
        if error is None:
            raise
        raise error from lost
    if (table[:, _CALL] != table[0, _CALL]).any():
        try:
            _raise_difference(group, {"the call": call}, what, step)
        finally:  # these calls met although their names differ: no later wait may report that
            group.calls.last.clear()
    if table[:, _STATUS].any():
        reported = _reported(group, table, what, step)
        raise reported from (None if isinstance(reported, ConfigError) else error)
    if (table[:, _SETTINGS] != table[0, _SETTINGS]).any():
        _raise_difference(group, settings, what, step)
    counts = table[:, _COUNT].tolist()
    gathered = table[:, _VALUES:]
    if max(counts) > capacity:
        gathered = _gather(group, np.resize(values, max(counts)), what, step)
    return [row[:count] for row, count in zip(gathered, counts, strict=True)]


def agree_on(
    group: RankGroup | None,
    make: Callable[[], Made],
    settings_of: Callable[[Made], Mapping[str, str]] = lambda _: {},
    *,
    what: str,
    step: int = 0,
) -> Made:
    """Return the result of `make` on this rank, once all ranks of a group have their result.

    One all-gather also compares the settings of the results. If `make` fails on a rank, that rank
    raises its error; the others raise an error that quotes it. A group of None is this rank alone.
    """
    made, error, settings = list[Made](), None, dict[str, str]()
    try:
        made.append(make())
        settings |= settings_of(made[0])
    except Exception as failure:  # the other ranks must not wait
        error = failure
    try:
        if group is not None:
            agree(group.control or group, settings, error, what=what, step=step)
    finally:
        if error is not None:
            raise error from error.__cause__
    return made[0]


def first_use(
    group: RankGroup | None,
    signature: Hashable,
    describe: Callable[[], tuple[str, Exception | None]],
    *,
    what: str,
    step: int = 0,
) -> None:
    """Check that all ranks make the same call, when a group first meets the call's signature.

    `describe` returns the call as text, and its error or None. The text must contain everything
    that decides sizes: gloo aborts a process that gets a message of unexpected size. After the
    first use of `what`, only this rank raises an error; its note ends the other ranks' waits.
    """
    if group is not None and group.calls.has_agreed((what, signature)):
        return
    text, error = describe()
    if error is not None and (group is None or group.calls.has_agreed(what)):
        raise error
    if group is not None:
        agree(group.control or group, {f"the call of {what}": text}, error, what=what, step=step)
        group.calls.agree(what)
        group.calls.agree((what, signature))


def _gather(group: RankGroup, message: Ints, what: str, step: int) -> Ints:
    """Return the messages of all ranks, (size, words)."""
    local = torch.from_numpy(message).to(device_of(group))
    return all_gather(group, f"step {step}: all_gather ({what})", local).cpu().numpy()


def _reported(group: RankGroup, table: Ints, what: str, step: int) -> CommError:
    failed = np.flatnonzero(table[:, _STATUS])
    first = table[failed[0]]
    others = f" (also on ranks {failed[1:].tolist()})" if failed.size > 1 else ""
    where = f"step {step}, {what}: rank {failed[0]} of group {group.name!r}{others}"
    message = f"{where}: {_from_words(first[_TEXT:_VALUES])}"
    return (RemoteConfigError if first[_STATUS] == _INPUT_ERROR else CommError)(message)


def _raise_difference(group: RankGroup, settings: Mapping[str, str], what: str, step: int) -> None:
    """Compare the settings one by one, and name the first in which ranks differ."""
    names = sorted(settings)
    digests = _gather(group, np.array([_digest(settings[name]) for name in names]), what, step)
    name = names[int((digests != digests[0]).any(axis=0).argmax())]
    size = -(-len(settings[name].encode(errors="replace")) // 8)
    most = int(_gather(group, np.array([size]), what, step).max())
    words = _gather(group, _to_words(settings[name], min(most, _MOST_WORDS)), what, step)
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(_around_difference([_from_words(row) for row in words])):
        ranks_of.setdefault(text, []).append(rank)
    parts = "; ".join(f"ranks {ranks}: {text}" for text, ranks in ranks_of.items())
    wrong = f"step {step}, {what}: ranks of group {group.name!r} disagree on {name}"
    raise CommError(f"{wrong}: {parts}. Give every rank the same value")


def _around_difference(texts: Sequence[str]) -> list[str]:
    """Return the texts; of long ones the part in which they differ first."""
    if max(map(len, texts)) <= _SHOWN:
        return list(texts)
    is_unlike = [len(set(chars)) > 1 for chars in zip_longest(*texts)]
    first = max([*is_unlike, True].index(True) - _SHOWN // 4, 0)
    before = ".. " if first else ""
    after = [" .." if len(text) > first + _SHOWN else "" for text in texts]
    parts = [text[first : first + _SHOWN] for text in texts]
    return [before + part + end for part, end in zip(parts, after, strict=True)]


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _to_words(text: str, num_words: int) -> Ints:
    data = text.encode(errors="replace")[: num_words * 8].ljust(num_words * 8, b"\0")
    return np.frombuffer(data, dtype="<i8").astype(np.int64)


def _from_words(words: Ints) -> str:
    return words.astype("<i8").tobytes().rstrip(b"\0").decode(errors="replace")
