"""Real wall clock: does a balanced plan balance the time? Five runs of `bascule bench`.

    python benchmarks/bench_wallclock.py            # about four minutes on two idle cores

Two ranks of one thread train on a stream of 256-pixel and one of 1024-pixel images, without and
with balancing, under FSDP2. Targets: predicted at least 1.5x, measured at least 90 % of predicted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import write_results

DATA = "g1b4i256f1s0,g1b2i1024f1s0"
MODEL = ["--d-model", "128", "--num-heads", "2", "--num-double", "1", "--num-single", "1"]


def run_once(steps: int, seed: int) -> dict[str, float]:
    """One run; its measured and predicted ratio."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bascule.cli", "bench", "--data", DATA, "--ranks", "2"]
        options = ["--steps", str(steps), "--seed", str(seed), "--out", folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command += [*MODEL, *options]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        summary = json.loads((Path(folder) / "summary.json").read_text())
    return {
        "measured": summary["measured_ratio"],
        "predicted": summary["predicted_ratio"],
        "share": summary["measured_ratio"] / summary["predicted_ratio"],
        "gamma": summary["setting"]["gamma"],
        "fit_error": summary["setting"]["fit_error"],
        "unbalanced_s": summary["unbalanced"]["fbl_median_s"],
        "balanced_s": summary["balanced"]["fbl_median_s"],
        "unbalanced_wir": summary["unbalanced"]["wir"],
        "balanced_wir": summary["balanced"]["wir"],
        "loss_difference": summary["loss_difference"],
        "grad_difference": summary["grad_difference"],
    }


def main() -> None:
    """Run, print and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    runs = []
    for seed in range(options.runs):
        runs.append(run_once(options.steps, seed))
        print("measured {measured:.3f}x, predicted {predicted:.3f}x".format(**runs[-1]), flush=True)
    shares = [run["share"] for run in runs]
    print(
        f"measured / predicted: median {statistics.median(shares):.3f}, "
        f"{min(shares):.3f} to {max(shares):.3f} over {len(runs)} runs (target: at least 0.9)"
    )
    print("written:", write_results("wallclock", {"data": DATA, "model": MODEL, "runs": runs}))


if __name__ == "__main__":
    main()
