"""The command line without ranks: what a user sees, and what a user's mistake costs."""

import json
from pathlib import Path

import pytest

from bascule import Plan
from tests.helpers.cli import run


def test_plan_draws_a_bar_for_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "--lengths", "4096,300/512/900,40/")
    assert code == 0
    assert out.count("█") > 4
    assert "lower bound" in out and "speed-up" in out


def test_plan_writes_a_plan_that_can_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    code, _, _ = run(
        capsys, "plan", "--data", "g2b3i256f1s0", "--topology", "g2n1", "--json", str(path)
    )
    assert code == 0
    plan = Plan.from_json(path.read_text())
    assert plan.num_ranks == 2
    assert plan.seq_lens.size == 6


def test_plan_pads_missing_ranks_and_deals_manifests(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run(capsys, "plan", "--lengths", "10,20", "--ranks", "3")
    assert code == 0 and "3 ranks" in out
    manifest = tmp_path / "samples.jsonl"
    rows = [{"width": 256, "height": 256, "text_tokens": 10}] * 4
    manifest.write_text("\n".join(map(json.dumps, rows)))
    code, out, _ = run(capsys, "plan", "--manifest", str(manifest), "--topology", "g1n2")
    assert code == 0 and "532" in out


def test_plan_of_an_idle_batch(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "--lengths", "//")
    assert code == 0
    assert "1.0000" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("plan",), "give one of"),
        (("plan", "--lengths", "10", "--data", "g1b1i256f1s0"), "give one of"),
        (("plan", "--lengths", "10,x"), "10,x"),
        (("plan", "--lengths=-5/3"), "-5"),
        (("plan", "--lengths", "5/3", "--topology", "g3n1"), "g3n1"),
        (("plan", "--lengths", "5/3", "--topology", "g2x1"), "g2x1"),
        (("plan", "--lengths", "5/3", "--ranks", "1"), "2 ranks"),
        (("plan", "--data", "g1b1i256"), "g1b1i256"),
        (("plan", "--file", "/nonexistent/lengths"), "/nonexistent/lengths"),
        (("plan", "--lengths", "5/3", "--gamma", "-1"), "-1"),
        (("plan", "--lengths", "5", "--json", "/nonexistent/plan.json"), "cannot be written"),
        (("bench",), "--photos"),
        (("bench", "--photos", "/nonexistent", "--ranks", "2"), "/nonexistent"),
        (("bench", "--data", "g3b1i256f1s0", "--ranks", "2"), "3"),
        (("bench", "--data", "g1b1i256f1s0", "--steps", "0"), "--steps 0"),
        (("bench", "--data", "g1b1i256f1s0", "--ranks", "1", "--num-heads", "7"), "--num-heads 7"),
        (("bench", "--data", "g1b1i256f1s0", "--ranks", "2", "--topology", "g3n1"), "g3n1"),
        (
            ("bench", "--data", "g1b1i256f1s0", "--ranks", "1", "--kernel", "aten_flash"),
            "use one of cpu_flash",
        ),
        (("bench", "--data", "g1b1i256f1s0", "--ranks", "1", "--kernel", "magic"), "cpu_flash"),
    ],
)
def test_a_users_error_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert named in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_a_wrong_option_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "plan", "--no-such-option")[0] == 2
    assert run(capsys, "nonsense")[0] == 2
