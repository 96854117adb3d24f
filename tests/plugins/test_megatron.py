"""Packs for Megatron beside those of its own dynamic scheduler, of megatron-core 0.16."""

# pyright: reportMissingImports=false

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bascule.plugins.megatron_packing import BalancedPackingScheduler

pytest.importorskip(
    "megatron.core.pipeline_parallel.hybrid_cp_schedule",
    reason="megatron-core 0.16 is not installed; see `make plugins`",
)

MOST, RANKS = 4096, 4


def squares(lengths: Any) -> Any:
    return np.square(np.asarray(lengths, dtype=np.float64))


@pytest.mark.parametrize("seed", range(6))
def test_steps_end_no_later(seed: int) -> None:
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    lengths = np.random.default_rng(seed).lognormal(6.0, 1.1, 64).clip(8, MOST).astype(int)
    pairs = [(number, int(length)) for number, length in enumerate(lengths)]
    theirs = BalancedCPScheduler(MOST, SimpleNamespace(size=lambda: RANKS))  # pyright: ignore
    ordered = sorted(pairs, key=lambda pair: -pair[1])
    groups, ids = theirs.get_groups_and_subsamples(ordered, None)
    baseline = sum(max(squares(pack).sum() for pack in group) for group in groups)
    assert sorted(one for group in ids for pack in group for one in pack) == list(range(64))
    # Theirs computes sequence by sequence, so its groups have no limit of tokens.
    scheduler = BalancedPackingScheduler(int(lengths.sum()), 1, RANKS, None, squares)
    (ours,) = scheduler.get_groups_and_subsamples(pairs)
    assert max(squares(lengths[pack]).sum() for pack in ours) <= baseline
