"""Train as loaded, balanced in the model, or by the loader. Shapes: A ways, S stages, R ranks."""

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bascule.arrays import Floats
from bascule.attention import PackedSequences, attend_packed
from bascule.bench.options import BenchOptions
from bascule.comm.agree import agree
from bascule.comm.collectives import all_gather, all_reduce
from bascule.comm.groups import RankGroup, device_of
from bascule.data.loader import BalancedLoader, LoaderOptions
from bascule.data.steps import Batch
from bascule.encoders import EncoderOptions
from bascule.errors import ConfigError
from bascule.models import Exchange, LocalExchange, MMDiT
from bascule.parallel import SequenceParallel, Step
from bascule.plan import metrics
from bascule.plan.costs import FLOPS_PER_UNIT, TransformerCost
from bascule.plan.plan import Plan
from bascule.plan.topology import Topology
from bascule.train.encoders import (
    TRANSFORMER,
    EncoderStages,
    FrozenEncoders,
    load_encoders,
    watch_encoders,
)
from bascule.train.flow import FlowBatch
from bascule.train.stopwatch import Stopwatch, watch_blocks
from bascule.workload.photos import PhotoStream
from bascule.workload.streams import (
    RawBatch,
    SampleBatch,
    SampleStream,
    SyntheticStream,
    pack_batch,
)

ARMS = ("unbalanced", "balanced")
MEASURES = ("seconds", "work", "predicted")  # of a stage: all, work, work in units of its cost

Encode = Callable[[list[RawBatch]], list[SampleBatch]]
LossOf = Callable[[nn.Module], Tensor]


class Samples:
    """The samples of this rank, step by step, and sums over all ranks of the job."""

    def __init__(self, options: BenchOptions, device: torch.device, group: RankGroup) -> None:
        self.options, self.device, self.group = options, device, group
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.encoders = self._agreed_encoders()
        self.stream = open_stream(options, self.encoders, group.rank, group.size)
        self._loaded: dict[int, list[Any]] = {}

    def _agreed_encoders(self) -> FrozenEncoders:
        encoders, error = FrozenEncoders(), None
        if not self.options.encodes:
            return encoders
        try:
            encoders = load_encoders(self.options)
        except ConfigError as refusal:
            error = refusal
        agree(self.group, {"encoders": str(encoders.settings)}, error, what="bascule bench")
        return encoders

    def load(self, step: int) -> list[Any]:
        """Return the microbatches of a step, raw before encoders; a rank's error ends all ranks."""
        if step in self._loaded:
            return self._loaded[step]
        batches, error, accumulate = [], None, self.options.accumulate
        try:
            batches = [self._read(step * accumulate + micro) for micro in range(accumulate)]
        except (ConfigError, OSError) as refusal:
            error = refusal
        agree(self.group, {}, error, what="loading a batch", step=step + 1)
        kept = {old: x for old, x in self._loaded.items() if old == step - 1}
        self._loaded = kept | {step: batches}
        return batches

    def _read(self, number: int) -> SampleBatch | RawBatch:
        if not self.encoders:
            return self.stream.batch(number)
        photos = cast(PhotoStream, self.stream)
        return photos.raw(photos.numbers(number))

    def longest(self, num_steps: int) -> int:
        """Return the tokens of the longest sample of all ranks in the first steps; 256 at least."""
        lens = [lens_of(batch)[0] for step in range(num_steps) for batch in self.load(step)]
        longest = torch.tensor([max([256, *(n for each in lens for n in each)])])
        call = "all_gather (longest sequence)"
        return int(all_gather(self.group, call, longest.to(device_of(self.group))).max())

    def flow(self, batch: SampleBatch) -> FlowBatch:
        """Add noise to a batch, and bring it to the device."""
        return FlowBatch.build(batch, seed=self.options.seed, device=self.device, dtype=self.dtype)

    def reduced(self, numbers: Sequence[float], what: str, step: int) -> list[float]:
        """Return the sums of numbers over all ranks."""
        values = torch.tensor(numbers, dtype=torch.float64, device=device_of(self.group))
        return all_reduce(self.group, f"step {step}: all_reduce ({what})", values).tolist()

    def gathered(self, numbers: Floats, what: str, step: int) -> Floats:
        """Return (.., R) numbers of all ranks."""
        values = torch.from_numpy(numbers.reshape(-1)).to(device_of(self.group))
        table = all_gather(self.group, f"step {step}: all_gather ({what})", values).cpu().numpy()
        return np.moveaxis(table.reshape(-1, *numbers.shape), 0, -1)

    def slowest(self, seconds: Sequence[float], step: int) -> list[float]:
        """Return each of some seconds on the rank where it is largest."""
        return self.gathered(np.array(seconds), "seconds", step).max(axis=-1).tolist()


class AsLoaded:
    """Training on samples as loaded. All ranks call each method, in the order of this class."""

    def __init__(self, samples: Samples, encode: Encode | None = None) -> None:
        self.samples, self._encode = samples, encode

    def prepare(self, step: int) -> list[LossOf]:
        """Load a step; return losses: their sum's mean over ranks is the mean over image tokens."""
        batches = self.samples.load(step)
        tokens = sum(sum(lens_of(batch)[1]) for batch in batches)
        (total,) = self.samples.reduced([tokens], "image tokens", step + 1)
        factor = self.samples.group.size / max(total, 1.0)
        return [partial(self.loss, self._maker(batch), factor) for batch in batches]

    def begin(self) -> None:
        """Start what shall run behind the step. Timed, as the step is."""

    def finish(self) -> None:
        """Wait for what ran behind the step. Timed."""

    def facts(self, step: int) -> dict[str, Any]:
        """Return "plan" of the step, and more to record; the same on every rank."""
        return {}

    def close(self) -> None:
        """End what runs behind the steps."""

    def exchange(self, seq_lens: list[int]) -> Exchange:
        """Return the exchange with which a model computes these sequences."""
        device, kernel = self.samples.device, self.samples.options.kernel
        seqs = PackedSequences.build(seq_lens, device)

        def attend(q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
            return attend_packed(q, k, v, seqs, kernel=kernel)

        return LocalExchange(seq_lens, attend=attend, device=device)

    def loss(self, make: Callable[[], FlowBatch], factor: float, model: nn.Module) -> Tensor:
        """Return the sum of the losses of all tokens, times a factor."""
        flow = make()
        predicted = model(flow.inputs, self.exchange(flow.seq_lens))
        return flow.per_token_loss(predicted).double().sum() * factor

    def _maker(self, batch: Any) -> Callable[[], FlowBatch]:
        """Return a function that makes the inputs of the model; encoding is a part of the step."""
        if self._encode is not None:
            encode = self._encode
            return lambda: self.samples.flow(encode([batch])[0])
        flow = self.samples.flow(batch)
        return lambda: flow


class InTheModel(AsLoaded):
    """Balance inside the model: bags of ranks share sequences."""

    step: Step | None  # the last one

    def __init__(
        self,
        samples: Samples,
        mesh: DeviceMesh,
        topology: Topology,
        cost: TransformerCost,
        encode: Encode | None = None,
    ) -> None:
        super().__init__(samples, encode)
        self.cost, self.step = cost, None
        options = samples.options
        self._parallel = SequenceParallel(
            mesh,
            topology,
            cost,
            timeout_s=options.timeout_s,
            planner=options.planner,
            kernel=options.kernel,
            device=samples.device,
        )

    def exchange(self, seq_lens: list[int]) -> Exchange:
        """Plan these sequences over all ranks."""
        self.step = self._parallel.plan(seq_lens)
        return self.step

    def facts(self, step: int) -> dict[str, Any]:
        """Return the metrics of the plan, with what all ranks sent."""
        assert self.step is not None
        (sent,) = self.samples.reduced([self.step.traffic.total], "sent bytes", step + 1)
        return {"plan": self.step.metrics() | _totals([self.step.plan], self.cost, sent)}


class InTheLoader(AsLoaded):
    """Balance in the data loader: whole samples change ranks, and a bag is one rank.

    The loader's thread gets the next step when a step begins, which ends when that is made: what
    compute does not hide is measured, and the thread rests while the other way is timed.
    """

    def __init__(self, samples: Samples, mesh: DeviceMesh, cost: TransformerCost) -> None:
        super().__init__(samples)
        self._cost, self._feed = cost, queue.SimpleQueue[list[SampleBatch] | None]()
        self._loader = BalancedLoader(
            map(split_samples, self._fed()),
            cost=cost,
            length_fn=lambda sample: len(sample["is_image"]),
            mesh_or_group=mesh,
            accumulate=samples.options.accumulate,
            options=LoaderOptions(
                weight_fn=lambda sample: len(sample["image"]),  # the loss is a mean over these
                ends="finish",
                prefetch=1,
                collate_fn=join_samples,
                timeout_s=samples.options.timeout_s,
            ),
        )
        self._batches = iter(self._loader)
        self._following: list[SampleBatch] = []
        self._dealt, self._ready = list[Batch](), list[Batch]()
        self._before: dict[str, Any] = {}

    def _fed(self) -> Iterator[SampleBatch]:
        while (step := self._feed.get()) is not None:
            yield from step

    def prepare(self, step: int) -> list[LossOf]:
        """Return the microbatches that the loader dealt; a loss is scaled as in a user's loop."""
        if not self._ready:
            self._feed.put(self.samples.load(step))
            self.finish()
        self._following = self.samples.load(step + 1)
        self._dealt, self._ready = self._ready, []
        self._before = self._loader.metrics()
        losses = list[LossOf]()
        for batch in self._dealt:
            data = self._no_samples() if batch.data is None else cast(SampleBatch, batch.data)
            mean = batch.loss_scale / self.samples.options.accumulate / max(sum(data.image_lens), 1)
            losses.append(partial(self.loss, self._maker(data), mean))
        return losses

    def begin(self) -> None:
        """Give the loader's thread the next step."""
        self._feed.put(self._following)

    def finish(self) -> None:
        """Take the next step from the loader."""
        self._ready = [next(self._batches) for _ in range(self.samples.options.accumulate)]

    def facts(self, step: int) -> dict[str, Any]:
        """Return "plan", and "exchange": seconds of the slowest rank, all, exposed and hidden."""
        plans = [batch.plan for batch in self._dealt]
        before = [plan.unbalanced_loads(self._cost) for plan in plans]
        after, verdict = self._loader.metrics(), self._dealt[0].verdict
        names = ("exchange_s", "exposed_s", "hidden_s")
        spent = [after[name] - self._before[name] for name in names]
        seconds = self.samples.slowest(spent, step + 1)
        local = after["sent_bytes"] - self._before["sent_bytes"]
        (sent,) = self.samples.reduced([local], "sent bytes", step + 1)
        plan = {
            "makespan": sum(plan.makespan for plan in plans),
            "makespan_unbalanced": sum(float(loads.max()) for loads in before),
            "imbalance": float(np.mean([plan.imbalance for plan in plans])),
            "imbalance_unbalanced": float(np.mean([metrics.imbalance(loads) for loads in before])),
            "wir": float(np.mean([plan.wir for plan in plans])),
            "wir_unbalanced": float(np.mean([metrics.wir(loads) for loads in before])),
            "tokens": np.sum([plan.tokens for plan in plans], axis=0).tolist(),
            "moved_tokens": sum(plan.moved_tokens for plan in plans),
            "applied": verdict.applied,
            "reason": verdict.reason,
            **_totals(plans, self._cost, sent),
        }
        exchange = dict(zip(names, seconds, strict=True)) | {"sent_bytes": int(sent)}
        return {"plan": plan, "exchange": exchange}

    def close(self) -> None:
        """End the loader's thread."""
        self._feed.put(None)
        self._loader.close()

    def _no_samples(self) -> SampleBatch:
        stream = self.samples.stream
        widths = {"image": stream.in_channels, "text": stream.text_dim, "pooled": stream.vec_dim}
        empty = {name: torch.empty(0, width) for name, width in widths.items()}
        return pack_batch([], **empty, ids=[])


class Stages:
    """Encoders before both ways, of each rank alone or of all, with a clock on every stage."""

    def __init__(self, samples: Samples, mesh: DeviceMesh) -> None:
        self._samples, self._watch = samples, Stopwatch(samples.device)
        self._names = (*samples.encoders.stages, TRANSFORMER)
        self._times = np.zeros((len(ARMS), len(self._names), 2))
        watch_encoders(samples.encoders, self._watch)
        shape, axes = (samples.group.size, 1), ("ranks", "alone")
        alone = init_device_mesh(samples.device.type, shape, mesh_dim_names=axes)["alone"]
        timeout_s = samples.options.timeout_s
        self._stages = [
            EncoderStages(
                samples.encoders,
                ranks,
                widths=samples.stream,
                seed=samples.options.seed,
                watch=self._watch,
                options=EncoderOptions(device=samples.device, timeout_s=timeout_s),
            )
            for ranks in (alone, mesh)
        ]

    @property
    def encode(self) -> list[Encode]:
        """The encoders of either way."""
        return [stages.encode for stages in self._stages]

    def watch(self, model: MMDiT) -> None:
        """Time the blocks of a model."""
        watch_blocks([*model.double_blocks, *model.single_blocks], self._watch)

    def read(self, arm: int, total: float) -> None:
        """Keep the seconds of the stages of a step of this rank, which took so long in all."""
        laps = self._watch.read()
        seconds = [laps[name, 0] for name in self._names[:-1]]
        work = [laps[f"{name} work", 0] for name in self._names[:-1]]
        self._times[arm] = np.array([[*seconds, total - sum(seconds)], [*work, laps["work", 0]]]).T

    def facts(self, way: InTheModel, step: int) -> dict[str, Any]:
        """Return "stages": by way, stage and measure, a number for each rank."""
        assert way.step is not None
        plan, none = way.step.plan, [0.0] * self._samples.group.size
        loads = {TRANSFORMER: (plan.unbalanced_loads(way.cost).tolist(), plan.loads.tolist())}
        for name, encoding in self._stages[1].last.items():
            loads[name] = none, none
            if encoding is not None:
                loads[name] = list(encoding.loads_as_given), list(encoding.loads)
        times_AS2R = self._samples.gathered(self._times, "seconds of stages", step + 1)
        return {
            "stages": {
                name: {
                    stage: dict(
                        zip(
                            MEASURES,
                            (*times_AS2R[arm, place].tolist(), loads[stage][arm]),
                            strict=True,
                        )
                    )
                    for place, stage in enumerate(self._names)
                }
                for arm, name in enumerate(ARMS)
            }
        }


def open_stream(
    options: BenchOptions, encoders: FrozenEncoders, rank: int, world_size: int
) -> SampleStream:
    """Open the samples of one rank."""
    ranks = {"rank": rank, "world_size": world_size, "seed": options.seed}
    if options.data is not None:
        return SyntheticStream(options.data, **ranks)
    assert options.photos is not None
    photos = encoders.photo_options(options)
    return PhotoStream(options.photos, options.batch_size, **ranks, options=photos)


def _totals(plans: Sequence[Plan], cost: TransformerCost, sent: float) -> dict[str, Any]:
    lens = np.concatenate([plan.seq_lens for plan in plans])
    return {
        "total_tokens": int(lens.sum()),
        "forward_flops": float(replace(cost, gamma=1.0)(lens).sum()) * FLOPS_PER_UNIT,
        "sent_bytes": int(sent),
        "single_binds": all(plan.binding is not None for plan in plans),
    }


def lens_of(batch: SampleBatch | RawBatch) -> tuple[list[int], list[int]]:
    """Return tokens, and image tokens, of each sample of a batch."""
    if isinstance(batch, SampleBatch):
        return batch.seq_lens, batch.image_lens
    return [one.seq_len for one in batch.shapes], [one.image_tokens for one in batch.shapes]


def split_samples(batch: SampleBatch) -> list[dict[str, Tensor]]:
    """Return the samples of a batch, one by one, as views of it."""
    text_lens = [n - m for n, m in zip(batch.seq_lens, batch.image_lens, strict=True)]
    parts = {
        "image": batch.image.split(batch.image_lens),
        "text": batch.text.split(text_lens),
        "is_image": batch.is_image.split(batch.seq_lens),
        "pos": batch.pos.split(batch.seq_lens),
        "pooled": batch.pooled.unbind(),
        "sample_id": batch.sample_ids.unbind(),
    }
    return [{name: part[k] for name, part in parts.items()} for k in range(len(batch.seq_lens))]


def join_samples(samples: Sequence[dict[str, Tensor]]) -> SampleBatch:
    """Return one or more samples as a batch."""
    joined = {
        name: torch.cat([one[name] for one in samples])
        for name in ("image", "text", "is_image", "pos")
    }
    return SampleBatch(
        **joined,
        pooled=torch.stack([sample["pooled"] for sample in samples]),
        sample_ids=torch.stack([sample["sample_id"] for sample in samples]),
        seq_lens=[len(sample["is_image"]) for sample in samples],
        image_lens=[len(sample["image"]) for sample in samples],
    )
