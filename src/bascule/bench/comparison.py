"""Train without and with balancing on the same batches, in turns. Shapes: N steps, R ranks."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from bascule.arrays import Floats
from bascule.bench.options import BenchOptions
from bascule.bench.ways import ARMS, MEASURES, AsLoaded, InTheLoader, InTheModel, Samples, Stages
from bascule.comm.groups import member_of, resolve
from bascule.plan.costs import TransformerCost
from bascule.plan.machine import KNOWN_PROFILES
from bascule.plan.metrics import imbalance
from bascule.train import train_step
from bascule.train.encoders import TRANSFORMER
from bascule.train.model import build_model, measure_cost, model_config

_NUM_PROBES, _PROBED_STEPS = 5, 3


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A measured step, the same on every rank; of pairs, the first is without balancing."""

    step: int
    loss: tuple[float, float]  # mean over all image tokens
    seconds: tuple[float, float]  # forward and backward of the slowest rank, with waiting
    grad_difference: float  # norm of the difference of all gradients, over that of the first
    plan: dict[str, Any]  # metrics of the plan of all ranks
    more: dict[str, Any] = field(default_factory=dict[str, Any])  # "exchange", "stages"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        record: dict[str, Any] = {"step": self.step, "grad_difference": self.grad_difference}
        for arm, loss, seconds in zip(ARMS, self.loss, self.seconds, strict=True):
            record |= {f"loss_{arm}": loss, f"seconds_{arm}": seconds}
        return record | {"plan": self.plan} | self.more


class Comparison:
    """Two models of the same weights, trained on the same samples in two ways by all ranks."""

    def __init__(self, options: BenchOptions, device: torch.device) -> None:
        topology = options.check(dist.get_world_size())
        self.options = options
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.samples = samples = Samples(options, device, member_of(resolve(mesh), "data"))
        config = model_config(options, samples.stream)
        if options.gamma is None:
            longest = samples.longest(_PROBED_STEPS)
            lens = np.unique(np.geomspace(min(128, longest), longest, _NUM_PROBES).astype(int))
            settings = {"device": device, "dtype": samples.dtype, "kernel": options.kernel}
            cost = measure_cost(config, tuple(lens.tolist()), **settings)
        else:
            num_blocks = config.num_double + config.num_single
            cost = TransformerCost(config.d_model, gamma=options.gamma, num_layers=num_blocks)
        self._stages = Stages(samples, mesh) if options.encodes else None
        encode = (None, None) if self._stages is None else self._stages.encode
        if options.loader:
            balanced = InTheLoader(samples, mesh, cost)
        else:
            balanced = InTheModel(samples, mesh, topology, cost, encode[1])
        self._ways: tuple[AsLoaded, AsLoaded] = AsLoaded(samples, encode[0]), balanced
        building = {"seed": options.seed, "checkpoint": options.checkpoint, "dtype": samples.dtype}
        self._models = [build_model(config, mesh, **building) for _ in ARMS]
        if self._stages is not None:
            for model in self._models:
                self._stages.watch(model)
        self._optimizers = [
            torch.optim.AdamW(model.parameters(), lr=options.lr) for model in self._models
        ]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.setting: dict[str, Any] = {
            "device": name,
            "world_size": samples.group.size,
            "topology": str(topology),
            "gamma": cost.gamma,
            "fit_error": cost.fit_error,
            "skipped_photos": getattr(samples.stream, "skipped", 0),
            "peak_flops": peak_flops(name) if options.dtype == "bfloat16" else None,
        }

    def run(self) -> Iterator[StepRecord]:
        """Train; yield each step after the warm-up."""
        try:
            for step in range(self.options.warmup + self.options.steps):
                record = self._step(step)
                if step >= self.options.warmup:
                    yield record
        finally:
            for way in self._ways:
                way.close()

    def _step(self, step: int) -> StepRecord:
        samples, losses, seconds = self.samples, [0.0, 0.0], [0.0, 0.0]
        for arm in (0, 1) if step % 2 == 0 else (1, 0):
            losses[arm], seconds[arm] = self._train(arm, step)
            if self._stages is not None:
                self._stages.read(arm, seconds[arm])
        sums = samples.reduced(losses, "losses", step + 1)
        without, balanced = samples.slowest(seconds, step + 1)
        facts = self._ways[1].facts(step)
        if self._stages is not None:
            assert isinstance(self._ways[1], InTheModel)
            facts |= self._stages.facts(self._ways[1], step)
        return StepRecord(
            step=step - self.options.warmup,
            loss=(sums[0] / samples.group.size, sums[1] / samples.group.size),
            seconds=(without, balanced),
            grad_difference=self._grad_difference(step),
            plan=facts.pop("plan"),
            more=facts,
        )

    def _train(self, arm: int, step: int) -> tuple[float, float]:
        """Return this rank's part of the loss, and its seconds; gradients stay for comparison."""
        way, device = self._ways[arm], self.samples.device
        microbatches = way.prepare(step)
        self._optimizers[arm].zero_grad(set_to_none=True)
        self.samples.reduced([0.0], "before a measured step", step + 1)
        start = _now(device)
        way.begin()
        loss = train_step(self._models[arm], microbatches)
        _now(device)  # `finish` shall not wait for the device
        way.finish()
        seconds = _now(device) - start
        self._optimizers[arm].step()
        return float(loss), seconds

    @torch.no_grad()
    def _grad_difference(self, step: int) -> float:
        squares = torch.zeros(2, dtype=torch.float64)
        for a, b in zip(*(model.parameters() for model in self._models), strict=True):
            reference, other = _local_grad(a), _local_grad(b)
            squares[0] += (reference - other).square().sum().cpu()
            squares[1] += reference.square().sum().cpu()
        difference, norm = self.samples.reduced(squares.tolist(), "gradient norms", step + 1)
        return (difference / max(norm, 1e-300)) ** 0.5


def summarize(
    records: Sequence[StepRecord], setting: dict[str, Any], options: BenchOptions
) -> dict[str, Any]:
    """Return the numbers of a finished run: both ways, their ratios, loader and stages."""
    seconds = np.array([record.seconds for record in records])
    losses = np.array([record.loss for record in records])
    plans = {name: [record.plan[name] for record in records] for name in records[0].plan}
    flops = (4.0 if options.checkpoint else 3.0) * sum(plans["forward_flops"])
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
        "setting": setting,
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(options).items()
        },
        "steps": len(records),
        "unbalanced": of_arm(0, "_unbalanced"),
        "balanced": of_arm(1, ""),
        "measured_ratio": float(seconds[:, 0].sum() / seconds[:, 1].sum()),
        "measured_ratio_spread": np.quantile(ratios, spread).tolist(),
        "single_binds_steps": sum(plans["single_binds"]),
        "predicted_ratio": float(predicted),
        "loss_first": losses[0].tolist(),
        "loss_last": losses[-1].tolist(),
        "loss_difference": float(np.max(np.abs(1.0 - losses[:, 1] / losses[:, 0]))),
        "grad_difference_first": records[0].grad_difference,
        "grad_difference": max(record.grad_difference for record in records),
        "sent_bytes_per_step": float(np.mean(plans["sent_bytes"])),
        "tokens_per_rank": np.mean(plans["tokens"], axis=0).tolist(),
    }
    if "exchange" in records[0].more:
        summary["loader"] = _loader(records, plans, options)
    if "stages" in records[0].more:
        summary["stages"] = _stages(records)
        summary["predicted_ratio"] = summary["stages"]["step"]["predicted_ratio"]
    return summary


def _loader(
    records: Sequence[StepRecord], plans: dict[str, list[Any]], options: BenchOptions
) -> dict[str, Any]:
    names, reasons = ("exchange_s", "exposed_s", "hidden_s"), plans["reason"]
    means = {
        f"{name}_per_step": float(np.mean([record.more["exchange"][name] for record in records]))
        for name in names
    }
    step_s = float(np.mean([record.seconds[1] for record in records]))
    return {
        "accumulate": options.accumulate,
        "applied_steps": sum(plans["applied"]),
        "reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        **means,
        "exposed_share": means["exposed_s_per_step"] / step_s,
    }


def _stages(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return imbalance and mean seconds of each stage, predicted and measured.

    Predicted seconds are costs times the rate of ranks without balancing. These wait for each other
    once, behind all encoders; with balancing, behind every stage. Seconds of the transformer begin
    when the last rank has encoded.
    """
    stages, predicted = dict[str, Any](), dict[str, tuple[Floats, ...]]()
    for name in records[0].more["stages"][ARMS[0]]:
        measured = [
            [
                np.array([record.more["stages"][arm][name][measure] for record in records])
                for measure in MEASURES  # (N, R) each
            ]
            for arm in ARMS
        ]
        _, work, costs = measured[0]
        rate = float(work.sum() / costs.sum()) if costs.sum() > 0 else 0.0
        last = np.min if name == TRANSFORMER else np.max
        stages[name] = _with_ratios(
            {
                arm: {
                    "imbalance_predicted": float(np.mean([imbalance(one) for one in costs])),
                    "imbalance_measured": float(np.mean([imbalance(one) for one in work])),
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
                "seconds_measured": float(np.mean([record.seconds[place] for record in records])),
            }
            for place, (arm, costs) in enumerate(zip(ARMS, (before, after), strict=True))
        }
    )
    return stages


def _with_ratios(arms: dict[str, dict[str, float]]) -> dict[str, Any]:
    without, balanced = (arms[arm] for arm in ARMS)
    return arms | {
        f"{kind}_ratio": without[f"seconds_{kind}"] / max(balanced[f"seconds_{kind}"], 1e-300)
        for kind in ("predicted", "measured")
    }


def median_step(records: Sequence[StepRecord]) -> StepRecord:
    """Return the step whose speed-up is the median."""
    return sorted(records, key=lambda one: one.seconds[0] / one.seconds[1])[len(records) // 2]


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


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
