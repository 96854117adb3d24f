"""What tokens see of their sequence: spans that are causal or not, in documents.

A token sees its document from the start: up to itself in a causal span, up to the end of its span
in one that is not. So each token sees a run of tokens, which holds for causal text, for documents
packed into one sequence, and for images between causal texts.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from bascule.arrays import Bools, Floats, Ints
from bascule.errors import ConfigError
from bascule.plan.checks import put, shown, whole
from bascule.plan.routes import cumulative, ranges


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens of a sequence that see alike.

    Args:
        num_tokens: How many.
        causal: Whether each sees up to itself; else up to the end of the span.
        new_document: Whether none of them, or of what follows, sees what is before.

    Raises:
        ConfigError: There is not one token at least, or a flag is no bool.
    """

    num_tokens: int
    causal: bool = True
    new_document: bool = False

    def __post_init__(self) -> None:
        put(self, "num_tokens", whole("Span(num_tokens", self.num_tokens, 1))
        for name in ("causal", "new_document"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"Span({name}={shown(value)}) must be True or False")


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """A part of each sequence, and where it lies.

    Attributes:
        starts: (n,) its first position in the sequence.
        lens: (n,) its tokens; may be 0.
        rows: (n,) the row of its first token.
    """

    starts: Ints
    lens: Ints
    rows: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Runs of queries, and the run of keys that each of them sees.

    Attributes:
        q_rows: (m,) first row of each run of queries, ascending; no row is in two runs.
        q_lens: (m,) its rows; may be 0.
        k_rows: (m,) first row of the keys.
        k_lens: (m,) their rows; may be 0.
    """

    q_rows: Ints
    q_lens: Ints
    k_rows: Ints
    k_lens: Ints


@dataclass(frozen=True, eq=False)
class Masks:
    """The spans of some sequences, one sequence after the other.

    Attributes:
        counts: (n,) spans of each sequence.
        lens: (m,) tokens of each span, one or more.
        is_causal: (m,) as `Span.causal`.
        is_first: (m,) as `Span.new_document`; the first span of a sequence is one in any case.
    """

    counts: Ints
    lens: Ints
    is_causal: Bools
    is_first: Bools

    def __post_init__(self) -> None:
        for array in (self.counts, self.lens, self.is_causal, self.is_first):
            array.flags.writeable = False

    @classmethod
    def alike(cls, seq_lens: Ints, *, causal: bool) -> "Masks":
        """One span a sequence."""
        lens = seq_lens[seq_lens > 0]
        return cls(
            (seq_lens > 0).astype(np.int64),
            lens,
            np.full(lens.size, causal),
            np.ones(lens.size, bool),
        )

    @classmethod
    def from_words(cls, counts: Ints, words: Ints) -> "Masks":
        """The inverse of `words`."""
        return cls(counts, words >> 2, (words & 2) > 0, (words & 1) > 0)

    @classmethod
    def joined(cls, parts: "list[Masks]") -> "Masks":
        """The sequences of all, in their order."""
        return cls(
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.lens for part in parts]),
            np.concatenate([part.is_causal for part in parts]),
            np.concatenate([part.is_first for part in parts]),
        )

    def to_lists(self) -> list[list[tuple[int, bool, bool]]]:
        """The arguments of each `Span`, by sequence."""
        spans = list(
            zip(*(x.tolist() for x in (self.lens, self.is_causal, self.is_first)), strict=True)
        )
        bounds: list[int] = cumulative(self.counts).tolist()
        return [spans[first:last] for first, last in pairwise(bounds)]

    @cached_property
    def words(self) -> Ints:
        """(m,) each span as one number."""
        return self.lens * 4 + self.is_causal * 2 + self.is_first

    @cached_property
    def seqs(self) -> Ints:
        """(m,) the sequence of each span."""
        return np.repeat(np.arange(self.counts.size), self.counts)

    @cached_property
    def starts(self) -> Ints:
        """(m,) position of each span in its sequence."""
        return self._placed[0]

    @cached_property
    def documents(self) -> Ints:
        """(m,) position at which the document of each span begins."""
        return self._placed[1]

    @cached_property
    def _placed(self) -> tuple[Ints, Ints]:
        begins = cumulative(self.lens)[:-1]
        first = np.minimum(cumulative(self.counts)[:-1], max(begins.size - 1, 0))
        of_seq = begins[first][self.seqs] if begins.size else begins
        documents = np.maximum.accumulate(np.where(self.is_first | (begins == of_seq), begins, 0))
        return begins - of_seq, documents - of_seq

    @cached_property
    def apart(self) -> "Documents":
        """The documents, none of which sees another."""
        is_start = self.is_first | (self.starts == 0)
        of_span = np.cumsum(is_start) - 1
        num = int(is_start.sum())
        masks = Masks(np.bincount(of_span, minlength=num), self.lens, self.is_causal, self.is_first)
        lens = np.bincount(of_span, self.lens, num).astype(np.int64)
        return Documents(masks, self.seqs[is_start], self.starts[is_start], lens)

    def num_pairs(self) -> Floats:
        """(n,) pairs of a token and one that it sees, of each sequence."""
        lens, before = self.lens.astype(np.float64), self.starts - self.documents
        within = np.where(self.is_causal, (lens + 1.0) / 2.0, lens)
        pairs: Floats = lens * (before + within)
        return np.bincount(self.seqs, pairs, self.counts.size).astype(np.float64)

    def of(self, seqs: Ints) -> "Masks":
        """Those of some sequences, ascending."""
        at = ranges(cumulative(self.counts)[seqs], self.counts[seqs])
        return Masks(self.counts[seqs], self.lens[at], self.is_causal[at], self.is_first[at])

    def rectangles(self, queries: Stretch, keys: Stretch) -> Pairs:
        """Runs of queries that see one run of keys alike; the diagonals of `triangles` aside.

        The keys of a run that is causal are those before its queries, so that stretches of queries
        and keys must be the same tokens of a sequence, or have none in common.
        """
        q_from, q_to = self._within(queries)
        starts, seqs = keys.starts[self.seqs], self.seqs
        ends = np.where(self.is_causal, q_from, self.starts + self.lens)
        k_from = np.clip(self.documents, starts, starts + keys.lens[seqs])
        k_to = np.clip(ends, k_from, starts + keys.lens[seqs])
        return Pairs(*_at(queries, seqs, q_from, q_to), *_at(keys, seqs, k_from, k_to))

    def triangles(self, both: Stretch) -> Pairs:
        """Runs of queries that see of the same tokens those up to themselves."""
        start, end = self._within(both)
        rows = _at(both, self.seqs, start, np.where(self.is_causal, end, start))
        return Pairs(*rows, *rows)

    def _within(self, part: Stretch) -> tuple[Ints, Ints]:
        """Where the part of each span in a stretch begins and ends; nowhere else than in it."""
        first = part.starts[self.seqs]
        last = first + part.lens[self.seqs]
        start = np.clip(self.starts, first, last)
        return start, np.clip(self.starts + self.lens, start, last)


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents of some sequences, each as a sequence of its own.

    Attributes:
        masks: Of the documents.
        seqs: (d,) the sequence of each.
        starts: (d,) its first position in it.
        lens: (d,) its tokens.
    """

    masks: Masks
    seqs: Ints
    starts: Ints
    lens: Ints


def _at(part: Stretch, seqs: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    return part.rows[seqs] + start - part.starts[seqs], end - start
