"""`bascule calibrate` twice on the same ranks: do the coefficients agree, and do the curves hold.

Run: `python benchmarks/bench_calibrate.py` (ten minutes); writes results/calibrate.json. It needs a
quiet machine.

Two ranks of one thread over gloo measure 36 rounds. Two calibrations of 18 rounds each are made of
them, twice: of every other round ("interleaved": what else ran, ran for both), and of the first and
the last half ("one after the other": the machine may have changed between).

- apart: how far two coefficients are apart, over the hypotenuse of their stated errors, half the
  widths of 95 % confidence intervals: at most 1 is agreement.
- held out: what a curve misses the sizes by that it did not see, in the median.

Targets: every coefficient of the interleaved pair within 1; every held-out error at most 10 %.
"""

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import write_results
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

from bascule.calibrate.measuring import Measured, measure
from bascule.calibrate.options import CalibrateOptions
from bascule.calibrate.profiles import profile_of
from bascule.plan.calibration import Calibration, Fit

NUM_RANKS = 2
MOST_APART, MOST_MISSED = 1.0, 0.10
POWERS = ("call", "each", "pair")


def main() -> None:
    """Measure in spawned processes, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=36, help="of both calibrations together")
    parser.add_argument("--lengths", default="64:4096")
    parser.add_argument("--no-results", action="store_true", help="write no file")
    options = parser.parse_args()
    chosen = CalibrateOptions(rounds=options.rounds, lengths=options.lengths)
    with tempfile.TemporaryDirectory() as folder:
        queue: Any = mp.get_context("spawn").SimpleQueue()
        spawn(on_rank, args=(str(Path(folder) / "store"), chosen, queue), nprocs=NUM_RANKS)
        results = queue.get()
    show(Console(), results)
    if not options.no_results:
        print("written to", write_results("calibrate", results))


def on_rank(rank: int, store: str, options: CalibrateOptions, queue: Any) -> None:
    """Measure; the first rank compares."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    measured = measure(options, torch.device("cpu"))
    if rank == 0:
        half = options.rounds // 2
        pairs = {
            "interleaved": (slice(0, None, 2), slice(1, None, 2)),
            "one after the other": (slice(None, half), slice(half, None)),
        }
        found = {
            name: compared(*(calibration_of(measured, options, rounds) for rounds in pair))
            for name, pair in pairs.items()
        }
        settings = calibration_of(measured, options, slice(None)).settings
        queue.put({"settings": settings, "pairs": found, "met": verdicts(found)})
    dist.barrier()
    dist.destroy_process_group()


def calibration_of(measured: Measured, options: CalibrateOptions, rounds: slice) -> Calibration:
    """Of some of the rounds."""
    made = profile_of(replace(measured, seconds=measured.seconds[rounds]), options).calibration
    assert made is not None
    return made


def compared(a: Calibration, b: Calibration) -> list[dict[str, Any]]:
    """A row a curve, and one for what does not grow."""
    rows = [row_of(one, other) for one, other in zip(a.fits, b.fits, strict=True)]
    for one, other in zip(a.overheads, b.overheads, strict=True):
        width = float(np.hypot(one.error, other.error))
        apart = abs(one.seconds - other.seconds) / width if width > 0 else float("nan")
        pair = [one.seconds, other.seconds]
        rows.append({"what": one.what, "seconds": {"call": pair}, "apart": {"call": apart}})
    return rows


def row_of(a: Fit, b: Fit) -> dict[str, Any]:
    """Two curves of the same."""
    errors = [np.array(fit.errors, dtype=np.float64) for fit in (a, b)]
    apart = np.abs(np.subtract(a.coefficients, b.coefficients)) / np.hypot(*errors)
    pairs = zip(a.coefficients, b.coefficients, strict=True)
    return {
        "what": a.what,
        "seconds": dict(zip(POWERS, map(list, pairs), strict=False)),
        "errors": dict(zip(POWERS, np.stack(errors, axis=1).tolist(), strict=False)),
        "apart": dict(zip(POWERS, apart.tolist(), strict=False)),
        "held_out": [a.held_out_error, b.held_out_error],
    }


def verdicts(pairs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Whether the targets are met, by the worst of each."""
    apart = max(x for row in pairs["interleaved"] for x in row["apart"].values())
    missed = max(x for rows in pairs.values() for row in rows for x in row.get("held_out", ()))
    return {
        "most_apart": apart,
        "most_missed": missed,
        "agree": apart <= MOST_APART,
        "held_out": missed <= MOST_MISSED,
    }


def show(console: Console, results: dict[str, Any]) -> None:
    """Print both pairs and the verdicts."""
    for name, rows in results["pairs"].items():
        table = Table(title=f"two calibrations, {name}")
        table.add_column("")
        for column in ("call", "a token or byte", "a pair of tokens", "held out"):
            table.add_column(column, justify="right")
        for row in rows:
            cells = [
                f"{first:.3g}, {second:.3g} ({row['apart'][power]:.2f})"
                for power, (first, second) in row["seconds"].items()
            ]
            held_out = ", ".join(f"{x:.1%}" for x in row.get("held_out", ()))
            table.add_row(row["what"], *cells, *[""] * (3 - len(cells)), held_out)
        console.print(table)
    met = results["met"]
    console.print("in brackets: how far apart, over the stated errors")
    for is_met, text in (
        (met["agree"], f"interleaved, apart at most {met['most_apart']:.2f} of the stated errors"),
        (met["held_out"], f"held-out sizes missed by at most {met['most_missed']:.1%}"),
    ):
        console.print(f"{'met   ' if is_met else 'MISSED'}  {text}")


if __name__ == "__main__":
    main()
