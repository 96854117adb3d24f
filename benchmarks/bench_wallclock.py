"""Real wall clock: does a balanced plan balance the time, and does the simulator say by how much?

    python benchmarks/bench_wallclock.py            # about forty minutes on two idle cores

Two ranks of one thread train without and with balancing, under FSDP2, by `bascule bench` with its
own model: on four mixes of data codes, on the photos of scikit-image at their own sizes, and on
these photos and clips of 4 to 16 frames that pan over them. `bascule calibrate` measures the
machine first, and `simulate` predicts the same steps from its profile: with wires, FSDP's
collectives, the launches of routing, and what the model computes before and after its blocks.
Targets, both of the median of the runs of a set: on photos and clips at least 95 % of the speed-up
that was predicted from compute alone, and on every set within 5 % of what was simulated.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import skimage
from _common import bascule, calibrated, write_results
from PIL import Image

from bascule import HardwareProfile, TransformerCost, simulate
from bascule.bench.options import BenchOptions
from bascule.plan.costs import FLOPS_PER_UNIT
from bascule.plan.machine import WITHOUT_RECOMPUTING, passes_of
from bascule.sim import SimulationOptions
from bascule.sim.seconds import EncoderStage
from bascule.workload.photos import PhotoOptions, PhotoStream
from bascule.workload.streams import SampleStream, SyntheticStream

RANKS, MODEL = 2, BenchOptions()  # of the model: width, heads and blocks as they are by default
LAYERS = MODEL.num_double + MODEL.num_single
MIXES = {
    "long and short streams": "g1b4i256f1s0,g1b2i1024f1s0",
    "low resolution": "g2b16i256f1s0",
    "mixed resolutions": "g1b8i256f1s0,g1b4i512f1s0",
    "images and videos": "g1b6i256f1s0,g1b1i256f10s0",
}
PHOTOS = Path(skimage.__file__).parent / "data"
PANNED = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
TARGET, SIMULATED_TARGET = 0.95, 0.05
WARMUP = 1  # steps that `bascule bench` does not count


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


def lens_of(stream: SampleStream, steps: int) -> list[list[int]]:
    """Tokens of the samples of one rank in each measured step."""
    return [stream.batch(WARMUP + step).seq_lens for step in range(steps)]


def streams_of(data: list[str], seed: int) -> list[SampleStream]:
    """What `bascule bench` trains on, rank by rank."""
    if data[0] == "--data":
        return [
            SyntheticStream(data[1], rank=rank, world_size=RANKS, seed=seed)
            for rank in range(RANKS)
        ]
    options = PhotoOptions(max_tokens=2048, clip_frames=16)
    return [
        PhotoStream(data[1], int(data[3]), rank=rank, world_size=RANKS, seed=seed, options=options)
        for rank in range(RANKS)
    ]


def simulated(profile: HardwareProfile, data: list[str], steps: int, seed: int) -> float:
    """The speed-up that the simulator predicts of the same steps."""
    streams = streams_of(data, seed)
    by_rank = [lens_of(stream, steps) for stream in streams]
    width, channels = MODEL.d_model, streams[0].batch(0).image.shape[1]
    rate, gamma = profile.matmul_flops_per_s, profile.gamma
    assert rate is not None and gamma is not None  # it was calibrated
    last = 1 + channels / (12 * width * LAYERS)  # the last layer, beside 24 d^2 FLOPs a block
    model = TransformerCost(
        width,
        gamma=gamma / last,
        num_layers=LAYERS,
        seconds_per_unit=last * FLOPS_PER_UNIT / rate,
    )
    # The first layer is where a sample was loaded: forward, and the gradient of its weights.
    first = EncoderStage("first layer", image_token_s=2 * 2 * channels * width / rate)
    options = SimulationOptions(
        passes=passes_of(WITHOUT_RECOMPUTING.name, profile),
        stages=(first,),
        routed_bytes_per_token=2.0 * 4 * (width + channels),  # float32, forward and backward
    )
    batches = list(zip(*by_rank, strict=True))
    topologies = ["none", f"g1n{RANKS}"]
    found = simulate(batches, profile=profile, model=model, topologies=topologies, options=options)
    before, after = found.runs
    return before.fbl_s / after.fbl_s


def run_once(data: list[str], steps: int, seed: int) -> dict[str, float]:
    """One run; its measured and predicted ratio."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--steps", str(steps), "--warmup", str(WARMUP), "--seed", str(seed)]
        bascule("bench", *data, "--ranks", str(RANKS), *options, "--out", folder)
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


def run_all(
    name: str, data: list[str], profile: HardwareProfile, num_runs: int, steps: int
) -> dict[str, Any]:
    """All runs of a data set, one seed each; prints how far the predictions were met."""
    runs: list[dict[str, float]] = []
    for seed in range(num_runs):
        run = run_once(data, steps, seed) | {"simulated": simulated(profile, data, steps, seed)}
        runs.append(run)
        text = "measured {measured:.3f}x, predicted {predicted:.3f}x, simulated {simulated:.3f}x"
        print(f"{name}: {text.format(**run)}", flush=True)
    share, off = (
        statistics.median(run["measured"] / run[of] for run in runs)
        for of in ("predicted", "simulated")
    )
    print(
        f"{name}: in the median of {len(runs)} runs {share:.3f} of the prediction (target on "
        f"photos and clips {TARGET}), {off - 1:+.1%} off the simulation (target "
        f"{SIMULATED_TARGET:.0%})"
    )
    return {"median_share": share, "median_off_simulation": off - 1, "runs": runs}


def main() -> None:
    """Run, print and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--no-results", action="store_true", help="write no file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = ["--d-model", str(MODEL.d_model), "--num-heads", str(MODEL.num_heads)]
        profile = calibrated(folder, "--ranks", str(RANKS), *shape)
        print(profile)
        clips = folder / "clips"
        clips.mkdir()
        write_clips(clips)
        sets = {mix: ["--data", codes] for mix, codes in MIXES.items()}
        sets["photos"] = ["--photos", str(PHOTOS), "--batch-size", "4"]
        sets["photos and clips"] = ["--photos", str(clips), "--batch-size", "4"]
        found = {
            name: run_all(name, data, profile, options.runs, options.steps)
            for name, data in sets.items()
        }
    fields = ("d_model", "num_heads", "num_double", "num_single", "dtype")
    model = {name: getattr(MODEL, name) for name in fields}
    results = {"model": model, "mixes": MIXES, "profile": profile.to_dict(), "sets": found}
    if not options.no_results:
        print("written:", write_results("wallclock", results))


if __name__ == "__main__":
    main()
