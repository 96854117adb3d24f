"""Bytes that a rank sends to others, as the messages of bascule's transfers have them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from bascule.comm.collectives import Transfers


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sum, without all-gathers, of which agreements and counts are made."""
    total, send = [0], Transfers.__init__

    def count_sends(self: Transfers, group: Any, where: str, sent: Any, received: Any) -> None:
        if "all_gather" not in where:
            total[0] += sum(x.nbytes for x in sent.values())
        send(self, group, where, sent, received)

    with mock.patch.object(Transfers, "__init__", count_sends):
        yield total
