"""Compares a pipeline over ranks with one process, phase by phase: the first that differs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup
from bascule.comm.items import leaves_of, mapped
from bascule.diffusers.arguments import Fingerprint, compare_inputs, parameters_of
from bascule.diffusers.phases import (
    TRANSFORMERS,
    execution_device,
    watched,
)
from bascule.diffusers.pipeline_run import (
    generators_of,
    random_states,
    set_random_states,
)
from bascule.diffusers.split_model import SplitModel
from bascule.diffusers.verify import (
    Verification,
    errors_of,
    of_first_rank,
    squares,
    tolerance_of,
)
from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TwoWays:
    """A pipeline, and how it runs in one process and over ranks.

    Attributes:
        pipeline: Of diffusers, over the ranks.
        parts: Its transformers.
        group: The ranks of the replica; None for one.
        alone: Within it this rank shares nothing.
        has_pixels: Whether this rank gets the pixels.
        verify: Compares a transformer; as `ParallelHandle.verify`.
    """

    pipeline: Any
    parts: Sequence[SplitModel]
    group: RankGroup | None
    alone: Callable[[], AbstractContextManager[None]]
    has_pixels: bool
    verify: Callable[..., Verification]


@dataclass(slots=True)
class _Run:
    """What a call of a pipeline did.

    Attributes:
        gave: Tensors by phase, in the order in which the phases ended.
        passes: By step, the transformers that were called for it, and their arguments.
        num_steps: How many there were.
    """

    gave: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])
    passes: dict[str, list[tuple[str, tuple[Any, ...], dict[str, Any]]]] = field(
        default_factory=dict[str, list[tuple[str, tuple[Any, ...], dict[str, Any]]]]
    )
    num_steps: int = 0

    def see(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if what in TRANSFORMERS:
            step = f"step {self.num_steps + 1}"
            self.passes.setdefault(step, []).append((what, args, kwargs))
            return
        self.num_steps += what == "step"
        name = f"{what} {self.num_steps}" if what == "step" else what
        kept = self.gave.setdefault(name, [])
        kept += [leaf.detach().clone() for leaf in leaves_of(output)]


@shared("verify")
def verify_pipeline(ways: TwoWays, arguments: Mapping[str, Any]) -> Verification:
    """As `ParallelHandle.verify`, of a pipeline.

    Raises:
        ConfigError: It keeps something from step to step, or gives nothing to compare.
        CommError: The ranks' arguments differ.
    """
    for part in ways.parts:
        if part.sparse is not None or part.has_cache:
            raise ConfigError(
                f"verify: a {type(part.model).__name__} with block-sparse attention or a cache of "
                "steps computes other things in one process: verify the model alone, as in "
                "handle.verify(pipeline.transformer, ..), or call disable_cache() first"
            )
    if ways.group is not None:
        compare_inputs(Fingerprint.of(arguments, is_exact=True), ways.group, "verify")
    one, several = _both(ways, arguments)
    sums = {
        name: _squares_of(ways, name, wanted, several.gave.get(name, []))
        for name, wanted in one.gave.items()
        if wanted
    }
    if not sums:
        raise ConfigError(
            f"verify: a {type(ways.pipeline).__name__} has no phase that is known: verify its "
            "model alone, as in handle.verify(pipeline.transformer, ..)"
        )
    errors = errors_of(sums, ways.group)
    latents = one.gave.get("step 1") or next(iter(one.gave.values()))
    tolerance = tolerance_of(latents[0].dtype)
    first = Verification(errors, {}, tolerance).first_difference
    if first is None or first not in one.passes:
        return Verification(errors, {}, tolerance)
    blocks = _blocks_of(ways, first, one)
    found = dict[str, float]()
    for name, error in errors.items():
        found |= (blocks if name == first else {}) | {name: error}
    return Verification(found, {}, tolerance)


def _both(ways: TwoWays, arguments: Mapping[str, Any]) -> tuple[_Run, _Run]:
    """In one process and over ranks, from the same noise, which is there again afterwards."""
    given, device = generators_of(arguments), execution_device(ways.pipeline, ways.parts[0].model)
    states = random_states(device, given)
    one, several = _Run(), _Run()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            with ways.alone(), watched(ways.pipeline, one.see):
                ways.pipeline(**arguments)
            set_random_states(device, given, states)
            with watched(ways.pipeline, several.see):
                ways.pipeline(**arguments)
        finally:
            set_random_states(device, given, states)
    return one, several


def _squares_of(
    ways: TwoWays, name: str, wanted: Sequence[Tensor], found: Sequence[Tensor]
) -> Tensor:
    """As `squares`, of what a phase gave; nothing of pixels that this rank does not get."""
    whole = [of_first_rank(x, ways.group) for x in wanted]
    if name == "decode" and not ways.has_pixels:
        found = whole
    if len(found) != len(whole):
        found = [x.new_empty(0) for x in whole]
    each = [squares(x, y).cpu() for x, y in zip(found, whole, strict=True)]  # of any devices
    return torch.stack(each).sum(dim=0)


def _blocks_of(ways: TwoWays, step: str, one: _Run) -> dict[str, float]:
    """Errors of the blocks of the first pass of a step that differs; of all where none does."""
    blocks = dict[str, float]()
    for what, args, kwargs in one.passes[step]:
        model: nn.Module = getattr(ways.pipeline, what)
        inputs = dict(zip(parameters_of(model), args, strict=False)) | kwargs
        inputs = mapped(inputs, lambda x: of_first_rank(x, ways.group))
        found = ways.verify(model, **inputs)
        errors = {**found.blocks, **found.outputs}
        blocks |= {f"{step}, {what}: {name}": error for name, error in errors.items()}
        if not found.ok:
            break
    return blocks
