"""`bascule serve --advise`: the values that the simulator finds best, as a command to copy."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bascule.cli import parse
from bascule.machine.cluster import HardwareProfile
from bascule.machine.mesh_choice import mesh_of_block
from bascule.workload.requests import predicted
from bascule.workload.tokens import model_shape
from tests.helpers.cli import Console, run

MIX = "--mix", "1024x1024@28=0.7", "512x512@20=0.3"


def result(capsys: Console, *words: str) -> Any:
    code, out, err = run(capsys, *words, "--json", "-")
    assert code == 0, err
    return json.loads(out)


def test_five_flags_of_flux_on_eight_gpus(capsys: Console) -> None:
    asked = "--model", "flux.1", *MIX, "--deadline", "2", "--ranks", "8"
    advice = result(capsys, "serve", "--advise", *asked)
    bascule, *words = shlex.split(advice["command"].replace("FOLDER", "tiny"))
    assert bascule == "bascule" and sum(word.startswith("--") for word in words) == 5
    _, options = parse(words)
    options.check()
    chosen = advice["options"]
    assert [options.guidance_ranks, list(options.degrees), options.policy] == list(chosen.values())
    # The same values, simulated by the other command.
    values = [row["value"] for row in advice["rows"] if row["option"] == "--policy"]
    settings = "--rates", str(advice["rate"]), "--degrees", *map(str, chosen["degrees"])
    rows = result(capsys, "simulate-requests", *asked, *settings, "--policies", *values)["rows"]
    again = {row["policy"]: row for row in rows}
    for row in advice["rows"]:
        if row["option"] == "--policy":
            assert row["mean_s"] == again[row["value"]]["mean_s"]
            assert row["p95_s"] == again[row["value"]]["p95_s"]
    best = again[chosen["policy"]]
    assert best["on_time"] > max(row["on_time"] for row in again.values() if "p95_s" in row) - 0.01
    degrees = [row for row in advice["rows"] if row["option"] == "--degrees"]
    assert min(degrees, key=lambda row: row["mean_s"])["value"] == "1 2 4 8"
    assert chosen["degrees"] == [1, 2, 4, 8] and len(degrees) == 7


def test_a_burst_of_a_file_gets_what_suits_it(capsys: Console, tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    lines = [{"width": 256, "height": 256, "steps": 20, "arrival_s": k // 40} for k in range(400)]
    path.write_text("\n".join(map(json.dumps, lines)))
    words = "--model", "wan2.1", "--passes", "2", "--ranks", "4", "--profile", "a100-datasheet"
    reports = list[str]()
    for rate in ("1", "0.01"):
        asked = *words, "--arrivals", str(path), "--rate", rate
        code, out, err = run(
            capsys, "serve", "--advise", *asked, "--report", str(tmp_path / "a.html")
        )
        assert code == 0, err
        reports.append(out)
        assert out.splitlines()[1] in (tmp_path / "a.html").read_text()
    assert "speed-up of the arrivals" in reports[0] and "on 4 GPUs" in reports[0]
    assert "requests per second" not in reports[0] and reports[0] != reports[1]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_seconds_of_guidance_groups_by_hand(num_groups: int) -> None:
    machine = HardwareProfile.load("h100-datasheet")
    cost = replace(model_shape("wan2.1").cost, gamma=machine.gamma)
    alone, found = predicted(machine, cost)(4096), predicted(machine, cost, 2, num_groups)(4096)
    assert found[1] == pytest.approx(2 * alone[1])
    if num_groups == 1:
        assert found == pytest.approx({degree: 2 * alone[degree] for degree in alone})
    else:  # each group computes a pass
        halves = {2 * degree: alone[degree] + (machine.launch_s or 0) for degree in (1, 2, 4)}
        assert {degree: found[degree] for degree in halves} == pytest.approx(halves)
    mesh = mesh_of_block(8, 3, num_groups)
    assert (mesh.guidance, mesh.ring, mesh.ulysses) == (num_groups, 4 // num_groups, 2)
