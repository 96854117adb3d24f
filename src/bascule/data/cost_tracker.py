"""The cost of a sample, learned from the steps of the job itself while it runs."""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bascule.arrays import Floats, Ints
from bascule.calibrate.timed import Moment, moment, seconds_between
from bascule.checks import number, whole
from bascule.comm.agree import agree
from bascule.comm.collectives import all_gather, broadcast
from bascule.comm.groups import set_timeout
from bascule.data.loader import DEFAULT_TIMEOUT_S, BalancedLoader
from bascule.data.steps import Batch
from bascule.errors import ConfigError
from bascule.machine.costs import PolynomialCost
from bascule.machine.fits import MIN_OBSERVATIONS, TERMS, fit_iterations

logger = logging.getLogger(__name__)

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """A microbatch or a step, after which ranks wait for each other."""

    seq_lens: list[Ints]  # of each data-parallel rank
    laps: list[tuple[Moment, Moment]]  # begin and end of this rank's compute of each microbatch
    is_padded: bool  # this rank computed on padding, which the plan does not have

    def seconds(self) -> float:
        """Return this rank's compute time; nan with padding, whose length is not in the plan."""
        return math.nan if self.is_padded else sum(seconds_between(*lap) for lap in self.laps)


class CostTracker:
    """Iterates over a loader, times the work on each batch, and teaches the loader its cost.

    After a warm-up, all ranks gather their times in one small collective, fit a `PolynomialCost`,
    and set it in the loader. From then on they compare predictions with times, a window at a time,
    and fit again if these drift apart. Every rank constructs it with the same settings, and takes
    the same number of batches.

    On a CPU, the CPU time of the training thread counts, without waits. On a GPU, events measure
    the time between two batches, with the wait for the slowest rank, as the fit expects.

    Args:
        loader: The loader.
        warmup: Measurements before the first fit; of microbatches with sync "microbatch", else of
            steps.
        discard: Number of first measurements to leave out: these steps compile and allocate.
        window: Measurements between two checks of the drift.
        max_drift: If a window's median relative error is above this, the model is fitted again.
        device: Device of the compute. Default: a GPU if there is one.
        timeout_s: Longest wait for the times of other ranks.

    Raises:
        CommError: The settings differ between ranks.

    Example:
        >>> for batch in CostTracker(loader):  # doctest: +SKIP
        ...     train(batch)
    """

    def __init__(
        self,
        loader: BalancedLoader,
        *,
        warmup: int = 10,
        discard: int = 2,
        window: int = 50,
        max_drift: float = 0.1,
        device: torch.device | str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._loader, self._ranks = loader, loader.ranks
        numbers = {"warmup": warmup, "discard": discard, "window": window, "max_drift": max_drift}
        numbers["timeout_s"] = timeout_s
        text = f"CostTracker({', '.join(f'{name}={value!r}' for name, value in numbers.items())})"
        error: ConfigError | None = None
        try:
            whole("CostTracker(warmup", warmup, MIN_OBSERVATIONS)
            whole("CostTracker(window", window, MIN_OBSERVATIONS)
            whole("CostTracker(discard", discard)
            number("CostTracker(max_drift", max_drift, 1e-6)
            number("CostTracker(timeout_s", timeout_s, 1e-3, 1e7)
        except ConfigError as failure:  # all ranks raise it
            error = failure
        agree(self._ranks.group, {"the tracker": text}, error, what="construction of a tracker")
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(default if device is None else device)
        self._timeout_s = float(timeout_s)
        self._window, self._max_drift = window, max_drift
        self._num_discarded, self._num_wanted = discard, warmup  # measurements still to take
        self._units: list[_Unit] = []
        self._num_gathered = 0
        self.cost: PolynomialCost | None = None
        self.num_fits = 0
        self.drift: float | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the loader, and time the work on each."""
        laps: list[tuple[Moment, Moment]] = []
        batches: list[Batch] = []
        accumulate = self._loader.rules.accumulate
        per_unit = 1 if self._loader.rules.sync == "microbatch" else accumulate
        for batch in self._loader:
            start = moment(self._device, time.thread_time)
            yield batch
            laps.append((start, moment(self._device, time.thread_time)))
            batches.append(batch)
            if len(batches) == per_unit:
                self._observe(batches, laps)
                laps, batches = [], []

    def state_dict(self) -> dict[str, Any]:
        """Return the fitted cost model, as plain values; the same on every rank."""
        cost = self.cost
        coefficients = None if cost is None else [getattr(cost, name) for name in TERMS]
        return {"version": STATE_VERSION, "cost": coefficients}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use a cost model that was fitted before, on all ranks, without a new warm-up."""
        try:
            version = state["version"]
            coefficients = state["cost"] if version == STATE_VERSION else None
            cost = None if coefficients is None else PolynomialCost(*coefficients)
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this is not a tracker's state written by state_dict: {error!r}"
            ) from None
        if version != STATE_VERSION:
            raise ConfigError(
                f"the tracker's state has version {version!r}: this bascule reads {STATE_VERSION}"
            )
        if cost is not None:
            self._use(cost)

    def metrics(self) -> dict[str, Any]:
        """Return coefficients, number of fits, and the last drift."""
        cost = {} if self.cost is None else {name: getattr(self.cost, name) for name in TERMS}
        return cost | {"num_fits": self.num_fits, "drift": self.drift}

    def _use(self, cost: PolynomialCost) -> None:
        num_bytes = getattr(self._loader.cost, "bytes_per_token", None)  # which no fit measures
        self.cost = replace(cost, bytes_per_token=num_bytes)
        self._num_wanted = self._window
        self._loader.set_cost(self.cost)

    def _observe(self, batches: list[Batch], laps: list[tuple[Moment, Moment]]) -> None:
        if self._num_discarded:
            self._num_discarded -= 1
            return
        num_ranks = self._ranks.num
        lens = [
            np.concatenate([b.plan.seq_lens[b.plan.bag_of == rank] for b in batches])
            for rank in range(num_ranks)
        ]
        self._units.append(_Unit(lens, laps, any(batch.is_padding for batch in batches)))
        if len(self._units) == self._num_wanted:
            self._learn()
            self._units = []

    def _learn(self) -> None:
        """Gather the times, and fit a new cost model if the old one does not predict them."""
        set_timeout(self._ranks.group, self._timeout_s)
        seconds = self._gather()
        fitted = np.full(1 + len(TERMS), np.nan)  # the drift, and the coefficients of a new fit
        if self._ranks.group.rank == 0:  # processors may round a fit differently
            lens = [unit.seq_lens for unit in self._units]
            if self.cost is not None:
                fitted[0] = _drift(self.cost, lens, seconds)
            if self.cost is None or fitted[0] > self._max_drift:
                try:
                    cost = fit_iterations(lens, seconds)
                    fitted[1:] = [getattr(cost, name) for name in TERMS]
                except ConfigError as error:
                    logger.warning("the cost model stays as it is: %s", error)
        where = f"step {self._num_gathered}: broadcast (cost model)"
        drift, *terms = broadcast(self._ranks.group, where, torch.from_numpy(fitted)).tolist()
        self.drift = None if math.isnan(drift) else drift
        if not math.isnan(terms[0]):
            self.num_fits += 1
            self._use(PolynomialCost(*terms))

    def _gather(self) -> Floats:
        """Return times (units, D) of all ranks on CPUs; of the slowest rank (units,) on GPUs."""
        self._num_gathered += 1
        seconds = torch.tensor([unit.seconds() for unit in self._units], dtype=torch.float64)
        call = f"step {self._num_gathered}: all_gather (seconds)"
        times = all_gather(self._ranks.group, call, seconds).numpy()
        if self._device.type == "cuda":
            return np.nanmax(times, axis=0)
        place_of = self._ranks.place
        return np.stack([times[place_of == i].max(axis=0) for i in range(self._ranks.num)], axis=1)


def _drift(cost: PolynomialCost, seq_lens: list[list[Ints]], seconds: Floats) -> float:
    """Return the median relative error of the cost model's prediction."""
    predicted = np.array([[cost(lens).sum() for lens in unit] for unit in seq_lens])
    predicted = predicted + cost.overhead
    if seconds.ndim == 1:
        predicted = predicted.max(axis=1)
    is_measured = np.isfinite(seconds) & (seconds > 0)
    errors = np.abs(predicted[is_measured] / seconds[is_measured] - 1.0)
    return float(np.median(errors)) if errors.size else 0.0
