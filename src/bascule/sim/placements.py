"""Place the samples of microbatches on ranks: as loaded, as trainers deal them, or as planned.

Legend: n sequences of a microbatch, N ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bascule.arrays import Floats, Ints
from bascule.checks import of_type, shown
from bascule.errors import ConfigError
from bascule.machine.cluster import Cluster
from bascule.machine.costs import TransformerCost
from bascule.plan.offer import Offer
from bascule.plan.plan import Terms, plan_greedily
from bascule.plan.topology import Topology

NOTHING, SAMPLES, TOKENS = "nothing", "samples", "tokens"
"""What moves between ranks: nothing, the loader's samples, or tokens within the step."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Sequences that ranks loaded for a microbatch."""

    batch: Offer
    kinds: Ints  # (n, 2) text and other tokens of each, for encoders

    def on_first(self, num_ranks: int) -> "Loaded":
        """Return the same samples on the first ranks, which load in turn what the others had."""
        owner = self.batch.owner
        owner = np.where(owner < num_ranks, owner, np.arange(owner.size) % num_ranks)
        order, counts = np.argsort(owner, kind="stable"), np.bincount(owner, minlength=num_ranks)
        return Loaded(Offer.of(counts[None], self.batch.lens[order]), self.kinds[order])


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """An assignment of the sequences of a microbatch to bags."""

    topology: Topology
    source: Ints  # (n,) rank that loaded each sequence
    lens: Ints  # (n,) tokens of each
    kinds: Ints  # (n, 2) text and other tokens of each, for encoders
    bag_of: Ints  # (n,) bag that computes each
    moves: str = NOTHING  # what moves between ranks for it
    padding: Ints | int = 0  # (n,) tokens that are computed beside `lens`

    @property
    def computed(self) -> Ints:
        """(n,) tokens that ranks compute for each sequence, with padding."""
        return self.lens + self.padding

    def by_rank(self, work: Floats) -> Floats:
        """Sum (n,) work by bag; return (N,) even shares of each bag's sum for its ranks."""
        sums = np.bincount(self.bag_of, work, self.topology.num_bags) / self.topology.bag_sizes
        return sums[self.topology.bag_of_rank]


def split(run: Sequence[Loaded], num_parts: int) -> list[Loaded]:
    """Deal the samples of each rank over `num_parts` microbatches, for gradient accumulation.

    Each sample, longest first, goes to its rank's part with the fewest tokens. So parts need little
    memory, and long samples of all ranks fall together, which shortens waiting without balancing.
    """
    parts: list[Loaded] = []
    for loaded in run if num_parts > 1 else ():
        lens, owner, num_ranks = loaded.batch.lens, loaded.batch.owner, loaded.batch.num_ranks
        tokens, part_of = np.zeros((num_ranks, num_parts), dtype=np.int64), np.zeros_like(lens)
        for place in np.argsort(-lens, kind="stable").tolist():
            part_of[place] = part = tokens[owner[place]].argmin()
            tokens[owner[place], part] += lens[place]
        for part in range(num_parts):
            inside = part_of == part
            counts = np.bincount(owner[inside], minlength=num_ranks)[None]
            parts.append(Loaded(Offer.of(counts, lens[inside]), loaded.kinds[inside]))
    return parts or list(run)


Policy = Callable[[Sequence[Loaded]], Iterator[Placement]]
"""A function from the microbatches of a run to their placements."""


def as_loaded(run: Sequence[Loaded]) -> Iterator[Placement]:
    """Leave sequences on the ranks that loaded them."""
    for microbatch in run:
        batch = microbatch.batch
        yield _place(batch.lens, microbatch.kinds, batch.owner, batch.counts.size)


def padded(run: Sequence[Loaded]) -> Iterator[Placement]:
    """Leave sequences on the ranks that loaded them, each padded to the longest of its rank."""
    for microbatch in as_loaded(run):
        longest = np.zeros(microbatch.topology.num_ranks, dtype=np.int64)
        np.maximum.at(longest, microbatch.source, microbatch.lens)
        yield replace(microbatch, padding=longest[microbatch.source] - microbatch.lens)


def buckets(run: Sequence[Loaded]) -> Iterator[Placement]:
    """Deal the samples of the run by length, like resolution buckets that each have a batch size.

    A microbatch has the samples that fill the mean tokens, at least one per rank; others drop out.
    """
    lens, kinds, num_ranks, budget = _concatenated(run)
    order, first = np.argsort(lens, kind="stable")[::-1], 0
    lens, kinds = lens[order], kinds[order]
    while first < lens.size:
        batch_size = max(round(budget / max(int(lens[first]), 1)), 1)
        bucket = slice(first, first + batch_size * num_ranks)
        if first and bucket.stop > lens.size:
            return
        rank_of = np.arange(lens[bucket].size) % num_ranks
        yield _place(lens[bucket], kinds[bucket], rank_of, num_ranks)
        first = bucket.stop


def packs(run: Sequence[Loaded]) -> Iterator[Placement]:
    """Fill packs of one length with samples in order, and pad them; one per rank and microbatch.

    A pack is as long as a rank's mean tokens, or as the longest sample. Padding attends to itself;
    packs that do not fill the last microbatch are dropped.
    """
    lens, kinds, num_ranks, budget = _concatenated(run)
    length = max(int(np.ceil(budget)), int(lens.max(initial=0)))
    pack_of, pack, filled = np.zeros(lens.size, dtype=np.int64), 0, 0
    for place, tokens in enumerate(lens.tolist()):
        if filled + tokens > length:
            pack, filled = pack + 1, 0
        pack_of[place] = pack
        filled += tokens
    num_packs = pack + 1 if lens.size else 0
    last = max(num_packs // num_ranks * num_ranks, 1)
    for first in range(0, last, num_ranks):
        inside = (pack_of >= first) & (pack_of < first + num_ranks)
        rank_of = pack_of[inside] - first
        used = np.unique(rank_of)
        free = length - np.bincount(rank_of, lens[inside], num_ranks)[used].astype(np.int64)
        zeros = np.zeros_like(used)  # a sequence of padding alone ends each pack
        lens_of = np.concatenate([lens[inside], zeros])
        kinds_of = np.concatenate([kinds[inside], np.stack([zeros, zeros], axis=1)])
        packs = _place(lens_of, kinds_of, np.concatenate([rank_of, used]), num_ranks)
        yield replace(packs, padding=np.concatenate([rank_of * 0, free]))


def planned(
    topology: Topology,
    is_greedy: bool,
    moves: str,
    cost: TransformerCost,
    cluster: Cluster,
    speeds: Floats | None,
    run: Sequence[Loaded],
) -> Iterator[Placement]:
    """Place as `plan_batch` or `plan_greedily` does; communication counts only if bags differ."""
    is_mixed = len(set(topology.terms)) > 1
    step_cost = cluster.passes.cost(cost)
    wired = (cost, cluster) if is_mixed else (step_cost, None)
    terms = Terms(topology, wired[0], speeds=speeds, cluster=wired[1])
    for loaded in run:
        offer = loaded.batch
        if is_greedy:
            plan = plan_greedily(offer, topology, step_cost)
        else:
            plan = terms.priced(offer).plan()
        yield Placement(plan.topology, offer.owner, offer.lens, loaded.kinds, plan.bag_of, moves)


_POLICIES: dict[str, Policy] = {
    "none": as_loaded,
    "padded": padded,
    "buckets": buckets,
    "packs": packs,
}

AUTO = "auto"
"""Name of the topology that `suggest_topology` chooses for the run."""

_ADVICE = f"{', '.join(_POLICIES)}, loader, {AUTO}, a topology such as g4n8, or knapsack g4n8"


def policy_of(
    name: str, cost: TransformerCost, cluster: Cluster, speeds: Floats | None = None
) -> Policy:
    """Return the policy with a name (see `simulate`), which plans for a cluster and its speeds."""
    num_ranks = cluster.num_ranks
    if of_type("topologies: each", name, str, _ADVICE) in _POLICIES:
        return _POLICIES[name]
    if name == "loader":
        return partial(planned, Topology(((1, num_ranks),)), False, SAMPLES, cost, cluster, speeds)
    planner, _, spec = name.rpartition(" ")
    if planner not in ("", "knapsack") or not spec.startswith("g"):
        raise ConfigError(f"topologies: {shown(name)}: give {_ADVICE}")
    topology = Topology.parse(spec, world_size=num_ranks)
    return partial(planned, topology, bool(planner), TOKENS, cost, cluster, speeds)


def _place(lens: Ints, kinds: Ints, rank_of: Ints, num_ranks: int) -> Placement:
    return Placement(Topology(((1, num_ranks),)), rank_of, lens, kinds, rank_of)


def _concatenated(run: Sequence[Loaded]) -> tuple[Ints, Ints, int, float]:
    """Return lens and kinds of all sequences, ranks, and mean tokens of a rank and microbatch."""
    lens = np.concatenate([microbatch.batch.lens for microbatch in run])
    kinds = np.concatenate([microbatch.kinds for microbatch in run])
    num_ranks = run[0].batch.counts.size
    return lens, kinds, num_ranks, float(lens.sum()) / (len(run) * num_ranks)
