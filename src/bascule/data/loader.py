"""A data loader that gives every rank the same work: samples change ranks behind the compute."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bascule.arrays import Ints
from bascule.comm import groups
from bascule.comm.agree import Statement, agree
from bascule.comm.exchange import BoundRoute, exchange
from bascule.comm.groups import RankGroup
from bascule.comm.guard.failures import tell, told
from bascule.comm.guard.ranges import mark_lengths
from bascule.comm.items import measure_exchange
from bascule.comm.new_groups import is_timeout
from bascule.data.packs import Pack, make_pack
from bascule.data.prefetch import (
    PATIENCE_S,
    Interval,
    Pool,
    Prefetcher,
    ReadyStep,
    pool_of,
    text_of,
)
from bascule.data.progress import Progress
from bascule.data.source import Microbatches, Source
from bascule.data.steps import (
    DataRanks,
    Ends,
    Handlers,
    Redistributor,
    Rules,
    Sample,
    StepData,
    StepKey,
    Verdict,
    collate_and_pin,
    named,
    num_input_ids,
    one,
    whole_number,
)
from bascule.errors import ConfigError
from bascule.plan.checks import is_int, real
from bascule.plan.costs import Cost, describe_cost
from bascule.plan.limits import Limits
from bascule.plan.plan import Plan
from bascule.plan.prices import RankState
from bascule.plan.routes import Route
from bascule.plan.step import Sync


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A microbatch of one rank.

    Attributes:
        data: What `collate_fn` made of the samples.
        loss_scale: Factor of the mean loss of this microbatch. With it, the usual division by the
            number of microbatches, and gradients averaged over the ranks, the step's gradient is
            that of the mean over all ranks and microbatches, whatever moved where. 0 for padding.
        epoch: From 0.
        step: Optimiser step of the epoch, from 0.
        microbatch: Of the step, from 0.
        num_samples: Samples of this rank, without padding.
        is_padding: Whether all there is, is a sample that another rank has, with weight 0.
        plan: Who computes what in this microbatch.
        verdict: Whether samples moved in this step, and why.
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

    @told("restore of a batch")
    def restore(self, values: Tensor) -> Tensor:
        """Bring per-sample results back to the ranks that loaded the samples.

        All ranks of the balancing group call it. One all-to-all, differentiable; none if no sample
        of the step moved.

        Args:
            values: (n, ...) one row for each sample of this microbatch, padding included.

        Returns:
            (m, ...) one row for each sample that this rank loaded, in the order in which it did.

        Raises:
            ConfigError: There is not one row a sample.
        """
        if not isinstance(values, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"restore got a {type(values).__name__}: give a tensor with one row a sample"
            )
        if values.ndim < 1 or values.shape[0] != self.num_samples + self.is_padding:
            raise ConfigError(
                f"restore got values of shape {tuple(values.shape)}: give one row for each of the "
                f"{self.num_samples + self.is_padding} samples of this microbatch"
            )
        values = values[: self.num_samples]
        if not self.verdict.applied:
            return values
        source, dest = self.plan.source_ranks, self.plan.bag_of
        route = Route.of_items(
            source, dest, np.ones_like(dest), self._group.rank, self.plan.num_ranks
        ).inverse()
        name = f"restore of microbatch {self.microbatch}"
        bound = BoundRoute(route, self._group, values.device, self.step, name)
        return exchange(bound, [values])[0]


@dataclass(slots=True)
class LoaderMetrics:
    """What a loader did so far on this rank.

    Attributes:
        steps: Steps taken.
        applied: Steps in which samples moved.
        skipped: Steps in which they did not, by reason (see `Verdict.reason`).
        padded: Microbatches that hold nothing but padding.
        dropped_samples: Samples of this rank that "drop_last" left out: those that were read, and
            where the loader knows its length, those that were not.
        sent_bytes: Bytes of samples that this rank sent.
        received_bytes: Bytes of samples that it received.
        exchange_s: Seconds in which the thread agreed, planned and exchanged.
        exposed_s: Those of them in which the training thread waited.
        hidden_s: The others.
        predicted_before: Sum of the predicted steps as loaded, in the unit of the cost model.
        predicted_after: The same as delivered.
    """

    steps: int = 0
    applied: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    padded: int = 0
    dropped_samples: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    exchange_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    predicted_before: float = 0.0
    predicted_after: float = 0.0

    def count(self, data: StepData, exchange: Interval, waited: Interval) -> None:
        """Add a step, the time of its exchange, and the time in which it was waited for."""
        verdict = data.verdict
        self.steps += 1
        self.applied += verdict.applied
        if not verdict.applied:
            self.skipped[verdict.reason] = self.skipped.get(verdict.reason, 0) + 1
        self.padded += sum(part.is_padding for part in data.microbatches)
        self.sent_bytes += data.sent_bytes
        self.received_bytes += data.received_bytes
        exposed = max(min(exchange[1], waited[1]) - max(exchange[0], waited[0]), 0.0)
        self.exchange_s += exchange[1] - exchange[0]
        self.exposed_s += exposed
        self.hidden_s += exchange[1] - exchange[0] - exposed
        self.predicted_before += verdict.before
        self.predicted_after += verdict.after if verdict.applied else verdict.before


DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How a BalancedLoader loads, moves and collates, where the defaults do not fit.

    Attributes:
        axis: Name of the data-parallel axis, in a mesh with several. Ranks that differ in other
            axes only (tensor or pipeline parallel) get the same batches; the first of them loads.
        batch_size: Samples of a microbatch, where the loader gives samples one by one.
        unpack: Samples of each item of the loader, for ready-made packs (see `packs.unpack`). Then
            lists of items are kept as microbatches.
        weight_fn: What a sample counts in the global mean, for `loss_scale`: a whole number, such
            as its labels for a mean over tokens. Default: 1.
        limits: What a rank can hold in a microbatch; hard.
        ends: "drop_last": the epoch ends where the first rank cannot fill a step. "pad_empty" and
            "finish": it ends when all ranks have run out, and those that ran out earlier get
            samples of the others. With "finish", a microbatch may be empty; otherwise it then holds
            a copy of the step's shortest sample, with a loss_scale of 0; unless no rank has a
            sample for the step.
        min_gain: Share of the predicted step that balancing must save for samples to move.
        bytes_per_s: Bytes that a rank exchanges in a second, against which the gain of a cost in
            seconds is weighed. None measures it once, when the loader is made.
        max_bytes_in_flight: Most bytes received in steps that were not used up; hard.
        prefetch: Steps made ahead.
        collate_fn: A microbatch from a list of samples. Default: the DataLoader's, or
            `default_collate`. Not called for an empty microbatch, whose data are None.
        pin_memory: Whether tensors are put into pinned memory.
        timeout_s: Longest wait for other ranks, their loaders included; the same on all.
    """

    axis: str | None = None
    batch_size: int | None = None
    unpack: Callable[[Any], list[Sample]] | None = None
    weight_fn: Callable[[Sample], int] | None = None
    limits: Limits | None = None
    ends: Ends = "drop_last"
    min_gain: float = 0.02
    bytes_per_s: float | None = None
    max_bytes_in_flight: int | None = None
    prefetch: int = 2
    collate_fn: Callable[[list[Sample]], Any] | None = None
    pin_memory: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S


DEFAULT_OPTIONS = LoaderOptions()


def _is_count(value: object) -> bool:
    return is_int(value) and value >= 1


def _is_share(value: object) -> bool:
    share = real(value)
    return share is not None and 0.0 <= share < 1.0


def _or_none(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


_COUNT, _FUNCTION = "must be an integer of at least 1", "must be a function"
_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "accumulate": (_is_count, _COUNT),
    "sync": (lambda value: value in get_args(Sync), f"choose one of {get_args(Sync)}"),
    "pack": (lambda value: isinstance(value, Pack | None), "must be Pack(..), its tokens, or None"),
    "cost": (callable, _FUNCTION),
    "length_fn": (callable, _FUNCTION),
    "prefetch": (_is_count, _COUNT),
    "batch_size": (_or_none(_is_count), _COUNT),
    "max_bytes_in_flight": (_or_none(_is_count), _COUNT),
    "min_gain": (_is_share, "a share of the step, from 0 to below 1"),
    "bytes_per_s": (_or_none(lambda value: (real(value) or 0.0) > 0.0), "must be above zero"),
    "timeout_s": (is_timeout, "must be seconds, above zero"),
    "ends": (lambda value: value in get_args(Ends), f"choose one of {get_args(Ends)}"),
    "limits": (lambda value: isinstance(value, Limits | None), "must be Limits(..) or None"),
    "weight_fn": (_or_none(callable), _FUNCTION),
    "unpack": (_or_none(callable), _FUNCTION),
    "collate_fn": (_or_none(callable), _FUNCTION),
}
"""The values that each argument can have, and how an error says it."""


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """The arguments of a `BalancedLoader`, as one rank was given them; see there."""

    loader: Iterable[Any] | None
    cost: Cost
    length_fn: Callable[[Sample], int]
    accumulate: int
    sync: Sync
    pack: Pack | int | None
    options: LoaderOptions

    @property
    def rules(self) -> Rules:
        """How steps are made; a pack limits the tokens of a rank."""
        chosen, limits = self.options, self.options.limits
        if limits is None and isinstance(self.pack, Pack):
            limits = Limits(tokens=self.pack.tokens)
        return Rules(
            accumulate=self.accumulate,
            sync=self.sync,
            limits=limits,
            ends=chosen.ends,
            min_gain=chosen.min_gain,
            max_bytes=chosen.max_bytes_in_flight,
        )

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            ConfigError: Names the argument, its value and the range.
        """
        chosen = self.options
        if not isinstance(chosen, LoaderOptions):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"BalancedLoader(options={chosen!r}): must be LoaderOptions(..)")
        for name, (is_right, limit) in _LIMITS.items():
            owner = chosen if name in LoaderOptions.__dataclass_fields__ else self
            value = getattr(owner, name)
            if not is_right(value):
                public = "LoaderOptions" if owner is chosen else "BalancedLoader"
                raise ConfigError(f"{public}({name}={value!r}): {limit}")
        if chosen.batch_size is not None and (self.pack or chosen.unpack):
            raise ConfigError(
                f"LoaderOptions(batch_size={chosen.batch_size}): a pack holds samples up to its "
                "tokens, and ready-made packs come in the loader's lists; leave batch_size out"
            )
        if chosen.collate_fn is not None and self.pack is not None:
            raise ConfigError(
                "LoaderOptions(collate_fn=..): a pack is one sequence of all its samples, and is "
                "collated by nothing else; leave collate_fn out, or pack"
            )

    def handlers(self, source: Source) -> Handlers:
        """What is done with samples; the DataLoader's own way to collate them is the default."""
        chosen, pack = self.options, self.pack
        collate = source.collate_fn if chosen.collate_fn is None else chosen.collate_fn
        if isinstance(pack, Pack):
            collate = partial(make_pack, pack=pack)
        collate = collate_and_pin(collate, takes_none=pack is not None, pin=chosen.pin_memory)
        weight_fn = one if chosen.weight_fn is None else chosen.weight_fn
        return Handlers(self.length_fn, weight_fn, chosen.unpack, collate)


def interpret(given: Given) -> tuple[Given, Source]:
    """What the arguments mean: a pack for its tokens, and microbatches.

    Raises:
        ConfigError: An argument is wrong.
    """
    pack = Pack(tokens=given.pack) if isinstance(given.pack, int) else given.pack
    given = dataclasses.replace(given, pack=pack)
    given.check()
    chosen, grouping = given.options, None
    if chosen.unpack is None and (pack is not None or chosen.batch_size is not None):
        tokens = None if pack is None else pack.tokens
        grouping = Microbatches(chosen.batch_size, tokens, given.length_fn)
    return given, Source(given.loader, grouping)


def join(
    mesh_or_group: "DeviceMesh | dist.ProcessGroup | None", axis: str | None, timeout_s: float
) -> tuple[DataRanks, Pool, RankGroup]:
    """All ranks, the groups that their loaders share, and the data-parallel group of this rank.

    Raises:
        ConfigError: The mesh has no such axis.
        CommError: A rank did not come.
    """
    if axis is not None:
        if not isinstance(mesh_or_group, DeviceMesh):
            raise ConfigError(
                f"axis {axis!r} names an axis of a DeviceMesh, and none was given: give the mesh"
            )
        names = mesh_or_group.mesh_dim_names or ()
        if axis not in names:
            raise ConfigError(f"axis {axis!r}: the mesh has the axes {names}")
        along = groups.member_of(mesh_or_group.get_group(axis), "data-parallel")
        by_place = mesh_or_group.mesh.movedim(names.index(axis), 0).flatten(1)
    else:
        along = groups.member_of(groups.resolve(mesh_or_group), "data-parallel")
        by_place = torch.tensor(along.ranks)[:, None]
    order = by_place.flatten().argsort()
    members = by_place.flatten()[order].tolist()
    places = torch.arange(by_place.shape[0]).repeat_interleave(by_place.shape[1])[order]
    pool = pool_of(members, timeout_s)
    return DataRanks(pool.control, places.numpy()), pool, along


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """The data-parallel ranks that load samples.

    Attributes:
        places: (n,) which of the data-parallel ranks they are.
        num_microbatches: (n,) of an epoch; -1 where a loader does not know.
        deal: Samples, shuffle and seed of their `ResumableSampler`s; zeros without.
    """

    places: Ints
    num_microbatches: Ints
    deal: tuple[int, ...]

    def epoch_length(self, rules: Rules) -> int | None:
        """Microbatches of an epoch on each rank; None if a loader does not know."""
        numbers = self.num_microbatches
        if not numbers.size or numbers.min() < 0:
            return None
        if rules.ends == "drop_last":
            return int(numbers.min()) // rules.accumulate * rules.accumulate
        return -(-int(numbers.max()) // rules.accumulate) * rules.accumulate


def agree_on_settings(
    ranks: DataRanks, given: Given, source: Source, error: Exception | None
) -> Sources:
    """Make sure that all ranks were given the same, and find out who loads.

    Raises:
        RemoteConfigError: A rank was given a wrong argument.
        CommError: They were not given the same.
        ConfigError: Samplers do not deal the same, or for other ranks than those that load (on all
            ranks alike).
    """
    settings, values = dict.fromkeys(_SETTINGS, ""), np.zeros(7, dtype=np.int64)
    try:
        if error is None:  # else what was given may be anything
            settings = _settings(given)
            values = np.array([source.is_empty, _length_of(source), *source.deal], dtype=np.int64)
    except Exception as met:
        error = met
    statement = Statement(settings, values, error)
    said = agree(ranks.group, statement, what="construction", step=0, capacity=values.size)
    of_rank = np.stack(said)[ranks.leaders]
    places = np.flatnonzero(of_rank[:, 0] == 0)
    deals = of_rank[places, 2:]
    _check_deals(places, deals)
    deal = tuple(deals[0, 2:].tolist()) if places.size else (0, 0, 0)
    return Sources(places, of_rank[places, 1], deal)


_RULES = tuple(field.name for field in dataclasses.fields(Rules))
_FUNCTIONS = ("length_fn", "weight_fn", "unpack")
_SETTINGS = (*_RULES, "bytes_per_s", "timeout_s", *_FUNCTIONS, "cost")


def _settings(given: Given) -> dict[str, str]:
    """What must be the same on all ranks, as text."""
    rules, chosen = given.rules, given.options
    functions = (given.length_fn, chosen.weight_fn, chosen.unpack)
    names = (getattr(one, "__qualname__", type(one).__qualname__) for one in functions)
    values = [str(getattr(rules, name)) for name in _RULES]
    values += [str(chosen.bytes_per_s), str(chosen.timeout_s), *names, describe_cost(given.cost)]
    return dict(zip(_SETTINGS, values, strict=True))


def _length_of(source: Source) -> int:
    """Its microbatches, or -1 where it does not know."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return -1


def _check_deals(places: Ints, deals: Ints) -> None:
    """Refuse samplers that together lose or repeat samples; alike on all ranks.

    Raises:
        ConfigError: Names the data-parallel rank, what it has, and what it should have.
    """
    for index, place in enumerate(places.tolist()):
        share, num_shares, *dealt = deals[index].tolist()
        if num_shares and (share, num_shares) != (index, places.size):
            raise ConfigError(
                f"the ResumableSampler of data-parallel rank {place} has rank={share} and "
                f"num_ranks={num_shares}, so samples would be lost or repeated: give it "
                f"rank={index} and num_ranks={places.size}, of the ranks whose loader is not None"
            )
        if dealt != deals[0, 2:].tolist():
            raise ConfigError(
                f"the ResumableSamplers of data-parallel ranks {places[0]} and {place} have "
                f"(num_samples, shuffle, seed) = {tuple(deals[0, 2:].tolist())} and "
                f"{tuple(dealt)}, so samples would be lost or repeated: give all ranks the same"
            )


class BalancedLoader:
    """Balances the samples of any loader over data-parallel ranks, some steps ahead.

    A thread, in a gloo group that no other uses meanwhile, gathers what all ranks loaded, plans,
    moves the samples in one all-to-all of bytes, and collates. Each sample is delivered once, on
    one rank. Who gets it depends on the samples, the cost model and the step alone, not on who is
    fast.

    Every rank of the group constructs it, with the same settings, and iterates alike. Loaders are
    made, and iterations begun, in one thread, in the same order on all ranks. The loader's thread
    ends with the iteration, `close`, `with`, or the interpreter; groups are used again (`leases`).

    A rank that leaves an iteration is heard by the others within about a second. They may go on to
    where it left, and then raise a CommError that names it; at once, and with its error, if an
    error left a `with` of the loader. An iteration counts as left when nothing refers to it any
    more, as when an error leaves a `for`. One that is kept, in a variable or by the traceback of an
    error that was caught, counts as paused: the others hear at `close`, or when the process ends.

    Args:
        loader: This rank's samples: a DataLoader (they are taken before it collates them, and its
            collate_fn is used after they moved), any iterable of lists of samples (each a
            microbatch), or of samples (see `pack`, and `LoaderOptions.batch_size`). None on a rank
            that only computes. A sample is a dict or tuple of CPU tensors, arrays and plain values.
        cost: Predicts what a sample of so many tokens costs; in seconds if it is a PolynomialCost,
            or a TransformerCost with `seconds_per_unit`.
        length_fn: Tokens of a sample. Default: those of its "input_ids".
        mesh_or_group: The data-parallel ranks: a DeviceMesh with one axis, a process group, or None
            for all. With `LoaderOptions.axis`, a mesh with several axes.
        accumulate: Microbatches of an optimiser step; planned together, exchanged at once.
        sync: When ranks wait for each other, as for `plan_step`.
        pack: Makes each microbatch one pack (see `make_pack`) instead of collating it. An integer
            is `Pack(tokens=...)`. Samples are loaded until the next would not fit, whatever lists
            they come in, and no rank gets more tokens than the pack has (but see
            `LoaderOptions.limits`).
        options: What is seldom changed, and what a sample counts in the loss.

    Raises:
        ConfigError: An argument is wrong.
        CommError: The ranks disagree on an argument, or one is missing.

    Example:
        >>> for batch in BalancedLoader(loader, cost=cost, length_fn=len):  # doctest: +SKIP
        ...     loss = model(**batch.data).loss * batch.loss_scale
        ...     loss.backward()
    """

    @told("BalancedLoader")
    def __init__(
        self,
        loader: Iterable[Any] | None,
        *,
        cost: Cost,
        length_fn: Callable[[Sample], int] | None = None,
        mesh_or_group: "DeviceMesh | dist.ProcessGroup | None" = None,
        accumulate: int = 1,
        sync: Sync = "microbatch",
        pack: Pack | int | None = None,
        options: LoaderOptions = DEFAULT_OPTIONS,
    ) -> None:
        length_fn = num_input_ids if length_fn is None else length_fn
        # A wrong argument is told to the other ranks, so first of all this rank must meet them.
        known = options if isinstance(options, LoaderOptions) else DEFAULT_OPTIONS  # pyright: ignore[reportUnnecessaryIsInstance]
        meeting_s = known.timeout_s if is_timeout(known.timeout_s) else DEFAULT_TIMEOUT_S
        self._ranks, self._pool, self._group = join(mesh_or_group, known.axis, meeting_s)
        own = loader if self._ranks.is_leader else None
        given = Given(own, cost, length_fn, accumulate, sync, pack, options)
        source, error = Source(None, None), None
        try:
            given, source = interpret(given)
        except Exception as met:
            error = met
        sources = agree_on_settings(self._ranks, given, source, error)
        rules, rate = given.rules, options.bytes_per_s
        self._source_places, self._deal = sources.places, sources.deal
        self._num_microbatches = sources.epoch_length(rules)
        per_byte = measure_exchange(self._ranks.group).byte_s if rate is None else 1.0 / rate
        self._redistributor = Redistributor(self._ranks, rules, cost, per_byte)
        self._source, self._handlers = source, given.handlers(source)
        self._depth, self._timeout_s = options.prefetch, float(options.timeout_s)
        self._name = self._pool.next_name()
        self._first = self._progress = Progress()
        self._num_entered = 0
        self._prefetcher: Prefetcher | None = None
        self._metrics = LoaderMetrics()

    def __iter__(self) -> Iterator[Batch]:
        """The microbatches that are left of the epoch; after its end, those of the next.

        An iteration that was left early begins anew. There is one at a time: the next one ends the
        one before.

        Raises:
            CommError: A rank failed, or closed its loader (on all ranks).
            PlanError: The limits cannot be kept (on all ranks).
        """
        self.close()
        begun = self._first
        prefetcher = self._start()
        try:
            while True:
                step, waited = prefetcher.take()
                if step is None:
                    break
                self._metrics.count(step.data, step.exchange, waited)
                yield from self._deliver(step, prefetcher)
                prefetcher.release(step)
        except GeneratorExit:  # nothing refers to the iteration: `break`, or an error in the loop
            # In a `with` the error follows, if there is one.
            prefetcher.leave(is_final=not self._num_entered)
            if not self._num_entered:
                self._end(prefetcher, PATIENCE_S)
            raise
        except BaseException as error:
            prefetcher.leave(text_of(error))
            self._end(prefetcher, PATIENCE_S)
            raise
        self._end(prefetcher)
        if self._first is begun:
            self._first = Progress(epoch=begun.epoch + 1)
        self._progress = self._first

    def __len__(self) -> int:
        """Microbatches of a whole epoch, the same on all ranks.

        Raises:
            TypeError: A rank's loader does not know, or its samples are grouped anew.
        """
        if self._num_microbatches is None:
            raise TypeError("the number of microbatches is known only when they were loaded")
        return self._num_microbatches

    def __enter__(self) -> "BalancedLoader":
        self._num_entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        self._num_entered -= 1
        if error is None:
            self.close()
        else:
            self.leave(error)

    def leave(self, error: BaseException) -> None:
        """End an iteration because of an error of this rank, and let the other ranks know of it.

        As a `with` does that an error leaves. If another rank was the first to leave, a note with
        its error is added to this one.
        """
        prefetcher = self._prefetcher
        if prefetcher is None:
            return
        prefetcher.leave(text_of(error))
        tell(error, "the loop over a BalancedLoader", leaves=True)
        self._end(prefetcher, PATIENCE_S)
        first = prefetcher.left_by_another
        if first is not None and first is not error:
            error.add_note(str(first))

    def close(self) -> None:
        """End the thread of an iteration that was left early; all ranks do so at the same step."""
        if self._prefetcher is not None:
            self._prefetcher.leave()
            self._end(self._prefetcher)

    def _end(self, prefetcher: Prefetcher, patience_s: float | None = None) -> None:
        if prefetcher.join(patience_s) and self._prefetcher is prefetcher:
            self._metrics.dropped_samples += prefetcher.num_dropped
            self._prefetcher = None

    @told("set_epoch")
    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration, on all ranks; keeps what was resumed in it.

        Raises:
            ConfigError: It is no whole number from 0.
        """
        epoch = whole_number(epoch, "the caller of set_epoch")
        if epoch != self._first.epoch:
            self._first = Progress(epoch=epoch)
            if self._prefetcher is None:
                self._progress = self._first

    @told("set_cost")
    def set_cost(self, cost: Cost, *, speeds: npt.ArrayLike | None = None) -> None:
        """Plan with another cost model, as soon as all ranks have been given it.

        Ranks that were given unlike ones end with a CommError.

        Args:
            cost: The cost model.
            speeds: Of each data-parallel rank, as `measure_speeds` gives them; None: all alike.

        Raises:
            ConfigError: It is no function that gives costs of token counts; or a speed is illegal.
        """
        describe_cost(cost)
        state = RankState.of(self._ranks.num, speeds=speeds)
        known = None if speeds is None else tuple(state.speeds.tolist())
        self._redistributor.costs.append((cost, known))

    @property
    def ranks(self) -> DataRanks:
        """The ranks that share the samples, with a group for the thread that trains."""
        return self._ranks

    @property
    def rules(self) -> Rules:
        """How steps are made."""
        return self._redistributor.rules

    @property
    def cost(self) -> Cost:
        """The newest cost model."""
        return self._redistributor.costs[-1][0]

    def metrics(self) -> dict[str, Any]:
        """What this loader did so far on this rank (see `LoaderMetrics`)."""
        return dataclasses.asdict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """What was delivered so far, as plain values.

        The same on every rank, unless the loader has a state of its own (`StatefulDataLoader`):
        then each rank keeps its own.
        """
        return self._progress.to_state(self._deal)

    @told("load_state_dict")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the samples that were not delivered; all ranks load the same state.

        On another number of ranks, the DataLoader needs a `ResumableSampler`.

        Raises:
            ConfigError: The state is not one of `state_dict` or of other samples, or an iteration
                is under way.
        """
        if self._prefetcher is not None:
            raise ConfigError("load_state_dict during an iteration: close the loader first")
        self._first = self._progress = Progress.from_state(state, self._deal)

    def _start(self) -> Prefetcher:
        """Borrow a group with all ranks that begin the same, and start the thread."""
        first = self._first

        def key_of(step: int) -> StepKey:
            return StepKey(first.epoch, step, str(first.history))

        error: Exception | None = None
        reading = Source(None, None).begin((), 0, 0, None)
        try:
            self._source.set_epoch(first.epoch)
            index = int(np.searchsorted(self._source_places, self.ranks.index))
            num_sources = self._source_places.size
            reading = self._source.begin(first.history, index, num_sources, first.saved)
        except Exception as met:
            error = named(met, "its loader")
        settings = {"step": str(key_of(first.step)), "loader": self._name}
        try:
            lease = self._pool.borrow(settings, error, self._timeout_s)
        except BaseException:
            reading.close()
            raise
        self._redistributor.begin(lease.group)
        self._progress = first
        self._prefetcher = Prefetcher(
            reading,
            self._handlers,
            self._redistributor,
            lease,
            key_of,
            first_step=first.step,
            depth=self._depth,
            loads=not self._source.is_empty,
        )
        return self._prefetcher

    def _deliver(self, step: ReadyStep, prefetcher: Prefetcher) -> Iterator[Batch]:
        """The microbatches of a step; each counts as delivered when it is handed out."""
        done = np.array(self._progress.counts or (0,) * self._source_places.size)
        parts = zip(step.data.microbatches, step.collated, step.saved, strict=True)
        for micro, (part, collated, saved) in enumerate(parts):
            prefetcher.hand_out((step.key.step, micro))
            done = done + step.data.loaded.num_items[micro][self._source_places]
            self._progress = dataclasses.replace(
                self._progress,
                step=step.key.step + 1,
                counts=tuple(done.tolist()),
                saved=saved,
            )
            mark_lengths("batch", part.plan, self._ranks.index)
            yield Batch(
                data=collated,
                loss_scale=part.loss_scale,
                epoch=step.key.epoch,
                step=step.key.step,
                microbatch=micro,
                num_samples=len(part.samples) - part.is_padding,
                is_padding=part.is_padding,
                plan=part.plan,
                verdict=step.data.verdict,
                _group=self._group,
            )
