"""The phases of a pipeline's call, watched by method and timed: prompts, noise, steps, pixels."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bascule.diffusers.compiling import device_of
from bascule.diffusers.shared_parts import SharedPart
from bascule.stand_in import Override

PHASES = "encode", "denoise", "decode"

TRANSFORMERS = "transformer", "transformer_2", "unconditional_transformer"

_METHODS = {
    "encode": ("", "encode_prompt"),
    "noise": ("", "prepare_latents"),
    "step": ("scheduler", "step"),
    "decode": ("vae", "decode"),
} | {name: (name, "__call__") for name in TRANSFORMERS}

Observer = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]  # name, arguments, output


@contextmanager
def watched(pipeline: Any, observe: Observer) -> Iterator[None]:
    """Observe "encode", "noise", "step", "decode", and calls of the transformers by their names."""

    def around(what: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        observe(what, args, kwargs, output)
        return output

    with ExitStack() as stack:
        for what, (part, name) in _METHODS.items():
            owner = getattr(pipeline, part, None) if part else pipeline
            if getattr(owner, name, None) is not None:
                # Some pipelines take steps with copies of their scheduler.
                one = Override(owner, name, partial(around, what), with_copies=what == "step")
                stack.callback(one.remove)
        yield


def execution_device(pipeline: Any, model: nn.Module) -> torch.device:
    """Return the device on which a pipeline computes and draws, also if weights are offloaded."""
    device = getattr(pipeline, "_execution_device", None)
    if isinstance(device, torch.device) and device.type != "meta":
        return device
    return device_of(model)


@dataclass(slots=True)
class PhaseTimes:
    """Seconds of the phases of the last call of a pipeline, on this rank."""

    begun: float = 0.0  # of one clock, as the next three
    encoded: float = 0.0  # when the noise was drawn
    denoised: float = 0.0  # when the last step ended
    ended: float = 0.0
    num_steps: int = 0  # calls of the scheduler
    num_passes: int = 0  # calls of the transformers, for all branches of guidance

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, after the call."""
        times = self.begun, self.encoded, self.denoised, self.ended
        return {
            phase: after - before
            for phase, before, after in zip(PHASES, times, times[1:], strict=False)
        }


@contextmanager
def timed(pipeline: Any, device: torch.device) -> Iterator[PhaseTimes]:
    """Measure one call of a pipeline, made within; after each step the host waits."""
    times = PhaseTimes()

    def now() -> float:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return time.perf_counter()

    def observe(what: str, *_: Any) -> None:
        if what == "step":
            times.denoised, times.num_steps = now(), times.num_steps + 1
        elif what in TRANSFORMERS:
            times.num_passes += 1
        elif what != "decode" and not times.num_passes:  # some draw again between steps
            times.encoded = times.denoised = now()

    with watched(pipeline, observe):
        times.begun = times.encoded = times.denoised = now()
        try:
            yield times
        finally:
            times.ended = now()


def phase_lines(times: PhaseTimes | None, shared: Sequence[SharedPart]) -> tuple[str, ...]:
    """Describe the phases of the last call: measured seconds, and the work that ranks shared."""
    lines = list[str]()
    for name in PHASES:
        facts = [] if times is None else [f"{times.seconds[name]:.3g} s measured"]
        parts = [one.encoder.last for one in shared if one.phase == name]
        facts += [str(encoding) for encoding in parts if encoding is not None]
        if facts:
            lines.append(f"{name}: {'; '.join(facts)}")
    return tuple(lines)
