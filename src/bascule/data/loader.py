"""A data loader that gives every rank the same work: samples change ranks behind the compute."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bascule.arrays import Ints
from bascule.comm import groups
from bascule.comm.agree import agree
from bascule.comm.exchange import BoundRoute, exchange
from bascule.comm.failures import leave, shared, watch_of_world
from bascule.comm.groups import RankGroup
from bascule.comm.items import measure_exchange
from bascule.comm.profiles import mark_lengths
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
)
from bascule.errors import ConfigError
from bascule.plan.checks import choice, fields, function, number, of_type, whole
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
        data: The samples as `collate_fn` put them together.
        loss_scale: Factor of the mean loss of this microbatch. With it, the usual division by the
            number of microbatches, and gradients averaged over the ranks, the step's gradient is
            that of the mean over all ranks and microbatches, whatever moved where. 0 for padding.
        epoch: From 0.
        step: Optimiser step of the epoch, from 0.
        microbatch: Of the step, from 0.
        num_samples: Samples of this rank, without padding.
        is_padding: True if all there is, is a sample that another rank has, with weight 0.
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

    @shared("restore of a batch")
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
        route = Route.of_items(
            source, dest, np.ones_like(dest), self._group.rank, self.plan.num_ranks
        ).inverse()
        name = f"restore of microbatch {self.microbatch}"
        bound = BoundRoute(route, self._group, values.device, self.step, name)
        return exchange(bound, [values])[0]


@dataclass(slots=True)
class LoaderMetrics:
    """Counts of a loader so far, on this rank.

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
    """Options of a BalancedLoader, where the defaults do not fit.

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

    Raises:
        ConfigError: A value is out of its range.
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

    def __post_init__(self) -> None:
        fields(
            self,
            axis=(of_type, str, "the name of an axis"),
            batch_size=(whole, 1),
            unpack=function,
            weight_fn=function,
            limits=(of_type, Limits, "Limits(tokens=..), or None"),
            ends=(choice, *get_args(Ends)),
            min_gain=(number, 0.0, 1.0),
            bytes_per_s=(number, 1.0),
            max_bytes_in_flight=(whole, 1),
            prefetch=(whole, 1),
            collate_fn=function,
            pin_memory=(of_type, bool, "True or False"),
            timeout_s=(number, 1e-3, 1e7),
        )


DEFAULT_OPTIONS = LoaderOptions()


class _Setup(NamedTuple):
    """The arguments of a `BalancedLoader` on this rank; those in `settings` are alike on all.

    `words` are what is gathered: 1 if this rank only computes, its microbatches of an epoch or -1
    where it does not know, and the deal of its sampler.
    """

    rules: Rules
    source: Source
    handlers: Handlers
    settings: Mapping[str, str]
    words: Ints


def _set_up(
    loader: Iterable[Any] | None,
    cost: Cost,
    length_fn: Callable[[Sample], int],
    accumulate: int,
    sync: Sync,
    pack: Pack | int | None,
    options: LoaderOptions,
) -> _Setup:
    """Check the arguments of a `BalancedLoader`.

    Raises:
        ConfigError: An argument is wrong.
    """
    whole("BalancedLoader(accumulate", accumulate, 1)
    choice("BalancedLoader(sync", sync, *get_args(Sync))
    function("BalancedLoader(cost", cost)
    function("BalancedLoader(length_fn", length_fn)
    pack = Pack(tokens=pack) if isinstance(pack, int) else pack
    if pack is not None:
        of_type("BalancedLoader(pack", pack, Pack, "Pack(..), its tokens, or None")
    batch_size, unpack, collate = options.batch_size, options.unpack, options.collate_fn
    if batch_size is not None and (pack or unpack):
        raise ConfigError(
            f"LoaderOptions(batch_size={batch_size}): a pack holds samples up to its tokens, and "
            "ready-made packs come in the loader's lists; leave batch_size out"
        )
    if collate is not None and pack is not None:
        raise ConfigError(
            "LoaderOptions(collate_fn=..): a pack is one sequence of all its samples, and is "
            "collated by nothing else; leave collate_fn out, or pack"
        )
    grouping, limits = None, options.limits
    if unpack is None and (pack is not None or batch_size is not None):
        grouping = Microbatches(batch_size, None if pack is None else pack.tokens, length_fn)
    source = Source(loader, grouping)
    if pack is not None:
        collate = partial(make_pack, pack=pack)
        limits = Limits(tokens=pack.tokens) if limits is None else limits
    collate = source.collate_fn if collate is None else collate
    collate = collate_and_pin(collate, takes_none=pack is not None, pin=options.pin_memory)
    ends, min_gain, max_bytes = options.ends, options.min_gain, options.max_bytes_in_flight
    rules = Rules(accumulate, sync, limits, ends, min_gain, max_bytes)
    settings = {name: str(getattr(rules, name)) for name in Rules.__dataclass_fields__}
    settings |= {name: str(getattr(options, name)) for name in ("bytes_per_s", "timeout_s")}
    functions = {"length_fn": length_fn, "weight_fn": options.weight_fn, "unpack": unpack}
    for name, called in functions.items():
        settings[name] = getattr(called, "__qualname__", type(called).__qualname__)
    settings["cost"] = describe_cost(cost)
    try:
        length = len(source)
    except (TypeError, NotImplementedError):
        length = -1
    words = np.array([source.is_empty, length, *source.deal], dtype=np.int64)
    return _Setup(
        rules, source, Handlers(length_fn, options.weight_fn, unpack, collate), settings, words
    )


def _join(
    mesh_or_group: "DeviceMesh | dist.ProcessGroup | None", axis: str | None, timeout_s: float
) -> tuple[DataRanks, Pool, RankGroup]:
    """Return all ranks, the groups that loaders share, and the data-parallel group of this rank.

    Raises:
        ConfigError: The mesh has no such axis.
        CommError: A rank did not come.
    """
    if axis is None:
        along = groups.member_of(groups.resolve(mesh_or_group), "data-parallel")
        by_place = torch.tensor(along.ranks)[:, None]
    else:
        mesh = of_type(f"the mesh of axis {axis!r}", mesh_or_group, DeviceMesh, "a DeviceMesh")
        names = mesh.mesh_dim_names or ()
        if axis not in names:
            raise ConfigError(f"axis {axis!r}: the mesh has the axes {names}")
        along = groups.member_of(mesh.get_group(axis), "data-parallel")
        by_place = mesh.mesh.movedim(names.index(axis), 0).flatten(1)
    order = by_place.flatten().argsort()
    members = by_place.flatten()[order].tolist()
    places = torch.arange(by_place.shape[0]).repeat_interleave(by_place.shape[1])[order]
    pool = pool_of(members, timeout_s)
    return DataRanks(pool.control, places.numpy()), pool, along


class _Sources(NamedTuple):
    """The data-parallel ranks (n,) that load samples; microbatches of an epoch, where all know.

    `deal` has samples, shuffle and seed of their `ResumableSampler`s; zeros without.
    """

    places: Ints
    num_microbatches: int | None
    deal: tuple[int, ...]


def _agree(ranks: DataRanks, setup: _Setup | None, error: Exception | None) -> _Sources:
    """Compare the settings of all ranks, and return who loads.

    Raises:
        RemoteConfigError: A rank was given a wrong argument.
        CommError: Ranks have unlike settings.
        ConfigError: Samplers do not deal the same, or for other ranks than those that load (on all
            ranks alike).
    """
    settings, words = dict[str, str](), np.zeros(7, dtype=np.int64)
    if setup is not None:
        settings, words = setup.settings, setup.words
    sizes = {"values": words, "capacity": words.size}
    gathered = agree(ranks.group, settings, error, what="construction", **sizes)
    assert setup is not None
    of_rank = np.stack(gathered)[ranks.leaders]
    places = np.flatnonzero(of_rank[:, 0] == 0)
    numbers, deals = of_rank[places, 1], of_rank[places, 2:]
    _check_deals(places, deals)
    deal = tuple(deals[0, 2:].tolist()) if places.size else (0, 0, 0)
    if not numbers.size or numbers.min() < 0:
        return _Sources(places, None, deal)
    accumulate = setup.rules.accumulate
    if setup.rules.ends == "drop_last":
        return _Sources(places, int(numbers.min()) // accumulate * accumulate, deal)
    return _Sources(places, -(-int(numbers.max()) // accumulate) * accumulate, deal)


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
    ends with the iteration, `close`, `with`, or the interpreter; groups are used again.

    When a rank leaves an iteration, the others notice within about a second. They may go on to
    where it left, and then raise a CommError that names it; at once, and with its error, if an
    error left a `with` of the loader. An iteration counts as left when nothing refers to it any
    more, as when an error leaves a `for`; within a `with` of the loader, at its end. One that is
    kept, in a variable or by the traceback of an error that was caught, counts as paused: the
    others notice at `close`, or when the process ends.

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

    @shared("BalancedLoader")
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
        of_type("BalancedLoader(options", options, LoaderOptions, "LoaderOptions(..)")
        self._timeout_s = options.timeout_s
        self._ranks, self._pool, self._group = _join(mesh_or_group, options.axis, self._timeout_s)
        own = loader if self._ranks.is_leader else None
        length_fn = num_input_ids if length_fn is None else length_fn
        setup, error = None, None
        try:
            setup = _set_up(own, cost, length_fn, accumulate, sync, pack, options)
        except Exception as met:  # the others must not wait
            error = met
        self._sources = _agree(self._ranks, setup, error)
        assert setup is not None
        rate = options.bytes_per_s
        per_byte = measure_exchange(self._ranks.group).byte_s if rate is None else 1.0 / rate
        self._redistributor = Redistributor(self._ranks, setup.rules, cost, per_byte)
        self._source, self._handlers, self._depth = setup.source, setup.handlers, options.prefetch
        self._pool.num_loaders += 1
        self._name = f"number {self._pool.num_loaders} of those made"
        self._first = self._progress = Progress()
        self._num_entered = 0
        self._prefetcher: Prefetcher | None = None
        self._metrics = LoaderMetrics()

    def __iter__(self) -> Iterator[Batch]:
        """Yield the microbatches that are left of the epoch; after its end, those of the next.

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
            if not self._num_entered:  # else the end of the `with` knows the error
                prefetcher.leave()
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
        if self._sources.num_microbatches is None:
            raise TypeError("the number of microbatches is known only when they were loaded")
        return self._sources.num_microbatches

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
        leave(error, "the loop over a BalancedLoader", ends_all=True)
        self._end(prefetcher, PATIENCE_S)
        first = prefetcher.left_by_another
        if first is not None and first is not error:
            error.add_note(str(first))

    def close(self) -> None:
        """End the thread of an iteration that was left early; all ranks do so at the same step."""
        if self._prefetcher is not None:
            self._prefetcher.leave()
            self._end(self._prefetcher)
        if dist.is_initialized():
            watch_of_world().close()

    def _end(self, prefetcher: Prefetcher, patience_s: float | None = None) -> None:
        if prefetcher.join(patience_s) and self._prefetcher is prefetcher:
            self._metrics.dropped_samples += prefetcher.num_dropped
            self._prefetcher = None

    @shared("set_epoch")
    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration, on all ranks; keeps what was resumed in it.

        Raises:
            ConfigError: It is no whole number from 0.
        """
        epoch = whole("epoch", epoch)
        if epoch != self._first.epoch:
            self._first = Progress(epoch=epoch)
            if self._prefetcher is None:
                self._progress = self._first

    @shared("set_cost")
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
        """The rules by which steps are made."""
        return self._redistributor.rules

    @property
    def cost(self) -> Cost:
        """The newest cost model."""
        return self._redistributor.costs[-1][0]

    def metrics(self) -> dict[str, Any]:
        """Return the counts of this loader so far on this rank (see `LoaderMetrics`)."""
        return dataclasses.asdict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return what was delivered so far, as plain values.

        The same on every rank, unless the loader has a state of its own (`StatefulDataLoader`):
        then each rank keeps its own.
        """
        return self._progress.to_state(self._sources.deal)

    @shared("load_state_dict")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the samples that were not delivered; all ranks load the same state.

        On another number of ranks, the DataLoader needs a `ResumableSampler`.

        Raises:
            ConfigError: The state is not one of `state_dict` or of other samples, or an iteration
                is under way.
        """
        if self._prefetcher is not None:
            raise ConfigError("load_state_dict during an iteration: close the loader first")
        self._first = self._progress = Progress.from_state(state, self._sources.deal)

    def _start(self) -> Prefetcher:
        """Borrow a group with all ranks that begin the same, and start the thread."""
        first, places = self._first, self._sources.places
        error: Exception | None = None
        reading = Source(None, None).begin((), 0, 0, None)
        try:
            self._source.set_epoch(first.epoch)
            index = int(np.searchsorted(places, self._ranks.index))
            reading = self._source.begin(first.history, index, places.size, first.saved)
        except Exception as met:
            error = named(met, "its loader")
        begins = f"epoch={first.epoch}, step={first.step}, after {first.history}"
        try:
            settings = {"step": begins, "loader": self._name}
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
            StepKey(first.epoch, first.step),
            depth=self._depth,
            loads=not self._source.is_empty,
        )
        return self._prefetcher

    def _deliver(self, step: ReadyStep, prefetcher: Prefetcher) -> Iterator[Batch]:
        """Yield the microbatches of a step; each counts as delivered when it is handed out."""
        places = self._sources.places
        done = np.array(self._progress.counts or (0,) * places.size)
        parts = zip(step.data.microbatches, step.collated, step.saved, strict=True)
        for micro, (part, collated, saved) in enumerate(parts):
            prefetcher.hand_out((step.key.step, micro))
            done = done + step.data.num_items[micro][places]
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
