"""A data loader that gives every rank the same work: samples move while the model computes."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.arrays import Ints
from bascule.checks import choice, fields, function, number, of_type, whole
from bascule.comm import groups
from bascule.comm.agree import agree
from bascule.comm.failures import leave, shared
from bascule.comm.items import mapped, measure_exchange
from bascule.comm.marks import mark_lengths
from bascule.data.packs import Pack, make_pack
from bascule.data.prefetch import PATIENCE_S, Pool, Prefetcher, pool_of, text_of
from bascule.data.samplers import accumulation_of_accelerate
from bascule.data.source import Microbatches, Saved, Source, state_of, whole_number, words_of
from bascule.data.steps import (
    Batch,
    DataRanks,
    Ends,
    ReadyStep,
    Redistributor,
    Rules,
    Sample,
    named,
    num_input_ids,
)
from bascule.errors import ConfigError
from bascule.machine.costs import Cost
from bascule.plan.limits import Limits
from bascule.plan.plan import Sync, Terms
from bascule.plan.prices import RankState


@dataclass(slots=True)
class LoaderMetrics:
    """Counts of a loader so far, on this rank."""

    steps: int = 0
    applied: int = 0  # steps in which samples moved
    skipped: dict[str, int] = dataclasses.field(default_factory=dict[str, int])  # others, by reason
    padded: int = 0  # microbatches of padding alone
    dropped_samples: int = 0  # that "drop_last" left out, unread ones where the loader knows them
    none_samples: int = 0  # that were None, and left out
    sent_bytes: int = 0
    received_bytes: int = 0
    exchange_s: float = 0.0  # in which the thread agreed, planned and exchanged
    exposed_s: float = 0.0  # of `exchange_s`, while the training thread waited
    hidden_s: float = 0.0  # the rest of `exchange_s`
    predicted_before: float = 0.0  # sum of steps as loaded, in the unit of the cost model
    predicted_after: float = 0.0  # sum of steps as delivered

    def count(self, step: ReadyStep, waited: tuple[float, float]) -> None:
        """Add a step, and begin and end of the wait for it."""
        verdict, (start, end) = step.batches[0].verdict, step.exchange
        self.steps += 1
        self.applied += verdict.applied
        if not verdict.applied:
            self.skipped[verdict.reason] = self.skipped.get(verdict.reason, 0) + 1
        self.padded += sum(batch.is_padding for batch in step.batches)
        self.none_samples += step.num_missing
        self.sent_bytes += step.sent_bytes
        self.received_bytes += step.received_bytes
        exposed = max(min(end, waited[1]) - max(start, waited[0]), 0.0)
        self.exchange_s += end - start
        self.exposed_s += exposed
        self.hidden_s += end - start - exposed
        self.predicted_before += verdict.before
        self.predicted_after += verdict.after if verdict.applied else verdict.before


DEFAULT_TIMEOUT_S = 600.0
STATE_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """The part of an epoch that was delivered so far; the same on all ranks."""

    epoch: int = 0
    step: int = 0
    history: tuple[tuple[int, ...], ...] = ()  # items of each source rank, in each earlier run
    counts: tuple[int, ...] = ()  # items of each source rank, in this run
    saved: tuple[Saved, ...] = ()  # of each source rank; empty if no loader has a state
    trial: tuple[float, ...] = ()  # `Redistributor.state`

    def after(self, step: int, counts: Sequence[int], saved: Sequence[Saved]) -> "Progress":
        """Return the progress after a microbatch with these numbers of items by source rank."""
        done = self.counts or (0,) * len(counts)
        sums = tuple(map(sum, zip(done, counts, strict=True)))
        saved = tuple(saved) or self.saved
        return dataclasses.replace(self, step=step + 1, counts=sums, saved=saved)

    def to_state(self, deal: Sequence[int]) -> dict[str, Any]:
        """Return the progress as plain values, with the `deal` of the `ResumableSampler`s.

        It has each loader's state, and how many of the loader's samples were delivered since.
        """
        pairs = zip(self.counts or (0,) * len(self.saved), self.saved, strict=False)
        saved = [(state_of(state), num - first) for num, (first, state) in pairs]
        plain = dataclasses.asdict(self) | {"saved": saved or None}
        return {"version": STATE_VERSION, "deal": tuple(deal), **plain}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], deal: Sequence[int]) -> "Progress":
        """Read a state; the run that wrote it becomes the last one of the history."""
        try:
            version, its_deal = state["version"], tuple(state["deal"])
            history = [_counts(counts) for counts in state["history"]]
            if any(state["counts"]):
                history.append(_counts(state["counts"]))
            epoch, step = (whole_number(state[name], name) for name in ("epoch", "step"))
            saved = tuple(
                (-whole_number(offset, "an offset"), words_of(loader_state))
                for loader_state, offset in state["saved"] or ()
            )
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this is not a loader state written by state_dict: {error!r}"
            ) from None
        if version != STATE_VERSION:
            raise ConfigError(
                f"the loader's state has version {version!r}: this bascule reads {STATE_VERSION}"
            )
        if its_deal != tuple(deal):
            raise ConfigError(
                f"samplers have (num_samples, shuffle, seed) = {tuple(deal)}, the state has "
                f"{its_deal} (zeros: no ResumableSampler): give the same, or samples would be lost"
            )
        return cls(epoch, step, tuple(history), saved=saved, trial=tuple(state.get("trial", ())))


def _counts(values: Sequence[int]) -> tuple[int, ...]:
    """Check a state's numbers of items by source rank, of which there is one at least."""
    counts = tuple(whole_number(count, "a count of the state") for count in values)
    if not counts:
        raise ValueError("no counts in the history")
    return counts


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """Options of a BalancedLoader, where the defaults do not fit.

    Attributes:
        axis: The mesh's data-parallel axis. Ranks along its other axes (tensor, pipeline) get the
            same batches; the first of them loads.
        batch_size: Samples of a microbatch, where the loader gives samples one by one.
        unpack: Splits an item of the loader into samples, for ready-made packs (see
            `packs.unpack`). Lists of items then stay microbatches.
        as_loaded: Makes a microbatch of an item of the loader whose samples all stay, in place of
            `collate_fn`. A step that moves nothing then costs little.
        weight_fn: Returns a sample's whole-number weight in the global mean, for `loss_scale`, such
            as its number of labels. Default: 1.
        limits: Hard limits of a microbatch on a rank.
        ends: "drop_last" ends the epoch when a rank cannot fill a step; "pad_empty" and "finish"
            when all ranks have run out. "finish" leaves a microbatch empty; the others fill it with
            a copy of the step's shortest sample, if there is one, and a loss_scale of 0.
        min_gain: Samples move only if that saves at least this share of the predicted step.
        bytes_per_s: Bandwidth of a rank, weighed against costs in seconds. None: measured once.
        prefetch: Steps made ahead.
        tries: A few steps stay as loaded, to measure whether moving pays; if it does not, samples
            stay. None of them needs more memory than an earlier step.
        collate_fn: Makes a microbatch of samples; an empty one has None as data. Default: the
            DataLoader's, or `default_collate`.
        timeout_s: Longest wait for other ranks and their loaders; the same on all ranks.
    """

    axis: str | None = None
    batch_size: int | None = None
    unpack: Callable[[Any], list[Sample]] | None = None
    as_loaded: Callable[[Any], Any] | None = None
    weight_fn: Callable[[Sample], int] | None = None
    limits: Limits | None = None
    ends: Ends = "drop_last"
    min_gain: float = 0.02
    bytes_per_s: float | None = None
    prefetch: int = 2
    tries: bool = True
    collate_fn: Callable[[list[Sample]], Any] | None = None
    pin_memory: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S

    @shared("LoaderOptions")  # ranks that go on to make a loader do not wait for this one
    def __post_init__(self) -> None:
        fields(
            self,
            axis=(of_type, str, "the name of an axis"),
            batch_size=(whole, 1),
            unpack=function,
            as_loaded=function,
            weight_fn=function,
            limits=(of_type, Limits, "Limits(tokens=..), or None"),
            ends=(choice, *get_args(Ends)),
            min_gain=(number, 0.0, 1.0),
            bytes_per_s=(number, 1.0),
            prefetch=(whole, 1),
            tries=(of_type, bool, "True or False"),
            collate_fn=function,
            pin_memory=(of_type, bool, "True or False"),
            timeout_s=(number, 1e-3, 1e7),
        )


DEFAULT_OPTIONS = LoaderOptions()


class _Setup(NamedTuple):
    """The arguments of a `BalancedLoader` on this rank."""

    rules: Rules
    terms: Terms
    source: Source
    settings: Mapping[str, str]  # alike on all ranks
    words: Ints  # 1 if the rank only computes; microbatches of an epoch, or -1; `Source.deal`


def _set_up(
    loader: Iterable[Any] | None,
    cost: Cost,
    length_fn: Callable[[Sample], int],
    accumulate: int,
    sync: Sync,
    pack: Pack | int | None,
    options: LoaderOptions,
) -> _Setup:
    """Check the arguments of a `BalancedLoader`."""
    whole("BalancedLoader(accumulate", accumulate, 1)
    choice("BalancedLoader(sync", sync, *get_args(Sync))
    function("BalancedLoader(cost", cost)
    function("BalancedLoader(length_fn", length_fn)
    pack = Pack(tokens=pack) if isinstance(pack, int) else pack
    if pack is not None:
        of_type("BalancedLoader(pack", pack, Pack, "Pack(..), its tokens, or None")
    batch_size, unpack, limits = options.batch_size, options.unpack, options.limits
    if batch_size is not None and (pack or unpack):
        raise ConfigError(
            f"LoaderOptions(batch_size={batch_size}): a pack counts tokens: leave batch_size out"
        )
    if options.collate_fn is not None and pack is not None:
        raise ConfigError(
            "LoaderOptions(collate_fn=..): packs are not collated: leave out collate_fn or pack"
        )
    grouping = None
    if unpack is None and (pack is not None or batch_size is not None):
        grouping = Microbatches(batch_size, None if pack is None else pack.tokens, length_fn)
    source = Source(loader, grouping, has_packs=unpack is not None)
    collate = options.collate_fn or source.collate_fn
    if pack is not None:
        collate = partial(make_pack, pack=pack)
        limits = Limits(tokens=pack.tokens) if limits is None else limits

    def pinned(data: Any) -> Any:
        if not options.pin_memory:
            return data
        return mapped(data, lambda x: x.pin_memory(), lambda x: hasattr(x, "pin_memory"))

    def collated(samples: list[Sample]) -> Any:
        return pinned(collate(samples) if samples or pack is not None else None)

    as_loaded = options.as_loaded
    rules = Rules(
        accumulate=accumulate,
        sync=sync,
        ends=options.ends,
        min_gain=options.min_gain,
        length_fn=length_fn,
        weight_fn=options.weight_fn,
        unpack=unpack,
        as_loaded=None if as_loaded is None else lambda item: pinned(as_loaded(item)),
        tries=options.tries,
        collate=collated,
    )
    terms = Terms("g1n1", cost, limits, min_gain=options.min_gain)
    settings = {name: _described(getattr(rules, name)) for name in Rules.__dataclass_fields__}
    settings |= {name: _described(getattr(options, name)) for name in ("bytes_per_s", "timeout_s")}
    settings |= terms.settings
    del settings["collate"]  # ranks may collate as they like
    words = np.array([source.is_empty, source.num_microbatches, *source.deal], dtype=np.int64)
    return _Setup(rules, terms, source, settings, words)


def _described(value: Any) -> str:
    kind = type(value).__qualname__
    return getattr(value, "__qualname__", kind) if callable(value) else str(value)


def _join(
    mesh_or_group: "DeviceMesh | dist.ProcessGroup | None", axis: str | None, timeout_s: float
) -> tuple[DataRanks, Pool]:
    """Return the data-parallel ranks, and the pool of groups that their loaders share."""
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
    places = torch.arange(by_place.shape[0]).repeat_interleave(by_place.shape[1])[order]
    pool = pool_of(by_place.flatten()[order].tolist(), timeout_s)
    return DataRanks(pool.control, places.numpy(), along), pool


class _Sources(NamedTuple):
    """The data-parallel ranks that load samples."""

    places: Ints
    num_microbatches: int | None  # of an epoch, where all know
    deal: tuple[int, ...]  # samples, shuffle and seed of the `ResumableSampler`s; zeros without

    @classmethod
    def of(cls, words: Ints, rules: Rules) -> "_Sources":
        """Join the words of all ranks (D); refuse samplers that lose or repeat samples."""
        places = np.flatnonzero(words[:, 0] == 0)
        if not places.size:
            return cls(places, None, (0, 0, 0))
        numbers, deals = words[places, 1], words[places, 2:].tolist()
        deal = tuple(deals[0][2:])
        for index, place in enumerate(places.tolist()):
            share, num_shares, *other = deals[index]
            if num_shares and (share, num_shares) != (index, places.size):
                raise ConfigError(
                    f"the ResumableSampler of data-parallel rank {place} has rank={share} and "
                    f"num_ranks={num_shares}, so samples would be lost or repeated: give it "
                    f"rank={index} and num_ranks={places.size}, counting ranks with a loader"
                )
            if tuple(other) != deal:
                raise ConfigError(
                    f"ResumableSamplers of ranks {places[0]}, {place} have (num_samples, shuffle, "
                    f"seed) = {deal} and {tuple(other)}: give the same, or samples would be lost"
                )
        if numbers.min() < 0:
            return cls(places, None, deal)
        least, most = numbers.min() // rules.accumulate, -(-numbers.max() // rules.accumulate)
        num_steps = int(least if rules.ends == "drop_last" else most)
        return cls(places, num_steps * rules.accumulate, deal)


class BalancedLoader:
    """Loader that balances the samples of any loader over data-parallel ranks, some steps ahead.

    A thread gathers what all ranks loaded, plans, moves samples in one all-to-all of bytes, and
    collates. Each sample is delivered once. Its rank depends on samples, cost model and step; also
    on measured seconds, but not without `LoaderOptions.tries`.

    Every rank constructs it with the same settings, and iterates alike. All ranks make loaders and
    begin iterations in the same order, in one thread each. The loader's thread ends with the
    iteration, `close`, `with`, or the interpreter.

    When a rank leaves an iteration, the others notice within about a second. They may go on to the
    step where it left, and then raise a CommError that names it. If an error leaves a `with` of the
    loader, they raise at once, with that error. An iteration counts as left when nothing refers to
    it any more, or at the end of its `with`. While a variable or a traceback refers to it, it
    counts as paused until `close`.

    Args:
        loader: This rank's samples: a DataLoader (its collate_fn is called after samples moved),
            any iterable of lists of samples (each a microbatch), or of samples (see `pack`, and
            `LoaderOptions.batch_size`). None on a rank that only computes. A sample is a dict or
            tuple of CPU tensors, arrays and plain values.
        cost: Predicts the cost of a sample by its tokens; in seconds if it is a PolynomialCost, or
            a TransformerCost with `seconds_per_unit`.
        length_fn: Counts the tokens of a sample. Default: the length of its "input_ids".
        mesh_or_group: Data-parallel ranks: a DeviceMesh with one axis, a process group, or None for
            all. With `LoaderOptions.axis`, a mesh with several axes.
        accumulate: Microbatches of an optimiser step; planned together, exchanged at once. Default:
            an Accelerator's, else 1.
        sync: When ranks wait for each other, as for `plan_step`.
        pack: Makes each microbatch one pack (see `make_pack`), in place of collating it; an integer
            is `Pack(tokens=...)`. Samples are loaded until the next would not fit, whatever lists
            they come in. No rank gets more tokens than that (but see `LoaderOptions.limits`).

    Raises:
        CommError: The ranks disagree on an argument, or a rank is missing.

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
        accumulate: int | None = None,
        sync: Sync = "microbatch",
        pack: Pack | int | None = None,
        options: LoaderOptions = DEFAULT_OPTIONS,
    ) -> None:
        of_type("BalancedLoader(options", options, LoaderOptions, "LoaderOptions(..)")
        self._timeout_s, self._depth = options.timeout_s, options.prefetch
        self.ranks, self._pool = _join(mesh_or_group, options.axis, self._timeout_s)
        is_first = self.ranks.leaders[self.ranks.index] == self.ranks.group.rank
        local = loader if is_first else None
        length_fn = num_input_ids if length_fn is None else length_fn
        accumulate = accumulation_of_accelerate() if accumulate is None else accumulate
        setup, error = None, None
        try:
            setup = _set_up(local, cost, length_fn, accumulate, sync, pack, options)
        except Exception as failure:  # the others must not wait
            error = failure
        settings, words = dict[str, str](), np.zeros(7, dtype=np.int64)
        if setup is not None:
            settings, words = setup.settings, setup.words
        group, what = self.ranks.group, "construction"
        gathered = agree(group, settings, error, what=what, values=words, capacity=words.size)
        assert setup is not None
        self.rules, self._source = setup.rules, setup.source
        self._sources = _Sources.of(np.stack(gathered)[self.ranks.leaders], setup.rules)
        rate = options.bytes_per_s
        per_byte = measure_exchange(group).byte_s if rate is None else 1.0 / rate
        self._redistributor = Redistributor(self.ranks, setup.rules, setup.terms, per_byte)
        self._pool.num_loaders += 1
        self._name = f"number {self._pool.num_loaders} of those made"
        self._first = self._progress = Progress()
        self._num_entered = 0
        self._prefetcher: Prefetcher | None = None
        self._metrics = LoaderMetrics()

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch's microbatches; after its end, the next epoch's.

        All ranks raise a CommError if one failed or left, a PlanError if limits cannot be kept.
        """
        self.close()
        begun, places = self._first, self._sources.places.tolist()
        prefetcher = self._prefetcher = self._start(begun)
        self._progress, timer = begun, prefetcher.timer
        try:
            while True:
                step, waited = prefetcher.take()
                if step is None:
                    break
                self._metrics.count(step, waited)
                self._progress = dataclasses.replace(self._progress, trial=step.trial)
                lens = [batch.plan.seq_lens.size for batch in step.batches]
                is_void = step.num_items.any() and not any(lens)  # every item was None
                for micro, batch in enumerate(step.batches):
                    prefetcher.hand_out((batch.step, micro))
                    counts = step.num_items[micro][places].tolist()
                    saved = [step.saved[place] for place in places if step.saved]
                    self._progress = self._progress.after(batch.step, counts, saved)
                    if self.rules.ends == "finish" or not is_void:
                        mark_lengths("batch", batch.plan, self.ranks.index)
                        timer.begin()
                        yield batch
                        timer.computed()
                is_padded = any(batch.is_padding for batch in step.batches)
                work = sum(batch.plan.loads[self.ranks.index].item() for batch in step.batches)
                waited_s = waited[1] - waited[0]
                timer.finish(step.batches[0].step, waited_s, math.nan if is_padded else work)
        except BaseException as error:
            # Nothing refers to the iteration any more: `break`, or an error in the loop.
            is_dropped = isinstance(error, GeneratorExit)
            if not (is_dropped and self._num_entered):  # else the end of the `with` knows the error
                prefetcher.leave("" if is_dropped else text_of(error))
                self._end(prefetcher, PATIENCE_S)
            raise
        self._end(prefetcher)
        if self._first is begun:
            self._first = Progress(begun.epoch + 1, trial=self._progress.trial)
        self._progress = self._first

    def _start(self, first: Progress) -> Prefetcher:
        """Borrow a group with all ranks that begin the same, and start the thread."""
        places = self._sources.places
        index = int(np.searchsorted(places, self.ranks.index))
        reading, error = None, None
        try:
            self._source.set_epoch(first.epoch)
            saved = first.saved[index] if index < len(first.saved) else None
            reading = self._source.begin(first.history, index, places.size, saved)
        except Exception as failure:
            error = named(failure, "its loader")
        begins = f"epoch={first.epoch}, step={first.step}, after {first.history}"
        settings = {"step": begins, "loader": self._name}
        try:
            lease = self._pool.borrow(settings, error, self._timeout_s)
        except BaseException:
            if reading is not None:
                reading.close()
            raise
        assert reading is not None
        self._redistributor.begin(lease.group, first.epoch)
        loads = not self._source.is_empty
        return Prefetcher(
            reading, self._redistributor, lease, first.step, depth=self._depth, loads=loads
        )

    def __len__(self) -> int:
        """Return the number of microbatches of an epoch; TypeError if a rank does not know it."""
        if self._sources.num_microbatches is None:
            raise TypeError("a rank does not know its number of microbatches: iterate to the end")
        return self._sources.num_microbatches

    def __enter__(self) -> "BalancedLoader":
        self._num_entered += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._num_entered -= 1
        if error is None:
            self.close()
        else:
            self.leave(error)

    def leave(self, error: BaseException) -> None:
        """End the iteration because of an error of this rank, as `__exit__` does."""
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

    def _end(self, prefetcher: Prefetcher, patience_s: float | None = None) -> None:
        if prefetcher.join(patience_s) and self._prefetcher is prefetcher:
            self._metrics.dropped_samples += prefetcher.num_dropped
            self._prefetcher = None

    @shared("set_epoch")
    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration, on all ranks; its loaded state is kept."""
        epoch = whole("epoch", epoch)
        if epoch != self._first.epoch:
            self._first = Progress(epoch=epoch)
            if self._prefetcher is None:
                self._progress = self._first

    @shared("set_cost")
    def set_cost(self, cost: Cost, *, speeds: npt.ArrayLike | None = None) -> None:
        """Plan with another cost model, and `speeds` (D,) of ranks, once all ranks have set it."""
        if speeds is not None:
            speeds = RankState.of(self.ranks.num, speeds=speeds).speeds
        self._redistributor.set_cost(cost, speeds)

    @property
    def cost(self) -> Cost:
        """The newest cost model."""
        return self._redistributor.terms[-1].cost

    def metrics(self) -> dict[str, Any]:
        """Return the `LoaderMetrics` of this rank so far, `Pace.metrics`, and the measured gain.

        The gain and its error are None until 8 steps stayed, each beside a step that moved.
        """
        gain, error = self._redistributor.trial.gain or (None, None)
        measured = {"measured_gain": gain, "measured_gain_error": error}
        return dataclasses.asdict(self._metrics) | self._redistributor.pace.metrics() | measured

    def computed(self) -> None:
        """Note that this rank has computed on its microbatch; what follows may wait for others.

        On a GPU, call it after the forward pass, so that `metrics` can name a slow rank.
        """
        if self._prefetcher is not None:
            self._prefetcher.timer.computed()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same on every rank: save it once, on any of them."""
        return self._progress.to_state(self._sources.deal)

    @shared("load_state_dict")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; another number of ranks needs a `ResumableSampler`."""
        if self._prefetcher is not None:
            raise ConfigError("load_state_dict during an iteration: call loader.close() first")
        self._first = self._progress = Progress.from_state(state, self._sources.deal)
        self._redistributor.restore(self._first.trial)
