"""Split samples into forward passes of one shape each, as many as each rank needs."""

from dataclasses import dataclass

import numpy as np

from bascule.arrays import Ints


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPass:
    """One forward pass of a bag, by the global ids of its samples."""

    ids: Ints
    num_tokens: int
    is_dummy: bool = False  # only lets the rank take part in collectives, and counts nothing


def forward_passes(
    bag_of: Ints,
    lens: Ints,
    forms: Ints,
    bag_sizes: Ints,
    *,
    max_tokens: int | None = None,
    max_items: int | None = None,
    is_aligned: bool,
) -> list[list[ForwardPass]]:
    """Split samples into the forward passes of each bag, the longest first.

    A pass has samples of one shape (a number in `forms`) and at most `max_tokens` per rank; a
    longer sample goes alone. Each bag has a pass. If `is_aligned`, as under FSDP, all bags have the
    same number of passes: passes are halved, or the shortest sample is computed again.
    """
    by_bag = np.argsort(bag_of, kind="stable")
    parts = np.split(by_bag, np.cumsum(np.bincount(bag_of, minlength=bag_sizes.size))[:-1])
    bags = [
        _by_form(ids, lens, forms, None if max_tokens is None else max_tokens * size, max_items)
        for ids, size in zip(parts, bag_sizes.tolist(), strict=True)
    ]
    wanted = max(map(len, bags)) if is_aligned else 1
    shortest = np.array([lens.argmin()])
    for passes in bags:
        _fill(passes, wanted, lens, shortest)
        passes.sort(key=lambda batch: (batch.is_dummy, -batch.num_tokens))
    return bags


def _by_form(
    ids: Ints, lens: Ints, forms: Ints, max_tokens: int | None, max_items: int | None
) -> list[ForwardPass]:
    passes: list[ForwardPass] = []
    for form in np.unique(forms[ids]):
        alike = ids[forms[ids] == form]
        at_once = alike.size if max_items is None else max_items
        if max_tokens is not None:
            at_once = min(at_once, max(1, max_tokens // int(lens[alike].max())))
        num_parts = -(-alike.size // at_once)
        parts = np.array_split(alike, num_parts) if num_parts > 1 else [alike]
        passes += [ForwardPass(part, int(lens[part].sum())) for part in parts]
    return passes


def _fill(passes: list[ForwardPass], wanted: int, lens: Ints, shortest: Ints) -> None:
    """Add passes until there are as many as are wanted."""
    while len(passes) < wanted:
        if divisible := [batch for batch in passes if batch.ids.size > 1]:
            longest = max(divisible, key=lambda batch: batch.num_tokens)
            passes.remove(longest)
            halves = np.array_split(longest.ids, 2)
            passes += [ForwardPass(half, int(lens[half].sum())) for half in halves]
        else:
            samples = (batch.ids for batch in passes)
            copied = min(samples, key=lambda ids: lens[ids[0]], default=shortest)
            passes.append(ForwardPass(copied, int(lens[copied].sum()), is_dummy=True))
