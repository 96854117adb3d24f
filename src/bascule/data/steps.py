"""One step of a balanced loader: load samples, agree, decide who gets which, move, collate.

Legend: M microbatches of a step, D data-parallel ranks, n samples of a step. A sample's id is its
index in the order of microbatches, then of ranks that loaded, then of their loaders.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch import Tensor

from bascule.arrays import Bools, Floats, Ints, ranges
from bascule.checks import of_type
from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup
from bascule.comm.items import HOST, ItemMove, Parcel, move_items, parcel
from bascule.comm.route import BoundRoute, move
from bascule.data.slow_rank import NO_TIMES, STEP, STEP_S, Pace
from bascule.data.source import Reading, Sample, Saved, whole_number, words_of
from bascule.errors import CommError, ConfigError, PlanError
from bascule.machine.costs import Cost, unit_seconds
from bascule.plan.limits import Limits
from bascule.plan.offer import Offer
from bascule.plan.plan import Plan, Priced, Sync, Terms, Verdict, plan_jointly, step_makespan, weigh
from bascule.plan.routes import Route
from bascule.plan.topology import Topology
from bascule.plan.trial import Trial, Turn
from bascule.quantities import percent
from bascule.quantities import times as times_text

logger = logging.getLogger(__name__)

Ends = Literal["drop_last", "pad_empty", "finish"]

_FIRST_CAPACITY = 256  # integers a rank that the first gather has room for
_STATE_WORDS = 2**17  # most of all ranks' loader states a step, on average
_SHORT, _CLOSING, _SOME = 1, 2, 4  # flags of a rank: its loader ran out, it leaves, it loaded


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A microbatch of one rank.

    Attributes:
        data: The samples as `collate_fn` put them together.
        loss_scale: Factor of this microbatch's mean loss, 0 for padding. If losses are also divided
            by the number of microbatches, and gradients averaged over ranks, the step has the
            gradient of the mean loss of all its samples.
        epoch: From 0.
        step: Optimiser step of the epoch, from 0.
        microbatch: Number of the microbatch in the step, from 0.
        num_samples: Samples of this rank, without padding.
        is_padding: True if it holds only a copy of another rank's sample.
        plan: Who computes what in this microbatch.
        verdict: Why samples moved in this step, or stayed.
    """

    data: Any
    loss_scale: float
    epoch: int
    step: int
    microbatch: int
    num_samples: int
    is_padding: bool
    plan: Plan
    verdict: Verdict
    _group: RankGroup

    @shared("restore of a batch")
    def restore(self, values: Tensor) -> Tensor:
        """Bring per-sample results back to the ranks that loaded the samples; differentiable.

        `values` has n rows, one per sample of this microbatch, padding included; the result has m
        rows, one per sample that this rank loaded. All ranks call it. One all-to-all if any moved.
        """
        num_rows = self.num_samples + self.is_padding
        of_type("values to restore", values, Tensor, "a tensor with one row a sample")
        if values.shape[:1] != (num_rows,):
            raise ConfigError(
                f"restore got values of shape {tuple(values.shape)}: give one row for each of the "
                f"{num_rows} samples of this microbatch"
            )
        values = values[: self.num_samples]
        if not self.verdict.applied:
            return values
        source, dest = self.plan.source_ranks, self.plan.bag_of
        rank = self._group.rank
        route = Route.of_items(source, dest, np.ones_like(dest), rank, self.plan.num_ranks)
        sizes = int((source == rank).sum()), len(values)
        names = "samples", f"restore of microbatch {self.microbatch}"
        bound = BoundRoute(route, self._group, values.device, sizes, self.step, names)
        return move(bound, [values], back=True)[0]


# --- load -----------------------------------------------------------------------------------------


def num_input_ids(sample: Sample) -> int:
    """Return the number of a sample's "input_ids", the default length."""
    try:
        ids = sample["input_ids"]
        length, first = len(ids), next(iter(ids), None)
    except (LookupError, TypeError):
        raise ConfigError(
            f'a {type(sample).__name__} has no "input_ids": give BalancedLoader a length_fn'
        ) from None
    if getattr(ids, "ndim", 1 + isinstance(first, list | tuple)) > 1:
        raise ConfigError(
            f'"input_ids" of {length} rows, not of one sample: use input_ids[0] of a batch of one, '
            "LoaderOptions(unpack=..) for collated batches, or give BalancedLoader a length_fn"
        )
    return length


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of steps besides their terms; all but `collate` are the same on all ranks."""

    accumulate: int
    sync: Sync
    ends: Ends
    min_gain: float
    length_fn: Callable[[Sample], int] = num_input_ids
    weight_fn: Callable[[Sample], int] | None = None
    unpack: Callable[[Any], list[Sample]] | None = None  # of an item of the loader
    as_loaded: Callable[[Any], Any] | None = None  # of an item none of whose samples moved
    tries: bool = True
    collate: Callable[[list[Sample]], Any] = list  # called with [] for an empty microbatch


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """The samples that one rank loaded for a step, by microbatch; or the error that it met."""

    flags: int = 0
    samples: Sequence[Sequence[Sample]] = ()
    offer: Offer | None = None
    parcels: Sequence[Parcel] = ()
    items: Sequence[Sequence[Any]] = ()  # that the loader gave, before `unpack`, by microbatch
    num_missing: int = 0  # items that are None
    saved: Saved = (0, words_of(None))  # before the step
    times: Sequence[float] | Floats = NO_TIMES  # see `slow_rank`
    error: Exception | None = None

    def words(self, cost_version: int) -> Ints:
        """Describe samples in integers: `_HEAD`, M numbers of items, times, offer, and state."""
        head = [self.flags, cost_version, self.saved[0], self.saved[1].size, *map(len, self.items)]
        offer = [] if self.offer is None else [self.offer.to_words()]
        times = np.array(self.times).view(np.int64)
        return np.concatenate([np.array(head, np.int64), times, *offer, self.saved[1]])


_HEAD = 4  # flags, newest cost model, samples of the pass before the state, words of the state


CLOSING = Load(_CLOSING)  # of a rank that wants no further step


def load(reading: Reading, rules: Rules, *, loads: bool, saves: bool = False) -> Load:
    """Read this rank's samples of a step, if it `loads`; an error becomes part of the result.

    Samples that are None are left out: None usually stands for a sample that cannot be read.
    """
    flags, samples, items, num_missing = 0, list[list[Sample]](), list[list[Any]](), 0
    lens, weights, parcels, place = list[int](), list[int](), list[Parcel](), "state of the loader"
    # Whatever ends the user's code, also SystemExit: the others would wait for a thread that ended.
    try:
        saved = reading.saved() if saves else (0, words_of(None))
        for micro in range(rules.accumulate):
            place = f"microbatch {micro}"
            taken = next(reading, None)
            flags |= _SOME if taken is not None else _SHORT if loads else 0
            items.append(taken or [])
            taken = [item for item in items[-1] if item is not None]
            num_missing += len(items[-1]) - len(taken)
            place = f"microbatch {micro}, unpack"
            if rules.unpack is not None:
                taken = [sample for item in taken for sample in rules.unpack(item)]
            samples.append(taken)
            for number, sample in enumerate(taken):
                place = f"microbatch {micro}, sample {number}"
                lens.append(whole_number(rules.length_fn(sample), "length_fn"))
                if rules.weight_fn is not None:
                    weights.append(whole_number(rules.weight_fn(sample), "weight_fn"))
                parcels.append(parcel(sample))
    except BaseException as error:
        return Load(error=named(error, place))
    offer = Offer.of(
        [[len(of_micro)] for of_micro in samples],
        lens,
        num_bytes=[sample.num_bytes for sample in parcels],
        weights=weights or None,
    )
    return Load(flags, samples, offer, parcels, items, num_missing, saved)


def named(error: BaseException, place: str) -> Exception:
    """Return the error with its place, on one line, since it is sent to all ranks."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} .. {lines[-1]}"
    if isinstance(error, ConfigError | PlanError):
        return ConfigError(f"{place}: {text}")
    result = RuntimeError(f"{place}: {type(error).__name__}: {text}")
    result.__cause__ = error
    return result


# --- agree ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DataRanks:
    """The ranks of a group, by data-parallel index. Peers (tensor, pipeline) get the same batch."""

    group: RankGroup
    place: Ints  # (group size,) data-parallel index of each, peers included
    along: RankGroup  # ranks that this one shares samples with, by data-parallel index

    @cached_property
    def index(self) -> int:
        """Data-parallel index of this rank."""
        return int(self.place[self.group.rank])

    @cached_property
    def num(self) -> int:
        """D, the data-parallel ranks."""
        return int(self.place.max()) + 1

    @cached_property
    def leaders(self) -> Ints:
        """The first rank of the group (D,) of each data-parallel rank: the one that loads."""
        return np.unique(self.place, return_index=True)[1]


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The samples that all ranks loaded for a step."""

    flags: Ints  # (D,)
    cost_version: int  # the newest cost model that all ranks of the group know
    num_items: Ints  # (M, D) of their loaders
    saved: list[Saved]  # (D,) of their loaders
    times: Floats  # (G, 7) of all ranks of the group, see `slow_rank`
    offer: Offer

    @classmethod
    def of(cls, gathered: Sequence[Ints], ranks: DataRanks, accumulate: int) -> "Loaded":
        """Join the words of all ranks of the group."""
        size, leaders = _HEAD + accumulate, ranks.leaders
        heads = np.stack([words[:size] for words in gathered], axis=1)
        end = size + len(NO_TIMES)
        times = np.stack([words[size:end] for words in gathered]).view(np.float64)
        words = [gathered[leader] for leader in leaders.tolist()]
        numbers = heads[0, leaders], int(heads[1].min()), heads[_HEAD:, leaders]
        saved = [(int(x[2]), x[x.size - x[3] :]) for x in words]
        return cls(*numbers, saved, times, Offer.from_words([x[end:] for x in words]))

    def is_last(self, ends: Ends) -> bool:
        """Return True if no step is left."""
        is_short = ends == "drop_last" and bool((self.flags & _SHORT).any())
        return is_short or not (self.flags & _SOME).any()


# --- decide ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Deliveries:
    """Samples that ranks of the group get, peers included; arrays (k,), alike on all ranks."""

    ids: Ints
    micro: Ints
    source: Ints
    dest: Ints
    num_bytes: Ints
    is_padding: Bools  # a copy of a sample, for a rank that has none
    sent: Ints  # bytes of each rank
    received: Ints

    @classmethod
    def of(cls, offer: Offer, rank_of: Ints, ranks: DataRanks, *, pad: bool) -> "Deliveries":
        """Deliver samples to their data-parallel ranks (n,); with `pad`, one to each idle rank."""
        ids, micro = np.arange(rank_of.size), offer.micro
        if pad and ids.size:
            idle = np.flatnonzero(offer.sums(rank_of, np.ones_like(rank_of)) == 0)
            # One that counts in the mean, if any: the mean over padding is a number.
            counted = np.flatnonzero(offer.weights > 0) if offer.weights.any() else ids
            shortest = counted[offer.lens[counted].argmin()]
            ids = np.concatenate([ids, np.full(idle.size, shortest)])
            micro = np.concatenate([micro, idle // ranks.num])
            rank_of = np.concatenate([rank_of, idle % ranks.num])
        members, num_members = np.argsort(ranks.place, kind="stable"), np.bincount(ranks.place)
        repeats = num_members[rank_of]
        rows = np.repeat(np.arange(ids.size), repeats)
        dest = members[ranges((np.cumsum(num_members) - num_members)[rank_of], repeats)]
        source = ranks.leaders[offer.owner[ids[rows]]]
        num_bytes, is_padding = offer.num_bytes[ids[rows]], rows >= offer.lens.size
        travels = num_bytes * (source != dest)
        sent, received = (
            np.bincount(ends, travels, ranks.group.size).astype(np.int64) for ends in (source, dest)
        )
        return cls(ids[rows], micro[rows], source, dest, num_bytes, is_padding, sent, received)

    @property
    def moves(self) -> Bools:
        """True (k,) for samples that travel between ranks."""
        return self.source != self.dest

    def share(self, offer: Offer, rank: int, micro: int) -> tuple[Ints, bool, float]:
        """Return a rank's rows in a microbatch, whether they are padding, and the loss scale."""
        num_micro, num_ranks = offer.counts.shape
        rows = np.flatnonzero((self.dest == rank) & (self.micro == micro))
        is_padding, total = bool(self.is_padding[rows].any()), int(offer.weights.sum())
        if is_padding or not total:
            return rows, is_padding, 0.0
        return rows, False, int(offer.weights[self.ids[rows]].sum()) * num_ranks * num_micro / total


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The outcome of a step's planning: a plan of each microbatch, and the samples of each rank."""

    plans: tuple[Plan, ...]
    verdict: Verdict
    deliveries: Deliveries
    loaded: tuple[Plan, ...] | None = None  # as loaded, if samples may also stay


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    """A step whose seconds say whether moving pays."""

    turn: Turn
    before: float  # its predicted makespan as loaded
    seconds: list[float]  # of the ranks that reported it


def largest(offer: Offer, plans: Sequence[Plan]) -> Ints:
    """Return (3,) the most tokens of a rank's microbatch, also if padded, and the longest sample.

    A step in which none is larger than before needs no more memory than a rank had before.
    """
    rank_of = np.concatenate([plan.bag_of for plan in plans])
    longest = np.zeros(offer.counts.size, np.int64)
    np.maximum.at(longest, offer.micro * offer.num_ranks + rank_of, offer.lens)
    counts = offer.sums(rank_of, np.ones_like(rank_of)).ravel()
    tokens = offer.sums(rank_of, offer.lens)
    return np.array([tokens.max(), (counts * longest).max(), longest.max()], np.int64)


def without_idle_ranks(plan: Plan, weights: Ints, costs: Floats, limits: Limits | None) -> Plan:
    """Give each rank a sample of nonzero weight for its mean, if limits and counts allow."""
    num_ranks, counted = plan.num_ranks, weights > 0
    if np.count_nonzero(counted) < num_ranks:
        counted = np.ones_like(counted)
    num_counted = np.bincount(plan.bag_of[counted], minlength=num_ranks)
    if plan.bag_of.size < num_ranks or num_counted.all():
        return plan
    bag_of = plan.bag_of.copy()
    for rank in np.flatnonzero(num_counted == 0).tolist():
        richest = int(num_counted.argmax())
        samples = np.flatnonzero((bag_of == richest) & counted)
        bag_of[samples[plan.seq_lens[samples].argmin()]] = rank
        num_counted[richest] -= 1
        num_counted[rank] += 1
    tokens = np.bincount(bag_of, plan.seq_lens, num_ranks)
    counts = np.bincount(bag_of, minlength=num_ranks)
    if limits is not None and not limits.keeps(tokens=tokens, items=counts):
        return plan
    loads = np.bincount(bag_of, costs, num_ranks) / (1.0 if plan.speeds is None else plan.speeds)
    return replace(plan, bag_of=bag_of, loads=loads)


# --- the step -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ReadyStep:
    """A finished step of this rank: one batch for each microbatch."""

    batches: list[Batch]
    num_items: Ints  # (M, D) of the loaders
    num_missing: int  # items of this rank that are None
    saved: list[Saved]  # (D,) of the loaders before the step; none in most, if they are long
    sent_bytes: int
    received_bytes: int
    exchange: tuple[float, float]  # begin and end, by `time.perf_counter`
    moving_s: float  # of the exchange, after the agreement
    trial: tuple[float, ...]  # `Redistributor.state` after it


class ClosedError(CommError):
    """Some ranks want no further step; after an agreement, all ranks raise this."""

    def __init__(self, step: int, text: str) -> None:
        super().__init__(f"step {step}: {text}")
        self.step = step


class Redistributor:
    """Makes the steps of one rank. All ranks of the group call `step` in the same order."""

    def __init__(self, ranks: DataRanks, rules: Rules, terms: Terms, byte_s: float) -> None:
        self.ranks, self.rules, self._byte_s = ranks, rules, byte_s
        self.terms = [replace(terms, topology=Topology(((1, 1),), ranks.num))]  # by version
        self._epoch, self._version, self._next_saved = 0, 0, 0
        self._capacity, self._has_warned = _FIRST_CAPACITY, False
        leaders = [ranks.group.ranks[place] for place in ranks.leaders.tolist()]
        self.pace = Pace(leaders, says=ranks.group.rank == 0)
        self.trial, self._largest = Trial(), np.zeros(3, np.int64)
        self._tried = dict[int, _Tried]()  # by step, until all ranks reported its seconds

    def begin(self, group: RankGroup, epoch: int) -> None:
        """Make the steps of another iteration, in this group, with the newest cost model."""
        self.ranks, self._epoch = replace(self.ranks, group=group), epoch
        self._version, self._next_saved = len(self.terms) - 1, 0
        self._forget()

    def set_cost(self, cost: Cost, speeds: Floats | None = None) -> None:
        """Use another cost model for later steps, once all ranks know it."""
        self.terms.append(replace(self.terms[-1], cost=cost, speeds=speeds))

    def state(self) -> tuple[float, ...]:
        """Return the state of the trial, for `restore`."""
        return *self._largest.tolist(), *self.trial.state()

    def restore(self, state: Sequence[float]) -> None:
        """Go on with the trial of an earlier run; an empty state changes nothing."""
        if state:
            self._largest = np.array(state[:3], np.int64)
            self.trial.restore(state[3:])

    def saves(self, step: int) -> bool:
        """Return True if ranks exchange the states of their loaders with this step."""
        return step >= self._next_saved

    def step(self, step: int, load: Load) -> ReadyStep | None:
        """Make this rank's part of a step; None at the end. At most three collectives."""
        start = time.perf_counter()
        loaded = self._gather(step, load)
        if loaded.is_last(self.rules.ends):
            self._warn_of_nothing(step, loaded)
            return None
        offer, rank = loaded.offer, self.ranks.group.rank
        if offer.lens.size and not (offer.weights.any() or self._has_warned or rank):
            self._has_warned = True
            logger.warning("step %d: weight_fn gave 0 for all samples: loss_scale is 0", step)
        making = f"epoch {self._epoch}, making batches"
        try:
            self._judge(step, loaded.times)
            decision = self._with_trial(step, offer, self.decide(offer))
        except PlanError as error:
            raise PlanError(f"step {step}, epoch {self._epoch}: {error}") from None
        except Exception as error:  # of the cost model; another rank may not have it
            agree(self.ranks.group, {}, error, what=making, step=step)
            raise
        # Used from the next step on, whose agreement makes sure that it is the same on all ranks.
        if loaded.cost_version != self._version:
            self._version = loaded.cost_version
            self._forget()
        deliveries = decision.deliveries
        sent, received = int(deliveries.sent[rank]), int(deliveries.received[rank])
        as_loaded = self.rules.as_loaded
        is_same = (loaded.num_items == 1).all() and (offer.counts > 0).all()
        if not is_same or deliveries.moves.any() or deliveries.is_padding.any():
            as_loaded = None
        since = time.perf_counter()
        samples = self._move(step, offer, load, deliveries)
        exchange = start, time.perf_counter()
        batches, failed = list[Batch](), None
        try:
            for micro, plan in enumerate(decision.plans):
                rows, is_padding, loss_scale = deliveries.share(offer, rank, micro)
                if as_loaded is None:
                    data = self.rules.collate([samples[row] for row in rows.tolist()])
                else:
                    data = as_loaded(load.items[micro][0])
                batch = Batch(
                    data=data,
                    loss_scale=loss_scale,
                    epoch=self._epoch,
                    step=step,
                    microbatch=micro,
                    num_samples=rows.size - is_padding,
                    is_padding=is_padding,
                    plan=plan,
                    verdict=decision.verdict,
                    _group=self.ranks.along,
                )
                batches.append(batch)
        except BaseException as error:
            failed = named(error, "collate_fn" if as_loaded is None else "as_loaded")
        if as_loaded is None:
            agree(self.ranks.group, {}, failed, what=making, step=step)
        elif failed is not None:  # the end of this thread tells other ranks
            raise failed
        saved = loaded.saved if any(state.size for _, state in loaded.saved) else []
        numbers = loaded.num_items, load.num_missing, saved, sent, received
        return ReadyStep(batches, *numbers, exchange, exchange[1] - since, self.state())

    def decide(self, offer: Offer) -> Decision:
        """Plan all microbatches if that saves enough; the decision is the same on all ranks."""
        terms, rules = self.terms[self._version], self.rules
        overhead, limits = float(getattr(terms.cost, "overhead", 0.0)), terms.token_limits
        priced = terms.priced_step(offer.microbatches)
        loaded = tuple(map(Priced.as_loaded, priced))
        before = after = step_makespan(loaded, sync=rules.sync) + overhead
        work = sum(float(of_micro.prices.work.sum()) for of_micro in priced)
        speed = self.ranks.num if loaded[0].speeds is None else float(loaded[0].speeds.sum())
        least, reason = work / speed + overhead, "balanced"
        is_legal = limits is None or limits.keeps(
            tokens=offer.sums(offer.owner, offer.lens), items=offer.counts
        )
        if is_legal:  # else samples move, whatever it costs
            reason = weigh(before, least, min_gain=rules.min_gain)
            reason = "slower" if self.trial.is_slower and reason == "balanced" else reason
            if reason != "balanced":  # no plan gains more
                return self._decision(offer, loaded, Verdict(False, reason, before, least))
        try:
            plans = plan_jointly(priced, rules.sync)
        except PlanError:
            if not is_legal:
                raise
            reason = "limits"
        else:
            ends = np.cumsum(offer.counts.sum(axis=1))[:-1]
            parts = zip(plans, np.split(offer.weights, ends), priced, strict=True)
            plans = tuple(
                without_idle_ranks(plan, weights, of_micro.prices.work[0], limits)
                for plan, weights, of_micro in parts
            )
            after = step_makespan(plans, sync=rules.sync) + overhead
            moved = self._decision(offer, plans, Verdict(True, "balanced", before, after))
            if is_legal:
                exposed = self._exposed(moved)
                reason = weigh(before, after, min_gain=rules.min_gain, exchange=exposed)
            if reason == "balanced":
                return replace(moved, loaded=loaded if is_legal else None)
        return self._decision(offer, loaded, Verdict(False, reason, before, after))

    def _decision(self, offer: Offer, plans: tuple[Plan, ...], verdict: Verdict) -> Decision:
        rank_of, pad = np.concatenate([plan.bag_of for plan in plans]), self.rules.ends != "finish"
        return Decision(plans, verdict, Deliveries.of(offer, rank_of, self.ranks, pad=pad))

    def _with_trial(self, step: int, offer: Offer, decision: Decision) -> Decision:
        """Leave a step as loaded if it is its turn, and an earlier one needed as much memory."""
        loaded, verdict = decision.loaded, decision.verdict
        if not (offer.lens.size and self.rules.tries and self.ranks.num > 1):
            return decision
        if loaded is not None and (largest(offer, loaded) <= self._largest).all():
            turn = self.trial.turn(verdict.before / verdict.after)
            if turn is not None:
                self._tried[step] = _Tried(turn, verdict.before, [])
                if turn.stays:
                    stayed = Verdict(False, "trial", verdict.before, verdict.after)
                    decision = self._decision(offer, loaded, stayed)
        self._largest = np.maximum(self._largest, largest(offer, decision.plans))
        return decision

    def _judge(self, step: int, times: Floats) -> None:
        """Add the seconds of steps that all ranks have finished to the trial."""
        for number, seconds in times[:, [STEP, STEP_S]].tolist():
            tried = self._tried.get(number)
            if tried is None:
                continue
            tried.seconds.append(seconds)
            if len(tried.seconds) == len(times):
                del self._tried[number]
                if (slowest_s := float(np.max(tried.seconds))) > 0.0:  # not nan
                    self.trial.add(tried.turn, slowest_s / tried.before)
        if self.trial.is_slower and self._tried:
            self._tried = {}
            if self.ranks.group.rank == 0 and (gain := self.trial.gain):
                logger.warning(
                    "step %d: moving samples makes steps slower, measured %s as fast (error %s) "
                    "as steps as loaded beside them. From here on samples stay where they were "
                    "loaded, unless limits forbid it. Learn the cost with CostTracker, or give "
                    "LoaderOptions(min_gain=..) a value of 1 to balance nothing",
                    *(step, times_text(gain[0]), percent(gain[1])),
                )

    def _forget(self) -> None:
        """Drop steps whose seconds have not come: predictions change, or another iteration runs."""
        self.trial.restart()
        self._tried = {}

    def _exposed(self, decision: Decision) -> float:
        """Return by how much the exchange outlasts the step behind which it runs.

        In the unit of the cost model; 0 where that has no seconds.
        """
        seconds, deliveries = unit_seconds(self.terms[self._version].cost), decision.deliveries
        if seconds is None:
            return 0.0
        most = max(deliveries.sent.max(), deliveries.received.max())
        return max(float(most) * self._byte_s / seconds - decision.verdict.after, 0.0)

    def _gather(self, step: int, load: Load) -> Loaded:
        """Return the samples of all ranks."""
        words, capacity = load.words(len(self.terms) - 1), self._capacity
        local = self.ranks.group, self.terms[self._version].settings, load.error
        what = f"epoch {self._epoch}, loading"
        gathered = agree(*local, what=what, step=step, values=words, capacity=capacity)
        num_words = [int(words[_HEAD - 1]) for words in gathered]  # of states
        sizes = [words.size - num for words, num in zip(gathered, num_words, strict=True)]
        self._capacity = max(self._capacity, *sizes)
        if self.saves(step):
            self._next_saved = step + 1 + sum(num_words) // _STATE_WORDS
        closing = [str(rank) for rank, words in enumerate(gathered) if words[0] & _CLOSING]
        if closing:
            raise ClosedError(
                step,
                f"ranks {', '.join(closing)} of group {self.ranks.group.name!r} closed the loader: "
                "all ranks must leave an iteration at the same step",
            )
        loaded = Loaded.of(gathered, self.ranks, self.rules.accumulate)
        self.pace.add(loaded.times[self.ranks.leaders], f"step {step} of epoch {self._epoch}")
        return loaded

    def _warn_of_nothing(self, step: int, loaded: Loaded) -> None:
        """Warn once if an epoch has no step."""
        if step or self._has_warned or self.ranks.group.rank:
            return
        self._has_warned = True
        logger.warning(
            "epoch %d has no step: data-parallel ranks %s have too few samples for one, and "
            'ends="drop_last" ends the epoch there. Set LoaderOptions(ends="pad_empty") or '
            '"finish", or give loader=None on ranks that only compute'
            if loaded.offer.lens.size
            else "epoch %d has no step: the loaders of data-parallel ranks %s have no sample",
            self._epoch,
            np.flatnonzero(loaded.flags & _SHORT).tolist(),
        )

    def _move(
        self, step: int, offer: Offer, load: Load, deliveries: Deliveries
    ) -> dict[int, Sample]:
        """Return the samples of this rank, by row of the deliveries."""
        source, dest, group = deliveries.source, deliveries.dest, self.ranks.group
        here, moves = list(itertools.chain.from_iterable(load.samples)), deliveries.moves
        ids = np.flatnonzero(offer.owner == self.ranks.index)  # of the samples that are here
        places = np.searchsorted(ids, deliveries.ids)
        stay = np.flatnonzero((source == group.rank) & ~moves).tolist()
        samples = {row: here[places[row]] for row in stay}
        if moves.any():
            sent = [load.parcels[k] for k in places[moves & (source == group.rank)].tolist()]
            came = np.flatnonzero(moves & (dest == group.rank)).tolist()
            move = ItemMove(source[moves], dest[moves], group, HOST, step, "samples")
            arrived = move_items(move, sent, deliveries.num_bytes[moves])
            samples.update(zip(came, arrived, strict=True))
        return samples
