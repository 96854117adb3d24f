"""Describe the items that ranks bring to a step (sequences, images, ..) as integers to gather.

Legend: n items, M microbatches, R ranks that bring items. Items are sorted by microbatch, then by
the rank that brought them, then in that rank's order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.checks import check_lengths
from bascule.errors import ConfigError
from bascule.plan.masks import Mask, Masks, masks_of


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequences of a rank, if they have masks or cross-attention besides lengths.

    Args:
        seq_lens: Tokens of each sequence.
        masks: One mask for all sequences, or a list with one per sequence: "full", "causal", or
            spans. All ranks or none have masks. None: each attention call says if it is causal.
        context_lens: Cross-attention tokens of each sequence, such as text; None without any.
    """

    seq_lens: npt.ArrayLike
    masks: str | Sequence[Mask] | None = None
    context_lens: npt.ArrayLike | None = None


_DEFAULTS = {
    "lens": -1,  # no length: this column is always sent
    "num_bytes": 0,
    "weights": 1,
    "forms": 0,
    "pairs": int(np.float64(-1.0).view(np.int64)),
    "context_lens": 0,
}
"""Columns of the table; one that has only its default is not sent."""

_DEFAULT_ROWS = np.array([*_DEFAULTS.values()])[:, None]
_MASKED = len(_DEFAULTS)  # number of the bit that tells that masks follow


@dataclass(frozen=True, eq=False)
class Offer:
    """The items that ranks brought to a step."""

    counts: Ints  # (M, R) items of each microbatch and rank
    table: Ints  # (columns, n) as in `_DEFAULTS`
    masks: tuple[Masks | None, ...]  # of each microbatch; None: tokens see everything

    @classmethod
    def of(
        cls,
        counts: npt.ArrayLike,
        lens: npt.ArrayLike,
        masks: Sequence[Masks | None] = (),
        **columns: npt.ArrayLike | None,
    ) -> Self:
        """Make an offer of items from counts (M, R) and some of the columns; pairs are floats."""
        counts = np.asarray(counts, np.int64)
        table = np.repeat(_DEFAULT_ROWS, len(np.asarray(lens)), axis=1)
        for row, name in enumerate(_DEFAULTS):
            if (values := lens if name == "lens" else columns.get(name)) is not None:
                kind = np.float64 if name == "pairs" else np.int64
                table[row] = np.asarray(values, kind).view(np.int64)
        return cls(counts, table, tuple(masks) or (None,) * len(counts))

    @classmethod
    def stacked(cls, offers: "Sequence[Offer]") -> "Offer":
        """Join the microbatches of the same ranks, one after another."""
        if len(offers) == 1:
            return offers[0]
        counts = np.concatenate([offer.counts for offer in offers])
        table = np.concatenate([offer.table for offer in offers], axis=1)
        return cls(counts, table, tuple(mask for offer in offers for mask in offer.masks))

    @classmethod
    def from_words(cls, gathered: Sequence[Ints]) -> Self:
        """Decode and join the words of R ranks, in order; words after an offer are ignored."""
        num_micro = int(gathered[0][0])
        counts = np.stack([words[2 : 2 + num_micro] for words in gathered], axis=1)
        sizes = counts.sum(axis=0).tolist()
        table = np.repeat(_DEFAULT_ROWS, sum(sizes), axis=1)
        masks: list[list[Masks | None]] = [[None] * len(gathered) for _ in range(num_micro)]
        first = 0
        for rank, (words, size) in enumerate(zip(gathered, sizes, strict=True)):
            present, start = int(words[1]), 2 + num_micro
            rows = [row for row in range(_MASKED) if present >> row & 1]
            end = start + len(rows) * size
            table[rows, first : first + size] = words[start:end].reshape(len(rows), size)
            first += size
            if present >> _MASKED:
                for micro, mask in enumerate(_read_masks(words[end:], counts[:, rank])):
                    masks[micro][rank] = mask
        if num_micro > 1:
            micro = [np.repeat(np.arange(num_micro), of_rank) for of_rank in counts.T]
            table = table[:, np.argsort(np.concatenate(micro), kind="stable")]
        return cls(counts, table, tuple(map(_joined, masks, counts)))

    def to_words(self) -> Ints:
        """Encode the items of a rank: M, bits of the columns sent, M counts, columns, masks."""
        is_present = (self.table != _DEFAULT_ROWS).any(axis=1)
        is_present[0] = True
        present = int(is_present @ (1 << np.arange(_MASKED)))
        spans = list[Ints]()
        if any(self.masks):
            present |= 1 << _MASKED
            spans.append(np.array([-1 if mask is None else mask.words.size for mask in self.masks]))
            spans += [part for mask in self.masks if mask for part in (mask.counts, mask.words)]
        head = np.array([len(self.counts), present, *self.counts.sum(axis=1)], np.int64)
        return np.concatenate([head, self.table[is_present].ravel(), *spans])

    @cached_property
    def microbatches(self) -> "list[Offer]":
        """The offer of each microbatch."""
        if len(self.counts) == 1:
            return [self]
        tables = np.split(self.table, np.cumsum(self.counts.sum(axis=1))[:-1], axis=1)
        parts = zip(self.counts[:, None], tables, self.masks, strict=True)
        return [Offer(counts, table, (masks,)) for counts, table, masks in parts]

    @cached_property
    def num_ranks(self) -> int:
        """R, the number of ranks that bring items."""
        return self.counts.shape[1]

    @cached_property
    def lens(self) -> Ints:
        """(n,) tokens of each item."""
        return self.table[0]

    @cached_property
    def num_bytes(self) -> Ints:
        """(n,) bytes that each item takes when it is sent."""
        return self.table[1]

    @cached_property
    def weights(self) -> Ints:
        """(n,) weight of each item in the mean over all items."""
        return self.table[2]

    @cached_property
    def forms(self) -> Ints:
        """(n,) shape number of each item; items with the same number fit into one call."""
        return self.table[3]

    @cached_property
    def pairs(self) -> Floats:
        """(n,) numbers of (query, key) pairs that attention computes; -1: not known."""
        return self.table[4].view(np.float64)

    @cached_property
    def context_lens(self) -> Ints | None:
        """(n,) cross-attention tokens of each item; None without any."""
        lens = self.table[5]
        return lens if lens.any() else None

    @cached_property
    def owner(self) -> Ints:
        """(n,) rank that brought each item."""
        return np.repeat(np.arange(self.counts.size) % self.num_ranks, self.counts.ravel())

    @cached_property
    def micro(self) -> Ints:
        """(n,) microbatch of each item."""
        return np.repeat(np.arange(len(self.counts)), self.counts.sum(axis=1))

    @cached_property
    def num_pairs(self) -> Floats | None:
        """(n,) numbers of (query, visible key) pairs; None if each query sees its whole item."""
        lens, pairs = self.lens.astype(np.float64), self.pairs
        contexts = self.context_lens
        if any(self.masks):
            each = zip(self.masks, self.microbatches, strict=True)
            pairs = np.concatenate([x.lens**2.0 if m is None else m.num_pairs() for m, x in each])
        elif contexts is None and not (pairs >= 0).any():
            return None
        within = np.where(pairs >= 0, pairs, lens * lens)
        return within if contexts is None else within + lens * contexts

    def sums(self, ranks: Ints, values: Ints | Floats) -> Floats:
        """Return (M, R) sums of the items' `values`, by microbatch and by the (n,) `ranks`."""
        cells = self.micro * self.num_ranks + ranks
        sums = np.bincount(cells, values, self.counts.size)
        return sums.reshape(self.counts.shape).astype(np.float64)


NO_ITEMS = Offer.of([[0]], [])
"""The offer of a rank that has none."""


def _read_masks(words: Ints, counts: Ints) -> Iterator[Masks | None]:
    """Read the masks of a rank's sequences in each microbatch."""
    num_spans, words = words[: counts.size].tolist(), words[counts.size :]
    for count, num in zip(counts.tolist(), num_spans, strict=True):
        if num < 0:
            yield None
            continue
        yield Masks.from_words(words[:count], words[count : count + num])
        words = words[count + num :]


def _joined(masks: Sequence[Masks | None], counts: Ints) -> Masks | None:
    """Join the masks of all ranks; refuse sequences with masks beside others without."""
    without = [rank for rank in np.flatnonzero(counts).tolist() if masks[rank] is None]
    if len(without) == np.count_nonzero(counts):
        return None
    if without:
        wrong = f"ranks {without} give no masks, and other ranks do"
        raise ConfigError(f'{wrong}: give masks=.. on all ranks, "full" where tokens see all')
    return Masks.joined([mask for mask in masks if mask is not None])


def offer_of(loaded: Sequence[npt.ArrayLike | Sequences], num_ranks: int | None = None) -> Offer:
    """Check the sequences of all ranks: one list of lengths or one `Sequences` per rank."""
    is_list = isinstance(loaded, list | tuple)
    if not is_list or not any(isinstance(item, Sequences) for item in loaded):
        counts, lens = check_lengths(cast(Sequence[npt.ArrayLike], loaded), num_ranks)
        return Offer.of(counts[None], lens)
    sequences = [item if isinstance(item, Sequences) else Sequences(item) for item in loaded]
    counts, lens = check_lengths([local.seq_lens for local in sequences], num_ranks)
    masks, contexts = list[Masks | None](), list[Ints]()
    lens_of = np.split(lens, np.cumsum(counts)[:-1])
    for rank, local in enumerate(sequences):
        masks.append(masks_of(rank, local.masks, lens_of[rank]))
        contexts.append(_contexts(rank, local.context_lens, lens_of[rank]))
    joined = [_joined(masks, counts)]
    return Offer.of(counts[None], lens, joined, context_lens=np.concatenate(contexts))


def _contexts(rank: int, context_lens: npt.ArrayLike | None, seq_lens: Ints) -> Ints:
    if context_lens is None:
        return np.zeros_like(seq_lens)
    try:
        (count,), lens = check_lengths([context_lens])
    except ConfigError as error:
        raise ConfigError(f"context_lens: {str(error).replace('rank 0', f'rank {rank}')}") from None
    if count != seq_lens.size:
        needed = f"{seq_lens.size} sequences: give one per sequence, 0 without a context"
        raise ConfigError(f"rank {rank}: {count} context_lens for {needed}")
    return lens
