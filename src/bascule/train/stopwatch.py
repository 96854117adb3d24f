"""How long the parts of a step take on this rank: by the clock on the host, by events on CUDA."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bascule.parallel import Step

Moment = float | torch.cuda.Event
Lap = tuple[str, int, Moment, Moment]
"""A part and its microbatch, when it began and when it ended."""


class Stopwatch:
    """Adds up the seconds of the parts of a step; only `read` waits for the device.

    Attributes:
        microbatch: The one that is computed; work is told of each.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._laps: list[Lap] = []
        self.microbatch = 0

    def now(self) -> Moment:
        """This moment, on the device."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, name: str, start: Moment) -> Moment:
        """A part ends that began then; gives the moment."""
        end = self.now()
        self._laps.append((name, self.microbatch, start, end))
        return end

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """What is done within is a part of that name."""
        start = self.now()
        yield
        self.lap(name, start)

    def take(self) -> list[Lap]:
        """The laps since the last time, for another's `read`: waits for nothing."""
        taken, self._laps = self._laps, []
        return taken

    def read(self, others: Sequence[Lap] = ()) -> dict[tuple[str, int], float]:
        """Seconds by part and microbatch since the last time, those of others included."""
        if self._is_cuda:
            torch.cuda.synchronize()
        seconds = defaultdict[tuple[str, int], float](float)
        for name, microbatch, start, end in (*self.take(), *others):
            seconds[name, microbatch] += _between(start, end)
        return seconds


def _between(start: Moment, end: Moment) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1e3
    assert not isinstance(end, torch.cuda.Event)
    return end - start


class TimedStep:
    """A step whose moves and attention are timed; what a model takes as its exchange."""

    def __init__(self, step: Step, watch: Stopwatch) -> None:
        self._step, self._watch = step, watch
        self.local_seq_ids, self.token_slot = step.local_seq_ids, step.token_slot

    def route(self, **tensors: Tensor) -> Mapping[str, Tensor]:
        """See `Step.route`."""
        with self._watch.timed("route"):
            return self._step.route(**tensors)

    def gather_samples(self, vec: Tensor, /) -> Tensor:
        """See `Step.gather_samples`."""
        with self._watch.timed("samples"):
            return self._step.gather_samples(vec)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        """See `Step.attend`."""
        with self._watch.timed("attend"):
            return self._step.attend(q, k, v)

    def restore(self, x: Tensor, /) -> Tensor:
        """See `Step.restore`."""
        with self._watch.timed("restore"):
            return self._step.restore(x)


def watch_blocks(blocks: Iterable[nn.Module], watch: Stopwatch) -> None:
    """Time sharded blocks, forward and backward: "waiting" for other ranks, and their "work".

    The parameters of a block are there when the slowest rank has come so far. Call it after
    `fully_shard`, whose hooks stand between the two. In the backward, what lies between two blocks
    counts as waiting: gradients are reduced there.
    """
    hooks = _BlockHooks(watch)
    for block in blocks:
        block.register_forward_pre_hook(hooks.comes, prepend=True)
        block.register_forward_pre_hook(hooks.begins)
        block.register_forward_hook(hooks.ends, prepend=True)
        block.register_forward_hook(hooks.has_ended)


class _BlockHooks:
    """In the backward, the hooks of a tensor are called in the order in which they were set."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._since: Moment = 0.0
        self._state: Literal["forward", "between", "within"] = "forward"  # .. blocks, in a backward

    def comes(self, *_: Any) -> None:
        self._since, self._state = self._watch.now(), "forward"

    def begins(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        self._since = self._watch.lap("waiting", self._since)
        for x in _with_gradients(args):
            x.register_hook(self._end_backward)

    def ends(self, block: nn.Module, args: object, result: Any) -> None:
        self._watch.lap("work", self._since)
        for x in _with_gradients(result):
            x.register_hook(self._come_backward)

    def has_ended(self, block: nn.Module, args: object, result: Any) -> None:
        for x in _with_gradients(result):
            x.register_hook(self._begin_backward)

    def _come_backward(self, grad: Tensor) -> None:
        if self._state == "forward":  # the first block of the backward
            self._since, self._state = self._watch.now(), "between"

    def _begin_backward(self, grad: Tensor) -> None:
        if self._state == "between":
            self._since, self._state = self._watch.lap("waiting", self._since), "within"

    def _end_backward(self, grad: Tensor) -> None:
        self._since, self._state = self._watch.lap("work", self._since), "between"


def _with_gradients(values: Any) -> list[Tensor]:
    values = values if isinstance(values, tuple) else (values,)
    return [x for x in values if isinstance(x, Tensor) and x.requires_grad]
