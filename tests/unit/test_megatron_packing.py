"""Packs for Megatron: each sequence once, within the limit, and more even than in their order."""

import enum
import math
import runpy
import sys
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bascule.errors import ConfigError, PlanError
from bascule.machine.cluster import Cluster
from bascule.machine.costs import TransformerCost
from bascule.plugins import megatron_packing
from bascule.plugins.megatron_packing import BalancedPackingScheduler, DynamicPackingScheduler

COST = TransformerCost(64)


def lengths_of(seed: int, num: int, most: int) -> list[tuple[int, int]]:
    lengths = np.random.default_rng(seed).lognormal(5.5, 1.2, num).clip(8, most).astype(int)
    return [(number, int(length)) for number, length in enumerate(lengths)]


def makespan(groups: list[list[list[int]]], lengths: dict[int, int]) -> float:
    loads = [[sum(float(COST(lengths[one])) for one in pack) for pack in g] for g in groups]
    return sum(map(max, loads))


def in_order(pairs: list[tuple[int, int]], most: int, dp_size: int) -> list[list[list[int]]]:
    """Packs filled in the order of the sequences, as Megatron's own; empty ones at the end."""
    packs: list[list[int]] = [[]]
    for number, length in pairs:
        if sum(pairs[one][1] for one in packs[-1]) + length > most:
            packs.append([])
        packs[-1].append(number)
    packs += [[]] * (-len(packs) % dp_size)
    return [packs[first : first + dp_size] for first in range(0, len(packs), dp_size)]


@pytest.mark.parametrize(("cp_size", "dp_size", "multiple"), [(1, 4, None), (2, 2, 3), (4, 1, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_legal_packs_are_even(seed: int, cp_size: int, dp_size: int, multiple: int | None) -> None:
    most, pairs = 4096, lengths_of(seed, 64, 4096)
    scheduler = BalancedPackingScheduler(most // cp_size, cp_size, dp_size, multiple, COST)
    groups, lengths = scheduler.get_groups_and_subsamples(pairs), dict(pairs)
    assert len(groups) % (multiple or 1) == 0
    for group in groups:
        assert len(group) == cp_size * dp_size
        for rank, pack in enumerate(group):
            assert pack == group[rank // cp_size * cp_size]
            assert pack and sum(lengths[one] for one in pack) <= most
    ids = [one for group in groups for pack in group[::cp_size] for one in pack]
    assert sorted(ids) == list(range(64))
    if dp_size > 1:
        firsts = [group[::cp_size] for group in groups]
        assert makespan(firsts, lengths) < makespan(in_order(pairs, most, dp_size), lengths)


@pytest.mark.parametrize("pairs", [[(0, 5000), (1, 10)], [(0, 10)], []])
def test_what_does_not_fit_is_refused(pairs: list[tuple[int, int]]) -> None:
    with pytest.raises(PlanError, match="max-seqlen-per-dp-cp-rank"):
        BalancedPackingScheduler(4096, 1, 2, None).get_groups_and_subsamples(pairs)


WORLDS = [(1, 1, 1), (2, 1, None), (6, 2, 3), (8, 1, None), (8, 2, 3), (8, 8, 2), (12, 4, None)]


@pytest.mark.parametrize(("num_ranks", "least", "multiple"), [*WORLDS, (64, 1, 2)])
def test_groups_keep_the_rules_of_dynamic_context(
    num_ranks: int, least: int, multiple: int | None
) -> None:
    most, cp_size = 512, 2 if num_ranks % 2 == 0 else 1
    for seed in range(12):
        num = int(np.random.default_rng(seed).integers(multiple or 1, 48))
        lengths = {7 * k: length for k, length in lengths_of(seed, num, most * num_ranks)}
        scheduler = DynamicPackingScheduler(
            most, cp_size, num_ranks // cp_size, multiple, COST, min_cp_size=least
        )
        pairs = list(lengths.items())
        step = scheduler.get_groups_and_subsamples(pairs)
        assert step == scheduler.get_groups_and_subsamples(pairs)
        assert len(step) % (multiple or 1) == 0
        seen: list[int] = []
        for by_rank in step:
            assert len(by_rank) == num_ranks
            first = 0
            while first < num_ranks:
                pack = by_rank[first]
                # Megatron counts the ranks that have the first sequence of this one.
                size = sum(pack[0] in other for other in by_rank)
                assert by_rank[first : first + size] == [pack] * size
                is_power = size & (size - 1) == 0 and least <= size <= num_ranks // 2
                assert size == num_ranks or (is_power and first % size == 0)
                assert sum(lengths[number] for number in pack) <= most * size
                seen += pack
                first += size
        assert sorted(seen) == sorted(lengths)


def all_steps(lengths: list[int], most: int) -> float:
    """The least sum of makespans of two ranks, without wires: every division, one by one."""

    def seconds(chosen: tuple[int, ...]) -> float:
        """Of one microbatch."""
        costs, total = [float(COST(lengths[k])) for k in chosen], math.inf
        if sum(lengths[k] for k in chosen) <= 2 * most:
            total = sum(costs) / 2
        for sides in product((0, 1), repeat=len(chosen)):
            tokens, loads = [0, 0], [0.0, 0.0]
            for side, number, cost in zip(sides, chosen, costs, strict=True):
                tokens[side] += lengths[number]
                loads[side] += cost
            if max(tokens) <= most and min(tokens) > 0:
                total = min(total, max(loads))
        return total

    least = math.inf
    for parts in product(range(len(lengths)), repeat=len(lengths)):
        groups = [tuple(k for k, part in enumerate(parts) if part == g) for g in set(parts)]
        least = min(least, sum(map(seconds, groups)))
    return least


@pytest.mark.parametrize("seed", range(4))
def test_groups_cost_no_less_than_possible(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(100, 1000, 5).tolist()
    free = Cluster(1, 2, 1e12, 80e9, 1e15, 1e15, 0.0)  # wires cost nothing
    scheduler = DynamicPackingScheduler(900, 1, 2, None, COST, cluster=free)
    step = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
    spent = 0.0
    for packs in step:
        shared = 2 if packs[0] == packs[1] else 1
        spent += max(sum(float(COST(lengths[k])) for k in pack) / shared for pack in packs)
    assert all_steps(lengths, 900) - 1e-6 <= spent <= 1.05 * all_steps(lengths, 900)


def test_links_decide_how_many_ranks_share() -> None:
    """A step of even work is not shared over slow links; tensor-parallel ranks fill nodes."""

    def ranks_of_longest(scheduler: DynamicPackingScheduler) -> int:
        step = scheduler.get_groups_and_subsamples([(0, 20000), *((k, 4000) for k in range(1, 9))])
        return sum(0 in pack for by_rank in step for pack in by_rank)

    cost = TransformerCost(1024)
    slow = Cluster(1, 4, 1e12, 80e9, 1e6, 1e6, 0.0)
    for cluster, ranks in ((slow, 1), (None, 4)):
        made = DynamicPackingScheduler(20000, 1, 4, None, cost, cluster=cluster)
        assert ranks_of_longest(made) == ranks


def test_groups_that_break_the_rules_are_refused() -> None:
    for least in (0, 3, 16):
        with pytest.raises(ConfigError, match=f"min_cp_size={least} must be a power of two, at m"):
            DynamicPackingScheduler(100, 2, 4, None, min_cp_size=least)
    scheduler = DynamicPackingScheduler(100, 2, 4, 3, COST)
    with pytest.raises(PlanError, match=r"8 ranks of 100 tokens .* of 817: .*-rank to 103"):
        scheduler.get_groups_and_subsamples([(0, 817), (1, 5), (2, 5)])
    with pytest.raises(PlanError, match=r"2 sequences .* multiple of 3 microbatches"):
        scheduler.get_groups_and_subsamples([(0, 800), (1, 5)])
    fixed = DynamicPackingScheduler(103, 2, 4, None, COST)  # what the message advises
    assert fixed.get_groups_and_subsamples([(0, 817)]) == [[[0]] * 8]
    assert DynamicPackingScheduler(100, 2, 4, None).get_groups_and_subsamples([]) == []
    with pytest.raises(ConfigError, match="thd_max_packed_sequences=4"):
        DynamicPackingScheduler(100, 2, 4, None, max_num_seqs=4)


class Kind(enum.Enum):
    DP_BALANCED = "dp_balanced"
    OTHER = "other"


class Theirs:
    """With the form of Megatron's: `run` asks for keys, then for groups."""

    def run(self: Any, data_iterator: Any, num_microbatches: int, config: Any) -> Any:
        batch = [next(data_iterator) for _ in range(num_microbatches)]
        assert all(key in sample for key in self.get_required_sample_keys() for sample in batch)
        return self.get_groups_and_subsamples([(i, s["tokens"]) for i, s in enumerate(batch)])


@pytest.mark.parametrize("keys", [Kind, ["dp_balanced", "default_dynamic_cp", "other"]])
def test_scripts_of_megatron_plan_with_it(
    keys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module: Any = ModuleType("megatron.core.datasets.data_schedule")
    module.DpBalancedScheduler = module.DefaultDynamicCPScheduler = Theirs
    module.scheduler_map = before = dict.fromkeys(keys, Theirs)
    for name in ("megatron", "megatron.core", "megatron.core.datasets"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["megatron.core.datasets"].data_schedule = module  # pyright: ignore
    monkeypatch.setitem(sys.modules, module.__name__, module)
    script = tmp_path / "pretrain.py"
    script.write_text(
        "from megatron.core.datasets.data_schedule import scheduler_map\n"
        "made = [scheduler.__name__ for scheduler in scheduler_map.values()]\n"
        "ours = ['BalancedPackingScheduler', 'DynamicPackingScheduler']\n"
        "assert made == [*ours[: len(made) - 1], 'Theirs'], made\n"
    )
    with megatron_packing.megatron():
        runpy.run_path(str(script))
    assert module.scheduler_map == dict(before) == dict.fromkeys(keys, Theirs)
    monkeypatch.delitem(sys.modules, "bascule.plugins.verl_packing", raising=False)
    import_module("bascule.plugins.verl_packing")
    assert module.DefaultDynamicCPScheduler is DynamicPackingScheduler
    config = SimpleNamespace(hidden_size=64, num_layers=2, tensor_model_parallel_size=2)
    for made in (BalancedPackingScheduler, DynamicPackingScheduler):
        scheduler = made(100, 1, 2, None, max_num_seqs=None)
        assert scheduler.is_dynamic_cp == (made is DynamicPackingScheduler)
        fields = dict.fromkeys(scheduler.get_required_sample_keys(), 0)
        samples = iter([fields | {"tokens": length} for length in (90, 10, 60, 50)])
        groups = scheduler.run(samples, 4, config=config)
        assert {number for group in groups for pack in group for number in pack} == {0, 1, 2, 3}
