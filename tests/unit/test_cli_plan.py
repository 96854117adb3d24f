"""`bascule plan` and `bascule topology` beyond the first look: limits, wires, rankings."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bascule import Plan
from bascule.cli.inputs import ClusterOptions, InputOptions
from bascule.errors import ConfigError
from bascule.plan.costs import TransformerCost
from bascule.plan.machine import HardwareProfile
from bascule.plan.plan import plan_batch
from bascule.workload.codes import parse_data_codes, sample_lengths, seq_lens
from tests.helpers.cli import modules_imported_by, run

MODEL = TransformerCost(3072, num_layers=57)
"""What commands plan for if nothing else is said."""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize(
    ("arguments", "bound_by"),
    [
        (("--lengths", "4096,300/512"), "sequence 0 of 4,096 tokens alone fills bag 0 of 1 rank"),
        (("--lengths", "40,40,40/10,10,10,10,90"), "whole sequences, which do not divide evenly"),
        (("--lengths", "40,40,40/40,40,40,40,40"), "the total work"),
        (("--lengths", "//"), "nothing"),
        (("--lengths", "500/500", "--topology", "g2n1", "--wires", "--intra-gbs", "1"), "wires: "),
    ],
)
def test_plan_says_what_binds(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], bound_by: str
) -> None:
    code, out, _ = run(capsys, "plan", *arguments)
    assert code == 0
    assert f"binds: {bound_by}" in out


def test_plan_shows_what_staying_at_home_costs(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = "5000/300,200/100/400"
    code, out, _ = run(
        capsys, "plan", "--lengths", lengths, "--locality-tolerance", "0", "--compare"
    )
    lens = [[5000], [300, 200], [100], [400]]
    even, home = (
        plan_batch(lens, "g1n4", InputOptions().cost, locality_tolerance=x) for x in (None, 0.0)
    )
    assert code == 0 and home.moved_tokens == 0 and home.wir > 2 * even.wir
    assert re.search(rf"WIR, max / min +{home.wir:.4f}", out)
    row = next(line for line in out.splitlines() if "without the tolerance" in line)
    assert f"│ {even.wir:.4f} │" in row and f" {even.moved_tokens} │" in row


def test_steps_are_drawn_from_a_manifest(tmp_path: Path) -> None:
    manifest = tmp_path / "samples.jsonl"
    rows = [f'{{"width": 16, "height": {16 * (k + 1)}}}' for k in range(11)]
    manifest.write_text("\n".join(rows))
    options = InputOptions(manifest=manifest, batch_size=2, ranks=2)
    steps = [options.read(steps_after=k) for k in range(4)]
    drawn = [sorted(n for rank in step for n in rank) for step in steps]
    assert all([len(rank) for rank in step] == [2, 2] for step in steps)
    for epoch in (drawn[:2], drawn[2:]):
        seen = [n for step in epoch for n in step]
        assert len(set(seen)) == 8 and set(seen) <= set(range(1, 12))
    assert drawn[:2] != drawn[2:] and options.read(steps_after=1) == steps[1]
    whole = sorted(n for rank in InputOptions(manifest=manifest, ranks=2).read() for n in rank)
    assert whole == list(range(1, 12))
    with pytest.raises(ConfigError, match="takes 12 samples a step"):
        InputOptions(manifest=manifest, batch_size=6, ranks=2).read()
    with pytest.raises(ConfigError, match="only for --manifest"):
        InputOptions(lengths="4/5", batch_size=2).read()
    manifest.write_text('{"width": 16, "height": 16, "frames": 34}')
    for compressed, tokens in ((False, 34), (True, 10)):
        found = InputOptions(manifest=manifest, compress_frames=compressed, ranks=1).read()
        assert found == [[tokens]]


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
        (("topology", "--lengths", "5/6", "--tflops", "0"), "--tflops 0"),
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
    assert "bascule.plan.topology_search" in modules
    assert "torch" not in modules


def test_the_speed_up_is_that_of_the_plan_not_of_its_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lens = [[369, 382, 420], [], [465, 810, 542]]
    plan = plan_batch(lens, "g1n3", MODEL)
    as_loaded = MODEL([465, 810, 542]).sum()
    assert plan.gap > 0.1
    code, out, _ = run(capsys, "plan", "--lengths", "369,382,420//465,810,542")
    assert code == 0
    assert re.search(rf"predicted speed-up +{as_loaded / plan.makespan:.2f}x", out)
    assert re.search(rf"from the best plan at most +{plan.gap:.3%}", out)


def test_the_share_of_wires_is_of_the_time_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks: each computes half, and sends half of 8 d bytes a token to the other."""
    width, tokens, flops, speed, launch = 512, 1000, 1e12, 1e9, 50e-6
    compute = (24 * tokens * width**2 + 4 * 2 * (tokens / 2) ** 2 * width) / flops / 2
    wires = 8 * width * tokens / 2 / 2 / speed + 2 * launch
    arguments = ("--d-model", "512", "--num-layers", "1", "--tflops", "1", "--intra-gbs", "1")
    arguments += ("--latency-us", "50")
    lens = ("--lengths", "500,500/", "--topology", "g2n1", "--wires")
    code, out, _ = run(capsys, "plan", *lens, *arguments)
    assert code == 0
    assert f"wires: {wires / (wires + compute):.0%} of the time" in out
    assert re.search(rf"slowest rank +{wires + compute:.6g} s", out)


def test_later_steps_of_data_codes_are_other_batches(capsys: pytest.CaptureFixture[str]) -> None:
    options = InputOptions(data="g2b3i256f1s0", seed=5, step=3)
    for after in (0, 1, 4):
        codes = parse_data_codes("g2b3i256f1s0")
        expected = seq_lens(sample_lengths(codes, seed=5, step=3 + after))
        assert options.read(steps_after=after) == expected
    ranked = [
        run(capsys, "topology", "--data", "g2b3i256f1s0", "--step", step, "--steps", steps)[1]
        for step, steps in (("0", "1"), ("1", "1"), ("0", "2"))
    ]
    seconds = [float(out.split("g1n2")[1].split("│")[1]) for out in ranked]
    assert seconds[2] == pytest.approx((seconds[0] + seconds[1]) / 2, rel=1e-3)
    assert seconds[0] != seconds[1]


@pytest.mark.parametrize("lengths", [("900/40//30////",), ("900/40//30", "--ranks", "8")])
def test_the_table_of_loads(capsys: pytest.CaptureFixture[str], lengths: tuple[str, ...]) -> None:
    """Bags of 2 and of 6 = 3 x 2 ranks; each row has its bag, its tokens, its load and the old.

    Ranks that are not listed come after those that are.
    """
    plan = plan_batch([[900], [40], [], [30], *[[]] * 4], "g2n1+g3r2n1", MODEL)
    arguments = ("--lengths", *lengths, "--topology", "g2n1+g3r2n1")
    code, out, _ = run(capsys, "plan", *arguments)
    assert code == 0
    rows = [[x.strip() for x in row.split("│")[1:-1]] for row in out.splitlines() if "(g" in row]
    as_loaded = plan.unbalanced_loads(MODEL)
    assert [row[0] for row in rows] == [str(rank) for rank in range(8)]
    assert [row[1] for row in rows] == ["0 (g2)"] * 2 + ["1 (g3r2)"] * 6
    assert [row[2] for row in rows] == [str(tokens) for tokens in plan.tokens]
    assert [row[3] for row in rows] == [f"{load:.4g}" for load in plan.loads]
    assert [row[4] for row in rows] == [f"{load:.4g}" for load in as_loaded]
    assert max(len(row[5]) for row in rows) == 28


def test_the_best_topology_is_so_much_faster_than_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "topology", "--lengths", "90000/5/5/5", "--num-layers", "30")
    assert code == 0
    seconds = [
        float(row.split("│")[2])
        for row in out.splitlines()
        if row.count("│") > 3 and "g" in row.split("│")[1]
    ]
    ratio = float(out.split(", ")[-1].split("x as fast")[0])
    assert ratio == pytest.approx(max(seconds) / min(seconds), rel=1e-2) and ratio > 1.5


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 12, 13, 14, 16, 22, 24, 72, 77])
def test_nodes_are_as_large_as_eight_ranks_allow(num_ranks: int) -> None:
    machines = ClusterOptions().machines(num_ranks)
    assert machines.num_ranks == num_ranks and machines.ranks_per_node <= 8
    assert not any(num_ranks % size == 0 for size in range(machines.ranks_per_node + 1, 9))


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({"tflops": 3.0}, {"flops_per_s": 3e12}),
        ({"intra_gbs": 0.5}, {"intra_bytes_per_s": 0.5e9}),
        ({"inter_gbs": 0.25}, {"inter_bytes_per_s": 0.25e9}),
        ({"latency_us": 0.5}, {"latency_s": 0.5e-6}),
        ({"memory_gb": 4.0}, {"memory_bytes": 4e9}),
        ({"ranks_per_node": 2}, {"num_nodes": 3, "ranks_per_node": 2}),
    ],
)
def test_an_option_replaces_one_number_of_a_machine(
    given: dict[str, Any], changed: dict[str, Any]
) -> None:
    known = HardwareProfile.load("h100-datasheet").cluster(1, 6)
    assert ClusterOptions(**given).machines(6) == replace(known, **changed)


@pytest.mark.parametrize(
    ("kb_per_token", "max_tokens", "limit"),
    [(10.0, None, 200), (10.0, 150, 150), (10.0, 500, 200), (0.5, None, 4000), (None, 7, 7)],
)
def test_a_rank_holds_what_fits_into_its_memory(
    kb_per_token: float | None, max_tokens: int | None, limit: int
) -> None:
    """2 MB; and no more tokens than were allowed."""
    options = ClusterOptions(memory_gb=2e-3, kb_per_token=kb_per_token, max_tokens=max_tokens)
    assert options.limits is not None and options.limits.tokens == limit
