"""What ranks bring to a step (sequences, samples, images, tiles), in integers that a gather takes.

Legend: n items, M microbatches, R ranks that bring items. Items lie by microbatch, then by the rank
that brought them, then as it lists them.
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
    """The sequences of a rank, where their lengths alone do not say enough.

    Args:
        seq_lens: Tokens of each.
        masks: The tokens that each token sees: "full", "causal", or the spans of a sequence; one
            mask for all, or one a sequence. None: all, or those that each attention says. If
            sequences of one rank have masks, those of all have.
        context_lens: Tokens of the context that each attends to, as text; None without contexts.
    """

    seq_lens: npt.ArrayLike
    masks: str | Sequence[Mask] | None = None
    context_lens: npt.ArrayLike | None = None


_DEFAULTS = {
    "lens": -1,  # it always travels
    "num_bytes": 0,
    "weights": 1,
    "forms": 0,
    "pairs": int(np.float64(-1.0).view(np.int64)),
    "context_lens": 0,
}
"""Columns of the table; one whose values are all the default does not travel."""

_DEFAULT_ROWS = np.array([*_DEFAULTS.values()])[:, None]
_MASKED = len(_DEFAULTS)  # the bit that says that masks follow


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
        """Describe items by counts (M, R) and some of the columns; pairs are floats."""
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
        counts, tables = ([getattr(x, name) for x in offers] for name in ("counts", "table"))
        masks = tuple(x for offer in offers for x in offer.masks)
        return cls(np.concatenate(counts), np.concatenate(tables, axis=1), masks)

    @classmethod
    def from_words(cls, gathered: Sequence[Ints]) -> Self:
        """Join the words of R ranks, in their order; other words may follow those of an offer."""
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
                for of_micro, own in zip(
                    masks, _read_masks(words[end:], counts[:, rank]), strict=True
                ):
                    of_micro[rank] = own
        if num_micro > 1:
            micro = [np.repeat(np.arange(num_micro), own) for own in counts.T]
            table = table[:, np.argsort(np.concatenate(micro), kind="stable")]
        return cls(counts, table, tuple(map(_joined, masks, counts)))

    def to_words(self) -> Ints:
        """Describe them in integers, but for who brought what.

        These are M, the columns that follow as bits, M counts, the columns, and the masks.
        """
        is_present = (self.table != _DEFAULT_ROWS).any(axis=1)
        is_present[0] = True
        present = int(is_present @ (1 << np.arange(_MASKED)))
        spans = list[Ints]()
        if any(self.masks):
            present |= 1 << _MASKED
            spans.append(np.array([-1 if x is None else x.words.size for x in self.masks]))
            spans += [part for x in self.masks if x is not None for part in (x.counts, x.words)]
        head = np.array([len(self.counts), present, *self.counts.sum(axis=1)], np.int64)
        return np.concatenate([head, self.table[is_present].ravel(), *spans])

    @cached_property
    def microbatches(self) -> "list[Offer]":
        """Each microbatch by itself."""
        if len(self.counts) == 1:
            return [self]
        tables = np.split(self.table, np.cumsum(self.counts.sum(axis=1))[:-1], axis=1)
        parts = zip(self.counts[:, None], tables, self.masks, strict=True)
        return [Offer(counts, table, (masks,)) for counts, table, masks in parts]

    @cached_property
    def num_ranks(self) -> int:
        """R, the ranks that bring items."""
        return self.counts.shape[1]

    @cached_property
    def lens(self) -> Ints:
        """(n,) tokens."""
        return self.table[0]

    @cached_property
    def num_bytes(self) -> Ints:
        """(n,) bytes on the wire."""
        return self.table[1]

    @cached_property
    def weights(self) -> Ints:
        """(n,) weight of each item in the mean over all."""
        return self.table[2]

    @cached_property
    def forms(self) -> Ints:
        """(n,) items of the same form fit into one call."""
        return self.table[3]

    @cached_property
    def pairs(self) -> Floats:
        """(n,) pairs of a query and a key that attention computes; -1: not known."""
        return self.table[4].view(np.float64)

    @cached_property
    def context_lens(self) -> Ints | None:
        """(n,) tokens of the context of each item; None without contexts."""
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
        """(n,) pairs of a query and a key that it sees; None if these are all of an item."""
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
        """Return (M, R) sums of a value of each item, by microbatch and the (n,) ranks."""
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
    """Join the masks of all ranks: those that have sequences all have masks, or none has."""
    without = [rank for rank in np.flatnonzero(counts).tolist() if masks[rank] is None]
    if len(without) == np.count_nonzero(counts):
        return None
    if without:
        raise ConfigError(
            f"ranks {without} give sequences without masks, and others with: give "
            'Sequences(.., masks=..) on all ranks, "full" where tokens see everything'
        )
    return Masks.joined([own for own in masks if own is not None])


def offer_of(loaded: Sequence[npt.ArrayLike | Sequences], num_ranks: int | None = None) -> Offer:
    """Check the sequences of all ranks, given as lengths or `Sequences`, one a rank."""
    is_list = isinstance(loaded, list | tuple)
    if not is_list or not any(isinstance(own, Sequences) for own in loaded):
        counts, lens = check_lengths(cast(Sequence[npt.ArrayLike], loaded), num_ranks)
        return Offer.of(counts[None], lens)
    each = [own if isinstance(own, Sequences) else Sequences(own) for own in loaded]
    counts, lens = check_lengths([own.seq_lens for own in each], num_ranks)
    masks, contexts = list[Masks | None](), list[Ints]()
    for rank, (own, own_lens) in enumerate(
        zip(each, np.split(lens, np.cumsum(counts)[:-1]), strict=True)
    ):
        masks.append(masks_of(rank, own.masks, own_lens))
        contexts.append(_contexts(rank, own.context_lens, own_lens))
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
        raise ConfigError(
            f"rank {rank}: {count} context_lens for {seq_lens.size} sequences: give one each, 0 "
            "for a sequence without a context"
        )
    return lens
