"""Finds out that this rank waits in a collective of other code, as DDP's, for one that failed.

Such collectives carry no marks, so they are known by their number alone.
"""

from dataclasses import dataclass

from bascule.comm.groups import OtherCalls, other_calls
from bascule.comm.guard import notes


@dataclass(frozen=True, slots=True)
class Stuck:
    """Calls of other code that cannot end.

    Attributes:
        rank: Which rank failed.
        text: Where, and why.
        calls: Those that this rank has begun, and that one had not.
        version: Of the note of that one.
    """

    rank: int
    text: str
    calls: tuple[OtherCalls, ...]
    version: int


def stuck_behind_failure() -> Stuck | None:
    """The calls that this rank has begun, and a rank that failed had not; None if there are none.

    One request to the store while none failed.
    """
    failures = notes.last_failures()
    begun = other_calls() if failures else []
    for rank, failed in failures.items():
        ahead = [one for one in begun if one.num_begun > failed.others.get(one.key, _ALL)]
        if ahead:
            return Stuck(rank, failed.told_of(rank), tuple(ahead), failed.version)
    return None


_ALL = 2**62  # calls: of a group that the other rank is not in
