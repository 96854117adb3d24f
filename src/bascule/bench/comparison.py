"""Train on the same batches without balancing, and with balancing on each topology, in turns.

A *way* is a model with its optimizer and its placement of samples; way 0 does not balance. Shapes:
N steps, S stages, R ranks.
"""

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from bascule.bench.options import BenchOptions
from bascule.calibrate.blocks import local_exchange
from bascule.calibrate.timed import now
from bascule.comm.agree import agree, agree_on
from bascule.comm.collectives import all_gather, all_reduce
from bascule.comm.groups import RankGroup, device_of, member_of, resolve
from bascule.comm.items import measure_exchange
from bascule.data.loader import BalancedLoader, LoaderOptions
from bascule.data.steps import Batch
from bascule.errors import ConfigError
from bascule.machine.cluster import KNOWN_PROFILES, TRAINING, WITHOUT_RECOMPUTING, Cluster
from bascule.machine.costs import FLOPS_PER_UNIT, TransformerCost
from bascule.models import Exchange, MMDiT
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
    pack_encoded,
)

ARMS = ("unbalanced", "balanced")
EXCHANGE = ("exchange_s", "exposed_s", "hidden_s")

Encode = Callable[[list[RawBatch]], list[SampleBatch]]
LossOf = Callable[[nn.Module], Tensor]


class Samples:
    """The samples of this rank by step, and collectives for the numbers to compare."""

    def __init__(self, options: BenchOptions, device: torch.device, group: RankGroup) -> None:
        self.options, self.device, self.group = options, device, group
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        what = "bascule bench"
        self.encoders = FrozenEncoders()
        if options.encodes:
            self.encoders = agree_on(
                group,
                lambda: load_encoders(options),
                lambda encoders: {"encoders": str(encoders.settings)},
                what=what,
            )
        gather = partial(agree, group, what=what)
        self.stream = open_stream(options, self.encoders, group.rank, group.size, gather)
        self._loaded: dict[int, list[Any]] = {}

    def load(self, step: int) -> list[Any]:
        """Return the microbatches of a step before encoding; an error on a rank ends all ranks."""
        if step in self._loaded:
            return self._loaded[step]
        batches, error, count = [], None, self.options.accumulate
        try:
            batches = [*map(self._read, range(step * count, (step + 1) * count))]
        except (ConfigError, OSError) as refusal:
            error = refusal
        agree(self.group, {}, error, what="loading a batch", step=step + 1)
        before = {step - 1: self._loaded[step - 1]} if step - 1 in self._loaded else {}
        self._loaded = before | {step: batches}
        return batches

    def _read(self, number: int) -> SampleBatch | RawBatch:
        if not self.encoders:
            return self.stream.batch(number)
        photos = cast(PhotoStream, self.stream)
        return photos.raw(photos.numbers(number))

    def longest(self) -> int:
        """Return the tokens of the longest sample of all ranks in the first `PROBED_STEPS`."""
        lens = [lens_of(batch)[0] for step in range(PROBED_STEPS) for batch in self.load(step)]
        longest = torch.tensor([max([0, *(n for each in lens for n in each)])])
        call = "all_gather (longest sequence)"
        return int(all_gather(self.group, call, longest.to(device_of(self.group))).max())

    def flow(self, batch: SampleBatch) -> FlowBatch:
        """Add noise to a batch and copy it to the device."""
        return FlowBatch.build(batch, seed=self.options.seed, device=self.device, dtype=self.dtype)

    def sum_over_ranks(self, numbers: Sequence[float], what: str, step: int) -> list[float]:
        """Return the sum of each number over all ranks."""
        values = torch.tensor(numbers, dtype=torch.float64, device=device_of(self.group))
        return all_reduce(self.group, f"step {step}: all_reduce ({what})", values).tolist()

    def gather(self, numbers: Floats, what: str, step: int) -> Floats:
        """Gather an array of each rank; return (.., R), with the ranks as last dim."""
        values = torch.from_numpy(numbers.reshape(-1)).to(device_of(self.group))
        table = all_gather(self.group, f"step {step}: all_gather ({what})", values).cpu().numpy()
        return np.moveaxis(table.reshape(-1, *numbers.shape), 0, -1)

    def max_over_ranks(self, seconds: Sequence[float], step: int) -> list[float]:
        """Return the maximum over all ranks of each of these seconds."""
        return self.gather(np.array(seconds), "seconds", step).max(axis=-1).tolist()


class Unbalanced:
    """Training in which ranks compute the samples that they loaded.

    In each step, all ranks call the methods in the order of this class.
    """

    def __init__(self, samples: Samples, encode: Encode | None = None) -> None:
        self.samples, self._encode = samples, encode

    def prepare(self, step: int) -> list[LossOf]:
        """Load a step; return a loss function per microbatch. Sum these, and average over ranks.

        The result is the mean loss per image token.
        """
        batches = self.samples.load(step)
        tokens = sum(sum(lens_of(batch)[1]) for batch in batches)
        (total,) = self.samples.sum_over_ranks([tokens], "image tokens", step + 1)
        factor = self.samples.group.size / max(total, 1.0)
        return [partial(self.loss, self._inputs_maker(batch), factor) for batch in batches]

    def begin(self) -> None:
        """Start work that overlaps with the step; this counts as time of the step."""

    def finish(self) -> None:
        """Wait for the work that overlapped with the step; this counts as time of the step."""

    def facts(self, step: int) -> dict[str, Any]:
        """Return the facts to record of the step, such as "plan"; the same on every rank."""
        return {}

    def close(self) -> None:
        """Stop threads."""

    def exchange(self, seq_lens: list[int]) -> Exchange:
        """Return the exchange for the model's attention in sequences of these lengths."""
        return local_exchange(seq_lens, self.samples.device, self.samples.options.kernel)

    def loss(self, make: Callable[[], FlowBatch], factor: float, model: nn.Module) -> Tensor:
        """Return the sum of the losses of all tokens, times a factor."""
        flow = make()
        predicted = model(flow.inputs, self.exchange(flow.seq_lens))
        return flow.per_token_loss(predicted).double().sum() * factor

    def _inputs_maker(self, batch: Any) -> Callable[[], FlowBatch]:
        """Return a function that makes the model's inputs; with encoders it encodes when called."""
        if self._encode is not None:
            encode = self._encode
            return lambda: self.samples.flow(encode([batch])[0])
        flow = self.samples.flow(batch)
        return lambda: flow


class BalancedInModel(Unbalanced):
    """Training with `SequenceParallel`: bags of ranks share sequences inside the model."""

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
            *(mesh, topology, cost),
            timeout_s=options.timeout_s,
            kernel=options.kernel,
            device=samples.device,
        )

    def exchange(self, seq_lens: list[int]) -> Exchange:
        """Plan these sequences together with the other ranks' sequences; return the step."""
        self.step = self._parallel.plan(seq_lens)
        return self.step

    def facts(self, step: int) -> dict[str, Any]:
        """Return "plan": its metrics, and the bytes that all ranks sent."""
        assert self.step is not None
        (sent,) = self.samples.sum_over_ranks([self.step.traffic.total], "sent bytes", step + 1)
        return {"plan": self.step.metrics() | _totals([self.step.plan], self.cost, sent)}


class BalancedInLoader(Unbalanced):
    """Training with `BalancedLoader`: whole samples move between ranks.

    When a step begins, the loader's thread gets the samples of the next step; the step ends when
    these are dealt. So the step's time includes dealing that compute does not hide, and the thread
    is idle while way 0 is timed.
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
        self._empty = pack_encoded(RawBatch([], [], [], []), [], [], samples.stream)
        self._following: list[SampleBatch] = []
        self._dealt, self._ready = list[Batch](), list[Batch]()
        self._before: dict[str, Any] = {}

    def prepare(self, step: int) -> list[LossOf]:
        """Get the microbatches from the loader; return their losses, scaled as in user code."""
        if not self._ready:
            self._feed.put(self.samples.load(step))
            self.finish()
        self._following = self.samples.load(step + 1)
        self._dealt, self._ready = self._ready, []
        self._before = self._loader.metrics()
        losses = list[LossOf]()
        for batch in self._dealt:
            data = self._empty if batch.data is None else cast(SampleBatch, batch.data)
            mean = batch.loss_scale / self.samples.options.accumulate / max(sum(data.image_lens), 1)
            losses.append(partial(self.loss, self._inputs_maker(data), mean))
        return losses

    def begin(self) -> None:
        """Give the loader's thread the next step."""
        self._feed.put(self._following)

    def finish(self) -> None:
        """Take the next step from the loader."""
        self._ready = [next(self._batches) for _ in range(self.samples.options.accumulate)]

    def facts(self, step: int) -> dict[str, Any]:
        """Return "plan", and "exchange": the slowest rank's seconds, in all and not hidden."""
        plans = [batch.plan for batch in self._dealt]
        before = [plan.unbalanced_loads(self._cost) for plan in plans]
        after, verdict = self._loader.metrics(), self._dealt[0].verdict
        spent = [after[name] - self._before[name] for name in EXCHANGE]
        seconds = self.samples.max_over_ranks(spent, step + 1)
        local = after["sent_bytes"] - self._before["sent_bytes"]
        (sent,) = self.samples.sum_over_ranks([local], "sent bytes", step + 1)
        plan = {
            "makespan": sum(plan.makespan for plan in plans),
            "makespan_unbalanced": sum(float(loads.max()) for loads in before),
            "imbalance": _mean(plan.imbalance for plan in plans),
            "imbalance_unbalanced": _mean(map(metrics.imbalance, before)),
            "wir": _mean(plan.wir for plan in plans),
            "wir_unbalanced": _mean(map(metrics.wir, before)),
            "tokens": np.sum([plan.tokens for plan in plans], axis=0).tolist(),
            "moved_tokens": sum(plan.moved_tokens for plan in plans),
            "applied": verdict.applied,
            "reason": verdict.reason,
            **_totals(plans, self._cost, sent),
        }
        exchange = dict(zip(EXCHANGE, seconds, strict=True)) | {"sent_bytes": int(sent)}
        return {"plan": plan, "exchange": exchange}

    def close(self) -> None:
        """End the loader's thread."""
        self._feed.put(None)
        self._loader.close()


class StageTimes:
    """The encoders of all ways, on the local rank or balanced, with a clock for every stage."""

    def __init__(self, samples: Samples, mesh: DeviceMesh, num_ways: int) -> None:
        self._samples, self._watch = samples, Stopwatch(samples.device)
        self._names = (*samples.encoders.stages, TRANSFORMER)
        self._times = np.zeros((num_ways, len(self._names), 2))
        watch_encoders(samples.encoders, self._watch)
        shape, axes = (samples.group.size, 1), ("ranks", "alone")
        alone = init_device_mesh(samples.device.type, shape, mesh_dim_names=axes)["alone"]
        shared = samples.stream, samples.options, samples.device, self._watch
        wires = measure_exchange(member_of(resolve(mesh), "encoders"))
        speed = 1.0 / wires.byte_s
        priced = Cluster(1, samples.group.size, 1e12, 1e12, speed, speed, wires.launch_s)
        stages = [
            EncoderStages(samples.encoders, ranks, *shared, cluster)
            for ranks, cluster in ((alone, None), (mesh, priced))
        ]
        self.encode, self._balanced = [stage.encode for stage in stages], stages[1]

    def watch(self, model: MMDiT) -> None:
        """Time the transformer blocks of a model."""
        watch_blocks([*model.double_blocks, *model.single_blocks], self._watch)

    def read(self, way: int, total: float) -> None:
        """Store this rank's seconds of each stage of a step that took `total` seconds."""
        laps = self._watch.read()
        seconds = [laps[name] for name in self._names[:-1]]
        work = [laps[f"{name} work"] for name in self._names[:-1]]
        self._times[way] = np.array([[*seconds, total - sum(seconds)], [*work, laps["work"]]]).T

    def facts(self, way: int, model: Unbalanced, step: int) -> dict[str, Any]:
        """Return "stages": for way 0 and for a way, each rank's numbers by stage and measure."""
        assert isinstance(model, BalancedInModel) and model.step is not None
        plan, none = model.step.plan, [0.0] * self._samples.group.size
        loads = {TRANSFORMER: (plan.unbalanced_loads(model.cost).tolist(), plan.loads.tolist())}
        for name, encoding in self._balanced.last.items():
            loads[name] = none, none
            if encoding is not None:
                exchange_s = (encoding.exchange_s or 0.0) if encoding.num_moved else 0.0
                after = [load + exchange_s for load in encoding.loads]
                loads[name] = list(encoding.loads_as_given), after
        times_2S2R = self._samples.gather(self._times[[0, way]], "seconds of stages", step + 1)
        return {
            "stages": {
                name: {
                    stage: {
                        "seconds": times_2S2R[arm, place, 0].tolist(),
                        "work": times_2S2R[arm, place, 1].tolist(),
                        # Work in units of its cost; of encoders, seconds with the exchange.
                        "predicted": loads[stage][arm],
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
    """Return the numbers of tokens and of image tokens of each sample of a batch."""
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
        name: torch.cat([sample[name] for sample in samples])
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
    """Models with equal initial weights, one for each way, trained on the same samples."""

    def __init__(self, options: BenchOptions, device: torch.device) -> None:
        import_module("scipy.optimize")  # planning imports it lazily: keep that out of timed steps
        topologies = options.check(dist.get_world_size())
        self.options, self.names = options, [str(topology) for topology in topologies]
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.samples = samples = Samples(options, device, member_of(resolve(mesh), "data"))
        config = model_config(options, samples.stream)
        cost = cost_of(options, config, samples.longest, device)
        num_ways = 1 + len(topologies)
        self._stages = StageTimes(samples, mesh, num_ways) if options.encodes else None
        encode = (None, None) if self._stages is None else self._stages.encode
        self._ways = [Unbalanced(samples, encode[0])]
        for topology in topologies:
            if options.loader:
                self._ways.append(BalancedInLoader(samples, mesh, cost))
            else:
                self._ways.append(BalancedInModel(samples, mesh, topology, cost, encode[1]))
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

        A record compares the topology with way 0: loss of an image token, seconds of the slowest
        rank.
        """
        samples, num_ways = self.samples, len(self._ways)
        losses, seconds, cpu_seconds = ([0.0] * num_ways for _ in range(3))
        for turn in range(num_ways):
            way = (step + turn) % num_ways
            losses[way], seconds[way], cpu_seconds[way] = self._train(way, step)
            if self._stages is not None:
                self._stages.read(way, seconds[way])
        sums = samples.sum_over_ranks(losses, "losses", step + 1)
        measured = {
            "loss": [loss / samples.group.size for loss in sums],
            "seconds": samples.max_over_ranks(seconds, step + 1),
            "cpu_seconds": samples.max_over_ranks(cpu_seconds, step + 1),
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
        """Train one step; return this rank's part of the loss, its seconds and its CPU seconds.

        Gradients stay, for `_grad_difference`.
        """
        training, device = self._ways[way], self.samples.device
        microbatches = training.prepare(step)
        self._optimizers[way].zero_grad(set_to_none=True)
        self.samples.sum_over_ranks([0.0], "before a measured step", step + 1)
        start, cpu_start = now(device), time.process_time()
        training.begin()
        loss = train_step(self._models[way], microbatches)
        now(device)  # so that `finish` waits for the loader alone
        training.finish()
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
        difference, norm = self.samples.sum_over_ranks(squares.tolist(), "gradient norms", step + 1)
        return (difference / max(norm, 1e-300)) ** 0.5


def summarize(
    records: Sequence[dict[str, Any]], setting: dict[str, Any], options: BenchOptions
) -> dict[str, Any]:
    """Summarize a run: the numbers of its fastest topology, and of each in "topologies"."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_name.setdefault(record["topology"], []).append(record)
    ways = {name: _summarize_way(steps, setting, options) for name, steps in by_name.items()}
    best = max(ways, key=lambda name: ways[name]["measured_ratio"])
    head = {
        "setting": setting | {"topology": best},
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(options).items()
        },
    }
    return head | ways[best] | {"topologies": ways}


def _summarize_way(
    records: Sequence[dict[str, Any]], setting: dict[str, Any], options: BenchOptions
) -> dict[str, Any]:
    """Compare the steps of a topology with those of way 0."""
    seconds, cpu_seconds, losses = (
        np.array([[record[f"{name}_{arm}"] for arm in ARMS] for record in records])
        for name in ("seconds", "cpu_seconds", "loss")
    )
    plans = {name: [record["plan"][name] for record in records] for name in records[0]["plan"]}
    passes = TRAINING if options.checkpoint else WITHOUT_RECOMPUTING
    flops = passes.linear * sum(plans["forward_flops"])  # of attention, too, as in `simulate`
    spread, ratios = (0.1, 0.9), seconds[:, 0] / seconds[:, 1]

    def numbers_of(place: int, suffix: str) -> dict[str, Any]:
        times, total = seconds[:, place], float(seconds[:, place].sum())
        peak = setting["peak_flops"]
        return {
            "wir": _mean(plans[f"wir{suffix}"]),
            "imbalance": _mean(plans[f"imbalance{suffix}"]),
            "fbl_median_s": float(np.median(times)),
            "fbl_spread_s": np.quantile(times, spread).tolist(),
            "tokens_per_s": sum(plans["total_tokens"]) / total,
            "flops_per_s": flops / total,
            "hfu": None if peak is None else flops / total / (peak * setting["world_size"]),
        }

    summary = {
        "steps": len(records),
        "unbalanced": numbers_of(0, "_unbalanced"),
        "balanced": numbers_of(1, ""),
        "measured_ratio": float(seconds[:, 0].sum() / seconds[:, 1].sum()),
        "measured_ratio_spread": np.quantile(ratios, spread).tolist(),
        "cpu_ratio": float(cpu_seconds[:, 0].sum() / cpu_seconds[:, 1].sum()),
        "single_binds_steps": sum(plans["single_binds"]),
        "predicted_ratio": float(sum(plans["makespan_unbalanced"]) / sum(plans["makespan"])),
        "loss_first": losses[0].tolist(),
        "loss_last": losses[-1].tolist(),
        "loss_difference": float(np.max(np.abs(1.0 - losses[:, 1] / losses[:, 0]))),
        "grad_difference_first": records[0]["grad_difference"],
        "grad_difference": max(record["grad_difference"] for record in records),
        "sent_bytes_per_step": _mean(plans["sent_bytes"]),
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
    exchanges, reasons = [record["exchange"] for record in records], plans["reason"]
    means = {f"{name}_per_step": _mean(each[name] for each in exchanges) for name in EXCHANGE}
    step_s = _mean(record["seconds_balanced"] for record in records)
    return {
        "accumulate": options.accumulate,
        "applied_steps": sum(plans["applied"]),
        "reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        **means,
        "exposed_share": means["exposed_s_per_step"] / step_s,
    }


def _stages(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return imbalance and mean seconds of each stage, predicted and measured.

    Predicted seconds are costs times the rate of way 0. Without balancing ranks wait for each other
    once, behind all encoders; with it, behind every stage. Seconds of the transformer begin when
    the last rank has encoded.
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
                    "imbalance_predicted": _mean(map(metrics.imbalance, costs)),
                    "imbalance_measured": _mean(map(metrics.imbalance, work)),
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
                "seconds_measured": _mean(record[f"seconds_{arm}"] for record in records),
            }
            for arm, costs in zip(ARMS, (before, after), strict=True)
        }
    )
    return stages


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _with_ratios(arms: dict[str, dict[str, float]]) -> dict[str, Any]:
    without, balanced = (arms[arm] for arm in ARMS)
    return arms | {
        f"{kind}_ratio": without[f"seconds_{kind}"] / max(balanced[f"seconds_{kind}"], 1e-300)
        for kind in ("predicted", "measured")
    }


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a device by its data sheet; None if no profile has it."""
    for profile in KNOWN_PROFILES.values():
        model = profile["device"].split()[1]  # of "NVIDIA H100 SXM"
        if model in device_name and "H100 PCIe" not in device_name:  # PCIe cards are slower
            return profile["peak_flops_per_s"]
    return None


def _local_grad(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    return (grad.to_local() if isinstance(grad, DTensor) else grad).double()
