"""The phases of a pipeline's call: what each gives, and its seconds.

A pipeline encodes its prompts, draws noise, takes denoising steps and decodes pixels. Each of these
is one method of the pipeline, of its scheduler or of its VAE; while it is watched, another one is
in the method's place. Pipelines without one of them have no such phase.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from bascule.diffusers.compiling import device_of
from bascule.diffusers.shared_parts import SharedPart
from bascule.encoders.plan import Encoding

PHASES = "encode", "denoise", "decode"
"""Of a pipeline's call: prompts and noise; all steps; from latents to pixels."""

TRANSFORMERS = "transformer", "transformer_2", "unconditional_transformer"
"""What a pipeline of diffusers may call its models; Ideogram 4 guides with one of its own."""

_OF_PIPELINE = {"encode": "encode_prompt", "noise": "prepare_latents"}
_OF_PARTS = {"scheduler": ("step", "step"), "vae": ("decode", "decode")} | {
    name: (name, "__call__") for name in TRANSFORMERS
}

Seen = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]
"""Takes what ran, its arguments by place and by name, and what it gave."""


@contextmanager
def watched(pipeline: Any, seen: Seen) -> Iterator[None]:
    """Call `seen` as "encode", "noise", "step", "decode", or a call of a transformer ends.

    Args:
        pipeline: Of diffusers; as before afterwards.
        seen: Gets transformers by their names in the pipeline.
    """
    with ExitStack() as stack:
        for what, name in _OF_PIPELINE.items():
            if (method := getattr(pipeline, name, None)) is not None:
                stack.callback(put(pipeline, name, _seeing(what, seen, method)))
        for part, (what, name) in _OF_PARTS.items():
            if (of := getattr(pipeline, part, None)) is not None:
                stack.callback(
                    put(pipeline, part, standing_in(of, name, partial(_seeing, what, seen)))
                )
        yield


def execution_device(pipeline: Any, model: nn.Module) -> torch.device:
    """Where a pipeline computes now; where its model is, if it does not say.

    Offloaded weights are on the host, or nowhere, until they are needed; the pipeline draws where
    they will be.
    """
    said = getattr(pipeline, "_execution_device", None)
    return said if isinstance(said, torch.device) and said.type != "meta" else device_of(model)


def _seeing(what: str, seen: Seen, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)  # pipelines look at signatures
    def call(*args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        seen(what, args, kwargs, output)
        return output

    return call


def put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; what is returned gives back the one before, be it of the class."""
    had, was_own = getattr(owner, name), name in {**vars(owner), **vars(owner).get("_modules", {})}
    setattr(owner, name, value)
    return lambda: setattr(owner, name, had) if was_own else delattr(owner, name)


def standing_in(
    of: Any,
    name: str,
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
    *,
    has_copies: bool = True,
) -> Any:
    """Another object of the same state, one of whose methods is what `around` makes of it.

    Args:
        of: Stays as it is.
        name: Of the method.
        around: Gives what is called in place of the method.
        has_copies: Whether copies of it have that method, too; else they have that of `of`.
    """
    cls = type(of)

    @wraps(getattr(cls, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(of if self is stand_in else super(made, self), name)
        changes = has_copies or self is stand_in
        return (around(own) if changes else own)(*args, **kwargs)

    made: Any = type(cls.__name__, (cls,), {"__module__": cls.__module__, name: call})
    stand_in = object.__new__(made)
    stand_in.__dict__ = vars(of)
    return stand_in


@dataclass(slots=True)
class PhaseTimes:
    """Seconds of the phases of the last call of a pipeline, on this rank.

    Attributes:
        begun: When the call began; all four in seconds of one clock.
        encoded: When its prompts were encoded and its noise was drawn.
        denoised: When its last step had ended.
        ended: When its pixels were decoded and put together.
        num_steps: Calls of the scheduler.
        num_passes: Calls of its transformers, for all branches of guidance.
    """

    begun: float = 0.0
    encoded: float = 0.0
    denoised: float = 0.0
    ended: float = 0.0
    num_steps: int = 0
    num_passes: int = 0

    @property
    def seconds(self) -> dict[str, float]:
        """By phase, after the call."""
        times = self.begun, self.encoded, self.denoised, self.ended
        return {
            phase: after - before
            for phase, before, after in zip(PHASES, times, times[1:], strict=False)
        }


@contextmanager
def timed(pipeline: Any, device: torch.device) -> Iterator[PhaseTimes]:
    """Measure one call of a pipeline, made within.

    Between phases, and after each step, the host waits for the device.

    Args:
        pipeline: Of diffusers.
        device: Where it computes.
    """
    times = PhaseTimes()

    def now() -> float:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return time.perf_counter()

    def seen(what: str, _: tuple[Any, ...], __: dict[str, Any], ___: object) -> None:
        if what == "step":
            times.denoised, times.num_steps = now(), times.num_steps + 1
        elif what in TRANSFORMERS:
            times.num_passes += 1
        elif what in _OF_PIPELINE and not times.num_passes:  # some draw again between steps
            times.encoded = times.denoised = now()

    with watched(pipeline, seen):
        times.begun = times.encoded = times.denoised = now()
        try:
            yield times
        finally:
            times.ended = now()


@dataclass(frozen=True, slots=True)
class Phase:
    """What is known of a phase of a pipeline's last call.

    Attributes:
        name: "encode", "denoise" or "decode".
        seconds: Measured on this rank; None if nobody did.
        moved: By the encoders whose work ranks share in it; None for one that was not called.
    """

    name: str
    seconds: float | None = None
    moved: tuple[Encoding | None, ...] = ()

    @property
    def is_known(self) -> bool:
        """Return whether there is something to tell."""
        return self.seconds is not None or any(one is not None for one in self.moved)

    def __str__(self) -> str:
        measured = [] if self.seconds is None else [f"{self.seconds:.3g} s measured"]
        moved = [str(one) for one in self.moved if one is not None]
        return f"{self.name}: {'; '.join(measured + moved)}"


def phases_of(times: PhaseTimes | None, shared: Sequence[SharedPart]) -> tuple[Phase, ...]:
    """The phases of which something is known.

    Args:
        times: Of the last call that was measured.
        shared: What ranks share besides the models.
    """
    found = (
        Phase(
            name,
            None if times is None else times.seconds[name],
            tuple(one.encoder.last for one in shared if one.phase == name),
        )
        for name in PHASES
    )
    return tuple(one for one in found if one.is_known)
