"""A packing scheduler: ``torchrun .. -m bascule.plugins.megatron_packing pretrain.py``.

Megatron's script gets this scheduler for ``--sequence-packing-scheduler dp_balanced``.
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import numpy as np

from bascule.errors import PlanError
from bascule.machine.costs import Cost, TransformerCost, evaluate
from bascule.plan.epoch import DealRules, StepShape, deal_step
from bascule.plan.limits import Limits
from bascule.plugins.__main__ import entered, run_script

_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "original_seq_len", "padded_seq_len")


class BalancedPackingScheduler:
    """A `BasePackingScheduler` that gives data-parallel ranks packs with the same work.

    Args:
        max_seqlen_per_dp_cp_rank: Most tokens of a microbatch on a rank.
        cp_size: Number of context-parallel ranks, which share each pack.
        dp_size: Number of data-parallel ranks.
        microbatch_group_size_per_vp_stage: The number of microbatches is a multiple of this.
        cost: Cost model of sequences. None: a transformer sized by the config that `run` receives.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None,
        cost: Cost | None = None,
    ) -> None:
        self._tokens, self._cp_size = max_seqlen_per_dp_cp_rank * cp_size, cp_size
        self._dp_size, self._cost = dp_size, cost
        self._multiple = microbatch_group_size_per_vp_stage or 1

    def get_required_sample_keys(self) -> list[str]:
        """Return the fields of a sample that Megatron packs."""
        return list(_KEYS)

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]]
    ) -> list[list[list[int]]]:
        """Return the ids of sequences by microbatch and rank, in the fewest microbatches.

        `sample_id_seqlens` has the id and the tokens of each sequence. PlanError: a sequence is
        longer than a pack, or there are fewer sequences than packs.
        """
        ids, lengths = np.array(sample_id_seqlens, dtype=np.int64).reshape(-1, 2).T
        costs = evaluate(self._cost or TransformerCost(4096), lengths)
        least = max(-(-int(lengths.sum()) // (self._tokens * self._dp_size)), 1)
        first, last = -(-least // self._multiple), lengths.size // (self._dp_size * self._multiple)
        for num in range(first * self._multiple, last * self._multiple + 1, self._multiple):
            shape = StepShape(-(-lengths.size // (num * self._dp_size)), self._dp_size, num)
            rules = DealRules(shape, limits=Limits(tokens=self._tokens), even_counts=False)
            try:
                deal = deal_step(costs, lengths, rules)
            except PlanError:
                continue
            ranks = np.arange(self._dp_size).repeat(self._cp_size).tolist()
            return [[ids[deal.batch(r, m)].tolist() for r in ranks] for m in range(num)]
        what = f"{lengths.size} sequences of up to {lengths.max(initial=0)} tokens"
        packs = f"{self._dp_size} packs of at most {self._tokens} tokens"
        fix = "raise --max-seqlen-per-dp-cp-rank, or the global batch size"
        raise PlanError(f"{what} do not fill microbatches of {packs}: {fix}")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch, plan, exchange and pack as Megatron's `DpBalancedScheduler.run` does."""
        from megatron.core.datasets.data_schedule import DpBalancedScheduler

        config = kwargs["config"] if "config" in kwargs else args[-1]
        self._cost = self._cost or TransformerCost(config.hidden_size, num_layers=config.num_layers)
        return DpBalancedScheduler.run(self, *args, **kwargs)


def main() -> None:
    """Run a script of Megatron with this scheduler."""
    from megatron.core.datasets.data_schedule import PackingSchedulerEnum, scheduler_map

    with entered(scheduler_map, PackingSchedulerEnum.DP_BALANCED, BalancedPackingScheduler):
        run_script()


if __name__ == "__main__":
    main()
