"""Time the parts of a step on this rank: by the host's clock, on CUDA by events."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bascule.calibrate.timed import Moment, moment, seconds_between


class Stopwatch:
    """Adds up the seconds of the parts of a step; only `read` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: list[tuple[str, Moment, Moment]] = []  # part, begin, end

    def now(self) -> Moment:
        """Return this moment, on the device."""
        return moment(self._device)

    def lap(self, name: str, start: Moment) -> Moment:
        """End a part that began at `start`; return the moment of its end."""
        end = self.now()
        self._laps.append((name, start, end))
        return end

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the enclosed code, or the decorated function, as a part."""
        start = self.now()
        yield
        self.lap(name, start)

    def read(self) -> dict[str, float]:
        """Return the seconds of each part since the last call; wait for the device."""
        seconds, laps, self._laps = defaultdict[str, float](float), self._laps, []
        for name, start, end in laps:
            seconds[name] += seconds_between(start, end)
        return seconds


def watch_blocks(blocks: Iterable[nn.Module], watch: Stopwatch) -> None:
    """Time sharded blocks: their "work", and "waiting" for parameters and for sums of gradients.

    Call it after `fully_shard`: FSDP's hooks then run between the first and last hooks of a block.
    """
    hooks = _BlockHooks(watch)
    for block in blocks:
        block.register_forward_pre_hook(hooks.before_gather, prepend=True)
        block.register_forward_pre_hook(hooks.begin)
        block.register_forward_hook(hooks.end, prepend=True)
        block.register_forward_hook(hooks.after_reshard)


class _BlockHooks:
    """Hooks of blocks; hooks of a tensor run in the backward, in the order of registration."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._since: Moment = 0.0
        self._place: Literal["forward", "between blocks", "in a block"] = "forward"

    def before_gather(self, *_: Any) -> None:
        self._since, self._place = self._watch.now(), "forward"

    def begin(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        self._since = self._watch.lap("waiting", self._since)
        for tensor in _with_gradients(args):
            tensor.register_hook(self._end_backward)

    def end(self, block: nn.Module, args: object, result: Any) -> None:
        self._watch.lap("work", self._since)
        for tensor in _with_gradients(result):
            tensor.register_hook(self._start_backward)

    def after_reshard(self, block: nn.Module, args: object, result: Any) -> None:
        for tensor in _with_gradients(result):
            tensor.register_hook(self._begin_backward)

    def _start_backward(self, grad: Tensor) -> None:
        if self._place == "forward":  # the last block of the model
            self._since, self._place = self._watch.now(), "between blocks"

    def _begin_backward(self, grad: Tensor) -> None:
        if self._place == "between blocks":
            self._since = self._watch.lap("waiting", self._since)
            self._place = "in a block"

    def _end_backward(self, grad: Tensor) -> None:
        self._since, self._place = self._watch.lap("work", self._since), "between blocks"


def _with_gradients(values: Any) -> list[Tensor]:
    values = values if isinstance(values, tuple) else (values,)
    return [x for x in values if isinstance(x, Tensor) and x.requires_grad]
