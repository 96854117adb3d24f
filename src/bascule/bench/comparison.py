"""Train without balancing, and with it on each topology, on the same batches, in turns.

Way 0 is without. Shapes: N steps, W ways, S stages, R ranks.
"""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from bascule.arrays import Floats
from bascule.attention import PackedSequences, attend_packed
from bascule.bench.options import BenchOptions
from bascule.calibrate.timed import now
from bascule.comm.agree import agree
from bascule.comm.collectives import all_gather, all_reduce
from bascule.comm.groups import RankGroup, device_of, member_of, resolve
from bascule.data.loader import BalancedLoader, LoaderOptions
from bascule.data.steps import Batch
from bascule.errors import ConfigError
from bascule.machine.cluster import KNOWN_PROFILES, TRAINING, WITHOUT_RECOMPUTING
from bascule.machine.costs import FLOPS_PER_UNIT, TransformerCost
from bascule.models import Exchange, LocalExchange, MMDiT
from bascule.parallel import SequenceParallel, Step
from bascule.plan import metrics
from bascule.plan.plan import Plan
from bascule.plan.topology import Topology
from bascule.train import train_step
from bascule.train.encoders import (
    TRANSFORMER,
    EncoderStages,
    FrozenEncoders,
    load_encoders,
    watch_encoders,
)
from bascule.train.flow import FlowBatch
from bascule.train.model import PROBED_STEPS, build_model, cost_of, model_config
from bascule.train.photos import Gather, PhotoStream
from bascule.train.stopwatch import Stopwatch, watch_blocks
from bascule.train.streams import (
    ManifestStream,
    RawBatch,
    SampleBatch,
    SampleStream,
    SyntheticStream,
    pack_batch,
)

ARMS = ("unbalanced", "balanced")

Encode = Callable[[list[RawBatch]], list[SampleBatch]]
LossOf = Callable[[nn.Module], Tensor]


class Samples:
    """The samples of this rank, step by step, and sums over all ranks of the job."""

    def __init__(self, options: BenchOptions, device: torch.device, group: RankGroup) -> None:
        self.options, self.device, self.group = options, device, group
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.encoders = self._agreed_encoders()
        gather = partial(agree, group, what="bascule bench")
        self.stream = open_stream(options, self.encoders, group.rank, group.size, gather)
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

    def longest(self) -> int:
        """Return the tokens of the longest sample of all ranks in the first steps."""
        lens = [lens_of(batch)[0] for step in range(PROBED_STEPS) for batch in self.load(step)]
        longest = torch.tensor([max([0, *(n for each in lens for n in each)])])
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
            map(split_samples, chain.from_iterable(iter(self._feed.get, None))),
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
    """Encoders before all ways, of each rank alone or of all, with a clock on every stage."""

    def __init__(self, samples: Samples, mesh: DeviceMesh, num_ways: int) -> None:
        self._samples, self._watch = samples, Stopwatch(samples.device)
        self._names = (*samples.encoders.stages, TRANSFORMER)
        self._times = np.zeros((num_ways, len(self._names), 2))
        watch_encoders(samples.encoders, self._watch)
        shape, axes = (samples.group.size, 1), ("ranks", "alone")
        alone = init_device_mesh(samples.device.type, shape, mesh_dim_names=axes)["alone"]
        common = samples.stream, samples.options, samples.device, self._watch
        stages = [EncoderStages(samples.encoders, ranks, *common) for ranks in (alone, mesh)]
        self.encode, self._balanced = [stage.encode for stage in stages], stages[1]

    def watch(self, model: MMDiT) -> None:
        """Time the blocks of a model."""
        watch_blocks([*model.double_blocks, *model.single_blocks], self._watch)

    def read(self, way: int, total: float) -> None:
        """Keep the seconds of the stages of a step of this rank, which took so long in all."""
        laps = self._watch.read()
        seconds = [laps[name] for name in self._names[:-1]]
        work = [laps[f"{name} work"] for name in self._names[:-1]]
        self._times[way] = np.array([[*seconds, total - sum(seconds)], [*work, laps["work"]]]).T

    def facts(self, way: int, model: AsLoaded, step: int) -> dict[str, Any]:
        """Return "stages", without and in a way: by stage and measure, a number for each rank."""
        assert isinstance(model, InTheModel) and model.step is not None
        plan, none = model.step.plan, [0.0] * self._samples.group.size
        loads = {TRANSFORMER: (plan.unbalanced_loads(model.cost).tolist(), plan.loads.tolist())}
        for name, encoding in self._balanced.last.items():
            loads[name] = none, none
            if encoding is not None:
                loads[name] = list(encoding.loads_as_given), list(encoding.loads)
        times_2S2R = self._samples.gathered(self._times[[0, way]], "seconds of stages", step + 1)
        return {
            "stages": {
                name: {
                    stage: {
                        "seconds": times_2S2R[arm, place, 0].tolist(),
                        "work": times_2S2R[arm, place, 1].tolist(),
                        "predicted": loads[stage][arm],  # work in units of its cost
                    }
                    for place, stage in enumerate(self._names)
                }
                for arm, name in enumerate(ARMS)
            }
        }


def open_stream(
    options: BenchOptions,
    encoders: FrozenEncoders,
    rank: int,
    world_size: int,
    gather: Gather | None = None,
) -> SampleStream:
    """Open the samples of one rank."""
    ranks = {"rank": rank, "world_size": world_size, "seed": options.seed}
    if options.data is not None:
        return SyntheticStream(options.data, **ranks)
    if options.manifest is not None:
        manifest = options.read_manifest(options.max_tokens)
        return ManifestStream(manifest, options.batch_size, **ranks)
    assert options.photos is not None
    photos = encoders.photo_options(options)
    return PhotoStream(options.photos, options.batch_size, **ranks, options=photos, gather=gather)


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
    return [shape.seq_len for shape in batch.shapes], [shape.image_tokens for shape in batch.shapes]


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


class Comparison:
    """Models of the same weights, one for each way, trained on the same samples by all ranks."""

    def __init__(self, options: BenchOptions, device: torch.device) -> None:
        import_module("scipy.optimize")  # which planning imports late: no step shall wait for it
        topologies = options.check(dist.get_world_size())
        self.options, self.names = options, [str(topology) for topology in topologies]
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.samples = samples = Samples(options, device, member_of(resolve(mesh), "data"))
        config = model_config(options, samples.stream)
        cost = cost_of(options, config, samples.longest, device)
        num_ways = 1 + len(topologies)
        self._stages = Stages(samples, mesh, num_ways) if options.encodes else None
        encode = (None, None) if self._stages is None else self._stages.encode
        self._ways = [AsLoaded(samples, encode[0])]
        for topology in topologies:
            if options.loader:
                self._ways.append(InTheLoader(samples, mesh, cost))
            else:
                self._ways.append(InTheModel(samples, mesh, topology, cost, encode[1]))
        building = {"seed": options.seed, "checkpoint": options.checkpoint, "dtype": samples.dtype}
        self._models = [build_model(config, mesh, **building) for _ in self._ways]
        if self._stages is not None:
            for model in self._models:
                self._stages.watch(model)
        self._optimizers = [
            torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
            for model in self._models
        ]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        peak = peak_flops(name) if options.dtype == "bfloat16" else None
        if options.peak_tflops is not None:
            peak = options.peak_tflops * 1e12
        self.setting: dict[str, Any] = {
            "device": name,
            "world_size": samples.group.size,
            "gamma": cost.gamma,
            "fit_error": cost.fit_error,
            "skipped_photos": getattr(samples.stream, "skipped", 0),
            "data_lines": getattr(samples.stream, "data_lines", []),
            "peak_flops": peak,
        }

    def run(self) -> Iterator[list[dict[str, Any]]]:
        """Train; yield the records of each step after the warm-up, the same on every rank."""
        try:
            for step in range(self.options.warmup + self.options.steps):
                records = self._step(step)
                if step >= self.options.warmup:
                    yield records
        finally:
            for way in self._ways:
                way.close()

    def _step(self, step: int) -> list[dict[str, Any]]:
        """Train a step all ways, another one first each time; return a record of each topology.

        It has the losses of an image token and the seconds of the slowest rank, also without.
        """
        samples, num_ways = self.samples, len(self._ways)
        losses, seconds, cpu_seconds = ([0.0] * num_ways for _ in range(3))
        for turn in range(num_ways):
            way = (step + turn) % num_ways
            losses[way], seconds[way], cpu_seconds[way] = self._train(way, step)
            if self._stages is not None:
                self._stages.read(way, seconds[way])
        losses = [x / samples.group.size for x in samples.reduced(losses, "losses", step + 1)]
        measured = {
            "loss": losses,
            "seconds": samples.slowest(seconds, step + 1),
            "cpu_seconds": samples.slowest(cpu_seconds, step + 1),
        }
        records = list[dict[str, Any]]()
        for way, name in enumerate(self.names, start=1):
            record: dict[str, Any] = {"step": step - self.options.warmup, "topology": name}
            record["grad_difference"] = self._grad_difference(way, step)
            for what, values in measured.items():
                record |= {f"{what}_{ARMS[0]}": values[0], f"{what}_{ARMS[1]}": values[way]}
            record |= self._ways[way].facts(step)
            if self._stages is not None:
                record |= self._stages.facts(way, self._ways[way], step)
            records.append(record)
        return records

    def _train(self, way: int, step: int) -> tuple[float, float, float]:
        """Return this rank's part of the loss, its seconds, and those of its CPU.

        Gradients stay for comparison.
        """
        of_way, device = self._ways[way], self.samples.device
        microbatches = of_way.prepare(step)
        self._optimizers[way].zero_grad(set_to_none=True)
        self.samples.reduced([0.0], "before a measured step", step + 1)
        start, cpu_start = now(device), time.process_time()
        of_way.begin()
        loss = train_step(self._models[way], microbatches)
        now(device)  # `finish` shall not wait for the device
        of_way.finish()
        seconds, cpu_seconds = now(device) - start, time.process_time() - cpu_start
        self._optimizers[way].step()
        return float(loss), seconds, cpu_seconds

    @torch.no_grad()
    def _grad_difference(self, way: int, step: int) -> float:
        squares, models = torch.zeros(2, dtype=torch.float64), (self._models[0], self._models[way])
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            reference, other = _local_grad(a), _local_grad(b)
            squares[0] += (reference - other).square().sum().cpu()
            squares[1] += reference.square().sum().cpu()
        difference, norm = self.samples.reduced(squares.tolist(), "gradient norms", step + 1)
        return (difference / max(norm, 1e-300)) ** 0.5


def summarize(
    records: Sequence[dict[str, Any]], setting: dict[str, Any], options: BenchOptions
) -> dict[str, Any]:
    """Return the numbers of a finished run: its fastest topology's, and each one's by its name."""
    ways = {
        name: _of_way(_on(name, records), setting, options)
        for name in dict.fromkeys(record["topology"] for record in records)
    }
    best = max(ways, key=lambda name: ways[name]["measured_ratio"])
    head = {
        "setting": setting | {"topology": best},
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(options).items()
        },
    }
    return head | ways[best] | {"topologies": ways}


def _of_way(
    records: Sequence[dict[str, Any]], setting: dict[str, Any], options: BenchOptions
) -> dict[str, Any]:
    """Return the numbers of a topology, without and with it: their ratios, loader and stages."""
    seconds, cpu_seconds, losses = (
        np.array([[record[f"{name}_{arm}"] for arm in ARMS] for record in records])
        for name in ("seconds", "cpu_seconds", "loss")
    )
    plans = {name: [record["plan"][name] for record in records] for name in records[0]["plan"]}
    passes = TRAINING if options.checkpoint else WITHOUT_RECOMPUTING
    flops = passes.linear * sum(plans["forward_flops"])  # of attention, too, as in `simulate`
    spread, ratios = (0.1, 0.9), seconds[:, 0] / seconds[:, 1]

    def of_arm(place: int, suffix: str) -> dict[str, Any]:
        times, total = seconds[:, place], float(seconds[:, place].sum())
        peak = setting["peak_flops"]
        return {
            "wir": float(np.mean(plans[f"wir{suffix}"])),
            "imbalance": float(np.mean(plans[f"imbalance{suffix}"])),
            "fbl_median_s": float(np.median(times)),
            "fbl_spread_s": np.quantile(times, spread).tolist(),
            "tokens_per_s": sum(plans["total_tokens"]) / total,
            "flops_per_s": flops / total,
            "hfu": None if peak is None else flops / total / (peak * setting["world_size"]),
        }

    predicted = sum(plans["makespan_unbalanced"]) / sum(plans["makespan"])
    summary = {
        "steps": len(records),
        "unbalanced": of_arm(0, "_unbalanced"),
        "balanced": of_arm(1, ""),
        "measured_ratio": float(seconds[:, 0].sum() / seconds[:, 1].sum()),
        "measured_ratio_spread": np.quantile(ratios, spread).tolist(),
        "cpu_ratio": float(cpu_seconds[:, 0].sum() / cpu_seconds[:, 1].sum()),
        "single_binds_steps": sum(plans["single_binds"]),
        "predicted_ratio": float(predicted),
        "loss_first": losses[0].tolist(),
        "loss_last": losses[-1].tolist(),
        "loss_difference": float(np.max(np.abs(1.0 - losses[:, 1] / losses[:, 0]))),
        "grad_difference_first": records[0]["grad_difference"],
        "grad_difference": max(record["grad_difference"] for record in records),
        "sent_bytes_per_step": float(np.mean(plans["sent_bytes"])),
        "moved_tokens": sum(plans["moved_tokens"]),
        "tokens_per_rank": np.mean(plans["tokens"], axis=0).tolist(),
    }
    if "exchange" in records[0]:
        summary["loader"] = _loader(records, plans, options)
    if "stages" in records[0]:
        summary["stages"] = _stages(records)
        summary["predicted_ratio"] = summary["stages"]["step"]["predicted_ratio"]
    return summary


def _loader(
    records: Sequence[dict[str, Any]], plans: dict[str, list[Any]], options: BenchOptions
) -> dict[str, Any]:
    names, reasons = ("exchange_s", "exposed_s", "hidden_s"), plans["reason"]
    means = {
        f"{name}_per_step": float(np.mean([record["exchange"][name] for record in records]))
        for name in names
    }
    step_s = float(np.mean([record["seconds_balanced"] for record in records]))
    return {
        "accumulate": options.accumulate,
        "applied_steps": sum(plans["applied"]),
        "reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        **means,
        "exposed_share": means["exposed_s_per_step"] / step_s,
    }


def _stages(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return imbalance and mean seconds of each stage, predicted and measured.

    Predicted seconds are costs times the rate of ranks without balancing. These wait for each other
    once, behind all encoders; with balancing, behind every stage. Seconds of the transformer begin
    when the last rank has encoded.
    """
    stages, predicted = dict[str, Any](), dict[str, tuple[Floats, ...]]()
    for name in records[0]["stages"][ARMS[0]]:
        measured = [
            [
                np.array([record["stages"][arm][name][measure] for record in records])
                for measure in ("seconds", "work", "predicted")  # (N, R) each
            ]
            for arm in ARMS
        ]
        _, work, costs = measured[0]
        rate = float(work.sum() / costs.sum()) if costs.sum() > 0 else 0.0
        last = np.min if name == TRANSFORMER else np.max
        stages[name] = _with_ratios(
            {
                arm: {
                    "imbalance_predicted": float(
                        np.mean([metrics.imbalance(cost) for cost in costs])
                    ),
                    "imbalance_measured": float(np.mean([metrics.imbalance(one) for one in work])),
                    "seconds_predicted": rate * float(costs.max(axis=1).mean()),
                    "seconds_measured": float(last(seconds, axis=1).mean()),
                }
                for arm, (seconds, work, costs) in zip(ARMS, measured, strict=True)
            }
        )
        predicted[name] = tuple(rate * costs for _, _, costs in measured)
    *encoders, transformer = predicted.values()
    encoded = np.sum([costs[0] for costs in encoders], axis=0)
    before = encoded.max(axis=1) + transformer[0].max(axis=1)
    after = np.sum([costs[1].max(axis=1) for costs in predicted.values()], axis=0)
    stages["step"] = _with_ratios(
        {
            arm: {
                "seconds_predicted": float(costs.mean()),
                "seconds_measured": float(
                    np.mean([record[f"seconds_{arm}"] for record in records])
                ),
            }
            for arm, costs in zip(ARMS, (before, after), strict=True)
        }
    )
    return stages


def _with_ratios(arms: dict[str, dict[str, float]]) -> dict[str, Any]:
    without, balanced = (arms[arm] for arm in ARMS)
    return arms | {
        f"{kind}_ratio": without[f"seconds_{kind}"] / max(balanced[f"seconds_{kind}"], 1e-300)
        for kind in ("predicted", "measured")
    }


def _on(topology: str, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["topology"] == topology]


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak of one device by its data sheet; None if no profile is of it."""
    for profile in KNOWN_PROFILES.values():
        model = profile["device"].split()[1]  # of "NVIDIA H100 SXM"
        if model in device_name and "H100 PCIe" not in device_name:  # which is slower
            return profile["peak_flops_per_s"]
    return None


def _local_grad(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    return (grad.to_local() if isinstance(grad, DTensor) else grad).double()
