"""A data loader that gives every rank the same work: samples change ranks behind the compute."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.comm.guard.failures import tell, told
from bascule.comm.guard.ranges import mark_lengths
from bascule.comm.new_groups import is_timeout
from bascule.comm.samples.exchange_speed import measure_exchange
from bascule.data.loader_batch import Batch, LoaderMetrics
from bascule.data.packs import Pack
from bascule.data.prefetch import PATIENCE_S, Prefetcher, ReadyStep, text_of
from bascule.data.progress import Progress
from bascule.data.redistribute import Redistributor, Rules, StepKey
from bascule.data.samples.loaded import DataRanks, Sample, whole_number
from bascule.data.samples.offers import named, num_input_ids
from bascule.data.setup import (
    DEFAULT_OPTIONS,
    DEFAULT_TIMEOUT_S,
    Given,
    LoaderOptions,
    agree_on_settings,
    interpret,
    join,
)
from bascule.data.source import Source
from bascule.errors import ConfigError
from bascule.plan.costs import Cost, describe_cost
from bascule.plan.prices import RankState
from bascule.plan.step import Sync


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
