"""Compare a model over ranks with one process block by block, and a pipeline phase by phase."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bascule.arrays import Bools
from bascule.attention import api
from bascule.attention.api import AttentionMesh
from bascule.comm.collectives import all_reduce, broadcast
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup, device_of
from bascule.comm.items import leaves_of, mapped
from bascule.diffusers.arguments import Fingerprint, compare_inputs, parameters_of
from bascule.diffusers.forward_pass import layout_of
from bascule.diffusers.pipeline_run import (
    TRANSFORMERS,
    execution_device,
    generators_of,
    random_states,
    set_random_states,
    watched,
)
from bascule.diffusers.split_model import SplitModel, Way
from bascule.diffusers.split_table import Cut, modules_of
from bascule.errors import ConfigError
from bascule.quantities import number
from bascule.stand_in import as_in_use, module_of

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative L2 errors that pass, by dtype: a mesh sums attention in another order."""
_ROUNDED_TOLERANCE = 0.1  # passes in a check of a table if rows are 8-bit or inputs may differ


@dataclass(frozen=True, slots=True)
class Verification:
    """Relative L2 errors of a model on a mesh against one process; the same on every rank.

    Attributes:
        blocks: Errors by block and segment, in the order of the run; for a pipeline, by phase, and
            by block in the first step that differs.
        outputs: Errors by place in the output of the model; empty for a pipeline.
        tolerance: Largest error that passes, by the dtype of the first output or the latents.
    """

    blocks: Mapping[str, float]
    outputs: Mapping[str, float]
    tolerance: float

    @property
    def ok(self) -> bool:
        """True if the outputs and all blocks pass."""
        return self.first_difference is None

    @property
    def first_difference(self) -> str | None:
        """The first block that does not pass, then the first output."""
        # nan does not pass
        return next((name for name, x in self.errors.items() if not x <= self.tolerance), None)

    @property
    def errors(self) -> dict[str, float]:
        """Errors of blocks and outputs."""
        return {**self.blocks, **self.outputs}

    def __str__(self) -> str:
        errors, first = self.errors, self.first_difference
        largest, most = number(max(errors.values())), number(self.tolerance)
        worst = f"largest relative error {largest}, tolerance {most}"
        if first is None:
            return f"the mesh agrees with one process: {worst}"
        where = f"{first} ({number(errors[first])})"
        return f"the mesh differs from one process, first in {where}: {worst}"


@shared("verify")
def verify(split: SplitModel, inputs: Mapping[str, Any], group: RankGroup | None) -> Verification:
    """Compare a model with one process, on all meshes of the ranks of a group."""
    if split.has_cache:
        raise ConfigError("verify: the model uses a step cache: call disable_cache() first")
    if group is not None:
        compare_inputs(Fingerprint.of(inputs), group, "verify")
    was_checked, split.is_checked = split.is_checked, True  # calls within need no check
    try:
        result = _compare(split, partial(split.model, **inputs), group, by_block=True)
        was_checked = was_checked or _relaxed(split, result).ok
    finally:
        split.is_checked = was_checked
    return result


def check_table(split: SplitModel, run: Callable[[], Any]) -> None:
    """Compare the first call of a model with one process, if its table is none of bascule's.

    Raises:
        ConfigError: The table does not fit; the error names the first block that differs, or the
            module that failed.
    """
    assert split.way is not None
    group, kind = split.way.mesh.whole, type(split.model).__name__
    advice = "see docs/sequence_parallel.md (Adding a table)"

    with as_in_use(split.model):
        alone, together = _alone_and_together(split)
        try:
            with together, torch.no_grad():
                run()
        except ConfigError:
            raise
        except Exception as error:
            with alone, torch.no_grad():
                run()  # raises if the error is not the table's
            where, reason = module_of(error, split.model), " ".join(str(error).split())[:200]
            raise ConfigError(
                f"the table of {kind} does not fit: over ranks {where or kind} raised "
                f"{type(error).__name__}: {reason}; {advice}"
            ) from error
        for by_block in (False, True):  # only a difference is worth the memory of all blocks
            result = _relaxed(split, _compare(split, run, group, by_block=by_block))
            if result.ok:
                return
    first = result.first_difference
    assert first is not None
    raise ConfigError(
        f"the table of {kind} does not fit: over ranks {first} differs from one process by "
        f"{number(result.errors[first])} of its norm, limit {number(result.tolerance)}; {advice}"
    )


def _relaxed(split: SplitModel, result: Verification) -> Verification:
    """Relax the tolerance if rows are 8-bit or inputs may differ."""
    is_exact = split.options.wire is None and split.inputs.tolerance == 0
    return result if is_exact else replace(result, tolerance=_ROUNDED_TOLERANCE)


def _compare(
    split: SplitModel, run: Callable[[], Any], group: RankGroup | None, *, by_block: bool
) -> Verification:
    """Compare a call's outputs with one process, and with `by_block` the outputs of all blocks."""
    assert split.way is not None
    mesh, layers = split.way.mesh, split.way.sparse
    gathered = {name for gather in split.table.gathers for name in modules_of(split.model, gather)}
    expected: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}

    def is_gathered(block: str, place: int) -> bool:
        return block in gathered and place == 0

    def save(block: str, place: int, whole: Tensor) -> None:
        whole, cut = of_first_rank(whole, group), _cut_of(split, block, place)
        if not is_gathered(block, place) and isinstance(cut.segment, str):
            lengths = {cut.segment: whole.shape[cut.dim]}
            layout = layout_of(lengths, mesh, split.table, layers)
            whole = api.split(whole, mesh, layout, cut.dim)
        expected[_name_of(split, block, place)] = whole.clone()

    def compare(block: str, place: int, share: Tensor) -> None:
        name, forward = _name_of(split, block, place), split.forward
        whole, cut = expected.pop(name), _cut_of(split, block, place)
        if not is_gathered(block, place) and not isinstance(cut.segment, str):
            assert forward is not None  # the pass has all lengths by now
            whole = api.split(whole, mesh, forward.share(cut.segment).layout, cut.dim)
        sums[name] = _squares(share, whole)

    # A compiled model would trace the hooks, and break its graph.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        alone, together = _alone_and_together(split)
        with alone, _observed(split, save) if by_block else nullcontext():
            reference = [of_first_rank(x, group) for x in leaves_of(run())]
        with together, _observed(split, compare) if by_block else nullcontext():
            outputs = leaves_of(run())
    if not outputs:
        if by_block:
            raise ConfigError(f"verify: {type(split.model).__name__} returns no tensors")
        return Verification({}, {}, 0.0)
    results = {
        f"output {place}": _squares(output, whole)
        for place, (output, whole) in enumerate(zip(outputs, reference, strict=True))
    }
    errors = errors_of(sums | results, group)
    return Verification(
        blocks={name: error for name, error in errors.items() if name not in results},
        outputs={name: error for name, error in errors.items() if name in results},
        tolerance=_tolerance_of(outputs[0].dtype),
    )


def _alone_and_together(split: SplitModel) -> tuple[AbstractContextManager[None], ...]:
    """Return two scopes: in the first the model runs in one process, in the second on the mesh."""
    way = split.way
    assert way is not None
    if way.sparse is None:
        return split.taking(None), split.taking(replace(way, compares=False))
    masks: dict[int, Bools] = {}  # recorded on one rank, replayed on the mesh
    meshes = AttentionMesh(None, None, None), way.mesh
    states = [way.sparse.replaying(mesh, masks) for mesh in meshes]
    return tuple([split.taking(Way(state.mesh, state, compares=False)) for state in states])


@contextmanager
def _observed(split: SplitModel, observe: Callable[[str, int, Tensor], None]) -> Iterator[None]:
    """Call `observe` with the name of each block, and the place and value of each output."""

    def hook_of(name: str, segments: tuple[Any, ...]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, list | tuple) else (output,)
            for place, (_, tensor) in enumerate(zip(segments, outputs, strict=bool(segments))):
                if isinstance(tensor, Tensor):  # a last block may have no text to return
                    observe(name, place, tensor)

        return hook

    with ExitStack() as stack:
        for name, (block, segments) in split.blocks.items():
            stack.callback(block.register_forward_hook(hook_of(name, segments)).remove)
        yield


def _cut_of(split: SplitModel, block: str, place: int) -> Cut:
    output = split.blocks[block][1][place]
    return output if isinstance(output, Cut) else Cut(output)


def _name_of(split: SplitModel, block: str, place: int) -> str:
    """Name an output of a block by its segments, and by its place if another has the same."""
    outputs = split.blocks[block][1]
    again = f", output {place}" if outputs.count(outputs[place]) > 1 else ""
    return f"{block} ({', '.join(_cut_of(split, block, place).segments)}{again})"


def _tolerance_of(dtype: torch.dtype) -> float:
    if dtype not in _TOLERANCES:
        raise ConfigError(f"verify: the model returns {dtype}: return one of {list(_TOLERANCES)}")
    return _TOLERANCES[dtype]


def _squares(x: Tensor, expected: Tensor) -> Tensor:
    """Return (2,) squared norms: of the difference, and of the expected values."""
    expected = expected.double()
    norm = expected.square().sum()
    if x.shape != expected.shape:
        return torch.stack([torch.full_like(norm, math.inf), norm])
    return torch.stack([(x.double() - expected).square().sum(), norm])


def errors_of(sums: Mapping[str, Tensor], group: RankGroup | None) -> dict[str, float]:
    """Return relative L2 errors over all ranks by name, from squared norms; one all-reduce."""
    table = torch.stack(list(sums.values()))
    if group is not None:
        table = all_reduce(group, "all_reduce (verify)", _carried(table, group))
    errors = (table[:, 0].sqrt() / table[:, 1].sqrt().clamp(min=1e-300)).tolist()
    return dict(zip(sums, errors, strict=True))


def of_first_rank(x: Tensor, group: RankGroup | None) -> Tensor:
    """Broadcast the first rank's tensor, to the device of this rank's tensor."""
    if group is None:
        return x
    return broadcast(group, "broadcast (verify)", _carried(x, group)).to(x.device)


def _carried(x: Tensor, group: RankGroup) -> Tensor:
    """Return the tensor on the device of the group: NCCL sends no tensors of the host."""
    return x.to(device_of(group)) if x.is_cpu else x


_Pass = tuple[str, tuple[Any, ...], dict[str, Any]]  # name of a transformer, and arguments


@dataclass(slots=True)
class _Run:
    """The tensors of a pipeline's call."""

    outputs: dict[str, list[Tensor]] = field(default_factory=dict[str, list[Tensor]])  # by phase
    passes: dict[str, list[_Pass]] = field(default_factory=dict[str, list[_Pass]])  # by step
    num_steps: int = 0

    def observe(self, part: str, args: Any, kwargs: Any, output: Any) -> None:
        """Record a call of a transformer, or the outputs of another part of the pipeline."""
        if part in TRANSFORMERS:
            step = f"step {self.num_steps + 1}"
            self.passes.setdefault(step, []).append((part, args, kwargs))
            return
        self.num_steps += part == "step"
        name = f"{part} {self.num_steps}" if part == "step" else part
        leaves = [leaf.detach().clone() for leaf in leaves_of(output)]
        self.outputs.setdefault(name, []).extend(leaves)


@dataclass(frozen=True, slots=True)
class PipelineComparison:
    """Compares a pipeline over ranks with one process."""

    pipeline: Any
    splits: Sequence[SplitModel]  # the pipeline's transformers
    group: RankGroup | None  # the ranks of the replica; None: one rank
    alone: Callable[[], AbstractContextManager[None]]  # a scope in which this rank shares nothing
    has_pixels: bool  # whether this rank gets the pixels
    verify_model: Callable[..., Verification]  # `ParallelHandle.verify`, of a transformer

    @shared("verify")
    def verify(self, arguments: Mapping[str, Any]) -> Verification:
        """Compare all phases of one call, and the blocks of the first step that differs."""
        for split in self.splits:
            if split.sparse is not None or split.has_cache:
                raise ConfigError(
                    f"verify: {type(split.model).__name__} is block-sparse or has a cache: verify "
                    "it alone, as handle.verify(pipeline.transformer, ..), or call disable_cache()"
                )
        if self.group is not None:
            compare_inputs(Fingerprint.of(arguments), self.group, "verify")
        alone, together = self._run_twice(arguments)
        sums = {
            name: self._squares_of(name, expected, together.outputs.get(name, []))
            for name, expected in alone.outputs.items()
            if expected
        }
        errors = errors_of(sums, self.group)
        latents = alone.outputs.get("step 1") or next(iter(alone.outputs.values()))
        phases = Verification(errors, {}, _tolerance_of(latents[0].dtype))
        first = phases.first_difference
        if first is None or first not in alone.passes:
            return phases
        blocks = self._errors_of_blocks(first, alone)
        detailed = dict[str, float]()
        for name, error in errors.items():
            detailed |= (blocks if name == first else {}) | {name: error}
        return Verification(detailed, {}, phases.tolerance)

    def _run_twice(self, arguments: Mapping[str, Any]) -> tuple[_Run, _Run]:
        """Run in one process and over ranks from the same noise; restore the random states."""
        device = execution_device(self.pipeline, self.splits[0].model)
        generators = generators_of(arguments)
        states = random_states(device, generators)
        alone, together = _Run(), _Run()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            try:
                with self.alone(), watched(self.pipeline, alone.observe):
                    self.pipeline(**arguments)
                set_random_states(device, generators, states)
                with watched(self.pipeline, together.observe):
                    self.pipeline(**arguments)
            finally:
                set_random_states(device, generators, states)
        return alone, together

    def _squares_of(self, name: str, expected: Sequence[Tensor], local: Sequence[Tensor]) -> Tensor:
        wholes = [of_first_rank(x, self.group) for x in expected]
        if name == "decode" and not self.has_pixels:
            local = wholes
        if len(local) != len(wholes):
            local = [x.new_empty(0) for x in wholes]
        pairs = zip(local, wholes, strict=True)
        return sum((_squares(x, y).cpu() for x, y in pairs), torch.zeros(2, dtype=torch.float64))

    def _errors_of_blocks(self, step: str, run: _Run) -> dict[str, float]:
        """Return errors by block, up to the step's first pass that differs."""
        blocks = dict[str, float]()
        for part, args, kwargs in run.passes[step]:
            model: nn.Module = getattr(self.pipeline, part)
            inputs = dict(zip(parameters_of(model), args, strict=False)) | kwargs
            inputs = mapped(inputs, lambda x: of_first_rank(x, self.group))
            result = self.verify_model(model, **inputs)
            blocks |= {f"{step}, {part}: {name}": error for name, error in result.errors.items()}
            if not result.ok:
                break
        return blocks
