"""The batches of a balanced loader, and its counters."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from bascule.comm.exchange import BoundRoute, exchange
from bascule.comm.groups import RankGroup
from bascule.comm.guard.failures import told
from bascule.data.redistribute import StepData, Verdict
from bascule.errors import ConfigError
from bascule.plan.batch import Plan
from bascule.plan.routes import Route

Interval = tuple[float, float]
"""Start and end, in seconds of `time.perf_counter`."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A microbatch of one rank.

    Attributes:
        data: What `collate_fn` made of the samples.
        loss_scale: Factor of the mean loss of this microbatch. With it, the usual division by the
            number of microbatches, and gradients averaged over the ranks, the step's gradient is
            that of the mean over all ranks and microbatches, whatever moved where. 0 for padding.
        epoch: From 0.
        step: Optimiser step of the epoch, from 0.
        microbatch: Of the step, from 0.
        num_samples: Samples of this rank, without padding.
        is_padding: Whether all there is, is a sample that another rank has, with weight 0.
        plan: Who computes what in this microbatch.
        verdict: Whether samples moved in this step, and why.
    """

    data: Any
    loss_scale: float
    epoch: int
    step: int
    microbatch: int
    num_samples: int
    is_padding: bool
    plan: Plan
    verdict: Verdict
    _group: RankGroup

    @told("restore of a batch")
    def restore(self, values: Tensor) -> Tensor:
        """Bring per-sample results back to the ranks that loaded the samples.

        All ranks of the balancing group call it. One all-to-all, differentiable; none if no sample
        of the step moved.

        Args:
            values: (n, ...) one row for each sample of this microbatch, padding included.

        Returns:
            (m, ...) one row for each sample that this rank loaded, in the order in which it did.

        Raises:
            ConfigError: There is not one row a sample.
        """
        if not isinstance(values, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"restore got a {type(values).__name__}: give a tensor with one row a sample"
            )
        if values.ndim < 1 or values.shape[0] != self.num_samples + self.is_padding:
            raise ConfigError(
                f"restore got values of shape {tuple(values.shape)}: give one row for each of the "
                f"{self.num_samples + self.is_padding} samples of this microbatch"
            )
        values = values[: self.num_samples]
        if not self.verdict.applied:
            return values
        source, dest = self.plan.source_ranks, self.plan.bag_of
        route = Route.of_items(
            source, dest, np.ones_like(dest), self._group.rank, self.plan.num_ranks
        ).inverse()
        name = f"restore of microbatch {self.microbatch}"
        bound = BoundRoute(route, self._group, values.device, self.step, name)
        return exchange(bound, [values])[0]


@dataclass(slots=True)
class LoaderMetrics:
    """What a loader did so far on this rank.

    Attributes:
        steps: Steps taken.
        applied: Steps in which samples moved.
        skipped: Steps in which they did not, by reason (see `Verdict.reason`).
        padded: Microbatches that hold nothing but padding.
        dropped_samples: Samples of this rank that "drop_last" left out.
        sent_bytes: Bytes of samples that this rank sent.
        received_bytes: Bytes of samples that it received.
        exchange_s: Seconds in which the thread agreed, planned and exchanged.
        exposed_s: Those of them in which the training thread waited.
        hidden_s: The others.
        predicted_before: Sum of the predicted steps as loaded, in the unit of the cost model.
        predicted_after: The same as delivered.
    """

    steps: int = 0
    applied: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    padded: int = 0
    dropped_samples: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    exchange_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    predicted_before: float = 0.0
    predicted_after: float = 0.0

    def count(self, data: StepData, exchange: Interval, waited: Interval) -> None:
        """Add a step, the time of its exchange, and the time in which it was waited for."""
        verdict = data.verdict
        self.steps += 1
        self.applied += verdict.applied
        if not verdict.applied:
            self.skipped[verdict.reason] = self.skipped.get(verdict.reason, 0) + 1
        self.padded += sum(part.is_padding for part in data.microbatches)
        self.sent_bytes += data.sent_bytes
        self.received_bytes += data.received_bytes
        exposed = max(min(exchange[1], waited[1]) - max(exchange[0], waited[0]), 0.0)
        self.exchange_s += exchange[1] - exchange[0]
        self.exposed_s += exposed
        self.hidden_s += exchange[1] - exchange[0] - exposed
        self.predicted_before += verdict.before
        self.predicted_after += verdict.after if verdict.applied else verdict.before
