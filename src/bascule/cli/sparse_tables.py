"""What a study of block masks found, as tables."""

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from bascule.sim.sparse_study import BEFORE, DEFAULT, WAYS, LayerRun, Outcome, Study, mesh_name

_Column = tuple[str, Callable[[Outcome, Outcome], str]]
"""Heading, and text of an outcome, given that of the same mesh before."""

_BALANCE: tuple[_Column, ...] = (
    ("rho", lambda row, _: f"{row.imbalance:.4f}"),
    ("critical path", lambda row, _: f"{row.critical_path_imbalance:.4f}"),
    ("speed-up", lambda row, before: f"{before.imbalance / row.imbalance:.3f}x"),
    ("planning, ms", lambda row, _: "" if row.way == BEFORE else f"{row.planning_s * 1e3:.1f}"),
)
_EXCHANGE: tuple[_Column, ...] = (
    ("Q rows moved", lambda row, _: f"{row.q_moved:.1%}"),
    ("KV", lambda row, _: f"{row.kv_moved:.1%}"),
    ("sent, MiB", lambda row, _: f"{row.sent_bytes / 2**20:,.0f}"),
    ("call, ms", lambda row, _: f"{row.predicted_s * 1e3:.3f}"),
    ("speed-up", lambda row, before: f"{before.predicted_s / row.predicted_s:.3f}x"),
)
_MAX_LAYERS = 64


def show(console: Console, study: Study) -> None:
    """Print everything; steps and strategies where there are several."""
    heads, q_blocks, kv_blocks = study.masks.shape
    num_layers, num_steps = len(study.runs), len(study.runs[0].choices)
    console.print(
        f"{study.name}: {heads} heads, {q_blocks:,} x {kv_blocks:,} blocks of "
        f"{study.setting.q_lens.max():,} tokens, {study.masks.mean():.1%} of them computed; "
        f"{_many(num_layers, 'layer')}, {_many(num_steps, 'step')}"
    )
    console.print(_plans(study, "balance in the first step, compute alone", _BALANCE))
    console.print(
        _plans(study, "rows on other ring ranks, and the whole call, predicted", _EXCHANGE)
    )
    if num_steps > 1:
        console.print(_kept(study))
    if len(study.setting.meshes) > 1:
        console.print(_strategies(study))
    console.print(
        "rho: the slowest rank's work over the mean, ranks of a ring waiting for all others after "
        "each round, or for their neighbours alone (critical path)\n"
        f'speed-up: over "{BEFORE}", heads in their order and blocks in runs; of compute alone, '
        "the ratio of rho"
    )


def _plans(study: Study, title: str, columns: Sequence[_Column]) -> Table:
    """A row a mesh and way, means over the layers."""
    table = Table(title=title)
    for name in ("mesh", "plan"):
        table.add_column(name, no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right")
    for mesh in study.setting.meshes:
        before = study.mean(mesh, BEFORE)
        for way in WAYS:
            row = study.mean(mesh, way)
            table.add_row(
                mesh_name(mesh) if way == BEFORE else "",
                f"{way} {study.setting.reward:g}" if way == "paper" else way,
                *(text(row, before) for _, text in columns),
                end_section=way == WAYS[-1],
            )
    return table


def _kept(study: Study) -> Table:
    """A row a mesh, all layers together."""
    tolerance = study.setting.tolerance
    table = Table(title=f"{DEFAULT} over the steps, plans kept within {tolerance:g}")
    table.add_column("mesh")
    for name in ("plans made", "kept", "rho, mean", "rho, max"):
        table.add_column(name, justify="right")
    for mesh in study.setting.meshes:
        reuses = [run.reuses[mesh, tolerance] for run in study.runs]
        rho = [value for reuse in reuses for value in reuse.imbalances]
        table.add_row(
            mesh_name(mesh),
            str(sum(reuse.state.num_planned for reuse in reuses)),
            str(sum(reuse.state.num_kept for reuse in reuses)),
            f"{sum(rho) / len(rho):.4f}",
            f"{max(rho):.4f}",
        )
    return table


def _strategies(study: Study) -> Table:
    """A row a layer: the steps of each mesh."""
    table = Table(title="mesh with the lowest prediction, by layer and step")
    for name in ("layer", "steps", "switches"):
        table.add_column(name, justify="left" if name == "steps" else "right")
    for layer, run in enumerate(study.runs[:_MAX_LAYERS]):
        table.add_row(str(layer), _stretches(run), str(run.choices[-1].num_switches))
    if len(study.runs) > _MAX_LAYERS:
        table.caption = f"{len(study.runs) - _MAX_LAYERS} more layers"
    return table


def _stretches(run: LayerRun) -> str:
    """The steps in a row that have the same mesh."""
    told: list[str] = []
    first = 0
    for mesh, steps in groupby(choice.degrees for choice in run.choices):
        last = first + len(list(steps)) - 1
        told.append(f"{mesh_name(mesh)} {first}" + (f" to {last}" if last > first else ""))
        first = last + 1
    return ", ".join(told)


def _many(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"
