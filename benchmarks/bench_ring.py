"""Double buffering in the ring: how much of a slow link it hides behind compute.

Run: `python benchmarks/bench_ring.py` (about two minutes; `--quick`: 20 seconds, writes nothing);
writes results/ring.json.

Two and four ranks over gloo, one thread each. What a rank posts at time t is not available to the
next before t + 20 ms: every message is followed by the time at which it may be used, on the clock
that all processes of a machine share. A round's compute lasts 10, 20 or 40 ms: the kernel attends
to its (small) block and sleeps for the rest, so that ranks do not compete for two cores.

bascule's ring takes turns with the same ring on a link whose transfers are waited for where they
are posted. With R ranks, compute C and link L, perfect overlap takes

- forward: (R - 1) max(C, L) + C, as R - 1 transfers run beside all computes but the last; blocking,
  R C + (R - 1) L;
- backward: (R - 1) max(C, L) + C + L: gradients travel a round behind, and after the last round
  have one more link to go; blocking, R C + (2 R - 1) L.

Outputs and gradients of the timed calls are compared with those of one process.

Targets: 1.2 times as fast as blocking, and at most 1.10 times the perfect overlap.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import ratio, summary, write_results
from _links import Link, on, sleep_until
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bascule.attention.call import AttentionCall, Tile
from bascule.attention.kernels.protocol import Attended, Grads, OutLse
from bascule.attention.kernels.registry import CpuFlashKernel
from bascule.attention.mask import EVERYTHING, AttentionMask
from bascule.attention.ring import ring_backward, ring_forward
from bascule.comm.groups import member_of, resolve

LINK_S = 0.020
COMPUTE_S = (0.010, 0.020, 0.040)
NUM_RANKS = (2, 4)
SHAPE = (1, 4, 64, 32)
"""Batch, heads, tokens of a rank, head width."""
SPEEDUP_TARGET, OVERLAP_TARGET, LARGEST_ERROR = 1.2, 1.10, 1e-5


def main() -> None:
    """Measure in spawned processes, print the verdicts, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes nothing")
    quick = parser.parse_args().quick
    load_before = os.getloadavg()
    cases: list[dict[str, Any]] = []
    for num_ranks in NUM_RANKS:
        with tempfile.TemporaryDirectory() as folder:
            queue: Any = mp.get_context("spawn").SimpleQueue()
            args = (num_ranks, os.path.join(folder, "store"), queue, 4 if quick else 30)
            spawn(measure, args=args, nprocs=num_ranks)
            cases += queue.get()
    for case in cases:
        print(said(case))
    load = {"load_average_before": load_before, "load_average_after": os.getloadavg()}
    print("load averages before and after:", *load.values())
    if not quick:
        results = {
            **load,
            "link_s": LINK_S,
            "shape": SHAPE,
            "target_speedup": SPEEDUP_TARGET,
            "target_over_perfect": OVERLAP_TARGET,
            "cases": cases,
        }
        print("written to", write_results("ring", results))


def said(case: dict[str, Any]) -> str:
    """One line for the terminal."""
    speedup, over = case["speedup"], case["over_perfect"]
    met = speedup["median"] >= SPEEDUP_TARGET and over["median"] <= OVERLAP_TARGET
    return (
        f"{'met   ' if met else 'MISSED'}  {case['num_ranks']} ranks, {case['direction']}, "
        f"{1e3 * case['compute_s']:.0f} ms a round: {speedup['median']:.2f}x as fast as blocking "
        f"(quartiles {speedup['lower_quartile']:.2f} to {speedup['upper_quartile']:.2f}; perfect "
        f"{case['perfect_speedup']:.2f}), {over['median']:.3f}x the perfect overlap (quartiles "
        f"{over['lower_quartile']:.3f} to {over['upper_quartile']:.3f}, least {over['least']:.3f})"
    )


@dataclass(frozen=True)
class SleepyKernel(CpuFlashKernel):
    """A kernel whose calls last `seconds`, most of which it leaves to other processes."""

    seconds: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        end = time.perf_counter() + self.seconds
        result = super().forward(q, k, v, mask, scale)
        sleep_until(end)
        return result

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        end = time.perf_counter() + self.seconds
        result = super().backward(grad, done)
        sleep_until(end)
        return result


def measure(rank: int, num_ranks: int, store: str, queue: Any, rounds: int) -> None:
    """One rank: every case in turn; rank 0 reports."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    cases: list[dict[str, Any]] = []
    for compute_s in COMPUTE_S:
        calls = ring_calls(rank, num_ranks, SleepyKernel(compute_s))
        for direction, call in calls.items():
            times = alternate(
                {
                    "bascule": on_link(Link(LINK_S), call),
                    "blocking": on_link(Link(LINK_S, blocking=True), call),
                },
                rounds,
            )
            cases.append(case_of(num_ranks, direction, compute_s, times))
    if rank == 0:
        queue.put(cases)
    dist.destroy_process_group()


def ring_calls(
    rank: int, num_ranks: int, kernel: SleepyKernel
) -> dict[str, Callable[[], Sequence[Tensor]]]:
    """Both directions of one rank's ring, checked against attention in one process when called."""
    batch, heads, tokens, dim = SHAPE
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, num_ranks * tokens, dim)
    q, k, v, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    plain, scale = CpuFlashKernel(), dim**-0.5
    out, lse = plain.forward(q, k, v, EVERYTHING, scale)
    grads = plain.backward(grad, Attended(q, k, v, out, lse, EVERYTHING, scale))

    def own(x: Tensor) -> Tensor:
        return x.narrow(2, rank * tokens, tokens).contiguous()

    everything = slice(None)
    tiles = [[Tile(everything, everything)]] * num_ranks
    call = AttentionCall(
        ring=member_of(resolve(None), "ring"),
        kv_lens=[tokens] * num_ranks,
        tiles=lambda _: tiles,
        kernel=kernel,
        scale=scale,
    )
    q, k, v, grad = (own(x) for x in (q, k, v, grad))
    saved = q, k, v, own(out), own(lse)

    def checked(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Sequence[Tensor]:
        for x, whole in zip(found, wanted, strict=True):
            error = float((x - own(whole)).norm() / own(whole).norm())
            assert error < LARGEST_ERROR, f"rank {rank}: off by {error}"
        return found

    return {
        "forward": lambda: checked(ring_forward(q, k, v, tiles, call), (out, lse)),
        "backward": lambda: checked(ring_backward(grad, saved, tiles, call), grads),
    }


def on_link(link: Link, call: Callable[[], object]) -> Callable[[], None]:
    """The call, with everything that it posts on that link."""

    def linked() -> None:
        with on(link):
            call()

    return linked


def case_of(
    num_ranks: int, direction: str, compute_s: float, times: dict[str, list[float]]
) -> dict[str, Any]:
    """One row of the results."""
    extra, num_links = (
        (0.0, num_ranks - 1) if direction == "forward" else (LINK_S, 2 * num_ranks - 1)
    )
    perfect = (num_ranks - 1) * max(compute_s, LINK_S) + compute_s + extra
    over = [seconds / perfect for seconds in times["bascule"]]
    low, middle, high = statistics.quantiles(over, n=4)
    return {
        "num_ranks": num_ranks,
        "direction": direction,
        "compute_s": compute_s,
        "perfect_s": perfect,
        "perfect_speedup": (num_ranks * compute_s + num_links * LINK_S) / perfect,
        "speedup": ratio(times["blocking"], times["bascule"]),
        "over_perfect": {
            "median": middle,
            "lower_quartile": low,
            "upper_quartile": high,
            "least": min(over),
        },
        "times": {name: summary(seconds) for name, seconds in times.items()},
    }


def alternate(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round on the slower rank, taking turns."""
    own = torch.zeros(len(calls), rounds, dtype=torch.float64)
    for turn in range(-1, rounds):
        order = list(enumerate(calls.values()))
        for place, call in order if turn % 2 else reversed(order):
            dist.barrier()
            start = time.perf_counter()
            call()
            if turn >= 0:
                own[place, turn] = time.perf_counter() - start
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return dict(zip(calls, own.tolist(), strict=True))


if __name__ == "__main__":
    main()
