"""Time split models on ranks of one thread against other libraries, mesh by mesh."""

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
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

FORWARDS = 2  # a turn
MAX_ERROR = 1e-5  # relative; float32
CEILING_TARGET, PEER_TARGET = 0.95, 1.0
DEGREES = {"ring": (2, 1), "Ulysses": (1, 2), "both": (2, 2)}  # ring and Ulysses ranks of a mesh
PEERS = "diffusers", "para-attn", "cache-dit"


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
        meshes: Names of the meshes, which have equally many ranks.
    """

    what: str
    make: Callable[["Shape"], tuple[Any, dict[str, Any]]]
    grid: tuple[int, ...]
    text: int
    heads: int
    is_divisible: bool = True
    meshes: tuple[str, ...] = ("ring", "Ulysses")

    def __str__(self) -> str:
        tokens = f"{math.prod(self.grid)} + {self.text} tokens"
        return f"{self.what}, {tokens}, {self.heads} heads of 64, {self.num_ranks} ranks, float32"

    @property
    def num_ranks(self) -> int:
        return math.prod(DEGREES[self.meshes[0]])

    @property
    def candidates(self) -> list[str]:
        """Each library on each mesh, "LIBRARY MESH"; on two ranks also what bounds them."""
        names = [f"{name} {mesh}" for mesh in self.meshes for name in ("bascule", *PEERS)]
        return names if self.num_ranks > 2 else ["one rank", "ceiling", *names]


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
    "both": Shape("Flux, 2 + 4 blocks", make_flux, (32, 32), 128, 8, meshes=("both",)),
    "odd": Shape("Flux, 2 + 4 blocks", make_flux, (31, 33), 77, 8, is_divisible=False),
    "heads": Shape("Flux, 2 + 4 blocks", make_flux, (32, 32), 128, 10),
    "wan": Shape("Wan, 4 blocks, 5 frames", make_wan, (5, 13, 17), 77, 8, is_divisible=False),
}


def inference(
    *,
    shapes: tuple[str, ...] = ("flux", "both"),
    peer_python: Path | None = None,
    rounds: int = 10,
    quick: bool = False,
) -> dict[str, Any]:
    """Time split models against other libraries on the same mesh, and against no communication.

    Two minutes a shape. Every candidate is a group of processes that stays alive; one at a time is
    asked for a few forward passes, in turns.

    - one rank: the model alone, the other rank idle;
    - ceiling: bascule's ring with collectives that move nothing, on both ranks at once;
    - bascule: `parallelize`, with a ring, with Ulysses, and with both (2 x 2);
    - diffusers: its own context parallelism, in its modes for any length where tokens do not divide
      (it asks for the number of accelerators, and is told one). Its ring gets attention of CPUs
      that returns the LSE;
    - para-attn, cache-dit: theirs. Where tokens do not divide, they and diffusers gather
      tensors of unlike sizes, which gloo cannot; they get a gather that fills them up.

    Each mesh has a verdict: bascule over the fastest peer there. On two ranks it is of wall-clock
    time; the four ranks of both share two cores, so there it is of their processor time.

    A peer that does not run a shape, or runs it wrong, is named with its reason. The 95 % interval
    of a ratio is that of the mean of the logarithms of the paired ratios of rounds.

    Args:
        shapes: Of "flux", "both", "odd", "heads", "wan".
        peer_python: A Python with torch, diffusers 0.33.1 and para-attn 0.3.38, which do not run
            with newer diffusers; without it, para-attn is left out.
        rounds: Turns of each candidate.
        quick: Two rounds of one shape.
    """
    return _all_shapes(peer_python, 2 if quick else rounds, shapes[: 1 if quick else None], "")


def inference_compiled(
    *,
    shapes: tuple[str, ...] = ("flux", "odd", "heads", "wan"),
    peer_python: Path | None = None,
    rounds: int = 10,
    quick: bool = False,
) -> dict[str, Any]:
    """Time the same, all compiled. Five minutes a shape."""
    chosen = shapes[: 1 if quick else None]
    return _all_shapes(peer_python, 2 if quick else rounds, chosen, "--compiled")


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
    """Answer each line of standard input, a number of forward passes, with their seconds.

    Of one pass: by the clock, and of the processor.
    """
    torch.set_num_threads(1)
    _start_ranks(name, rank, store, shape.num_ranks)
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
            before = time.perf_counter(), time.process_time()
            if name != "one rank" or rank == 0:
                for _ in range(number):
                    forward()
            after = time.perf_counter(), time.process_time()
            seconds = [(b - a) / max(number, 1) for a, b in zip(before, after, strict=True)]
            print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def _start_ranks(name: str, rank: int, store: str, num_ranks: int) -> None:
    """Start the ranks; those of the ceiling exchange nothing."""
    if name == "ceiling":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=300),
    )


def _prepare(
    name: str, model: Any, inputs: dict[str, Any], shape: Shape, compiled: bool
) -> Callable[[], torch.Tensor]:
    """The forward pass of a candidate; the whole output on every rank."""
    library, _, kind = name.partition(" ")
    ring, ulysses = DEGREES.get(kind, (2, 1))
    if library in ("ceiling", "bascule"):
        from bascule.diffusers import parallelize

        axes = {"ring": ring, "ulysses": ulysses}
        axes = {axis: degree for axis, degree in axes.items() if degree > 1}
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        parallelize(model, mesh=mesh)
    elif library == "diffusers":
        from diffusers.models import attention_dispatch
        from diffusers.models._modeling_parallel import ContextParallelConfig

        attends: Any = attention_dispatch
        native = attends._native_attention_forward_op
        attends._native_attention_forward_op = partial(_attend_with_lse, native)
        degrees: dict[str, Any] = {"ring_degree": ring, "ulysses_degree": ulysses}
        if not shape.is_divisible:
            degrees[f"{kind.lower()}_anything"] = True
        with mock.patch("torch.accelerator.device_count", lambda: 1):
            model.enable_parallelism(config=ContextParallelConfig(**degrees))
    elif library == "para-attn":
        peer = importlib.import_module("para_attn.context_parallel")
        adapters = importlib.import_module("para_attn.context_parallel.diffusers_adapters")
        mesh = peer.init_context_parallel_mesh("cpu", max_ring_dim_size=ring)
        adapters.parallelize_transformer(model, mesh=mesh)
    elif library == "cache-dit":
        peer = importlib.import_module("cache_dit")
        sizes: dict[str, Any] = {"ring_size": ring, "ulysses_size": ulysses}
        sizes = {name: size for name, size in sizes.items() if size > 1}
        if not shape.is_divisible:
            sizes[f"{kind.lower()}_anything"] = True
        with mock.patch("torch.accelerator.device_count", lambda: 1):
            peer.enable_cache(model, parallelism_config=peer.ParallelismConfig(**sizes))
    if not name.startswith("bascule"):
        dist.all_gather = _all_gather_any
    run = torch.compile(model) if compiled else model
    return lambda: run(**inputs)[0]


def _attend_with_lse(
    native: Callable[..., Any],
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attend as diffusers' native back end does; where its ring asks for the LSE, return it too."""
    mask, dropout, is_causal, scale, _, returns_lse = args
    if not returns_lse:
        return native(ctx, query, key, value, *args, **kwargs)
    by_head = [x.transpose(1, 2) for x in (query, key, value)]
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(*by_head, dropout, is_causal, attn_mask=mask, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


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
    """The processes that run one candidate.

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
            for rank in range(SHAPES[shape].num_ranks)
        ]
        answers = [self._answer(process) for process in self._ranks]
        self.failed = next((one["failed"] for one in answers if "failed" in one), None)
        self.error = max(one.get("error", math.nan) for one in answers)
        if self.failed is None and name != "ceiling" and self.error > MAX_ERROR:
            self.failed = f"wrong by {self.error:.1e}"

    def seconds(self, number: int) -> float:
        """Return those of a pass by the clock of rank 0; of four ranks, by all processors."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
        answers = [self._answer(process) for process in self._ranks]
        return answers[0][0] if len(answers) == 2 else sum(processor for _, processor in answers)

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
            if line.startswith(("{", "[")):
                return json.loads(line)
        return {"failed": f"a process ended with {process.wait()}"}


def _measure_shape(
    shape: str, peer_python: Path | None, rounds: int, flag: str, folder: Path
) -> dict[str, Any]:
    """All candidates in turns."""
    pythons = dict.fromkeys(SHAPES[shape].candidates, Path(sys.executable))
    for name in [name for name in pythons if name.startswith("para-attn")]:
        if peer_python is None:
            del pythons[name]
        else:
            pythons[name] = peer_python
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
    result: dict[str, Any] = {
        "median_s": {name: statistics.median(seconds) for name, seconds in times.items()},
    }
    if "one rank" in times:
        pairs = {name: paired(times["one rank"], times[name]) for name in times}
        result["speedup"] = pairs
        result["of_ceiling"] = {name: paired(times["ceiling"], times[name]) for name in times}
    result["over_best_peer"] = dict[str, Any]()
    for own in [name for name in times if name.startswith("bascule")]:
        mesh = own.split()[1]
        peers = [name for peer in PEERS if (name := f"{peer} {mesh}") in times]
        if peers:
            best = min(peers, key=lambda name: statistics.median(times[name]))
            result["over_best_peer"][own] = {"peer": best, **paired(times[best], times[own])}
    return result


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
    from measuring import say  # which needs bascule, as para-attn's Python has not

    print(results["model"])
    speedups = results.get("speedup", {})
    for name, seconds in results["median_s"].items():
        text = f"  {name}: {seconds * 1e3:.1f} ms" + ("" if speedups else " of processors")
        if (found := speedups.get(name)) is not None:
            text += f", {found['mean']:.2f}x one rank ({found['low']:.2f} to {found['high']:.2f})"
        print(text + ("" if name == "ceiling" else f", error {results['errors'][name]:.1e}"))
    for name, reason in results["do_not_run"].items():
        print(f"  {name} does not run this: {reason}")
    own = [name for name in results["median_s"] if name.startswith("bascule")]
    best = min(own, key=results["median_s"].__getitem__, default=None)
    for name in own if speedups else []:
        part = results["of_ceiling"][name]
        is_met = part["mean"] >= CEILING_TARGET
        say(
            f"{name} at {part['mean']:.1%} of the ceiling "
            f"({part['low']:.1%} to {part['high']:.1%}; target {CEILING_TARGET:.0%})",
            is_met if name == best else None,
        )
    for name, peer in results["over_best_peer"].items():
        say(
            f"{name} {peer['mean']:.3f}x {peer['peer']} ({peer['low']:.3f} to {peer['high']:.3f}; "
            f"of minima {peer['of_minima']:.3f}; the interval must reach {PEER_TARGET:g})",
            peer["high"] >= PEER_TARGET,
        )


if __name__ == "__main__":  # a process that is measured
    *flags, name, rank, store, shape = sys.argv[1:]
    _work(name, int(rank), store, SHAPES[shape], bool(flags))
