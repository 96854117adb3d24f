"""Simulate slow links, and none, between the processes of one machine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bascule.comm.collectives import Transfers

_post, _wait = Transfers._post, Transfers.wait


class Link:
    """A link of some latency and speed; without either, gloo's own.

    Every message is followed by a stamp of when it may be used.

    Args:
        latency_s: From the post of a message until the other side may use it.
        bytes_per_s: What a rank's link carries, one message after the other; None for any number.
        blocking: Whether posting waits for what is to arrive.
    """

    def __init__(
        self, latency_s: float = 0.0, bytes_per_s: float | None = None, *, blocking: bool = False
    ) -> None:
        self.latency_s, self.bytes_per_s, self.blocking = latency_s, bytes_per_s, blocking
        self._free_at = 0.0
        self._stamps: dict[int, list[Tensor]] = {}

    def post(self, transfers: Transfers, tag: int) -> list[dist.Work]:
        """Post the messages, and their stamps."""
        works = _post(transfers, tag)
        if self.latency_s or self.bytes_per_s:
            works += self._stamp(transfers, tag)
        if not self.blocking:
            return works
        for work in works:
            work.wait()
        self._sleep(transfers)
        return []  # gloo would wait for a second message

    def wait(self, transfers: Transfers) -> None:
        """Until the messages are there, and may be used."""
        _wait(transfers)
        self._sleep(transfers)

    def _stamp(self, transfers: Transfers, tag: int) -> list[dist.Work]:
        group, (sent, received) = transfers._group, transfers._tensors
        now = time.perf_counter() + self.latency_s
        if self.bytes_per_s:
            num_bytes = sum(x.nbytes for x in sent.values())
            self._free_at = max(self._free_at, now) + num_bytes / self.bytes_per_s
            now = self._free_at
        own = torch.tensor([now], dtype=torch.float64)
        stamps = {place: torch.zeros_like(own) for place in received}
        self._stamps[id(transfers)] = [own, *stamps.values()]
        through = group.process_group
        come = [through.recv([x], group.places[place], tag) for place, x in stamps.items()]
        return come + [through.send([own], group.places[place], tag) for place in sent]

    def _sleep(self, transfers: Transfers) -> None:
        for stamp in self._stamps.pop(id(transfers), [])[1:]:
            sleep_until(float(stamp))


class NoLink(Link):
    """Moves nothing: a rank receives what it sends."""

    def post(self, transfers: Transfers, tag: int) -> list[dist.Work]:
        """Receive as if all others had sent the same."""
        sent, received = transfers._tensors
        for to, come in zip(sent.values(), received.values(), strict=True):
            come.view(-1).copy_(to.view(-1))
        return []


def sleep_until(moment: float) -> None:
    """By the clock of `time.perf_counter`, which all processes of a machine share on Linux."""
    time.sleep(max(0.0, moment - time.perf_counter()))


@contextmanager
def on(link: Link) -> Iterator[None]:
    """Everything that ranks send each other goes over that link."""
    with (
        mock.patch.object(Transfers, "_post", lambda transfers, tag: link.post(transfers, tag)),
        mock.patch.object(Transfers, "wait", lambda transfers: link.wait(transfers)),
    ):
        yield
