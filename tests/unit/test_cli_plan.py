"""`bascule plan` and `bascule topology` beyond the first look: limits, wires, rankings."""

from pathlib import Path

import pytest

from bascule import Plan
from tests.unit.test_cli import run
from tests.unit.test_imports import modules_imported_by


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize(
    ("arguments", "bound_by"),
    [
        (("--lengths", "4096,300/512"), "the longest sequence: 4,096 tokens"),
        (("--lengths", "40,40,40/10,10,10,10,90"), "the total work"),
        (("--lengths", "//"), "nothing"),
        (("--lengths", "500/500", "--topology", "g2n1", "--wires", "--intra-gbs", "1"), "wires: "),
        (("--lengths", "60,40,40/40,40,40", "--max-tokens", "140"), "the limit of 140 tokens"),
    ],
)
def test_plan_says_what_binds(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], bound_by: str
) -> None:
    gamma = ("--gamma", "100000") if "140" in arguments else ()
    code, out, _ = run(capsys, "plan", *arguments, *gamma)
    assert code == 0
    assert f"binds: {bound_by}" in out


def test_plan_compares_planners(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "--data", "g4b3i256f1s0", "--compare")
    assert code == 0
    assert all(name in out for name in ("lpt", "knapsack", "as loaded", "tokens moved"))


def test_plan_chooses_bags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    arguments = ("--topology", "auto", "--ranks-per-node", "2", "--json", str(path))
    code, out, _ = run(capsys, "plan", "--lengths", "50000/9,9/8,8/9", *arguments)
    assert code == 0
    plan = Plan.from_json(path.read_text())
    assert plan.topology.bags[0] == (0, 1)
    assert str(plan.topology) in out


def test_topology_prints_a_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "topology", "--data", "g4b2i256f1s0", "--steps", "2")
    assert code == 0
    assert "best: g1n4" in out
    assert "g4n1" in out and "pays for no wires" in out
    code, out, _ = run(capsys, "topology", "--lengths", "90000/5/5/5", "--num-layers", "30")
    assert code == 0 and "best: g4n1" in out and "90,000 tokens" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("topology",), "give one of"),
        (("topology", "--lengths", "5/6", "--steps", "2"), "--steps 2"),
        (("topology", "--data", "g2b1i256f1s0", "--steps", "0"), "--steps 0"),
        (("topology", "--lengths", "5/6", "--ranks-per-node", "3"), "--ranks-per-node 3"),
        (("topology", "--lengths", "5/6", "--tflops", "0"), "flops_per_s"),
        (("topology", "--lengths", "5/6", "--max-tokens", "2"), "tokens"),
        (("plan", "--lengths", "5/6", "--max-tokens", "5"), "rank 1, sequence 0: 6 tokens"),
        (("plan", "--lengths", "5/6", "--max-tokens", "0"), "tokens=0"),
        (("plan", "--lengths", "5/6", "--kb-per-token", "2e7"), "rank 1, sequence 0: 6 tokens"),
        (("topology", "--lengths", "5/6", "--kb-per-token", "9e7"), "hold no token"),
    ],
)
def test_a_users_error_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert named in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["plan", "topology"])
def test_planning_on_the_command_line_needs_no_torch(command: str) -> None:
    modules = modules_imported_by("-m", "bascule.cli", command, "--lengths", "50/60")
    assert "bascule.plan.search" in modules
    assert "torch" not in modules
