"""The 8-bit wire: its error at tensors and at attention's output, its bytes, and its time.

Run: `python benchmarks/bench_quantize.py` (about two minutes; `--quick`: half a minute, writes
nothing); writes results/quantize.json. The errors are deterministic; the times need two cores.

Errors: B1 H8 S2048 D128, normal q, k and v, by `measure_error` against attention in float64. With
offsets in K (and V), each head has 4 channels that are 8 sigma off, the same for all tokens. An
offset in V is in every output, so that the relative error looks small whatever happens to the rest:
"of spread" divides by the norm of the output less its mean, which no offset changes. (In bfloat16
most of what it then shows is the rounding of an output of magnitude 8.) Targets, for
int8, with centres where there are offsets: 0.7 % at each tensor, 1.0 % at the output with K and V
on the wire, 1.4 % with q, k, v and the output.

Exchange: two ranks over gloo, T = 1024 tokens a rank, bfloat16. One all-to-all of half the heads of
q, k and v as they are; the same at 8 bits, with packing and unpacking, without and with centres.
The bytes are those of the tensors that the collectives are given. The link between two
processes of one machine is as fast as its memory: what 8 bits save on a slower one is the
difference of the bytes over its bandwidth.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import ratio, summary, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bascule.comm.quantized import Format, Quantized, measure_error

BATCH, HEADS, TOKENS, DIM = 1, 8, 2048, 128
OFFSET, CHANNELS = 8.0, 4
FORMATS: tuple[Format, ...] = ("int8", "e4m3")
TENSOR_TARGET, KV_TARGET, ALL_TARGET, BYTES_TARGET = 0.007, 0.010, 0.014, 0.52
NUM_RANKS = 2


def main() -> None:
    """Measure, print, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    errors = measure_errors()
    exchange = measure_exchange(rounds=20 if quick else 200)
    print_results(errors, exchange)
    if not quick:
        shape = {"batch": BATCH, "heads": HEADS, "tokens": TOKENS, "head_dim": DIM}
        targets = {
            "tensor": TENSOR_TARGET,
            "out_kv": KV_TARGET,
            "out_all": ALL_TARGET,
            "bytes": BYTES_TARGET,
        }
        results = {"errors": errors, "exchange": exchange}
        print(
            "written to", write_results("quantize", {"shape": shape, "target": targets, **results})
        )


# --- errors ---------------------------------------------------------------------------------------


def inputs(offsets: str, size: float = OFFSET) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k and v, with offsets in those of k and v that `offsets` names."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, TOKENS, DIM, generator=generator) for _ in range(3))
    for name, x in (("k", k), ("v", v)):
        for head in range(HEADS):
            channels = torch.randperm(DIM, generator=generator)[:CHANNELS]
            signs = torch.randint(0, 2, (CHANNELS,), generator=generator) * 2.0 - 1.0
            if name in offsets:
                x[:, head, :, channels] += size * signs
    return q, k, v


def measure_errors() -> list[dict[str, Any]]:
    """Every format with and without centres on every kind of input."""
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for offsets in ("", "k", "kv"):
            q, k, v = (x.to(dtype) for x in inputs(offsets))
            for fmt in FORMATS:
                for wire in (Quantized(fmt), Quantized(fmt, centered=True)):
                    found = measure_error(q, k, v, wire)
                    elements = sum(x.numel() for x in (q, k, v, q))
                    row = {
                        "offsets": offsets or "none",
                        "dtype": str(dtype).removeprefix("torch."),
                        "format": fmt,
                        "centred": wire.centered,
                        "share_of_bf16_bytes": found.packed_bytes / (2 * elements),
                        **asdict(found),
                    }
                    rows.append(row | {"verdict": verdict_of(row)})
    return rows


def verdict_of(row: dict[str, Any]) -> str:
    """Whether the targets are met; empty where none are set."""
    if row["format"] != "int8" or (row["offsets"] != "none" and not row["centred"]):
        return ""
    met = (
        max(row[name]["relative_l2"] for name in "qkv") <= TENSOR_TARGET
        and row["out_kv"]["relative_l2"] <= KV_TARGET
        and row["out_all"]["relative_l2"] <= ALL_TARGET
        and row["share_of_bf16_bytes"] <= BYTES_TARGET
    )
    return "met" if met else "MISSED"


# --- exchange -------------------------------------------------------------------------------------


def measure_exchange(rounds: int) -> dict[str, Any]:
    """Times and bytes of two ranks, as rank 0 reports them."""
    with tempfile.TemporaryDirectory() as folder:
        queue: Any = mp.get_context("spawn").SimpleQueue()
        store = os.path.join(folder, "store")
        spawn(exchange_rank, args=(store, queue, rounds), nprocs=NUM_RANKS)
        return queue.get()


def exchange_rank(rank: int, store: str, queue: Any, rounds: int) -> None:
    """One rank: all calls in turns; rank 0 reports the slower rank's times."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    shape = (3, NUM_RANKS, HEADS // NUM_RANKS, TOKENS // NUM_RANKS, DIM)
    qkv = torch.randn(shape).transpose(0, 1).contiguous().bfloat16()
    num_bytes: dict[str, int] = {}

    def exchange(label: str, sent: Tensor) -> Tensor:
        num_bytes[label] = sent.nbytes
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1))
        return received

    calls: dict[str, Callable[[], object]] = {"bf16": lambda: exchange("bf16", qkv)}
    wires = {fmt: Quantized(fmt) for fmt in FORMATS}
    wires |= {f"{fmt}, centred": Quantized(fmt, centered=True) for fmt in FORMATS}
    for name, wire in wires.items():
        rows = wire.pack(qkv)
        calls |= {
            name: lambda n=name, w=wire: w.unpack(exchange(n, w.pack(qkv)), torch.bfloat16),
            f"{name}: pack": lambda w=wire: w.pack(qkv),
            f"{name}: unpack": lambda w=wire, rows=rows: w.unpack(rows, torch.bfloat16),
        }
    times = alternate(calls, rounds)
    if rank == 0:
        shares = {name: num_bytes[name] / num_bytes["bf16"] for name in wires}
        queue.put(
            {
                "num_ranks": NUM_RANKS,
                "sent_bytes": num_bytes,
                "share_of_bf16_bytes": shares,
                "times": {name: summary(seconds) for name, seconds in times.items()},
                "over_bf16": {name: ratio(times[name], times["bf16"]) for name in wires},
            }
        )
    dist.destroy_process_group()


def alternate(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round on the slower rank, taking turns."""
    own = torch.zeros(len(calls), rounds, dtype=torch.float64)
    for turn in range(-3, rounds):
        order = list(enumerate(calls.values()))
        for place, call in order if turn % 2 else reversed(order):
            dist.barrier()
            start = time.perf_counter()
            call()
            if turn >= 0:
                own[place, turn] = time.perf_counter() - start
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return dict(zip(calls, own.tolist(), strict=True))


# --- report ---------------------------------------------------------------------------------------


def print_results(errors: list[dict[str, Any]], exchange: dict[str, Any]) -> None:
    """Errors in percent of the relative L2 norm, times in microseconds."""
    table = Table("offsets", "dtype", "format", "centred", "q", "k", "v", "out, K V", "of spread")
    for name in ("out, all", "of spread", "bytes", "targets"):
        table.add_column(name)
    for row in errors:
        found = [row[name]["relative_l2"] for name in "qkv"]
        for name in ("out_kv", "out_all"):
            found += [row[name]["relative_l2"], row[name]["relative_to_spread"]]
        table.add_row(
            *(row[name] for name in ("offsets", "dtype", "format")),
            "yes" if row["centred"] else "",
            *(f"{100 * error:.2f} %" for error in found),
            f"{100 * row['share_of_bf16_bytes']:.1f} %",
            row["verdict"],
        )
    console = Console(width=140)
    console.print(table)
    for name, times in exchange["times"].items():
        print(f"{name}: {times['median_us']:.0f} us median, {times['min_us']:.0f} us least")
    for fmt, share in exchange["share_of_bf16_bytes"].items():
        met = "met   " if share <= BYTES_TARGET else "MISSED"
        print(f"{met} {fmt}: {100 * share:.2f} % of the bytes of bfloat16 on the wire")


if __name__ == "__main__":
    main()
