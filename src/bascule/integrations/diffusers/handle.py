"""parallelize: split the sequences of a model over ranks, and take it back."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from bascule.comm.groups import RankGroup, member_of, resolve
from bascule.comm.guard.calls import Call
from bascule.comm.guard.failures import told
from bascule.comm.meshes import AttentionMesh, mesh_of_all
from bascule.comm.quantize import Wire
from bascule.comm.transfers import all_reduce
from bascule.errors import ConfigError
from bascule.integrations.diffusers.agreement import Asked, agree_on_gradients, agree_on_split
from bascule.integrations.diffusers.compiling import Mode, check_mode, compile_in_place, device_of
from bascule.integrations.diffusers.explain import Explanation, explain
from bascule.integrations.diffusers.hooks import SplitModel, check_model
from bascule.integrations.diffusers.sparse.sparse_config import SparseConfig
from bascule.integrations.diffusers.tables import SplitTable, table_of
from bascule.integrations.diffusers.verify import Verification, verify
from bascule.plan.checks import is_int

_TRANSFORMERS = "transformer", "transformer_2"  # of a diffusers pipeline


@told("parallelize")
def parallelize(
    model_or_pipeline: Any,
    *,
    ulysses_degree: int | None = None,
    ring_degree: int | None = None,
    mesh: DeviceMesh | None = None,
    table: SplitTable | None = None,
    wire: Wire | None = None,
    sparse: SparseConfig | None = None,
) -> "Parallelized":
    """Split the sequences of a model over ranks: same inputs, same outputs, on every rank.

    The model must be the same on every rank, and so must its inputs. Its hooks cut inputs into the
    ranks' shares, replace attention, and gather what it returns. Any lengths and head counts; a
    rank may have no tokens.

    Args:
        model_or_pipeline: A model, or a pipeline of diffusers: its `transformer`, and
            `transformer_2` if it has one.
        ulysses_degree: Ranks that share heads. Default: 1.
        ring_degree: Ranks that pass keys and values around. Default: 1.
        mesh: Instead of degrees: some of the ranks, with axes "ring", "ulysses" or both.
        table: What is cut where. Default: the one for the class of the model.
        wire: How queries, keys, values and attention's outputs travel: `Wire("int8",
            takes_centres=True)` halves the bytes of bfloat16 at an error that `verify` shows. None
            sends them as they are.
        sparse: Which blocks of attention are computed, balanced over the ranks. None computes all.

    Returns:
        A handle, and a context manager: leaving it calls `undo()`.

    Raises:
        ConfigError: No table fits, no model is there, the degrees fit neither ranks nor heads, this
            rank is not in the mesh, or both a wire and block-sparse attention are asked for.
        CommError: Ranks were given different things. One all-gather compares them.
    """
    if not isinstance(mesh, DeviceMesh | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"parallelize: mesh is {mesh!r}: give a DeviceMesh")
    place = None if mesh is None else AttentionMesh.of(mesh)
    group = _world() if place is None else place.whole
    asked = error = None
    try:
        degrees = _degrees(place, ulysses_degree, ring_degree)
        models = _models_of(model_or_pipeline)
        tables = [table or table_of(model) for model in models]
        asked = Asked(models, tables, degrees, wire, sparse)
        _check(asked)
    except Exception as found:
        error = found
    agree_on_split(group, asked, error)
    assert asked is not None
    place = mesh_of_all(*asked.degrees) if place is None else place
    handle = Parallelized(place)
    with ExitStack() as undo:
        undo.callback(handle.undo)
        for model, one in zip(asked.models, asked.tables, strict=True):
            handle.parts.append(SplitModel(model, one, place, wire, sparse))
        undo.pop_all()
    return handle


class Parallelized:
    """A model or pipeline that `parallelize` split: explain it, verify it, undo it.

    Attributes:
        mesh: The ranks.
        parts: Each model with its hooks.
    """

    def __init__(self, mesh: AttentionMesh) -> None:
        self.mesh = mesh
        self.parts: list[SplitModel] = []
        self._compiled = ExitStack()

    def __enter__(self) -> "Parallelized":
        if not all(part.is_split for part in self.parts):
            raise ConfigError("undo() was called: call parallelize again, for another handle")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()

    @property
    def model(self) -> nn.Module:
        """The model; of a pipeline, its first transformer."""
        return self.parts[0].model

    def undo(self) -> None:
        """Take all hooks away; the models are then as they were before.

        Raises:
            ConfigError: One of them runs, whose shares would then be taken for the whole.
        """
        for part in self.parts:
            if part.is_running:
                raise ConfigError(
                    f"undo() within a forward pass of {type(part.model).__name__}: its tokens are "
                    "shared over the ranks; call it after the forward pass"
                )
        self._compiled.close()
        for part in self.parts:
            part.remove()

    def compile(self, mode: Mode = "default", *, dynamic: bool | None = None) -> None:
        """Compile the models in place, each as one graph; replaces what was compiled before.

        They compile when they are first called, and again for other shapes. A rank that is done
        waits for the others in its first exchange, which has the timeout of its process group.

        Args:
            mode: As in torch.compile. "reduce-overhead" and "max-autotune" record CUDA graphs, one
                for each shape of the inputs.
            dynamic: As in torch.compile: whether graphs are for any lengths. Default: from the
                second length on, and never with CUDA graphs.

        Raises:
            ConfigError: There is no such mode, or no CUDA graphs with this device, with the back
                end of the mesh's process groups, or with `dynamic`; attention is block-sparse; or
                the models are not split any more.
        """
        if self._split_part(None, "compile").sparse is not None:
            raise ConfigError(
                "compile: block-sparse attention is planned in every step: do not compile it"
            )
        check_mode(mode, dynamic, self.mesh, device_of(self.model))
        self._compiled.close()
        for part in self.parts:
            self._compiled.callback(compile_in_place(part.model, mode, dynamic, part.prepare))

    def restart(self) -> None:
        """Begin another image: the next forward pass is step 0 of block-sparse attention."""
        for part in self.parts:
            if part.sparse is not None:
                part.sparse.restart()

    def explain(self, model: nn.Module | None = None, /) -> Explanation:
        """Mesh, tokens and bytes of the last forward pass of a model, and of other meshes.

        Of block-sparse attention also what each layer's plan was worth.

        Args:
            model: One of those that are split. Default: `model`.

        Raises:
            ConfigError: There was none.
        """
        return explain(self._part_of(model, "explain"))

    def verify(self, model: nn.Module | None = None, /, **inputs: Any) -> Verification:
        """Compare a model on the mesh with one process, block by block; the same on every rank.

        Every rank computes the whole sequence too, and the first rank's blocks and outputs count:
        ranks whose weights differ are found as well. Without gradients, and not compiled; the model
        must be deterministic. Block-sparse attention computes the same blocks on the mesh, also
        where a rule might choose others because of rounding. A verification is not a step.

        Args:
            model: One of those that are split, as `pipeline.transformer_2`; it goes first, without
                a name, so that inputs may have any. Default: `model`.
            inputs: Arguments of the model, the same on every rank.

        Raises:
            ConfigError: The model is not split, or has a cache of steps.
            CommError: The ranks' inputs differ.
        """
        return verify(self._split_part(model, "verify"), inputs)

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Activation checkpointing that recomputes over the mesh.

        For `model.enable_gradient_checkpointing(handle.checkpoint)`, or in place of
        `torch.utils.checkpoint.checkpoint(function, *args)`.
        """
        running = [(part, part.forward) for part in self.parts if part.forward or part.is_alone]

        @contextmanager
        def resumed() -> Iterator[None]:
            with ExitStack() as stack:
                for part, forward in running:
                    stack.enter_context(part.resumed(forward) if forward else part.paused())
                yield

        return checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), resumed())
        )

    @told("average_gradients")
    def average_gradients(self) -> None:
        """Average gradients over the mesh; not needed under DDP or FSDP, which do it themselves.

        After `backward()` of a loss that every rank computed from the whole output. One all-reduce
        for each dtype, after a small all-gather.

        Raises:
            ConfigError: FSDP has averaged them.
            CommError: Ranks have gradients of different parameters.
        """
        if self.mesh.whole is None:
            return
        agree_on_gradients(self.mesh.whole, [part.model for part in self.parts])
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for part in self.parts:
            for parameter in part.model.parameters():
                if parameter.grad is not None:
                    by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for grads in by_dtype.values():
            flat = torch.cat([grad.flatten() for grad in grads])
            total = all_reduce(self.mesh.whole, Call("all_reduce (gradients)"), flat)
            parts = (total / self.mesh.whole.size).split([grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))

    def _part_of(self, model: nn.Module | None, what: str) -> SplitModel:
        """The part of a model. Default: of the first."""
        found = [part for part in self.parts if model is None or part.model is model]
        if not found:
            names = [type(part.model).__name__ for part in self.parts]
            raise ConfigError(
                f"{what}: {type(model).__name__} is not one of the models that this handle split, "
                f"{names}: give one of them, or leave the model out for the first"
            )
        return found[0]

    def _split_part(self, model: nn.Module | None, what: str) -> SplitModel:
        """The part of a model that is split still."""
        part = self._part_of(model, what)
        if not part.is_split:
            raise ConfigError(f"{what}: undo() was called: call parallelize again, then {what}")
        return part

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy splits nothing, as copies of the models are not split."""
        return Parallelized, (AttentionMesh(None, None, None),)


def _models_of(model_or_pipeline: Any) -> list[nn.Module]:
    if isinstance(model_or_pipeline, nn.Module):
        return [model_or_pipeline]
    found = [getattr(model_or_pipeline, name, None) for name in _TRANSFORMERS]
    models = [model for model in found if isinstance(model, nn.Module)]
    if not models:
        raise ConfigError(
            f"parallelize takes a model, or a pipeline with a `transformer`, and "
            f"{type(model_or_pipeline).__name__} has none: give the model itself"
        )
    return models


def _check(asked: Asked) -> None:
    """Refuse what cannot be split, on this rank."""
    wire, sparse = asked.wire, asked.sparse
    wrong = [table for table in asked.tables if not isinstance(table, SplitTable)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if wrong:
        raise ConfigError(f"parallelize: table is {wrong[0]!r}: give a SplitTable")
    if not isinstance(wire, Wire | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"parallelize: wire is {wire!r}: give a Wire")
    if not isinstance(sparse, SparseConfig | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"parallelize: sparse is {sparse!r}: give a SparseConfig")
    if wire is not None and (wire.k_centre is not None or wire.v_centre is not None):
        raise ConfigError(
            "parallelize: a wire with given centres fits one shape of keys only: use "
            f"Wire({wire.format!r}, takes_centres=True)"
        )
    if wire is not None and sparse is not None:
        raise ConfigError(
            "parallelize: rows of block-sparse attention travel as they are: leave out wire or "
            "sparse"
        )
    for model, table in zip(asked.models, asked.tables, strict=True):
        _check_heads(model, asked.degrees[1])
        check_model(model, table)


def _world() -> RankGroup | None:
    """All ranks; None for one."""
    group = member_of(resolve(None), "world")
    return group if group.size > 1 else None


def _degrees(
    place: AttentionMesh | None, ulysses_degree: int | None, ring_degree: int | None
) -> tuple[int, int]:
    """(ring, Ulysses)."""
    if place is not None:
        if ulysses_degree is not None or ring_degree is not None:
            raise ConfigError("parallelize: give a mesh or degrees, not both")
        return place.degrees
    ring = 1 if ring_degree is None else ring_degree
    ulysses = 1 if ulysses_degree is None else ulysses_degree
    world = dist.get_world_size()
    is_whole = is_int(ring) and is_int(ulysses)
    if not is_whole or min(ring, ulysses) < 1 or ring * ulysses != world:
        raise ConfigError(
            f"ring_degree {ring!r} x ulysses_degree {ulysses!r} on {world} ranks: the product must "
            f"be {world}, of integers, as with ulysses_degree={world}; for some of the ranks give "
            "a mesh"
        )
    return ring, ulysses


def _check_heads(model: nn.Module, ulysses: int) -> None:
    num_heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    if num_heads is not None and num_heads < ulysses:
        raise ConfigError(
            f"{type(model).__name__} has {num_heads} heads for {ulysses} Ulysses ranks, "
            f"which take one each at least: use ulysses_degree={num_heads} at most, and a ring"
        )
