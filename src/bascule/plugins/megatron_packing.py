"""Megatron's packing of sequences, planned: a scheduler with the methods of `BasePackingScheduler`.

``torchrun .. -m bascule.plugins.megatron_packing pretrain_gpt.py --sequence-packing-scheduler
dp_balanced ..`` enters it in Megatron's table in the place of "dp_balanced".
"""

# pyright: reportMissingImports=false

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bascule.arrays import Ints
from bascule.errors import PlanError
from bascule.plan.costs import Cost, TransformerCost, evaluate
from bascule.plan.epoch import DealRules, StepShape, deal_step
from bascule.plan.limits import Limits
from bascule.plugins.scripts import entered, run_script


class BalancedPackingScheduler:
    """Packs the sequences of a global batch so that data-parallel ranks have the same work.

    Args:
        max_seqlen_per_dp_cp_rank: Most tokens of a microbatch on a rank.
        cp_size: Ranks that share each pack.
        dp_size: Data-parallel ranks.
        microbatch_group_size_per_vp_stage: The number of microbatches is a multiple of it.
        cost: Cost of a sequence. None: of a transformer of the model's size, when `run` knows it.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None,
        cost: Cost | None = None,
    ) -> None:
        self.max_seqlen_per_dp_cp_rank, self.cp_size = max_seqlen_per_dp_cp_rank, cp_size
        self.dp_size, self._cost = dp_size, cost
        self._multiple = microbatch_group_size_per_vp_stage or 1

    def get_required_sample_keys(self) -> list[str]:
        """Return the fields of a sample that Megatron packs."""
        fields = "tokens labels loss_mask position_ids original_seq_len padded_seq_len"
        return fields.split()

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]]
    ) -> list[list[list[int]]]:
        """Return the ids of the sequences of each microbatch and rank, in as few as fit.

        Args:
            sample_id_seqlens: Id and tokens of each sequence of the global batch.

        Raises:
            PlanError: A sequence is longer than a pack, or there are too few of them.
        """
        ids, lengths = np.array(sample_id_seqlens, dtype=np.int64).reshape(-1, 2).T
        most = self.max_seqlen_per_dp_cp_rank * self.cp_size
        costs = evaluate(self._cost or TransformerCost(4096), lengths)
        num = -(-int(lengths.sum()) // (most * self.dp_size))
        num = max(-(-num // self._multiple), 1) * self._multiple
        while num * self.dp_size <= lengths.size:
            shape = StepShape(-(-lengths.size // (num * self.dp_size)), self.dp_size, num)
            rules = DealRules(shape, limits=Limits(tokens=most), even_counts=False)
            try:
                deal = deal_step(costs, lengths, rules)
            except PlanError:
                num += self._multiple
                continue
            packs = [[ids[deal.batch(rank, m)] for rank in range(self.dp_size)] for m in range(num)]
            return [self._on_all_ranks(microbatch) for microbatch in packs]
        raise PlanError(
            f"{lengths.size} sequences of up to {lengths.max(initial=0)} tokens do not fill "
            f"microbatches of {self.dp_size} packs of at most {most} tokens: raise "
            "--max-seqlen-per-dp-cp-rank, or the global batch size"
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch, plan, exchange and pack as Megatron does; arguments and results are its own."""
        from megatron.core.datasets.data_schedule import DpBalancedScheduler

        config = kwargs["config"] if "config" in kwargs else args[-1]
        if self._cost is None:
            self._cost = TransformerCost(config.hidden_size, num_layers=config.num_layers)
        return DpBalancedScheduler.run(self, *args, **kwargs)

    def _on_all_ranks(self, packs: list[Ints]) -> list[list[int]]:
        """Return the packs of data-parallel ranks for all ranks; those of a pack are neighbours."""
        return [pack.tolist() for pack in packs for _ in range(self.cp_size)]


def main() -> None:
    """Run a script of Megatron."""
    from megatron.core.datasets.data_schedule import PackingSchedulerEnum, scheduler_map

    with entered(scheduler_map, PackingSchedulerEnum.DP_BALANCED, BalancedPackingScheduler):
        run_script(sys.argv[1:])


if __name__ == "__main__":
    main()
