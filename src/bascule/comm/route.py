"""Move rows of tensors between ranks: one all-to-all each way, bit for bit, as bytes.

`move` is one operator of torch, in eager code and in recorded programs alike: one node of a graph,
and one thing that a checkpointing policy can keep. It finds its route by a number, since a graph
serves steps of many plans, and takes the number of rows that arrive, which may be a symbol.

Shapes: T rows (tokens) at home, S rows that arrive.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from bascule.arrays import Ints
from bascule.comm.collectives import as_bytes, start_all_to_all, table_on
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup, Staging, this_world
from bascule.comm.quantized import Format, Quantized
from bascule.comm.transforms import refuse_transforms, wants_gradients
from bascule.errors import ConfigError
from bascule.plan.routes import Route

# Bytes are moved as integers of the same width: every back end has kernels for these.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Check = Callable[[str, int, str, Sequence[Any], Sequence[bool]], None]
"""Checks a move by its name, rows to send, and the tensors' names, values and need of gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class _Direction:
    """The tables of one direction of a route, on its device."""

    name: str  # of the collective, for errors
    send_index: Tensor | None  # as in `Route`
    send_splits: list[int]
    recv_splits: list[int]
    recv_index: Tensor | None
    sum_index: Tensor | None  # (rows received,) the row at home of each copy; None: no copies
    num_moved: int  # rows that leave this rank


@dataclass(eq=False)
class BoundRoute:
    """A route on a group and a device; operators find it by its number while it is referenced."""

    made_of: Route | Callable[[], Route]  # the route, or what makes it at its first use
    group: RankGroup
    device: torch.device  # of the rows
    num_rows: tuple[int, int]  # (T, S)
    step: int  # for errors, as the names
    names: tuple[str, str]  # of moves there, and back
    # whether a row may go to several ranks, or to none: its copies are summed on the way back
    has_copies: bool = False
    check: Check | None = None  # called before a move that is no gradient
    count: Callable[[int], None] | None = None  # gets the bytes that such a move sends
    number: int = 0  # of `World.add`; 0 before

    @cached_property
    def route(self) -> Route:
        """The route; made at its first use."""
        return self.made_of if isinstance(self.made_of, Route) else self.made_of()

    @cached_property
    def there(self) -> _Direction:
        """Tables of the move away from home."""
        return self._direction(self.names[0], self.route)

    @cached_property
    def back(self) -> _Direction:
        """Tables of the move back home."""
        route, sum_index = self.route, None
        if self.has_copies:  # copies come back in the order in which they were sent
            route = Route(None, route.send_splits, route.recv_splits, route.recv_index)
            sum_index = self.there.send_index
        return self._direction(f"{self.names[0]} back", route.inverse(), sum_index)

    def _direction(self, name: str, route: Route, sum_index: Tensor | None = None) -> _Direction:
        send_splits, recv_splits = route.send_splits.tolist(), route.recv_splits.tolist()
        return _Direction(
            name=name,
            send_index=self._on_device(route.send_index),
            send_splits=send_splits,
            recv_splits=recv_splits,
            recv_index=self._on_device(route.recv_index),
            sum_index=sum_index,
            num_moved=sum(send_splits) - send_splits[self.group.rank],
        )

    def _on_device(self, index: Ints | None) -> Tensor | None:
        return None if index is None else table_on(index, self.device)


def move(
    route: BoundRoute,
    xs: Sequence[Tensor],
    *,
    names: str = "rows",
    back: bool = False,
    wire: Quantized | None = None,
) -> list[Tensor]:
    """Move the rows of tensors along a route, by one all-to-all. Differentiable.

    Each (T, ...) tensor arrives as (S, ...); with `back`, each (S, ...) tensor as (T, ...). The
    backward pass moves gradients the other way, by one more all-to-all. Dtypes, widths, and which
    tensors require a gradient must be the same on all ranks.

    Args:
        route: Where rows go.
        xs: The tensors.
        names: Names of the tensors, separated by commas, for `route.check`.
        back: Whether rows go home.
        wire: 8-bit format in which rows (T, D) are sent; gradients keep their dtype.

    Raises:
        ConfigError: `route.check` refuses the tensors. CommError: an exchange failed.
    """
    name, num_rows = route.names[back], route.num_rows[not back]
    refuse_transforms(name, *xs)
    needs = wants_gradients(xs)
    is_odd = [type(x) is not Tensor or x.is_meta or x.layout != torch.strided for x in xs]
    # `check` refuses on all ranks what operators do not take.
    if route.check is not None and (any(is_odd) or not xs) and not torch.compiler.is_compiling():
        with shared(f"step {route.step}: {name}"):
            route.check(name, route.num_rows[back], names, xs, needs)
    if not route.number:
        route.number = this_world().add(route)
    along = -route.number if back else route.number
    return _operator(list(xs), along, names, needs, num_rows, "" if wire is None else wire.format)


torch.library.define(  # by its schema: `custom_op` costs 25 microseconds more a call
    "bascule::move",
    "(Tensor[] xs, SymInt along, str names, bool[] needs, SymInt num_rows, str wire) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)
_operator = torch.ops.bascule.move.default
has_side_effect(_operator)  # an unused result must still be exchanged


@torch.library.impl("bascule::move", "CompositeExplicitAutograd")
def _move(
    xs: list[Tensor], along: int, names: str, needs: list[bool], num_rows: int, wire: str
) -> list[Tensor]:
    """Move rows along the route of a number, back if negative; without names they are gradients."""
    route, is_back = this_world().find(abs(along)), along < 0
    name = route.names[is_back]
    what = name if names else f"{route.names[not is_back]}, backward"
    with shared(f"step {route.step}: {what}"):
        if names and route.check is not None:
            route.check(name, route.num_rows[is_back], names, xs, needs)
        direction = route.back if is_back else route.there
        if names and route.count is not None:
            row_bytes = sum([x.shape[1:].numel() * x.element_size() for x in xs])
            route.count(direction.num_moved * row_bytes)
        if wire:
            quantized = Quantized(cast(Format, wire))
            rows = _exchanged(route, direction, list(map(quantized.pack, xs)))
            return [quantized.unpack(row, x.dtype) for row, x in zip(rows, xs, strict=True)]
        rows = _exchanged(route, direction, xs)
        if direction.sum_index is None:
            return rows
        return [_summed(copies, direction.sum_index, route.num_rows[0]) for copies in rows]


def _summed(copies: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Sum the copies of each row."""
    wide = torch.promote_types(copies.dtype, torch.float32)
    total = copies.new_zeros(num_rows, *copies.shape[1:], dtype=wide)
    return total.index_add_(0, index, copies.to(wide)).to(copies.dtype)


@torch.library.register_fake("bascule::move")
def _(
    xs: list[Tensor], along: int, names: str, needs: list[bool], num_rows: int, wire: str
) -> list[Tensor]:
    return [x.new_empty((num_rows, *x.shape[1:])) for x in xs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    xs, along, _, needs, *_ = inputs
    # A tensor without a gradient here has none there either: positions stay out of the graph.
    constant = [x for x, is_needed in zip(output, needs, strict=True) if not is_needed]
    ctx.mark_non_differentiable(*constant)
    ctx.needs, ctx.along, ctx.num_rows = needs, along, xs[0].shape[0]
    # Recorded programs have a symbol in place of the number: there the step keeps the route.
    ctx.route = this_world().find(abs(along)) if isinstance(along, int) else None


def _gradients(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    needed = [x for x, is_needed in zip(grads, ctx.needs, strict=True) if is_needed]
    moved = iter(_operator(needed, -ctx.along, "", [True] * len(needed), ctx.num_rows, ""))
    return [next(moved) if is_needed else None for is_needed in ctx.needs], *(None,) * 5


torch.library.register_autograd("bascule::move", _gradients, setup_context=_keep)


def _exchanged(route: BoundRoute, direction: _Direction, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows that arrive, copies of a row unsummed."""
    rows = [_as_integers(tensor) for tensor in tensors]
    offsets, row_bytes = _row_format(rows)
    staging = route.group.calls.staging
    sent = _pack(rows, offsets, row_bytes, direction.send_index, staging)
    num_received = sum(direction.recv_splits)
    outs = [x.new_empty(num_received, *x.shape[1:]) for x in tensors]
    arrives_in_place = len(outs) == 1 and direction.recv_index is None
    received = (
        as_bytes(outs[0]).view(num_received, row_bytes)
        if arrives_in_place
        else staging.take("rows received", (num_received, row_bytes), sent)
    )
    where = f"step {route.step}: all_to_all ({direction.name})"
    splits = direction.recv_splits, direction.send_splits
    start_all_to_all(route.group, where, received, sent, *splits)()
    if not arrives_in_place:
        for out, offset in zip(map(_as_integers, outs), offsets, strict=True):
            _select(_part(received, out, offset), direction.recv_index, out)
    return outs


def _as_integers(tensor: Tensor) -> Tensor:
    """Return the same bits as integers, (T, width); a view of a contiguous tensor."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().reshape(tensor.shape[0], tensor.shape[1:].numel())
    return flat.view(INTEGERS[tensor.element_size()])


def _row_format(rows: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the byte at which each tensor begins in a row, widest first, and a row's bytes."""
    order = sorted(range(len(rows)), key=lambda i: -rows[i].element_size())
    offsets, end = [0] * len(rows), 0
    for i in order:
        offsets[i] = end
        end += rows[i].shape[1] * rows[i].element_size()
    alignment = max(row.element_size() for row in rows)
    return offsets, -(-end // alignment) * alignment


def _pack(
    rows: Sequence[Tensor],
    offsets: Sequence[int],
    row_bytes: int,
    index: Tensor | None,
    staging: Staging,
) -> Tensor:
    """Return the tensors side by side, (T, row_bytes) uint8, rows in the order of sending."""
    if len(rows) == 1 and index is None:
        return as_bytes(rows[0].contiguous()).view(rows[0].shape[0], row_bytes)
    num_rows = rows[0].shape[0] if index is None else index.shape[0]
    like = rows[0].new_empty(0, dtype=torch.uint8)
    buffer = staging.take("rows sent", (num_rows, row_bytes), like)
    for row, offset in zip(rows, offsets, strict=True):
        _select(row, index, _part(buffer, row, offset))
    return buffer


def _part(buffer: Tensor, row: Tensor, offset: int) -> Tensor:
    """Return the columns of the byte buffer that hold `row`'s tensor, as its integers."""
    if row.shape[1] == 0:  # rows of no bytes cannot be viewed as wider integers
        return row.new_empty(buffer.shape[0], 0)
    return buffer.view(row.dtype).narrow(1, offset // row.element_size(), row.shape[1])


def _select(rows: Tensor, index: Tensor | None, out: Tensor) -> None:
    """Write `out = rows[index]`, in one pass."""
    if index is None:
        out.copy_(rows)
    else:
        torch.index_select(rows, 0, index, out=out)


def check_rows(what: str, name: str, x: Any, num_rows: int, device: torch.device) -> None:
    """Refuse a tensor that cannot be exchanged."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"{what}: {name!r} is a {type(x).__name__}, not a tensor")
    if x.layout != torch.strided or x.is_nested or x.is_quantized or hasattr(x, "placements"):
        wrong = f"{what}: {name!r} is a {type(x).__name__} of layout {x.layout}"
        raise ConfigError(f"{wrong}: give it dense, by .to_dense(), .dequantize() or .to_local()")
    if x.dim() < 1 or x.shape[0] != num_rows or x.device.type != device.type:
        wrong = f"{what}: {name!r} has shape {tuple(x.shape)} on {x.device}"
        raise ConfigError(f"{wrong}: give {num_rows} rows, as the plan has here, on {device}")


def has_gradient(tensor: Tensor) -> bool:
    """Return true for a dtype whose values can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()
