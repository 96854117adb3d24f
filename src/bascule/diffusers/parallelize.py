"""parallelize: split the sequences of a model over ranks, and undo it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from bascule.arrays import Bools
from bascule.attention.api import AttentionOptions
from bascule.attention.kernels.registry import Kernel
from bascule.checks import MAX_RANKS, of_type, whole
from bascule.comm.agree import agree, agree_on
from bascule.comm.collectives import all_reduce
from bascule.comm.failures import leave, shared
from bascule.comm.groups import RankGroup
from bascule.comm.mesh import AttentionMesh, named_part
from bascule.comm.quantized import CommDtype
from bascule.diffusers.backends import check_merges, chosen_backend
from bascule.diffusers.compiling import Mode, check_mode, compile_in_place, device_of
from bascule.diffusers.degrees import (
    AXES,
    ONE_RANK,
    AutoMesh,
    Replica,
    Shape,
    ranks_of,
    replica_of,
    shape_of,
)
from bascule.diffusers.enabled import ContextParallel, check_known, set_aside
from bascule.diffusers.explain import Explanation, explain
from bascule.diffusers.guidance import GuidedModel
from bascule.diffusers.pending import Branches
from bascule.diffusers.pipeline_run import (
    PhaseTimes,
    PipelineRun,
    SharedPart,
    execution_device,
    phase_lines,
    share_parts,
    timed,
)
from bascule.diffusers.race import Race
from bascule.diffusers.request import Request, models_of
from bascule.diffusers.sparse_layers import SparseConfig
from bascule.diffusers.split_model import SplitModel, Way
from bascule.diffusers.split_table import SplitTable
from bascule.diffusers.tables import table_of, unwrapped
from bascule.diffusers.verify import PipelineComparison, Verification, check_table, verify
from bascule.errors import ConfigError
from bascule.machine.cluster import HardwareProfile
from bascule.machine.mesh_choice import MeshChoice
from bascule.workload.masks import MaskFile


@shared("parallelize")
def parallelize(
    model_or_pipeline: Any,
    mesh: DeviceMesh | AutoMesh | ContextParallel | Literal["auto"] | None = None,
    *,
    data_degree: int = 1,
    guidance_degree: int = 1,
    ring_degree: int = 1,
    ulysses_degree: int = 1,
    table: SplitTable | Mapping[str, Any] | None = None,
    sparse: SparseConfig | None = None,
    kernel: Kernel | None = None,
    comm_dtype: CommDtype | None = None,
    overlap: bool = False,
    vae: Literal["all", "first", "own"] = "all",
    text_encoders: Literal["all", "own"] = "own",
    input_tolerance: float = 0.0,
) -> "ParallelHandle":
    """Split a model or a pipeline over ranks; every rank gets the output of a single process.

    Weights and inputs must be the same on every rank. Each rank computes its shard of the tokens,
    attends to the tokens of all ranks, and gathers the output. Lengths and head counts need not be
    divisible. Ranks also share a pipeline's guidance branches and VAE tiles, and draw equal noise.

    Args:
        model_or_pipeline: A model, or a diffusers pipeline, whose transformers are all split.
        mesh: Instead of degrees: a mesh with all or some of the axes "data", "guidance", "ring" and
            "ulysses", in this order; ranks along other axes are replicas. "auto" or an `AutoMesh`
            chooses degrees for all ranks. Or a `ContextParallelConfig` of diffusers; without mesh
            and degrees, the one by which `enable_parallelism` split the model before.
        data_degree: Number of replicas, each with other prompts.
        guidance_degree: Number of groups in a replica that share its guidance branches.
        ring_degree: Number of ranks that pass keys and values around a ring.
        ulysses_degree: Number of ranks that split the attention heads (Ulysses).
        table: Says which tensors to shard and to gather; or a plan of diffusers, as in `_cp_plan`.
            Default: bascule's table for the class of the model, else the model's plan. The first
            call with your table or a plan is compared with one process, unless `verify` ran before.
        sparse: Says which blocks of attention to compute. Default: all.
        kernel: An attention kernel: its name, a function, or a `backend_kernel`. Default: the back
            end that `set_attention_backend` chose, else the first kernel that runs here.
        comm_dtype: "int8" or "e4m3" sends q, k, v and outputs of attention in 8 bits; `verify`
            shows the error. Default: their own dtype.
        overlap: True overlaps Ulysses' communication with attention, which pays on slow links.
        vae: "all": the ranks share the tiles of a VAE with tiling, and all get the pixels. "first":
            only the first rank of a replica gets them. "own": every rank computes all tiles.
        text_encoders: "all": the ranks share the prompts of a batch, which saves time with several
            long prompts. "own": every rank encodes all prompts.
        input_tolerance: Allowed difference between ranks' inputs, relative to their norm, for
            unlike GPUs that round prompts differently. Outputs of ranks then differ as much.

    Returns:
        A handle, which is also a context manager: leaving it calls `undo()`.

    Raises:
        ConfigError: No table fits, there is no model, degrees do not fit the ranks or heads, this
            rank is not in the mesh, or settings exclude each other.
        CommError: Arguments differ between ranks, which one all-gather compares.
    """
    if mesh is None and (data_degree, guidance_degree, ring_degree, ulysses_degree) == (1,) * 4:
        theirs = [getattr(x, "_parallel_config", None) for x in models_of(model_or_pipeline)]
        mesh = getattr(next(filter(None, theirs), None), "context_parallel_config", None)
    if isinstance(mesh, ContextParallel):
        if (ring_degree, ulysses_degree) != (1, 1):
            raise ConfigError("parallelize: give a ContextParallelConfig or degrees, not both")
        check_known(mesh)
        mesh, ring_degree, ulysses_degree = mesh.mesh, mesh.ring_degree, mesh.ulysses_degree
    auto = AutoMesh() if mesh == "auto" else mesh
    device_mesh = named_part(auto, AXES) if isinstance(auto, DeviceMesh) else None
    group = ranks_of(device_mesh)

    def checked_request() -> Request:
        names = [f"{axis.name}_degree" for axis in fields(Shape)]
        sizes = data_degree, guidance_degree, ring_degree, ulysses_degree
        degrees, choice = Shape(*map(whole, names, sizes, repeat(1), repeat(MAX_RANKS))), None
        if auto is not None:
            advice = 'a DeviceMesh, "auto", an AutoMesh, a ContextParallelConfig, or degrees'
            of_type("mesh", auto, (DeviceMesh, AutoMesh), advice)
        of_mesh = ONE_RANK if device_mesh is None else shape_of(device_mesh, degrees)
        if auto is not None and degrees not in (ONE_RANK, replace(of_mesh, data=1, guidance=1)):
            raise ConfigError("parallelize: give a mesh or degrees, not both, or equal ones")
        models = models_of(model_or_pipeline)
        if isinstance(auto, AutoMesh):
            degrees, choice = auto.choose(models[0], 1 if group is None else group.size)
        shape, used_kernel = shape_of(device_mesh, degrees), kernel or chosen_backend(models)
        check_merges(used_kernel, shape.ring, overlap)
        return Request(
            models=models,
            tables=[table_of(model, table) for model in models],
            shape=shape,
            attention=AttentionOptions(None, used_kernel, comm_dtype, overlap),
            sparse=sparse,
            vae=vae,
            text_encoders=text_encoders,
            input_tolerance=input_tolerance,
            pipeline=None if isinstance(model_or_pipeline, nn.Module) else model_or_pipeline,
            choice=choice,
        )

    request = agree_on(group, checked_request, Request.settings, what="parallelize")
    handle = ParallelHandle(replica_of(request.shape, device_mesh), group, request.choice)
    with ExitStack() as undo:
        undo.callback(handle.undo)
        handle.share(request)
        undo.pop_all()
    return handle


class ParallelHandle:
    """A model or pipeline that `parallelize` split: explain it, verify it, undo it.

    Attributes:
        replica: The ranks that make the same images together.
        mesh: The ranks of the replica that share this rank's sequences.
        ranks: The ranks of all replicas; None for one rank.
        parts: The split models.
        choice: The mesh that "auto" chose, with reasons; None for other meshes.
    """

    def __init__(
        self, replica: Replica, ranks: RankGroup | None, choice: MeshChoice | None = None
    ) -> None:
        self.replica, self.mesh, self.ranks, self.choice = replica, replica.mesh, ranks, choice
        self.parts: list[SplitModel] = []
        self._guided: list[GuidedModel] = []
        self._compiled, self._set_aside = ExitStack(), ExitStack()
        self._request: Request | None = None
        self._shared_parts: list[SharedPart] = []
        self._runs: list[PipelineRun] = []
        self._times: PhaseTimes | None = None

    def share(self, request: Request) -> None:
        """Split models and share the parts of a pipeline, until `undo`."""
        self._request, passes = request, None
        for model, table in zip(request.models, request.tables, strict=True):
            settings = request.attention, request.sparse, request.input_tolerance
            set_aside(model, self._set_aside)
            split = SplitModel(model, table, self.mesh, *settings, check=check_table)
            if split.sparse is not None:  # a pipeline's models count their passes together
                passes = split.sparse.passes = passes or split.sparse.passes
            whole = self.mesh.whole
            if request.choice is not None and split.way is not None and whole is not None:
                race = Race(type(model).__name__, whole, device_of(model))
                split.way = replace(split.way, race=race)
            self.parts.append(split)
        if self.replica.branches is not None:
            branches = Branches(self.replica.branches)
            self._guided += [GuidedModel(split, branches) for split in self.parts]
        if request.pipeline is not None:
            self._share_pipeline(request.pipeline)

    @shared("ParallelHandle.add")
    def add(self, pipeline: Any) -> None:
        """Add another pipeline that has the split models, for example one made by `from_pipe`.

        Ranks then draw the same noise for it and compare its arguments. All ranks call this.
        """
        self._split_of(None, "add")
        self._share_pipeline(pipeline)

    def _share_pipeline(self, pipeline: Any) -> None:
        request = self._request
        if self.replica.whole is not None and request is not None:
            models, shares_vae = [split.model for split in self.parts], request.vae != "own"
            run = partial(self._run_scope, pipeline)
            self._runs.append(PipelineRun(pipeline, self.replica.whole, models, run, shares_vae))
            self._share_parts(pipeline)

    def _share_parts(self, pipeline: Any) -> None:
        """Share the VAE and text encoders of a pipeline that are not shared yet."""
        group, request = self.replica.whole, self._request
        assert group is not None and request is not None
        shared_before = [part.module for part in self._shared_parts]
        device = execution_device(pipeline, self.model)
        settings = request.vae, request.text_encoders, device, shared_before
        self._shared_parts.extend(share_parts(pipeline, group, *settings))

    @contextmanager
    def _run_scope(self, pipeline: Any) -> Iterator[None]:
        """Compare inputs anew in a run of a pipeline; share its VAE if tiling was turned on."""
        self._share_parts(pipeline)
        for split in self.parts:
            split.inputs.restart()
        for guided in self._guided:
            guided.restart()
        try:
            yield
        finally:
            for model in (*self.parts, *self._guided):
                model.inputs.end()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Compute everything on each rank within."""
        with ExitStack() as stack:
            for split in self.parts:
                stack.enter_context(split.taking(None))
            for override in (*self._guided, *self._shared_parts, *self._runs):
                stack.enter_context(override.suspended())
            yield

    def __enter__(self) -> "ParallelHandle":
        if not all(split.is_split for split in self.parts):
            raise ConfigError("undo() was called: call parallelize again, for another handle")
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:  # ends the wait of ranks that did not fail in the user's code
            leave(error, f"a call of {type(self.model).__name__}")
        self.undo()

    @property
    def model(self) -> nn.Module:
        """The model; of a pipeline, its first transformer."""
        return self.parts[0].model

    def undo(self) -> None:
        """Restore the models, also a split by diffusers; refused within a forward pass."""
        for split in self.parts:
            if split.forward is not None:
                raise ConfigError(
                    f"undo() within a forward pass of {type(split.model).__name__}: call it later"
                )
        self._compiled.close()
        for change in (*self._runs, *self._shared_parts, *self._guided, *self.parts):
            change.remove()
        self._set_aside.close()

    def compile(self, mode: Mode = "default", *, dynamic: bool | None = None) -> None:
        """Compile the models in place, each as one graph, at their first call; log it at INFO.

        Args:
            mode: As in torch.compile. "reduce-overhead" and "max-autotune" record a CUDA graph for
                each shape of the inputs.
            dynamic: True compiles for any lengths. Default: from the second length on, and never
                with CUDA graphs.

        Raises:
            ConfigError: The mode does not fit the device, the back end or `dynamic`.
        """
        self._split_of(None, "compile")
        check_mode(mode, dynamic, self.mesh, device_of(self.model))
        self._compiled.close()
        for split in self.parts:
            self._compiled.callback(compile_in_place(split.model, mode, dynamic, split.prepare))

    def restart(self) -> None:
        """Begin another image: the next forward pass is step 0 of block-sparse attention."""
        for split in self.parts:
            if split.sparse is not None:
                split.sparse.restart()

    @contextmanager
    def save_masks(self, path: str | Path) -> Iterator[None]:
        """Save block masks of layers to a file, for `SparseConfig(masks=path)` or `bascule sparse`.

        In this scope the first rank writes masks (forward passes, layers, heads, query blocks, key
        blocks). Layers are in the order of attention calls; masks of dense layers are all True.
        Blocks follow the heads' `orders`. After an error there is no file.

        Raises:
            ConfigError: No model is sparse, or there are guidance groups; shapes or orders differ
                between samples, layers or passes; the file cannot be written.
        """
        sparse = [split.sparse for split in self.parts if split.sparse is not None]
        if not sparse:
            raise ConfigError("save_masks: no model is sparse: give parallelize sparse=..")
        if self._guided:
            raise ConfigError(
                "save_masks: a guidance group computes only some passes: use guidance_degree=1"
            )
        is_first = self.ranks is None or self.ranks.rank == 0
        file = agree_on(self.ranks, lambda: MaskFile(path) if is_first else None, what="save_masks")

        def save(layer: int, masks: Bools | None) -> None:
            if file is not None:
                file.add(layer, masks)

        for layers in sparse:
            layers.saves = save
        try:
            yield
            agree_on(self.ranks, lambda: file and file.close(), what="save_masks")
        finally:
            for layers in sparse:
                layers.saves = None
            if file is not None:
                file.drop()

    def explain(
        self,
        model: Any = None,
        /,
        *,
        profile: HardwareProfile | None = None,
        ranks_per_node: int | None = None,
        **inputs: Any,
    ) -> Explanation:
        """Explain a model's last forward pass: mesh, tokens and bytes, also for other meshes.

        It includes plans of block-sparse attention, and phases of a pipeline, with measured times
        after `timed`. With a profile the model or pipeline runs once, and all ranks call this.

        Args:
            model: One of the split models or, with a profile, the pipeline. Default: `model`.
            profile: Predicts time by kind of layer, and gains of compilation, 8-bit rows, meshes.
            ranks_per_node: Ranks per node, to predict time. Default: all.
            inputs: Arguments of the model or pipeline; only with a profile.
        """
        request = self._request
        is_pipeline = request is not None and model is not None and model is request.pipeline
        split = self._model_of(None if is_pipeline else model, "explain")
        called: Any = model if is_pipeline else split.model
        run = partial(called, **inputs) if inputs else None
        with nullcontext() if is_pipeline else self._over_mesh(split):
            explanation = explain(split, profile, ranks_per_node, run)
        branches = None if not self._guided else self._guided[0].branches
        race = split.way and split.way.race
        return replace(
            explanation,
            phases=(*(race.lines if race else ()), *phase_lines(self._times, self._shared_parts)),
            num_groups=1 if branches is None else branches.group.size,
            guidance_bytes=0 if branches is None else branches.sent_bytes,
        )

    @contextmanager
    def _over_mesh(self, split: SplitModel) -> Iterator[None]:
        """Compute each call of a model on this rank's mesh, also between guidance groups."""
        with ExitStack() as stack:
            way = split.way or Way(self.mesh)
            stack.enter_context(split.taking(replace(way, race=None)))
            for guided in self._guided:
                stack.enter_context(guided.suspended())
            yield

    @contextmanager
    def timed(self) -> Iterator[PhaseTimes]:
        """Time the phases of a pipeline's call in this scope; the host waits after each step."""
        if self._request is None or self._request.pipeline is None:
            name = type(self.model).__name__
            raise ConfigError(f"timed: only a {name} was split: give parallelize the pipeline")
        pipeline = self._request.pipeline
        with timed(pipeline, execution_device(pipeline, self.model)) as times:
            yield times
        self._times = times

    def verify(self, model: Any = None, /, **inputs: Any) -> Verification:
        """Compare a model on the mesh with one process block by block; every rank gets the result.

        A pipeline is compared phase by phase (prompts, noise, every step, pixels); the first step
        that differs is compared block by block. Every rank also computes the whole sequence; the
        reference is the first rank's, which shows unequal weights. The model must be deterministic.
        Gradients, compiled code and steps of block-sparse attention are not compared.

        Args:
            model: One of the split models, or the pipeline. Default: `model`.
            inputs: Arguments of the model or pipeline, the same on every rank.

        Raises:
            ConfigError: The model is not split, or uses a step cache.
            CommError: The ranks' inputs differ.
        """
        request, whole = self._request, self.replica.whole
        if request is not None and model is not None and model is request.pipeline:
            self._split_of(None, "verify")
            has_pixels = request.vae != "first" or whole is None or whole.rank == 0
            settings = whole, self._alone, has_pixels, self.verify
            return PipelineComparison(model, self.parts, *settings).verify(inputs)
        split = self._split_of(model, "verify")
        with self._over_mesh(split):
            return verify(split, inputs, self.replica.whole)

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Checkpoint activations, and recompute them over the mesh.

        Use it in `model.enable_gradient_checkpointing(handle.checkpoint)`, or like torch's.
        """
        running = [(split, split.forward) for split in self.parts if split.is_running]

        @contextmanager
        def recomputing() -> Iterator[None]:
            with ExitStack() as stack:
                for split, forward in running:
                    stack.enter_context(split.recomputing(forward))
                yield

        return checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), recomputing())
        )

    @shared("average_gradients")
    def average_gradients(self) -> None:
        """Average gradients over all ranks after `backward()`; DDP and FSDP do this themselves.

        Costs a small all-gather, and one all-reduce for each dtype.

        Raises:
            ConfigError: Gradients are sharded.
            CommError: Ranks have gradients of different parameters.
        """
        group = self.ranks
        if group is None:
            return
        parameters = [pair for split in self.parts for pair in split.model.named_parameters()]
        sharded = [name for name, weight in parameters if isinstance(weight.grad, DTensor)]
        error = None
        if sharded:
            error = ConfigError(
                f"average_gradients: the gradient of {sharded[0]} is sharded, as by FSDP, which "
                "averages gradients itself: leave out this call"
            )
        kinds = [f"{name} {tuple(weight.shape)} {weight.dtype}" for name, weight in parameters]
        missing = [name for name, weight in parameters if weight.grad is None]
        settings = {"parameters": str(kinds), "parameters without gradients": str(missing)}
        agree(group, settings, error, what="average_gradients")
        grads = [weight.grad for _, weight in parameters if weight.grad is not None]
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            alike = [grad for grad in grads if grad.dtype == dtype]
            flat = torch.cat([grad.flatten() for grad in alike])
            mean = all_reduce(group, "all_reduce (gradients)", flat) / group.size
            for grad, part in zip(alike, mean.split([x.numel() for x in alike]), strict=True):
                grad.copy_(part.view_as(grad))

    def _model_of(self, model: nn.Module | None, what: str) -> SplitModel:
        inner = None if model is None else unwrapped(model)
        splits = [split for split in self.parts if inner is None or split.model is inner]
        if not splits:
            names = [type(split.model).__name__ for split in self.parts]
            wrong = f"{what}: {type(model).__name__} is not one of the models of this handle"
            raise ConfigError(f"{wrong}: give one of them, {names}, or none for the first")
        return splits[0]

    def _split_of(self, model: nn.Module | None, what: str) -> SplitModel:
        split = self._model_of(model, what)
        if not split.is_split:
            raise ConfigError(f"{what}: undo() was called: call parallelize again, then {what}")
        return split

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy or pickle be a handle without models, as copies of models are not split."""
        return ParallelHandle, (Replica(None, None, AttentionMesh(None, None, None)), None)
