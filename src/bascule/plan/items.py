"""Items that ranks bring to a step (samples, images, tiles), as integers that one gather carries.

Legend: n items, M microbatches, R ranks that bring items.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bascule.arrays import Floats, Ints

_UNKNOWN_PAIRS = -1.0
_DEFAULTS = {"weights": 1, "forms": 0, "pairs": int(np.float64(_UNKNOWN_PAIRS).view(np.int64))}
"""Columns that travel only where one of their values is another."""


@dataclass(frozen=True, eq=False)
class Items:
    """Items by microbatch, then by the rank that owns them, then as it lists them."""

    counts: Ints  # (M, R) items of each microbatch and rank
    lens: Ints  # (n,) tokens
    num_bytes: Ints  # (n,) on the wire
    weights: Ints  # (n,) weight of each in the mean over all
    forms: Ints  # (n,) items of the same form fit into one call
    pairs: Floats  # (n,) pairs of a query and a key that attention computes; -1: unknown

    @classmethod
    def own(
        cls,
        counts: Sequence[int],
        lens: Sequence[int],
        num_bytes: Sequence[int],
        *,
        weights: Sequence[int] | None = None,
        forms: Sequence[int] | None = None,
        pairs: Sequence[float] | None = None,
    ) -> "Items":
        """Describe the items of one rank; `counts` has M entries, the others one an item."""
        num = len(lens)
        return cls(
            np.array(counts, np.int64)[:, None],
            np.array(lens, np.int64),
            np.array(num_bytes, np.int64),
            np.array([1] * num if weights is None else weights, np.int64),
            np.array([0] * num if forms is None else forms, np.int64),
            np.array([_UNKNOWN_PAIRS] * num if pairs is None else pairs, np.float64),
        )

    def to_words(self) -> Ints:
        """Describe one rank's items: M, which columns follow, the M counts, and the columns."""
        columns = [self.lens, self.num_bytes]
        present = 0
        for place, (name, default) in enumerate(_DEFAULTS.items()):
            column = getattr(self, name).view(np.int64)
            if (column != default).any():
                present |= 1 << place
                columns.append(column)
        head = np.array([len(self.counts), present, *self.counts.sum(axis=1)], np.int64)
        return np.concatenate([head, *columns])

    @classmethod
    def from_words(cls, gathered: Sequence[Ints]) -> "Items":
        """Join the words of R ranks, in their order; others may follow them."""
        num_micro = int(gathered[0][0])
        counts = np.stack([words[2 : 2 + num_micro] for words in gathered], axis=1)
        sizes = counts.sum(axis=0).tolist()
        table = np.empty((2 + len(_DEFAULTS), sum(sizes)), np.int64)
        table[2:] = np.array([*_DEFAULTS.values()])[:, None]
        first = 0
        for words, size in zip(gathered, sizes, strict=True):
            rows = [0, 1, *(2 + place for place in range(len(_DEFAULTS)) if words[1] >> place & 1)]
            columns = words[2 + num_micro :][: len(rows) * size].reshape(len(rows), size)
            table[rows, first : first + size] = columns
            first += size
        if num_micro > 1:
            micro = [np.repeat(np.arange(num_micro), own) for own in counts.T]
            table = table[:, np.argsort(np.concatenate(micro), kind="stable")]
        lens, num_bytes, weights, forms, pairs = np.ascontiguousarray(table)
        return cls(counts, lens, num_bytes, weights, forms, pairs.view(np.float64))

    @cached_property
    def owner(self) -> Ints:
        """(n,) rank that has each item."""
        return np.repeat(np.arange(self.counts.size) % self.counts.shape[1], self.counts.ravel())

    @cached_property
    def micro(self) -> Ints:
        """(n,) microbatch of each item."""
        return np.repeat(np.arange(len(self.counts)), self.counts.sum(axis=1))

    def sums(self, ranks: Ints, values: Ints | Floats) -> Floats:
        """Return (M, R) sums of a value of each item, by microbatch and the (n,) ranks."""
        num_micro, num_ranks = self.counts.shape
        sums = np.bincount(self.micro * num_ranks + ranks, values, num_micro * num_ranks)
        return sums.reshape(num_micro, num_ranks).astype(np.float64)


NO_ITEMS = Items.own([0], [], [])
"""Those of a rank that has none."""
