"""What each stage of the solver is worth: the same cases without it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from time import thread_time
from typing import Any

import numpy as np
from rich.table import Table

from bascule.errors import PlanError
from bascule.plan import locality
from bascule.plan.costs import TransformerCost
from bascule.plan.epoch import deal
from bascule.plan.epoch.order import StepShape
from bascule.plan.limits import Limits
from bascule.plan.machine import Cluster
from bascule.plan.plan import plan_batch
from bascule.plan.solver import portfolio, search
from bascule.plan.solver.portfolio import longest_first
from bascule.plan.solver.solve import assign
from bascule.plan.topology import Topology

Batch = list[list[int]]
Case = Callable[[], tuple[float, float]]
"""Solves, and gives the gap and the share of the tokens that are away from home."""

COST = TransformerCost(3072, gamma=0.426, num_layers=57)
BAGS = ("g1n32", "g4n8", "g8n4", "g1n8+g8n3", "g1n16+g8n2", "g1n24+g8n1")


@dataclass(frozen=True)
class Stage:
    """A part of the solver that can be left out: an attribute, and what takes its place.

    Attributes:
        family: The cases that it is for.
        module: Where it is looked up.
        name: The attribute.
        without: Makes its replacement of it.
    """

    family: str
    module: Any
    name: str
    without: Callable[[Any], Any]


def _drop(start: str) -> Callable[[Any], Any]:
    """The starts of several kinds without one."""
    return lambda found: lambda *args: [x for x in found(*args) if x.method != start]


def _nothing(_: Any) -> Any:
    return lambda *args, **options: None


def _as_given(_: Any) -> Any:
    return lambda problem, bin_of, *args: bin_of


def _longest_first(_: Any) -> Any:
    return lambda problem, **options: longest_first(problem)


def _no_twos(exchange: Any) -> Any:
    return lambda *args, in_twos: None if in_twos else exchange(*args, in_twos=False)


def _no_pairs(exchange: Any) -> Any:
    return lambda score, held, pairing, **options: (
        exchange(score, held, pairing, **options) if pairing.late.size == 1 else None
    )


def _no_worst(exchange: Any) -> Any:
    return lambda score, held, pairing, *, in_twos: (
        exchange(score, held, pairing, in_twos=in_twos)
        if in_twos or pairing.late.size > 1
        else None
    )


def _no_way(_: Any) -> Any:
    def refuse(table: Any) -> Any:
        raise PlanError("left out")

    return refuse


STAGES = {
    "knapsack": Stage("free", portfolio, "by_speed", _longest_first),
    "room first": Stage("capped", portfolio, "place_longest", _longest_first),
    "relaxations": Stage("capped", portfolio, "place_relaxed", _nothing),
    "exact": Stage("tight", portfolio, "place_exactly", _nothing),
    "improve, free": Stage("free", portfolio, "improve", _as_given),
    "improve": Stage("capped", portfolio, "improve", _as_given),
    "improve: many pairs": Stage("capped", search, "_exchange", _no_pairs),
    "improve: the worst bin": Stage("capped", search, "_exchange", _no_worst),
    "improve: groups of two": Stage("capped", search, "_exchange", _no_twos),
    "kinds apart": Stage("kinds", portfolio, "_of_kinds", _drop("kinds apart")),
    "guess 2 of kinds": Stage("kinds", portfolio, "_of_kinds", _drop("guess 2 of kinds")),
    "improve at true costs": Stage("kinds", portfolio, "improve", _as_given),
    "groups of two, kinds": Stage("kinds", search, "_exchange", _no_twos),
    "relabel": Stage("home", portfolio, "relabel", _as_given),
    "repair and bring home": Stage("home", portfolio, "improve", _as_given),
    "bring home": Stage("home", search, "_bring_home", lambda _: lambda score, held: held),
    "epoch: all alike": Stage("epoch", deal, "_all_alike", _no_way),
    "epoch: giants together": Stage("epoch", deal, "_by_room", _no_way),
    "epoch: by rank": Stage("epoch", deal, "_by_rank", _no_way),
    "keep a part": Stage("many at home", locality, "_keep_part", _nothing),
}


@contextmanager
def leave_out(stage: Stage) -> Iterator[None]:
    """Solve without a stage."""
    kept = getattr(stage.module, stage.name)
    setattr(stage.module, stage.name, stage.without(kept))
    try:
        yield
    finally:
        setattr(stage.module, stage.name, kept)


def stages(batches: Mapping[str, Sequence[Batch]]) -> Iterator[dict[str, Any]]:
    """Gap, share away and time of each stage's cases, with all stages and without it."""
    families = cases(batches)
    complete = {family: cache(lambda runs=runs: measure(runs)) for family, runs in families.items()}
    for name, stage in STAGES.items():
        before = complete[stage.family]()
        with leave_out(stage):
            after = measure(families[stage.family])
        yield {
            "without": name,
            "family": stage.family,
            "cases": len(families[stage.family]),
            "changes": {key: (before[key], after[key]) for key in before if key != "seconds"},
            "time_ratio": float(np.median(np.divide(after["seconds"], before["seconds"]))),
            "total_time_ratio": sum(after["seconds"]) / sum(before["seconds"]),
        }


def measure(runs: Sequence[Case]) -> dict[str, Any]:
    """Gaps, share away, refusals, and the least of three times of each case."""
    seconds, gaps, away, refused = [], [], [], 0
    for run in runs:
        times, found = list[float](), None
        for _ in range(3):
            start = thread_time()
            try:
                found = run()
            except PlanError:
                found = None
            times.append(thread_time() - start)
        seconds.append(min(times))
        refused += found is None
        if found is not None:
            gaps.append(found[0])
            away.append(found[1])
    return {
        "gap_mean": float(np.mean(gaps)),
        "gap_max": max(gaps),
        "away": float(np.mean(away)),
        "refused": refused,
        "seconds": seconds,
    }


def cases(batches: Mapping[str, Sequence[Batch]]) -> dict[str, list[Case]]:
    """What each stage is tried on."""
    families: dict[str, list[Case]] = {"free": [], "capped": [], "kinds": [], "home": []}
    cluster = _cluster(4)
    for steps in batches.values():
        for batch in steps:
            lens = np.concatenate([np.array(rank) for rank in batch])
            cap = int(1.05 * lens.sum() / 32) + 1
            for spec in BAGS:
                sizes = Topology.parse(spec).bag_sizes
                families["free"].append(_assigned(lens, sizes))
                if lens.max() <= cap * sizes.max():
                    limits = Limits(tokens=cap)
                    families["capped"].append(_assigned(lens, sizes, limits=limits, sizes=lens))
            for spec in ("g1n8+g8n3", "g1n16+g2n4+g8n1"):
                planned = _planned(batch, spec, cluster=cluster, locality_tolerance=0.0)
                families["kinds"].append(planned)
            for spec in ("g1n32", "g8n4", "g1n8+g8n3"):
                topology = Topology.parse(spec)
                home = np.repeat(topology.bag_of_rank, [len(rank) for rank in batch])
                for tolerance in (0.0, 0.01):
                    options = {"sizes": lens, "home": home, "locality_tolerance": tolerance}
                    families["home"].append(_assigned(lens, topology.bag_sizes, **options))
    rng = np.random.default_rng(0)
    many = rng.lognormal(np.log(2048), 1.2, (3, 128, 12)).clip(64, 131_072).astype(int).tolist()
    for batch in many:
        families["kinds"].append(_planned(batch, "g1n8+g8n3", cluster=_cluster(16)))
    families["many at home"] = [
        _planned(batch, spec, locality_tolerance=0.01)
        for batch in many
        for spec in ("g1n32", "g8n4")
    ]
    families["tight"] = [_tight(seed) for seed in range(40)]
    families["epoch"] = list(_epoch())
    return families


def _cluster(nodes: int) -> Cluster:
    return Cluster(nodes, 8, 0.55 * 989e12, 80e9, 240e9, 33e9, 10e-6)


def _assigned(lens: Any, speeds: Any, **options: Any) -> Case:
    costs, home = COST(lens), options.get("home")

    def run() -> tuple[float, float]:
        plan = assign(costs, speeds=speeds, **options)
        away = 0.0 if home is None else float(lens[plan.bin_of != home].sum() / lens.sum())
        return plan.gap, away

    return run


def _planned(batch: Batch, spec: str, **options: Any) -> Case:
    def run() -> tuple[float, float]:
        plan = plan_batch(batch, spec, COST, **options)
        return plan.gap, plan.moved_tokens / float(plan.seq_lens.sum())

    return run


def _epoch() -> Iterator[Case]:
    """Steps of a sampler: shapes, spreads of lengths, when ranks meet, and what limits a cell."""
    rng = np.random.default_rng(1)
    for spread in (0.4, 0.9, 1.4):
        for shape in (StepShape(4, 8, 1), StepShape(8, 8, 4), StepShape(1, 32, 8)):
            lens = rng.lognormal(np.log(1024), spread, shape.full).clip(32, 65_536).astype(np.int64)
            most = max(int(1.3 * lens.sum() / shape.num_cells), int(lens.max())) + 1
            for sync in ("microbatch", "step"):
                for even, padded, limit in (
                    (True, False, None),
                    (False, False, None),
                    (False, True, None),
                    (True, False, Limits(tokens=most)),
                ):
                    rules = deal.DealRules(shape, sync, limit, even, padded)
                    yield _dealt(lens, rules)


def _dealt(lens: Any, rules: deal.DealRules) -> Case:
    return lambda: (deal.deal_step(COST(lens), lens, rules).gap, 0.0)


def _tight(seed: int) -> Case:
    """Items that fill all bins to the last token: there is an assignment, and few others."""
    rng = np.random.default_rng(seed)
    cuts = [np.sort(rng.choice(np.arange(1, 100), 3, replace=False)) for _ in range(6)]
    sizes = rng.permutation(np.concatenate([np.diff([0, *cut, 100]) for cut in cuts]))
    costs, limits = rng.uniform(1.0, 9.0, sizes.size), Limits(tokens=100)

    def run() -> tuple[float, float]:
        return assign(costs, 6, sizes=sizes, limits=limits).gap, 0.0

    return run


def stages_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of gaps with and without a stage."""
    heads = ("cases", "mean gap", "without", "max gap", "without", "away", "without", "refused")
    table = Table("without", "family", *heads, "time", "in all", title="Stages of the solver")
    for row in rows:
        changes = row["changes"]
        gaps = (*changes["gap_mean"], *changes["gap_max"])
        table.add_row(
            row["without"],
            row["family"],
            str(row["cases"]),
            *(f"{1e4 * gap:.2f}e-4" for gap in gaps),
            *(f"{share:.3f}" for share in changes["away"]),
            "{} / {}".format(*changes["refused"]),
            f"{row['time_ratio']:.2f}x",
            f"{row['total_time_ratio']:.2f}x",
        )
    return table
