"""Bytes that a rank sends to others, as the messages of bascule's transfers have them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from bascule.comm.collectives import Transfers
from bascule.comm.guard.calls import Call


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sum, without all-gathers, of which agreements and counts are made."""
    total, send = [0], Transfers.__init__

    def count_sends(self: Transfers, group: Any, what: Call, sent: Any, received: Any) -> None:
        if not what.what.startswith("all_gather"):
            total[0] += sum(x.nbytes for x in sent.values())
        send(self, group, what, sent, received)

    with mock.patch.object(Transfers, "__init__", count_sends):
        yield total
