"""One step of a balanced loader: measure samples, agree, decide who gets which, move, assemble.

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
from typing import Any, Literal, NamedTuple

import numpy as np

from bascule.arrays import Floats, Ints, ranges
from bascule.comm.agree import agree
from bascule.comm.groups import RankGroup
from bascule.comm.items import HOST, ItemMove, Parcel, move_items, parcel
from bascule.data.source import Reading, Sample, whole_number
from bascule.errors import CommError, ConfigError, PlanError
from bascule.plan.costs import Cost, describe_cost, evaluate, unit_seconds
from bascule.plan.items import Items
from bascule.plan.limits import Limits, in_tokens
from bascule.plan.plan import Plan
from bascule.plan.step import Sync, plan_step, step_makespan
from bascule.plan.topology import Topology

logger = logging.getLogger(__name__)

Ends = Literal["drop_last", "pad_empty", "finish"]

Saved = list[dict[str, Any] | None]
"""After each microbatch, where a loader with a state of its own would go on."""

Speeds = tuple[float, ...] | None
"""Of each data-parallel rank; None: all alike."""

_FIRST_CAPACITY = 256  # integers a rank that the first gather has room for
_SHORT, _CLOSING, _SOME = 1, 2, 4  # flags of a rank


class StepKey(NamedTuple):
    """A step of an epoch."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings by which steps are made, alike on all ranks; see `BalancedLoader`."""

    accumulate: int
    sync: Sync
    limits: Limits | None
    ends: Ends
    min_gain: float
    max_bytes: int | None


@dataclass(frozen=True, eq=False)
class DataRanks:
    """The ranks of a group, by what they load. Peers (tensor, pipeline) get the same batch.

    `place` (group size,) is the data-parallel index of each, peers included.
    """

    group: RankGroup
    place: Ints

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
        """(D,) of each data-parallel rank, the first rank of the group: the one that loads."""
        return np.unique(self.place, return_index=True)[1]

    @cached_property
    def is_leader(self) -> bool:
        """True if this rank loads samples, rather than one of its peers."""
        return int(self.leaders[self.index]) == self.group.rank


@dataclass(frozen=True, slots=True)
class Handlers:
    """The functions that the user, or the loader for them, applies to samples.

    `weight_fn` gives what a sample counts in the global mean (None: 1), `unpack` the samples of an
    item of the loader, `collate` a microbatch; it is called with no samples for an empty one.
    """

    length_fn: Callable[[Sample], int]
    weight_fn: Callable[[Sample], int] | None
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


def collate_and_pin(
    collate: Callable[[list[Sample]], Any], *, takes_none: bool, pin: bool
) -> Callable[[list[Sample]], Any]:
    """Collate and pin; an empty microbatch is None, unless `collate` takes one."""

    def collated(samples: list[Sample]) -> Any:
        data = collate(samples) if samples or takes_none else None
        return _pinned(data) if pin else data

    return collated


def _pinned(data: Any) -> Any:
    """Return the same with its tensors in pinned memory."""
    if hasattr(data, "pin_memory"):
        return data.pin_memory()
    if isinstance(data, Mapping):
        return {key: _pinned(part) for key, part in data.items()}
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        return type(data)(_pinned(part) for part in data)
    return data


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """The samples that one rank loaded for a step, by microbatch; or why there are none.

    `num_items` are items of the loader in each microbatch: a ready-made pack is one. A rank is
    short if it ran out of samples, and closing if it wants no further step.
    """

    samples: Sequence[Sequence[Sample]] = ()
    items: Items | None = None
    parcels: Sequence[Parcel] = ()
    num_items: Sequence[int] = ()
    is_short: bool = False
    is_closing: bool = False
    cost_version: int = 0
    error: Exception | None = None

    def words(self, accumulate: int) -> Ints:
        """Describe it in integers: flags, newest cost model known, M numbers of items; `Items`."""
        flags = _SHORT * self.is_short + _CLOSING * self.is_closing + _SOME * bool(self.samples)
        num_items = [*self.num_items, *[0] * (accumulate - len(self.num_items))]
        items = Items.own([0] * accumulate, [], []) if self.items is None else self.items
        return np.concatenate([np.array([flags, self.cost_version, *num_items]), items.to_words()])


def load(
    reading: Reading, handlers: Handlers, accumulate: int, *, loads: bool, cost_version: int
) -> tuple[Load, Saved]:
    """Read this rank's samples of a step; what fails becomes part of the result.

    `loads` is False on a rank that only computes.
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
        return Load(error=named(error, f"microbatch {len(saved)}")), saved
    samples: list[list[Sample]] = []
    lens, weights, parcels = list[int](), list[int](), list[Parcel]()
    place = ""
    try:
        for micro, taken in enumerate(items):
            place = f"microbatch {micro}, unpack"
            unpack = handlers.unpack
            samples.append(taken if unpack is None else [s for one in taken for s in unpack(one)])
            for number, sample in enumerate(samples[-1]):
                place = f"microbatch {micro}, sample {number}"
                lens.append(whole_number(handlers.length_fn(sample), "length_fn"))
                if handlers.weight_fn is not None:
                    weights.append(whole_number(handlers.weight_fn(sample), "weight_fn"))
                parcels.append(parcel(sample))
    except BaseException as error:
        return Load(error=named(error, place)), saved
    counts = [*map(len, samples), *[0] * (accumulate - len(samples))]
    described = Items.own(counts, lens, [one.num_bytes for one in parcels], weights=weights or None)
    is_short = loads and len(items) < accumulate
    numbers = [len(taken) for taken in items]
    return Load(samples, described, parcels, numbers, is_short, False, cost_version), saved


def named(error: BaseException, place: str) -> Exception:
    """Return the error with its place; one line, since it travels to all ranks."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} .. {lines[-1]}"
    if isinstance(error, ConfigError | PlanError):
        return ConfigError(f"{place}: {text}")
    result = RuntimeError(f"{place}: {type(error).__name__}: {text}")
    result.__cause__ = error
    return result


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The samples that all ranks loaded for a step.

    `flags` are of each data-parallel rank (D,), `num_items` the items of their loaders (M, D);
    `cost_version` is the newest cost model that all ranks of the group know.
    """

    flags: Ints
    cost_version: int
    num_items: Ints
    items: Items

    @classmethod
    def of(cls, gathered: Sequence[Ints], ranks: DataRanks, accumulate: int) -> "Loaded":
        """Join the words of all ranks of the group."""
        own = [gathered[leader] for leader in ranks.leaders.tolist()]
        heads = np.stack([words[: 2 + accumulate] for words in own], axis=1)
        version = min(int(words[1]) for words in gathered)
        items = Items.from_words([words[2 + accumulate :] for words in own])
        return cls(heads[0], version, heads[2:], items)

    def is_last(self, ends: Ends) -> bool:
        """True if there is no step any more: alike on all ranks."""
        if not (self.flags & _SOME).any():
            return True
        return ends == "drop_last" and bool((self.flags & _SHORT).any())


@dataclass(frozen=True, slots=True, eq=False)
class Deliveries:
    """Samples, the data-parallel ranks that get them, and when; what pads comes last. Arrays (k,).

    The last `num_padding` repeat a sample where a rank has none.
    """

    ids: Ints
    dest: Ints
    micro: Ints
    num_padding: int


def deliver(items: Items, dest: Ints, *, pad: bool) -> Deliveries:
    """Give each sample to its rank; with `pad`, the shortest also to ranks that would have none.

    Of those that count in the mean, if there are any: the mean over what pads must be a number.
    """
    ids, micro = np.arange(dest.size), items.micro
    if not pad or not ids.size:
        return Deliveries(ids, dest, micro, 0)
    num_ranks = items.counts.shape[1]
    empty = np.flatnonzero(items.sums(dest, np.ones_like(dest)) == 0)
    counted = np.flatnonzero(items.weights > 0) if items.weights.any() else ids
    shortest = np.full(empty.size, counted[items.lens[counted].argmin()])
    return Deliveries(
        np.concatenate([ids, shortest]),
        np.concatenate([dest, empty % num_ranks]),
        np.concatenate([micro, empty // num_ranks]),
        empty.size,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """The deliveries (k,) that travel between ranks of the group, and the bytes of each rank."""

    delivery: Ints
    sender: Ints
    receiver: Ints
    num_bytes: Ints
    sent: Ints
    received: Ints

    @classmethod
    def of(cls, items: Items, deliveries: Deliveries, ranks: DataRanks) -> "Transfer":
        """Send each to all peers of its rank, except to who has the sample already."""
        members, num_members = np.argsort(ranks.place, kind="stable"), np.bincount(ranks.place)
        first = np.cumsum(num_members) - num_members
        repeats = num_members[deliveries.dest]
        delivery = np.repeat(np.arange(deliveries.dest.size), repeats)
        receiver = members[ranges(first[deliveries.dest], repeats)]
        sender = ranks.leaders[items.owner[deliveries.ids[delivery]]]
        moves = sender != receiver
        delivery, sender, receiver = delivery[moves], sender[moves], receiver[moves]
        num_bytes = items.num_bytes[deliveries.ids[delivery]]
        sent, received = (
            np.bincount(ends, num_bytes, ranks.group.size).astype(np.int64)
            for ends in (sender, receiver)
        )
        return cls(delivery, sender, receiver, num_bytes, sent, received)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the samples of a step move, or stay.

    Attributes:
        applied: True if they move.
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
class Decision:
    """Who gets what in a step: a plan of each microbatch, and what it moves."""

    plans: tuple[Plan, ...]
    verdict: Verdict
    deliveries: Deliveries
    transfer: Transfer


class Delivered(NamedTuple):
    """One microbatch of this rank: its samples in the order of their ids; see `Batch`."""

    samples: list[Sample]
    is_padding: bool
    loss_scale: float
    plan: Plan


@dataclass(frozen=True, slots=True, eq=False)
class StepData:
    """All microbatches of a step on this rank; (M, D) items that loaders gave; bytes of samples."""

    microbatches: list[Delivered]
    num_items: Ints
    verdict: Verdict
    sent_bytes: int
    received_bytes: int


class ClosedError(CommError):
    """Ranks want no further step. The same on all ranks, after an agreement."""

    def __init__(self, step: int, text: str) -> None:
        self.step = step
        super().__init__(f"step {step}: {text}")


class Redistributor:
    """Makes the steps of one rank. All ranks of the group call `step` in the same order.

    `costs` are the cost models so far, with speeds of the data-parallel ranks, by version;
    `seconds_per_byte` is what a byte costs in the exchange, the same on all ranks.
    """

    def __init__(self, ranks: DataRanks, rules: Rules, cost: Cost, seconds_per_byte: float) -> None:
        self.ranks = ranks
        self.rules = rules
        self.costs: list[tuple[Cost, Speeds]] = [(cost, None)]
        self.seconds_per_byte = seconds_per_byte
        self._version, self._agreed_version = 0, -1
        self._has_warned = False
        self._capacity = _FIRST_CAPACITY
        self._topology = Topology(((1, 1),), ranks.num)

    def begin(self, group: RankGroup) -> None:
        """Make the steps of another iteration, in this group, with the newest cost model.

        Where an iteration begins, all ranks have been given the same cost models. The next
        agreement makes sure of it.
        """
        self.ranks = dataclasses.replace(self.ranks, group=group)
        self._version, self._agreed_version = len(self.costs) - 1, -1

    def step(self, key: StepKey, own: Load, reserve: Callable[[int], None]) -> StepData | None:
        """Make this rank's part of a step; None if there is none any more. Two collectives.

        Args:
            key: Step of the epoch.
            own: The samples that this rank brings.
            reserve: Called with the bytes that will arrive, before they do; may wait for room.

        Raises:
            RemoteConfigError: A rank loaded an illegal sample.
            ClosedError: A rank wants no further step.
            CommError: A rank failed, or the ranks disagree.
            PlanError: The limits cannot be kept (on all ranks alike).
        """
        loaded = self._agree(key, own)
        if loaded.is_last(self.rules.ends):
            self._warn_of_nothing(key, loaded)
            return None
        try:
            decision = self.decide(loaded.items)
            check_received(decision.transfer, self.rules.max_bytes)
        except PlanError as error:
            raise PlanError(f"step {key.step}, epoch {key.epoch}: {error}") from error
        except Exception as error:  # of the cost model; another rank may not have it
            self.confirm(key, error)
            raise
        # Used from the next step on, whose agreement makes sure that it is the same on all ranks.
        self._version = loaded.cost_version
        rank, transfer = self.ranks.group.rank, decision.transfer
        received = int(transfer.received[rank])
        reserve(received)
        return StepData(
            microbatches=self._move(key, loaded.items, own, decision),
            num_items=loaded.num_items,
            verdict=decision.verdict,
            sent_bytes=int(transfer.sent[rank]),
            received_bytes=received,
        )

    def confirm(self, key: StepKey, error: Exception | None) -> None:
        """Make sure that no rank failed to plan or to collate. One collective.

        Raises:
            RemoteConfigError: A rank met bad input.
            CommError: A rank failed.
        """
        what = f"epoch {key.epoch}, making batches"
        agree(self.ranks.group, {}, error, what=what, step=key.step)

    def decide(self, items: Items) -> Decision:
        """Plan all microbatches, where that is worth it. The same on all ranks.

        Raises:
            PlanError: Neither a plan nor the batch as loaded keeps the limits.
        """
        (cost, speeds), rules = self.costs[self._version], self.rules
        limits = in_tokens(rules.limits, cost, None)
        overhead = float(getattr(cost, "overhead", 0.0))
        costs = evaluate(cost, items.lens)
        loads = items.sums(items.owner, costs) / (1.0 if speeds is None else np.array(speeds))
        most = loads.max(axis=1).sum() if rules.sync == "microbatch" else loads.sum(axis=0).max()
        before = float(most) + overhead
        tokens = items.sums(items.owner, items.lens)
        is_legal = limits is None or limits.keeps(tokens=tokens, items=items.counts)
        try:
            plans = plan_step(
                [items.lens_by_rank(micro) for micro in range(rules.accumulate)],
                self._topology,
                cost,
                sync=rules.sync,
                limits=rules.limits,
                speeds=speeds,
            )
        except PlanError:
            if not is_legal:
                raise
            return self._as_loaded(items, loads, Verdict(False, "limits", before, before))
        bounds = np.cumsum(items.counts.sum(axis=1))[:-1]
        parts = zip(plans, np.split(items.weights, bounds), np.split(costs, bounds), strict=True)
        plans = tuple(
            _without_idle_ranks(plan, weights, own, limits) for plan, weights, own in parts
        )
        after = step_makespan(plans, sync=rules.sync) + overhead
        decision = self._delivered(items, plans, Verdict(True, "balanced", before, after))
        reason = self._why_not(decision) if is_legal else None
        if reason is None:
            return decision
        return self._as_loaded(items, loads, Verdict(False, reason, before, after))

    def _agree(self, key: StepKey, own: Load) -> Loaded:
        error, (cost, speeds) = own.error, self.costs[self._version]
        settings = {"cost": "", "speeds": ""}
        if self._version != self._agreed_version:
            try:
                settings = {"cost": describe_cost(cost), "speeds": str(speeds)}
            except ConfigError as met:  # all ranks raise it
                error = error or met
        gathered = agree(
            self.ranks.group,
            settings,
            error,
            what=f"epoch {key.epoch}, loading",
            step=key.step,
            values=own.words(self.rules.accumulate),
            capacity=self._capacity,
        )
        self._agreed_version = self._version
        self._capacity = max(self._capacity, *(words.size for words in gathered))
        closing = [str(rank) for rank, words in enumerate(gathered) if words[0] & _CLOSING]
        if closing:
            raise ClosedError(
                key.step,
                f"ranks {', '.join(closing)} of group {self.ranks.group.name!r} closed the loader: "
                "all ranks must leave an iteration at the same step",
            )
        return Loaded.of(gathered, self.ranks, self.rules.accumulate)

    def _warn_of_nothing(self, key: StepKey, loaded: Loaded) -> None:
        """Say once why an epoch has no step although there are samples."""
        if key.step or self._has_warned or not loaded.items.lens.size or self.ranks.group.rank:
            return
        self._has_warned = True
        logger.warning(
            "epoch %d has no step: data-parallel ranks %s have too few samples for one, and "
            'ends="drop_last" ends the epoch there. Set LoaderOptions(ends="pad_empty") or '
            '"finish", or give loader=None on ranks that only compute',
            key.epoch,
            np.flatnonzero(loaded.flags & _SHORT).tolist(),
        )

    def _delivered(self, items: Items, plans: tuple[Plan, ...], verdict: Verdict) -> Decision:
        dest = np.concatenate([plan.bag_of for plan in plans])
        deliveries = deliver(items, dest, pad=self.rules.ends != "finish")
        return Decision(plans, verdict, deliveries, Transfer.of(items, deliveries, self.ranks))

    def _as_loaded(self, items: Items, loads: Floats, verdict: Verdict) -> Decision:
        """Leave every sample where it is; (M, D) loads of the ranks."""
        speeds = self.costs[self._version][1]
        plans = list[Plan]()
        for micro, counts in enumerate(items.counts):
            here = items.micro == micro
            loaded = counts, items.lens[here], items.owner[here], loads[micro]
            known = None if speeds is None else np.array(speeds)
            plans.append(Plan(self._topology, *loaded, 0.0, "none", speeds=known))
        return self._delivered(items, tuple(plans), verdict)

    def _why_not(self, decision: Decision) -> Literal["even", "gain", "exchange"] | None:
        """Return why a decision is not worth it; None if it is."""
        before, after = decision.verdict.before, decision.verdict.after
        gain = before - after
        if gain <= 0.0:
            return "even"
        if gain < self.rules.min_gain * before:
            return "gain"
        seconds = unit_seconds(self.costs[self._version][0])
        if seconds is None:
            return None
        most = max(decision.transfer.sent.max(), decision.transfer.received.max())
        # The exchange runs behind the step; only what is longer than the step is waited for.
        exposed = max(float(most) * self.seconds_per_byte - after * seconds, 0.0)
        return "exchange" if gain * seconds <= exposed else None

    def _move(self, key: StepKey, items: Items, own: Load, decision: Decision) -> list[Delivered]:
        """Exchange samples, and assemble this rank's microbatches. No collective if none moves."""
        transfer, group = decision.transfer, self.ranks.group
        here, arrived = {}, dict[int, Sample]()
        if self.ranks.is_leader:
            ids = np.flatnonzero(items.owner == self.ranks.index).tolist()
            here = dict(zip(ids, itertools.chain.from_iterable(own.samples), strict=True))
        if transfer.delivery.size:
            # Parcels lie in the order of ids, as what this rank loaded does.
            places = {sample: place for place, sample in enumerate(here)}
            ids = decision.deliveries.ids[transfer.delivery[transfer.sender == group.rank]]
            sent = [own.parcels[places[sample]] for sample in ids.tolist()]
            move = ItemMove(transfer.sender, transfer.receiver, group, HOST, key.step, "samples")
            came = transfer.delivery[transfer.receiver == group.rank].tolist()
            arrived = dict(zip(came, move_items(move, sent, transfer.num_bytes), strict=True))
        return assemble(decision, arrived, here, items, self.ranks.index)


def check_received(transfer: Transfer, most: int | None) -> None:
    """Refuse a step in which a rank would receive more bytes than it may hold; None: any number.

    Raises:
        PlanError: Names the rank, the bytes and the limit.
    """
    worst = int(transfer.received.argmax())
    num_bytes = int(transfer.received[worst])
    if most is not None and num_bytes > most:
        raise PlanError(
            f"rank {worst} would receive {num_bytes:,} bytes of samples in a step, above "
            f"max_bytes_in_flight={most:,} by {num_bytes - most:,}: raise it, or load fewer "
            "samples a step"
        )


def _without_idle_ranks(plan: Plan, weights: Ints, costs: Floats, limits: Limits | None) -> Plan:
    """Give each rank a sample that counts if there are enough: a mean over none is no number.

    A rank may have been given nothing, or only samples of weight 0. One that counts then comes from
    the rank that has the most of them, its shortest. The plan stays as it is where the limits leave
    no room for that.
    """
    num_ranks, counted = plan.num_ranks, weights > 0
    if np.count_nonzero(counted) < num_ranks:
        counted = np.ones_like(counted)
    held_by = np.bincount(plan.bag_of[counted], minlength=num_ranks)
    if plan.bag_of.size < num_ranks or held_by.all():
        return plan
    bag_of = plan.bag_of.copy()
    for rank in np.flatnonzero(held_by == 0).tolist():
        richest = int(held_by.argmax())
        held = np.flatnonzero((bag_of == richest) & counted)
        bag_of[held[plan.seq_lens[held].argmin()]] = rank
        held_by[richest] -= 1
        held_by[rank] += 1
    tokens = np.bincount(bag_of, plan.seq_lens, num_ranks)
    counts = np.bincount(bag_of, minlength=num_ranks)
    if limits is not None and not limits.keeps(tokens=tokens, items=counts):
        return plan
    loads = np.bincount(bag_of, costs, num_ranks) / (1.0 if plan.speeds is None else plan.speeds)
    return dataclasses.replace(plan, bag_of=bag_of, loads=loads)


def assemble(
    decision: Decision,
    arrived: Mapping[int, Sample],
    here: Mapping[int, Sample],
    items: Items,
    index: int,
) -> list[Delivered]:
    """Return the microbatches of data-parallel rank `index`.

    From what arrived, by delivery, and what it loaded itself, by id.
    """
    num_micro, num_ranks = items.counts.shape
    total = int(items.weights.sum())
    deliveries, delivered = decision.deliveries, list[Delivered]()
    first_padding = deliveries.ids.size - deliveries.num_padding
    for micro, plan in enumerate(decision.plans):
        places = np.flatnonzero((deliveries.dest == index) & (deliveries.micro == micro))
        ids = deliveries.ids[places]
        pairs = zip(places.tolist(), ids.tolist(), strict=True)
        samples = [arrived[k] if k in arrived else here[sample] for k, sample in pairs]
        is_padding = bool((places >= first_padding).any())
        weight = 0 if is_padding else int(items.weights[ids].sum())
        scale = weight * num_ranks * num_micro / total if total else 0.0
        delivered.append(Delivered(samples, is_padding, scale, plan))
    return delivered
