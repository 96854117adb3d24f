"""One process against the mesh, block by block: where do they differ first, and by how much."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bascule.attention.mesh import AttentionMesh, SequenceLayout, split
from bascule.attention.sparse import Bools
from bascule.comm.groups import RankGroup, all_gather_single, reporting
from bascule.errors import CommError
from bascule.inference.hooks import SplitModel

# Relative L2; sums of attention are in another order on a mesh.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True, slots=True)
class Verification:
    """Relative L2 errors of a model on a mesh against one process; the same on every rank.

    Attributes:
        blocks: By block and segment, in the order in which they ran.
        outputs: By place in what the model returns.
        tolerance: Largest error that passes; by the dtype of the first output.
    """

    blocks: Mapping[str, float]
    outputs: Mapping[str, float]
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the outputs and all blocks pass."""
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


def verify(part: SplitModel, inputs: Mapping[str, Any]) -> Verification:
    """As `Parallelized.verify`."""
    mesh, group = part.mesh, part.mesh.whole
    if group is not None:
        _check_inputs(inputs, group, next(part.model.parameters()).device)
    wanted: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}

    def keep(name: str, whole: Tensor) -> None:
        whole = _of_first_rank(whole, group)
        stripe = 0 if part.sparse is None else part.sparse.config.dealt
        layout = SequenceLayout((whole.shape[1],), *mesh.degrees, stripe=stripe)
        wanted[name] = split(whole, mesh, layout, 1).clone()

    def compare(name: str, share: Tensor) -> None:
        sums[name] = _squares(share, wanted.pop(name))

    # What is watched would be traced, and broken graphs are errors with fullgraph=True.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        one, several = _two_ways(part)
        with one, _watched(part, keep):
            reference = [_of_first_rank(x, group) for x in _tensors(part.model(**inputs))]
        with several, _watched(part, compare):
            outputs = _tensors(part.model(**inputs))
    for place, (output, whole) in enumerate(zip(outputs, reference, strict=True)):
        sums[f"output {place}"] = _squares(output, whole)
    table = torch.stack(list(sums.values()))
    if group is not None:
        with reporting(group, "all_reduce (verify)", 0):
            dist.all_reduce(table, group=group.process_group)
    errors = (table[:, 0].sqrt() / table[:, 1].sqrt().clamp(min=1e-300)).tolist()
    found = dict(zip(sums, errors, strict=True))
    blocks = {name: error for name, error in found.items() if not name.startswith("output ")}
    return Verification(
        blocks=blocks,
        outputs={name: error for name, error in found.items() if name not in blocks},
        tolerance=_TOLERANCES[outputs[0].dtype],
    )


def _two_ways(part: SplitModel) -> tuple[AbstractContextManager[None], ...]:
    """One process, and the mesh.

    Block-sparse attention in one process is that of a mesh of one rank, and the mesh sees what it
    saw. Neither counts as a step.
    """
    if part.sparse is None:
        return part.paused(), nullcontext()
    seen: dict[int, Bools] = {}
    meshes = AttentionMesh(None, None, None), part.mesh
    one, several = (part.using(part.sparse.noting(mesh, seen)) for mesh in meshes)
    return one, several


@contextmanager
def _watched(part: SplitModel, seen: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `seen` with the name and value of each segment that a block returns."""

    def hook_of(name: str, segments: tuple[str, ...]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for segment, tensor in zip(segments, _tensors(output), strict=True):
                seen(f"{name} ({segment})", tensor)

        return hook

    with ExitStack() as stack:
        for name, (block, segments) in part.blocks.items():
            stack.callback(block.register_forward_hook(hook_of(name, segments)).remove)
        yield


def _squares(found: Tensor, wanted: Tensor) -> Tensor:
    """(2,) squared norms of the difference and of what is wanted."""
    wanted = wanted.double()
    norm = wanted.square().sum()
    if found.shape != wanted.shape:
        return torch.stack([torch.full_like(norm, math.inf), norm])
    return torch.stack([(found.double() - wanted).square().sum(), norm])


def _of_first_rank(x: Tensor, group: RankGroup | None) -> Tensor:
    if group is None:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    with reporting(group, "broadcast (verify)", 0):
        dist.broadcast(x, group.ranks[0], group=group.process_group)
    return x


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    return [value for value in values if isinstance(value, Tensor)]


def _check_inputs(inputs: Mapping[str, Any], group: RankGroup, device: torch.device) -> None:
    """Refuse inputs that are not the same on every rank; two small all-gathers.

    Raises:
        CommError: Names the first that differs.
    """
    leaves = dict(_leaves("", inputs))
    shapes = {
        name: (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x
        for name, x in leaves.items()
    }
    if _differ([_digest(repr(sorted(shapes.items())).encode())], group, device):
        raise CommError(
            "verify: the ranks' inputs differ in names, shapes, dtypes or numbers: give every rank "
            "the same"
        )
    tensors = sorted(name for name, x in leaves.items() if isinstance(x, Tensor))
    data = (leaves[name].detach().cpu().contiguous().flatten() for name in tensors)
    digests = [_digest(x.view(torch.uint8).numpy().tobytes()) for x in data]
    for place in _differ(digests, group, device):
        raise CommError(
            f"verify: the values of {tensors[place]} differ between ranks: give every rank the "
            "same, as by seeding its random numbers alike"
        )


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors, numbers and texts, by path; of anything else only that it is there."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), one)
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from _leaves(f"{name}.{place}", one)
    else:
        is_plain = isinstance(value, Tensor | int | float | str | None)
        yield name, value if is_plain else type(value).__name__


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _differ(values: list[int], group: RankGroup, device: torch.device) -> list[int]:
    """Places at which the ranks' values differ."""
    own = torch.tensor(values, dtype=torch.int64, device=device)
    table = own.new_empty(group.size * own.numel())
    with reporting(group, "all_gather (verify)", 0):
        all_gather_single(table, own, group=group.process_group)
    table = table.view(group.size, -1)
    return (table != table[0]).any(dim=0).nonzero().flatten().tolist()
