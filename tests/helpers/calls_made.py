"""What the ranks send to each other, counted where everything is sent."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor

from bascule.comm.collectives import Transfers
from bascule.comm.guard.calls import Call

ALL_TO_ALL, ALL_GATHER, RING = "all_to_all", "all_gather", "ring"
REDUCE_SCATTER, ALL_REDUCE = "reduce_scatter", "all_reduce"


@dataclass
class CallsMade:
    """How often each kind of call was made, and the bytes that this rank sent to others in it."""

    counts: Counter[str] = field(default_factory=Counter[str])
    sent_bytes: Counter[str] = field(default_factory=Counter[str])


@contextmanager
def calls_made() -> Iterator[CallsMade]:
    """Count the calls that this rank makes within."""
    made, begin = CallsMade(), Transfers.__init__

    def count(
        self: Transfers,
        group: Any,
        what: Call,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
    ) -> None:
        kind = what.what.split(" (")[0]
        made.counts[kind] += 1
        made.sent_bytes[kind] += sum(x.nbytes for x in sent.values())
        begin(self, group, what, sent, received)

    with mock.patch.object(Transfers, "__init__", count):
        yield made
