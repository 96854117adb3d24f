"""Which samples go into which forward pass."""

import random

import numpy as np
import pytest

from bascule.batching import ForwardPass, forward_passes
from bascule.machine.costs import TransformerCost
from bascule.plan.plan import Plan, plan_batch

COST = TransformerCost(64)


def drawn(seed: int) -> tuple[Plan, np.ndarray]:
    """A plan of samples of few shapes, and the shape of each."""
    draw = random.Random(seed)
    kinds = {form: draw.randrange(1, 60) for form in (-5, 0, 3, 8)}
    forms = [[draw.choice(list(kinds)) for _ in range(draw.choice((0, 1, 3)))] for _ in range(4)]
    forms[draw.randrange(4)].append(3)
    lens = [[kinds[form] for form in own] for own in forms]
    topology = draw.choice(("g1n4", "g2n2", "g1n2+g2n1", "g4n1"))
    return plan_batch(lens, topology, COST), np.array([x for own in forms for x in own])


def passes_of(
    plan: Plan, forms: np.ndarray, *, max_tokens: int | None, is_aligned: bool
) -> list[list[ForwardPass]]:
    args = plan.bag_of, plan.seq_lens, forms, plan.topology.bag_sizes
    return forward_passes(*args, max_tokens=max_tokens, is_aligned=is_aligned)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("max_tokens", [None, 1, 40])
def test_every_sample_is_computed_once(seed: int, max_tokens: int | None) -> None:
    plan, forms = drawn(seed)
    for is_aligned in (True, False):
        bags = passes_of(plan, forms, max_tokens=max_tokens, is_aligned=is_aligned)
        counted = [[of for of in passes if not of.is_dummy] for passes in bags]
        for bag, (passes, real) in enumerate(zip(bags, counted, strict=True)):
            computed = sorted(one for of in real for one in of.ids.tolist())
            assert computed == np.flatnonzero(plan.bag_of == bag).tolist()
            size = int(plan.topology.bag_sizes[bag])
            for of in real:
                assert len(set(forms[of.ids].tolist())) == 1
                assert of.num_tokens == plan.seq_lens[of.ids].sum()
                assert not max_tokens or of.ids.size == 1 or of.num_tokens <= max_tokens * size
            dummies = [of for of in passes if of.is_dummy]
            assert not dummies or all(
                of.ids.size == 1 for of in passes
            )  # nothing was left to halve
            assert len(passes) >= 1 and (is_aligned or len(dummies) <= (not real))
        if is_aligned:
            assert len({len(passes) for passes in bags}) == 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_items", [1, 2, 5])
def test_a_pass_has_no_more_samples_than_are_allowed(seed: int, max_items: int) -> None:
    plan, forms = drawn(seed)
    args = plan.bag_of, plan.seq_lens, forms, plan.topology.bag_sizes
    for passes in forward_passes(*args, max_items=max_items, is_aligned=False):
        real = [of for of in passes if not of.is_dummy]
        assert all(of.ids.size <= max_items for of in real)
        for form in {int(forms[of.ids[0]]) for of in real}:
            alike = [of.ids.size for of in real if forms[of.ids[0]] == form]
            assert len(alike) == -(-sum(alike) // max_items)  # and as few as can be


def test_a_bag_without_samples_computes_the_shortest_one() -> None:
    plan = plan_batch([[30, 4], []], "g1n2", COST)
    alone = plan_batch([[9], []], "g1n2", COST)
    (first, second) = passes_of(alone, np.array([1]), max_tokens=None, is_aligned=True)
    kinds = sorted((of.is_dummy, of.ids.tolist()) for of in (*first, *second))
    assert kinds == [(False, [0]), (True, [0])]
    both = passes_of(plan, np.array([1, 2]), max_tokens=None, is_aligned=True)
    assert not any(of.is_dummy for passes in both for of in passes)
