"""Whole samples and items between ranks, in one all-to-all of bytes, and their gradients back.

An item is a nest of tensors and plain values, of any sizes. It travels as a parcel, padded to rows;
the gradients of its floating-point tensors come back in the same way, as bytes of known sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bascule.arrays import Ints
from bascule.comm.exchange import BoundRoute, has_gradient, move_rows
from bascule.comm.groups import RankGroup
from bascule.comm.samples.nests import leaves_of, mapped, rebuilt
from bascule.comm.samples.sample_bytes import ALIGNMENT, Parcel, read
from bascule.comm.transforms import only_first, refuse_transforms
from bascule.plan.routes import Ranks, Route

ROW_BYTES = 512
"""What an item is padded to on the wire: index tables have a number a row."""


def num_rows(one: Parcel) -> int:
    """Rows of an item on the wire."""
    return -(-one.num_bytes // ROW_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class ItemMove:
    """Which items go where. They are listed alike on all ranks, in the order in which they lie.

    Attributes:
        source: (n,) rank that has each item.
        dest: (n,) rank that gets it.
        group: The ranks.
        device: Where the tensors are.
        step: Step number in errors.
        name: Its name in errors.
    """

    source: Ranks
    dest: Ranks
    group: RankGroup
    device: torch.device
    step: int
    name: str

    @property
    def back(self) -> "ItemMove":
        """Every item back to the rank that had it."""
        args = self.group, self.device, self.step, f"{self.name} back"
        return ItemMove(self.dest, self.source, *args)


def move_parcels(
    move: ItemMove,
    parcels: Sequence[Parcel],
    rows: Ints,
    *,
    starts: Ints | None = None,
    of: int = -1,
) -> list[Tensor]:
    """The bytes of the items that arrive, each in rows of its own; one all-to-all.

    Args:
        move: Which items go where.
        parcels: Those that this rank sends.
        rows: (n,) rows of each item; at least of those that this rank sends or gets.
        starts: (n,) first row of each item where it is. Default: items lie as listed.
        of: The call whose gradients these are.
    """
    rank, device = move.group.rank, move.device
    route = Route.of_items(move.source, move.dest, rows, rank, move.group.size, starts=starts)
    total = sum(map(num_rows, parcels))
    sent, at = torch.empty(total, ROW_BYTES, dtype=torch.uint8, device=device), 0
    for one in parcels:
        one.write(sent[at : at + num_rows(one)].flatten()[: one.num_bytes])
        at += num_rows(one)
    bound = BoundRoute(route.lean, move.group, device, move.step, move.name)
    (received,) = move_rows(bound, [sent], of=of)
    return [part.flatten() for part in received.split(rows[move.dest == rank].tolist())]


def move_items(
    move: ItemMove, parcels: Sequence[Parcel], rows: Ints, starts: Ints | None = None
) -> list[Any]:
    """The items that arrive. No gradients. As `move_parcels`."""
    return [read(part) for part in move_parcels(move, parcels, rows, starts=starts)]


def move_items_with_gradients(
    move: ItemMove, items: Sequence[Any], parcels: Sequence[Parcel], rows: Ints, token: Tensor
) -> tuple[list[Any], Tensor]:
    """`move_items`, differentiable: gradients of tensors come back to the items that were sent.

    The backward is one all-to-all, in which every rank takes part if the returned token has a
    gradient on it, or any of what arrived: also one that sends and gets nothing.

    Args:
        move: Which items go where.
        items: Those that this rank sends.
        parcels: The same, ready to be written.
        rows: (n,) rows of each item; at least of those that this rank sends or gets.
        token: () What must come after this in the backward pass; requires a gradient.

    Returns:
        The items that arrive, and a token () for what comes before it in the backward pass.
    """
    leaves = [leaf for item in items for leaf in leaves_of(item)]
    refuse_transforms(move.name, token, *leaves)
    counts = [len(leaves_of(item)) for item in items]
    arrived: list[Any] = []
    token, *received = _Moved.apply(move, parcels, rows, counts, arrived, token, *leaves)
    flat = iter(received)
    return [rebuilt(item, flat) for item in arrived], token


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        move: ItemMove,
        parcels: Sequence[Parcel],
        rows: Ints,
        counts: list[int],
        arrived: list[Any],
        token: Tensor,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        # Not views of what was received: who gets them may write into them.
        arrived += [mapped(item, torch.clone) for item in move_items(move, parcels, rows)]
        ctx.move, ctx.number = move, move.group.calls.number
        flat = [leaves_of(item) for item in arrived]
        ctx.sent = [[_Form.of(x) for x in own] for own in _runs(leaves, counts)]
        ctx.received = [[_Form.of(x) for x in own] for own in flat]
        received = [x for own in flat for x in own]
        ctx.mark_non_differentiable(*(x for x in received if not has_gradient(x)))
        ctx.save_for_backward(token)
        return token.new_zeros(()), *received

    @staticmethod
    @only_first
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        move: ItemMove = ctx.move.back
        counts = [len(own) for own in ctx.received]
        parcels = [
            _as_parcel([x for x, form in zip(own, forms, strict=True) if form.is_wanted])
            for own, forms in zip(_runs(grads[1:], counts), ctx.received, strict=True)
        ]
        rank = move.group.rank
        # The sizes of all others are those of items that neither leave this rank nor reach it.
        rows = np.zeros(move.source.shape, np.int64)
        rows[move.dest == rank] = [_num_rows_of(forms) for forms in ctx.sent]
        rows[move.source == rank] = [_num_rows_of(forms) for forms in ctx.received]
        parts = move_parcels(move, parcels, rows, of=ctx.number)
        found = [_gradients(*one) for one in zip(parts, ctx.sent, strict=True)]
        back = [grad for own in found for grad in own]
        return None, None, None, None, None, torch.zeros_like(token), *back


@dataclass(frozen=True, slots=True)
class _Form:
    """What a tensor's gradient looks like."""

    shape: torch.Size
    dtype: torch.dtype
    is_wanted: bool

    @classmethod
    def of(cls, x: Tensor) -> "_Form":
        return cls(x.shape, x.dtype, has_gradient(x))

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def padded(self) -> int:
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


def _num_rows_of(forms: Sequence[_Form]) -> int:
    return -(-sum(form.padded for form in forms if form.is_wanted) // ROW_BYTES)


def _as_parcel(grads: Sequence[Tensor]) -> Parcel:
    parts = tuple(grad.contiguous().view(-1).view(torch.uint8) for grad in grads)
    return Parcel(parts, sum(_Form.of(grad).padded for grad in grads))


def _gradients(buffer: Tensor, forms: Sequence[_Form]) -> list[Tensor | None]:
    """Of each tensor of an item, from bytes that `_as_parcel` wrote."""
    found: list[Tensor | None] = []
    at = 0
    for form in forms:
        found.append(None)
        if form.is_wanted:
            part = buffer[at : at + form.num_bytes]
            found[-1] = part.view(form.dtype).view(form.shape)
            at += form.padded
    return found


def _runs(values: Sequence[Tensor], counts: Sequence[int]) -> list[Sequence[Tensor]]:
    """Consecutive values, so many at a time."""
    runs, at = list[Sequence[Tensor]](), 0
    for count in counts:
        runs.append(values[at : at + count])
        at += count
    return runs


def tied(token: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The token, after which the backward passes of these tensors come, with gradients of 0."""
    return _Tied.apply(token, *tensors) if tensors else token


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(token, *tensors)
        return token.new_zeros(())

    @staticmethod
    @only_first
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors)


def attached(tensor: Tensor, token: Tensor) -> Tensor:
    """The same tensor; its backward pass lets what made the token take part."""
    return _Attached.apply(tensor, token)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return tensor.view_as(tensor)

    @staticmethod
    @only_first
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        return grads[0], torch.zeros_like(token)
