"""Plans whose digests and makespans are recorded: a change of them is a change of the solver.

Run `python -m tests.goldens.plans` to record them again, after a change that is meant.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bascule.errors import PlanError
from bascule.machine.cluster import Cluster
from bascule.machine.costs import TransformerCost
from bascule.plan.limits import Limits
from bascule.plan.plan import plan_batch
from bascule.plan.solver.solve import assign
from bascule.plan.topology import Topology
from tests.goldens.sparse import sparse_cases

Golden = tuple[str, float] | None
"""Digest of the bin of each item, and the makespan; None: no plan within the limits was found."""

TABLE = Path(__file__).with_name("plans.json")
COST = TransformerCost(3072, gamma=0.426, num_layers=57)
BAGS = ("g1n32", "g4n8", "g8n4", "g1n8+g8n3", "g1n16+g8n2", "g1n24+g8n1")


def read_table() -> dict[str, Golden]:
    """The recorded plans, by family and number."""
    table = json.loads(TABLE.read_text())
    return {name: None if row is None else (row[0], row[1]) for name, row in table.items()}


def solve(call: Callable[[], Any]) -> Golden:
    """What a case gives now."""
    try:
        plan = call()
    except PlanError:
        return None
    bins = plan.bag_of if hasattr(plan, "bag_of") else plan.bin_of
    digest = hashlib.blake2b(np.asarray(bins, dtype="<i8").tobytes(), digest_size=8).hexdigest()
    return digest, float(plan.makespan)


def cases() -> dict[str, Callable[[], Any]]:
    """The cases, by family and number."""
    named: dict[str, Callable[[], Any]] = {}
    counts: dict[str, int] = {}
    for family, call in _cases():
        named[f"{family} {counts.setdefault(family, 0)}"] = call
        counts[family] += 1
    return named


def _cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    rng = np.random.default_rng(0)
    spreads = (0.3, 0.6, 0.9, 1.2, 1.5, 1.8, 0.5, 1.0, 1.4)
    batches = [_batch(rng, 32, 4 + 3 * (k % 3), spread) for k, spread in enumerate(spreads)]
    many = [_batch(rng, 128, 12, 1.2) for _ in range(3)]
    for batch in batches:
        lens = np.concatenate([np.array(rank) for rank in batch])
        cap = int(1.05 * lens.sum() / 32) + 1
        for spec in BAGS:
            sizes = Topology.parse(spec).bag_sizes
            yield "free", _assigned(lens, sizes)
            yield "capped", _assigned(lens, sizes, limits=Limits(tokens=cap), sizes=lens)
        for spec in ("g1n8+g8n3", "g1n16+g2n4+g8n1"):
            yield "kinds", _planned(batch, spec, cluster=_cluster(4), locality_tolerance=0.0)
        for spec in ("g1n32", "g8n4", "g1n8+g8n3"):
            topology = Topology.parse(spec)
            home = np.repeat(topology.bag_of_rank, [len(rank) for rank in batch])
            for tolerance in (0.0, 0.01):
                options = {"sizes": lens, "location": home, "locality_tolerance": tolerance}
                yield "home", _assigned(lens, topology.bag_sizes, **options)
    for batch in many:
        yield "kinds", _planned(batch, "g1n8+g8n3", cluster=_cluster(16))
        for spec in ("g1n32", "g8n4"):
            yield "home", _planned(batch, spec, locality_tolerance=0.01)
    for seed in range(40):
        yield "tight", _tight(seed)
    rng = np.random.default_rng(1)
    for number in range(12):
        few = _batch(rng, 16, 6, spreads[number % len(spreads)])
        few = [rank[: rng.integers(1, 3 + number % 4)] for rank in few]
        for spec in ("g1n8+g8n1", "g1n4+g2n2+g8n1"):
            yield "few", _planned(few, spec)
    for call in sparse_cases():
        yield "sparse", call


def _batch(rng: np.random.Generator, num_ranks: int, each: int, spread: float) -> list[list[int]]:
    lens = rng.lognormal(np.log(2048), spread, (num_ranks, each)).clip(64, 131_072)
    return lens.astype(int).tolist()


def _cluster(nodes: int) -> Cluster:
    return Cluster(nodes, 8, 0.55 * 989e12, 80e9, 240e9, 33e9, 10e-6)


def _assigned(lens: Any, speeds: Any, **options: Any) -> Callable[[], Any]:
    return lambda: assign(COST(lens), speeds=speeds, **options)


def _planned(batch: list[list[int]], spec: str, **options: Any) -> Callable[[], Any]:
    return lambda: plan_batch(batch, spec, COST, **options)


def _tight(seed: int) -> Callable[[], Any]:
    """Items that fill all bins to the last token: there is an assignment, and few others."""
    rng = np.random.default_rng(seed)
    cuts = [np.sort(rng.choice(np.arange(1, 100), 3, replace=False)) for _ in range(6)]
    sizes = rng.permutation(np.concatenate([np.diff([0, *cut, 100]) for cut in cuts]))
    costs, limits = rng.uniform(1.0, 9.0, sizes.size), Limits(tokens=100)
    return lambda: assign(costs, 6, sizes=sizes, limits=limits)


if __name__ == "__main__":
    found = {name: solve(call) for name, call in cases().items()}
    rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in found.items()]
    TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
