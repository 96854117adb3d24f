"""The sequences that ranks loaded, as plans take them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints
from bascule.errors import ConfigError
from bascule.plan.checks import by_rank, shown
from bascule.plan.loaded.lengths import check_lengths
from bascule.plan.loaded.masks import Masks, Span
from bascule.plan.routes import cumulative

Mask = str | Sequence[Span]
"""Of a sequence: "full", "causal", or its spans."""

_NAMES = ("full", "causal")


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequences of a rank, where their lengths alone do not say enough.

    It stands wherever a plan takes the lengths of a rank. What is wrong with it is found there.

    Args:
        seq_lens: Tokens of each.
        masks: What the tokens of each see of it: "full", "causal", or its spans; one for all, or a
            list of one a sequence. None: everything, or what each attention says. If sequences of
            one rank have masks, those of all have.
        context_lens: Tokens of the context that each attends to, as text; None without contexts.
    """

    seq_lens: npt.ArrayLike
    masks: "str | Sequence[Mask] | Masks | None" = None
    context_lens: npt.ArrayLike | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The sequences of all ranks, checked; those of rank 0 first.

    Attributes:
        counts: (num_ranks,) sequences of each rank.
        lens: (n,) tokens of each sequence.
        masks: What their tokens see of them; None: everything.
        context_lens: (n,) tokens of their contexts; None without contexts.
    """

    counts: Ints
    lens: Ints
    masks: Masks | None = None
    context_lens: Ints | None = None

    @property
    def ranks(self) -> Ints:
        """(n,) rank that loaded each sequence."""
        return np.repeat(np.arange(self.counts.size), self.counts)

    @property
    def num_pairs(self) -> Floats | None:
        """(n,) pairs of a query and a key that it sees; None if these are all of a sequence."""
        if self.masks is None and self.context_lens is None:
            return None
        lens = self.lens.astype(np.float64)
        within = lens * lens if self.masks is None else self.masks.num_pairs()
        return within if self.context_lens is None else within + lens * self.context_lens

    def by_rank(self) -> list[Sequences]:
        """What each rank loaded."""
        bounds: list[int] = cumulative(self.counts).tolist()
        return [self.take(np.arange(first, last)) for first, last in pairwise(bounds)]

    def take(self, seqs: Ints) -> Sequences:
        """Some of the sequences, as those of one rank."""
        masks = None if self.masks is None else self.masks.of(seqs)
        contexts = None if self.context_lens is None else self.context_lens[seqs]
        return Sequences(self.lens[seqs], masks, contexts)

    def to_words(self) -> Ints:
        """A batch as numbers."""
        contexts = np.zeros(0, np.int64) if self.context_lens is None else self.context_lens
        masks = self.masks
        spans = () if masks is None else (masks.counts, masks.words)
        head = [self.lens.size, contexts.size, -1 if masks is None else masks.words.size]
        return np.concatenate([np.array(head, np.int64), self.lens, contexts, *spans])

    @staticmethod
    def from_words(words: Ints) -> Ints | Sequences:
        """The sequences of a rank, or their lengths if that is all, from the words of its batch."""
        num, num_contexts, num_spans = words[:3].tolist()
        rest = words[3:]
        lens, rest = rest[:num], rest[num:]
        if not num_contexts and num_spans < 0:
            return lens
        contexts, rest = rest[:num_contexts], rest[num_contexts:]
        masks = Masks.from_words(rest[:num], rest[num:]) if num_spans >= 0 else None
        return Sequences(lens, masks, contexts if num_contexts else None)


def batch_of(loaded: Sequence[npt.ArrayLike | Sequences], num_ranks: int) -> Batch:
    """The sequences of all ranks, given as lengths or `Sequences`, one a rank.

    Raises:
        ConfigError: There is not one a rank; a length is not a non-negative integer; spans do not
            add up to their sequence. Rank, place and value are named.
    """
    given = by_rank("sequence lengths", loaded)
    if not any(isinstance(one, Sequences) for one in given):
        return Batch(*check_lengths(given, num_ranks))
    each = [one if isinstance(one, Sequences) else Sequences(one) for one in given]
    counts, lens = check_lengths([one.seq_lens for one in each], num_ranks)
    parts = np.split(lens, np.cumsum(counts)[:-1])
    numbered = list(enumerate(zip(each, parts, strict=True)))
    masks = [_masks(rank, one.masks, own) for rank, (one, own) in numbered]
    found = [_contexts(rank, one.context_lens, own) for rank, (one, own) in numbered]
    contexts = [
        x if x is not None else np.zeros_like(own) for x, own in zip(found, parts, strict=True)
    ]
    has_masks = [mask is not None for mask, own in zip(masks, parts, strict=True) if own.size]
    if any(has_masks) and not all(has_masks):
        without = [k for k, own in enumerate(parts) if own.size and masks[k] is None]
        raise ConfigError(
            f"ranks {without} give sequences without masks, and others with: give "
            'Sequences(.., masks=..) on all ranks, "full" where tokens see everything'
        )
    pairs = zip(masks, parts, strict=True)
    each_mask = [mask or Masks.alike(own, causal=False) for mask, own in pairs]
    return Batch(
        counts,
        lens,
        Masks.joined(each_mask) if any(has_masks) else None,
        np.concatenate(contexts) if any(x is not None and x.any() for x in found) else None,
    )


def _contexts(rank: int, context_lens: npt.ArrayLike | None, seq_lens: Ints) -> Ints | None:
    if context_lens is None:
        return None
    try:
        (count,), lens = check_lengths([context_lens], 1)
    except ConfigError as error:
        raise ConfigError(f"context_lens: {str(error).replace('rank 0', f'rank {rank}')}") from None
    if count != seq_lens.size:
        raise ConfigError(
            f"rank {rank}: {count} context_lens for {seq_lens.size} sequences: give one each, 0 "
            "for a sequence without a context"
        )
    return lens


def _masks(rank: int, masks: object, seq_lens: Ints) -> Masks | None:
    """The spans of a rank's sequences; None without masks."""
    if masks is None or isinstance(masks, Masks):
        return masks
    if isinstance(masks, str) and masks in _NAMES:
        return Masks.alike(seq_lens, causal=masks == "causal")
    if isinstance(masks, str | bytes) or not isinstance(masks, Sequence):
        raise ConfigError(
            f'rank {rank}: masks={shown(masks)}: give "full", "causal", or a list of one a sequence'
        )
    listed = cast(Sequence[Any], masks)
    if len(listed) != seq_lens.size:
        raise ConfigError(
            f"rank {rank}: {len(listed)} masks for {seq_lens.size} sequences: give one each"
        )
    spans = [
        _spans(f"rank {rank}, sequence {place}", mask, num_tokens)
        for place, (mask, num_tokens) in enumerate(zip(listed, seq_lens.tolist(), strict=True))
    ]
    flat = [span for of_seq in spans for span in of_seq]
    return Masks(
        np.array([len(of_seq) for of_seq in spans], np.int64),
        np.array([span.num_tokens for span in flat], np.int64),
        np.array([span.causal for span in flat], np.bool_),
        np.array([span.new_document for span in flat], np.bool_),
    )


def _spans(where: str, mask: object, num_tokens: int) -> Sequence[Span]:
    """The spans of one sequence."""
    if isinstance(mask, str) and mask in _NAMES:
        return [Span(num_tokens, mask == "causal")] if num_tokens else []
    if isinstance(mask, str) or not isinstance(mask, Sequence):
        raise ConfigError(f'{where}: mask {shown(mask)}: give "full", "causal", or a list of spans')
    spans = cast(Sequence[Any], mask)
    wrong = [span for span in spans if not isinstance(span, Span)]
    if wrong:
        raise ConfigError(f"{where}: {shown(wrong[0])} in its mask: give a list of Span(..)")
    total = sum(span.num_tokens for span in spans)
    if total != num_tokens:
        raise ConfigError(
            f"{where}: spans of {total} tokens together for a sequence of {num_tokens}: give spans "
            f"that add up to {num_tokens}"
        )
    return _joined(spans)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """The same mask in fewer spans: causal ones that follow each other are one."""
    found: list[Span] = []
    for span in spans:
        if found and span.causal and found[-1].causal and not span.new_document:
            total = found[-1].num_tokens + span.num_tokens
            found[-1] = Span(total, new_document=found[-1].new_document)
        else:
            found.append(span)
    return found
