"""Microbatches dealt anew: every sequence once, and no step that ends later."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bascule import ConfigError, Limits, Sequences, TransformerCost, plan_step, step_makespan
from bascule.plan.sequences import batch_of
from bascule.plan.step import Sync, mix_microbatches

COST = TransformerCost(64)
length = st.sampled_from([0, 1, 3, 10, 40, 200])
micro = st.lists(st.lists(length, max_size=4), min_size=4, max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(micro, min_size=1, max_size=4),
    st.sampled_from(["g1n4", "g2n2", "g2n1+g1n2", "g1r2n1+g2n1"]),
    st.sampled_from([None, (1.0, 0.5, 1.0, 1.0)]),
    st.booleans(),
    st.sampled_from(["microbatch", "step"]),
    st.sampled_from([None, 0.2]),
)
def test_every_sequence_is_dealt_once_and_nothing_ends_later(
    micros: list[list[list[int]]],
    topology: str,
    speeds: tuple[float, ...] | None,
    is_causal: bool,
    sync: Sync,
    home_tolerance: float | None,
) -> None:
    given = [
        [Sequences(lens, "causal" if is_causal else "full") for lens in ranks] for ranks in micros
    ]
    chosen: Any = {"speeds": speeds, "sync": sync, "home_tolerance": home_tolerance}
    mixed = mix_microbatches(given, topology, COST, **chosen)
    for rank in range(4):
        pairs = np.concatenate([of_micro[rank] for of_micro in mixed.sources]).tolist()
        loaded = [[m, i] for m, ranks in enumerate(micros) for i in range(len(ranks[rank]))]
        assert sorted(pairs) == loaded
        for sources, dealt in zip(mixed.sources, mixed.microbatches, strict=True):
            lens = [micros[m][rank][i] for m, i in sources[rank].tolist()]
            assert batch_of([dealt[rank]], 1).lens.tolist() == lens
            assert (batch_of([dealt[rank]], 1).masks is None) == (not lens)
    before, after = (
        step_makespan(plan_step(one, topology, COST, **chosen), sync=sync)
        for one in (given, mixed.microbatches)
    )
    assert after <= before


def test_limits_that_one_microbatch_breaks_may_be_kept_together() -> None:
    micros = [[[10, 10], [10]], [[], []]]
    limits = Limits(tokens=10)
    mixed = mix_microbatches(micros, "g1n2", COST, limits=limits)
    assert all(plan.tokens.max() <= 10 for plan in plan_step(mixed.microbatches, "g1n2", COST))
    with pytest.raises(ConfigError, match="auto"):
        mix_microbatches(micros, "auto", COST)
