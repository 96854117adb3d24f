"""context_parallel for models of transformers, which are compared with one process first."""

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
from bascule.transformers.bag_attention import NAME, Alone, OverMesh, note, register_attention
from bascule.transformers.delta_rule import delta_layers, split_delta_layers
from bascule.transformers.separation import (
    NOISE,
    Reach,
    first_difference,
    outputs_of,
    ratio,
    reach_of,
)

_TOKENS = 4  # of each rank, for the comparison
_tried: "WeakKeyDictionary[nn.Module, dict[str, Reach]]" = WeakKeyDictionary()  # by mesh


@contextmanager
def context_parallel(
    model: nn.Module,
    mesh: "AttentionMesh | DeviceMesh",
    layout: SequenceLayout | None = None,
    **options: Any,
) -> Iterator[sdpa.SequenceParallelMode]:
    """Let a model of transformers attend over the mesh, within the `with`.

    Call it with this rank's part of the tokens, and with `position_ids`, their positions in the
    whole sequence. Positions that begin at 0 again begin another document, which sees none before;
    one small all-gather a call finds them. At first use a few tokens over the mesh are compared
    with one process.

    Args:
        model: With any `attn_implementation`; it may be wrapped by DDP or FSDP.
        mesh: The ranks.
        layout: As in `bascule.context_parallel`.
        options: As in `bascule.context_parallel`.

    Raises:
        ConfigError: The model computes something else over ranks (the error names its first module
            that does), has masks or settings of attention that are not understood, or positions
            are missing, or are not those of one sequence or of documents.
    """
    place = AttentionMesh.of(mesh) if isinstance(mesh, DeviceMesh) else mesh
    inner = getattr(model, "module", model)
    kind = type(inner).__name__
    by_mesh = _tried.setdefault(inner, {})
    if place.name not in by_mesh:
        with shared(f"first use of {kind} in context_parallel"):
            by_mesh[place.name] = _try(inner, place)
    reach = by_mesh[place.name]

    @torch.compiler.disable(reason="positions tell documents apart")
    @shared(f"positions of {kind}")
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places = kwargs.get("position_ids")
        if places is None:
            raise ConfigError(
                f"{kind} without position_ids would count this rank's tokens from 0: give their "
                "positions in the whole sequence, as in split(torch.arange(S)[None], mesh, layout, "
                "1)"
            )
        ring, ulysses = place.degrees
        of = layout or SequenceLayout((places.shape[-1] * ring * ulysses,), ring, ulysses)
        documents = (of.seq_len,)
        if places.dim() == 3 and places.shape[0] == 4:  # of text, then of three axes
            places = places[0]
        if places.dim() == 2:
            documents = _documents(kind, gather(places, place, of, 1), of.seq_len)
        rows = [of.num_tokens(r, u) for r in range(ring) for u in range(ulysses)]
        reach.check(kind, max(documents, default=0), max(rows))
        step = OverMesh(mode, of, documents if len(documents) > 1 else ())
        note(step)
        return args, {**kwargs, "bascule_step": step}

    with (
        inner.register_forward_pre_hook(enter, with_kwargs=True),
        inner.register_forward_hook(lambda *_: note(None), always_call=True),
        _attending(inner),
        sdpa.context_parallel(place, layout, checked=inner, **options) as mode,
    ):
        yield mode


def _documents(kind: str, places: Tensor, num_tokens: int) -> tuple[int, ...]:
    """Return the tokens of each document, from (B, S) positions; refuse what are none."""
    rows = places.cpu().numpy()
    starts = np.flatnonzero(rows[0] == 0)
    lens = np.diff(starts, append=num_tokens)
    if lens.sum() != num_tokens or (rows != ranges(np.zeros_like(lens), lens)).any():
        raise ConfigError(
            f"{kind}: position_ids are not those of one sequence from 0 in this layout, nor of "
            "documents that each begin at 0, the same in all rows: give split(positions, mesh, "
            "layout, 1) of the whole sequence"
        )
    return tuple(lens.tolist())


@contextmanager
def _attending(model: Any, name: str = NAME) -> Iterator[None]:
    """Let a model attend by `attend_in_bags`, or otherwise, within the `with`."""
    register_attention()
    parts = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    before = {"": model.config._attn_implementation}
    before |= {name: x._attn_implementation for name, x in parts.items() if x is not None}
    split_delta_layers(model)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        note(None)
        model.set_attn_implementation(before)


def _try(model: Any, mesh: AttentionMesh) -> Reach:
    """Refuse a model that computes something else over a mesh; return what it reaches."""
    kind, device = type(model).__name__, next(model.parameters()).device
    ring, ulysses = mesh.degrees
    layout = SequenceLayout((_TOKENS * ring * ulysses,), ring, ulysses)
    ids = torch.arange(layout.seq_len, device=device)[None] % 7 + 1
    places = torch.arange(layout.seq_len, device=device)[None]
    own_ids, own_places = (split(x, mesh, layout, 1) for x in (ids, places))

    def call(ids: Tensor, **inputs: Any) -> Any:
        note(inputs.get("bascule_step"))
        try:
            return model(input_ids=ids, use_cache=False, **inputs)
        except Exception as error:
            reason = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            raise ConfigError(
                f"{kind} cannot be split by context_parallel: {module_of(error, model) or kind} "
                f"raised {reason}{' '.join(str(error).split())[:300]}"
            ) from error

    def own(x: Tensor) -> Tensor | None:
        return split(x, mesh, layout, 1) if x.shape[1] == layout.seq_len else None

    with as_in_use(model), torch.no_grad():
        is_ours = model.config._attn_implementation == NAME
        with _attending(model, "eager") if is_ours else nullcontext():
            whole = outputs_of(model, partial(call, ids), own)  # counts positions itself
        with _attending(model), sdpa.SequenceParallelMode(mesh, watches=True) as mode:
            over_ranks = partial(
                call, own_ids, position_ids=own_places, bascule_step=OverMesh(mode, layout)
            )
            parts = outputs_of(model, over_ranks, lambda x: x)
    fault, last = None, list(parts)[-1]
    # Of float32 at least: to it models round their softmax, whatever their dtype.
    dtypes = parts[last].dtype, torch.float32
    noise = NOISE * max(torch.finfo(dtype).eps for dtype in dtypes)
    if last not in whole or ratio(parts[last] - whole[last], whole[last]) > noise:
        at = first_difference(parts, whole, noise) or last
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
        raise ConfigError(
            f"{kind} does not attend through transformers' AttentionInterface, so its windows "
            "and settings are not known: it cannot be split by context_parallel"
        )
    return reach_of(model)
