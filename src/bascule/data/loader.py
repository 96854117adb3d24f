"""A data loader that gives every rank the same work: samples change ranks behind the compute."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.data.batch import Batch, LoaderMetrics
from bascule.data.loaded import DataRanks, Ends, Sample
from bascule.data.packs import Pack, make_pack
from bascule.data.prefetch import Handlers, Prefetcher, ReadyStep
from bascule.data.redistribute import Redistributor, Rules, StepKey
from bascule.data.setup import agree_on_settings, check_options, join
from bascule.data.source import Microbatches, Source
from bascule.data.transfer import measure_exchange
from bascule.errors import ConfigError
from bascule.plan.cost import Cost
from bascule.plan.limits import Limits
from bascule.plan.step import Sync

STATE_VERSION = 1

_PATIENCE_S = 5.0
"""How long a rank that failed waits for the loaders of the others."""


@dataclass(frozen=True, slots=True)
class _Progress:
    """What was delivered of an epoch, alike on all ranks except `saved`.

    Attributes:
        epoch: From 0.
        step: Next step.
        history: Items that each source rank had delivered, one entry for each earlier run.
        counts: Items that each source rank delivered in this run.
        saved: Where this rank's loader goes on, if it has a state of its own.
    """

    epoch: int = 0
    step: int = 0
    history: tuple[tuple[int, ...], ...] = ()
    counts: tuple[int, ...] = ()
    saved: dict[str, Any] | None = None


class BalancedLoader:
    """Balances the samples of any loader over data-parallel ranks, some steps ahead.

    A thread of its own, with a gloo group of its own, gathers what all ranks loaded, plans, moves
    the samples in one all-to-all of bytes, and collates. Each sample is delivered once, on one
    rank. Who gets it depends on the samples, the cost model and the step alone, not on who is fast.

    Every rank of the group constructs it, with the same settings, and iterates alike. The group
    lives until `destroy_process_group`; the thread ends with the iteration, `close`, or `with`.

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
        timeout_s: Longest wait for other ranks, their loaders included.

    Raises:
        ConfigError: An argument is wrong.
        CommError: The ranks disagree on an argument, or one is missing.

    Example:
        >>> for batch in BalancedLoader(loader, cost=cost, length_fn=len):  # doctest: +SKIP
        ...     loss = model(**batch.data).loss * batch.loss_scale
        ...     loss.backward()
    """

    def __init__(
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
        timeout_s: float = 600.0,
    ) -> None:
        length_fn = _num_input_ids if length_fn is None else length_fn
        ranks, self._group = join(mesh_or_group, axis, timeout_s)
        error: Exception | None = None
        source, rules = Source(None, None), Rules(1, "step", None, "finish", 0.0, None)
        try:
            pack = Pack(tokens=pack) if isinstance(pack, int) else pack
            if pack is not None and limits is None:
                limits = Limits(tokens=pack.tokens)
            rules = Rules(accumulate, sync, limits, ends, min_gain, max_bytes_in_flight)
            check_options(rules, batch_size, pack, unpack, prefetch, bytes_per_s)
            grouping = None
            if unpack is None and (pack is not None or batch_size is not None):
                budget = None if pack is None else pack.tokens
                grouping = Microbatches(batch_size, budget, length_fn)
            source = Source(loader if ranks.is_leader else None, grouping)
        except ConfigError as met:
            error = met
        functions = {"length_fn": length_fn, "weight_fn": weight_fn, "unpack": unpack}
        sources = agree_on_settings(ranks, rules, cost, bytes_per_s, functions, source, error)
        self._source_places, self._deal = sources.places, sources.deal
        self._num_microbatches = sources.epoch_length(rules)
        per_byte = measure_exchange(ranks.group) if bytes_per_s is None else 1.0 / bytes_per_s
        self._redistributor = Redistributor(ranks, rules, cost, per_byte)
        self._source = source
        collate = source.collate_fn if collate_fn is None else collate_fn
        if isinstance(pack, Pack):
            collate = partial(make_pack, pack=pack)
        self._handlers = Handlers(
            length_fn=length_fn,
            weight_fn=_one if weight_fn is None else weight_fn,
            unpack=unpack,
            collate=_collate(collate, takes_none=pack is not None, pin=pin_memory),
        )
        self._depth = prefetch
        self._first = self._progress = _Progress()
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
        prefetcher = self._start()
        try:
            while True:
                step, waited = prefetcher.take()
                if step is None:
                    break
                self._metrics.count(step.data, step.exchange, waited)
                yield from self._deliver(step)
                prefetcher.release(step)
        finally:
            self._end(prefetcher)
        self._first = self._progress = _Progress(epoch=self._first.epoch + 1)

    def __len__(self) -> int:
        """Microbatches of a whole epoch, the same on all ranks.

        Raises:
            TypeError: A rank's loader does not know, or its samples are grouped anew.
        """
        if self._num_microbatches is None:
            raise TypeError("the number of microbatches is known only when they were loaded")
        return self._num_microbatches

    def __enter__(self) -> "BalancedLoader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error on this rank the others may wait for it in the model's collectives.
        if self._prefetcher is not None:
            self._end(self._prefetcher, None if kind is None else _PATIENCE_S)

    def close(self) -> None:
        """End the thread of an iteration that was left early; all ranks do so at the same step."""
        if self._prefetcher is not None:
            self._end(self._prefetcher)

    def _end(self, prefetcher: Prefetcher, patience_s: float | None = None) -> None:
        prefetcher.close(patience_s)
        if self._prefetcher is prefetcher:
            self._metrics.dropped_samples += prefetcher.num_dropped
            self._prefetcher = None

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration, on all ranks; keeps what was resumed in it."""
        if epoch != self._first.epoch:
            self._first = self._progress = _Progress(epoch=epoch)

    def set_cost(self, cost: Cost) -> None:
        """Plan with another cost model, as soon as all ranks have been given it.

        Ranks that were given unlike ones end with a CommError.
        """
        self._redistributor.costs.append(cost)

    @property
    def ranks(self) -> DataRanks:
        """The ranks that share the samples."""
        return self._redistributor.ranks

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
        progress = dataclasses.asdict(self._progress)
        return {"version": STATE_VERSION, "deal": self._deal, **progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the samples that were not delivered; all ranks load the same state.

        On another number of ranks, the DataLoader needs a `ResumableSampler`.

        Raises:
            ConfigError: The state is not one of `state_dict` or of other samples, or an iteration
                is under way.
        """
        if self._prefetcher is not None:
            raise ConfigError("load_state_dict during an iteration: close the loader first")
        try:
            version, deal = state["version"], tuple(state["deal"])
            history = [tuple(counts) for counts in state["history"]]
            if any(state["counts"]):
                history.append(tuple(state["counts"]))
            epoch, step, saved = int(state["epoch"]), int(state["step"]), state["saved"]
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this is not a loader state written by state_dict: {error!r}"
            ) from error
        if version != STATE_VERSION:
            raise ConfigError(
                f"a loader state of version {version!r}: this bascule reads {STATE_VERSION}"
            )
        if deal != self._deal:
            raise ConfigError(
                f"a state of samplers with (num_samples, shuffle, seed) = {deal}, and these have "
                f"{self._deal} (zeros: no ResumableSampler): samples would be lost or repeated"
            )
        self._first = self._progress = _Progress(epoch, step, tuple(history), saved=saved)

    def _start(self) -> Prefetcher:
        progress = self._progress = self._first
        self._source.set_epoch(progress.epoch)
        self._redistributor.begin()
        index = int(np.searchsorted(self._source_places, self.ranks.index))
        num_sources = self._source_places.size
        reading = self._source.begin(progress.history, index, num_sources, progress.saved)
        self._prefetcher = Prefetcher(
            reading,
            self._handlers,
            self._redistributor,
            lambda step: StepKey(progress.epoch, step, str(progress.history)),
            first_step=progress.step,
            depth=self._depth,
            max_bytes=self.rules.max_bytes,
            loads=not self._source.is_empty,
        )
        return self._prefetcher

    def _deliver(self, step: ReadyStep) -> Iterator[Batch]:
        """The microbatches of a step; each counts as delivered when it is handed out."""
        done = np.array(self._progress.counts or (0,) * self._source_places.size)
        parts = zip(step.data.microbatches, step.collated, step.saved, strict=True)
        for micro, (part, collated, saved) in enumerate(parts):
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


def _num_input_ids(sample: Sample) -> int:
    try:
        return len(sample["input_ids"])
    except (LookupError, TypeError) as error:
        raise ConfigError(
            f'a {type(sample).__name__} without "input_ids": give BalancedLoader a length_fn'
        ) from error


def _one(sample: Sample) -> int:
    del sample
    return 1


def _collate(
    collate: Callable[[list[Sample]], Any], *, takes_none: bool, pin: bool
) -> Callable[[list[Sample]], Any]:
    """Collate and pin; an empty microbatch is None, unless `collate` takes one."""

    def collate_and_pin(samples: list[Sample]) -> Any:
        data = collate(samples) if samples or takes_none else None
        return _pinned(data) if pin else data

    return collate_and_pin


def _pinned(data: Any) -> Any:
    """The same with its tensors in pinned memory."""
    if hasattr(data, "pin_memory"):
        return data.pin_memory()
    if isinstance(data, Mapping):
        return {key: _pinned(part) for key, part in data.items()}
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        return type(data)(_pinned(part) for part in data)
    return data
