"""Microbatches dealt anew: every sequence once, and no step that ends later."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bascule import ConfigError, Limits, Sequences, TransformerCost
from bascule.plan import step_makespan
from bascule.plan.plan import PlanSetup
from bascule.plan.sequences import batch_of
from bascule.plan.step import Sync, mix_microbatches, plan_microbatches

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
    locality_tolerance: float | None,
) -> None:
    given = [
        [Sequences(lens, "causal" if is_causal else "full") for lens in ranks] for ranks in micros
    ]
    setup = PlanSetup(topology, COST, speeds=speeds, locality_tolerance=locality_tolerance)
    batches = [batch_of(ranks) for ranks in given]
    mixed = mix_microbatches(batches, setup, sync)
    for rank in range(4):
        pairs = np.concatenate([of_micro[rank] for of_micro in mixed.sources]).tolist()
        loaded = [[m, i] for m, ranks in enumerate(micros) for i in range(len(ranks[rank]))]
        assert sorted(pairs) == loaded
        for sources, dealt in zip(mixed.sources, mixed.batches, strict=True):
            lens = [micros[m][rank][i] for m, i in sources[rank].tolist()]
            assert dealt.lens[dealt.ranks == rank].tolist() == lens
            assert (dealt.masks is None) == (not dealt.lens.size)
    before, after = (
        step_makespan(plan_microbatches(one, setup, sync), sync=sync)
        for one in (batches, mixed.batches)
    )
    assert after <= before


def test_limits_that_one_microbatch_breaks_may_be_kept_together() -> None:
    batches = [batch_of([[10, 10], [10]]), batch_of([[], []])]
    setup = PlanSetup("g1n2", COST, limits=Limits(tokens=10))
    mixed = mix_microbatches(batches, setup, "microbatch")
    assert len(plan_microbatches(mixed.batches, setup, "microbatch")) == 2
    with pytest.raises(ConfigError, match="auto"):
        mix_microbatches(batches, PlanSetup("auto", COST), "microbatch")
