"""Time split models on two ranks of one thread against other libraries."""

import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

NUM_RANKS = 2
FORWARDS = 2  # a turn
MAX_ERROR = 1e-5  # relative; float32
CEILING_TARGET, PEER_TARGET = 0.95, 1.0
OURS = {"ceiling": "ring", "bascule ring": "ring", "bascule Ulysses": "ulysses"}
PEERS = "diffusers Ulysses", "diffusers ring", "para-attn", "cache-dit"
CANDIDATES = ("one rank", *OURS, *PEERS)


# --- models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A model and the size of what it generates.

    Attributes:
        what: In words, without the sizes.
        make: The model and its inputs, of this shape; the same on all ranks.
        grid: Tokens of the image or video: (height, width), or (frames, height, width).
        text: Tokens.
        heads: Of attention, of 64 channels each.
        is_divisible: Whether two ranks can have the same tokens, without a filled rest.
    """

    what: str
    make: Callable[["Shape"], tuple[Any, dict[str, Any]]]
    grid: tuple[int, ...]
    text: int
    heads: int
    is_divisible: bool = True

    def __str__(self) -> str:
        tokens = f"{math.prod(self.grid)} + {self.text} tokens"
        return f"{self.what}, {tokens}, {self.heads} heads of 64, float32"


def make_flux(shape: Shape) -> tuple[Any, dict[str, Any]]:
    """Text and image are one sequence."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=64,
        num_attention_heads=shape.heads,
        joint_attention_dim=256,
        pooled_projection_dim=256,
        axes_dims_rope=(8, 28, 28),
    ).eval()
    height, width = shape.grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([torch.zeros(height, width), rows, columns], dim=-1).view(-1, 3)
    inputs = {
        "hidden_states": torch.randn(1, height * width, 64),
        "encoder_hidden_states": torch.randn(1, shape.text, 256),
        "pooled_projections": torch.randn(1, 256),
        "timestep": torch.tensor([0.5]),
        "img_ids": places,
        "txt_ids": torch.zeros(shape.text, 3),
        "return_dict": False,
    }
    return model, inputs


def make_wan(shape: Shape) -> tuple[Any, dict[str, Any]]:
    """The video attends to itself, and to a text that every rank has."""
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=shape.heads,
        attention_head_dim=64,
        in_channels=16,
        out_channels=16,
        text_dim=256,
        freq_dim=256,
        ffn_dim=shape.heads * 64 * 4,
        num_layers=4,
    ).eval()
    frames, height, width = shape.grid
    inputs = {
        "hidden_states": torch.randn(1, 16, frames, height * 2, width * 2),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, shape.text, 256),
        "return_dict": False,
    }
    return model, inputs


SHAPES = {
    "flux": Shape("Flux, 2 + 4 blocks", make_flux, (32, 32), 128, 8),
    "odd": Shape("Flux, 2 + 4 blocks", make_flux, (31, 33), 77, 8, is_divisible=False),
    "heads": Shape("Flux, 2 + 4 blocks", make_flux, (32, 32), 128, 10),
    "wan": Shape("Wan, 4 blocks, 5 frames", make_wan, (5, 13, 17), 77, 8, is_divisible=False),
}


def inference(
    *, peer_python: Path | None = None, rounds: int = 30, quick: bool = False
) -> dict[str, Any]:
    """Time split models on two ranks against other libraries and against no communication.

    Three minutes a shape. Every candidate is a pair of processes that stays alive; one at a time is
    asked for a few forward passes, in turns.

    - one rank: the model alone, the other rank idle;
    - ceiling: bascule's ring with collectives that move nothing, on both ranks at once;
    - bascule ring, bascule Ulysses: `parallelize`; the verdict is on the faster one;
    - diffusers Ulysses, diffusers ring: its own context parallelism, in its modes for any length
      where tokens do not divide (it asks for the number of accelerators, and is told one);
    - para-attn, cache-dit: their Ulysses. Where tokens do not divide, they and diffusers gather
      tensors of unlike sizes, which gloo cannot; they get a gather that fills them up.

    A peer that does not run a shape, or runs it wrong, is named with its reason. The 95 % interval
    of a ratio is that of the mean of the logarithms of the paired ratios of rounds.

    Args:
        peer_python: A Python with torch, diffusers 0.33.1 and para-attn 0.3.38, which do not run
            with newer diffusers; without it, para-attn is left out.
        rounds: Turns of each candidate.
        quick: Two rounds of one shape.
    """
    return _all_shapes(
        peer_python, 2 if quick else rounds, list(SHAPES)[: 1 if quick else None], ""
    )


def inference_compiled(
    *, peer_python: Path | None = None, rounds: int = 30, quick: bool = False
) -> dict[str, Any]:
    """Time the same, all compiled. Five minutes a shape."""
    shapes = list(SHAPES)[: 1 if quick else None]
    return _all_shapes(peer_python, 2 if quick else rounds, shapes, "--compiled")


def _all_shapes(
    peer_python: Path | None, rounds: int, shapes: Sequence[str], flag: str
) -> dict[str, Any]:
    cases = list[dict[str, Any]]()
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            cases.append(_measure_shape(shape, peer_python, rounds, flag, Path(folder)))
        _print_verdicts(cases[-1])
    return {"rounds": rounds, "cases": cases}


# --- the processes that are measured --------------------------------------------------------------


def _work(name: str, rank: int, store: str, shape: Shape, compiled: bool) -> None:
    """Answer each line of standard input, a number of forward passes, with their seconds."""
    torch.set_num_threads(1)
    _start_ranks(name, rank, store)
    model, inputs = shape.make(shape)
    with torch.inference_mode():
        expected = model(**inputs)[0]
        try:
            forward = _prepare(name, model, inputs, shape, compiled)
            output = forward()
        except Exception as error:  # of whatever peer
            text = " ".join(str(error).split())[:200]
            print(json.dumps({"failed": f"{type(error).__name__}: {text}"}), flush=True)
            return
        error = float((output - expected).norm() / expected.norm())
        print(json.dumps({"error": error}), flush=True)
        for line in sys.stdin:
            number = int(line)
            dist.barrier()
            start = time.perf_counter()
            if name != "one rank" or rank == 0:
                for _ in range(number):
                    forward()
            seconds = (time.perf_counter() - start) / max(number, 1)
            print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def _start_ranks(name: str, rank: int, store: str) -> None:
    """Two ranks; those of the ceiling exchange nothing."""
    if name == "ceiling":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=300),
    )


def _prepare(
    name: str, model: Any, inputs: dict[str, Any], shape: Shape, compiled: bool
) -> Callable[[], torch.Tensor]:
    """The forward pass of a candidate; the whole output on every rank."""
    if name in OURS:
        from bascule.diffusers import parallelize

        mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=(OURS[name],))
        parallelize(model, mesh=mesh)
    elif name.startswith("diffusers"):
        from diffusers.models._modeling_parallel import ContextParallelConfig

        kind = name.split()[1].lower()
        degrees: dict[str, Any] = {f"{kind}_degree": NUM_RANKS}
        degrees[f"{kind}_anything"] = not shape.is_divisible
        with mock.patch("torch.accelerator.device_count", lambda: 1):
            model.enable_parallelism(config=ContextParallelConfig(**degrees))
    elif name == "para-attn":
        peer = importlib.import_module("para_attn.context_parallel")
        adapters = importlib.import_module("para_attn.context_parallel.diffusers_adapters")
        mesh = peer.init_context_parallel_mesh("cpu", max_ring_dim_size=1)
        adapters.parallelize_transformer(model, mesh=mesh)
    elif name == "cache-dit":
        peer = importlib.import_module("cache_dit")
        with mock.patch("torch.accelerator.device_count", lambda: 1):
            config = peer.ParallelismConfig(
                ulysses_size=NUM_RANKS, ulysses_anything=not shape.is_divisible
            )
            peer.enable_cache(model, parallelism_config=config)
    if not name.startswith("bascule"):
        dist.all_gather = _all_gather_any
    run = torch.compile(model) if compiled else model
    return lambda: run(**inputs)[0]


def _all_gather_any(parts: list[torch.Tensor], x: torch.Tensor, group: Any = None) -> None:
    """`dist.all_gather` of tensors that differ in one size, which gloo does not have."""
    sizes = [max(each) for each in zip(*(part.shape for part in parts), strict=True)]
    filled = x.new_zeros(sizes)
    filled[tuple(map(slice, x.shape))] = x
    whole = filled.new_empty(len(parts) * filled.numel())
    dist.all_gather_into_tensor(whole, filled.flatten(), group=group)
    for part, filled in zip(parts, whole.view(len(parts), *sizes), strict=True):
        part.copy_(filled[tuple(map(slice, part.shape))])


# --- who asks them in turns -----------------------------------------------------------------------


class Candidate:
    """Two processes that run one candidate.

    Attributes:
        error: Of its output, relative; NaN if it does not run.
        failed: Why it does not run; None if it does.
    """

    def __init__(self, name: str, python: Path, folder: Path, flag: str, shape: str) -> None:
        self.name = name
        script = [str(python), __file__, *([flag] if flag else [])]
        store = str(folder / f"{name} {shape}".replace(" ", "_"))
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._ranks = [
            subprocess.Popen(
                [*script, name, str(rank), store, shape],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )
            for rank in range(NUM_RANKS)
        ]
        answers = [self._answer(process) for process in self._ranks]
        self.failed = next((one["failed"] for one in answers if "failed" in one), None)
        self.error = max(one.get("error", math.nan) for one in answers)
        if self.failed is None and name != "ceiling" and self.error > MAX_ERROR:
            self.failed = f"wrong by {self.error:.1e}"

    def seconds(self, number: int) -> float:
        """Of a forward pass, on rank 0."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
        first, *_ = [self._answer(process) for process in self._ranks]
        return first

    def close(self) -> None:
        """End the processes."""
        for process in self._ranks:
            if self.failed is not None:
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("{", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9")):
                return json.loads(line)
        return {"failed": f"a process ended with {process.wait()}"}


def _measure_shape(
    shape: str, peer_python: Path | None, rounds: int, flag: str, folder: Path
) -> dict[str, Any]:
    """All candidates in turns."""
    pythons = dict.fromkeys(CANDIDATES, Path(sys.executable))
    if peer_python is None:
        del pythons["para-attn"]
    else:
        pythons["para-attn"] = peer_python
    started = [Candidate(name, python, folder, flag, shape) for name, python in pythons.items()]
    candidates = [candidate for candidate in started if candidate.failed is None]
    times: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for candidate in candidates:
        candidate.seconds(2)
    for turn in range(rounds):
        first = turn % len(candidates)
        for candidate in candidates[first:] + candidates[:first]:
            times[candidate.name].append(candidate.seconds(FORWARDS))
    for candidate in started:
        candidate.close()
    return {
        "model": f"{SHAPES[shape]}, {'compiled' if flag else 'eager'}",
        "do_not_run": {one.name: one.failed for one in started if one.failed is not None},
        "errors": {candidate.name: candidate.error for candidate in candidates},
        **_summarize(times),
    }


def _summarize(times: dict[str, list[float]]) -> dict[str, Any]:
    """Speed-ups over one rank, and the paired ratios that the verdicts are about."""
    peers = [name for name in PEERS if name in times]
    ours = [name for name in OURS if name != "ceiling"]
    best, own = (
        min(names, key=lambda name: statistics.median(times[name]), default=None)
        for names in (peers, ours)
    )
    return {
        "median_s": {name: statistics.median(seconds) for name, seconds in times.items()},
        "speedup": {name: paired(times["one rank"], times[name]) for name in times},
        "of_ceiling": {name: paired(times["ceiling"], times[name]) for name in (*ours, *peers)},
        "best_peer": best,
        "best_own": own,
        "over_best_peer": {
            name: paired(times[best], times[name]) for name in ours if best is not None
        },
    }


def paired(slower: Sequence[float], faster: Sequence[float]) -> dict[str, float]:
    """Geometric mean of the ratios of rounds, with its 95 % interval (normal approximation)."""
    logs = [math.log(a / b) for a, b in zip(slower, faster, strict=True)]
    middle = statistics.fmean(logs)
    half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return {
        "mean": math.exp(middle),
        "low": math.exp(middle - half),
        "high": math.exp(middle + half),
        "of_minima": min(slower) / min(faster),
    }


def _print_verdicts(results: dict[str, Any]) -> None:
    print(results["model"])
    for name, found in results["speedup"].items():
        print(
            f"  {name}: {results['median_s'][name] * 1e3:.1f} ms, {found['mean']:.2f}x one rank "
            f"({found['low']:.2f} to {found['high']:.2f})"
            + ("" if name == "ceiling" else f", relative error {results['errors'][name]:.1e}")
        )
    for name, reason in results["do_not_run"].items():
        print(f"  {name} does not run this: {reason}")
    own, best = results["best_own"], results["best_peer"]
    for name, part in results["of_ceiling"].items():
        if name not in OURS:
            continue
        is_met = part["mean"] >= CEILING_TARGET
        print(
            f"{_verdict(is_met, name == own)} {name} at {part['mean']:.1%} of the ceiling "
            f"({part['low']:.1%} to {part['high']:.1%}; target {CEILING_TARGET:.0%})"
        )
    for name, peer in results["over_best_peer"].items():
        is_met = peer["high"] >= PEER_TARGET
        print(
            f"{_verdict(is_met, name == own)} {name} {peer['mean']:.3f}x {best} "
            f"({peer['low']:.3f} to {peer['high']:.3f}; the interval must reach {PEER_TARGET:g})"
        )


def _verdict(is_met: bool, counts: bool) -> str:
    return ("met   " if is_met else "MISSED") if counts else "      "


if __name__ == "__main__":  # a process that is measured
    *flags, name, rank, store, shape = sys.argv[1:]
    _work(name, int(rank), store, SHAPES[shape], bool(flags))
