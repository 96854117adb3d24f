"""Tokens of all ranks of a mesh on every rank, and sums over ranks of what every rank has.

Operators of torch, for compilers; the mesh goes by its name, lengths as symbols.

Shapes: S tokens of the whole sequence, T tokens that this rank answers for.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bascule.attention.layout import SequenceLayout, num_tokens, take_runs
from bascule.comm.collectives import all_gather, reduce_scatter
from bascule.comm.groups import RankGroup
from bascule.comm.mesh import AttentionMesh, Place, mesh_named

_SEPARATOR = "\n"


def form_of(ranks: Place, layout: SequenceLayout) -> str:
    """Return the name of a layout on a mesh, but for its segments."""
    return _SEPARATOR.join((ranks.name, f"{layout.zigzag}", f"{int(layout.stripe)}"))


def layout_on(form: str, segments: Sequence[int]) -> tuple[AttentionMesh, SequenceLayout]:
    """Return the mesh and the layout of a name; without what is replicated."""
    name, zigzag, stripe = form.split(_SEPARATOR)
    mesh = mesh_named(name)
    degrees, is_zigzag = mesh.degrees, zigzag == "True"
    return mesh, SequenceLayout(tuple(segments), *degrees, is_zigzag, stripe=int(stripe))


def replicated(own: Tensor, ranks: Place, layout: SequenceLayout) -> Tensor:
    """Complete replicated segments, from (B, H, T, D) to (B, H, all tokens of a rank, D)."""
    if ranks.degrees == (1, 1):
        return own
    parts = list(own.split([num_tokens(runs) for runs in layout.own(*ranks.place)], 2))
    chosen = sorted(layout.replicated)
    segments = [layout.segments[segment] for segment in chosen]
    rows = torch.cat([parts[segment] for segment in chosen], 2).movedim(2, 0)
    whole = gather_tokens(rows, segments, form_of(ranks, layout), True).movedim(0, 2)
    for segment, part in zip(chosen, whole.split(segments, 2), strict=True):
        parts[segment] = part
    return torch.cat(parts, 2)


def gather_rows(x: Tensor, group: RankGroup, layout: SequenceLayout) -> Tensor:
    """Gather as `gather_tokens` does, where nothing is recorded."""
    runs, padded = _gathered_runs(layout)
    rows = x.new_zeros(padded, *x.shape[1:])
    rows[: x.shape[0]] = x
    gathered = all_gather(group, "all_gather (tokens)", rows).flatten(0, 1)
    return torch.cat([gathered[row : row + length] for row, _, length in runs] or [gathered[:0]])


@torch.library.custom_op("bascule::gather_tokens", mutates_args=())
def gather_tokens(x: Tensor, segments: Sequence[int], form: str, sums_gradients: bool) -> Tensor:
    """Gather (T, ..) tokens of a rank to (S, ..), those of all, in the order of the sequence.

    `sums_gradients` as in `api.gather`. `form` is that of `form_of`.
    """
    mesh, layout = layout_on(form, segments)
    assert mesh.whole is not None
    return gather_rows(x, mesh.whole, layout)


@gather_tokens.register_fake
def _(x: Tensor, segments: Sequence[int], form: str, sums_gradients: bool) -> Tensor:
    return x.new_empty(sum(segments), *x.shape[1:])


@torch.library.custom_op("bascule::reduce_tokens", mutates_args=())
def reduce_tokens(x: Tensor, segments: Sequence[int], form: str) -> Tensor:
    """Sum a rank's tokens over the ranks, (S, ..) on all to (T, ..): adjoint of `gather_tokens`."""
    mesh, layout = layout_on(form, segments)
    group = mesh.whole
    assert group is not None
    runs, padded = _gathered_runs(layout)
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.new_zeros(group.size * padded, *x.shape[1:], dtype=wide)
    for row, start, length in runs:
        rows[row : row + length] = x[start : start + length]
    parts = rows.unflatten(0, (group.size, padded))
    own = reduce_scatter(group, "reduce_scatter (tokens)", parts)
    return own[: num_tokens(layout.own_runs(*mesh.place))].to(x.dtype).clone()


@reduce_tokens.register_fake
def _(x: Tensor, segments: Sequence[int], form: str) -> Tensor:
    mesh, layout = layout_on(form, segments)
    return x.new_empty(num_tokens(layout.own_runs(*mesh.place)), *x.shape[1:])


@lru_cache(maxsize=256)
def _gathered_runs(layout: SequenceLayout) -> tuple[list[tuple[int, int, int]], int]:
    """Return (row, start in the sequence, tokens) of each run, and the padded rows of a rank."""
    places = product(range(layout.ring_degree), range(layout.ulysses_degree))
    owned = [layout.own_runs(*place) for place in places]
    padded = max(1, *map(num_tokens, owned))
    runs_in_order: list[tuple[int, int, int]] = []
    for number, runs in enumerate(owned):
        row = number * padded
        for start, stop in runs:
            runs_in_order.append((row, start, stop - start))
            row += stop - start
    return sorted(runs_in_order, key=lambda run: run[1]), padded


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.settings = inputs[1:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    segments, form, sums_gradients = ctx.settings
    if sums_gradients:
        return reduce_tokens(grad, segments, form), None, None, None
    mesh, layout = layout_on(form, segments)
    return take_runs(grad, layout.own_runs(*mesh.place), 0), None, None, None


gather_tokens.register_autograd(_gradients, setup_context=_keep)
