"""parallelize: split the sequences of a model over ranks, and take it back."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from bascule.attention.ranks import RING_AXIS, ULYSSES_AXIS, AttentionMesh
from bascule.comm.groups import reporting
from bascule.comm.quantize import Wire
from bascule.errors import ConfigError
from bascule.inference.compiling import Mode, check_mode, compile_in_place
from bascule.inference.explain import Explanation, explain
from bascule.inference.hooks import SplitModel
from bascule.inference.sparse import agree_on
from bascule.inference.sparse_config import SparseConfig
from bascule.inference.tables import SplitTable, table_of
from bascule.inference.verify import Verification, verify

_TRANSFORMERS = "transformer", "transformer_2"  # of a diffusers pipeline


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
        ConfigError: No table fits, no model is there, the degrees fit neither ranks nor heads, or
            both a wire and block-sparse attention are asked for.
        CommError: Ranks were given other block-sparse attention.
    """
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
    models = _models_of(model_or_pipeline)
    tables = [table or table_of(model) for model in models]
    place = _mesh_of(models[0], ulysses_degree, ring_degree, mesh)
    for model in models:
        _check_heads(model, place)
    if sparse is not None:
        if not isinstance(sparse, SparseConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"parallelize: sparse is {sparse!r}: give a SparseConfig")
        agree_on(sparse, place)
    handle = Parallelized(place)
    with ExitStack() as undo:
        undo.callback(handle.undo)
        for model, one in zip(models, tables, strict=True):
            handle.parts.append(SplitModel(model, one, place, wire, sparse))
        undo.pop_all()
    return handle


class Parallelized:
    """What `parallelize` did.

    Attributes:
        mesh: The ranks.
        parts: Each model with its hooks.
    """

    def __init__(self, mesh: AttentionMesh) -> None:
        self.mesh = mesh
        self.parts: list[SplitModel] = []
        self._compiled = ExitStack()

    def __enter__(self) -> "Parallelized":
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
        """Make the models what they were."""
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
        if self.parts[0].sparse is not None:
            raise ConfigError(
                "compile: block-sparse attention is planned in every step: do not compile it"
            )
        if not all(part.is_split for part in self.parts):
            raise ConfigError("compile: undo() was called: call parallelize again, then compile")
        check_mode(mode, dynamic, self.mesh, next(self.model.parameters()).device)
        self._compiled.close()
        for part in self.parts:
            self._compiled.callback(compile_in_place(part.model, mode, dynamic))

    def restart(self) -> None:
        """Another image: the next forward pass is the first step of block-sparse attention."""
        for part in self.parts:
            if part.sparse is not None:
                part.sparse.restart()

    def explain(self) -> Explanation:
        """Mesh, tokens and bytes of the last forward pass of `model`, and of other meshes.

        Of block-sparse attention also what each layer's plan was worth.

        Raises:
            ConfigError: There was none.
        """
        return explain(self.parts[0])

    def verify(self, **inputs: Any) -> Verification:
        """Compare `model` on the mesh with one process, block by block; the same on every rank.

        Every rank computes the whole sequence too, and the first rank's blocks and outputs count:
        ranks whose weights differ are found as well. Without gradients, and not compiled; the model
        must be deterministic. Block-sparse attention sees the same blocks on the mesh, also where a
        rule might choose others by rounding; it counts no step.

        Args:
            inputs: Arguments of the model, the same on every rank.

        Raises:
            CommError: The ranks' inputs differ.
        """
        return verify(self.parts[0], inputs)

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Activation checkpointing that recomputes over the mesh.

        For `model.enable_gradient_checkpointing(handle.checkpoint)`, or in place of
        `torch.utils.checkpoint.checkpoint(function, *args)`.
        """
        running = [(part, part.forward) for part in self.parts if part.forward is not None]

        @contextmanager
        def resumed() -> Iterator[None]:
            with ExitStack() as stack:
                for part, forward in running:
                    stack.enter_context(part.resumed(forward))
                yield

        return checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), resumed())
        )

    def average_gradients(self) -> None:
        """Make gradients those of one process, without DDP or FSDP, which do the same.

        After `backward()` of a loss that every rank computed from the whole output. One all-reduce
        for each dtype.
        """
        if self.mesh.whole is None:
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for part in self.parts:
            for parameter in part.model.parameters():
                if parameter.grad is not None:
                    by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for grads in by_dtype.values():
            flat = torch.cat([grad.flatten() for grad in grads])
            with reporting(self.mesh.whole, "all_reduce (gradients)", 0):
                dist.all_reduce(flat, group=self.mesh.whole.process_group)
            flat /= self.mesh.whole.size
            parts = flat.split([grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))


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


def _mesh_of(
    model: nn.Module, ulysses_degree: int | None, ring_degree: int | None, mesh: DeviceMesh | None
) -> AttentionMesh:
    ring = 1 if ring_degree is None else ring_degree
    ulysses = 1 if ulysses_degree is None else ulysses_degree
    if mesh is not None:
        if ulysses_degree is not None or ring_degree is not None:
            raise ConfigError("parallelize: give a mesh or degrees, not both")
        return AttentionMesh.of(mesh)
    if not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialised: call init_process_group first")
    world = dist.get_world_size()
    if min(ring, ulysses) < 1 or ring * ulysses != world:
        raise ConfigError(
            f"ring_degree {ring} x ulysses_degree {ulysses} on {world} ranks: the product "
            f"must be {world}, as with ulysses_degree={world}; for some of the ranks give a mesh"
        )
    device = next(model.parameters()).device
    names = RING_AXIS, ULYSSES_AXIS
    return AttentionMesh.of(init_device_mesh(device.type, (ring, ulysses), mesh_dim_names=names))


def _check_heads(model: nn.Module, mesh: AttentionMesh) -> None:
    num_heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    if num_heads is not None and num_heads < mesh.degrees[1]:
        raise ConfigError(
            f"{type(model).__name__} has {num_heads} heads for {mesh.degrees[1]} Ulysses ranks, "
            f"which take one each at least: use ulysses_degree={num_heads} at most, and a ring"
        )
