"""Rows of tensors between ranks, in one collective a direction, bit for bit, as bytes.

Shapes: T rows (tokens) at the source, S rows received.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bascule.arrays import Ints
from bascule.comm.collectives import (
    all_gather,
    as_bytes,
    reduce_scatter,
    start_all_to_all,
    table_on,
)
from bascule.comm.groups import RankGroup, Staging
from bascule.comm.transforms import refuse_transforms
from bascule.errors import ConfigError
from bascule.plan.routes import Route

# Bytes are moved as integers of the same width: every back end has kernels for these.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class BoundRoute:
    """A route on a device and a group: what one exchange needs, built once per plan."""

    route: Route
    group: RankGroup
    device: torch.device
    step: int  # for errors, as the name
    name: str
    num_rows: int | None = None  # at home, if a row may go to several ranks; None: to one each

    @cached_property
    def send_index(self) -> Tensor | None:
        """`route.send_index` on the device."""
        return self._on_device(self.route.send_index)

    @cached_property
    def recv_index(self) -> Tensor | None:
        """`route.recv_index` on the device."""
        return self._on_device(self.route.recv_index)

    @cached_property
    def send_splits(self) -> list[int]:
        """Rows to each rank, as collectives take them."""
        return self.route.send_splits.tolist()

    @cached_property
    def recv_splits(self) -> list[int]:
        """Rows from each rank, as collectives take them."""
        return self.route.recv_splits.tolist()

    @cached_property
    def num_moved(self) -> int:
        """Rows that leave this rank, each copy counted."""
        return sum(self.send_splits) - self.send_splits[self.group.rank]

    def sent_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Return the bytes of the rows of tensors that leave this rank."""
        return self.num_moved * sum([x.shape[1:].numel() * x.element_size() for x in tensors])

    @cached_property
    def back_to_copies(self) -> "BoundRoute":
        """Exchange that brings every copy of a row back, in the order of `send_index`."""
        back = Route(None, self.route.send_splits, self.route.recv_splits, self.route.recv_index)
        return self._along(back.inverse())

    @cached_property
    def inverse(self) -> "BoundRoute":
        """Exchange that brings every row back; its inverse is this one again."""
        back = self._along(self.route.inverse())
        back.__dict__["inverse"] = self
        return back

    def _along(self, route: Route) -> "BoundRoute":
        return BoundRoute(route, self.group, self.device, self.step, f"{self.name} back")

    def _on_device(self, index: Ints | None) -> Tensor | None:
        return None if index is None else table_on(index, self.device)


def exchange(route: BoundRoute, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Move the rows of the tensors along the route. Differentiable; one all-to-all a direction.

    Each (T, ...) tensor arrives as (S, ...). Dtypes, widths, and which tensors require a gradient,
    are the same on all ranks. The gradient of a row sums over its copies, in float32 at least.
    """
    refuse_transforms(route.name, *tensors)
    return _Exchange.apply(route, *tensors)


class _Exchange(torch.autograd.Function):
    """Linear, so its derivatives are exchanges too, of any order."""

    @staticmethod
    def forward(ctx: Any, route: BoundRoute, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route = route
        received = move_rows(route, tensors)
        # A tensor without a gradient here has none there either: positions stay out of the graph.
        needed = ctx.needs_input_grad[1:]
        pairs = zip(received, needed, strict=True)
        ctx.mark_non_differentiable(*(t for t, is_needed in pairs if not is_needed))
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        sent = [grad for grad, is_needed in zip(grads, needed, strict=True) if is_needed]
        received = iter(_moved_back(ctx.route, _Exchange.apply, sent))
        return (None, *(next(received) if is_needed else None for is_needed in needed))


def move_back(route: BoundRoute, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of rows that `move_rows` moved."""
    return _moved_back(route, lambda way, *xs: move_rows(way, xs), grads)


def _moved_back(
    route: BoundRoute, move: Callable[..., tuple[Tensor, ...]], grads: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Bring gradients of rows back, summed over the copies of each."""
    if route.num_rows is None:
        return move(route.inverse, *grads)
    sums, index = list[Tensor](), route.send_index
    assert index is not None
    for copies in move(route.back_to_copies, *grads):
        wide = torch.promote_types(copies.dtype, torch.float32)
        total = copies.new_zeros(route.num_rows, *copies.shape[1:], dtype=wide)
        sums.append(total.index_add(0, index, copies.to(wide)).to(copies.dtype))
    return tuple(sums)


def move_rows(route: BoundRoute, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the rows that arrive; autograd does not record it."""
    rows = [_as_integers(tensor) for tensor in tensors]
    places, row_bytes = _row_format(rows)
    sent = _pack(rows, places, row_bytes, route.send_index, route.group.calls.staging)
    num_received = sum(route.recv_splits)
    outs = tuple([x.new_empty(num_received, *x.shape[1:]) for x in tensors])
    arrives_in_place = len(outs) == 1 and route.recv_index is None
    received = (
        as_bytes(outs[0]).view(num_received, row_bytes)
        if arrives_in_place
        else route.group.calls.staging.take("rows received", (num_received, row_bytes), sent)
    )
    where = f"step {route.step}: all_to_all ({route.name})"
    start_all_to_all(route.group, where, received, sent, route.recv_splits, route.send_splits)()
    if not arrives_in_place:
        for out, place in zip(map(_as_integers, outs), places, strict=True):
            _select(_part(received, out, place), route.recv_index, out)
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
    places, end = [0] * len(rows), 0
    for i in order:
        places[i] = end
        end += rows[i].shape[1] * rows[i].element_size()
    alignment = max(row.element_size() for row in rows)
    return places, -(-end // alignment) * alignment


def _pack(
    rows: Sequence[Tensor],
    places: Sequence[int],
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
    for row, place in zip(rows, places, strict=True):
        _select(row, index, _part(buffer, row, place))
    return buffer


def _part(buffer: Tensor, row: Tensor, place: int) -> Tensor:
    """Return the columns of the byte buffer that hold `row`'s tensor, as its integers."""
    if row.shape[1] == 0:  # rows of no bytes cannot be viewed as wider integers
        return row.new_empty(buffer.shape[0], 0)
    return buffer.view(row.dtype).narrow(1, place // row.element_size(), row.shape[1])


def _select(rows: Tensor, index: Tensor | None, out: Tensor) -> None:
    """Write `out = rows[index]`, in one pass."""
    if index is None:
        out.copy_(rows)
    else:
        torch.index_select(rows, 0, index, out=out)


def samples_of_all(
    tensor: Tensor, padded: int, valid: Tensor, group: RankGroup, step: int
) -> Tensor:
    """Return the per-sample rows of all ranks, in the order of ranks; one all-gather, no autograd.

    `padded` is the most samples of a rank; `valid` (N,) are the samples' rows in the padded gather.
    """
    rows = tensor.new_zeros(padded, *tensor.shape[1:])
    rows[: tensor.shape[0]] = tensor
    gathered = all_gather(group, f"step {step}: all_gather (samples)", rows)
    return gathered.flatten(0, 1).index_select(0, valid)


def sample_gradients(
    grad: Tensor, num_samples: int, padded: int, valid: Tensor, group: RankGroup, step: int
) -> Tensor:
    """Return the gradient of this rank's samples, (n, ...), in float32; one reduce-scatter."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    rows = grad.new_zeros(group.size * padded, *grad.shape[1:], dtype=wide)
    rows.index_copy_(0, valid, grad.to(wide))
    where = f"step {step}: reduce_scatter (samples' gradients)"
    own = reduce_scatter(group, where, rows.unflatten(0, (group.size, padded)))
    return own[:num_samples].to(grad.dtype)


def check_rows(what: str, name: str, x: Any, num_rows: int, device: torch.device) -> None:
    """Refuse a tensor that cannot be exchanged."""
    if not isinstance(x, Tensor):
        raise ConfigError(f"{what}: {name!r} is a {type(x).__name__}, not a tensor")
    if x.layout != torch.strided or x.is_nested or x.is_quantized or hasattr(x, "placements"):
        raise ConfigError(
            f"{what}: {name!r} is a {type(x).__name__} of layout {x.layout}: give a dense "
            "tensor of this rank's rows, as with .to_dense(), .dequantize() or .to_local()"
        )
    if x.dim() < 1 or x.shape[0] != num_rows or x.device.type != device.type:
        raise ConfigError(
            f"{what}: {name!r} has shape {tuple(x.shape)} on {x.device}: give the {num_rows} rows "
            f"that this rank's part of the plan has, on {device}"
        )


def has_gradient(tensor: Tensor) -> bool:
    """Return true for a dtype whose values can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()
