"""Packing schedulers: ``torchrun .. -m bascule.plugins megatron pretrain.py``.

The script gets these schedulers for ``--sequence-packing-scheduler`` ``dp_balanced`` and
``default_dynamic_cp``. verl: ``VERL_USE_EXTERNAL_MODULES=bascule.plugins.verl_packing``.
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from bascule.errors import ConfigError, PlanError
from bascule.machine.cluster import BagShape, Cluster, HardwareProfile
from bascule.machine.costs import Cost, TransformerCost, evaluate
from bascule.plan.context_groups import GroupPrices, plan_groups
from bascule.plan.epoch import DealRules, StepShape, deal_step
from bascule.plan.limits import Limits
from bascule.plugins.__main__ import entered

_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "original_seq_len", "padded_seq_len")


class BalancedPackingScheduler:
    """A `BasePackingScheduler` that gives data-parallel ranks packs with the same work.

    Args:
        max_seqlen_per_dp_cp_rank: Most tokens of a microbatch on a rank.
        cp_size: Number of context-parallel ranks, which share each pack.
        dp_size: Number of data-parallel ranks.
        microbatch_group_size_per_vp_stage: The number of microbatches is a multiple of this.
        cost: Cost model of sequences. None: a transformer sized by the config that `run` receives.
        max_num_seqs: Not supported: Megatron's limit of sequences, for graphs of fixed shapes.
    """

    is_dynamic_cp = False

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None,
        cost: Cost | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        if max_num_seqs is not None:
            wrong = f"thd_max_packed_sequences={max_num_seqs} limits sequences, bascule only tokens"
            raise ConfigError(f"{wrong}: leave it out, or use Megatron's own scheduler")
        self._tokens, self._cp_size = max_seqlen_per_dp_cp_rank * cp_size, cp_size
        self._dp_size, self._cost = dp_size, cost
        self._multiple = microbatch_group_size_per_vp_stage or 1
        self._per_node = 8

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
        self._per_node = max(8 // config.tensor_model_parallel_size, 1)
        return DpBalancedScheduler.run(self, *args, **kwargs)


class DynamicPackingScheduler(BalancedPackingScheduler):
    """A `DefaultDynamicCPScheduler` that also counts what sharing a sequence costs.

    Ranks form aligned groups of 2^k >= `min_cp_size` ranks, or one group of all. Each microbatch
    has its own groups. The arguments are as in `BalancedPackingScheduler`, with a cost that knows
    the model's width, and `cluster`, whose rates, and ranks per node over tensor-parallel ranks,
    price the exchanges; None: nodes of eight H100.
    """

    is_dynamic_cp = True

    def __init__(
        self, *args: Any, min_cp_size: int = 1, cluster: Cluster | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._cluster, num_ranks = cluster, self._cp_size * self._dp_size
        if min_cp_size < 1 or min_cp_size & (min_cp_size - 1) or min_cp_size > num_ranks:
            wrong = f"min_cp_size={min_cp_size} must be a power of two, at most {num_ranks} ranks"
            raise ConfigError(f"{wrong}: set --min-dynamic-context-parallel-size")
        # Megatron makes groups of 2^k ranks for k below the logarithm, rounded down, of all ranks.
        powers = (1 << k for k in range(num_ranks.bit_length() - 1))
        self._sizes = (*(size for size in powers if size >= min_cp_size), num_ranks)

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]]
    ) -> list[list[list[int]]]:
        """Return the ids of sequences by microbatch and rank; ranks of a group have the same.

        `sample_id_seqlens` has the id and the tokens of each sequence. PlanError: all ranks
        together do not hold a sequence, or there are fewer sequences than microbatches must be.
        """
        ordered = sorted(sample_id_seqlens, key=lambda pair: -pair[1])
        ids, lengths = np.array(ordered, dtype=np.int64).reshape(-1, 2).T
        most, num_ranks = self._tokens // self._cp_size, self._sizes[-1]
        if lengths.max(initial=0) > most * num_ranks:
            wrong = f"{num_ranks} ranks of {most} tokens do not hold a sequence of {lengths[0]}"
            least = -(-int(lengths[0]) // num_ranks)
            raise PlanError(f"{wrong}: raise --max-seqlen-per-dp-cp-rank to {least}, or cut it")
        h100 = HardwareProfile.load("h100-datasheet")
        cluster = self._cluster or h100.cluster(num_ranks, self._per_node)
        cost = self._cost or TransformerCost(4096)
        seconds, launches = np.empty((lengths.size, len(self._sizes))), np.empty(len(self._sizes))
        for place, size in enumerate(self._sizes):
            bag = BagShape.aligned(1, size, cluster.ranks_per_node)
            of_all = cluster.sequence_seconds(cost, bag, lengths)
            seconds[:, place] = (of_all.compute_s + of_all.heads_s) / size
            launches[place] = np.max(of_all.launch_s, initial=0.0)
        prices = GroupPrices(self._sizes, lengths, seconds, launches, most)
        return [
            [ids[group.members].tolist() for group in groups for _ in range(group.num_ranks)]
            for groups in plan_groups(prices, self._multiple)
        ]


SCHEDULERS = {
    "dp_balanced": BalancedPackingScheduler,
    "default_dynamic_cp": DynamicPackingScheduler,
}


def megatron() -> AbstractContextManager[None]:
    """Let Megatron use these schedulers under its own names."""
    from megatron.core.datasets.data_schedule import scheduler_map

    # Keys are names, or members of an Enum of names.
    ours = {key: SCHEDULERS.get(getattr(key, "value", key)) for key in scheduler_map}
    return entered(scheduler_map, {key: named for key, named in ours.items() if named})
