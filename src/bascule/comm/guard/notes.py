"""What ranks in trouble tell each other through the store: how they failed.

Nothing is written while all goes well. A rank that fails writes one note, and those that wait for
it, or fail as well, read it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bascule.comm.guard.store import ask

FAILED, LEFT, ENDED = "failed", "left", "ended"
_ANY = "any"  # of the ranks that failed
_NUM_SLOTS = 16  # of these, for those that said so last
_NOTHING = "-"  # which no note is; what a store says of a key that is not there


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank failed.

    Attributes:
        where: The call in which it noticed.
        ranks: Global ranks of that call.
        cause: Its own error; "" where it only noticed that others were gone.
        is_input: Whether that was bad input.
        done: By key of the group, how many calls it had done its part of.
        others: By key of the group, how many calls of other code it had begun (`OtherCalls`).
        came: By key of the group, how many calls it had begun, of those begun after it failed.
        goes_on: Whether it makes the calls of bascule that follow, as to agree on its error.
        version: How often it has said so before; each time with what it has begun since.
    """

    where: str
    ranks: tuple[int, ...] = ()
    cause: str = ""
    is_input: bool = False
    done: Mapping[str, int] = field(default_factory=dict[str, int])
    others: Mapping[str, int] = field(default_factory=dict[str, int])
    came: Mapping[str, int] = field(default_factory=dict[str, int])
    goes_on: bool = False
    version: int = 0

    def told_of(self, rank: int) -> str:
        """Its own error, as that of this rank, or what it found out about others."""
        if self.cause and self.ranks:
            return self.cause
        return f"rank {rank} failed in {self.where}{': ' if self.cause else ''}{self.cause}"


def write(kind: str, of: int | str, text: str) -> None:
    """Leave a note; the last one of a kind, and of a rank or name, counts."""
    ask(lambda store: store.set(_key(kind, of), _writable(text)))


def erase(kind: str, rank: int) -> None:
    """Take a note back."""
    ask(lambda store: store.delete_key(_key(kind, rank)))


def read(kind: str, of: int | str) -> str | None:
    """The note of a rank or of what has a name, or None; one request, which never waits.

    As `get` does for what was erased a moment after `check`.
    """
    key = _key(kind, of)
    text = ask(lambda store: store.compare_set(key, _NOTHING, _NOTHING)).decode()
    return None if text == _NOTHING else text


def replace(kind: str, name: str, before: str, text: str) -> None:
    """Leave a note, if the last one is still the one that was read before, "" for none."""
    ask(lambda store: store.compare_set(_key(kind, name), before, _writable(text)))


def read_failure(rank: int) -> Failure | None:
    """How a rank failed; None if it did not say so."""
    text = read(FAILED, rank)
    if text is None:
        return None
    given: dict[str, Any] = json.loads(text)
    return Failure(**{**given, "ranks": tuple(given["ranks"])})


def write_failure(rank: int, failure: Failure) -> None:
    """Say how this rank failed."""
    write(FAILED, rank, json.dumps(asdict(failure)))
    write(FAILED, f"{_ANY} {rank % _NUM_SLOTS}", str(rank))
    write(FAILED, _ANY, str(rank))


def is_any_failed() -> bool:
    """Whether a rank has failed, this one included; one request."""
    return read(FAILED, _ANY) is not None


def last_failures() -> dict[int, Failure]:
    """How other ranks failed, those that said so last, by rank; not those that have gone on.

    One request while none failed, and then some more.
    """
    if not is_any_failed():
        return {}
    said = [read(FAILED, f"{_ANY} {slot}") for slot in range(_NUM_SLOTS)]
    ranks = sorted({int(text) for text in said if text is not None} - {dist.get_rank()})
    found = {rank: read_failure(rank) for rank in ranks}
    return {rank: failure for rank, failure in found.items() if failure is not None}


def without_failure(ranks: Sequence[int]) -> list[int]:
    """Those of the ranks that did not say that they failed; few requests where all did."""
    keys = [_key(FAILED, rank) for rank in ranks]
    if not ranks or ask(lambda store: store.check(keys)):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return without_failure(ranks[:half]) + without_failure(ranks[half:])


def arrive(meeting: str, num: int = 1) -> int:
    """Count this rank at a meeting, or with -1 take that back; how many are there now."""
    return ask(lambda store: store.add(_key("meeting", meeting), num))


def call_together(meeting: str) -> None:
    """Say to those that wait at a meeting that all have come."""
    ask(lambda store: store.set(_key("met", meeting), ""))


def are_together(meeting: str, within_s: float) -> bool:
    """Whether all have come to a meeting, or come within so many seconds; one request."""

    def wait(store: Any) -> bool:
        try:
            store.wait([_key("met", meeting)], timedelta(seconds=within_s))
        except RuntimeError as error:  # each kind of store has its own text
            if "timeout" not in str(error).lower():
                raise
            return False
        return True

    return ask(wait, over="meetings")


def _writable(text: str) -> str:
    """The same without what no store takes: names of files may hold bytes that are no text."""
    return text.encode(errors="backslashreplace").decode()


def _key(kind: str, of: int | str) -> str:
    return f"bascule/{kind}/{of}"
