"""One step of a balanced loader: measure samples, agree, decide who gets which, move them.

Legend: M microbatches of a step, D data-parallel ranks, n samples of a step. Every rank knows the
same of all samples. A sample's id is its place in the order of microbatches, then of the ranks that
loaded it, then of their loaders.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bascule.arrays import Floats, Ints, ranges
from bascule.comm.agree import Statement, agree, agree_on
from bascule.comm.groups import RankGroup
from bascule.comm.items import HOST, ItemMove, Parcel, move_items, parcel
from bascule.data.source import Reading, Sample, whole_number
from bascule.errors import CommError, ConfigError, PlanError
from bascule.plan.costs import Cost, describe_cost, evaluate, unit_seconds
from bascule.plan.limits import Limits, in_tokens
from bascule.plan.plan import Plan
from bascule.plan.step import Sync, plan_step, step_makespan
from bascule.plan.topology import Topology

Ends = Literal["drop_last", "pad_empty", "finish"]

FLAGS, _VERSION, _NUM_FIXED = 0, 1, 2  # places in what a rank says; then the counts
_SHORT, CLOSING, _SOME = 1, 2, 4
_NUM_NUMBERS = 3  # of a sample: tokens, weight, bytes


@dataclass(frozen=True, slots=True, eq=False)
class DataRanks:
    """The ranks of a group, by what they load. Peers (tensor, pipeline) get the same batch.

    Attributes:
        group: All ranks, peers included.
        place: (group size,) data-parallel index of each.
    """

    group: RankGroup
    place: Ints

    @property
    def index(self) -> int:
        """Data-parallel index of this rank."""
        return int(self.place[self.group.rank])

    @property
    def num(self) -> int:
        """D, the data-parallel ranks."""
        return int(self.place.max()) + 1

    @property
    def leaders(self) -> Ints:
        """(D,) of each data-parallel rank, the first rank of the group: the one that loads."""
        return np.unique(self.place, return_index=True)[1]

    @property
    def is_leader(self) -> bool:
        """Whether this rank loads samples, rather than one of its peers."""
        return int(self.leaders[self.index]) == self.group.rank


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What one rank loaded for a step.

    Attributes:
        samples: Of each microbatch.
        lens: (n,) tokens of each sample, microbatches one after the other.
        weights: (n,) what each counts in the global mean.
        parcels: The samples on the wire.
        num_items: Items of the loader in each microbatch; a ready-made pack is one item.
        is_short: Whether it ran out of samples before the step was full.
        is_closing: Whether this rank wants no further step.
        cost_version: Newest cost model that it knows.
        error: What went wrong while loading.
    """

    samples: Sequence[Sequence[Sample]] = ()
    lens: Sequence[int] = ()
    weights: Sequence[int] = ()
    parcels: Sequence[Parcel] = ()
    num_items: Sequence[int] = ()
    is_short: bool = False
    is_closing: bool = False
    cost_version: int = 0
    error: Exception | None = None

    def values(self, accumulate: int) -> Ints:
        """As it is gathered: flags, version, M counts of samples and of items; then the samples."""
        flags = _SHORT * self.is_short + CLOSING * self.is_closing + _SOME * bool(self.samples)
        missing = [0] * (accumulate - len(self.samples))
        counts = [*map(len, self.samples), *missing, *self.num_items, *missing]
        sizes = [parcel.num_bytes for parcel in self.parcels]
        parts = ([flags, self.cost_version, *counts], self.lens, self.weights, sizes)
        return np.concatenate([np.array(part, dtype=np.int64) for part in parts])


@dataclass(frozen=True, eq=False)
class Loaded:
    """What all ranks loaded for a step. Arrays of n are in the order of sample ids.

    Attributes:
        flags: (D,) of each data-parallel rank.
        cost_version: Newest cost model that all ranks know.
        counts: (M, D) samples of each microbatch and rank.
        num_items: (M, D) items of the loaders that they came from.
        lens: (n,) tokens.
        weights: (n,) what each counts in the global mean.
        num_bytes: (n,) on the wire.
    """

    flags: Ints
    cost_version: int
    counts: Ints
    num_items: Ints
    lens: Ints
    weights: Ints
    num_bytes: Ints

    @classmethod
    def of(cls, values: Sequence[Ints], ranks: DataRanks, accumulate: int) -> "Loaded":
        """From what the ranks of the group said."""
        own = [values[leader] for leader in ranks.leaders.tolist()]
        middle, first = _NUM_FIXED + accumulate, _NUM_FIXED + 2 * accumulate
        counts = np.stack([part[_NUM_FIXED:middle] for part in own], axis=1)
        num_items = np.stack([part[middle:first] for part in own], axis=1)
        numbers = np.concatenate([part[first:].reshape(_NUM_NUMBERS, -1) for part in own], axis=1)
        micro = np.concatenate([np.repeat(np.arange(accumulate), count) for count in counts.T])
        order = np.argsort(micro, kind="stable")
        lens, weights, num_bytes = numbers[:, order]
        flags = np.array([part[FLAGS] for part in own])
        version = min(int(part[_VERSION]) for part in values)
        return cls(flags, version, counts, num_items, lens, weights, num_bytes)

    @cached_property
    def micro(self) -> Ints:
        """(n,) microbatch of each sample."""
        return np.repeat(np.arange(self.counts.shape[0]), self.counts.sum(axis=1))

    @cached_property
    def source(self) -> Ints:
        """(n,) data-parallel rank that loaded each sample."""
        num_micro, num_ranks = self.counts.shape
        return np.repeat(np.tile(np.arange(num_ranks), num_micro), self.counts.ravel())

    def is_last(self, ends: Ends) -> bool:
        """Whether there is no step any more: alike on all ranks."""
        if not (self.flags & _SOME).any():
            return True
        return ends == "drop_last" and bool(((self.flags & _SHORT) > 0).any())

    def lens_of(self, micro: int) -> list[Ints]:
        """Tokens of the samples of each rank in a microbatch."""
        bounds = np.cumsum(self.counts[micro])[:-1]
        return np.split(self.lens[self.micro == micro], bounds)


Saved = list[dict[str, Any] | None]
"""After each microbatch, where a loader with a state of its own would go on."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the user, or the loader for them, does with samples.

    Attributes:
        length_fn: Tokens of a sample.
        weight_fn: What a sample counts in the global mean: a whole number.
        unpack: Samples of an item of the loader.
        collate: A microbatch from its samples; called with none for an empty one.
    """

    length_fn: Callable[[Sample], int]
    weight_fn: Callable[[Sample], int]
    unpack: Callable[[Any], list[Sample]] | None
    collate: Callable[[list[Sample]], Any]


def num_input_ids(sample: Sample) -> int:
    """The default length."""
    try:
        return len(sample["input_ids"])
    except (LookupError, TypeError) as error:
        raise ConfigError(
            f'a {type(sample).__name__} without "input_ids": give BalancedLoader a length_fn'
        ) from error


def one(sample: Sample) -> int:
    """The default weight."""
    del sample
    return 1


def collate_and_pin(
    collate: Callable[[list[Sample]], Any], *, takes_none: bool, pin: bool
) -> Callable[[list[Sample]], Any]:
    """Collate and pin; an empty microbatch is None, unless `collate` takes one."""

    def collated(samples: list[Sample]) -> Any:
        data = collate(samples) if samples or takes_none else None
        return _pinned(data) if pin else data

    return collated


def _pinned(data: Any) -> Any:
    """The same with its tensors in pinned memory."""
    if hasattr(data, "pin_memory"):
        return data.pin_memory()
    if isinstance(data, Mapping):
        return {key: _pinned(part) for key, part in data.items()}
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        return type(data)(_pinned(part) for part in data)
    return data


def load(
    reading: Reading, handlers: Handlers, accumulate: int, *, loads: bool, cost_version: int
) -> tuple[Offer, Saved]:
    """This rank's samples of a step; what fails becomes part of the offer.

    Args:
        reading: This rank's microbatches.
        handlers: What is done with samples.
        accumulate: Microbatches of a step.
        loads: Whether this rank loads samples; otherwise it only computes.
        cost_version: Newest cost model that it knows.
    """
    items: list[list[Any]] = []
    saved: Saved = []
    # Whatever ends the user's code, also SystemExit: the others would wait for a thread that ended.
    try:
        for _ in range(accumulate):
            taken = next(reading, None)
            if taken is not None:
                items.append(taken)
            saved.append(reading.saved())
    except BaseException as error:
        return Offer(error=named(error, f"microbatch {len(saved)}")), saved
    try:
        samples = [_unpacked(taken, handlers, micro) for micro, taken in enumerate(items)]
        lens, weights, parcels = _measured(samples, handlers)
    except (RuntimeError, ConfigError) as error:
        return Offer(error=error), saved
    offer = Offer(
        samples=samples,
        lens=lens,
        weights=weights,
        parcels=parcels,
        num_items=[len(taken) for taken in items],
        is_short=loads and len(items) < accumulate,
        cost_version=cost_version,
    )
    return offer, saved


def _unpacked(taken: list[Any], handlers: Handlers, micro: int) -> list[Sample]:
    if handlers.unpack is None:
        return taken
    try:
        return [sample for item in taken for sample in handlers.unpack(item)]
    except BaseException as error:
        raise named(error, f"microbatch {micro}, unpack") from error


def _measured(
    samples: Sequence[Sequence[Sample]], handlers: Handlers
) -> tuple[list[int], list[int], list[Parcel]]:
    """Length, weight and form on the wire of each sample, microbatches one after the other."""
    lens: list[int] = []
    weights: list[int] = []
    parcels: list[Parcel] = []
    for micro, group in enumerate(samples):
        for place, sample in enumerate(group):
            try:
                lens.append(whole_number(handlers.length_fn(sample), "length_fn"))
                weights.append(whole_number(handlers.weight_fn(sample), "weight_fn"))
                parcels.append(parcel(sample))
            except BaseException as error:
                raise named(error, f"microbatch {micro}, sample {place}") from error
    return lens, weights, parcels


def named(error: BaseException, place: str) -> Exception:
    """The error with its place; one line, since it travels to all ranks."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} .. {lines[-1]}"
    if isinstance(error, ConfigError | PlanError):
        return ConfigError(f"{place}: {text}")
    result = RuntimeError(f"{place}: {type(error).__name__}: {text}")
    result.__cause__ = error
    return result


@dataclass(frozen=True, eq=False)
class Deliveries:
    """Which sample goes to which rank in which microbatch; what pads comes last.

    Attributes:
        ids: Sample of each delivery.
        dest: Data-parallel rank that gets it.
        micro: Microbatch in which it does.
        num_padding: Deliveries at the end that repeat a sample where a rank has none.
    """

    ids: Ints
    dest: Ints
    micro: Ints
    num_padding: int

    @property
    def is_padding(self) -> npt.NDArray[np.bool_]:
        """Of each delivery."""
        return np.arange(self.ids.size) >= self.ids.size - self.num_padding


def deliver(loaded: Loaded, plans: Sequence[Plan], *, pad: bool) -> Deliveries:
    """Each sample to its rank; with `pad`, the shortest one also to ranks that would have none.

    Of those that count in the mean, if there are any: the mean over what pads must be a number.
    """
    dest = np.concatenate([plan.bag_of for plan in plans])
    ids, micro = np.arange(dest.size), loaded.micro
    num_micro, num_ranks = loaded.counts.shape
    if not pad or not ids.size:
        return Deliveries(ids, dest, micro, 0)
    held = np.bincount(micro * num_ranks + dest, minlength=num_micro * num_ranks)
    empty = np.flatnonzero(held == 0)
    counted = np.flatnonzero(loaded.weights > 0) if loaded.weights.any() else ids
    shortest = np.full(empty.size, counted[loaded.lens[counted].argmin()])
    return Deliveries(
        np.concatenate([ids, shortest]),
        np.concatenate([dest, empty % num_ranks]),
        np.concatenate([micro, empty // num_ranks]),
        empty.size,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """The bytes that each rank of the group sends to each other one.

    Attributes:
        delivery: (k,) deliveries that are sent.
        sender: (k,) rank of the group.
        receiver: (k,) rank of the group.
        ids: (k,) sample.
        num_bytes: (k,) its size.
        bytes_to: (group size, group size) bytes that a receiver (row) gets from a sender.
    """

    delivery: Ints
    sender: Ints
    receiver: Ints
    ids: Ints
    num_bytes: Ints
    bytes_to: Ints

    @classmethod
    def of(cls, loaded: Loaded, deliveries: Deliveries, ranks: DataRanks) -> "Transfer":
        """Every delivery goes to all peers of its rank, except to who has the sample already."""
        leaders, size = ranks.leaders, ranks.group.size
        members = np.argsort(ranks.place, kind="stable")
        num_members = np.bincount(ranks.place)
        first = np.cumsum(num_members) - num_members
        repeats = num_members[deliveries.dest]
        delivery = np.repeat(np.arange(deliveries.dest.size), repeats)
        receiver = members[ranges(first[deliveries.dest], repeats)]
        sender = leaders[loaded.source[deliveries.ids[delivery]]]
        moves = sender != receiver
        delivery, sender, receiver = delivery[moves], sender[moves], receiver[moves]
        ids = deliveries.ids[delivery]
        num_bytes = loaded.num_bytes[ids]
        flows = np.bincount(receiver * size + sender, num_bytes, size * size)
        bytes_to = flows.reshape(size, size).astype(np.int64)
        return cls(delivery, sender, receiver, ids, num_bytes, bytes_to)


def exchange(
    transfer: Transfer, group: RankGroup, parcels: Mapping[int, Parcel], step: int
) -> dict[int, Sample]:
    """Return the samples that arrive, by delivery. No collective if nothing moves."""
    if not transfer.ids.size:
        return {}
    sent = [parcels[one] for one in transfer.ids[transfer.sender == group.rank].tolist()]
    move = ItemMove(transfer.sender, transfer.receiver, group, HOST, step, "samples")
    arrived = move_items(move, sent, transfer.num_bytes)
    own = transfer.delivery[transfer.receiver == group.rank]
    return dict(zip(own.tolist(), arrived, strict=True))


logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Who gets what in a step.

    Attributes:
        plans: Of each microbatch.
        verdict: Whether samples move.
        deliveries: Which sample goes to which rank in which microbatch.
        transfer: The bytes between ranks.
    """

    plans: tuple[Plan, ...]
    verdict: Verdict
    deliveries: Deliveries
    transfer: Transfer


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
        self._described = (-1, "")  # the version whose description is known
        self._has_warned = False
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
            self._warn_of_nothing(key, loaded)
            return None
        try:
            decision = self.decide(loaded)
            check_received(decision.transfer, self.rules.max_bytes)
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
        transfer = decision.transfer
        reserve(int(transfer.bytes_to[rank].sum()))
        arrived = exchange(transfer, self.ranks.group, parcels, key.step)
        kept = dict(zip(own, itertools.chain.from_iterable(offer.samples), strict=True))
        return StepData(
            microbatches=_assemble(decision, arrived, kept, loaded, index),
            loaded=loaded,
            verdict=decision.verdict,
            sent_bytes=int(transfer.bytes_to[:, rank].sum()),
            received_bytes=int(transfer.bytes_to[rank].sum()),
        )

    def _warn_of_nothing(self, key: StepKey, loaded: Loaded) -> None:
        """Say once why an epoch has no step although there are samples."""
        if key.step or self._has_warned or not loaded.lens.size or self.ranks.group.rank:
            return
        self._has_warned = True
        short = np.flatnonzero(loaded.flags & _SHORT).tolist()
        logger.warning(
            "epoch %d has no step: data-parallel ranks %s have too few samples for one, and "
            'ends="drop_last" ends the epoch there. Set LoaderOptions(ends="pad_empty") or '
            '"finish", or give loader=None on ranks that only compute',
            *(key.epoch, short),
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
        error, said = offer.error, {"cost": "", "speeds": str(self._speeds)}
        try:
            if self._described[0] != self._version:
                self._described = self._version, describe_cost(self._cost)
            said["cost"] = self._described[1]
        except ConfigError as met:  # where one rank fails, all are told
            error = error or met
        gathered = agree(
            self.ranks.group,
            Statement({"step": str(key), **said}, offer.values(self.rules.accumulate), error),
            what=f"epoch {key.epoch}, loading",
            step=key.step,
            capacity=self._capacity,
        )
        self._capacity = max(self._capacity, *(part.size for part in gathered))
        closing = [rank for rank, part in enumerate(gathered) if part[FLAGS] & CLOSING]
        if closing:
            raise ClosedError(closing, key.step, self.ranks.group.name)
        return Loaded.of(gathered, self.ranks, self.rules.accumulate)

    def decide(self, loaded: Loaded) -> Decision:
        """Plan all microbatches, where that is worth it. The same on all ranks.

        Raises:
            PlanError: Neither a plan nor the batch as loaded keeps the limits.
        """
        cost, speeds, rules = self._cost, self._speeds, self.rules
        limits = in_tokens(rules.limits, cost, None)
        overhead = float(getattr(cost, "overhead", 0.0))
        costs = evaluate(cost, loaded.lens)
        loads = _sums(loaded, loaded.source, costs)
        loads = loads if speeds is None else loads / np.array(speeds)
        most = loads.max(axis=1).sum() if rules.sync == "microbatch" else loads.sum(axis=0).max()
        before, is_legal = float(most) + overhead, _keeps(loaded, loaded.source, limits)
        try:
            plans = plan_step(
                [loaded.lens_of(micro) for micro in range(rules.accumulate)],
                *(self._topology, cost),
                sync=rules.sync,
                limits=rules.limits,
                speeds=speeds,
            )
        except PlanError:
            if not is_legal:
                raise
            return self._as_loaded(loaded, loads, Verdict(False, "limits", before, before))
        parts = [loaded.micro == micro for micro in range(rules.accumulate)]
        plans = tuple(
            _without_idle_ranks(plan, loaded.weights[own], costs[own], limits)
            for plan, own in zip(plans, parts, strict=True)
        )
        after = step_makespan(plans, sync=rules.sync) + overhead
        deliveries = deliver(loaded, plans, pad=rules.ends != "finish")
        transfer = Transfer.of(loaded, deliveries, self.ranks)
        reason = self._reason(transfer, before, after) if is_legal else "balanced"
        verdict = Verdict(reason == "balanced", reason, before, after)
        if not verdict.applied:
            return self._as_loaded(loaded, loads, verdict)
        return Decision(plans, verdict, deliveries, transfer)

    def _as_loaded(self, loaded: Loaded, loads: Floats, verdict: Verdict) -> Decision:
        """Leave every sample where it is."""
        speeds = None if self._speeds is None else np.array(self._speeds)
        plans = list[Plan]()
        for micro, counts in enumerate(loaded.counts):
            own = loaded.micro == micro
            args = self._topology, counts, loaded.lens[own], loaded.source[own], loads[micro]
            plans.append(Plan(*args, 0.0, "none", speeds=speeds))
        deliveries = deliver(loaded, plans, pad=self.rules.ends != "finish")
        transfer = Transfer.of(loaded, deliveries, self.ranks)
        return Decision(tuple(plans), verdict, deliveries, transfer)

    def _reason(
        self, transfer: Transfer, before: float, after: float
    ) -> Literal["balanced", "even", "gain", "exchange"]:
        gain = before - after
        if gain <= 0.0:
            return "even"
        if gain < self.rules.min_gain * before:
            return "gain"
        seconds = unit_seconds(self._cost)
        if seconds is None:
            return "balanced"
        most = max(transfer.bytes_to.sum(axis=0).max(), transfer.bytes_to.sum(axis=1).max())
        # The exchange runs behind the step; only what is longer than the step is waited for.
        exposed = max(float(most) * self.seconds_per_byte - after * seconds, 0.0)
        return "exchange" if gain * seconds <= exposed else "balanced"


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


def _sums(loaded: Loaded, ranks: Ints, values: npt.NDArray[Any]) -> Floats:
    """(M, D) sum of a value of each sample, by its microbatch and these ranks."""
    num_micro, num_ranks = loaded.counts.shape
    cells = loaded.micro * num_ranks + ranks
    sums = np.bincount(cells, values, num_micro * num_ranks)
    return sums.reshape(num_micro, num_ranks).astype(np.float64)


def _keeps(loaded: Loaded, ranks: Ints, limits: Limits | None) -> bool:
    """Whether samples on these ranks keep the limits on tokens and items."""
    if limits is None:
        return True
    tokens = limits.tokens is None or _sums(loaded, ranks, loaded.lens).max() <= limits.tokens
    counts = _sums(loaded, ranks, np.ones_like(ranks))
    return tokens and (limits.items is None or counts.max() <= limits.items)


def _without_idle_ranks(plan: Plan, weights: Ints, costs: Floats, limits: Limits | None) -> Plan:
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
    loads = np.bincount(bag_of, costs, plan.num_ranks)
    loads = loads if plan.speeds is None else loads / plan.speeds
    tokens = np.bincount(bag_of, plan.seq_lens, plan.num_ranks)
    items = np.bincount(bag_of, minlength=plan.num_ranks)
    if limits is not None and (
        (limits.tokens is not None and tokens.max() > limits.tokens)
        or (limits.items is not None and items.max() > limits.items)
    ):
        return plan
    return dataclasses.replace(plan, bag_of=bag_of, loads=loads)


def _assemble(
    decision: Decision,
    arrived: Mapping[int, Sample],
    kept: Mapping[int, Sample],
    loaded: Loaded,
    index: int,
) -> list[Delivered]:
    """The microbatches of data-parallel rank `index`, from what arrived and what it had."""
    num_micro, num_ranks = loaded.counts.shape
    total = int(loaded.weights.sum())
    delivered: list[Delivered] = []
    deliveries = decision.deliveries
    for micro, plan in enumerate(decision.plans):
        here = np.flatnonzero((deliveries.dest == index) & (deliveries.micro == micro))
        ids = deliveries.ids[here]
        pairs = zip(here.tolist(), ids.tolist(), strict=True)
        samples = [arrived[k] if k in arrived else kept[sample] for k, sample in pairs]
        is_padding = bool(deliveries.is_padding[here].any())
        weight = 0 if is_padding else int(loaded.weights[ids].sum())
        scale = weight * num_ranks * num_micro / total if total else 0.0
        delivered.append(Delivered(samples, is_padding, scale, plan))
    return delivered
