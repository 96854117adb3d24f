"""`bascule sparse`: what it prints is what was planned, and which masks and machines it refuses."""

import re
from pathlib import Path

import numpy as np
import pytest

from bascule.cli.sparse import SparseOptions
from bascule.machine.cluster import HardwareProfile
from bascule.plan.sparse.partition import TARGET as DEFAULT_TARGET
from bascule.plan.sparse.planner import REWARD
from bascule.quantities import Scale, percent, times
from bascule.sim.sparse_study import WAYS, Setting
from tests.helpers.cli import Console, run, sentence
from tests.helpers.pages import python_of
from tests.helpers.sparse_studies import HEAD_DIM, MACHINE, TARGET, Bools, drifting, setting_of

GUIDE = Path(__file__).parents[2] / "docs" / "sparse_attention.md"
WAN = ("--model", "wan2.1", "--block", "1280")


def cells_of(table: str, way: str) -> list[str]:
    """The cells of a way's row."""
    row = next(line for line in table.splitlines() if f" {way} " in line and "│" in line)
    return [cell.strip() for cell in row.split("│")[2:-1]]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_printed_numbers_are_those_of_the_study(capsys: Console, tmp_path: Path) -> None:
    masks = drifting(1)[0]
    np.save(tmp_path / "one.npy", masks)
    arguments = ("--ulysses", "2", "--ring", "2", "--head-dim", "16", "--block", "4096")
    path = str(tmp_path / "one.npy")
    code, out, _ = run(capsys, "sparse", "--masks", path, *arguments, "--target", str(TARGET))
    assert code == 0
    options = SparseOptions(ulysses=2, ring=2, head_dim=16)
    assert options.target == DEFAULT_TARGET
    lens = np.full(24, 4096)
    machine = HardwareProfile.load("h100-datasheet")
    setting = Setting(options.meshes, lens, lens, machine, 16, 2, TARGET, REWARD, 0.05)
    balance, exchange = out.split("Rows on other ring ranks")
    plans = {way: setting.plan(way, masks, (2, 2)) for way in WAYS}
    calls = {way: setting.seconds(plan) for way, plan in plans.items()}
    call, sent = (
        Scale.of(values, unit)
        for values, unit in (
            (calls.values(), "s"),
            ((p.wire_bytes(16) for p in plans.values()), "B"),
        )
    )
    for way, plan in plans.items():
        rho = plan.imbalance, plan.critical_path_imbalance
        assert cells_of(balance, way)[1:3] == [percent(value - 1) for value in rho]
        written = sent(plan.wire_bytes(16)), call(calls[way]), times(calls["in order"] / calls[way])
        assert cells_of(exchange, way)[1:] == [*map(percent, plan.moved), *written]


@pytest.mark.parametrize(("model", "heads", "num"), [("wan2.1", 40, 60), ("cogvideox1.5", 48, 68)])
def test_synthetic_masks(capsys: Console, model: str, heads: int, num: int) -> None:
    arguments = ("--model", model, "--block", "1280", "--density", "0.3", "--ulysses", "4")
    code, out, _ = run(capsys, "sparse", *arguments, "--steps", "2", "--seed", "3")
    assert code == 0 and f"{heads} heads, {num} x {num} blocks of 1,280 tokens" in out
    assert "steps: 2" in out and re.search(r"blocks computed +30\.", out)


def one_of(shape: tuple[int, ...]) -> Bools:
    masks = np.zeros(shape, bool)
    masks.flat[-1] = True
    return masks


@pytest.mark.parametrize("masks", [one_of((2, 4, 4)), one_of((2, 4, 1)), np.ones((1, 1, 1), bool)])
def test_masks_of_one_block(capsys: Console, tmp_path: Path, masks: Bools) -> None:
    np.save(tmp_path / "few.npy", masks)
    code, out, _ = run(capsys, "sparse", "--masks", str(tmp_path / "few.npy"), "--ranks", "8")
    assert code == 0
    assert "nan" not in out


def test_a_layer_of_nothing_is_named(capsys: Console, tmp_path: Path) -> None:
    masks = np.ones((3, 2, 4, 5, 5), bool)
    masks[0, 0, 1] = False  # a head may see nothing
    masks[2, 1] = False
    np.save(tmp_path / "masks.npy", masks)
    base = ("sparse", "--masks", str(tmp_path / "masks.npy"), "--ring", "2")
    assert "the mask of layer 1 in step 2 computes no block" in sentence(capsys, *base)
    assert run(capsys, *base, "--steps", "2")[0] == 0
    assert run(capsys, *base, "--layers", "1")[0] == 0


def test_every_ulysses_rank_has_a_head(capsys: Console, tmp_path: Path) -> None:
    masks = drifting(1)[0][:3]
    np.save(tmp_path / "three.npy", masks)
    base = ("sparse", "--masks", str(tmp_path / "three.npy"), "--target", str(TARGET))
    code, out, _ = run(capsys, *base, "--ranks", "4")
    assert code == 0 and "U2R2" in out and "U1R4" in out and "U4" not in out
    assert run(capsys, *base, "--ulysses", "3")[0] == 0
    for degrees in (("--ulysses", "4"), ("--ranks", "8", "--ring", "2")):
        message = sentence(capsys, *base, *degrees)
        assert "three.npy: 3 heads for 4 Ulysses ranks, which need at least one each" in message
        assert "use --ulysses 3 at most" in message


def test_a_measured_machine(capsys: Console, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", masks := drifting(1)[0])
    MACHINE.save(tmp_path / "small.json")
    machine = ("--profile", str(tmp_path / "small.json"), "--head-dim", str(HEAD_DIM))
    base = ("sparse", "--masks", str(tmp_path / "one.npy"), "--ring", "3", "--block", "8")
    code, out, _ = run(capsys, *base, *machine, "--target", str(TARGET))
    assert code == 0 and "assumed" not in out
    assert out.endswith("Predicted for small: 1.00 GB/s in a node, 5.00 µs per launch; measured.\n")
    setting = setting_of(masks, (3, 1))
    predicted = setting.seconds(setting.plan("minimal_move", masks, (3, 1)))
    table = out.split("Rows on other")[1]
    unit = Scale.of([predicted], "s")
    assert f"call, {unit.unit}" in table and cells_of(table, "minimal_move")[4] == unit(predicted)
    code, out, _ = run(capsys, *base, *machine, "--intra-gbs", "100")
    assert code == 0 and "100 GB/s in a node, 5.00 µs per launch; given, not measured" in out


def test_the_guide_runs(capsys: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text()
    writes_masks = python_of("docs/sparse_attention.md")[0]  # the others need ranks: test_pages
    exec(compile(writes_masks.text, str(GUIDE), "exec"), {})
    commands = re.findall(r"```sh\nbascule (.*?)\n```", text, re.S)
    assert commands
    for command in commands:
        code, out, _ = run(capsys, *command.split())
        assert code == 0 and "U4R2" in out


def test_masks_that_do_not_fit(capsys: Console, tmp_path: Path) -> None:
    path = tmp_path / "masks.npy"
    for array, arguments, said in (
        (np.ones((4, 4), bool), "", "(4, 4)"),
        (np.ones((2, 4, 4)), "", "float64"),
        (np.ones((3, 2, 4, 4), bool), "--layers 4", "--layers 4"),
        (np.ones((3, 2, 4, 4), bool), "--steps 2", "has only 1"),
        (np.ones((2, 4, 4), bool), "--density 0.5", "--density 0.5"),
        (np.zeros((2, 4, 4), bool), "", "no block of these masks is computed"),
    ):
        np.save(path, array)
        base = ("sparse", "--masks", str(path), "--ranks", "2")
        assert said in sentence(capsys, *base, *arguments.split())
