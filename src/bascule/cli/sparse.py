"""`bascule sparse --model wan2.1 --ranks 8 --layers 2`: a (ring, Ulysses) mesh (2, 4) is U4R2."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from bascule.arrays import Bools, Ints
from bascule.cli.inputs import MachineOptions
from bascule.errors import ConfigError
from bascule.machine.cluster import BYTES_PER_VALUE
from bascule.options import Group, Outputs, Range, flag, refuse
from bascule.plan.topology import Degrees, all_degrees
from bascule.quantities import Scale, num_bytes, percent, seconds, times
from bascule.report.charts import draw_map
from bascule.report.page import Chart, Fact, Format, Report, Rows
from bascule.workload.masks import COGVIDEOX15, WAN21, load_masks, synthetic_masks

if TYPE_CHECKING:
    from bascule.sim.sparse_study import Outcome, Study

_SHOWN_BLOCKS = 96  # query blocks of the figure at first; more are thinner than a pixel


@dataclass(frozen=True, kw_only=True)
class SparseOptions(Outputs, MachineOptions):
    """Show how uneven block-sparse attention is on a mesh, and how much each way to plan gains.

    Masks are read from a file, or drawn at random to resemble a video model's masks.

    Attributes:
        masks: File of bool masks (heads, q_blocks, kv_blocks), .npy or .npz. Dimensions (layers,)
            or (steps, layers) may precede these three.
        model: Draw synthetic masks of this model instead: wan2.1 or cogvideox1.5.
        ranks: Number of ranks. Without --ulysses and --ring, the command compares all meshes that
            the number of heads allows.
        ulysses: Ulysses degree: the number of ranks that share the heads.
        ring: Ring degree: the number of ranks that pass keys and values around.
        layers: Number of layers to plan. Default: all of a file, 1 of a model.
        steps: Number of denoising steps to plan. Default: all of a file, 1 of a model.
        density: Share of the blocks that synthetic masks compute. Default: 0.41.
        seed: Random seed of synthetic masks.
        block: Number of tokens in a block.
        head_dim: Head dimension.
        target: Imbalance (work of the slowest rank over the mean) at which minimal_move stops.
        tolerance: Plans are reused while their imbalance is at most 1 + tolerance.
    """

    masks: Annotated[Path | None, Group("Masks")] = None
    model: str | None = None
    layers: Annotated[int | None, Range(1, 1000)] = None
    steps: Annotated[int | None, Range(1, 1000)] = None
    density: float | None = None
    seed: int = 0
    block: Annotated[int, Range(1, 2**31 - 1)] = 64
    ranks: Annotated[int | None, Range(1, 2**15), Group("Mesh of ranks")] = None
    ulysses: Annotated[int | None, Range(1, 2**15)] = None
    ring: Annotated[int | None, Range(1, 2**9)] = None
    head_dim: Annotated[int, Range(1, 2**16), Group("Cost and plan")] = 128
    target: Annotated[float, Range()] = 1.005
    tolerance: Annotated[float, Range()] = 0.05

    @property
    def meshes(self) -> tuple[Degrees, ...]:
        """Meshes to compare, as (ring, Ulysses) degrees; the largest Ulysses degree first."""
        if self.ranks is None:
            if self.ulysses is None and self.ring is None:
                raise ConfigError("give --ulysses and --ring, or --ranks to compare all meshes")
            return ((self.ring or 1, self.ulysses or 1),)
        legal = all_degrees(self.ranks)
        fitting = [(r, u) for r, u in legal if self.ulysses in (None, u) and self.ring in (None, r)]
        if not fitting:
            degrees = {"--ulysses": self.ulysses, "--ring": self.ring}
            words = ", ".join(f"{name} {value}" for name, value in degrees.items() if value)
            products = ", ".join(f"{ring} x {ulysses}" for ring, ulysses in legal)
            what = f"{words} and --ranks {self.ranks}"
            raise ConfigError(f"{what}: ring x Ulysses must be the ranks; give one of {products}")
        return tuple(fitting)


@dataclass(frozen=True)
class _Source:
    """Masks of a file or a model."""

    name: str  # for titles
    num_heads: int  # of a layer
    num_layers: int  # to plan
    num_steps: int  # to plan
    q_lens: Ints  # tokens of each query block
    kv_lens: Ints  # tokens of each key block
    masks: Callable[[int, int], Bools]  # of a layer in a step

    def layers(self, advance: Callable[[], None]) -> Iterator[Iterator[Bools]]:
        """Yield each layer's masks by step; they are read or drawn lazily."""
        for layer in range(self.num_layers):
            yield (self.masks(layer, step) for step in range(self.num_steps))
            advance()


def run(options: SparseOptions, arguments: list[str]) -> None:
    """Plan in each way, and publish the comparison."""
    from bascule.cli.command import progress, publish
    from bascule.plan.sparse import check_degrees
    from bascule.plan.sparse.planner import REWARD
    from bascule.sim.sparse_study import Setting, study

    meshes, machine = options.meshes, options.hardware()
    if (options.masks is None) == (options.model is None):
        number = "neither" if options.masks is None else "both"
        raise ConfigError(f"give one of --masks and --model, not {number}")
    source = _synthetic(options) if options.masks is None else _of_file(options, options.masks)
    fitting = tuple(mesh for mesh in meshes if mesh[1] <= source.num_heads)
    if not fitting:
        what = f"{source.name}: {source.num_heads} heads for {meshes[-1][1]} Ulysses ranks"
        advice = f"use --ulysses {source.num_heads} at most, and --ring"
        raise ConfigError(f"{what}, which need at least one each: {advice}")
    for mesh in fitting:
        check_degrees(*mesh)
    rules = options.head_dim, BYTES_PER_VALUE, options.target, REWARD, options.tolerance
    setting = Setting(fitting, source.q_lens, source.kv_lens, machine, *rules)
    with progress("layers", source.num_layers) as advance:
        result = study(source.name, source.layers(advance), setting)
    publish(options, report_of(result, [f"Predicted for {machine}."]))


def _of_file(options: SparseOptions, path: Path) -> _Source:
    refuse(options, ("density", "seed"), "only for --model; --masks has the masks")
    masks = load_masks(path)
    num_steps, num_layers, num_heads = masks.shape[:3]
    for name, size in (("steps", num_steps), ("layers", num_layers)):
        if (getattr(options, name) or 0) > size:
            raise ConfigError(f"{flag(name)} {getattr(options, name)}: {path} has only {size}")

    def of_layer(layer: int, step: int) -> Bools:
        mask = masks[step, layer]
        if not mask.any():
            what = f"{path}: the mask of layer {layer} in step {step} computes no block"
            advice = "plan fewer --steps or --layers, or save ~masks if your True means hidden"
            raise ConfigError(f"{what}: {advice}")
        return mask

    q_lens, kv_lens = (np.full(size, options.block) for size in masks.shape[3:])
    planned = options.layers or num_layers, options.steps or num_steps
    return _Source(path.name, num_heads, *planned, q_lens, kv_lens, of_layer)


def _synthetic(options: SparseOptions) -> _Source:
    models = {"wan2.1": WAN21, "cogvideox1.5": COGVIDEOX15}
    model = models.get(options.model or "")
    if model is None:
        raise ConfigError(f"--model {options.model!r}: give {' or '.join(models)}")
    density = model.density if options.density is None else options.density
    drawn = replace(model, density=density, block=options.block)
    return _Source(
        f"{options.model}, synthetic",
        drawn.num_heads,
        options.layers or 1,
        options.steps or 1,
        drawn.block_lens,
        drawn.block_lens,
        lambda layer, step: synthetic_masks(drawn, layer=layer, step=step, seed=options.seed),
    )


def report_of(study: "Study", notes: Sequence[str]) -> Report:
    """Report each way of planning on each mesh, and draw the mask of the first head."""
    from bascule.sim.sparse_study import BEFORE, DEFAULT, WAYS, mesh_name

    setting, num_steps, best = study.setting, len(study.runs[0].choices), study.best
    before, after = study.mean(best, BEFORE), study.mean(best, DEFAULT)
    speedup, name = before.predicted_s / after.predicted_s, mesh_name(best)
    is_worth = times(speedup) if speedup > 1 else "planning does not pay for these masks"
    heads, q_blocks, kv_blocks = study.masks.shape
    outcomes = [study.mean(mesh, way) for mesh in setting.meshes for way in WAYS]
    choices = [[mesh_name(choice.degrees) for choice in run.choices] for run in study.runs]
    chosen, reused = list(chain.from_iterable(choices)), _reused(study)
    facts = (
        Fact("speedup", "predicted speed-up by planning", speedup, times),
        Fact("mesh", "fastest mesh", name),
        Fact("rho_before", "slowest rank above average, not planned", before.imbalance, _excess),
        Fact("rho", "slowest rank above average, planned", after.imbalance, _excess),
        Fact("call_s", "an attention call takes", after.predicted_s, seconds),
        Fact("planning_s", "planning takes", after.planning_s, seconds),
        Fact("sent_bytes", "sent before and after attention", after.sent_bytes, num_bytes),
        Fact("density", "blocks computed", float(study.masks.mean()), percent),
    )
    return Report(
        title=f"Block-sparse attention: {study.name}",
        answer=f"Take {name}: Ulysses degree {best[1]}, ring degree {best[0]}. Without planning, "
        f"its slowest rank has {_excess(before.imbalance)} more work than the average rank; with "
        f"planning, {_excess(after.imbalance)}. Attention then takes {seconds(after.predicted_s)} "
        f"instead of {seconds(before.predicted_s)}: {is_worth}.",
        facts=facts,
        parts=(*draw(study), *_ways(study, outcomes), *([reused] if num_steps > 1 else [])),
        notes=(
            f"Masks: {heads} heads, {q_blocks:,} x {kv_blocks:,} blocks of "
            f"{setting.q_lens.max():,} tokens; layers: {len(study.runs)}, steps: {num_steps}. "
            f"{name} is the fastest mesh in {chosen.count(name)} of {len(chosen)} of them.",
            "Slowest rank above average: rho - 1 in db-SP's paper, where rho is the slowest rank's "
            "work over the mean, and all ranks of a ring wait for each other after each round; 0 % "
            "is even. In a real ring a rank waits for its neighbours alone.",
            f"Plans: {BEFORE} is not planned, and the base of speed-ups; stripe deals blocks in "
            f"turns, and heads by work; {DEFAULT}, bascule's default, then moves single blocks; "
            "paper is db-SP's greedy.",
            *notes,
        ),
        values={fact.key: fact.value for fact in facts}
        | {"plans": [asdict(row) | {"mesh": mesh_name(row.mesh)} for row in outcomes]}
        | {"reuse": [dict(zip(reused.columns, row, strict=True)) for row in reused.rows]}
        | {"choices": choices},
    )


def _excess(rho: float) -> str:
    """Write the slowest rank's work over the mean as what it is above the mean."""
    return percent(rho - 1)


def _ways(study: "Study", outcomes: "Sequence[Outcome]") -> tuple[Rows, Rows]:
    from bascule.sim.sparse_study import BEFORE, mesh_name

    planning = Scale.of([row.planning_s for row in outcomes], "s")
    call = Scale.of([row.predicted_s for row in outcomes], "s")
    sent = Scale.of([row.sent_bytes for row in outcomes], "B")
    balance, exchange = list[Sequence[Any]](), list[Sequence[Any]]()
    for row in outcomes:
        before, name = study.mean(row.mesh, BEFORE), (mesh_name(row.mesh), row.way)
        rho, planning_s = row.imbalance, None if row.way == BEFORE else row.planning_s
        gain = before.imbalance / rho
        balance.append((*name, rho, row.critical_path_imbalance, gain, planning_s))
        gain, moved = before.predicted_s / row.predicted_s, (row.q_moved, row.kv_moved)
        exchange.append((*name, *moved, row.sent_bytes, row.predicted_s, gain))
    names: dict[str, Format] = {"mesh": "{}", "plan": "{}"}
    rho = {"slowest rank": _excess, "real ring": _excess, "speed-up": times}
    moved = {"Q moved": percent, "K, V moved": percent, f"sent, {sent.unit}": sent}
    calls = {f"call, {call.unit}": call, "speed-up": times}
    title = "Work of the slowest rank above average, first step, compute alone"
    return (
        Rows(title, names | rho | {f"planning, {planning.unit}": planning}, balance),
        Rows("Rows on other ring ranks, and the whole call", names | moved | calls, exchange),
    )


def _reused(study: "Study") -> Rows:
    from bascule.sim.sparse_study import DEFAULT, mesh_name

    tolerance = study.setting.tolerance
    formats = {"mesh": str, "plans made": str, "kept": str}
    formats |= {"slowest rank, mean": _excess, "slowest rank, most": _excess}
    rows: list[Sequence[Any]] = []
    for mesh in study.setting.meshes:
        reuses = [run.reuses[mesh, tolerance] for run in study.runs]
        rho = [value for reuse in reuses for value in reuse.imbalances]
        made = sum(reuse.state.num_planned for reuse in reuses)
        kept = sum(reuse.state.num_kept for reuse in reuses)
        rows.append((mesh_name(mesh), made, kept, sum(rho) / len(rho), max(rho)))
    title = f"{DEFAULT} over the steps: a plan is kept up to {percent(tolerance)}"
    return Rows(title, formats, rows)


def draw(study: "Study") -> list[Chart]:
    """Draw the first head's mask, each block's rank, and the chosen meshes if there are many."""
    from bascule.sim.sparse_study import DEFAULT, mesh_name

    setting, meshes = study.setting, study.setting.meshes
    mesh = study.best
    num_ranks, shown = mesh[0] * mesh[1], min(_SHOWN_BLOCKS, study.masks.shape[1])
    charts = [
        draw_map(
            "Mask of head 0",
            f"The head computes {percent(study.masks[0].mean())} of the blocks.",
            ("key block", "query block"),
            ("left out", "computed"),
            lambda: study.masks[0],
        ),
        draw_map(
            f"Who computes what: {DEFAULT} on {mesh_name(mesh)}",
            f"The rank that computes a query block of a head; the first {shown} blocks.",
            ("query block", "head"),
            [f"rank {rank}" for rank in range(num_ranks)],
            lambda: setting.plan(DEFAULT, study.masks, mesh).rank_of[:, :shown],
        ),
    ]
    if len(meshes) > 1:
        title, words = "Mesh with the lowest prediction", "The choice for each layer and step."
        chosen = [[meshes.index(choice.degrees) for choice in run.choices] for run in study.runs]
        names = [mesh_name(mesh) for mesh in meshes]
        charts.append(draw_map(title, words, ("step", "layer"), names, lambda: chosen))
    return charts
