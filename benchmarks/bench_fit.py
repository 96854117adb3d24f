"""Cost models fitted to iteration times: how well they predict ranks, and what their plans lose.

Run: `python benchmarks/bench_fit.py` (half a minute); writes results/fit.json. Needs no quiet
machine, but for the milliseconds of a fit.

The truth is 2.1e-10 L^2 + 7.5e-6 L + 4e-4 seconds a sequence and 0.35 s a rank and step, lengths
are log-normal (median 2048, sigma 1.2, clipped to 64..32768), 12 a rank, 12 iterations, 3 % noise.
What is measured:

- iterations: the time of the slowest rank, times (1 + 3 % noise);
- noisy ranks: each rank's time has its own noise, and the slowest of these shows;
- own times: each rank's time with its noise.

Fitted by bascule; by the published method (`published_fit`); and by least squares that is told
which rank was the slowest in truth and that the constant is 0, and assumes nothing else ("told"):
what is left of its errors is in the data. Errors are medians over seeds:

- ranks: of predicted rank seconds, overhead included, mean over the ranks of 10 other batches;
- compute: the same without overhead;
- step: seconds of the slowest rank, overhead included, in plans made with the fit over plans made
  with the truth, minus 1, mean over 10 batches; the truth prices both;
- makespan: the same without overhead.

Targets, for bascule: ranks 4 % on 8 ranks, 8 % on 64, 3 % with own times; step 1 %.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import scipy
from _common import write_results
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Column, Table
from scipy.optimize import minimize, nnls

from bascule.errors import ConfigError
from bascule.plan.costs import PolynomialCost
from bascule.plan.fits import fit_iterations
from bascule.plan.plan import plan_batch

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Fit = Callable[[Ints, Floats], PolynomialCost]

TRUTH = PolynomialCost(2.1e-10, 7.5e-6, 4e-4, 0.35)
NOISE = 0.03
NUM_ITERATIONS = 12
SEQS_PER_RANK = 12
NUM_HELD_OUT = 10
RANK_TARGETS = {8: 0.04, 64: 0.08}
OWN_TARGET = 0.03
STEP_TARGET = 0.01


@dataclass(frozen=True)
class Row:
    """Medians over seeds."""

    measured: str
    num_ranks: int
    method: str
    ranks: float
    ranks_worst: float
    compute: float
    step: float
    makespan: float
    fit_ms: float
    refused: int
    target_ranks: float | None
    target_step: float | None

    @property
    def verdict(self) -> str:
        """Whether the targets are met; empty without targets."""
        if self.target_ranks is None or self.target_step is None:
            return ""
        met = self.ranks <= self.target_ranks and self.step <= self.target_step
        return "met" if met else "MISSED"


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 seeds; writes nothing")
    quick = parser.parse_args().quick
    seeds = 3 if quick else 20
    rows = [
        measure(measured, num_ranks, method, fit, seeds)
        for measured in ("iterations", "noisy ranks", "own times")
        for num_ranks in (8, 64)
        for method, fit in METHODS.items()
        if measured != "own times" or method == "bascule"
    ]
    scaling = [fit_seconds(num_ranks) for num_ranks in (64, 1024)]
    console = Console()
    console.print(table(rows))
    for point in scaling:
        console.print(f"{point['num_ranks']} ranks: {1e3 * point['fit_s']:.1f} ms a fit")
    if not quick:
        results = {
            "scipy": scipy.__version__,
            "truth": asdict(TRUTH),
            "noise": NOISE,
            "iterations": NUM_ITERATIONS,
            "sequences_per_rank": SEQS_PER_RANK,
            "seeds": seeds,
            "command": "python benchmarks/bench_fit.py",
            "rows": [asdict(row) | {"verdict": row.verdict} for row in rows],
            "scaling": scaling,
        }
        console.print(f"wrote {write_results('fit', results)}")


def draw(rng: np.random.Generator, num_batches: int, num_ranks: int) -> Ints:
    """(batches, ranks, sequences) tokens."""
    shape = num_batches, num_ranks, SEQS_PER_RANK
    return np.clip(rng.lognormal(math.log(2048), 1.2, shape), 64, 32768).astype(np.int64)


def rank_seconds(cost: PolynomialCost, lens: Ints) -> Floats:
    """(batches, ranks) seconds, overhead included."""
    return cost.overhead + cost(lens).sum(axis=-1)


def observe(measured: str, lens: Ints, rng: np.random.Generator) -> Floats:
    """What the timers show."""
    exact = rank_seconds(TRUTH, lens)
    if measured == "iterations":
        slowest = exact.max(axis=1)
        return slowest * (1.0 + NOISE * rng.standard_normal(slowest.shape))
    noisy = exact * (1.0 + NOISE * rng.standard_normal(exact.shape))
    return noisy if measured == "own times" else noisy.max(axis=1)


def features(lens: Ints) -> Floats:
    """(..., 3) sum of L^2, sum of L, and number of sequences."""
    tokens = lens.astype(np.float64)
    counts = np.full(lens.shape[:-1], lens.shape[-1], dtype=np.float64)
    return np.stack([(tokens**2).sum(axis=-1), tokens.sum(axis=-1), counts], axis=-1)


def published_fit(lens: Ints, seconds: Floats) -> PolynomialCost:
    """LoongForge's method, written anew from its description.

    Squared error of a smooth maximum (temperature 1 / 20) of loads in ms; scales 1e8, 1e4 and 10;
    from zero, bounded below by zero, scipy's L-BFGS-B with its defaults; no overhead.
    """
    alpha, scales = 20.0, np.array([1e8, 1e4, 1e1])
    scaled, times_ms = features(lens) / scales, seconds * 1e3

    def loss(coefs: Floats) -> float:
        loads = scaled @ coefs
        top = loads.max(axis=1)
        smooth = top + np.log(np.exp(alpha * (loads - top[:, None])).sum(axis=1)) / alpha
        return float(((smooth - times_ms) ** 2).sum())

    found = minimize(loss, np.zeros(3), bounds=[(0.0, None)] * 3, method="L-BFGS-B")
    quadratic, linear, constant = (found.x / scales / 1e3).tolist()
    return PolynomialCost(quadratic, linear, constant)


def told_fit(lens: Ints, seconds: Floats) -> PolynomialCost:
    """Relative least squares, told which ranks are the slowest and that the constant is zero."""
    slowest = rank_seconds(TRUTH, lens).argmax(axis=1)
    rows = features(lens)[np.arange(seconds.size), slowest]
    rows[:, 2] = 1.0
    rows /= seconds[:, None]
    scale = rows.mean(axis=0)
    quadratic, linear, overhead = (nnls(rows / scale, np.ones(seconds.size))[0] / scale).tolist()
    return PolynomialCost(quadratic, linear, 0.0, overhead)


def bascule_fit(lens: Ints, seconds: Floats) -> PolynomialCost:
    """As a user calls it."""
    return fit_iterations(lens.tolist(), seconds)


METHODS: dict[str, Fit] = {"bascule": bascule_fit, "published": published_fit, "told": told_fit}


def measure(measured: str, num_ranks: int, method: str, fit: Fit, seeds: int) -> Row:
    """One row: fits of several seeds, against the truth on other batches."""
    errors: list[tuple[float, ...]] = []
    times: list[float] = []
    refused = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        lens = draw(rng, NUM_ITERATIONS, num_ranks)
        seconds = observe(measured, lens, rng)
        held_out = draw(rng, NUM_HELD_OUT, num_ranks)
        start = time.perf_counter()
        try:
            cost = fit(lens, seconds)
        except ConfigError:
            refused += 1
            continue
        times.append(time.perf_counter() - start)
        errors.append((*prediction_errors(cost, held_out), *plan_losses(cost, held_out)))
    ranks, compute, step, makespan = np.median(errors, axis=0).tolist()
    is_ours = method == "bascule"
    target = OWN_TARGET if measured == "own times" else RANK_TARGETS[num_ranks]
    return Row(
        measured=measured,
        num_ranks=num_ranks,
        method=method,
        ranks=ranks,
        ranks_worst=max(error[0] for error in errors),
        compute=compute,
        step=step,
        makespan=makespan,
        fit_ms=1e3 * float(np.median(times)),
        refused=refused,
        target_ranks=target if is_ours else None,
        target_step=STEP_TARGET if is_ours else None,
    )


def prediction_errors(cost: PolynomialCost, lens: Ints) -> tuple[float, float]:
    """Mean relative errors of rank seconds with and without overhead."""
    predicted, exact = rank_seconds(cost, lens), rank_seconds(TRUTH, lens)
    whole = np.abs(predicted / exact - 1.0).mean()
    compute = np.abs((predicted - cost.overhead) / (exact - TRUTH.overhead) - 1.0).mean()
    return float(whole), float(compute)


def plan_losses(cost: PolynomialCost, lens: Ints) -> tuple[float, float]:
    """What plans made with the fit take longer, with and without overhead."""
    with_fit = np.array([makespan_by_truth(cost, batch) for batch in lens])
    with_truth = np.array([makespan_by_truth(TRUTH, batch) for batch in lens])
    step = (with_fit + TRUTH.overhead) / (with_truth + TRUTH.overhead) - 1.0
    return float(step.mean()), float((with_fit / with_truth - 1.0).mean())


def makespan_by_truth(cost: PolynomialCost, batch: Ints) -> float:
    """Seconds of the slowest rank of a plan made with `cost`, without overhead."""
    plan = plan_batch(batch.tolist(), f"g1n{batch.shape[0]}", cost)
    return float(np.bincount(plan.bag_of, TRUTH(plan.seq_lens), batch.shape[0]).max())


def fit_seconds(num_ranks: int) -> dict[str, float]:
    """Median time of a fit."""
    rng = np.random.default_rng(0)
    lens = draw(rng, NUM_ITERATIONS, num_ranks)
    seconds, given, times = observe("iterations", lens, rng), lens.tolist(), list[float]()
    for _ in range(9):
        start = time.perf_counter()
        fit_iterations(given, seconds)
        times.append(time.perf_counter() - start)
    return {"num_ranks": num_ranks, "fit_s": float(np.median(times))}


def table(rows: list[Row]) -> Table:
    """Percentages."""
    heads = ("times", "N", "fit", "ranks", "comp.", "step", "msp.", "ms", "")
    columns = (Column(head, no_wrap=True) for head in heads)
    shown = Table(*columns, title="Fits of iteration times, errors in %")
    for row in rows:
        errors = (row.ranks, row.compute, row.step, row.makespan)
        shown.add_row(
            row.measured,
            str(row.num_ranks),
            row.method,
            *(f"{100 * error:.2f}" for error in errors),
            f"{row.fit_ms:.1f}",
            row.verdict,
        )
    return shown


if __name__ == "__main__":
    main()
