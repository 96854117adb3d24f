"""Compares a model on a mesh with one process, block by block, and finds the first difference."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bascule.attention.api import AttentionMesh, SequenceLayout, split
from bascule.attention.sparse.block_sparse import Bools
from bascule.comm.agree import Statement, agree
from bascule.comm.groups import RankGroup
from bascule.comm.guard.calls import Call
from bascule.comm.guard.failures import told
from bascule.comm.transfers import all_reduce, as_bytes, broadcast
from bascule.errors import CommError, ConfigError
from bascule.integrations.diffusers.hooks import SplitModel

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_NUM_INPUTS = 32
"""Tensors whose digests fit into the first all-gather."""


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


@told("verify")
def verify(part: SplitModel, inputs: Mapping[str, Any]) -> Verification:
    """As `Parallelized.verify`."""
    mesh, group = part.mesh, part.mesh.whole
    if part.has_cache:
        raise ConfigError(
            "verify: the model has a cache of steps, which would take each of two passes for a "
            "step: call disable_cache() first"
        )
    if group is not None:
        _check_inputs(inputs, group)
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
    if not outputs:
        raise ConfigError(f"verify: {type(part.model).__name__} returns no tensors")
    table = torch.stack(list(sums.values()))
    if group is not None:
        table = all_reduce(group, Call("all_reduce (verify)"), table)
    errors = (table[:, 0].sqrt() / table[:, 1].sqrt().clamp(min=1e-300)).tolist()
    found = dict(zip(sums, errors, strict=True))
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
    return x if group is None else broadcast(group, Call("broadcast (verify)"), x)


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


def _check_inputs(inputs: Mapping[str, Any], group: RankGroup) -> None:
    """Refuse inputs that are not the same on every rank; one small all-gather.

    Raises:
        CommError: Names the first that differs.
    """
    leaves = sorted(_leaves("", inputs), key=lambda leaf: leaf[0])
    said = [
        f"{name} {tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else f"{name} {x!r}"
        for name, x in leaves
    ]
    tensors = {name: x for name, x in leaves if isinstance(x, Tensor)}
    digests = np.array([_digest(x) for x in tensors.values()], dtype=np.int64)
    statement = Statement({"names, shapes, dtypes and numbers of inputs": ", ".join(said)}, digests)
    table = np.stack(agree(group, statement, what="verify", step=0, capacity=_NUM_INPUTS))
    differing = np.flatnonzero((table != table[0]).any(axis=0))
    if differing.size:
        raise CommError(
            f"verify: the values of {list(tensors)[differing[0]]} differ between ranks: give every "
            "rank the same, as by seeding its random numbers alike"
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


def _digest(x: Tensor) -> int:
    data = as_bytes(x.detach().cpu().contiguous()).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
