"""A run of `bascule train` on its ranks: load, plan behind the step, train, tell, save."""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.groups import new_group
from bascule.encoders import EncoderOptions
from bascule.errors import ConfigError
from bascule.parallel import SequenceParallel, Step
from bascule.plan.machine import TRAINING, WITHOUT_RECOMPUTING, in_passes
from bascule.planning import PlanFuture
from bascule.train.building import build_model
from bascule.train.checkpoints import Checkpoints, Facts, step_of
from bascule.train.encode_ahead import EncodeAhead, Encoded
from bascule.train.encoder_stages import EncoderStages, watch_encoders
from bascule.train.flow import FlowBatch
from bascule.train.preparing import Prepared, cost_of, prepare
from bascule.train.step_metrics import PARTS, MetricsLog, StepReports
from bascule.train.stepping import sync_of, train_step
from bascule.train.stopwatch import Stopwatch, TimedStep, watch_blocks
from bascule.train.train_options import TrainOptions, split
from bascule.workload.photos import PhotoStream
from bascule.workload.streams import RawBatch, SampleBatch


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step whose samples a thread loads and whose plan another one makes."""

    samples: Future[Callable[[], Encoded]]
    plans: PlanFuture
    shares: list[float]


@dataclass(frozen=True, slots=True)
class _Trained:
    """A step that was trained; seconds are by part, and "work" has those of each microbatch."""

    steps: tuple[Step, ...]
    loss: float
    seconds: Mapping[str, Any]
    moved: Mapping[str, Any]
    following: _Ahead | None


class TrainingRun:
    """All ranks of an initialised process group construct and run it together.

    Args:
        options: The same on all ranks.
        device: Of this rank.
        is_stopping: Whether this rank was asked to stop; all then save after the step, and end.

    Raises:
        ConfigError: An option is wrong here. RemoteConfigError: on another rank.
        CommError: Ranks have unlike options or data, or one is gone.

    Attributes:
        num_steps: Of the whole run.
        done: Steps that were trained so far, those before a resume included.
        folder: Of checkpoints and metrics.
        checkpoint: The last one that was loaded or saved.
    """

    @shared("construction of a training run")
    def __init__(
        self, options: TrainOptions, device: torch.device, is_stopping: Callable[[], bool]
    ) -> None:
        self.rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._options, self._device, self.folder = options, device, options.out
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        every = range(self._num_ranks)
        self._group = new_group(every, "train", options.timeout_s, backend="gloo")
        self._prepared = self._agreed()
        self.num_steps = self._prepared.schedule.num_steps
        self._mesh = init_device_mesh(device.type, (self._num_ranks,))
        self._parallel = self._make_parallel()
        self._model = build_model(
            self._prepared.config,
            self._mesh,
            seed=options.seed,
            checkpoint=options.checkpoint,
            dtype=self._dtype,
        )
        self._watch = Stopwatch(device)
        self._encoding = Stopwatch(device) if options.encode_ahead else self._watch
        self._stages = self._make_stages()
        self._encode_ahead: EncodeAhead | None = None
        if self._stages is not None and options.encode_ahead:
            self._encode_ahead = EncodeAhead(self._encoding, device)
        self._parts = (*PARTS, *(() if self._stages is None else self._stages.last))
        watch_blocks([*self._model.double_blocks, *self._model.single_blocks], self._watch)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=options.lr)
        facts = Facts(self._prepared.settings, self._prepared.schedule)
        self._checkpoints = Checkpoints(options.out, self._group, facts, options.keep)
        self.checkpoint = self._prepared.checkpoint
        self.done, self._is_stopping = 0, is_stopping
        if self.checkpoint is not None:
            self._checkpoints.load(self.checkpoint, self._model, self._optimizer)
            self.done = step_of(self.checkpoint)

    def run(self, on_step: Callable[[dict[str, Any]], None]) -> None:
        """Train until the last step, or until a rank is to stop; saves in either case.

        Args:
            on_step: Called with the record of each step, on the first rank.

        Raises:
            CommError: A rank failed, is gone, or could not save.
            ConfigError: This rank could not load its samples, or write what is told.
        """
        with shared("bascule train"), ThreadPoolExecutor(1, "bascule data") as pool:
            if self.rank > 0:
                self._run(pool, lambda record: None)
                return
            with closing(MetricsLog(self.folder, self.done)) as log:
                self._run(pool, lambda record: (log.write(record), on_step(record)))

    def _run(self, pool: ThreadPoolExecutor, on_step: Callable[[dict[str, Any]], object]) -> None:
        reports = StepReports(self._parts)
        ahead = self._begin(self.done, pool) if self.done < self.num_steps else None
        while ahead is not None:
            trained = self._train(ahead, pool)
            following = trained.following
            table = self._agree(trained.seconds, following)
            self.done += 1
            stops, parts, work = np.split(table, (1, 1 + len(self._parts)), axis=1)
            plans = [step.plan for step in trained.steps]
            record = reports.report(self.done, trained.loss, plans, parts, work)
            on_step(record | ({} if self._stages is None else {"encoders": trained.moved}))
            if stops.any() or self._is_due():
                self.checkpoint = self._checkpoints.save(self.done, self._model, self._optimizer)
            if stops.any() and following is not None:
                following.plans.result()  # its thread has gathered with those of the other ranks
            ahead = None if stops.any() else following

    def _is_due(self) -> bool:
        return self.done == self.num_steps or self.done % self._options.save_every == 0

    def _train(self, ahead: _Ahead, pool: ThreadPoolExecutor) -> _Trained:
        """Forward, backward and optimiser of a step, while the next one is loaded and planned."""
        start, watch = time.perf_counter(), self._watch
        with shared(f"step {self.done + 1}: plan"):
            steps = ahead.plans.result()
        seconds: dict[str, Any] = {"plan": time.perf_counter() - start}
        is_last = self.done + 1 == self.num_steps
        following = None if is_last else self._begin(self.done + 1, pool)
        give_samples = ahead.samples.result()
        with shared(f"step {self.done + 1}: encode"):
            encoded = give_samples()
        parts = zip(encoded.flows, steps, ahead.shares, strict=True)
        losses = [partial(self._loss_of, number, *part) for number, part in enumerate(parts)]
        begun = watch.now()
        loss = train_step(self._model, losses, where=f"step {self.done + 1}: train")
        trained = watch.lap("train", begun)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        watch.lap("optimizer", trained)
        laps = watch.read(encoded.laps)
        for (name, _), value in laps.items():
            seconds[name] = seconds.get(name, 0.0) + value
        seconds["backward"] = seconds.pop("train") - seconds["forward"]
        seconds["work"] = [laps.get(("work", number), 0.0) for number in range(len(losses))]
        seconds["total"] = time.perf_counter() - start
        return _Trained(steps, float(loss), seconds, encoded.moved, following)

    def _loss_of(
        self, number: int, flow: FlowBatch, step: Step, share: float, model: nn.Module
    ) -> Tensor:
        self._watch.microbatch = number
        with self._watch.timed("forward"):
            losses = flow.per_token_loss(model(flow.inputs, TimedStep(step, self._watch)))
            with self._watch.timed("waiting"):
                mean = step.mean(losses)
            return mean * share

    def _begin(self, step: int, pool: ThreadPoolExecutor) -> _Ahead:
        """Load this rank's samples of a step, and plan it, both in threads."""
        data, micros = self._prepared.data, self._prepared.schedule.microbatches(step)
        shapes = [data.shapes(numbers) for numbers in micros]
        own = [self._own(range(len(numbers))) for numbers in micros]
        lens = [[of[k].seq_len for k in places] for of, places in zip(shapes, own, strict=True)]
        tokens = [sum(shape.image_tokens for shape in of) for of in shapes]
        samples = pool.submit(self._load, [self._own(numbers) for numbers in micros])
        plans = self._parallel.plan_async(lens, sync=sync_of(self._model))
        return _Ahead(samples, plans, [num / sum(tokens) for num in tokens])

    def _own(self, numbers: range) -> range:
        return split(numbers, self._num_ranks)[self.rank]

    def _load(self, micros: list[range]) -> Callable[[], Encoded]:
        """What gives the samples with their noise; it encodes them, if that is not done here."""
        data, stages = self._prepared.data, self._stages
        if stages is None:
            made = Encoded(self._noised(map(data.samples, micros)), {})
            return lambda: made
        assert isinstance(data, PhotoStream)

        def encode(raw: Iterable[RawBatch]) -> Encoded:
            return Encoded(self._noised(stages.encode(list(raw))), stages.report())

        if self._encode_ahead is not None:
            return self._encode_ahead.run(lambda: encode(map(data.raw, micros)))
        return partial(encode, list(map(data.raw, micros)))

    def _noised(self, batches: Iterable[SampleBatch]) -> list[FlowBatch]:
        """With their noise, on the device."""
        build = partial(
            FlowBatch.build, seed=self._options.seed, device=self._device, dtype=self._dtype
        )
        return list(map(build, batches))

    def _agree(self, seconds: Mapping[str, Any], following: _Ahead | None) -> Any:
        """What all ranks measured, and whether one stops; or the error that one of them met.

        Returns:
            (ranks, 1 + parts + microbatches).
        """
        start = time.perf_counter()
        error = None if following is None else following.samples.exception()
        waited = time.perf_counter() - start
        known = {"data": waited, **seconds}
        own = [float(self._is_stopping()), *(known.get(name, 0.0) for name in self._parts)]
        numbers = np.array([*own, *seconds["work"]])
        said = agree(
            self._group,
            {},
            error if isinstance(error, Exception) else None,
            what="the end of a step",
            step=self.done + 1,
            values=numbers.view(np.int64),
            capacity=numbers.size,
        )
        return np.stack([row.view(np.float64) for row in said])

    def _agreed(self) -> Prepared:
        """The same options and data on all ranks, and no error on any."""
        found, error, settings = None, None, dict[str, str]()
        try:
            found = prepare(self._options, rank=self.rank, world_size=self._num_ranks)
            settings = found.settings
        except ConfigError as met:
            error = met
        facts = {
            "settings": str(sorted(settings.items())),
            "other options": str(self._options),
            "checkpoint": str(found and found.checkpoint),
        }
        agree(
            self._group,
            facts if error is None else dict.fromkeys(facts, ""),
            error,
            what="bascule train",
        )
        assert found is not None
        return found

    def _make_stages(self) -> EncoderStages | None:
        options, prepared = self._options, self._prepared
        if not prepared.encoders:
            return None
        watch_encoders(prepared.encoders, self._encoding)
        return EncoderStages(
            prepared.encoders,
            self._mesh,
            widths=prepared.data,
            seed=options.seed,
            watch=self._encoding,
            options=EncoderOptions(device=self._device, timeout_s=options.timeout_s),
        )

    def _make_parallel(self) -> SequenceParallel:
        options, prepared = self._options, self._prepared
        cost, cluster = cost_of(prepared, options, self._device), prepared.cluster
        if cluster is not None:
            passes = TRAINING if options.checkpoint else WITHOUT_RECOMPUTING
            if options.gamma is None:  # then both passes were timed
                passes = passes.over(WITHOUT_RECOMPUTING)
            cost, cluster = in_passes(cost, cluster, passes)
        return SequenceParallel(
            self._mesh,
            prepared.topology,
            cost,
            cluster=cluster,
            plan_group=self._group.process_group,
            timeout_s=options.timeout_s,
            kernel=options.kernel,
            device=self._device,
        )
