"""A run of `bascule train` on its ranks: load, plan behind the step, train, log, save."""

import importlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bascule.arrays import Floats
from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.groups import new_group
from bascule.errors import ConfigError, RemoteConfigError
from bascule.models import Exchange, MMDiTConfig
from bascule.parallel import PlanFuture, SequenceParallel, Step
from bascule.plan.machine import TRAINING, WITHOUT_RECOMPUTING, Cluster, HardwareProfile, in_passes
from bascule.plan.metrics import imbalance
from bascule.plan.plan import Plan
from bascule.plan.topology import Topology
from bascule.train.checkpoints import Checkpoints, check_facts, newest_checkpoint, step_of
from bascule.train.encoders import EncoderStages, FrozenEncoders, load_encoders, watch_encoders
from bascule.train.flow import FlowBatch
from bascule.train.model import PROBED_STEPS, build_model, cost_of, model_config
from bascule.train.options import Schedule, TrainOptions, schedule_of, settings_of, split
from bascule.train.stepping import sync_of, train_step
from bascule.train.stopwatch import Lap, Stopwatch, TimedStep, watch_blocks
from bascule.workload.codes import num_ranks_of, parse_data_codes
from bascule.workload.photos import Gather, PhotoStream
from bascule.workload.streams import ManifestStream, RawBatch, SampleBatch, SyntheticStream

PARTS = tuple(  # of a step, that are timed; "samples" to "restore" are of the forward
    "data plan samples route attend restore waiting forward backward optimizer total".split()
)
_NUM_RATES = 20
_EVEN = 1.05


class StepReports:
    """Compares steps with plans; the median rate of earlier steps gives a prediction in seconds."""

    def __init__(self, parts: Sequence[str] = PARTS) -> None:
        self._parts = parts
        self._rates: deque[float] = deque(maxlen=_NUM_RATES)

    def report(
        self, step: int, loss: float, plans: Sequence[Plan], seconds: Floats, work: Floats
    ) -> dict[str, Any]:
        """Return a record from seconds (ranks, parts) and work in blocks (ranks, microbatches)."""
        loads = np.stack([plan.loads for plan in plans], axis=1)
        rate = median(self._rates) if self._rates else None
        predicted, measured = float(loads.max(axis=0).sum()), float(work.max(axis=0).sum())
        if loads.sum() > 0:
            self._rates.append(float(work.sum() / loads.sum()))
        loads, work = loads.sum(axis=1), work.sum(axis=1)
        mean_s, max_s = seconds.mean(axis=0).tolist(), seconds.max(axis=0).tolist()
        return {
            "step": step,
            "loss": loss,
            "sequences": sum(int(plan.seq_lens.size) for plan in plans),
            "tokens": sum(int(plan.seq_lens.sum()) for plan in plans),
            "topology": " ".join(dict.fromkeys(str(plan.topology) for plan in plans)),
            "mean_s": dict(zip(self._parts, mean_s, strict=True)),
            "max_s": dict(zip(self._parts, max_s, strict=True)),
            "makespan_s": {"predicted": rate and predicted * rate, "measured": measured},
            "imbalance": {"predicted": imbalance(loads), "measured": imbalance(work)},
            "slowest": _slowest(loads, work),
        }


def _slowest(loads: Floats, work: Floats) -> dict[str, Any]:
    """Find the slowest rank, and the reason: its plan or its speed."""
    rank = int(work.argmax())
    planned = float(loads[rank] / max(loads.mean(), 1e-300))
    took = float(work[rank] / max(work.mean(), 1e-300))
    if took < _EVEN:
        why = "ranks are even"
    elif planned - 1 >= (took - 1) / 2:
        why = "more work was planned for it"
    else:
        why = "slower than planned"
    return {"rank": rank, "planned": planned, "took": took, "why": why}


class MetricsLog:
    """Records of a run in `metrics.jsonl` and TensorBoard; those after `first_step` are removed."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._path, self._board = folder / "metrics.jsonl", None
        new = self._path.with_suffix(".tmp")
        with _writing(self._path):
            new.write_text("".join(_lines_until(self._path, first_step)))
            new.replace(self._path)
            self._file = self._path.open("a")
            try:
                board: Any = importlib.import_module("torch.utils.tensorboard")
            except ImportError:
                return
            self._board = board.SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record of a step."""
        with _writing(self._path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in _scalars(record):
                    self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Write what is buffered, and close the files."""
        with _writing(self._path):
            self._file.close()
            if self._board is not None:
                self._board.close()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def _lines_until(path: Path, step: int) -> Iterator[str]:
    """Yield the whole lines up to a step; a kill may have cut the last one."""
    for line in path.read_text().splitlines() if step and path.exists() else ():
        try:
            if json.loads(line)["step"] <= step:
                yield f"{line}\n"
        except ValueError:
            continue


def _scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record by names such as "imbalance/measured"."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield prefix + name, float(value)


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that follows from options and data alone, the same on all ranks."""

    data: PhotoStream | SyntheticStream | ManifestStream  # samples by number
    encoders: FrozenEncoders
    schedule: Schedule
    config: MMDiTConfig
    settings: dict[str, str]  # that decide the losses
    topology: Topology | str
    cluster: Cluster | None  # prices the wires of topology "auto"
    checkpoint: Path | None  # to resume from


def prepare(
    options: TrainOptions, *, rank: int = 0, world_size: int = 1, gather: Gather | None = None
) -> Prepared:
    """Open the data, and refuse all that can be refused before ranks meet."""
    topology, cluster = options.check(world_size), None
    if topology == "auto":
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        cluster = HardwareProfile.load(options.profile).cluster(world_size // per_node, per_node)
    encoders = load_encoders(options)
    if options.data is not None:
        codes = parse_data_codes(options.data)
        data = SyntheticStream(codes, world_size=num_ranks_of(codes), seed=options.seed)
    elif options.manifest is not None:
        data = ManifestStream(options.read_manifest(options.max_tokens), 1, seed=options.seed)
    else:
        assert options.photos is not None
        data = PhotoStream(
            options.photos,
            1,
            rank=rank,
            world_size=world_size,
            seed=options.seed,
            options=encoders.photo_options(options),
            gather=gather,
        )
    schedule = schedule_of(options, data.num_samples)
    settings = settings_of(options, data.digest, schedule) | encoders.settings
    checkpoint = newest_checkpoint(options.out)
    if checkpoint is not None:
        if not options.resume:
            raise ConfigError(
                f"--out {options.out} has the checkpoint {checkpoint.name} of an earlier run: go "
                "on with --resume, or give another folder"
            )
        check_facts(checkpoint, settings, schedule)
    config = model_config(options, data)
    return Prepared(data, encoders, schedule, config, settings, topology, cluster, checkpoint)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The samples of a step, ready for the model."""

    flows: list[FlowBatch]  # of the microbatches, with their noise
    moved: Mapping[str, Any]  # by the encoders
    laps: list[Lap]  # of another thread that encoded


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step whose samples a thread loads, and whose plan another one makes."""

    samples: Future[Callable[[], _Encoded]]
    plans: PlanFuture
    shares: list[float]


class TrainingRun:
    """A run that all ranks make and run together; if one `is_stopping`, all save and end."""

    @shared("construction of a training run")
    def __init__(
        self, options: TrainOptions, device: torch.device, is_stopping: Callable[[], bool]
    ) -> None:
        self.rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._options, self._device, self._is_stopping = options, device, is_stopping
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self.folder = options.out
        every = range(self._num_ranks)
        self._group = new_group(every, "train", options.timeout_s, backend="gloo")
        self._prepared = prepared = self._agree_on_options()
        self.num_steps = prepared.schedule.num_steps
        self.data_lines: list[str] = getattr(prepared.data, "data_lines", [])
        self._mesh = init_device_mesh(device.type, (self._num_ranks,))
        self._parallel = self._make_parallel()
        self._model = build_model(
            prepared.config,
            self._mesh,
            seed=options.seed,
            checkpoint=options.checkpoint,
            dtype=self._dtype,
        )
        self._watch = Stopwatch(device)
        watch_blocks([*self._model.double_blocks, *self._model.single_blocks], self._watch)
        self._parts, self._stages = PARTS, None
        self._encoding = Stopwatch(device) if options.encode_ahead else self._watch
        self._stream: torch.cuda.Stream | None = None
        if prepared.encoders:
            watch_encoders(prepared.encoders, self._encoding)
            self._stages = EncoderStages(
                prepared.encoders, self._mesh, prepared.data, options, device, self._encoding
            )
            self._parts = (*PARTS, *self._stages.last)
            if options.encode_ahead and device.type == "cuda":
                self._stream = torch.cuda.Stream(device)
                self._stream.wait_stream(torch.cuda.current_stream(device))  # for the weights
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=options.lr, fused=True)
        facts = prepared.settings, prepared.schedule
        self._checkpoints = Checkpoints(options.out, self._group, *facts, options.keep)
        self.checkpoint = prepared.checkpoint  # the last one that was loaded or saved
        self.done = 0  # steps, with those before a resume
        if self.checkpoint is not None:
            self._checkpoints.load(self.checkpoint, self._model, self._optimizer)
            self.done = step_of(self.checkpoint)

    def _agree_on_options(self) -> Prepared:
        """Prepare on all ranks; raise if options or data differ, or one rank fails."""
        prepared, error, facts = None, None, dict[str, str]()
        try:
            gather = partial(agree, self._group, what="bascule train")
            ranks = {"rank": self.rank, "world_size": self._num_ranks}
            prepared = prepare(self._options, **ranks, gather=gather)
            facts["settings"] = str(sorted(prepared.settings.items()))
            facts["other options"] = str(self._options)
            facts["checkpoint"] = str(prepared.checkpoint)
        except RemoteConfigError:  # all ranks met it
            raise
        except ConfigError as refusal:
            error = refusal
        agree(self._group, facts, error, what="bascule train")
        assert prepared is not None
        return prepared

    def _make_parallel(self) -> SequenceParallel:
        options, prepared = self._options, self._prepared

        def longest() -> int:
            first = range(prepared.schedule.samples_until(PROBED_STEPS))
            return max(shape.seq_len for shape in prepared.data.shapes(first))

        cost, cluster = cost_of(options, prepared.config, longest, self._device), prepared.cluster
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

    def run(self, on_step: Callable[[dict[str, Any]], None]) -> None:
        """Train until the last step or a stop, and save; rank 0 calls `on_step` with records."""
        reports = StepReports(self._parts)
        with (
            shared("bascule train"),
            ThreadPoolExecutor(1, "bascule data") as pool,
            closing(MetricsLog(self.folder, self.done)) if self.rank == 0 else nullcontext() as log,
        ):

            def log_step(record: dict[str, Any]) -> None:
                if log is not None:
                    log.write(record)
                    on_step(record)

            ahead = self._begin(self.done, pool) if self.done < self.num_steps else None
            while ahead is not None:
                ahead = self._train(ahead, pool, reports, log_step)

    def _begin(self, step: int, pool: ThreadPoolExecutor) -> _Ahead:
        """Load this rank's samples of a step, and plan it, both in threads."""
        data, micros = self._prepared.data, self._prepared.schedule.microbatches(step)
        shapes = [data.shapes(numbers) for numbers in micros]
        lens = [[one.seq_len for one in self._own(whole)] for whole in shapes]
        tokens = [sum(shape.image_tokens for shape in whole) for whole in shapes]
        samples = pool.submit(self._load, [self._own(numbers) for numbers in micros])
        plans = self._parallel.plan_async(lens, sync=sync_of(self._model))
        return _Ahead(samples, plans, [num / sum(tokens) for num in tokens])

    def _own(self, samples: Any) -> Any:
        return split(samples, self._num_ranks)[self.rank]

    def _train(
        self,
        ahead: _Ahead,
        pool: ThreadPoolExecutor,
        reports: StepReports,
        on_step: Callable[[dict[str, Any]], None],
    ) -> _Ahead | None:
        """Train a step while the next one is loaded and planned; log it, and save if it is due."""
        start, watch, number = time.perf_counter(), self._watch, self.done + 1
        with shared(f"step {number}: plan"):
            steps = ahead.plans.result()
        seconds = {"plan": time.perf_counter() - start}
        following = None if number == self.num_steps else self._begin(number, pool)
        finish = ahead.samples.result()
        with shared(f"step {number}: encode"):
            encoded = finish()
        parts = zip(encoded.flows, steps, ahead.shares, strict=True)
        losses = [partial(self._loss_of, place, *part) for place, part in enumerate(parts)]
        moment = watch.now()
        loss = train_step(self._model, losses, where=f"step {number}: train")
        moment = watch.lap("train", moment)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        watch.lap("optimizer", moment)
        laps = watch.read(encoded.laps)
        for (name, _), value in laps.items():
            seconds[name] = seconds.get(name, 0.0) + value
        seconds["backward"] = seconds.pop("train") - seconds["forward"]
        seconds["total"] = time.perf_counter() - start
        work = [laps.get(("work", place), 0.0) for place in range(len(losses))]
        stops, parts_s, work_s = self._gather(seconds, work, following)
        self.done = number
        plans = [step.plan for step in steps]
        record = reports.report(number, float(loss), plans, parts_s, work_s)
        on_step(record | ({} if self._stages is None else {"encoders": encoded.moved}))
        if stops or number == self.num_steps or number % self._options.save_every == 0:
            self.checkpoint = self._checkpoints.save(number, self._model, self._optimizer)
        if stops and following is not None:
            following.plans.result()  # its thread has gathered with those of the other ranks
        return None if stops else following

    def _loss_of(
        self, number: int, flow: FlowBatch, step: Step, share: float, model: nn.Module
    ) -> Tensor:
        self._watch.microbatch = number
        with self._watch.timed("forward"):
            exchange: Exchange = TimedStep(step, self._watch)
            losses = flow.per_token_loss(model(flow.inputs, exchange))
            with self._watch.timed("waiting"):
                mean = step.mean(losses)
            return mean * share

    def _load(self, micros: list[range]) -> Callable[[], _Encoded]:
        """Load samples in a thread; the thread that trains calls the result."""
        data, stages = self._prepared.data, self._stages
        if stages is None:
            flows = self._flows(map(data.samples, micros))
            return lambda: _Encoded(flows, {}, [])
        assert isinstance(data, PhotoStream)
        if not self._options.encode_ahead:
            return partial(self._encode, stages, list(map(data.raw, micros)))
        with shared("encoding ahead"), torch.cuda.stream(self._stream):  # None is no stream
            encoded = self._encode(stages, list(map(data.raw, micros)))
            if self._stream is not None:
                self._stream.synchronize()
        encoded = replace(encoded, laps=self._encoding.take())

        def finish() -> _Encoded:
            for flow in encoded.flows if self._stream is not None else ():
                flow.record_stream(torch.cuda.current_stream())
            return encoded

        return finish

    def _encode(self, stages: EncoderStages, raw: list[RawBatch]) -> _Encoded:
        return _Encoded(self._flows(stages.encode(raw)), stages.report(), [])

    def _flows(self, batches: Iterable[SampleBatch]) -> list[FlowBatch]:
        seed, device, dtype = self._options.seed, self._device, self._dtype
        return [FlowBatch.build(one, seed=seed, device=device, dtype=dtype) for one in batches]

    def _gather(
        self, seconds: Mapping[str, float], work: list[float], following: _Ahead | None
    ) -> tuple[bool, Floats, Floats]:
        """Gather stops, seconds (ranks, parts), work (ranks, microbatches), and errors of loads."""
        start = time.perf_counter()
        error = None if following is None else following.samples.exception()
        known = {"data": time.perf_counter() - start, **seconds}
        parts = [known.get(name, 0.0) for name in self._parts]
        numbers = np.array([*parts, *work, float(self._is_stopping())])
        rows = agree(
            self._group,
            {},
            error if isinstance(error, Exception) else None,
            what="the end of a step",
            step=self.done + 1,
            values=numbers.view(np.int64),
            capacity=numbers.size,
        )
        table = np.stack([row.view(np.float64) for row in rows])
        return bool(table[:, -1].any()), table[:, : len(parts)], table[:, len(parts) : -1]
