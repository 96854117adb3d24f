"""The picture of a step: what is drawn is what the plan says."""

import re
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import pytest

from bascule import TransformerCost, plan_batch
from bascule.cli.plan import report_of
from bascule.costs import Cluster, PolynomialCost
from bascule.report.page import Chart
from bascule.report.step_picture import MOST_RANKS, draw_step
from tests.helpers.cli import Console, run

ROOT = Path(__file__).parents[2]
COST = TransformerCost(512, gamma=0.5, num_layers=4)
CLUSTER = Cluster(1, 4, 1e12, 80e9, 1e9, 1e9, 1e-3)
LENS = [[4096, 300, 7], [512], [900, 40], [0]]
SVG = "{http://www.w3.org/2000/svg}"


def panel_of(svg: str, name: str) -> list[dict[str, list[Element]]]:
    """The rectangles of each rank, by their class."""
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    panel = next(group for group in groups if group.get("class") == name)
    bars = [group for group in panel if group.get("class") == "rank"]
    kinds = "work", "wires", "wait"
    return [{kind: [x for x in bar if x.get("class") == kind] for kind in kinds} for bar in bars]


def widths(bars: list[dict[str, list[Element]]], *kinds: str) -> np.ndarray:
    rects = [[rect for kind in kinds for rect in bar[kind]] for bar in bars]
    return np.array([sum(float(rect.get("width", "nan")) for rect in bar) for bar in rects])


@pytest.mark.parametrize("topology", ["g1n4", "g1n2+g2n1", "g4n1", "g2r2n1"])
@pytest.mark.parametrize("cluster", [None, CLUSTER])
def test_widths_are_loads_and_waiting_is_what_the_slowest_rank_has_more(
    topology: str, cluster: Cluster | None
) -> None:
    plan = plan_batch(LENS, topology, COST, cluster=cluster)
    svg = draw_step(plan, COST, cluster)
    before, after = panel_of(svg, "before"), panel_of(svg, "after")
    assert len(before) == len(after) == plan.num_ranks
    loads = plan.unbalanced_loads(COST, cluster)
    scale = widths(before, "work", "wires").max() / loads.max()
    for bars, expected in ((before, loads), (after, plan.loads)):
        drawn = widths(bars, "work", "wires")
        np.testing.assert_allclose(drawn, expected * scale, atol=0.05)
        waiting = (expected.max() - expected) * scale
        np.testing.assert_allclose(widths(bars, "wait"), waiting, atol=0.02)
        np.testing.assert_allclose(drawn + widths(bars, "wait"), expected.max() * scale, atol=0.05)
    assert [len(bar["work"]) for bar in before] == [len(lens) for lens in LENS]
    held = [plan.local(rank).seq_ids.size for rank in range(plan.num_ranks)]
    assert [len(bar["work"]) for bar in after] == held


def test_segments_follow_each_other_and_colours_grow_with_lengths() -> None:
    svg = draw_step(plan_batch(LENS, "g1n4", COST), COST)
    color_of: dict[int, str] = {}
    for bar in panel_of(svg, "before"):
        end = 136.0
        for rect in bar["work"] + bar["wait"]:
            assert float(rect.get("x", "nan")) == pytest.approx(end, abs=0.05)
            end += float(rect.get("width", "nan"))
        for rect in bar["work"]:
            told = re.search(r"([\d,]+) tokens", rect[0].text or "")
            assert told is not None
            color_of[int(told[1].replace(",", ""))] = rect.get("fill", "")
    assert sorted(color_of) == sorted(length for lens in LENS for length in lens)
    assert color_of[4096] != color_of[900] != color_of[300] != color_of[7]


def test_costs_in_seconds_and_carried_loads_are_drawn() -> None:
    cost = PolynomialCost(quadratic=1e-9, linear=1e-6, constant=1e-4)
    plan = plan_batch([[100], [100]], "g1n2", cost, initial_loads=[0.5, 0.0])
    svg = draw_step(plan, cost, unit="s")
    ElementTree.fromstring(svg)
    assert "the step ends: 500 ms</text>" in svg
    assert widths(panel_of(svg, "after"), "wires")[0] > 100


@pytest.mark.parametrize(
    "lens", [[[], []], [[0], [0]], [[5], []], [[5], [5]], [[1, 2, 3, 10**6], [7]]]
)
def test_every_plan_can_be_drawn(lens: list[list[int]]) -> None:
    for topology in ("g1n2", "g2n1"):
        svg = draw_step(plan_batch(lens, topology, COST), COST)
        assert len(panel_of(svg, "before")) == len(panel_of(svg, "after")) == 2
        assert "nan" not in svg and "inf" not in svg


def test_a_picture_of_many_ranks_says_what_it_leaves_out() -> None:
    lens = [[10]] * 99 + [[1000]]
    plan = plan_batch(lens, "g1n100", COST)
    svg = draw_step(plan, COST)
    bars = panel_of(svg, "before")
    assert len(bars) == MOST_RANKS
    assert f"{100 - MOST_RANKS} more ranks" in svg
    assert widths(bars, "work").max() < 10 < widths(bars, "wait").min()  # the slowest is left out
    all_ranks = report_of(plan, COST, None, "", []).parts[0]  # the page has lines of all of them
    assert isinstance(all_ranks, Chart) and all_ranks.title == "Work of each rank"
    assert len(re.findall(r"L[01]\.", all_ranks.draw())) == 2 * 99


def test_the_picture_of_the_docs_is_what_the_command_draws(capsys: Console, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "command_line.md").read_text()
    found = re.search(r"bascule (plan (?:[^\n]|\\\n)*--picture) docs/step\.svg", page)
    assert found is not None
    path = tmp_path / "step.svg"
    code, _, err = run(capsys, *found[1].replace("\\\n", " ").split(), str(path))
    assert code == 0, err
    assert path.read_text() == (ROOT / "docs" / "step.svg").read_text(), "draw docs/step.svg anew"
