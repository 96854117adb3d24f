"""`bascule plan`: plan lengths from the command line, a file or data codes, and draw the loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from bascule.errors import ConfigError
from bascule.plan.cost import TransformerCost
from bascule.plan.manifest import read_manifest
from bascule.plan.sequences import Plan, plan_batch
from bascule.plan.topology import Topology
from bascule.plan.workload import deal, parse_data_codes, read_lengths, sample_lengths, seq_lens

_MAX_ROWS = 64
_BAR_WIDTH = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Plan one batch and show who computes what.

    Attributes:
        lengths: Tokens of each sequence, ranks separated by "/", for example 4096,300/512/900,40/.
        file: Length file: a line of lengths for each rank, or JSON.
        manifest: JSONL or CSV with width, height, frames and text tokens or caption of each sample.
        data: Data codes, for example g16b4i256f1s0,g8b1i2048f1s0.
        topology: Compute bags, for example g1n8+g8n3; one rank a bag if not given.
        ranks: Ranks; those of the input, or of the topology, if not given.
        planner: lpt, or the greedy of the KnapFormer paper.
        d_model: Model width.
        gamma: Cost of an attention FLOP over one of a linear layer.
        num_layers: Blocks of the model.
        seed: Of data codes.
        step: Of data codes.
        json: Where to write the plan.
    """

    lengths: str | None = None
    file: Path | None = None
    manifest: Path | None = None
    data: str | None = None
    topology: str | None = None
    ranks: int | None = None
    planner: Literal["lpt", "knapsack"] = "lpt"
    d_model: int = 3072
    gamma: float = 1.0
    num_layers: int = 1
    seed: int = 0
    step: int = 0
    json: Path | None = None


def plan(options: PlanOptions) -> None:
    """Plan and print.

    Raises:
        ConfigError: The input is malformed or does not fit.
    """
    lens = _read(options)
    topology = Topology.parse(options.topology or f"g1n{len(lens)}", world_size=len(lens))
    cost = TransformerCost(options.d_model, gamma=options.gamma, num_layers=options.num_layers)
    made = plan_batch(lens, topology, cost, planner=options.planner)
    _print(made, cost)
    if options.json is not None:
        try:
            options.json.write_text(made.to_json() + "\n")
        except OSError as error:
            raise ConfigError(
                f"--json {options.json}: cannot be written: {error.strerror}"
            ) from error


def _read(options: PlanOptions) -> list[list[int]]:
    given = [
        name
        for name in ("lengths", "file", "manifest", "data")
        if getattr(options, name) is not None
    ]
    if len(given) != 1:
        raise ConfigError(
            f"give one of --lengths, --file, --manifest and --data, not {len(given)} of them"
        )
    num_ranks = options.ranks
    if num_ranks is None and options.topology is not None:
        num_ranks = Topology.parse(options.topology).num_ranks
    if options.lengths is not None:
        return _pad(_parse_lengths(options.lengths), options.ranks)
    if options.file is not None:
        return read_lengths(options.file, num_ranks=num_ranks)
    if options.manifest is not None:
        if num_ranks is None:
            raise ConfigError(
                "--manifest needs --ranks or --topology: a list of samples has no ranks"
            )
        return deal([shape.seq_len for shape in read_manifest(options.manifest)], num_ranks)
    assert options.data is not None
    codes = parse_data_codes(options.data)
    return seq_lens(
        sample_lengths(codes, seed=options.seed, step=options.step, world_size=options.ranks)
    )


def _parse_lengths(text: str) -> list[list[int]]:
    try:
        return [[int(term) for term in rank.split(",") if term.strip()] for rank in text.split("/")]
    except ValueError as error:
        raise ConfigError(
            f"--lengths {text!r}: write whole numbers, commas between sequences and / between ranks"
        ) from error


def _pad(lens: list[list[int]], num_ranks: int | None) -> list[list[int]]:
    if num_ranks is None or num_ranks == len(lens):
        return lens
    if num_ranks < len(lens):
        raise ConfigError(f"--lengths lists {len(lens)} ranks, --ranks says {num_ranks}")
    return lens + [[]] * (num_ranks - len(lens))


def _print(plan: Plan, cost: TransformerCost) -> None:
    console = Console()
    before = plan.unbalanced_loads(cost)
    table = Table(title=f"{plan.topology} on {plan.num_ranks} ranks, planner {plan.planner}")
    for name, side in (("rank", "right"), ("bag", "right"), ("tokens", "right"), ("load", "left")):
        table.add_column(name, justify=side)  # pyright: ignore[reportArgumentType]
    table.add_column("TFLOP", justify="right")
    table.add_column("as loaded", justify="right")
    scale = _BAR_WIDTH / plan.makespan if plan.makespan > 0 else 0.0
    for rank in range(min(plan.num_ranks, _MAX_ROWS)):
        load = float(plan.loads[rank])
        table.add_row(
            str(rank),
            str(plan.topology.bag_of_rank[rank]),
            f"{plan.tokens[rank]:,}",
            "█" * round(load * scale),
            f"{load:.4g}",
            f"{before[rank]:.4g}",
        )
    console.print(table)
    if plan.num_ranks > _MAX_ROWS:
        console.print(f"({plan.num_ranks - _MAX_ROWS} more ranks)")
    speedup = float(before.max()) / plan.makespan if plan.makespan > 0 else 1.0
    total = int(plan.seq_lens.sum())
    console.print(
        f"makespan {plan.makespan:.6g} TFLOP, lower bound {plan.lower_bound:.6g}: "
        f"at most {plan.gap:.3%} from optimal\n"
        f"imbalance (max/mean) {plan.imbalance:.4f}, WIR (max/min) {plan.wir:.4f}\n"
        f"predicted speed-up over the batch as loaded: {speedup:.2f}x\n"
        f"{plan.moved_tokens:,} of {total:,} tokens move to another rank"
    )
