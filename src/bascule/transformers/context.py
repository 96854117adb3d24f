"""context_parallel for models of transformers, which are compared with one process first."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bascule import sdpa
from bascule.attention.api import AttentionMesh, SequenceLayout, split
from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.errors import ConfigError
from bascule.stand_in import as_in_use, module_of
from bascule.transformers.bag_attention import NAME, Alone, check_settings, register_attention
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
    whole sequence. At first use a few tokens over the mesh are compared with one process.

    Args:
        model: With `attn_implementation="sdpa"`; it may be wrapped by DDP or FSDP.
        mesh: The ranks.
        layout: As in `bascule.context_parallel`.
        options: As in `bascule.context_parallel`.

    Raises:
        ConfigError: The model computes something else over ranks (the error names its first module
            that does), has settings of attention that are not understood, sequences are longer
            than its windows, or positions are missing.
    """
    place = AttentionMesh.of(mesh) if isinstance(mesh, DeviceMesh) else mesh
    inner = getattr(model, "module", model)
    kind = type(inner).__name__
    by_mesh = _tried.setdefault(inner, {})
    if place.name not in by_mesh:
        with shared(f"first use of {kind} in context_parallel"):
            by_mesh[place.name] = _try(inner, place)
    reach = by_mesh[place.name]

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        places = kwargs.get("position_ids")
        if places is None:
            raise ConfigError(
                f"{kind} without position_ids would count this rank's tokens from 0: give their "
                "positions in the whole sequence, as in split(torch.arange(S)[None], mesh, layout, "
                "1)"
            )
        ring, ulysses = place.degrees
        whole = places.shape[-1] * ring * ulysses if layout is None else layout.seq_len
        reach.check(kind, whole, whole)

    hook = inner.register_forward_pre_hook(check, with_kwargs=True)
    try:
        with sdpa.context_parallel(place, layout, checked=inner, **options) as mode:
            yield mode
    finally:
        hook.remove()


def _try(model: Any, mesh: AttentionMesh) -> Reach:
    """Refuse a model that computes something else over a mesh; return what it reaches."""
    kind, device = type(model).__name__, next(model.parameters()).device
    ring, ulysses = mesh.degrees
    layout = SequenceLayout((_TOKENS * ring * ulysses,), ring, ulysses)
    ids = torch.arange(layout.seq_len, device=device)[None] % 7 + 1
    places = torch.arange(layout.seq_len, device=device)[None]
    own_ids, own_places = (split(x, mesh, layout, 1) for x in (ids, places))

    def call(ids: Tensor, **inputs: Any) -> Any:
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
        whole = outputs_of(model, partial(call, ids), own)  # counts positions itself
        with sdpa.context_parallel(mesh, checked=model):
            over_ranks = partial(call, own_ids, position_ids=own_places)
            parts = outputs_of(model, over_ranks, lambda x: x)
    noise = NOISE * torch.finfo(next(reversed(parts.values())).dtype).eps
    fault, last = None, list(parts)[-1]
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
    with as_in_use(model), torch.no_grad():
        return _reach(model, kind, call, ids)


def _reach(model: Any, kind: str, call: Callable[..., Any], ids: Tensor) -> Reach:
    """Return what a model reaches, from the masks and settings that its attention gets."""
    register_attention()
    config = model.config
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    before = {"": config._attn_implementation}
    before |= {name: x._attn_implementation for name, x in parts.items() if x is not None}
    alone = Alone([ids.shape[1]], ids.device)
    model.set_attn_implementation(NAME)
    try:
        call(ids, bascule_step=alone)
    finally:
        model.set_attn_implementation(before)
    if not alone.seen:
        raise ConfigError(
            f"{kind} does not attend through transformers' AttentionInterface, so its windows "
            "and settings are not known: it cannot be split by context_parallel"
        )
    windows = [width for width, _ in alone.seen]
    for _, settings in alone.seen:
        windows.append(settings.pop("sliding_window", None) or 0)
        check_settings(settings, 0)
    return reach_of(model, windows)
