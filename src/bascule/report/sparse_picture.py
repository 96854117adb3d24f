"""Draw a study of block masks: the mask, who computes what, and what settings cost."""

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from bascule.sim.sparse_study import DEFAULT, Mesh, Study, mesh_name

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_SHOWN_BLOCKS = 96  # query blocks to begin with; more are thinner than a pixel


def draw(study: Study, head: int) -> "Figure":
    """Draw the mask of a head, who computes what, strategies, and tolerances and rewards."""
    from plotly.subplots import make_subplots

    meshes = study.setting.meshes
    mesh = meshes[len(meshes) // 2]  # of all meshes of some ranks: heads and blocks are split
    shown = min(_SHOWN_BLOCKS, study.masks.shape[1])
    figure = make_subplots(
        rows=3,
        cols=2,
        specs=[[{}, {}], [{"colspan": 2}, None], [{"secondary_y": True}] * 2],
        row_heights=[0.42, 0.2, 0.38],
        vertical_spacing=0.09,
        horizontal_spacing=0.13,
        subplot_titles=(
            f"mask of head {head}: {study.masks[head].mean():.0%} of the blocks",
            f"who computes what: {DEFAULT} on {mesh_name(mesh)}",
            "mesh with the lowest prediction",
            f"{DEFAULT}, first layer: plans kept over the steps",
            "paper, first layer: reward for staying at home",
        ),
    )
    mask, colors = study.masks[head].astype(np.uint8), [(0.0, "white"), (1.0, "#1f3b73")]
    figure.add_heatmap(z=mask, zmin=0, zmax=1, colorscale=colors, showscale=False, row=1, col=1)
    plan = study.setting.plan(DEFAULT, study.masks, mesh)
    _draw_classes(figure, plan.rank_of, [str(x) for x in range(plan.num_ranks)], "rank", (1, 2))
    chosen = [[meshes.index(choice.degrees) for choice in run.choices] for run in study.runs]
    _draw_classes(figure, np.array(chosen), [mesh_name(mesh) for mesh in meshes], "mesh", (2, 1))
    for place, mesh in enumerate(meshes):
        reuses = sorted(
            (tolerance, sum(reuse.imbalances) / len(reuse.imbalances), reuse.state.num_planned)
            for (at, tolerance), reuse in study.runs[0].reuses.items()
            if at == mesh
        )
        rewards = [(x, row.imbalance, row.q_moved) for x, row in study.rewards if row.mesh == mesh]
        _draw_lines(figure, reuses, place, mesh, 1)
        _draw_lines(figure, rewards, place, mesh, 2)
    axes: tuple[tuple[tuple[int, int], str, str, dict[str, Any]], ...] = (
        ((1, 1), "key block", "query block", {"autorange": "reversed"}),
        ((1, 2), f"query block, the first {shown}", "head", {"autorange": "reversed"}),
        ((2, 1), "step", "layer", {"dtick": max(len(chosen) // 8, 1)}),
        ((3, 1), "tolerance of a kept plan", "rho, mean over the steps", {"secondary_y": False}),
        ((3, 2), "reward", "rho", {"secondary_y": False}),
    )
    for place, x, y, options in axes:
        figure.update_xaxes(title=x, row=place[0], col=place[1])
        figure.update_yaxes(title=y, row=place[0], col=place[1], **options)
    figure.update_xaxes(range=(-0.5, shown - 0.5), row=1, col=2)
    figure.update_xaxes(dtick=max(len(chosen[0]) // 10, 1), row=2, col=1)
    right = {"rangemode": "tozero", "tickmode": "auto", "showgrid": False, "secondary_y": True}
    figure.update_yaxes(title="plans made (dotted)", row=3, col=1, **right)
    figure.update_yaxes(title="share of query rows moved (dotted)", row=3, col=2, **right)
    legend = {"orientation": "h", "y": -0.06}
    figure.update_layout(template="plotly_white", height=1350, legend=legend)
    return figure


def _draw_classes(
    figure: "Figure", classes: np.ndarray, names: list[str], title: str, place: tuple[int, int]
) -> None:
    from plotly.colors import sample_colorscale

    size = len(names)
    colors = sample_colorscale("Turbo", [(i + 0.5) / size for i in range(size)])
    edges = [((i / size, color), ((i + 1) / size, color)) for i, color in enumerate(colors)]
    top, bottom = ((1.0, 0.66), (0.57, 0.42))[place[0] - 1]
    figure.add_heatmap(
        z=classes.astype(np.int16),
        zmin=-0.5,
        zmax=size - 0.5,
        colorscale=list(chain.from_iterable(edges)),
        colorbar={
            "title": title,
            "tickvals": list(range(size)),
            "ticktext": names,
            "len": top - bottom,
            "y": (top + bottom) / 2,
        },
        row=place[0],
        col=place[1],
    )


def _draw_lines(
    figure: "Figure", points: Iterable[tuple[float, float, float]], place: int, mesh: Mesh, col: int
) -> None:
    """Draw rho of a mesh over a setting, and dotted, on the axis to the right, what it costs."""
    from plotly.colors import qualitative

    color = qualitative.Plotly[place % len(qualitative.Plotly)]
    x, *lines = zip(*points, strict=True)
    for is_cost, y in enumerate(lines):
        figure.add_scatter(
            x=x,
            y=y,
            name=mesh_name(mesh),
            legendgroup=mesh_name(mesh),
            showlegend=col == 1 and not is_cost,
            line={"color": color, "dash": "dot" if is_cost else "solid"},
            row=3,
            col=col,
            secondary_y=bool(is_cost),
        )
