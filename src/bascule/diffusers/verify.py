"""Compares a model on a mesh with one process, block by block, and finds the first difference."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bascule.arrays import Bools
from bascule.attention.api import AttentionMesh, split
from bascule.comm.collectives import all_reduce, broadcast
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup, device_of
from bascule.diffusers.arguments import Fingerprint, compare_inputs, parameters_of
from bascule.diffusers.forward_pass import layout_of
from bascule.diffusers.split_model import SplitModel
from bascule.diffusers.split_table import modules_of
from bascule.errors import ConfigError

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True, slots=True)
class Verification:
    """Relative L2 errors of a model on a mesh against one process; the same on every rank.

    Attributes:
        blocks: By block and segment, in the order in which they ran; of a pipeline by phase, and of
            the first step that differs also by block.
        outputs: By place in what the model returns; none of a pipeline.
        tolerance: Largest error that passes; by the dtype of the first output, or of the latents.
    """

    blocks: Mapping[str, float]
    outputs: Mapping[str, float]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Return whether the outputs and all blocks pass."""
        return self.first_difference is None

    @property
    def first_difference(self) -> str | None:
        """The first block, or else output, that does not pass."""
        for name, error in self._errors().items():
            if not error <= self.tolerance:  # nan does not pass
                return name
        return None

    def __str__(self) -> str:
        errors, first = self._errors(), self.first_difference
        said = f"largest relative error {max(errors.values()):.1e}, tolerance {self.tolerance:.0e}"
        if first is None:
            return f"the mesh agrees with one process: {said}"
        return f"the mesh differs from one process, first in {first} ({errors[first]:.1e}): {said}"

    def _errors(self) -> dict[str, float]:
        return {**self.blocks, **self.outputs}


def _check_names(part: SplitModel, inputs: Mapping[str, Any]) -> None:
    kinds = inspect.signature(part.model.forward).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in kinds):
        return
    takes = parameters_of(part.model)
    unknown = [name for name in inputs if name not in takes]
    if unknown:
        raise ConfigError(
            f"verify: a {type(part.model).__name__} takes no {unknown[0]!r}, but {', '.join(takes)}"
            ": for the arguments of a pipeline give it, too, as in handle.verify(pipeline, ..)"
        )


@shared("verify")
def verify(part: SplitModel, inputs: Mapping[str, Any], group: RankGroup | None) -> Verification:
    """As `ParallelHandle.verify`, on each of the meshes that a group of ranks is made of."""
    mesh = part.mesh
    _check_names(part, inputs)
    if part.has_cache:
        raise ConfigError(
            "verify: the model has a cache of steps, which would take each of two passes for a "
            "step: call disable_cache() first"
        )
    if group is not None:
        compare_inputs(Fingerprint.of(inputs, is_exact=True), group, "verify")
    gathered = {name for one in part.table.gathers for name in modules_of(part.model, one)}
    wanted: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}

    def keep(block: str, place: int, whole: Tensor) -> None:
        whole, segment = of_first_rank(whole, group), part.blocks[block][1][place]
        if block not in gathered and isinstance(segment, str):
            stripe = 0 if part.sparse is None else part.sparse.config.dealt
            layout = layout_of({segment: whole.shape[1]}, mesh, part.table, stripe)
            whole = split(whole, mesh, layout, 1)
        wanted[_name_of(part, block, place)] = whole.clone()

    def compare(block: str, place: int, share: Tensor) -> None:
        name, forward = _name_of(part, block, place), part.forward
        whole, segment = wanted.pop(name), part.blocks[block][1][place]
        if block not in gathered and not isinstance(segment, str):  # now lengths are known
            assert forward is not None
            whole = split(whole, mesh, forward.layout(*segment), 1)
        sums[name] = squares(share, whole)

    # What is watched would be traced, and broken graphs are errors with fullgraph=True.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        one, several = _two_ways(part)
        with one, _watched(part, keep):
            reference = [of_first_rank(x, group) for x in _tensors(part.model(**inputs))]
        with several, _watched(part, compare):
            outputs = _tensors(part.model(**inputs))
    for place, (output, whole) in enumerate(zip(outputs, reference, strict=True)):
        sums[f"output {place}"] = squares(output, whole)
    if not outputs:
        raise ConfigError(f"verify: {type(part.model).__name__} returns no tensors")
    found = errors_of(sums, group)
    blocks = {name: error for name, error in found.items() if not name.startswith("output ")}
    return Verification(
        blocks=blocks,
        outputs={name: error for name, error in found.items() if name not in blocks},
        tolerance=tolerance_of(outputs[0].dtype),
    )


def tolerance_of(dtype: torch.dtype) -> float:
    """Largest relative L2 error that passes: sums of attention are in another order on a mesh.

    Raises:
        ConfigError: Nothing is known of this dtype.
    """
    if dtype not in _TOLERANCES:
        raise ConfigError(
            f"verify: the model returns {dtype}, and errors are known of {list(_TOLERANCES)}"
        )
    return _TOLERANCES[dtype]


def errors_of(sums: Mapping[str, Tensor], group: RankGroup | None) -> dict[str, float]:
    """Relative L2 errors by name, from what `squares` gave on each rank; one all-reduce."""
    table = torch.stack(list(sums.values()))
    if group is not None:
        table = all_reduce(group, "all_reduce (verify)", _carried(table, group))
    errors = (table[:, 0].sqrt() / table[:, 1].sqrt().clamp(min=1e-300)).tolist()
    return dict(zip(sums, errors, strict=True))


def _two_ways(part: SplitModel) -> tuple[AbstractContextManager[None], ...]:
    """One process, and the mesh.

    Block-sparse attention in one process is that of a mesh of one rank, and the mesh sees what it
    saw. Neither counts as a step.
    """
    if part.sparse is None:
        return part.paused(), part.over(part.mesh)
    seen: dict[int, Bools] = {}
    meshes = AttentionMesh(None, None, None), part.mesh
    one, several = (part.using(part.sparse.noting(mesh, seen)) for mesh in meshes)
    return one, several


@contextmanager
def _watched(part: SplitModel, seen: Callable[[str, int, Tensor], None]) -> Iterator[None]:
    """Call `seen` with the name of each block, and the place and value of what it returns."""

    def hook_of(name: str, segments: tuple[Any, ...]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            parts = output if isinstance(output, list | tuple) else (output,)
            for place, (_, tensor) in enumerate(zip(segments, parts, strict=bool(segments))):
                if isinstance(tensor, Tensor):  # a last block may have no text to return
                    seen(name, place, tensor)

        return hook

    with ExitStack() as stack:
        for name, (block, segments) in part.blocks.items():
            stack.callback(block.register_forward_hook(hook_of(name, segments)).remove)
        yield


def _name_of(part: SplitModel, block: str, place: int) -> str:
    segments = part.blocks[block][1]
    segment = segments[place]
    again = f", output {place}" if segments.count(segment) > 1 else ""
    return f"{block} ({segment if isinstance(segment, str) else ', '.join(segment)}{again})"


def squares(found: Tensor, wanted: Tensor) -> Tensor:
    """(2,) squared norms of the difference and of what is wanted."""
    wanted = wanted.double()
    norm = wanted.square().sum()
    if found.shape != wanted.shape:
        return torch.stack([torch.full_like(norm, math.inf), norm])
    return torch.stack([(found.double() - wanted).square().sum(), norm])


def of_first_rank(x: Tensor, group: RankGroup | None) -> Tensor:
    """The tensor that the first rank has, on the device of this rank's; a broadcast."""
    if group is None:
        return x
    return broadcast(group, "broadcast (verify)", _carried(x, group)).to(x.device)


def _carried(x: Tensor, group: RankGroup) -> Tensor:
    """A tensor of the host, where the group carries it: NCCL carries none of the host."""
    return x.to(device_of(group)) if x.is_cpu else x


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of what a module returns, in their order."""
    if isinstance(output, Tensor):
        return [output]
    if is_dataclass(output) and not isinstance(output, Mapping | type):
        output = [getattr(output, field.name) for field in fields(output)]
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(values, Iterable) or isinstance(values, str):
        return []
    return [tensor for value in values for tensor in _tensors(value)]
