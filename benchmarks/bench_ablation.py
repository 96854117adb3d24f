"""What compiling, 8 bits, double buffering and overlapped Ulysses are each worth, and where.

Run: `python benchmarks/bench_ablation.py` (two minutes, half of it compiling; `--quick`: fewer
rounds, writes nothing); writes results/ablation.json.

A transformer in the manner of DiT, split by `parallelize` over two ranks of one thread, gloo,
float32. Variants, all in the same processes and in turns; each of the first four is the one before
it and one thing more:

- baseline: a ring of two, eager, `double_buffer=False`: what is sent is waited for where it is
  posted;
- + compile: `handle.compile(dynamic=True)`, as one graph;
- + 8-bit wire: keys and values travel as INT8 rows;
- + double buffering: bascule's ring as it is, attending while keys and values travel;
- Ulysses: in place of the ring; compiled, everything travels as it is, `overlap=False`;
- + overlap: Ulysses attends while rows travel.

Cases: *launch-bound*, a few tokens and gloo's own speed, with nothing added; *wire-bound*, many
tokens and a link of `LINK_BYTES_PER_S`. That link is emulated: a message is followed by the time at
which it may be used, when the link has carried it after all that the rank posted before, and who
waits for it sleeps until then, on the clock that all processes of a machine share. The one
all-gather of the output is not slowed.

Where the time of a forward pass goes, in medians over rounds of the slower rank:

- launch: the same program on `EMPTY_TOKENS` tokens, which is what the launch-bound case has, with
  transfers that move nothing. What is left is Python, dispatch, and one call of each kernel on next
  to nothing; compiled graphs are for any number of tokens, so the same one runs;
- compute: with transfers that move nothing, less launch;
- communication: the rest of the total: what is waited for, and the exchange's own copies.

A transfer that moves nothing receives what it sends, by a copy within the rank, and no rank waits.

A step pays if the 95 % interval of its paired speed-up over the variant before it lies above 1.
Outputs are compared with one process.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import write_results
from _links import Link, NoLink, on
from bench_inference import paired
from bench_ring import alternate
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from bascule.diffusers import Cut, SplitTable, parallelize

NUM_RANKS, WIDTH, HEADS, NUM_BLOCKS = 2, 128, 4, 8
EMPTY_TOKENS = 32  # 16 a rank: for fewer keys, more is computed in place of torch's wrong nan
LINK_BYTES_PER_S = 50e6
LARGEST_ERROR, LARGEST_WIRE_ERROR = 1e-5, 2e-2


@dataclass(frozen=True)
class Case:
    """How many tokens, what link (None for gloo's own), and how often it is measured."""

    name: str
    tokens: int
    bytes_per_s: float | None
    rounds: int


@dataclass(frozen=True)
class Variant:
    """A way to run the model; `after` names the variant that it is compared with step by step."""

    name: str
    axis: str = "ring"
    compiled: bool = True
    comm_dtype: Literal["int8"] | None = None
    overlap: bool | None = None
    double_buffer: bool = True
    after: str | None = None


CASES = (Case("launch-bound", 32, None, 80), Case("wire-bound", 1024, LINK_BYTES_PER_S, 25))
BASELINE = "baseline"
VARIANTS = (
    Variant(BASELINE, compiled=False, double_buffer=False),
    Variant("+ compile", double_buffer=False, after=BASELINE),
    Variant("+ 8-bit wire", comm_dtype="int8", double_buffer=False, after="+ compile"),
    Variant("+ double buffering", comm_dtype="int8", after="+ 8-bit wire"),
    Variant("Ulysses", axis="ulysses", overlap=False),
    Variant("+ overlap", axis="ulysses", overlap=True, after="Ulysses"),
)


def main() -> None:
    """Measure in spawned processes, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes nothing")
    quick = parser.parse_args().quick
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        queue: Any = mp.get_context("spawn").SimpleQueue()
        args = (os.path.join(folder, "store"), queue, quick)
        spawn(measure, args=args, nprocs=NUM_RANKS)
        rows = queue.get()
    print_results(rows)
    load = {"load_average_before": load_before, "load_average_after": os.getloadavg()}
    print("load averages before and after:", *load.values())
    if not quick:
        model = {"width": WIDTH, "heads": HEADS, "blocks": NUM_BLOCKS, "dtype": "float32"}
        cases = {case.name: {"tokens": case.tokens, "link": case.bytes_per_s} for case in CASES}
        written = write_results("ablation", {**load, "model": model, "cases": cases, "rows": rows})
        print("written to", written)


# --- the model ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and MLP, shifted, scaled and gated by the time; queries and keys are normed."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        parts = self.modulation(functional.silu(time))[:, None].chunk(6, -1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        h = functional.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = (functional.rms_norm(one, one.shape[-1:]) for one in (q, k))
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + gate * self.out(attended.transpose(1, 2).flatten(2))
        h = functional.layer_norm(x, (WIDTH,)) * (1 + mlp_scale) + mlp_shift
        return x + mlp_gate * self.down(functional.gelu(self.up(h), approximate="tanh"))


class Transformer(nn.Module):
    """Blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        for block in self.blocks:
            image = block(image, time)
        return self.head(image)


TABLE = SplitTable(
    segments=("image",),
    inputs={"": {"image": Cut("image")}},
    gathers={"head": Cut("image")},
    blocks={"blocks.*": ("image",)},
    replicated=("time",),
)


def make_model() -> Transformer:
    """The same on every rank."""
    torch.manual_seed(0)
    return Transformer().eval()


def make_inputs(tokens: int) -> dict[str, Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(tokens)
    return {
        "image": torch.randn(1, tokens, WIDTH, generator=generator),
        "time": torch.randn(1, WIDTH, generator=generator),
    }


# --- measuring ------------------------------------------------------------------------------------


def measure(rank: int, store: str, queue: Any, quick: bool) -> None:
    """One rank: every case, all variants in turns; rank 0 reports."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        models = prepare()
        for case in CASES:
            errors = check(case, models)
            rounds = case.rounds // 5 if quick else case.rounds
            times = alternate(calls_of(case, models), rounds)
            rows += [row_of(case, variant, times, errors) for variant in VARIANTS]
    if rank == 0:
        queue.put(rows)
    dist.destroy_process_group()


def prepare() -> dict[str, nn.Module]:
    """The model of each variant, split and, if it is, compiled; the same one where it can be."""
    meshes = {
        axis: init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=(axis,))
        for axis in ("ring", "ulysses")
    }
    made: dict[Any, nn.Module] = {}
    for variant in VARIANTS:
        key = _key(variant)
        if key not in made:
            made[key] = make_model()
            handle = parallelize(
                made[key],
                meshes[variant.axis],
                table=TABLE,
                comm_dtype=variant.comm_dtype,
                overlap=variant.overlap,
                double_buffer=variant.double_buffer,
            )
            if variant.compiled:
                handle.compile(dynamic=True)
    return {one.name: made[_key(one)] for one in VARIANTS}


def _key(variant: Variant) -> object:
    return replace(variant, name="", after=None)


def check(case: Case, models: dict[str, nn.Module]) -> dict[str, float]:
    """Relative errors against one process, on the links that are timed."""
    inputs, errors = make_inputs(case.tokens), dict[str, float]()
    expected = make_model()(**inputs)
    for variant in VARIANTS:
        with on(Link(bytes_per_s=case.bytes_per_s)):
            found = models[variant.name](**inputs)
        errors[variant.name] = float((found - expected).norm() / expected.norm())
        largest = LARGEST_ERROR if variant.comm_dtype is None else LARGEST_WIRE_ERROR
        assert errors[variant.name] < largest, f"{case.name}, {variant.name}: {errors}"
    return errors


def calls_of(case: Case, models: dict[str, nn.Module]) -> dict[str, Callable[[], object]]:
    """For each variant the forward pass, the same without communication, and on no tokens."""
    calls: dict[str, Callable[[], object]] = {}
    inputs, empty = make_inputs(case.tokens), make_inputs(EMPTY_TOKENS)
    for variant in VARIANTS:
        programs = (
            ("", inputs, Link(bytes_per_s=case.bytes_per_s)),
            (", alone", inputs, NoLink()),
            (", empty", empty, NoLink()),
        )
        for suffix, given, link in programs:

            def call(
                model: nn.Module = models[variant.name],
                given: dict[str, Tensor] = given,
                link: Link = link,
            ) -> None:
                with on(link):
                    model(**given)

            calls[variant.name + suffix] = call
    return calls


def row_of(
    case: Case, variant: Variant, times: dict[str, list[float]], errors: dict[str, float]
) -> dict[str, Any]:
    """One row of the table, times in milliseconds."""
    own = times[variant.name]
    total, alone, launch = (
        1e3 * statistics.median(times[variant.name + suffix])
        for suffix in ("", ", alone", ", empty")
    )
    return {
        "case": case.name,
        "variant": variant.name,
        "total_ms": total,
        "launch_ms": launch,
        "compute_ms": alone - launch,
        "communication_ms": total - alone,
        "over_baseline": paired(times[BASELINE], own) if variant.name != BASELINE else None,
        "step": paired(times[variant.after], own) if variant.after else None,
        "error": errors[variant.name],
    }


# --- report ---------------------------------------------------------------------------------------


def print_results(rows: list[dict[str, Any]]) -> None:
    """The table, and which steps pay in which case."""
    table = Table("case", "variant", "total ms", "launch", "compute", "communication", "speed-up")
    for name in ("the step", "error"):
        table.add_column(name)
    for row in rows:
        parts = (row[f"{name}_ms"] for name in ("total", "launch", "compute", "communication"))
        table.add_row(
            row["case"],
            row["variant"],
            *(f"{part:.1f}" for part in parts),
            interval(row["over_baseline"]),
            interval(row["step"]),
            f"{row['error']:.0e}",
        )
    Console(width=140).print(table)
    for case in CASES:
        said = [
            f"{row['variant'].removeprefix('+ ')} {verdict(row['step'] or row['over_baseline'])}"
            for row in rows
            if row["case"] == case.name and row["variant"] != BASELINE
        ]
        print(f"{case.name}: {', '.join(said)} (Ulysses: against the baseline)")


def interval(ratio: dict[str, float] | None) -> str:
    """Mean and 95 % interval; empty for nothing."""
    return f"{ratio['mean']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else ""


def verdict(ratio: dict[str, float]) -> str:
    """Whether an interval of a speed-up lies above 1, below it, or around it."""
    return "pays" if ratio["low"] > 1 else "costs" if ratio["high"] < 1 else "is even"


if __name__ == "__main__":
    main()
