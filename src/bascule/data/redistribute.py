"""One step of a balanced loader: agree on what all ranks loaded, decide who gets it, move it."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bascule.arrays import Ints
from bascule.comm.agree import Statement, agree, agree_on
from bascule.comm.groups import RankGroup
from bascule.data.samples.loaded import CLOSING, FLAGS, DataRanks, Ends, Loaded, Offer, Sample
from bascule.data.samples.sample_transfer import Deliveries, Transfer, deliver, exchange
from bascule.errors import CommError, ConfigError, PlanError
from bascule.plan.batch import Plan
from bascule.plan.costs import Cost, describe_cost, unit_seconds
from bascule.plan.limits import Limits, in_tokens
from bascule.plan.solver.problem import build_problem
from bascule.plan.step import Sync, plan_step, step_makespan
from bascule.plan.topology import Topology

_FIRST_CAPACITY = 256  # integers a rank that the first gather has room for


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings by which steps are made; the same on all ranks.

    Attributes:
        accumulate: M, microbatches of a step.
        sync: When ranks wait for each other, as for `plan_step`.
        limits: What a rank can hold in a microbatch.
        ends: What happens when ranks run out of samples at different steps.
        min_gain: Share of the step that balancing must save.
        max_bytes: Most bytes of samples that a rank may hold in a step; None if unlimited.
    """

    accumulate: int
    sync: Sync
    limits: Limits | None
    ends: Ends
    min_gain: float
    max_bytes: int | None


@dataclass(frozen=True, slots=True)
class StepKey:
    """Which step of which epoch, and where the epoch was taken up again; the same on all ranks."""

    epoch: int
    step: int
    resumed: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether samples move in a step, and why.

    Attributes:
        applied: Whether they move.
        reason: "balanced"; or why not: "even" (nothing to gain), "gain" (too little), "exchange"
            (it would cost more), "limits" (no plan keeps them, but the batch as loaded does).
        before: Predicted step as loaded, in the unit of the cost model.
        after: Predicted step as planned.
    """

    applied: bool
    reason: Literal["balanced", "even", "gain", "exchange", "limits"]
    before: float
    after: float


@dataclass(frozen=True, slots=True, eq=False)
class Delivered:
    """One microbatch of this rank.

    Attributes:
        samples: In the order of their ids.
        is_padding: Whether all there is, is a sample that another rank has, with weight 0.
        loss_scale: Factor of the mean loss of these samples; see `BalancedLoader`.
        plan: Who computes what in this microbatch.
    """

    samples: list[Sample]
    is_padding: bool
    loss_scale: float
    plan: Plan


@dataclass(frozen=True, slots=True, eq=False)
class StepData:
    """All microbatches of a step on this rank, and what it took.

    Attributes:
        microbatches: M of them.
        loaded: What all ranks loaded.
        verdict: Whether samples moved.
        sent_bytes: What this rank sent to others.
        received_bytes: What it received from them.
    """

    microbatches: list[Delivered]
    loaded: Loaded
    verdict: Verdict
    sent_bytes: int
    received_bytes: int


class ClosedError(CommError):
    """Ranks want no further step. The same on all ranks, after an agreement.

    Args:
        ranks: Those that said so.
        step: The step that there is not.
        group: Name of the group.

    Attributes:
        step: The same.
    """

    def __init__(self, ranks: Sequence[int], step: int, group: str) -> None:
        self.step = step
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        super().__init__(
            f"step {step}: {names} of group {group!r} closed the loader: all ranks must leave an "
            "iteration at the same step"
        )


Speeds = tuple[float, ...] | None
"""Of each data-parallel rank; None: all alike."""


class Redistributor:
    """Makes the steps of one rank. All ranks of the group call `step` in the same order.

    Args:
        ranks: Who takes part.
        rules: How steps are made.
        cost: The first cost model, version 0.
        seconds_per_byte: What a byte costs in the exchange; the same on all ranks.
    """

    def __init__(self, ranks: DataRanks, rules: Rules, cost: Cost, seconds_per_byte: float) -> None:
        self.ranks = ranks
        self.rules = rules
        self.costs: list[tuple[Cost, Speeds]] = [(cost, None)]
        self.seconds_per_byte = seconds_per_byte
        self._version = 0
        self._capacity = _FIRST_CAPACITY
        self._topology = Topology(((1, 1),), ranks.num)

    def begin(self, group: RankGroup) -> None:
        """Make the steps of another iteration, with the newest cost model.

        Where an iteration begins, all ranks have been given the same cost models. The next
        agreement makes sure of it.

        Args:
            group: Of the same ranks, for this iteration alone.
        """
        self.ranks = dataclasses.replace(self.ranks, group=group)
        self._version = len(self.costs) - 1

    def step(self, key: StepKey, offer: Offer, reserve: Callable[[int], None]) -> StepData | None:
        """This rank's part of a step; None if there is none any more. Two collectives.

        Args:
            key: Which step.
            offer: What this rank brings.
            reserve: Called with the bytes that will arrive, before they do; may wait for room.

        Raises:
            RemoteConfigError: A rank offered an illegal sample.
            ClosedError: A rank wants no further step.
            CommError: A rank failed, or the ranks disagree.
            PlanError: The limits cannot be kept (on all ranks alike).
        """
        loaded = self._agree(key, offer)
        if loaded.is_last(self.rules.ends):
            return None
        try:
            plans, verdict = self.decide(loaded)
            deliveries = deliver(loaded, plans, pad=self.rules.ends != "finish")
            transfer = Transfer.of(loaded, deliveries, self.ranks)
            check_received(transfer, self.rules.max_bytes)
        except PlanError as error:
            raise PlanError(f"step {key.step}, epoch {key.epoch}: {error}") from error
        except Exception as error:  # of the cost model; another rank may not have it
            self.confirm(key, error)
            raise
        # Used from the next step on, whose agreement makes sure that it is the same on all ranks.
        self._version = loaded.cost_version
        rank, index = self.ranks.group.rank, self.ranks.index
        own = np.flatnonzero(loaded.source == index).tolist() if self.ranks.is_leader else []
        parcels = dict(zip(own, offer.parcels, strict=True))
        reserve(int(transfer.bytes_to[rank].sum()))
        arrived = exchange(transfer, self.ranks.group, parcels, key.step)
        kept = dict(zip(own, itertools.chain.from_iterable(offer.samples), strict=True))
        return StepData(
            microbatches=_assemble(deliveries, arrived, kept, loaded, plans, index),
            loaded=loaded,
            verdict=verdict,
            sent_bytes=int(transfer.bytes_to[:, rank].sum()),
            received_bytes=int(transfer.bytes_to[rank].sum()),
        )

    def confirm(self, key: StepKey, error: Exception | None) -> None:
        """Make sure that no rank failed to plan or to collate. One collective.

        Raises:
            RemoteConfigError: A rank met bad input.
            CommError: A rank failed.
        """
        what = f"epoch {key.epoch}, making batches"
        agree_on(self.ranks.group, {}, error, what=what, step=key.step)

    @property
    def _cost(self) -> Cost:
        """The cost model that all ranks use now."""
        return self.costs[self._version][0]

    @property
    def _speeds(self) -> Speeds:
        """Those of the data-parallel ranks that all use now."""
        return self.costs[self._version][1]

    def _agree(self, key: StepKey, offer: Offer) -> Loaded:
        error, described = offer.error, {"cost": "", "speeds": str(self._speeds)}
        try:
            described["cost"] = describe_cost(self._cost)
        except ConfigError as met:  # where one rank fails, all are told
            error = error or met
        gathered = agree(
            self.ranks.group,
            Statement({"step": str(key), **described}, offer.values(self.rules.accumulate), error),
            what=f"epoch {key.epoch}, loading",
            step=key.step,
            capacity=self._capacity,
        )
        self._capacity = max(self._capacity, *(part.size for part in gathered))
        closing = [rank for rank, part in enumerate(gathered) if part[FLAGS] & CLOSING]
        if closing:
            raise ClosedError(closing, key.step, self.ranks.group.name)
        return Loaded.of(gathered, self.ranks, self.rules.accumulate)

    def decide(self, loaded: Loaded) -> tuple[tuple[Plan, ...], Verdict]:
        """Plans of all microbatches, and whether they are worth it. The same on all ranks.

        Raises:
            PlanError: Neither a plan nor the batch as loaded keeps the limits.
        """
        cost, speeds, rules = self._cost, self._speeds, self.rules
        overhead = float(getattr(cost, "overhead", 0.0))
        micros = range(rules.accumulate)
        args = self._topology, cost, speeds
        as_loaded = tuple(_as_loaded(loaded, micro, *args) for micro in micros)
        before = step_makespan(as_loaded, sync=rules.sync) + overhead
        is_legal = all(_keeps(plan, in_tokens(rules.limits, cost, None)) for plan in as_loaded)
        lens = [loaded.lens_of(micro) for micro in micros]
        try:
            chosen = {"sync": rules.sync, "limits": rules.limits, "speeds": speeds}
            plans = plan_step(lens, self._topology, cost, **chosen)
        except PlanError:
            if not is_legal:
                raise
            return as_loaded, Verdict(False, "limits", before, before)
        plans = tuple(
            _without_idle_ranks(plan, loaded.weights[loaded.micro == micro], cost, rules.limits)
            for micro, plan in enumerate(plans)
        )
        after = step_makespan(plans, sync=rules.sync) + overhead
        reason = self._reason(loaded, plans, before, after) if is_legal else "balanced"
        applied = reason == "balanced"
        return plans if applied else as_loaded, Verdict(applied, reason, before, after)

    def _reason(
        self, loaded: Loaded, plans: Sequence[Plan], before: float, after: float
    ) -> Literal["balanced", "even", "gain", "exchange"]:
        gain = before - after
        if gain <= 0.0:
            return "even"
        if gain < self.rules.min_gain * before:
            return "gain"
        moved = Transfer.of(loaded, deliver(loaded, plans, pad=False), self.ranks).bytes_to
        most = float(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))
        # The exchange runs behind the step; only what is longer than the step is waited for.
        unit_s = unit_seconds(self._cost)
        if unit_s is None:
            return "balanced"
        exposed_s = max(most * self.seconds_per_byte - after * unit_s, 0.0)
        return "exchange" if gain * unit_s <= exposed_s else "balanced"


def check_received(transfer: Transfer, most: int | None) -> None:
    """Refuse a step in which a rank would receive more bytes than it may hold; None: any number.

    Raises:
        PlanError: Names the rank, the bytes and the limit.
    """
    held = transfer.bytes_to.sum(axis=1)
    worst = int(held.argmax())
    if most is not None and held[worst] > most:
        raise PlanError(
            f"rank {worst} would receive {held[worst]:,} bytes of samples in a step, above "
            f"max_bytes_in_flight={most:,} by {held[worst] - most:,}: raise it, or load fewer "
            "samples a step"
        )


def _as_loaded(loaded: Loaded, micro: int, topology: Topology, cost: Cost, speeds: Speeds) -> Plan:
    """The plan that leaves every sample where it is."""
    chosen = loaded.micro == micro
    lens, source = loaded.lens[chosen], loaded.source[chosen]
    loads = np.bincount(source, cost(lens), topology.num_ranks).astype(np.float64)
    fast = None if speeds is None else np.array(speeds)
    loads = loads if fast is None else loads / fast
    return Plan(topology, loaded.counts[micro], lens, source, loads, 0.0, "none", speeds=fast)


def _without_idle_ranks(plan: Plan, weights: Ints, cost: Cost, limits: Limits | None) -> Plan:
    """Give each rank a sample that counts if there are enough: a mean over none is no number.

    A rank may have been given nothing, or only samples of weight 0. One that counts then comes from
    the rank that has the most of them, its shortest. The plan stays as it is where the limits leave
    no room for that.
    """
    counted = weights > 0
    if np.count_nonzero(counted) < plan.num_ranks:
        counted = np.ones_like(counted)
    held_by = np.bincount(plan.bag_of[counted], minlength=plan.num_ranks)
    if plan.bag_of.size < plan.num_ranks or held_by.all():
        return plan
    bag_of = plan.bag_of.copy()
    for rank in np.flatnonzero(held_by == 0).tolist():
        richest = int(held_by.argmax())
        held = np.flatnonzero((bag_of == richest) & counted)
        bag_of[held[plan.seq_lens[held].argmin()]] = rank
        held_by[richest] -= 1
        held_by[rank] += 1
    loads = np.bincount(bag_of, cost(plan.seq_lens), plan.num_ranks).astype(np.float64)
    loads = loads if plan.speeds is None else loads / plan.speeds
    changed = dataclasses.replace(plan, bag_of=bag_of, loads=loads)
    return changed if _keeps(changed, in_tokens(limits, cost, None)) else plan


def _keeps(plan: Plan, limits: Limits | None) -> bool:
    """Whether a plan keeps the limits on tokens and items; every bag is a rank."""
    lens = plan.seq_lens
    try:
        problem = build_problem(lens, plan.num_ranks, limits=limits, sizes=lens)
    except PlanError:  # no plan does
        return False
    return not problem.excess(plan.bag_of)


def _assemble(
    deliveries: Deliveries,
    arrived: Mapping[int, Sample],
    kept: Mapping[int, Sample],
    loaded: Loaded,
    plans: Sequence[Plan],
    index: int,
) -> list[Delivered]:
    """The microbatches of data-parallel rank `index`, from what arrived and what it had."""
    num_micro, num_ranks = loaded.counts.shape
    total = int(loaded.weights.sum())
    delivered: list[Delivered] = []
    for micro, plan in enumerate(plans):
        here = np.flatnonzero((deliveries.dest == index) & (deliveries.micro == micro))
        ids = deliveries.ids[here]
        pairs = zip(here.tolist(), ids.tolist(), strict=True)
        samples = [arrived[k] if k in arrived else kept[sample] for k, sample in pairs]
        is_padding = bool(deliveries.is_padding[here].any())
        weight = 0 if is_padding else int(loaded.weights[ids].sum())
        scale = weight * num_ranks * num_micro / total if total else 0.0
        delivered.append(Delivered(samples, is_padding, scale, plan))
    return delivered
