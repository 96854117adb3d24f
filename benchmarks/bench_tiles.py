"""Tiles of a VAE over two ranks against the model's own tiles on one.

Run: `python benchmarks/bench_tiles.py` (about four minutes); writes results/tiles.json.

Two ranks of one thread over gloo, which both have the image or its latents, and both get the
result. Alone, one rank computes the model's own tiled result while the other one waits. Both take
turns; a call over ranks lasts as long as the slower rank's. `bound` is the speed-up that the plan
allows: two ranks over the imbalance of the tiles' pixels. Peaks are bytes that torch's allocator
counted, so they are the same in every run: of a whole call, of the model's own tiled one, and of
each rank's.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import diffusers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import peak_bytes, ratio, summary, write_results
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bascule.encoders import EncoderOptions, TiledVAE

NUM_RANKS, ROUNDS, TARGET, MEMORY_TARGET = 2, 15, 1.8, 0.6
SIDE = 224  # three tiles of 128, 128 and 32 pixels each way


def main() -> None:
    """Measure in spawned processes, print the verdicts, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        queue: Any = mp.get_context("spawn").SimpleQueue()
        spawn(measure, args=(os.path.join(folder, "store"), queue, rounds), nprocs=NUM_RANKS)
        results = queue.get()
    for case in results["cases"]:
        spread, peaks = case["speed_up"], case["peak_bytes"]
        word = "met   " if spread["median"] >= TARGET else "MISSED"
        print(
            f"{word}  {case['what']}: {spread['median']:.2f}x of one rank (quartiles "
            f"{spread['lower_quartile']:.2f} to {spread['upper_quartile']:.2f}; bound "
            f"{case['bound']:.2f}x, target at least {TARGET:g}x)"
        )
        share, of_tiled = (max(peaks["over ranks"]) / peaks[way] for way in ("whole", "tiled"))
        word = "      "  # the target is of decoding, whose tiles are as large as pixels
        if case["what"].startswith("decode"):
            word = "met   " if share <= MEMORY_TARGET else "MISSED"
        print(f"{word}  peak {share:.2f}x of whole, {of_tiled:.2f}x of the model's own tiles")
    print("written to", write_results("tiles", results))


def measure(rank: int, store: str, queue: Any, rounds: int) -> None:
    """One rank: every case in turn; rank 0 reports."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    cases = list[dict[str, Any]]()
    with torch.no_grad():
        for name, vae, pixels in models():
            tiled = TiledVAE(vae, options=EncoderOptions(features_for="all"))
            latents = vae.encode(pixels).latent_dist.mode()
            for way, x in (("decode", latents), ("encode", pixels)):
                cases.append(case_of(f"{way}, {name}", vae, tiled, way, x, rounds))
    if rank == 0:
        command = f"python benchmarks/bench_tiles.py --rounds {rounds}"
        queue.put({"command": command, "num_ranks": NUM_RANKS, "target": TARGET, "cases": cases})
    dist.barrier()
    dist.destroy_process_group()


def models() -> list[tuple[str, Any, Tensor]]:
    """Random weights, the same on both ranks; an image, and a video of five frames."""
    torch.manual_seed(0)
    library: Any = diffusers
    image = library.AutoencoderKL(
        block_out_channels=(64, 128, 128),
        norm_num_groups=16,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
    )
    image.tile_sample_min_size, image.tile_latent_min_size = 128, 32
    options: dict[str, Any] = {"base_dim": 16, "z_dim": 4, "dim_mult": [1, 2, 2]}
    options |= {"temperal_downsample": [False, True], "num_res_blocks": 1}
    options |= {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    video = library.AutoencoderKLWan(**options, scale_factor_spatial=4)
    video.enable_tiling(128, 128, 96, 96)
    video.disable_tiling()
    pixels = torch.randn(1, 3, 5, SIDE, SIDE)
    return [
        ("AutoencoderKL, image", image.eval(), pixels[:, :, 0].contiguous()),
        ("AutoencoderKLWan, 5 frames", video.eval(), pixels),
    ]


def case_of(
    what: str, vae: Any, tiled: TiledVAE, way: str, x: Tensor, rounds: int
) -> dict[str, Any]:
    """A row of the results."""

    def alone() -> None:
        vae.enable_tiling()
        getattr(vae, way)(x)
        vae.disable_tiling()

    def over_ranks() -> None:
        getattr(tiled, way)(x)

    times = alternate(alone, over_ranks, rounds)
    assert tiled.last is not None
    own = torch.tensor(
        [peak_bytes(lambda: getattr(vae, way)(x)), peak_bytes(alone), peak_bytes(over_ranks)]
    )
    peaks = torch.empty(NUM_RANKS, 3, dtype=torch.int64)
    dist.all_gather(list(peaks), own)
    whole, of_tiled = peaks[0, :2].tolist()
    return {
        "what": what,
        "shape": list(x.shape),
        "speed_up": ratio(times["alone"], times["over ranks"]),
        "bound": NUM_RANKS / tiled.last.balanced,
        "plan": str(tiled.last),
        "peak_bytes": {"whole": whole, "tiled": of_tiled, "over ranks": peaks[:, 2].tolist()},
        "times": {name: summary(seconds) for name, seconds in times.items()},
    }


def alternate(
    alone: Callable[[], None], over_ranks: Callable[[], None], rounds: int
) -> dict[str, list[float]]:
    """Seconds of the slowest rank in each round; alone, the other rank has nothing to do."""
    times: dict[str, list[float]] = {"alone": [], "over ranks": []}
    for turn in range(-1, rounds):
        names = list(times) if turn % 2 else list(times)[::-1]
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            if name == "over ranks":
                over_ranks()
            elif dist.get_rank() == 0:
                alone()
            slowest = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn >= 0:
                times[name].append(float(slowest))
    return times


if __name__ == "__main__":
    main()
