"""Measure what each option of attention over ranks is worth, and where."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from inference import paired
from links import Link, NoLink, on
from measuring import in_turns, on_ranks
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
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
    overlap: bool = False
    after: str | None = None


CASES = (Case("launch-bound", 32, None, 80), Case("wire-bound", 1024, LINK_BYTES_PER_S, 25))
BASELINE = "baseline"
VARIANTS = (
    Variant(BASELINE, compiled=False),
    Variant("+ compile", after=BASELINE),
    Variant("+ 8-bit wire", comm_dtype="int8", after="+ compile"),
    Variant("Ulysses", axis="ulysses"),
    Variant("+ overlap", axis="ulysses", overlap=True, after="Ulysses"),
)


def ablation(*, quick: bool = False) -> dict[str, Any]:
    """Measure what compiling, 8 bits and overlapped Ulysses are each worth.

    Two minutes. A transformer in the manner of DiT, split by `parallelize` over two ranks, float32,
    all variants in the same processes and in turns. Cases: "launch-bound", a few tokens and gloo's
    own speed; "wire-bound", many tokens and an emulated link of `LINK_BYTES_PER_S`. Launch is the
    same program on `EMPTY_TOKENS` tokens with transfers that move nothing, compute the time with
    such transfers less launch, communication the rest. A step pays if the 95 % interval of its
    paired speed-up over the variant before lies above 1. Outputs are compared with one process.
    """
    rows = on_ranks(_ablation_on_rank, quick)
    _print_results(rows)
    model = {"width": WIDTH, "heads": HEADS, "blocks": NUM_BLOCKS, "dtype": "float32"}
    cases = {case.name: {"tokens": case.tokens, "link": case.bytes_per_s} for case in CASES}
    return {"model": model, "cases": cases, "rows": rows}


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


def _make_model() -> Transformer:
    """The same on every rank."""
    torch.manual_seed(0)
    return Transformer().eval()


def _make_inputs(tokens: int) -> dict[str, Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(tokens)
    return {
        "image": torch.randn(1, tokens, WIDTH, generator=generator),
        "time": torch.randn(1, WIDTH, generator=generator),
    }


# --- measuring ------------------------------------------------------------------------------------


def _ablation_on_rank(quick: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        models = _prepare()
        for case in CASES:
            errors = _check(case, models)
            rounds = case.rounds // 5 if quick else case.rounds
            times = in_turns(_calls_of(case, models), rounds, warmup=1)
            rows += [_row_of(case, variant, times, errors) for variant in VARIANTS]
    return rows


def _prepare() -> dict[str, nn.Module]:
    """The model of each variant, split and, if it is, compiled; the same one where it can be."""
    meshes = {
        axis: init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=(axis,))
        for axis in ("ring", "ulysses")
    }
    made: dict[Any, nn.Module] = {}
    for variant in VARIANTS:
        key = _key(variant)
        if key not in made:
            made[key] = _make_model()
            handle = parallelize(
                made[key],
                meshes[variant.axis],
                table=TABLE,
                comm_dtype=variant.comm_dtype,
                overlap=variant.overlap,
            )
            if variant.compiled:
                handle.compile(dynamic=True)
    return {one.name: made[_key(one)] for one in VARIANTS}


def _key(variant: Variant) -> object:
    return replace(variant, name="", after=None)


def _check(case: Case, models: dict[str, nn.Module]) -> dict[str, float]:
    """Relative errors against one process, on the links that are timed."""
    inputs, errors = _make_inputs(case.tokens), dict[str, float]()
    expected = _make_model()(**inputs)
    for variant in VARIANTS:
        with on(Link(bytes_per_s=case.bytes_per_s)):
            output = models[variant.name](**inputs)
        errors[variant.name] = float((output - expected).norm() / expected.norm())
        largest = LARGEST_ERROR if variant.comm_dtype is None else LARGEST_WIRE_ERROR
        assert errors[variant.name] < largest, f"{case.name}, {variant.name}: {errors}"
    return errors


def _calls_of(case: Case, models: dict[str, nn.Module]) -> dict[str, Callable[[], object]]:
    """For each variant the forward pass, the same without communication, and on no tokens."""
    calls: dict[str, Callable[[], object]] = {}
    inputs, empty = _make_inputs(case.tokens), _make_inputs(EMPTY_TOKENS)
    for variant in VARIANTS:
        programs = (
            ("", inputs, Link(bytes_per_s=case.bytes_per_s)),
            (", alone", inputs, NoLink()),
            (", empty", empty, NoLink()),
        )
        for suffix, inputs_of_call, link in programs:

            def call(
                model: nn.Module = models[variant.name],
                inputs: dict[str, Tensor] = inputs_of_call,
                link: Link = link,
            ) -> None:
                with on(link):
                    model(**inputs)

            calls[variant.name + suffix] = call
    return calls


def _row_of(
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


def _print_results(rows: list[dict[str, Any]]) -> None:
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
            _interval(row["over_baseline"]),
            _interval(row["step"]),
            f"{row['error']:.0e}",
        )
    Console(width=140).print(table)
    for case in CASES:
        said = [
            f"{row['variant'].removeprefix('+ ')} {_verdict(row['step'] or row['over_baseline'])}"
            for row in rows
            if row["case"] == case.name and row["variant"] != BASELINE
        ]
        print(f"{case.name}: {', '.join(said)} (Ulysses: against the baseline)")


def _interval(ratio: dict[str, float] | None) -> str:
    """Mean and 95 % interval; empty for nothing."""
    return f"{ratio['mean']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else ""


def _verdict(ratio: dict[str, float]) -> str:
    """Whether an interval of a speed-up lies above 1, below it, or around it."""
    return "pays" if ratio["low"] > 1 else "costs" if ratio["high"] < 1 else "is even"
