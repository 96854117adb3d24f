"""What the ranks send to each other, counted where everything is sent."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor

from bascule.comm.collectives import Transfers
from bascule.comm.failures import Calls

ALL_TO_ALL, ALL_GATHER, RING = "all_to_all", "all_gather", "ring"
REDUCE_SCATTER, ALL_REDUCE = "reduce_scatter", "all_reduce"


@dataclass
class CallsMade:
    """How often each kind of call was made, and the bytes that this rank sent to others in it."""

    counts: Counter[str] = field(default_factory=Counter[str])
    sent_bytes: Counter[str] = field(default_factory=Counter[str])

    @property
    def moved_bytes(self) -> int:
        """Without all-gathers, of which agreements and counts are made."""
        return self.sent_bytes.total() - self.sent_bytes[ALL_GATHER]


@contextmanager
def calls_made() -> Iterator[CallsMade]:
    """Count the calls that this rank makes within."""
    made, post, begin = CallsMade(), Transfers.__init__, Calls.begin

    def count(
        self: Transfers,
        group: Any,
        where: str,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
    ) -> None:
        kind = where.rpartition(": ")[2].split(" (")[0]
        made.sent_bytes[kind] += sum(x.nbytes for x in sent.values())
        post(self, group, where, sent, received)

    def count_call(self: Calls, where: str) -> int:
        made.counts[where.rpartition(": ")[2].split(" (")[0]] += 1
        return begin(self, where)

    with (
        mock.patch.object(Transfers, "__init__", count),
        mock.patch.object(Calls, "begin", count_call),
    ):
        yield made
