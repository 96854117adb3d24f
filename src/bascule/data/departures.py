"""How a rank that leaves an iteration is heard by the others: a note in the store.

The thread of a rank that leaves takes part in one more gather, and says so there. But threads that
have made enough steps ahead wait for their training, not in the gather, and the training may wait
for the rank that left. So who leaves also writes a note, which these threads look for; then they
come to the gather as well. All end within a moment, whatever the training does. A look is a request
to the store, one a second and rank, and only while a thread waits for the training.

The note says after which microbatch it left. Up to there the others may go on, because ranks may
leave alike, one later than the other. Who has heard hands out nothing of what was made beyond.
"""

import json
import time
from dataclasses import asdict, dataclass

from bascule.comm.groups import RankGroup
from bascule.comm.guard import notes

_SETTLING_S = 0.5  # within a `with`, the error follows when the loop was left
_TICK_S = 0.02

Position = tuple[int, int]
"""Step of the epoch and microbatch of the step."""

NOWHERE: Position = (-1, -1)
"""Before the first microbatch."""


@dataclass(frozen=True, slots=True)
class Departure:
    """That a rank left an iteration.

    Attributes:
        use: Which use of the group the iteration is.
        rank: Of the group.
        after: The last microbatch that it was handed.
        reason: The error with which it left; "" if it is unknown, or none.
        is_final: Whether that is all that it will say.
    """

    use: int
    rank: int
    after: Position
    reason: str = ""
    is_final: bool = True

    def __str__(self) -> str:
        if self.reason:
            return f"left the iteration with {self.reason}"
        where = f"after microbatch {self.after[1]} of step {self.after[0]}"
        where = "before the first microbatch" if self.after == NOWHERE else where
        return f"closed the loader {where}: all ranks must leave an iteration at the same step"


class Departures:
    """Who left an iteration first.

    Never raises: where the store is gone with its host, the connections to that rank are, too.

    Args:
        group: The group of the iteration.
        use: Which use of it.
    """

    def __init__(self, group: RankGroup, use: int) -> None:
        self._name = group.process_group.group_name
        self._use = use

    def announce(self, own: Departure) -> None:
        """Say that this rank leaves; the first of all counts, and may add its reason."""
        text, known = self._read()
        is_new = known is None or (known.rank == own.rank and not known.is_final)
        if is_new:
            self._replace(text, own)

    def read(self) -> Departure | None:
        """Who left, if somebody did."""
        return self._read()[1]

    def settle(self) -> Departure | None:
        """The same with the reason, which may take a moment; alike on all ranks from then on."""
        deadline = time.monotonic() + _SETTLING_S
        while True:
            text, known = self._read()
            if known is None or known.is_final:
                return known
            if time.monotonic() > deadline:
                own = Departure(known.use, known.rank, known.after, known.reason)
                self._replace(text, own)
            time.sleep(_TICK_S)

    def _read(self) -> tuple[str, Departure | None]:
        """The note as it stands, and what it says of this iteration."""
        try:
            text = notes.read(notes.LEFT, self._name) or ""
        except (RuntimeError, ValueError):
            return "", None
        if not text:
            return "", None
        given = json.loads(text)
        departure = Departure(**{**given, "after": tuple(given["after"])})
        return text, departure if departure.use == self._use else None

    def _replace(self, before: str, departure: Departure) -> None:
        """Write the note, unless somebody else did meanwhile."""
        try:
            notes.replace(notes.LEFT, self._name, before, json.dumps(asdict(departure)))
        except (RuntimeError, ValueError):
            return
