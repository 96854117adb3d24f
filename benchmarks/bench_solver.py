"""The solver against its lower bound, against the paper's greedy, and against a bare heap.

Run: `python benchmarks/bench_solver.py` (about twelve minutes; `--quick`: a few minutes, with fewer
steps and rounds, nothing written); writes results/solver.json and results/solver_growth.svg.

Quality needs no clock: the gap is certified by the solver's own lower bound. Time is measured
against the least that a longest-first solver can cost in Python: one sort and one `heapreplace` an
item, over the same costs, in turns with the solver. Each stage of the solver is also left out once,
on the cases that it is for, to show what it is worth.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from heapq import heapreplace
from typing import Any, Literal

import numpy as np
import scipy
from _common import MIXES, RESULTS, ratio, summary, time_interleaved, write_results
from _solver_stages import stages, stages_table
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Column, Table
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csc_array

from bascule.errors import PlanError
from bascule.plan.costs import TransformerCost
from bascule.plan.limits import Limits
from bascule.plan.solver.solve import assign
from bascule.plan.topology import Topology
from bascule.workload.codes import parse_data_codes, sample_lengths, seq_lens

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_RANKS = 32
EQUAL_BAGS = ("g1n32", "g2n16", "g4n8", "g8n4")
MIXED_BAGS = ("g1n8+g8n3", "g1n16+g8n2", "g1n24+g8n1")
COST = TransformerCost(3072, gamma=0.426)
PROOF_S = 10.0
INFEASIBLE = 2
"""HiGHS's status, as scipy.optimize.milp returns it."""


@dataclass(frozen=True)
class Quality:
    """Makespans of several steps, over what they are compared with, minus 1."""

    case: str
    gap_mean: float
    gap_max: float
    target: float
    reference_mean: float
    above_reference: int

    @property
    def met(self) -> bool:
        """Whether the mean meets the target, and no step is above the reference."""
        return self.gap_mean <= self.target and self.above_reference == 0


@dataclass(frozen=True)
class Speed:
    """Least time of a solve and of a bare heap, and their ratio; and the median of ratios.

    On a busy machine a call of milliseconds is interrupted more often than one of a tenth of that,
    so the ratio of the minima is the one that repeats.
    """

    case: str
    gap: float
    solver_us: float
    heap_us: float
    ratio: float
    median_ratio: float
    target: float | None


def main() -> None:
    """Measure, print the tables, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps; writes nothing")
    quick = parser.parse_args().quick
    steps, rounds = (5, 5) if quick else (50, 41)
    console = Console()
    table1 = list(table1_quality(steps))
    console.print(quality_table("Table 1 mixes on 32 ranks", "greedy", table1))
    lognormal = list(lognormal_quality(2 if quick else 5))
    console.print(quality_table("Log-normal lengths, 16 a rank", "before", lognormal))
    limited = list(limited_quality(steps))
    console.print(limited_table(limited))
    local = list(locality(min(steps, 20)))
    console.print(locality_table(local))
    batches = {
        mix: [table1_lengths(mix, step) for step in range(1 if quick else 3)] for mix in MIXES
    }
    ablation = list(stages(batches))
    console.print(stages_table(ablation))
    speeds = [time_case(*case, rounds) for case in speed_cases()]
    console.print(speed_table(speeds))
    growth = growth_exponent(rounds)
    console.print(f"time grows as (n log n)^{growth['exponent']:.2f}, 16 items a bin")
    if not quick:
        results = {
            "scipy": scipy.__version__,
            "quality": [asdict(row) | {"met": row.met} for row in table1 + lognormal],
            "limited": limited,
            "locality": local,
            "stages": ablation,
            "speed": [asdict(row) for row in speeds],
            "growth": growth,
        }
        console.print(f"wrote {write_results('solver', results)}")
        plot = RESULTS / "solver_growth.svg"
        plot.write_text(growth_plot(growth), encoding="utf-8")
        console.print(f"wrote {plot}")


def table1_lengths(mix: str, step: int) -> list[list[int]]:
    """Lengths per source rank."""
    return seq_lens(sample_lengths(parse_data_codes(MIXES[mix]), seed=0, step=step))


def table1_costs(mix: str, step: int) -> Floats:
    """Costs of all sequences of a step."""
    return COST(np.concatenate([np.array(rank) for rank in table1_lengths(mix, step)]))


def lognormal_costs(num_items: int, sigma: float, seed: int) -> Floats:
    """Costs of lengths around 2048, clipped to 64..32768."""
    draw = np.random.default_rng(seed).lognormal(math.log(2048), sigma, num_items)
    return COST(np.clip(draw, 64, 32768).astype(np.int64))


def bag_speeds(spec: str) -> list[float]:
    """Ranks per bag."""
    return [float(len(bag)) for bag in Topology.parse(spec).bags]


def greedy_makespan(costs: Floats, speeds: Sequence[float]) -> float:
    """KnapFormer's greedy: the least filled of the bags whose remaining capacity fits."""
    speed = np.array(speeds)
    capacity, loads = costs.sum() / speed.sum() * speed, np.zeros(speed.size)
    for item in np.argsort(-costs, kind="stable"):
        fits = np.flatnonzero(capacity - loads >= costs[item])
        if fits.size:
            bag = fits[np.argmin((loads / capacity)[fits])]
        else:
            bag = np.argmin((loads + costs[item]) / speed)
        loads[bag] += costs[item]
    return float((loads / speed).max())


def bare_heap(costs: list[float], num_bins: int) -> list[int]:
    """Longest first on a heap, and nothing else."""
    heap = [(0.0, index) for index in range(num_bins)]
    bin_of = [0] * len(costs)
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, index = heap[0]
        bin_of[item] = index
        heapreplace(heap, (load + costs[item], index))
    return bin_of


def table1_quality(steps: int) -> Iterator[Quality]:
    """Gap to the bound on every mix and topology, and the greedy's."""
    for mix in MIXES:
        for spec in EQUAL_BAGS + MIXED_BAGS:
            speeds = bag_speeds(spec)
            gaps, greedy = [], []
            for step in range(steps):
                costs = table1_costs(mix, step)
                plan = assign(costs, speeds=speeds)
                gaps.append(plan.gap)
                greedy.append(greedy_makespan(costs, speeds) / plan.lower_bound - 1.0)
            target = 1e-4 if spec in EQUAL_BAGS else 1e-3
            yield quality(f"{mix} {spec}", gaps, greedy, target)


def lognormal_quality(seeds: int) -> Iterator[Quality]:
    """Gap to the bound over ranks, and the imbalance without balancing."""
    for sigma in (0.8, 1.2):
        for num_ranks in (8, 32, 128, 512, 1024):
            gaps, before = [], []
            for seed in range(seeds):
                costs = lognormal_costs(16 * num_ranks, sigma, seed)
                plan = assign(costs, num_ranks)
                gaps.append(plan.gap)
                dealt = costs.reshape(num_ranks, 16).sum(axis=1)
                before.append(float(dealt.max()) / plan.lower_bound - 1.0)
            target = 1e-3 if num_ranks >= 32 else 1e-2
            yield quality(f"sigma {sigma}, {num_ranks} ranks", gaps, before, target)


def quality(case: str, gaps: list[float], reference: list[float], target: float) -> Quality:
    """Mean and maximum over steps."""
    above = sum(a > b + 1e-9 for a, b in zip(gaps, reference, strict=True))
    return Quality(case, float(np.mean(gaps)), max(gaps), target, float(np.mean(reference)), above)


def limited_quality(steps: int) -> Iterator[dict[str, Any]]:
    """A cap 5 % above the mean tokens of a rank: makespan over the uncapped one.

    Refusals, and steps more than 1 % above, are proved right where integer programming finds no
    assignment either.
    """
    for mix in MIXES:
        for spec in EQUAL_BAGS + MIXED_BAGS:
            found = [limited_step(mix, spec, step) for step in range(steps)]
            ratios = [over for outcome, over, _ in found if outcome == "planned"]
            refused = [proved for outcome, _, proved in found if outcome == "refused"]
            yield {
                "case": f"{mix} {spec}",
                "steps": steps,
                "longest_exceeds_cap": sum(outcome == "too long" for outcome, _, _ in found),
                "refused": len(refused),
                "refusals_proved": sum(refused),
                "over_uncapped_mean": float(np.mean(ratios)) if ratios else None,
                "over_uncapped_max": max(ratios, default=None),
                "above_1_percent": sum(ratio > 0.01 for ratio in ratios),
                "of_those_proved_impossible": sum(
                    proved for outcome, _, proved in found if outcome == "planned"
                ),
            }


def limited_step(
    mix: str, spec: str, step: int
) -> tuple[Literal["too long", "refused", "planned"], float, bool]:
    """What became of a step, its makespan over the uncapped one, and whether no better is proved.

    A proof is sought for a refusal, and for a makespan more than 1 % above the uncapped one.
    """
    speeds = np.array(bag_speeds(spec))
    lengths = np.concatenate([np.array(rank) for rank in table1_lengths(mix, step)])
    cap = int(1.05 * lengths.sum() / NUM_RANKS) + 1
    if lengths.max() > cap * speeds.max():
        return "too long", math.inf, True
    costs = COST(lengths)
    try:
        plan = assign(costs, speeds=speeds, sizes=lengths, limits=Limits(tokens=cap))
    except PlanError:
        anything = float(costs.sum())
        return "refused", math.inf, cannot_finish(costs, lengths, speeds, cap, anything)
    tokens = np.bincount(plan.bin_of, weights=lengths, minlength=speeds.size)
    assert (tokens <= cap * speeds).all()
    free = assign(costs, speeds=speeds).makespan
    over = plan.makespan / free - 1.0
    is_far = over > 0.01
    return "planned", over, is_far and cannot_finish(costs, lengths, speeds, cap, 1.01 * free)


def cannot_finish(costs: Floats, sizes: Ints, speeds: Floats, cap: int, ceiling: float) -> bool:
    """Whether integer programming proves that no assignment within the cap ends by the ceiling.

    Bins of equal speed are told apart by their longest item. False where HiGHS finds an answer or
    its time ends, so on a slower machine less may be proved.
    """
    order = np.argsort(-costs, kind="stable")
    costs, sizes = costs[order] / ceiling, sizes[order]
    items, bins = costs.size, speeds.size
    item, bag = np.repeat(np.arange(items), bins), np.tile(np.arange(bins), items)
    cells = np.arange(items * bins)
    once = csc_array((np.ones(cells.size), (item, cells)))
    tokens, times = (csc_array((use[item], (bag, cells))) for use in (sizes / cap, costs))
    upper = np.ones((items, bins))
    if np.ptp(speeds) == 0:
        for first in range(min(items, bins)):
            upper[first, first + 1 :] = 0.0
    result = milp(
        np.zeros(cells.size),
        integrality=np.ones(cells.size, dtype=np.int64),
        bounds=Bounds(0.0, upper.ravel()),
        constraints=[
            LinearConstraint(once, 1.0, 1.0),
            LinearConstraint(tokens, -np.inf, speeds),
            LinearConstraint(times, -np.inf, speeds * (1.0 + 1e-9)),
        ],
        options={"time_limit": PROOF_S},
    )
    return result.status == INFEASIBLE


def locality(steps: int) -> Iterator[dict[str, Any]]:
    """Share of the tokens that leave their rank or node."""
    cases = (("mixed", "g1n32", 0.0, 0.38), ("joint", "g8n4", 0.01, 0.30))
    for mix, spec, tolerance, target in cases:
        speeds = bag_speeds(spec)
        bag_of_rank = np.repeat(np.arange(len(speeds)), np.array(speeds, dtype=np.int64))
        before, after, makespan = [], [], []
        for step in range(steps):
            ranks = table1_lengths(mix, step)
            lengths = np.concatenate([np.array(rank) for rank in ranks])
            home = np.repeat(bag_of_rank, [len(rank) for rank in ranks])
            free = assign(COST(lengths), speeds=speeds)
            near = assign(
                COST(lengths),
                speeds=speeds,
                sizes=lengths,
                location=home,
                locality_tolerance=tolerance,
            )
            before.append(lengths[free.bin_of != home].sum() / lengths.sum())
            after.append(lengths[near.bin_of != home].sum() / lengths.sum())
            makespan.append(near.makespan / free.makespan - 1.0)
        yield {
            "case": f"{mix} {spec}, tolerance {tolerance:g}",
            "away_without_home": float(np.mean(before)),
            "away": float(np.mean(after)),
            "target": target,
            "makespan_over_best_max": max(makespan),
        }


Case = tuple[str, Floats, list[float], float | None]


def speed_cases() -> Iterator[Case]:
    """What is timed: name, costs, speeds, target."""
    for spec, target in (("g1n32", 5.0), ("g8n4", 5.0), *((bags, 20.0) for bags in MIXED_BAGS)):
        yield f"low-res {spec}", table1_costs("low-res", 0), bag_speeds(spec), target
    for bins, sigma in ((32, 0.8), (32, 1.2), (4, 0.8), (4, 1.2)):
        costs = lognormal_costs(1024, sigma, 0)
        yield f"log-normal {sigma}, 1k in {bins}", costs, [1.0] * bins, 5.0
    for sigma in (0.8, 1.2):
        costs = lognormal_costs(16384, sigma, 0)
        yield f"log-normal {sigma}, 16k in 1k", costs, [1.0] * 1024, 3.0
    joint = np.concatenate([table1_costs("joint", step) for step in range(512)])[:45000]
    yield "joint, 45k in 16k", joint, [1.0] * 16384, 4.0
    uniform = np.random.default_rng(0).uniform(1.0, 2.0, 45000)
    yield "uniform 1..2, 45k in 16k", uniform, [1.0] * 16384, 4.0
    for mix in ("mixed", "joint"):
        for spec in ("g8n4", "g1n8+g8n3"):
            yield f"{mix} {spec}, small", table1_costs(mix, 0), bag_speeds(spec), None


def time_case(
    name: str, costs: Floats, speeds: list[float], target: float | None, rounds: int
) -> Speed:
    """A solve and a bare heap, in turns."""
    listed, same = costs.tolist(), len(set(speeds)) == 1

    def solve() -> object:
        # Equal bags have equal speeds; only their number matters for the search.
        return assign(costs, len(speeds)) if same else assign(costs, speeds=speeds)

    # Short samples: one that is longer than a scheduler's slice has no undisturbed minimum.
    calls = max(1, 512 // costs.size)
    times = time_interleaved(
        {"solver": solve, "heap": lambda: bare_heap(listed, len(speeds))},
        rounds=3 * rounds if costs.size < 10_000 else max(rounds // 2, 5),
        calls=calls,
    )
    spread = ratio(times["solver"], times["heap"])
    plan = assign(costs, speeds=speeds)
    solver, heap = summary(times["solver"])["min_us"], summary(times["heap"])["min_us"]
    return Speed(name, plan.gap, solver, heap, spread["of_minima"], spread["median"], target)


def growth_exponent(rounds: int) -> dict[str, Any]:
    """Fit time = a (n log n)^p from 2**10 to 2**18 items."""
    sizes = [2**exponent for exponent in range(10, 19, 2)]
    least: list[float] = []
    for size in sizes:
        costs = lognormal_costs(size, 0.8, 0)
        call = partial(assign, costs, size // 16)
        times = time_interleaved({"solver": call}, rounds=max(rounds // 6, 3))
        least.append(summary(times["solver"])["min_us"])
    scale = [math.log(size * math.log(size)) for size in sizes]
    exponent = float(np.polyfit(scale, np.log(least), 1)[0])
    return {"num_items": sizes, "min_us": least, "exponent": exponent}


def growth_plot(growth: dict[str, Any]) -> str:
    """Time against n log n on logarithmic axes as SVG: measured, fitted, and slope 1."""
    width, height, margin = 640, 440, 60
    sizes, least, power = growth["num_items"], growth["min_us"], growth["exponent"]
    x, y = np.log10([n * math.log(n) for n in sizes]), np.log10(least) - 3.0
    middle = float(x.mean()), float(y.mean())
    lines = {
        f"fit: (n log n)^{power:.2f}": ("#1f77b4", "", middle[1] + power * (x - middle[0])),
        "slope 1": ("#888888", "6 4", y[0] + x - x[0]),
    }
    every = np.concatenate([y, *(line for _, _, line in lines.values())])
    low, high = np.floor(every.min()), np.ceil(every.max())

    def place(across: float, up: float) -> tuple[float, float]:
        return (
            margin + (across - x[0]) / (x[-1] - x[0]) * (width - 2 * margin),
            height - margin - (up - low) / (high - low) * (height - 2 * margin),
        )

    parts: list[str] = []
    for number, (across, up, size) in enumerate(zip(x, y, sizes, strict=True)):
        left, top = place(across, up)
        parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4" fill="#1f77b4"/>')
        text = f"2^{round(math.log2(size))}" if number else f"n = 2^{round(math.log2(size))}"
        parts.append(f'<text x="{left:.1f}" y="{height - margin + 18}">{text}</text>')
    for decade in np.arange(low, high + 1):
        top = place(x[0], decade)[1]
        ends = f'x1="{margin}" x2="{width - margin}" y1="{top:.1f}" y2="{top:.1f}"'
        parts.append(f'<line {ends} stroke="#dddddd"/>')
        parts.append(f'<text x="{margin - 28}" y="{top + 4:.1f}">{10.0**decade:g}</text>')
    for row, (name, (colour, dashes, line)) in enumerate(lines.items()):
        points = " ".join("{:.1f},{:.1f}".format(*place(*at)) for at in zip(x, line, strict=True))
        style = f'fill="none" stroke="{colour}" stroke-dasharray="{dashes}"'
        parts.append(f'<polyline points="{points}" {style}/>')
        parts.append(
            f'<text x="{margin + 90}" y="{margin + 18 * row}" fill="{colour}">{name}</text>'
        )
    title = "assign(): least time in ms against n log n, 16 items a bin"
    parts.append(f'<text x="{width / 2}" y="28">{title}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" text-anchor="middle">'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def quality_table(title: str, reference: str, rows: Sequence[Quality]) -> Table:
    """Rows of gaps in units of 1e-4."""
    table = Table("case", "mean gap", "max gap", "target", reference, "", title=title)
    for row in rows:
        numbers = (row.gap_mean, row.gap_max, row.target, row.reference_mean)
        table.add_row(row.case, *(f"{1e4 * x:.2f}e-4" for x in numbers), mark(row.met))
    return table


def speed_table(rows: Sequence[Speed]) -> Table:
    """Rows of times."""
    heads = ("gap", "ms", "heap", "ratio", "median", "target", "")
    table = Table("case", *(Column(head, no_wrap=True) for head in heads), title="Time")
    for row in rows:
        target = "" if row.target is None else f"{row.target:g}x"
        met = "" if row.target is None else mark(row.ratio <= row.target)
        table.add_row(
            row.case,
            f"{row.gap:.1e}",
            f"{row.solver_us / 1e3:.3f}",
            f"{row.heap_us / 1e3:.3f}",
            f"{row.ratio:.2f}x",
            f"{row.median_ratio:.2f}x",
            target,
            met,
        )
    return table


def limited_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of makespans under a cap."""
    title = "Tokens capped 5 % above the mean; makespan over uncapped"
    heads = ("mean", "max", "above 1 %", "impossible", "refused", "proved", "longest exceeds cap")
    table = Table("case", *heads, title=title)
    for row in rows:
        values = (row["over_uncapped_mean"], row["over_uncapped_max"])
        shown = ("" if value is None else f"{100 * value:.2f} %" for value in values)
        counts = (
            row["above_1_percent"],
            row["of_those_proved_impossible"],
            row["refused"],
            row["refusals_proved"],
            row["longest_exceeds_cap"],
        )
        table.add_row(row["case"], *shown, *map(str, counts))
    return table


def locality_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of shares of tokens."""
    table = Table("case", "away", "without home", "target", "", title="Tokens that leave home")
    for row in rows:
        numbers = (row["away"], row["away_without_home"], row["target"])
        met = mark(row["away"] <= row["target"])
        table.add_row(row["case"], *(f"{value:.3f}" for value in numbers), met)
    return table


def mark(met: bool) -> str:
    """A word for a verdict."""
    return "met" if met else "MISSED"


if __name__ == "__main__":
    main()
