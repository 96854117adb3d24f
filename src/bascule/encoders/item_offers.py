"""What a rank brings to a balanced encoder: its items, or pieces of them, ready to travel."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from bascule.comm.items import Parcel, mapped, num_rows, parcel
from bascule.encoders.items import EncoderTable, Item, Length, form_of
from bascule.errors import ConfigError
from bascule.plan.checks import whole

_PIECES_A_RANK = 4
"""Pieces of a long item for each rank: as even as whole items of that size would be."""


@dataclass(frozen=True, slots=True)
class Describing:
    """How items are described.

    Attributes:
        module: The encoder, unwrapped.
        table: What its items are.
        length_fn: Tokens of an item; None: as the table says.
        device: Where tensors are.
        num_pieces: Most pieces of an item.
        travel: Whether any may go to another rank.
    """

    module: nn.Module
    table: EncoderTable
    length_fn: Callable[[Item], Length] | None
    device: torch.device
    num_pieces: int
    travel: bool

    @staticmethod
    def num_pieces_of(num_ranks: int, has_limits: bool) -> int:
        """Where there are limits, as many as can be: what is too long for a rank may fit so."""
        return sys.maxsize if has_limits else _PIECES_A_RANK * num_ranks if num_ranks > 1 else 1

    def offer(self, items: Sequence[Item]) -> "Offer":
        """The items of this rank.

        Raises:
            ConfigError: Something is wrong with one; names its place.
        """
        offer = Offer()
        for place, item in enumerate(items):
            try:
                pieces = [item]
                if self.table.num_items(item) != 1:
                    raise ConfigError("it has rows of several items: give each by itself")
                if self.table.split is not None and self.num_pieces > 1:
                    pieces = self.table.split(item, self.num_pieces)
                described = [self._described(piece) for piece in pieces]
            except Exception as error:
                text = str(error) if isinstance(error, ConfigError) else repr(error)
                raise ConfigError(f"item {place}: {text}") from error
            offer.items.extend(pieces)
            offer.counts.append(len(pieces))
            offer.parcels.extend(sent for sent, _ in described)
            offer.numbers.extend(n for _, numbers in described for n in numbers)
        return offer

    def _described(self, item: Item) -> tuple[Parcel, tuple[int, ...]]:
        """An item ready to travel, and what the others must know of it."""
        length = self.length_fn(item) if self.length_fn else None
        if length is None:
            assert self.table.length is not None
            length = self.table.length(self.module, item)
        tokens, pairs = length if isinstance(length, tuple) else (length, -1.0)
        tokens = whole("length_fn", tokens, 1)
        bits = int(np.float64(pairs).view(np.int64))
        sent = Parcel((), sum(x.nbytes for x in item.values() if isinstance(x, Tensor)))
        if self.travel:
            sent = parcel(mapped(dict(item), Tensor.detach), self.device)
        form = form_of(item, self.device)
        return sent, (tokens, bits, form, num_rows(sent), sent.num_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Items of this rank.

    Attributes:
        items: Or pieces of them.
        counts: Of each item, its pieces.
        parcels: Of each piece, what travels.
        numbers: Of each piece, what the others must know.
    """

    items: list[Item] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    parcels: list[Parcel] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    @property
    def wants_gradient(self) -> bool:
        """Whether a tensor of an item requires one."""
        tensors = (x for one in self.items for x in one.values() if isinstance(x, Tensor))
        return any(x.requires_grad for x in tensors)

    def whole(self, leaves: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """The tensors of the items, from those of their pieces, one after another."""
        pieces = iter(leaves)
        groups = [list(islice(pieces, count)) for count in self.counts]
        return [
            own[0] if len(own) == 1 else [torch.cat(part) for part in zip(*own, strict=True)]
            for own in groups
        ]
