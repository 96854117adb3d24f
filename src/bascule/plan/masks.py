"""Attention masks of sequences: which tokens each token sees.

Each token sees its document from the start: up to itself in a causal span, else to the span's end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, cast

import numpy as np

from bascule.arrays import Bools, Floats, Ints, cumulative, ranges, sums_by
from bascule.checks import fields, of_type, shown, whole
from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a sequence under one mask rule.

    Args:
        num_tokens: Tokens of the span.
        causal: True if each token sees up to itself; False: up to the end of the span.
        new_document: True hides the tokens before the span from the span and from all later tokens.
    """

    num_tokens: int
    causal: bool = True
    new_document: bool = False

    def __post_init__(self) -> None:
        flag = of_type, bool, "True or False"
        fields(self, num_tokens=(whole, 1), causal=flag, new_document=flag)


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """A part of each of n sequences."""

    starts: Ints  # (n,) first position of the part in its sequence
    lens: Ints  # (n,) tokens of the part
    rows: Ints  # (n,) row of its first token


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Disjoint ascending runs of queries, each with its run of keys: first rows and lengths."""

    q_rows: Ints
    q_lens: Ints
    k_rows: Ints
    k_lens: Ints


@dataclass(frozen=True, eq=False)
class Masks:
    """The spans of several sequences, one sequence after another."""

    counts: Ints  # (n,) spans of each sequence
    lens: Ints  # (m,) tokens of each span, one or more
    is_causal: Bools  # (m,) as `Span.causal`
    is_first: Bools  # (m,) as `Span.new_document`; ignored for the first span of a sequence

    def __post_init__(self) -> None:
        for values in (self.counts, self.lens, self.is_causal, self.is_first):
            values.flags.writeable = False

    @classmethod
    def alike(cls, seq_lens: Ints, *, causal: bool) -> "Masks":
        """Return masks with one span per sequence."""
        has_tokens = seq_lens > 0
        lens = seq_lens[has_tokens]
        flags = np.full(lens.size, causal), np.ones(lens.size, bool)
        return cls(has_tokens.astype(np.int64), lens, *flags)

    @classmethod
    def from_words(cls, counts: Ints, words: Ints) -> "Masks":
        """Decode masks from the numbers of spans per sequence and their `words`."""
        return cls(counts, words >> 2, (words & 2) > 0, (words & 1) > 0)

    @classmethod
    def joined(cls, parts: "list[Masks]") -> "Masks":
        """Join masks of several groups of sequences, in order."""
        each = [(part.counts, part.lens, part.is_causal, part.is_first) for part in parts]
        return cls(*map(np.concatenate, zip(*each, strict=True)))

    def to_lists(self) -> list[list[tuple[int, bool, bool]]]:
        """Return the arguments of the `Span`s of each sequence."""
        columns = [column.tolist() for column in (self.lens, self.is_causal, self.is_first)]
        spans, bounds = list(zip(*columns, strict=True)), cumulative(self.counts).tolist()
        return [spans[first:last] for first, last in pairwise(bounds)]

    @cached_property
    def words(self) -> Ints:
        """(m,) spans, each encoded as one number."""
        return self.lens * 4 + self.is_causal * 2 + self.is_first

    @cached_property
    def seqs(self) -> Ints:
        """(m,) index of the sequence of each span."""
        return np.repeat(np.arange(self.counts.size), self.counts)

    @cached_property
    def starts(self) -> Ints:
        """(m,) position of each span in its sequence."""
        firsts = cumulative(sums_by(self.seqs, self.lens, self.counts.size))
        return cumulative(self.lens)[:-1] - firsts[self.seqs]

    @cached_property
    def documents(self) -> Ints:
        """(m,) position at which the document of each span begins."""
        rows = cumulative(self.lens)[:-1]
        firsts = np.where(self.is_first | (self.starts == 0), rows, 0)
        return np.maximum.accumulate(firsts) - (rows - self.starts)

    @cached_property
    def apart(self) -> "Documents":
        """The documents as separate sequences; no document sees another."""
        is_start = self.is_first | (self.starts == 0)
        of_span = np.cumsum(is_start) - 1
        num = int(is_start.sum())
        masks = Masks(np.bincount(of_span, minlength=num), self.lens, self.is_causal, self.is_first)
        lens = np.bincount(of_span, self.lens, num).astype(np.int64)
        return Documents(masks, self.seqs[is_start], self.starts[is_start], lens)

    def num_pairs(self) -> Floats:
        """Return (n,) numbers of (query, visible key) pairs of the sequences."""
        lens, before = self.lens.astype(np.float64), self.starts - self.documents
        within = np.where(self.is_causal, (lens + 1.0) / 2.0, lens)
        pairs: Floats = lens * (before + within)
        return np.bincount(self.seqs, pairs, self.counts.size).astype(np.float64)

    def of(self, seqs: Ints) -> "Masks":
        """Return the masks of the sequences `seqs`, which ascend."""
        at = ranges(cumulative(self.counts)[seqs], self.counts[seqs])
        return Masks(self.counts[seqs], self.lens[at], self.is_causal[at], self.is_first[at])

    def chunks(self, size: int) -> "tuple[Masks, Bools]":
        """Split causal documents into chunks of `size` tokens; flag those that continue another."""
        counts = -(-self.lens // size)
        of_span = np.repeat(np.arange(counts.size), counts)
        places = ranges(np.zeros_like(counts), counts)
        lens = np.minimum(size, self.lens[of_span] - places * size)
        per_seq = sums_by(self.seqs, counts, self.counts.size)
        return Masks(per_seq, lens, np.ones(lens.size, bool), np.ones(lens.size, bool)), places > 0

    def before(
        self, queries: Stretch, keys: Stretch, window: int, goes_on: Bools
    ) -> tuple[Pairs, Pairs, Pairs]:
        """Return the keys of the previous chunk, one window long, that each query's window reaches.

        A query sees the keys less than one window before it. Returns two lists of rectangles, and
        one of triangles; in the triangles, queries and keys are both read in reverse.
        """
        q_from, q_to = self._within(queries)
        first = keys.starts[self.seqs]
        last, start = first + keys.lens[self.seqs], self.starts - window
        k_from = np.clip(start, first, last) + window  # where each key leaves the window
        k_to = np.clip(self.starts, first, last) + window
        k_to = np.where(goes_on, np.maximum(k_to, k_from), k_from)
        both_from, both_to = np.clip(k_from, q_from, q_to), np.clip(k_to, q_from, q_to)

        def pairs(q_from: Ints, q_to: Ints, k_from: Ints, k_to: Ints) -> Pairs:
            seen = np.flatnonzero((q_to > q_from) & (k_to > k_from))
            runs = q_from, q_to, k_from - window, k_to - window
            bounds = (run[seen] for run in runs)
            q_start, q_end, k_start, k_end = bounds
            seqs = self.seqs[seen]
            return Pairs(*_at(queries, seqs, q_start, q_end), *_at(keys, seqs, k_start, k_end))

        return (
            pairs(q_from, both_from, k_from, k_to),
            pairs(both_from, both_to, both_to, k_to),
            pairs(both_from, both_to - 1, both_from + 1, both_to),
        )

    def rectangles(self, queries: Stretch, keys: Stretch) -> Pairs:
        """Return runs of queries that all see the same run of keys; `triangles` has other pairs.

        Queries and keys are the same tokens of a sequence, or have no token in common.
        """
        q_from, q_to = self._within(queries)
        starts, seqs = keys.starts[self.seqs], self.seqs
        ends = np.where(self.is_causal, q_from, self.starts + self.lens)
        k_from = np.clip(self.documents, starts, starts + keys.lens[seqs])
        k_to = np.clip(ends, k_from, starts + keys.lens[seqs])
        return Pairs(*_at(queries, seqs, q_from, q_to), *_at(keys, seqs, k_from, k_to))

    def triangles(self, both: Stretch) -> Pairs:
        """Return runs of queries in which each query sees the keys of the run up to itself."""
        start, end = self._within(both)
        rows = _at(both, self.seqs, start, np.where(self.is_causal, end, start))
        return Pairs(*rows, *rows)

    def _within(self, part: Stretch) -> tuple[Ints, Ints]:
        """Return where each span, clipped to a stretch, begins and ends."""
        first = part.starts[self.seqs]
        last = first + part.lens[self.seqs]
        start = np.clip(self.starts, first, last)
        return start, np.clip(self.starts + self.lens, start, last)


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """(d,) documents of some sequences: each as its own sequence, and where it starts."""

    masks: Masks
    seqs: Ints
    starts: Ints
    lens: Ints


def _at(part: Stretch, seqs: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    return part.rows[seqs] + start - part.starts[seqs], end - start


Mask = str | Sequence[Span]
"""The mask of a sequence: "full", "causal", or its spans."""

_NAMES = ("full", "causal")


def masks_of(rank: int, masks: object, seq_lens: Ints) -> Masks | None:
    """Check the masks that a user gave for a rank's sequences; return None without masks."""
    if masks is None:
        return None
    if isinstance(masks, str) and masks in _NAMES:
        return Masks.alike(seq_lens, causal=masks == "causal")
    if isinstance(masks, str | bytes) or not isinstance(masks, Sequence):
        raise ConfigError(f'rank {rank}: masks={shown(masks)}: give "full", "causal", or a list')
    if len(each := cast(Sequence[Any], masks)) != seq_lens.size:
        raise ConfigError(
            f"rank {rank}: {len(each)} masks for {seq_lens.size} sequences: give one per sequence"
        )
    spans = [
        _spans(f"rank {rank}, sequence {place}", mask, num_tokens)
        for place, (mask, num_tokens) in enumerate(zip(each, seq_lens.tolist(), strict=True))
    ]
    rows = [(span.num_tokens, span.causal, span.new_document) for span in chain(*spans)]
    lens, is_causal, is_first = np.array(rows, np.int64).reshape(-1, 3).T
    counts = np.array([*map(len, spans)], np.int64)
    return Masks(counts, lens, is_causal > 0, is_first > 0)


def _spans(where: str, mask: object, num_tokens: int) -> Sequence[Span]:
    """Check the mask of one sequence; return its spans, neighbouring causal ones joined."""
    if isinstance(mask, str) and mask in _NAMES:
        return [Span(num_tokens, mask == "causal")] if num_tokens else []
    if isinstance(mask, str) or not isinstance(mask, Sequence):
        raise ConfigError(f'{where}: mask {shown(mask)}: give "full", "causal", or a list of spans')
    spans = [
        of_type(f"{where}: a span", span, Span, "a list of Span(..)")
        for span in cast(Sequence[Any], mask)
    ]
    total = sum(span.num_tokens for span in spans)
    if total != num_tokens:
        wrong = f"{where}: spans have {total} tokens in all, the sequence has {num_tokens}"
        raise ConfigError(f"{wrong}: give spans that add up to the sequence")
    joined: list[Span] = []
    for span in spans:
        if joined and span.causal and joined[-1].causal and not span.new_document:
            total = joined[-1].num_tokens + span.num_tokens
            joined[-1] = Span(total, new_document=joined[-1].new_document)
        else:
            joined.append(span)
    return joined
