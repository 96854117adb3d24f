"""A data loader that gives every rank the same work: samples change ranks behind the compute."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.comm.guard.failures import tell, told
from bascule.data.loader_batch import Batch, LoaderMetrics
from bascule.data.packs import Pack, make_pack
from bascule.data.prefetch import PATIENCE_S, Prefetcher, ReadyStep, text_of
from bascule.data.progress import Progress
from bascule.data.redistribute import Redistributor, Rules, StepKey
from bascule.data.samples.loaded import DataRanks, Ends, Sample, whole_number
from bascule.data.samples.offers import Handlers, collate_and_pin, named, num_input_ids, one
from bascule.data.samples.sample_transfer import measure_exchange
from bascule.data.setup import (
    DEFAULT_TIMEOUT_S,
    Options,
    agree_on_settings,
    interpret,
    is_timeout,
    join,
)
from bascule.data.source import Source
from bascule.errors import ConfigError
from bascule.plan.costs.cost_models import Cost, describe_cost
from bascule.plan.limits import Limits
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
            microbatch), or of samples (see `batch_size` and `pack`). None on a rank that only
            computes. A sample is a dict or tuple of CPU tensors, arrays and plain values.
        length_fn: Tokens of a sample. Default: those of its "input_ids".
        cost: Predicts what a sample of so many tokens costs; in seconds if it is a PolynomialCost.
        mesh_or_group: The data-parallel ranks: a DeviceMesh with one axis, a process group, or None
            for all. With `axis`, a mesh with several axes.
        axis: Name of the data-parallel axis. Ranks that differ in other axes only (tensor or
            pipeline parallel) get the same batches; the first of them loads.
        accumulate: Microbatches of an optimiser step; planned together, exchanged at once.
        sync: When ranks wait for each other, as for `plan_step`.
        batch_size: Samples of a microbatch, where the loader gives samples one by one.
        pack: Makes each microbatch one pack (see `make_pack`) instead of collating it. An integer
            is `Pack(tokens=...)`. Samples are loaded until the next would not fit, whatever lists
            they come in, and no rank gets more tokens than the pack has (but see `limits`).
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
            seconds is weighed. None measures it once, here.
        max_bytes_in_flight: Most bytes received in steps that were not used up; hard.
        prefetch: Steps made ahead.
        collate_fn: A microbatch from a list of samples. Default: the DataLoader's, or
            `default_collate`. Not called for an empty microbatch, whose data are None.
        pin_memory: Whether tensors are put into pinned memory.
        timeout_s: Longest wait for other ranks, their loaders included; the same on all.

    Raises:
        ConfigError: An argument is wrong.
        CommError: The ranks disagree on an argument, or one is missing.

    Example:
        >>> for batch in BalancedLoader(loader, cost=cost, length_fn=len):  # doctest: +SKIP
        ...     loss = model(**batch.data).loss * batch.loss_scale
        ...     loss.backward()
    """

    @told("BalancedLoader")
    def __init__(  # noqa: PLR0913  (public)
        self,
        loader: Iterable[Any] | None,
        *,
        length_fn: Callable[[Sample], int] | None = None,
        cost: Cost,
        mesh_or_group: "DeviceMesh | dist.ProcessGroup | None" = None,
        axis: str | None = None,
        accumulate: int = 1,
        sync: Sync = "microbatch",
        batch_size: int | None = None,
        pack: Pack | int | None = None,
        unpack: Callable[[Any], list[Sample]] | None = None,
        weight_fn: Callable[[Sample], int] | None = None,
        limits: Limits | None = None,
        ends: Ends = "drop_last",
        min_gain: float = 0.02,
        bytes_per_s: float | None = None,
        max_bytes_in_flight: int | None = None,
        prefetch: int = 2,
        collate_fn: Callable[[list[Sample]], Any] | None = None,
        pin_memory: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        length_fn = num_input_ids if length_fn is None else length_fn
        # A wrong argument is told to the other ranks, so first of all this rank must meet them.
        meeting_s = timeout_s if is_timeout(timeout_s) else DEFAULT_TIMEOUT_S
        self._ranks, self._pool, self._group = join(mesh_or_group, axis, meeting_s)
        rules = Rules(accumulate, sync, limits, ends, min_gain, max_bytes_in_flight)
        functions = {"length_fn": length_fn, "weight_fn": weight_fn, "unpack": unpack}
        functions["collate_fn"] = collate_fn
        options = Options(batch_size, pack, prefetch, bytes_per_s, timeout_s, cost, functions)
        source, error = Source(None, None), None
        try:
            own = loader if self._ranks.is_leader else None
            rules, options, source = interpret(rules, options, own)
        except Exception as met:
            error = met
        sources = agree_on_settings(self._ranks, rules, options, source, error)
        self._source_places, self._deal = sources.places, sources.deal
        self._num_microbatches = sources.epoch_length(rules)
        group = self._ranks.group
        per_byte = measure_exchange(group) if bytes_per_s is None else 1.0 / bytes_per_s
        self._redistributor = Redistributor(self._ranks, rules, cost, per_byte)
        self._source = source
        collate = source.collate_fn if collate_fn is None else collate_fn
        if isinstance(options.pack, Pack):
            collate = partial(make_pack, pack=options.pack)
        collate = collate_and_pin(collate, takes_none=options.pack is not None, pin=pin_memory)
        weight_fn = one if weight_fn is None else weight_fn
        self._handlers = Handlers(length_fn, weight_fn, unpack, collate)
        self._depth, self._timeout_s = prefetch, float(timeout_s)
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
    def set_cost(self, cost: Cost) -> None:
        """Plan with another cost model, as soon as all ranks have been given it.

        Ranks that were given unlike ones end with a CommError.

        Raises:
            ConfigError: It is no function that gives costs of token counts.
        """
        describe_cost(cost)
        self._redistributor.costs.append(cost)

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
        return self._redistributor.costs[-1]

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
