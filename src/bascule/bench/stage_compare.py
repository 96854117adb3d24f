"""The measurement of steps that start from pixels and captions: stage by stage, both ways.

Without balancing, every rank encodes what it loaded and waits for nobody before the transformer;
with it, each stage is shared by all ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from bascule.arrays import Floats
from bascule.bench.arms import StepResult
from bascule.bench.compare import Comparison, Setting, StepRecord, summarize
from bascule.bench.options import BenchOptions
from bascule.comm.collectives import all_gather
from bascule.comm.groups import device_of
from bascule.encoders import EncoderOptions
from bascule.plan.metrics import imbalance
from bascule.train.encoder_stages import (
    TRANSFORMER,
    EncoderStages,
    stages_of,
    watch_encoders,
)
from bascule.train.stopwatch import Stopwatch, watch_blocks
from bascule.workload.photos import PhotoStream

ARMS = ("unbalanced", "balanced")
_MEASURES = ("seconds", "work", "predicted")


@dataclass(frozen=True, slots=True)
class StagedStepRecord(StepRecord):
    """One measured step, with the times of its stages.

    Attributes:
        stages: By "unbalanced" and "balanced", then by stage, then by "seconds" from its begin to
            its end, "work" seconds within it, and "predicted" work in units of the stage: lists
            with a number for each rank.
    """

    stages: dict[str, dict[str, dict[str, list[float]]]]


class StagedComparison(Comparison):
    """Trained without and with balancing, encoders included."""

    def __init__(self, options: BenchOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self._names = (*stages_of(self.encoders), TRANSFORMER)
        self._watch = Stopwatch(device)
        watch_encoders(self.encoders, self._watch)
        for arm in self.arms:
            model: Any = arm.model
            watch_blocks([*model.double_blocks, *model.single_blocks], self._watch)
        shape, names = (self.group.size, 1), ("ranks", "alone")
        alone = init_device_mesh(device.type, shape, mesh_dim_names=names)["alone"]
        self._stages = [
            EncoderStages(
                self.encoders,
                mesh,
                widths=self.stream,
                seed=options.seed,
                watch=self._watch,
                options=EncoderOptions(device=device, timeout_s=options.timeout_s),
            )
            for mesh in (alone, self.mesh)
        ]

    @property
    def _photos(self) -> PhotoStream:
        return cast(PhotoStream, self.stream)

    def own_lens(self, step: int) -> list[int]:
        """Tokens of the samples of this rank."""
        return [shape.seq_len for shape in self._photos.shapes(self._photos.numbers(step))]

    def run(self) -> Iterator[StagedStepRecord]:
        """Train; yields each step after the warm-up."""
        return cast(Iterator[StagedStepRecord], super().run())

    def trained(self, step: int) -> StagedStepRecord:
        """Train both ways on the pixels and captions of a step."""
        photos = self._photos
        raw = self.load(step, lambda number: photos.raw(photos.numbers(number)))
        results, times = dict[int, StepResult](), np.zeros((2, len(self._names), 2))
        for arm in self.in_turns(step):
            encode = self._stages[arm].encode
            results[arm] = self.arms[arm].step(lambda encode=encode: self.flow(encode([raw])[0]))
            times[arm] = self._times(results[arm].seconds)
        record = super().recorded(step, results)
        of_ranks = self._of_ranks(times, step)
        values = {name: getattr(record, name) for name in StepRecord.__slots__}
        return StagedStepRecord(**values, stages=self._told(of_ranks, results[1]))

    def _times(self, total: float) -> Floats:
        """(stages, 2) seconds, and those of work, of this rank since the last time."""
        laps = self._watch.read()
        seconds = [laps[name, 0] for name in self._names[:-1]]
        work = [laps[f"{name} work", 0] for name in self._names[:-1]]
        return np.array([[*seconds, total - sum(seconds)], [*work, laps["work", 0]]]).T

    def _of_ranks(self, times: Floats, step: int) -> Floats:
        """(arms, stages, 2, ranks)."""
        call = f"step {step + 1}: all_gather (seconds of stages)"
        own = torch.from_numpy(times.reshape(-1)).to(device_of(self.group))
        gathered = all_gather(self.group, call, own).cpu().numpy()
        return np.moveaxis(gathered.reshape(-1, *times.shape), 0, -1)

    def _told(self, times: Floats, balanced: StepResult) -> dict[str, Any]:
        plan = cast(Any, balanced.exchange).plan
        loads = {TRANSFORMER: (plan.unbalanced_loads(self.cost).tolist(), plan.loads.tolist())}
        none = [0.0] * self.group.size
        for name, encoding in self._stages[1].last.items():
            loads[name] = none, none
            if encoding is not None:
                loads[name] = list(encoding.loads_as_given), list(encoding.loads)
        return {
            arm: {
                name: dict(
                    zip(
                        _MEASURES,
                        (*times[k, place].tolist(), loads[name][k]),
                        strict=True,
                    )
                )
                for place, name in enumerate(self._names)
            }
            for k, arm in enumerate(ARMS)
        }


def summarize_stages(
    records: Sequence[StagedStepRecord], setting: Setting, options: BenchOptions
) -> dict[str, Any]:
    """As `summarize`, with "stages": imbalance and mean seconds of each, predicted and measured.

    Work becomes predicted seconds by the rate at which the ranks worked without balancing. Without
    it, ranks wait for each other behind their encoders alone; with it, behind every stage. So the
    predicted seconds of a whole step are those of the slowest rank in each. The transformer is
    measured from when the last rank has encoded.
    """
    summary = summarize(list(records), setting, options)
    stages, predicted_s = dict[str, Any](), dict[str, list[Floats]]()
    for name in records[0].stages[ARMS[0]]:
        found = {arm: _measured(records, arm, name) for arm in ARMS}
        _, work, costs = found[ARMS[0]]
        rate = float(work.sum() / costs.sum()) if costs.sum() > 0 else 0.0
        last = np.min if name == TRANSFORMER else np.max
        own = dict[str, Any]()
        for arm, (seconds, work, costs) in found.items():
            own[arm] = {
                "imbalance_predicted": float(np.mean([imbalance(one) for one in costs])),
                "imbalance_measured": float(np.mean([imbalance(one) for one in work])),
                "seconds_predicted": rate * float(costs.max(axis=1).mean()),
                "seconds_measured": float(last(seconds, axis=1).mean()),
            }
        stages[name] = own | _ratios(own)
        predicted_s[name] = [rate * costs for _, _, costs in found.values()]
    *encoders, transformer = predicted_s.values()
    encoded = np.sum([own[0] for own in encoders], axis=0)
    before = encoded.max(axis=1) + transformer[0].max(axis=1)
    after = np.sum([own[1].max(axis=1) for own in predicted_s.values()], axis=0)
    step = {
        arm: {
            "seconds_predicted": float(predicted.mean()),
            "seconds_measured": float(
                np.mean([getattr(record, f"seconds_{arm}") for record in records])
            ),
        }
        for arm, predicted in zip(ARMS, (before, after), strict=True)
    }
    stages["step"] = step | _ratios(step)
    return summary | {"stages": stages, "predicted_ratio": stages["step"]["predicted_ratio"]}


def _measured(
    records: Sequence[StagedStepRecord], arm: str, stage: str
) -> tuple[Floats, Floats, Floats]:
    """(steps, ranks) seconds, work and predicted work."""
    seconds, work, costs = (
        np.array([record.stages[arm][stage][measure] for record in records])
        for measure in _MEASURES
    )
    return seconds, work, costs


def _ratios(arms: dict[str, Any]) -> dict[str, float]:
    """How many times as fast a stage is with balancing."""
    return {
        f"{kind}_ratio": arms[ARMS[0]][f"seconds_{kind}"]
        / max(arms[ARMS[1]][f"seconds_{kind}"], 1e-300)
        for kind in ("predicted", "measured")
    }


def median_step(records: Sequence[StagedStepRecord]) -> StagedStepRecord:
    """The one whose speed-up is the median."""
    return sorted(records, key=lambda one: one.seconds_unbalanced / one.seconds_balanced)[
        len(records) // 2
    ]
