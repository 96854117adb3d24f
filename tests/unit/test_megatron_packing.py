"""Packs for Megatron: each sequence once, within the limit, and more even than in their order."""

import enum
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bascule.errors import PlanError
from bascule.machine.costs import TransformerCost
from bascule.plugins import megatron_packing
from bascule.plugins.megatron_packing import BalancedPackingScheduler

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


class Kind(enum.Enum):
    DP_BALANCED = "dp_balanced"


class Theirs:
    """With the form of Megatron's: `run` asks for keys, then for groups."""

    def run(self: Any, data_iterator: Any, num_microbatches: int, config: Any) -> Any:
        batch = [next(data_iterator) for _ in range(num_microbatches)]
        assert all(key in sample for key in self.get_required_sample_keys() for sample in batch)
        return self.get_groups_and_subsamples([(i, s["tokens"]) for i, s in enumerate(batch)])


def test_scripts_of_megatron_plan_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module: Any = ModuleType("megatron.core.datasets.data_schedule")
    module.DpBalancedScheduler, module.PackingSchedulerEnum = Theirs, Kind
    module.scheduler_map = {Kind.DP_BALANCED: Theirs}
    for name in ("megatron", "megatron.core", "megatron.core.datasets"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import sys\n"
        "from megatron.core.datasets.data_schedule import PackingSchedulerEnum, scheduler_map\n"
        "made = scheduler_map[PackingSchedulerEnum[sys.argv[1].upper()]](100, 1, 2, None)\n"
        "assert type(made).__name__ == 'BalancedPackingScheduler', made\n"
    )
    monkeypatch.setattr(sys, "argv", ["-m", str(script), "dp_balanced"])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    megatron_packing.main()
    assert module.scheduler_map == {Kind.DP_BALANCED: Theirs}
    scheduler = BalancedPackingScheduler(100, 1, 2, None)
    keys = dict.fromkeys(scheduler.get_required_sample_keys(), 0)
    samples = iter([keys | {"tokens": length} for length in (90, 10, 60, 50)])
    config = SimpleNamespace(hidden_size=64, num_layers=2)
    groups = scheduler.run(samples, 4, config=config)
    assert sorted(pack for group in groups for pack in group) == [[0], [1], [2], [3]]
