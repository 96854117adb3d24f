"""What the topics share: what they are given, what they find, and how they time."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from measuring import Timer, time_interleaved, wall_seconds

CASE_S = 10.0
"""About how long the rounds of a case take, besides warm-ups."""

LEAST_S = 0.005
"""Short calls are repeated for about so long in each round."""

FEWEST, MOST = 5, 21
"""Rounds of a case."""

_AHEAD_CYCLES = 2_000_000
"""Of a GPU that waits about a millisecond, in which the host queues what is timed."""


@dataclass(frozen=True, slots=True)
class Card:
    """What the device was measured to do at best.

    Attributes:
        copy_bytes_per_s: Bytes read and written by a copy within its memory.
        matmul_flops_per_s: Of a product of large matrices, in the dtype of the topics.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float


@dataclass(frozen=True, slots=True)
class Setting:
    """What a topic is given.

    Attributes:
        device: Where everything is measured.
        is_tiny: Whether widths and lengths are only large enough to run the code.
        card: What the device does at best; None while that is measured.
    """

    device: torch.device
    is_tiny: bool
    card: Card | None = None

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return torch.bfloat16 if self.on_cuda else torch.float32

    @property
    def best(self) -> Card:
        """What the device does at best."""
        assert self.card is not None
        return self.card

    def pick(self, full: Any, tiny: Any) -> Any:
        """One of two sizes."""
        return tiny if self.is_tiny else full

    def compile(self, call: Any, **options: Any) -> Any:
        """A compiled function or module; without a GPU its graphs are captured, and run as is."""
        return torch.compile(call, backend="inductor" if self.on_cuda else "eager", **options)


@dataclass(frozen=True, slots=True)
class Target:
    """What is wished of a number."""

    bound: float
    at_least: bool = True

    def is_met(self, value: float) -> bool:
        """Whether a number is as wished."""
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """A number that a topic found, or why there is none.

    Attributes:
        what: What was measured.
        unit: Of the number.
        value: The number, a median where there are rounds.
        quartiles: Of the rounds, the lower and the upper one.
        target: What is wished, if anything.
        details: What else was found.
        reason: Why it was left out, or failed.
    """

    what: str
    unit: str = ""
    value: float | None = None
    quartiles: tuple[float, float] | None = None
    target: Target | None = None
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reason: str | None = None

    @classmethod
    def of(
        cls,
        what: str,
        unit: str,
        values: Sequence[float],
        target: Target | None = None,
        **details: Any,
    ) -> "Row":
        """Median and quartiles of some rounds."""
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(what, unit, middle, (low, high), target, details)

    @property
    def is_met(self) -> bool | None:
        """Whether the target is; None without one."""
        if self.target is None or self.value is None:
            return None
        return self.target.is_met(self.value)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        if self.reason is not None:
            return {"what": self.what, "reason": self.reason}
        target = self.target
        return {
            "what": self.what,
            "unit": self.unit,
            "value": self.value,
            "quartiles": self.quartiles,
            "target": None if target is None else target.bound,
            "at_least": None if target is None else target.at_least,
            "is_met": self.is_met,
            **self.details,
        }


@dataclass(frozen=True, slots=True)
class Case:
    """A part of a topic: what fails in one leaves the others alone."""

    what: str
    measure: Callable[[], Iterable[Row]]


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a call of each candidate in each round; and why others do not run."""

    seconds: Mapping[str, list[float]]
    failed: Mapping[str, str]

    def median(self, name: str) -> float:
        """Seconds of a call."""
        return statistics.median(self.seconds[name])

    def fastest(self, names: Iterable[str]) -> str | None:
        """Which of some candidates takes least; None if none of them runs."""
        return min((n for n in names if n in self.seconds), key=self.median, default=None)

    def reasons(self, label: str) -> list[Row]:
        """A row for each candidate that does not run."""
        return [Row(f"{label}, {name}", reason=reason) for name, reason in self.failed.items()]


def timed(
    setting: Setting, candidates: Mapping[str, Callable[[], object]], *, queued: bool = False
) -> Timed:
    """Time calls in interleaved rounds, after two warm-up calls of each.

    Args:
        setting: Says on which device; there events time, not the clock of the host.
        candidates: What is timed.
        queued: Whether the host queues the calls before the device begins, so that only the time
            of kernels counts.
    """
    timer = timer_of(setting, queued=queued)
    runnable, failed, least = {}, {}, {}
    for name, call in candidates.items():
        try:
            call()
            call()
            least[name] = timer(call, 1)
            runnable[name] = call
        except Exception as error:  # of whatever candidate: the others are measured
            failed[name] = told(error)
        if name in failed and setting.on_cuda:
            torch.cuda.empty_cache()
    if not runnable:
        return Timed({}, failed)
    calls = int(max(1.0, min(50.0, LEAST_S / max(max(least.values()), 1e-9))))
    rounds = int(max(FEWEST, min(MOST, CASE_S / (sum(least.values()) * calls))))
    if setting.is_tiny:
        calls, rounds = 1, 3
    found = time_interleaved(runnable, rounds=rounds, calls=calls, timer=timer)
    return Timed(found, failed)


def timer_of(setting: Setting, *, queued: bool) -> Timer:
    """By events on a GPU, else by the clock of the host."""
    if not setting.on_cuda:
        return wall_seconds

    def event_seconds(call: Callable[[], object], calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if queued:
            torch.cuda._sleep(_AHEAD_CYCLES)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls

    return event_seconds


def told(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"
