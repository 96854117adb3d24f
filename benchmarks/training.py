"""Measure what balance is worth in training, beside what plans, traces and simulations predict."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import skimage
import torch
import torch.distributed as dist
from measuring import bascule, calibrated, met, on_ranks, ratio, time_interleaved
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader

from bascule import (
    BalancedLoader,
    BalancedModel,
    HardwareProfile,
    SequenceParallel,
    TransformerCost,
    simulate,
    train_step,
)
from bascule.bench.options import BenchOptions
from bascule.calibrate.measuring import Measured, measure, profile_of
from bascule.calibrate.options import CalibrateOptions
from bascule.costs import PolynomialCost, fit_latency
from bascule.machine.calibration import Calibration, Fit
from bascule.machine.cluster import FORWARD, WITHOUT_RECOMPUTING, passes_of
from bascule.machine.costs import FLOPS_PER_UNIT
from bascule.plan.topology import Topology
from bascule.sim import SimulationOptions
from bascule.sim.seconds import EncoderStage, Sharding
from bascule.train.photos import PhotoOptions, PhotoStream
from bascule.train.streams import SampleStream, SyntheticStream
from bascule.workload.traces import balancing_worth, read_traces, step_parts
from bascule.workload.traces.worth import read_lens

PHOTOS = Path(skimage.__file__).parent / "data"
NAMES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
RANKS = 2


# --- wallclock ----------------------------------------------------------------------------------

MODEL = BenchOptions()  # width, heads and blocks as they are by default
MIXES = {
    "long and short streams": "g1b4i256f1s0,g1b2i1024f1s0",
    "low resolution": "g2b16i256f1s0",
    "mixed resolutions": "g1b8i256f1s0,g1b4i512f1s0",
    "images and videos": "g1b6i256f1s0,g1b1i256f10s0",
}
SHARE_TARGET, SIMULATED_TARGET = 0.95, 0.05
WARMUP = 1  # steps that `bascule bench` does not count


def wallclock(
    *, runs: int = 3, steps: int = 3, sets: tuple[str, ...] = (), quick: bool = False
) -> dict[str, Any]:
    """Measure the wall clock of balanced steps under FSDP2 beside plan and simulation.

    Two minutes, and two minutes a set. Two ranks of one thread train without and with balancing by
    `bascule bench`, on four mixes of data codes, on the photos of scikit-image, and on these and
    clips that pan over them. `bascule calibrate` measures the machine, and `simulate` predicts the
    same steps from its profile. Targets, of the median run: on photos and clips 95 % of the
    speed-up predicted from compute alone; on every set within 5 % of the simulation.

    Args:
        runs: Runs of each set, one seed each.
        steps: Measured steps of a run.
        sets: Names of the data that are trained on; all by default.
        quick: One run of two steps.
    """
    runs, steps = (1, 2) if quick else (runs, steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = ["--d-model", str(MODEL.d_model), "--num-heads", str(MODEL.num_heads)]
        machine = calibrated(folder, "--ranks", str(RANKS), *shape)
        print(machine)
        data = {mix: ["--data", codes] for mix, codes in MIXES.items()}
        data["photos"] = ["--photos", str(PHOTOS), "--batch-size", "4"]
        data["photos and clips"] = ["--photos", str(_clips(folder)), "--batch-size", "4"]
        results = {
            name: _runs(name, data[name], machine, runs, steps) for name in sets or list(data)
        }
    fields = ("d_model", "num_heads", "num_double", "num_single", "dtype")
    model = {name: getattr(MODEL, name) for name in fields}
    return {"model": model, "mixes": MIXES, "profile": machine.to_dict(), "sets": results}


def _clips(home: Path) -> Path:
    """Write photos, and clips: a window of half the size that moves over each photo."""
    folder = home / "clips"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        with Image.open(PHOTOS / name) as photo:
            photo.save(folder / name)
            width, height, num_frames = photo.width // 2, photo.height // 2, 4 * (number + 1)
            clip = folder / Path(name).stem
            clip.mkdir()
            for frame in range(num_frames):
                left = (photo.width - width) * frame // (num_frames - 1)
                window = photo.crop((left, height // 2, left + width, height // 2 + height))
                window.save(clip / f"{frame:02}.png")
    return folder


def _streams(data: list[str], seed: int, num_ranks: int) -> list[SampleStream]:
    """Return what `bascule bench` trains on, rank by rank."""
    every = range(num_ranks)
    place: list[dict[str, Any]] = [
        {"rank": rank, "world_size": num_ranks, "seed": seed} for rank in every
    ]
    if data[0] == "--data":
        return [SyntheticStream(data[1], **one) for one in place]
    options = PhotoOptions(max_tokens=2048, clip_frames=16)
    return [PhotoStream(data[1], int(data[3]), **one, options=options) for one in place]


def _simulated(
    machine: HardwareProfile, data: list[str], steps: int, seed: int, bags: Sequence[str]
) -> list[float]:
    """Return the speed-up on each topology that the simulator predicts of the same steps."""
    streams = _streams(data, seed, Topology.parse(bags[0]).num_ranks)
    by_rank = [[one.batch(WARMUP + step).seq_lens for step in range(steps)] for one in streams]
    width, channels = MODEL.d_model, streams[0].batch(0).image.shape[1]
    layers = MODEL.num_double + MODEL.num_single
    rate, gamma = machine.matmul_flops_per_s, machine.gamma
    assert rate is not None
    last = 1 + channels / (12 * width * layers)  # the last layer, beside 24 d^2 FLOPs a block
    model = TransformerCost(
        width,
        gamma=gamma / last,
        num_layers=layers,
        seconds_per_unit=last * FLOPS_PER_UNIT / rate,
    )
    # The first layer is where a sample was loaded: forward, and the gradient of its weights.
    first = EncoderStage("first layer", image_token_s=2 * 2 * channels * width / rate)
    options = SimulationOptions(
        passes=passes_of(WITHOUT_RECOMPUTING.name, machine),
        stages=(first,),
        routed_bytes_per_token=2.0 * 4 * (width + channels),  # float32, forward and backward
    )
    batches, ways = list(zip(*by_rank, strict=True)), ["none", *bags]
    runs = simulate(batches, profile=machine, model=model, topologies=ways, options=options).runs
    return [runs[0].fbl_s / run.fbl_s for run in runs[1:]]


def _run(data: list[str], steps: int, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--steps", str(steps), "--warmup", str(WARMUP), "--seed", str(seed)]
        bascule("bench", *data, "--ranks", str(RANKS), *options, "--out", folder)
        summary = json.loads((Path(folder) / "summary.json").read_text())
    measured, predicted = summary["measured_ratio"], summary["predicted_ratio"]
    same = {name: summary[name] for name in ("loss_difference", "grad_difference")}
    of_ways = {
        f"{way}_{name.removesuffix('_median_s').replace('fbl', 's')}": summary[way][name]
        for way in ("unbalanced", "balanced")
        for name in ("fbl_median_s", "wir")
    }
    fit = {name: summary["setting"][name] for name in ("gamma", "fit_error")}
    shares = {"measured": measured, "predicted": predicted, "share": measured / predicted}
    return shares | fit | of_ways | same


def _runs(
    name: str, data: list[str], machine: HardwareProfile, num_runs: int, steps: int
) -> dict[str, Any]:
    """Return all runs of a data set, one seed each."""
    runs: list[dict[str, float]] = []
    for seed in range(num_runs):
        (simulated,) = _simulated(machine, data, steps, seed, [f"g1n{RANKS}"])
        runs.append(_run(data, steps, seed) | {"simulated": simulated})
        text = "measured {measured:.3f}x, predicted {predicted:.3f}x, simulated {simulated:.3f}x"
        print(f"{name}: {text.format(**runs[-1])}", flush=True)
    share, off = (
        statistics.median(run["measured"] / run[of] for run in runs)
        for of in ("predicted", "simulated")
    )
    print(
        f"{name}: in the median {share:.3f} of the prediction (target on photos and clips "
        f"{SHARE_TARGET}), {off - 1:+.1%} off the simulation (target {SIMULATED_TARGET:.0%})"
    )
    return {"median_share": share, "median_off_simulation": off - 1, "runs": runs}


# --- topologies ---------------------------------------------------------------------------------

BAGS = {2: ("g1n2", "g2n1"), 4: ("g1n4", "g2n1+g1n2", "g2n2", "g4n1")}
SCENARIOS = {  # as in KnapFormer's Table 1; in the last, the clip takes longer than a fair share
    (2, "low resolution"): "g2b8i256f1s0",
    (2, "mixed resolutions"): "g1b8i256f1s0,g1b4i512f1s0",
    (2, "images and videos"): "g1b3i256f1s0,g1b1i256f34s1",
    (4, "low resolution"): "g4b3i256f1s0",
    (4, "mixed resolutions"): "g2b3i256f1s0,g1b1i512f1s0,g1b1i768f1s0",
    (4, "images and videos"): "g1b3i256f1s0,g1b1i512f1s0,g1b1i256f4s0,g1b1i256f34s1",
}
QUICK_SCENARIOS = {
    (2, "images and videos"): "g1b2i64f1s0,g1b1i64f28s1",
    (4, "images and videos"): "g3b1i64f1s0,g1b1i64f28s1",
}
SHAPE = ["--d-model", str(MODEL.d_model), "--num-heads", "4"]  # which 4 ranks share evenly
ADVICE_TARGET = 0.97  # speed-up on the advised bags, over that on the fastest ones


def topologies(*, steps: int = 5, quick: bool = False) -> dict[str, Any]:
    """Measure every topology of 2 and of 4 ranks in turns, beside predictions and advice.

    Six minutes on two cores. `bascule bench` trains on three mixes: images of low resolution, of
    mixed resolutions, and images and videos, of which one clip alone takes longer than a rank's
    fair share. Predicted from compute alone, and by `simulate` with the wires that `bascule
    calibrate` measured. On 2 ranks the wall clock counts. 4 ranks wait for cores: there, the CPU
    seconds of the busiest rank count, of half as many steps. They leave out what ranks wait for,
    other ranks and bytes on their way included. Target: training on the bags that `bascule
    topology` advises is within 3 % of the fastest.
    """
    results = dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, machine = folder / "machine.json", HardwareProfile.load("h100-datasheet")
        if quick:
            machine.save(path)
        else:
            machine = calibrated(
                folder, *SHAPE, "--ranks", str(RANKS), "--rounds", "3", lengths="64:2048"
            )
        print(machine)
        for (num_ranks, mix), codes in (QUICK_SCENARIOS if quick else SCENARIOS).items():
            num_steps = 1 if quick else -(-steps * RANKS // num_ranks)
            one = _all_bags(codes, num_ranks, path, num_steps)
            print(f"{num_ranks} ranks, {mix}: {codes}")
            _show(one)
            results[f"{num_ranks} ranks, {mix}"] = {"data": codes} | one
    is_met = [one["advised_share"] >= ADVICE_TARGET for one in results.values()]
    print(f"{met(all(is_met))}  advised within 3 % of the fastest: {sum(is_met)} of {len(is_met)}")
    return {"profile": machine.to_dict(), "scenarios": results}


def _all_bags(codes: str, num_ranks: int, profile: Path, steps: int) -> dict[str, Any]:
    """Train on each topology in turns; return what was measured and predicted of each."""
    machine, bags = HardwareProfile.load(profile), BAGS[num_ranks]
    data = ["--data", codes, "--gamma", str(machine.gamma)]
    numbers = ["--steps", str(steps), "--d-model", str(MODEL.d_model), "--profile", str(profile)]
    numbers += ["--num-layers", str(MODEL.num_double + MODEL.num_single), "--step", str(WARMUP)]
    numbers += ["--passes", WITHOUT_RECOMPUTING.name, "--json", str(profile.with_name("best"))]
    bascule("topology", *data, *numbers)
    advice = json.loads(profile.with_name("best").read_text())
    options = ["--steps", str(steps), "--warmup", str(WARMUP), "--ranks", str(num_ranks)]
    out = profile.with_name("bench")
    bascule("bench", *data, *SHAPE, *options, "--topologies", *bags, "--out", str(out))
    summary = json.loads((out / "summary.json").read_text())
    simulated = _simulated(machine, data, steps, MODEL.seed, bags)
    names = ("predicted_ratio", "grad_difference", "sent_bytes_per_step", "single_binds_steps")
    ratios = _ratios((out / "steps.jsonl").read_text().splitlines())
    rows = {
        name: {key: one[key] for key in names}
        | ratios[name]
        | {"imbalance": one["balanced"]["imbalance"], "simulated_ratio": share}
        for (name, one), share in zip(summary["topologies"].items(), simulated, strict=True)
    }
    counted = "wall_ratio" if num_ranks <= RANKS else "cpu_ratio"
    fastest = max(rows, key=lambda name: rows[name][counted])
    return {
        "unbalanced": summary["unbalanced"],
        "topologies": rows,
        "counted": counted,
        "advised": advice["best"],
        "fastest": fastest,
        "advised_share": rows[advice["best"]][counted] / rows[fastest][counted],
    }


def _ratios(lines: list[str]) -> dict[str, dict[str, float]]:
    """Return medians over steps, least and most: seconds without over those on each topology."""
    steps: list[dict[str, Any]] = [json.loads(line) for line in lines]
    results = dict[str, dict[str, float]]()
    for name in dict.fromkeys(step["topology"] for step in steps):
        row = results[name] = {}
        for clock, key in (("wall", "seconds"), ("cpu", "cpu_seconds")):
            ratios = [
                step[f"{key}_unbalanced"] / step[f"{key}_balanced"]
                for step in steps
                if step["topology"] == name
            ]
            row[f"{clock}_ratio"] = statistics.median(ratios)
            row |= {f"{clock}_least": min(ratios), f"{clock}_most": max(ratios)}
    return results


def _show(one: dict[str, Any]) -> None:
    forms = (
        "{imbalance:.3f}",
        "{predicted_ratio:.2f}x",
        "{simulated_ratio:.2f}x",
        "{wall_ratio:.2f}x ({wall_least:.2f} to {wall_most:.2f})",
        "{cpu_ratio:.2f}x ({cpu_least:.2f} to {cpu_most:.2f})",
    )
    table = Table(title=f"imbalance without balancing: {one['unbalanced']['imbalance']:.3f}")
    for column in ("bags", "imbalance", "compute only", "simulated", "wall clock", "busiest CPU"):
        table.add_column(column, justify="right")
    for name, row in one["topologies"].items():
        table.add_row(name, *(form.format(**row) for form in forms))
    Console(width=100).print(table)
    is_met = one["advised_share"] >= ADVICE_TARGET
    print(
        f"{met(is_met)}  advised {one['advised']}, fastest {one['fastest']} by {one['counted']}: "
        f"{one['advised_share']:.3f} of the fastest",
        flush=True,
    )


# --- stages -------------------------------------------------------------------------------------

TINY = ["--d-model", "128", "--num-heads", "2", "--num-double", "1", "--num-single", "1"]
TINY += ["--vae", "tiny", "--text-encoder", "tiny"]


def stages(*, steps: int = 24, quick: bool = False) -> dict[str, Any]:
    """Measure steps from pixels and captions stage by stage.

    Some minutes. Two ranks train by `bascule bench` on photos of unlike sizes with captions of
    unlike lengths: tiny text encoder (T5), VAE (AutoencoderKL) and MM-DiT, without and with
    balancing. Targets: each stage's speed-up is at least 95 % of the predicted one, and no step is
    slower than without balancing.
    """
    with tempfile.TemporaryDirectory() as home:
        photos = Path(home) / "photos"
        photos.mkdir()
        for number, name in enumerate(NAMES):
            for place, scale in enumerate((0.25, 0.4, 0.6)):
                path = photos / f"{Path(name).stem}-{place}.png"
                with Image.open(PHOTOS / name) as photo:
                    photo.resize((round(photo.width * scale), round(photo.height * scale))).save(
                        path
                    )
                words = "some words to encode " * (1 + 2 * number + 5 * place)
                path.with_suffix(".txt").write_text(words)
        arguments = ["bench", "--photos", str(photos), "--ranks", "2", "--batch-size", "6", *TINY]
        arguments += ["--steps", str(2 if quick else steps), "--out", home]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bascule.cli", *arguments]
        subprocess.run(command, check=True, env=environment)
        summary = json.loads((Path(home) / "summary.json").read_text())
    names = ("stages", "loss_difference", "grad_difference", "measured_ratio", "predicted_ratio")
    return {name: summary[name] for name in names}


# --- trace --------------------------------------------------------------------------------------

TRACE_WIDTH, TRACE_SAMPLES, TRACE_WARMUP, TRACE_TARGET = 192, 6, 2, 0.10
TERMS = ("quadratic", "linear", "constant", "overhead")


def trace(*, steps: int = 16, rounds: int = 5, quick: bool = False) -> dict[str, Any]:
    """Compare what `bascule trace` predicts of a plain DDP run with what a BalancedLoader brings.

    Three minutes. In each round a plain DDP script on two ranks, with samples of log-normal
    lengths, is profiled; its traces and lengths give a cost model and a prediction. Then the same
    script trains on the same steps, as it is and with a `BalancedLoader` that has this cost model.
    Target: the medians within 10 %.
    """
    turns = on_ranks(_trace_on_rank, *((6, 1) if quick else (steps, rounds)))
    predictions = [one["trace"]["speedup"] for one in turns]
    ratios = [one["measured"] for one in turns]
    predicted, measured = statistics.median(predictions), statistics.median(ratios)
    error = predicted / measured - 1.0
    print(
        f"{met(abs(error) <= TRACE_TARGET)}  predicted {predicted:.3f}x ({min(predictions):.3f} to "
        f"{max(predictions):.3f}), measured {measured:.3f}x ({min(ratios):.3f} to "
        f"{max(ratios):.3f}), error {error:+.1%}"
    )
    return {"predicted": predicted, "measured": measured, "error": error, "rounds": turns}


def _trace_samples(rank: int, step: int) -> list[Tensor]:
    """Return (L, width) samples; in each step, one rank in two has longer ones."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    median = 130 if (rank + step) % 2 else 350
    lens = median * (torch.randn(TRACE_SAMPLES, generator=generator) * 0.6).exp()
    lens = lens.clamp(32, 1536)
    return [torch.randn(int(length), TRACE_WIDTH, generator=generator) for length in lens]


class _PlainTrainer:
    """A training loop that knows nothing of bascule: three transformer layers under DDP."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            TRACE_WIDTH, 4, 4 * TRACE_WIDTH, dropout=0.0, batch_first=True
        )
        encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.model = DistributedDataParallel(encoder)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, samples: Sequence[Tensor], scale: float = 1.0) -> None:
        losses = [self.model(sample[None]).square().mean() for sample in samples]
        (torch.stack(losses).mean() * scale).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _trace_on_rank(num_steps: int, rounds: int) -> list[dict[str, Any]]:
    """Profile, predict and measure in turns."""
    rank, every = dist.get_rank(), num_steps + TRACE_WARMUP
    steps = [_trace_samples(rank, step) for step in range(every)]
    trainer = _PlainTrainer()
    for _ in range(2):
        trainer.step(steps[0])

    def predict(folder: Path) -> dict[str, Any]:
        def save(profiler: Any) -> None:
            profiler.export_chrome_trace(str(folder / f"rank{rank}.json"))

        plan = schedule(wait=0, warmup=TRACE_WARMUP, active=num_steps, repeat=1)
        cpu = [ProfilerActivity.CPU]
        with profile(activities=cpu, schedule=plan, on_trace_ready=save) as profiler:
            for samples in steps:
                trainer.step(samples)
                profiler.step()
        dist.barrier()
        result = [_predicted(folder, every) if rank == 0 else None]
        dist.broadcast_object_list(result)
        return result[0] or {}

    def timed(batches: Any) -> float:
        start = 0.0
        for number, (samples, scale) in enumerate(batches):
            if number == TRACE_WARMUP:
                dist.barrier()
                start = time.perf_counter()
            trainer.step(samples, scale)
        dist.barrier()
        return (time.perf_counter() - start) / num_steps

    def balanced(cost: PolynomialCost) -> float:
        data = [{"x": sample} for samples in steps for sample in samples]
        loaded = DataLoader(data, TRACE_SAMPLES, collate_fn=list)  # pyright: ignore[reportArgumentType]
        with BalancedLoader(loaded, cost=cost, length_fn=lambda one: len(one["x"])) as loader:
            return timed(([one["x"] for one in batch.data], batch.loss_scale) for batch in loader)

    turns: list[dict[str, Any]] = []
    for _ in range(rounds):
        shared: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(shared)
        one = predict(Path(shared[0]))
        shutil.rmtree(shared[0], ignore_errors=True)
        before = timed((samples, 1.0) for samples in steps)
        after = balanced(PolynomialCost(*(one["worth"]["cost"][term] for term in TERMS)))
        turns.append(
            {"plain_s": before, "balanced_s": after, "measured": before / after, "trace": one}
        )
    return turns


def _predicted(folder: Path, num_steps: int) -> dict[str, Any]:
    """Return the parts of a traced run's steps, and the prediction."""
    rows = [
        {"step": step, "rank": rank, "lens": [len(one) for one in _trace_samples(rank, step)]}
        for step in range(num_steps)
        for rank in range(RANKS)
    ]
    traces, notes = read_traces(str(folder))
    (folder / "lens.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    parts = step_parts(traces, notes)
    worth = balancing_worth(parts, read_lens(folder / "lens.jsonl"))
    return {
        "step_ms": parts.step_seconds.mean() * 1e3,
        "imbalance": parts.imbalance,
        "waiting_share": (parts.waiting.sum(axis=0) / parts.seconds.sum(axis=0)).tolist(),
        "slowest_rank": parts.slowest_rank,
        "speedup": worth.speedup,
        "model_error": worth.model_error,
        "worth": asdict(worth),
    }


# --- calibrate ----------------------------------------------------------------------------------

MOST_APART, MOST_MISSED = 1.0, 0.10
POWERS = ("call", "each", "pair")


def calibrate(*, rounds: int = 36, lengths: str = "64:4096", quick: bool = False) -> dict[str, Any]:
    """Calibrate the same ranks twice: do coefficients agree, and do curves hold.

    Ten minutes on a quiet machine. Two ranks measure all rounds. Two calibrations are made of
    every other round ("interleaved") and of the first and the last half ("one after the other").
    "apart" is how far two coefficients are apart over the hypotenuse of their stated errors.
    Targets: every coefficient of the interleaved pair within 1; held-out errors at most 10 %.
    """
    options = CalibrateOptions(rounds=4 if quick else rounds, lengths=lengths)
    results = on_ranks(_calibrate_on_rank, options)
    for name, rows in results["pairs"].items():
        table = Table(title=f"two calibrations, {name}; in brackets: apart, over stated errors")
        for column in ("", "call", "a token or byte", "a pair of tokens", "held out"):
            table.add_column(column, justify="right" if column else "left")
        for row in rows:
            cells = [
                f"{first:.3g}, {second:.3g} ({row['apart'][power]:.2f})"
                for power, (first, second) in row["seconds"].items()
            ]
            held_out = ", ".join(f"{x:.1%}" for x in row.get("held_out", ()))
            table.add_row(row["what"], *cells, *[""] * (3 - len(cells)), held_out)
        Console().print(table)
    one = results["met"]
    print(f"{met(one['agree'])}  interleaved, apart at most {one['most_apart']:.2f} of the errors")
    print(f"{met(one['held_out'])}  held-out sizes missed by at most {one['most_missed']:.1%}")
    return results


def _calibrate_on_rank(options: CalibrateOptions) -> dict[str, Any] | None:
    measured = measure(options, torch.device("cpu"))
    if dist.get_rank():
        return None
    half = options.rounds // 2
    pairs = {
        "interleaved": (slice(0, None, 2), slice(1, None, 2)),
        "one after the other": (slice(None, half), slice(half, None)),
    }
    compared = {
        name: _compared(*(_calibration(measured, options, rounds) for rounds in pair))
        for name, pair in pairs.items()
    }
    apart = max(x for row in compared["interleaved"] for x in row["apart"].values())
    missed = max(x for rows in compared.values() for row in rows for x in row.get("held_out", ()))
    return {
        "settings": _calibration(measured, options, slice(None)).settings,
        "pairs": compared,
        "met": {
            "most_apart": apart,
            "most_missed": missed,
            "agree": apart <= MOST_APART,
            "held_out": missed <= MOST_MISSED,
        },
    }


def _calibration(measured: Measured, options: CalibrateOptions, rounds: slice) -> Calibration:
    made = profile_of(replace(measured, seconds=measured.seconds[rounds]), options).calibration
    assert made is not None
    return made


def _compared(a: Calibration, b: Calibration) -> list[dict[str, Any]]:
    """Return a row a curve, and one for each cost that does not grow."""
    rows = [_curves(one, other) for one, other in zip(a.fits, b.fits, strict=True)]
    for one, other in zip(a.overheads, b.overheads, strict=True):
        width = float(np.hypot(one.error, other.error))
        apart = abs(one.seconds - other.seconds) / width if width > 0 else float("nan")
        pair = [one.seconds, other.seconds]
        rows.append({"what": one.what, "seconds": {"call": pair}, "apart": {"call": apart}})
    return rows


def _curves(a: Fit, b: Fit) -> dict[str, Any]:
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


# --- diffusers_training -------------------------------------------------------------------------

Sample = dict[str, Any]
Make = Callable[[int, int], Sample]
HEADS, HEAD_DIM, TEXT, TEXT_DIM, CHANNELS = 4, 32, 16, 64, 16
WIDTH = HEADS * HEAD_DIM
TOPOLOGIES = ("g1n2", "g2n1")
TIMED_GRIDS = (12, 20, 32, 48)
LOADS: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
    "uneven": ([(36, 48), (48, 36), (42, 42), (48, 48)], [(16, 20), (20, 16), (24, 24), (20, 20)]),
    "one giant": ([(56, 56), (8, 8)], [(8, 8), (12, 12)]),
}
"""The grid of tokens of each sample, by rank."""
Loss = Callable[[Any, Sample], Tensor]


@dataclass(frozen=True)
class Loads:
    """What models are trained on: grids by load, topologies, and grids that a cost is fitted to."""

    grids: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]]
    topologies: tuple[str, ...]
    timed_grids: tuple[int, ...]


def diffusers_training(*, rounds: int = 10, quick: bool = False) -> dict[str, Any]:
    """Measure what balance is worth to unmodified models of diffusers in DDP.

    Ten minutes. Flux and Wan, float32, on two ranks of one thread. Without balance each rank trains
    on what it loaded; with balance samples change ranks (g1n2), or both ranks share each of them
    (g2n1). "uneven": one rank loads large samples, the other small ones; "one giant": four samples,
    of which one is so long that only sharing it helps. Predicted from compute alone, and simulated
    with calibrated wires for samples that change ranks. Target: the simulation within 5 %.
    """
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        machine = calibrated(Path(folder), "--ranks", "2", "--d-model", str(WIDTH))
    ways = {"flux": (_flux, _flux_sample, _loss_fn), "wan": (_wan, _wan_sample, _loss_fn)}
    loads = Loads(LOADS, TOPOLOGIES, TIMED_GRIDS)
    cases = on_ranks(train_models, 2 if quick else rounds, ways, loads, machine)
    return {"load_before": load_before} | gains(cases)


def gains(cases: dict[str, Any]) -> dict[str, Any]:
    """Print and return what `train_models` measured: seconds without balance over those with it."""
    results: dict[str, Any] = {}
    for name, one in cases.items():
        seconds = one["seconds"]
        for way, predicted in one["predicted"].items():
            spread = ratio(seconds["none"], seconds[way])
            results[f"{name}, {way}"] = {"predicted": predicted, **spread}
            text = (
                f"{name}, {way}: {spread['median']:.2f}x (quartiles {spread['lower_quartile']:.2f} "
                f"to {spread['upper_quartile']:.2f}), predicted {predicted:.2f}x"
            )
            if way in one["simulated"]:
                results[f"{name}, {way}"]["simulated"] = simulated = one["simulated"][way]
                off = spread["median"] / simulated - 1
                text += f", simulated {simulated:.2f}x ({off:+.1%} off)"
            print(text)
        results[name] = {way: statistics.median(times) for way, times in seconds.items()}
    return results


def _flux() -> nn.Module:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=CHANNELS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        axes_dims_rope=(8, 12, 12),
    )


def _wan() -> nn.Module:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=32,
        ffn_dim=4 * WIDTH,
        num_layers=4,
        rope_max_seq_len=64,
    )


def _flux_sample(rows: int, columns: int) -> Sample:
    tokens = rows * columns
    ids = torch.zeros(tokens, 3)
    ids[:, 1:] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return {
        "hidden_states": torch.randn(1, tokens, CHANNELS),
        "encoder_hidden_states": torch.randn(1, TEXT, TEXT_DIM),
        "pooled_projections": torch.randn(1, TEXT_DIM),
        "timestep": torch.rand(1),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 3),
        "target": torch.randn(1, tokens, CHANNELS),
        "num_tokens": tokens + TEXT,
    }


def _wan_sample(rows: int, columns: int) -> Sample:
    """Return a video of one latent frame, of which a token is two by two."""
    shape = (1, CHANNELS, 1, 2 * rows, 2 * columns)
    return {
        "hidden_states": torch.randn(shape),
        "encoder_hidden_states": torch.randn(1, TEXT, TEXT_DIM),
        "timestep": torch.rand(1) * 1000,
        "target": torch.randn(shape),
        "num_tokens": rows * columns,
    }


def _loss_fn(output: Tensor, batch: Sample) -> Tensor:
    return (output - batch["target"]).square().flatten(1).mean(1)


def _loss_of(sample: Sample, share: float, loss_fn: Loss) -> Callable[[nn.Module], Tensor]:
    inputs = {name: x for name, x in sample.items() if name not in ("target", "num_tokens")}

    def loss(model: nn.Module) -> Tensor:
        output = model(**inputs, return_dict=False)
        return loss_fn(output[0] if len(output) == 1 else output, sample).sum() * share

    return loss


def _measured_cost(
    model: nn.Module, make: Make, loss_fn: Loss, grids: Sequence[int]
) -> TransformerCost:
    """Fit a cost to the seconds of single samples, the mean of both ranks."""
    samples = [make(size, size) for size in grids]
    seconds = torch.zeros(len(samples))
    for place, sample in enumerate(samples):
        times: list[float] = []
        for _ in range(4):
            start = time.perf_counter()
            _loss_of(sample, 1.0, loss_fn)(model).backward()
            times.append(time.perf_counter() - start)
        seconds[place] = statistics.median(times[1:])
    dist.all_reduce(seconds)
    lens = [sample["num_tokens"] for sample in samples]
    return fit_latency(lens, (seconds / 2).double().numpy(), WIDTH)


def _simulated_step(
    machine: HardwareProfile, cost: TransformerCost, model: nn.Module, samples: list[list[Sample]]
) -> float:
    """Return the simulated speed-up of g1n2; the cost is of forward and backward."""
    largest = max((one for of_rank in samples for one in of_rank), key=lambda x: x["num_tokens"])
    num_bytes = sum(x.nbytes for x in largest.values() if isinstance(x, Tensor))
    options = SimulationOptions(
        passes=FORWARD,
        sharding=Sharding(sum(p.numel() for p in model.parameters()), shard_ranks=1),
        routed_bytes_per_token=num_bytes / largest["num_tokens"],
    )
    lens = [[[one["num_tokens"] for one in of_rank] for of_rank in samples]]
    ways = ["none", "g1n2"]
    runs = simulate(lens, profile=machine, model=cost, topologies=ways, options=options).runs
    return runs[0].fbl_s / runs[1].fbl_s


def train_models(
    rounds: int,
    models: dict[str, tuple[Callable[[], nn.Module], Make, Loss]],
    loads: Loads,
    machine: HardwareProfile | None = None,
) -> dict[str, Any]:
    """Time a step of each model and load on this rank, without and with balance, in turns."""
    results: dict[str, Any] = {}
    for name, (build, make, loss_fn) in models.items():
        first = build()
        cost = _measured_cost(first, make, loss_fn, loads.timed_grids)
        unused = [name for name, p in first.named_parameters() if p.grad is None]
        plain = _wrapped(build(), unused)
        balanced: dict[str, tuple[nn.Module, BalancedModel]] = {}
        for topology in loads.topologies:
            model, sp = _wrapped(build(), unused), SequenceParallel(None, topology, cost)
            one = BalancedModel(model, sp, length_fn=lambda one: one["num_tokens"])
            balanced[topology] = model, one
        for load, grids in loads.grids.items():
            torch.manual_seed(dist.get_rank())
            samples = [[make(*grid) for grid in of_rank] for of_rank in grids]
            local = samples[dist.get_rank()]

            def without(plain: Any = plain, local: Any = local, loss_fn: Any = loss_fn) -> None:
                dist.barrier()
                train_step(plain, [_loss_of(one, 1 / len(local), loss_fn) for one in local])

            def within(
                topology: str, balanced: Any = balanced, local: Any = local, loss_fn: Any = loss_fn
            ) -> None:
                dist.barrier()
                model, one = balanced[topology]
                train_step(model, one.microbatches(local, loss_fn))

            ways = {topology: partial(within, topology) for topology in balanced}
            seconds = time_interleaved({"none": without, **ways}, rounds=rounds)
            metrics = {topology: one.step.metrics() for topology, (_, one) in balanced.items()}
            results[f"{name}, {load}"] = {
                "seconds": seconds,
                "predicted": {
                    topology: one["makespan_unbalanced"] / one["makespan"]
                    for topology, one in metrics.items()
                },
                "simulated": {}
                if machine is None
                else {"g1n2": _simulated_step(machine, cost, plain, samples)},
            }
    return results


def _wrapped(model: nn.Module, unused: list[str]) -> nn.Module:
    """Return it in DDP, which then need not look for parameters that nobody uses."""
    for name in unused:
        model.get_parameter(name).requires_grad_(False)
    return DistributedDataParallel(model)
