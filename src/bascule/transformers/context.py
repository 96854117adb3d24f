"""`context_parallel` for models of transformers; at first use, one process checks the result."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bascule import sdpa
from bascule.arrays import ranges
from bascule.attention.api import AttentionMesh, SequenceLayout, gather, split
from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.errors import ConfigError
from bascule.stand_in import as_in_use, module_of
from bascule.transformers.bag_attention import NAME, Alone, OverMesh, register_attention, set_step
from bascule.transformers.delta_rule import delta_layers, split_delta_layers
from bascule.transformers.separation import NOISE, Reach, first_difference, outputs_of, ratio

_TOKENS = 4  # of each rank in the comparison
_tried: "WeakKeyDictionary[nn.Module, dict[str, Reach]]" = WeakKeyDictionary()  # by mesh name


@contextmanager
def context_parallel(
    model: nn.Module,
    mesh: "AttentionMesh | DeviceMesh",
    layout: SequenceLayout | None = None,
    **options: Any,
) -> Iterator[sdpa.SequenceParallelMode]:
    """Let a model of transformers attend over the mesh while the `with` block runs.

    Call the model with this rank's shard of the tokens, and with `position_ids`, their positions in
    the whole sequence. A position of 0 begins a new document, which does not attend to earlier
    ones; one small all-gather per call finds documents. The first use compares the mesh's outputs
    of a few tokens with one process.

    Args:
        model: A model with any `attn_implementation`; it may be wrapped by DDP or FSDP.
        mesh: Mesh of the ranks that share sequences.
        layout: As in `bascule.context_parallel`.
        options: As in `bascule.context_parallel`.

    Raises:
        ConfigError: The model's results on the mesh differ (the error names the first module whose
            output does), its masks or attention settings are not supported, or positions are
            missing, or do not count from 0 in a sequence or in each document.
    """
    mesh = AttentionMesh.of(mesh) if isinstance(mesh, DeviceMesh) else mesh
    inner = getattr(model, "module", model)
    kind = type(inner).__name__
    by_mesh = _tried.setdefault(inner, {})
    if mesh.name not in by_mesh:
        with shared(f"first use of {kind} in context_parallel"):
            by_mesh[mesh.name] = _try(inner, mesh)
    reach = by_mesh[mesh.name]

    @torch.compiler.disable(reason="positions tell documents apart")
    @shared(f"positions of {kind}")
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = kwargs.get("position_ids")
        if positions is None:
            what = f"{kind} without position_ids would count this rank's tokens from 0"
            fix = "give position_ids=split(torch.arange(S)[None], mesh, layout, 1)"
            raise ConfigError(f"{what}: {fix}")
        ring, ulysses = mesh.degrees
        split_by = layout or SequenceLayout((positions.shape[-1] * ring * ulysses,), ring, ulysses)
        documents = (split_by.seq_len,)
        if positions.dim() == 3 and positions.shape[0] == 4:  # text, then three axes
            positions = positions[0]
        if positions.dim() == 2:
            documents = _documents(kind, gather(positions, mesh, split_by, 1))
        rows = [split_by.num_tokens(r, u) for r in range(ring) for u in range(ulysses)]
        reach.check(kind, max(documents, default=0), max(rows))
        step = OverMesh(mode, split_by, documents if len(documents) > 1 else ())
        set_step(step)
        return args, {**kwargs, "bascule_step": step}

    with (
        inner.register_forward_pre_hook(enter, with_kwargs=True),
        inner.register_forward_hook(lambda *_: set_step(None), always_call=True),
        _attending(inner),
        sdpa.context_parallel(mesh, layout, checked=inner, **options) as mode,
    ):
        yield mode


def _documents(kind: str, positions: Tensor) -> tuple[int, ...]:
    """Return the length of each document, from (B, S) positions; refuse other positions."""
    rows = positions.cpu().numpy()
    num_tokens = rows.shape[1]
    starts = np.flatnonzero(rows[0] == 0)
    lens = np.diff(starts, append=num_tokens)
    if lens.sum() != num_tokens or (rows != ranges(np.zeros_like(lens), lens)).any():
        what = f"{kind}: position_ids do not count from 0 in one sequence, or in each document"
        fix = "give split(positions, mesh, layout, 1) of the whole sequence, the same in all rows"
        raise ConfigError(f"{what}: {fix}")
    return tuple(lens.tolist())


@contextmanager
def _attending(model: Any, name: str = NAME) -> Iterator[None]:
    """Set the model's attention implementation, within the `with`."""
    register_attention()
    configs = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    before = {"": model.config._attn_implementation}
    before |= {name: x._attn_implementation for name, x in configs.items() if x is not None}
    split_delta_layers(model)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        set_step(None)
        model.set_attn_implementation(before)


def _try(model: Any, mesh: AttentionMesh) -> Reach:
    """Refuse a model whose results differ over a mesh; return its reach."""
    kind, device = type(model).__name__, next(model.parameters()).device
    ring, ulysses = mesh.degrees
    layout = SequenceLayout((_TOKENS * ring * ulysses,), ring, ulysses)
    positions = torch.arange(layout.seq_len, device=device)[None]
    ids = positions % 7 + 1

    def call(ids: Tensor, **inputs: Any) -> Any:
        set_step(inputs.get("bascule_step"))
        try:
            return model(input_ids=ids, use_cache=False, **inputs)
        except Exception as error:
            reason = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            where, text = module_of(error, model) or kind, " ".join(str(error).split())[:300]
            what = f"{kind} cannot be split by context_parallel"
            raise ConfigError(f"{what}: {where} raised {reason}{text}") from error

    def shard(x: Tensor) -> Tensor | None:
        return split(x, mesh, layout, 1) if x.shape[1] == layout.seq_len else None

    with as_in_use(model), torch.no_grad():
        is_ours = model.config._attn_implementation == NAME
        with _attending(model, "eager") if is_ours else nullcontext():
            whole = outputs_of(model, partial(call, ids), shard)  # the model counts positions
        with _attending(model), sdpa.SequenceParallelMode(mesh, watches=True) as mode:
            inputs = {"position_ids": shard(positions), "bascule_step": OverMesh(mode, layout)}
            shards = outputs_of(model, partial(call, shard(ids), **inputs), lambda x: x)
    fault, last = None, list(shards)[-1]
    # At least float32's: models round their softmax to it, whatever their dtype.
    noise = NOISE * max(torch.finfo(dtype).eps for dtype in (shards[last].dtype, torch.float32))
    if last not in whole or ratio(shards[last] - whole[last], whole[last]) > noise:
        at = first_difference(shards, whole, noise) or last
        fault = ConfigError(
            f"{kind} computes something else over ranks: {at or kind} differs from one process; "
            "context_parallel splits attention alone, so a layer that mixes tokens or counts "
            "positions otherwise cannot be split"
        )
    if mesh.whole is not None:
        agree(mesh.whole.control or mesh.whole, {}, fault, what=f"{kind} in context_parallel")
    elif fault is not None:
        raise fault
    alone = Alone([ids.shape[1]], ids.device)
    with as_in_use(model), torch.no_grad(), _attending(model):
        call(ids, bascule_step=alone)
    if not (alone.has_attended or delta_layers(model)):
        what = f"{kind} does not attend through transformers' AttentionInterface"
        raise ConfigError(f"{what}, so its windows are not known: context_parallel cannot split it")
    return Reach.of(model)
