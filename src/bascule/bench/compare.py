"""The main measurement: the same batches without and with balancing, interleaved step by step."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from bascule.bench.arms import Arm, MakeExchange, StepResult, balanced, unbalanced
from bascule.bench.options import BenchOptions
from bascule.comm.agree import agree
from bascule.comm.collectives import all_gather, all_reduce
from bascule.comm.groups import RankGroup, device_of, member_of, new_group, resolve
from bascule.errors import ConfigError
from bascule.parallel import SequenceParallel, Step
from bascule.plan.costs import FLOPS_PER_UNIT, TransformerCost
from bascule.train.building import build_model, model_config
from bascule.train.flow import FlowBatch
from bascule.train.frozen_encoders import FrozenEncoders, load_encoders
from bascule.train.measure import measure_cost
from bascule.workload.photos import PhotoStream
from bascule.workload.streams import SampleBatch, SampleStream, SyntheticStream

_NUM_PROBES = 5

_Batch = TypeVar("_Batch")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One measured step, the same on every rank.

    Attributes:
        step: Its number.
        loss_unbalanced: Global mean without balancing.
        loss_balanced: With balancing.
        grad_difference: Norm of the difference of all gradients over the norm of the unbalanced
            ones.
        seconds_unbalanced: Forward and backward of the slowest rank.
        seconds_balanced: Likewise, planning and exchanges included.
        plan: Metrics of the plan, with "total_tokens", "forward_flops" and "sent_bytes" of all
            ranks, and whether one sequence alone binds the step, "single_binds".
    """

    step: int
    loss_unbalanced: float
    loss_balanced: float
    grad_difference: float
    seconds_unbalanced: float
    seconds_balanced: float
    plan: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Setting:
    """The machine and the settings of a measurement."""

    device: str
    world_size: int
    topology: str
    gamma: float
    fit_error: float | None
    skipped_photos: int
    peak_flops: float | None


class Paired:
    """Two models with the same weights, trained on the same samples; what both comparisons share.

    All ranks of an initialised process group construct and iterate it together. Subclasses fill
    `arms`: the first trains without balancing, the second with it.
    """

    def __init__(self, options: BenchOptions, device: torch.device) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        self.topology = options.check(world_size)
        self.options, self.device = options, device
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.encoders = self._agreed_encoders(world_size)
        self.stream = open_stream(options, self.encoders, rank, world_size)
        self.mesh = init_device_mesh(device.type, (world_size,))
        self.group: RankGroup = member_of(resolve(self.mesh), "data")
        self._config = model_config(options, self.stream)
        self.cost = self._cost()
        self.arms: list[Arm] = []

    def _agreed_encoders(self, world_size: int) -> FrozenEncoders:
        """The same on all ranks, and no error on any."""
        options, found, error = self.options, FrozenEncoders(), None
        if not options.encodes:
            return found
        try:
            found = load_encoders(options)
        except ConfigError as met:
            error = met
        host = new_group(range(world_size), "bench", options.timeout_s, backend="gloo")
        agree(host, {"encoders": str(found.settings)}, error, what="bascule bench")
        return found

    @property
    def setting(self) -> Setting:
        """The machine and the settings of this run."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return Setting(
            device=name,
            world_size=self.group.size,
            topology=str(self.topology),
            gamma=self.cost.gamma,
            fit_error=self.cost.fit_error,
            skipped_photos=getattr(self.stream, "skipped", 0),
            peak_flops=peak_flops(name) if self.dtype == torch.bfloat16 else None,
        )

    def arm(self, make_exchange: MakeExchange) -> Arm:
        """A new model with its optimiser."""
        options = self.options
        model = build_model(
            self._config,
            self.mesh,
            seed=options.seed,
            checkpoint=options.checkpoint,
            dtype=self.dtype,
        )
        return Arm(model, make_exchange, self.group, options.lr)

    def in_turns(self, step: int) -> Iterator[int]:
        """The arms, each after a barrier; they take turns in who goes first."""
        for arm in (0, 1) if step % 2 == 0 else (1, 0):
            self.reduced(torch.zeros(1), "before a measured step", step + 1)
            yield arm

    def flow(self, batch: SampleBatch) -> FlowBatch:
        """A batch with its noise, on the device."""
        return FlowBatch.build(batch, seed=self.options.seed, device=self.device, dtype=self.dtype)

    def forward_flops(self, seq_lens: npt.ArrayLike) -> float:
        """Of the model on these sequences."""
        plain = replace(self.cost, gamma=1.0)
        return float(plain(seq_lens).sum()) * FLOPS_PER_UNIT

    def slowest(self, step: int, *seconds: float) -> list[float]:
        """Each of them on the rank where it is largest."""
        call = f"step {step}: all_gather (seconds)"
        of_ranks = torch.tensor(seconds, dtype=torch.float64, device=device_of(self.group))
        return all_gather(self.group, call, of_ranks).amax(0).tolist()

    def reduced(self, numbers: torch.Tensor, what: str, step: int) -> torch.Tensor:
        """The sum of a tensor over all ranks."""
        call = f"step {step}: all_reduce ({what})"
        return all_reduce(self.group, call, numbers.to(device_of(self.group))).to(numbers.device)

    @torch.no_grad()
    def grad_difference(self, step: int) -> float:
        """Norm of the difference of both arms' gradients over that of the unbalanced ones."""
        squares = torch.zeros(2, dtype=torch.float64)
        models = (arm.model.parameters() for arm in self.arms)
        for a, b in zip(*models, strict=True):
            reference, other = _local_grad(a), _local_grad(b)
            squares[0] += (reference - other).square().sum().cpu()
            squares[1] += reference.square().sum().cpu()
        squares = self.reduced(squares, "gradient norms", step)
        return float((squares[0] / squares[1].clamp(min=1e-300)).sqrt())

    def _cost(self) -> TransformerCost:
        config = self._config
        if self.options.gamma is not None:
            num_blocks = config.num_double + config.num_single
            return TransformerCost(config.d_model, gamma=self.options.gamma, num_layers=num_blocks)
        longest = max(self._longest(step) for step in range(3))
        lens = np.unique(np.geomspace(min(128, longest), longest, _NUM_PROBES).astype(int))
        return measure_cost(
            config,
            tuple(lens.tolist()),
            device=self.device,
            dtype=self.dtype,
            kernel=self.options.kernel,
        )

    def own_lens(self, step: int) -> list[int]:
        """Tokens of the samples of this rank."""
        return self.stream.batch(step).seq_lens

    def _longest(self, step: int) -> int:
        longest = torch.tensor([max(self.own_lens(step), default=0), 256])
        longest = longest.to(device_of(self.group))
        return int(all_gather(self.group, "all_gather (longest sequence)", longest).max())


class Comparison(Paired):
    """Trained without and with balancing inside the model: bags of ranks share sequences."""

    def __init__(self, options: BenchOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self.parallel = SequenceParallel(
            self.mesh,
            self.topology,
            self.cost,
            timeout_s=options.timeout_s,
            planner=options.planner,
            kernel=options.kernel,
            device=device,
        )
        without = unbalanced(device, options.kernel)
        self.arms = [self.arm(without), self.arm(balanced(self.parallel))]

    def run(self) -> Iterator[StepRecord]:
        """Train; yields each step after the warm-up."""
        for step in range(self.options.warmup + self.options.steps):
            record = self.trained(step)
            if step >= self.options.warmup:
                yield record

    def trained(self, step: int) -> StepRecord:
        """Train both ways on the batches of a step."""
        flow = self.flow(self.load(step, self.stream.batch))
        results = {arm: self.arms[arm].step(lambda: flow) for arm in self.in_turns(step)}
        return self.recorded(step, results)

    def recorded(self, step: int, results: dict[int, StepResult]) -> StepRecord:
        """What both arms gave, the same on every rank."""
        step_of = results[1].exchange
        assert isinstance(step_of, Step)
        number = step_of.number
        seconds = self.slowest(number, results[0].seconds, results[1].seconds)
        return StepRecord(
            step=step - self.options.warmup,
            loss_unbalanced=results[0].loss,
            loss_balanced=results[1].loss,
            grad_difference=self.grad_difference(number),
            seconds_unbalanced=seconds[0],
            seconds_balanced=seconds[1],
            plan=step_of.metrics() | self._totals(step_of),
        )

    def _totals(self, step: Step) -> dict[str, Any]:
        sent = self.reduced(torch.tensor([step.traffic.total]), "sent bytes", step.number)
        return {
            "total_tokens": int(step.plan.seq_lens.sum()),
            "forward_flops": self.forward_flops(step.plan.seq_lens),
            "sent_bytes": int(sent),
            "single_binds": step.plan.binding is not None,
        }

    def load(self, step: int, read: Callable[[int], _Batch]) -> _Batch:
        """This rank's batch; a rank that cannot load one ends all ranks with the same error."""
        batch, error = None, None
        try:
            batch = read(step)
        except (ConfigError, OSError) as met:
            error = met
        control = self.parallel.group.control or self.parallel.group
        agree(control, {}, error, what="loading a batch", step=step + 1)
        assert batch is not None
        return batch


def open_stream(
    options: BenchOptions, encoders: FrozenEncoders, rank: int, world_size: int
) -> SampleStream:
    """The batches of one rank.

    Raises:
        ConfigError: The folder has no photos that can be read, or the codes do not fit.
    """
    if options.data is not None:
        return SyntheticStream(options.data, rank=rank, world_size=world_size, seed=options.seed)
    assert options.photos is not None
    return PhotoStream(
        options.photos,
        options.batch_size,
        rank=rank,
        world_size=world_size,
        seed=options.seed,
        options=encoders.photo_options(options),
    )


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of one device by its maker's data sheet, if known."""
    known = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
    return next((peak for name, peak in known.items() if name in device_name), None)


def summarize(records: list[StepRecord], setting: Setting, options: BenchOptions) -> dict[str, Any]:
    """The numbers of a finished run: both arms, and their ratios."""
    unbalanced_s = np.array([record.seconds_unbalanced for record in records])
    balanced_s = np.array([record.seconds_balanced for record in records])
    before = np.array([record.plan["makespan_unbalanced"] for record in records])
    after = np.array([record.plan["makespan"] for record in records])
    losses = np.array([(record.loss_unbalanced, record.loss_balanced) for record in records])
    passes = 4.0 if options.checkpoint else 3.0
    flops = passes * sum(record.plan["forward_flops"] for record in records)
    tokens = sum(record.plan["total_tokens"] for record in records)

    def arm(seconds: np.ndarray, suffix: str) -> dict[str, Any]:
        return {
            "wir": float(np.mean([record.plan[f"wir{suffix}"] for record in records])),
            "imbalance": float(np.mean([record.plan[f"imbalance{suffix}"] for record in records])),
            "fbl_median_s": float(np.median(seconds)),
            "fbl_spread_s": [float(q) for q in np.quantile(seconds, (0.1, 0.9))],
            "tokens_per_s": tokens / float(seconds.sum()),
            "flops_per_s": flops / float(seconds.sum()),
            "hfu": _share(flops / float(seconds.sum()), setting),
        }

    return {
        "setting": asdict(setting),
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(options).items()
        },
        "steps": len(records),
        "unbalanced": arm(unbalanced_s, "_unbalanced"),
        "balanced": arm(balanced_s, ""),
        "measured_ratio": float(unbalanced_s.sum() / balanced_s.sum()),
        "measured_ratio_spread": [
            float(q) for q in np.quantile(unbalanced_s / balanced_s, (0.1, 0.9))
        ],
        "single_binds_steps": sum(record.plan["single_binds"] for record in records),
        "predicted_ratio": float(before.sum() / after.sum()),
        "loss_first": losses[0].tolist(),
        "loss_last": losses[-1].tolist(),
        "loss_difference": float(
            np.max(np.abs(losses[:, 0] - losses[:, 1]) / np.abs(losses[:, 0]))
        ),
        "grad_difference_first": records[0].grad_difference,
        "grad_difference": max(record.grad_difference for record in records),
        "sent_bytes_per_step": float(np.mean([record.plan["sent_bytes"] for record in records])),
        "tokens_per_rank": np.mean([record.plan["tokens"] for record in records], axis=0).tolist(),
    }


def _local_grad(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    return (grad.to_local() if isinstance(grad, DTensor) else grad).double()


def _share(flops_per_s: float, setting: Setting) -> float | None:
    if setting.peak_flops is None:
        return None
    return flops_per_s / (setting.peak_flops * setting.world_size)
