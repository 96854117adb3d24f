"""Real wall clock: does a balanced plan balance the time? Five runs of `bascule bench` a data set.

    python benchmarks/bench_wallclock.py            # about ten minutes on two idle cores

Two ranks of one thread train without and with balancing, under FSDP2, on three sets: a stream of
256-pixel and one of 1024-pixel images; the photos of scikit-image at their own sizes; these photos
and clips of 4 to 16 frames that pan over them. Target: the median of the runs of each set measures
at least 95 % of the speed-up that was predicted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import skimage
from _common import write_results
from PIL import Image

MODEL = ["--d-model", "128", "--num-heads", "2", "--num-double", "1", "--num-single", "1"]
PHOTOS = Path(skimage.__file__).parent / "data"
PANNED = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
TARGET = 0.95


def write_clips(folder: Path) -> None:
    """Photos, and from some of them clips: a window of half the size that moves over the photo."""
    for number, name in enumerate(PANNED):
        with Image.open(PHOTOS / name) as photo:
            photo.save(folder / name)
            width, height, num_frames = photo.width // 2, photo.height // 2, 4 * (number + 1)
            clip = folder / Path(name).stem
            clip.mkdir()
            for frame in range(num_frames):
                left = (photo.width - width) * frame // (num_frames - 1)
                window = photo.crop((left, height // 2, left + width, height // 2 + height))
                window.save(clip / f"{frame:02}.png")


def run_once(data: list[str], steps: int, seed: int) -> dict[str, float]:
    """One run; its measured and predicted ratio."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bascule.cli", "bench", *data, "--ranks", "2"]
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


def run_all(name: str, data: list[str], num_runs: int, steps: int) -> dict[str, Any]:
    """All runs of a data set, one seed each; prints how far the prediction was met."""
    runs: list[dict[str, float]] = []
    for seed in range(num_runs):
        runs.append(run_once(data, steps, seed))
        line = "measured {measured:.3f}x, predicted {predicted:.3f}x".format(**runs[-1])
        print(f"{name}: {line}", flush=True)
    shares = [run["share"] for run in runs]
    median = statistics.median(shares)
    print(
        f"{name}: measured / predicted: median {median:.3f}, {min(shares):.3f} to "
        f"{max(shares):.3f} over {len(runs)} runs (target: at least {TARGET})"
    )
    return {"median_share": median, "runs": runs}


def main() -> None:
    """Run, print and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_clips(Path(folder))
        sets = {
            "streams": ["--data", "g1b4i256f1s0,g1b2i1024f1s0"],
            "photos": ["--photos", str(PHOTOS), "--batch-size", "4"],
            "photos and clips": ["--photos", folder, "--batch-size", "4"],
        }
        found = {
            name: run_all(name, data, options.runs, options.steps) for name, data in sets.items()
        }
    print("written:", write_results("wallclock", {"model": MODEL, "sets": found}))


if __name__ == "__main__":
    main()
