"""`bascule sparse`: what it prints and draws, and what mistakes cost."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from bascule.cli.sparse import SparseOptions
from bascule.cli.sparse_tables import _strategies
from bascule.plan.machine import HardwareProfile
from bascule.plan.sparse.choose import StrategyChoice
from bascule.sim.sparse_study import WAYS, LayerRun, Setting, Study
from bascule.workload import save_masks
from tests.helpers.cli import modules_imported_by, run
from tests.helpers.pages import python_of
from tests.helpers.sparse_studies import (
    DEAR_ROUNDS,
    HEAD_DIM,
    LATENCY,
    TARGET,
    Bools,
    drifting,
    setting_of,
)

GUIDE = Path(__file__).parents[2] / "docs" / "sparse_attention.md"
WAN = ("--model", "wan2.1", "--block", "1280")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_the_machine_is_that_of_the_options() -> None:
    options = SparseOptions(tflops=2.0, intra_gbs=0.5, latency_us=7.0)
    found, known = options.hardware(), SparseOptions().hardware()
    assert (found.attention_flops_per_s, found.matmul_flops_per_s) == (2e12, 2e12)
    assert found.intra_bytes_per_s == 0.5e9 and found.launch_s == pytest.approx(7e-6)
    assert (found.source, known.source) == ("given", "datasheet")
    assert found.inter_bytes_per_s == known.inter_bytes_per_s
    assert known == HardwareProfile.load("h100-datasheet")


def small_file(folder: Path) -> Path:
    path = folder / "masks.npz"
    save_masks(path, np.stack([np.stack([x, ~x]) for x in drifting(3)]))
    return path


def test_a_file_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = small_file(tmp_path)
    base = ("sparse", "--masks", str(path), "--target", str(TARGET))
    code, out, _ = run(capsys, *base, "--ranks", "4")
    assert code == 0
    assert "6 heads, 24 x 24 blocks of 64 tokens" in out and "2 layers, 3 steps" in out
    for name in ("U4R1", "U2R2", "U1R4", *WAYS, "critical path", "rows moved", "sent, MiB"):
        assert name in out
    assert "plans made" in out and "lowest prediction" in out
    assert "assumed from a data sheet, not measured" in " ".join(out.split())
    code, out, _ = run(capsys, *base, "--ring", "3", "--layers", "1", "--steps", "1")
    assert code == 0
    assert "U1R3" in out and "1 layer, 1 step" in out
    assert "plans made" not in out and "lowest prediction" not in out


def test_printed_numbers_are_those_of_the_study(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    masks = drifting(1)[0]
    np.save(tmp_path / "one.npy", masks)
    arguments = ("--ulysses", "2", "--ring", "2", "--head-dim", "16", "--block", "4096")
    path = str(tmp_path / "one.npy")
    code, out, _ = run(capsys, "sparse", "--masks", path, *arguments, "--target", str(TARGET))
    assert code == 0
    options = SparseOptions(ulysses=2, ring=2, head_dim=16)
    lens = np.full(24, 4096)
    latency = HardwareProfile.load("h100-datasheet").attention_latency(16)
    setting = Setting(options.meshes, lens, lens, latency, 16, 2, TARGET, 2.0, 0.05)
    tables = out.split("rows on other ring ranks")
    for way in WAYS:
        plan = setting.plan(way, masks, (2, 2))
        balance, exchange = (
            next(line for line in table.splitlines() if f" {way} " in line) for table in tables
        )
        assert f" {plan.imbalance:.4f} " in balance
        assert f" {plan.critical_path_imbalance:.4f} " in balance
        assert f" {plan.wire_bytes(16) / 2**20:,.0f} " in exchange
        assert all(f" {share:.1%} " in exchange for share in plan.moved)
        predicted = setting.latency(setting.load(plan))
        assert f" {predicted * 1e3:.3f} " in exchange


@pytest.mark.parametrize(
    ("model", "heads", "blocks"), [("wan2.1", 40, 60), ("cogvideox1.5", 48, 68)]
)
def test_synthetic_masks_are_shown(
    capsys: pytest.CaptureFixture[str], model: str, heads: int, blocks: int
) -> None:
    arguments = ("--model", model, "--block", "1280", "--density", "0.3", "--ulysses", "4")
    code, out, _ = run(capsys, "sparse", *arguments, "--steps", "2", "--seed", "3")
    assert code == 0
    assert f"{heads} heads, {blocks} x {blocks} blocks of 1,280 tokens" in out
    assert "2 steps" in out and "30." in out.splitlines()[0]


def one_of(shape: tuple[int, ...]) -> Bools:
    masks = np.zeros(shape, bool)
    masks.flat[-1] = True
    return masks


@pytest.mark.parametrize("masks", [one_of((2, 4, 4)), one_of((2, 4, 1)), np.ones((1, 1, 1), bool)])
def test_masks_of_one_block(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, masks: Bools
) -> None:
    np.save(tmp_path / "few.npy", masks)
    code, out, _ = run(capsys, "sparse", "--masks", str(tmp_path / "few.npy"), "--ranks", "8")
    assert code == 0
    assert "nan" not in out


def test_a_layer_of_nothing_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    masks = np.ones((3, 2, 4, 5, 5), bool)
    masks[0, 0, 1] = False  # a head may see nothing
    masks[2, 1] = False
    np.save(tmp_path / "masks.npy", masks)
    base = ("sparse", "--masks", str(tmp_path / "masks.npy"), "--ring", "2")
    code, _, err = run(capsys, *base)
    assert code == 2 and "nothing is computed in step 2 of layer 1: look" in err
    assert len(err.strip().splitlines()) == 1
    assert run(capsys, *base, "--steps", "2")[0] == 0
    assert run(capsys, *base, "--layers", "1")[0] == 0


def test_every_ulysses_rank_has_a_head(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    masks = drifting(1)[0][:3]
    np.save(tmp_path / "three.npy", masks)
    base = ("sparse", "--masks", str(tmp_path / "three.npy"), "--target", str(TARGET))
    code, out, _ = run(capsys, *base, "--ranks", "4")
    assert code == 0 and "U2R2" in out and "U1R4" in out and "U4" not in out
    assert run(capsys, *base, "--ulysses", "3")[0] == 0
    for degrees in (("--ulysses", "4"), ("--ranks", "8", "--ring", "2")):
        code, out, err = run(capsys, *base, *degrees)
        assert code == 2 and not out
        assert "three.npy: 3 heads for 4 Ulysses ranks, which take one each at least" in err
        assert "use --ulysses 3 at most" in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("fit_error", [None, 0.0412])
def test_a_measured_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fit_error: float | None
) -> None:
    np.save(tmp_path / "one.npy", masks := drifting(1)[0])
    latency = replace(DEAR_ROUNDS, fit_error=fit_error)
    profile = HardwareProfile(device="A800", source="measured", attention=latency)
    profile.save(tmp_path / "a800.json")
    machine = ("--profile", str(tmp_path / "a800.json"), "--head-dim", str(HEAD_DIM))
    base = ("sparse", "--masks", str(tmp_path / "one.npy"), "--ring", "3", "--block", "8")
    code, out, _ = run(capsys, *base, *machine, "--target", str(TARGET))
    assert code == 0 and "assumed" not in out
    fit = "" if fit_error is None else " with an error of 4.1%"
    assert out.endswith(f"predicted for A800: attention fitted{fit}; measured\n")
    setting = setting_of(masks, (1, 3), latency=latency)
    predicted = latency(setting.load(setting.plan("minimal_move", masks, (1, 3))))
    row = next(x for x in out.split("rows on other")[1].splitlines() if " minimal_move " in x)
    assert f" {predicted * 1e3:.3f} " in row


@pytest.mark.parametrize(
    ("content", "arguments", "named"),
    [
        (None, (), "cannot read"),
        ("{", (), "not valid JSON"),
        ({"version": 9}, (), "no hardware profile"),
        ({"attention": {"launch_s": 1}}, (), "must hold all_to_all_latency_s"),
        ({"launch_s": -1}, (), "launch_s=-1"),
        ({}, ("--intra-gbs", "100"), "and --intra-gbs: its attention was measured"),
        ({}, ("--latency-us", "5"), "and --latency-us: its attention was measured"),
        ({"attention": None}, (), "has no attention_flops_per_s"),
    ],
)
def test_a_profile_that_is_none(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: str | dict[str, object] | None,
    arguments: tuple[str, ...],
    named: str,
) -> None:
    path = tmp_path / "machine.json"
    HardwareProfile(device=str(path), attention=LATENCY).save(path)
    if content is None:
        path.unlink()
    else:
        fields = json.loads(path.read_text())
        path.write_text(content if isinstance(content, str) else json.dumps(fields | content))
    code, out, err = run(capsys, "sparse", *WAN, "--ring", "2", "--profile", str(path), *arguments)
    assert code == 2 and not out
    assert str(path) in err and named in err
    assert len(err.strip().splitlines()) == 1


def test_the_guide_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text()
    writes_masks = python_of("docs/sparse_attention.md")[0]  # the others need ranks: test_pages
    exec(compile(writes_masks.text, str(GUIDE), "exec"), {})
    commands = re.findall(r"```sh\nbascule (.*?)\n```", text, re.S)
    assert commands
    for command in commands:
        code, out, _ = run(capsys, *command.split())
        assert code == 0 and "U4R2" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--ranks", "8"), "not neither"),
        (("--model", "wan2.1", "--masks", "x.npz", "--ranks", "8"), "not both"),
        (("--model", "sora", "--ranks", "8"), "'sora': there are wan2.1 and cogvideox1.5"),
        (("--masks", "/nonexistent/masks.npz", "--ranks", "8"), "/nonexistent/masks.npz"),
        (("--masks", "masks.txt", "--ranks", "8"), ".npz"),
        (WAN, "--ranks"),
        ((*WAN, "--ranks", "8", "--ulysses", "3"), "8 x 1, 4 x 2, 2 x 4, 1 x 8"),
        ((*WAN, "--ranks", "8", "--ulysses", "4", "--ring", "4"), "--ulysses 4, --ring 4"),
        ((*WAN, "--ring", "0"), "--ring 0"),
        ((*WAN, "--ranks", "2", "--layers", "0"), "--layers 0"),
        ((*WAN, "--ranks", "2", "--head-dim", "0"), "--head-dim 0"),
        (("--model", "wan2.1", "--ranks", "2", "--block", "-1"), "--block -1"),
        ((*WAN, "--ranks", "2", "--density", "1.5"), "density=1.5"),
        ((*WAN, "--ranks", "2", "--seed", "-1"), "-1"),
        ((*WAN, "--ranks", "2", "--head", "40"), "0 to 39"),
        ((*WAN, "--ranks", "2", "--intra-gbs", "0"), "--intra-gbs 0"),
        ((*WAN, "--ranks", "2", "--tflops", "nan"), "--tflops nan"),
        ((*WAN, "--ranks", "2", "--latency-us", "-1"), "--latency-us -1"),
        ((*WAN, "--ranks", "2", "--target", "inf"), "--target inf: must be finite"),
        ((*WAN, "--ranks", "2", "--tolerance", "-1"), "tolerance=-1"),
        ((*WAN, "--ranks", "2", "--reward", "nan"), "--reward nan"),
        ((*WAN, "--ranks", "2", "--report", "out.jpg"), "out.jpg: must end in .html"),
        ((*WAN, "--ranks", "2", "--report", "/nonexistent/out.html"), "/nonexistent"),
    ],
)
def test_a_users_error_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    code, out, err = run(capsys, "sparse", *arguments)
    assert code == 2 and not out
    assert named in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("array", "arguments", "named"),
    [
        (np.ones((4, 4), bool), (), "(4, 4)"),
        (np.ones((2, 4, 4)), (), "float64"),
        (np.ones((3, 2, 4, 4), bool), ("--layers", "4"), "--layers 4"),
        (np.ones((3, 2, 4, 4), bool), ("--steps", "2"), "has 1"),
        (np.ones((2, 4, 4), bool), ("--head", "2"), "heads 0 to 1"),
        (np.ones((2, 4, 4), bool), ("--density", "0.5"), "--density 0.5"),
        (np.zeros((2, 4, 4), bool), (), "no block of these masks is computed"),
    ],
)
def test_masks_that_do_not_fit(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    array: NDArray[np.bool_],
    arguments: tuple[str, ...],
    named: str,
) -> None:
    path = tmp_path / "masks.npy"
    np.save(path, array)
    code, out, err = run(capsys, "sparse", "--masks", str(path), "--ranks", "2", *arguments)
    assert code == 2 and not out
    assert named in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [("--help",), (*WAN, "--ulysses", "2")], ids=" ".join)
def test_sparse_on_the_command_line_needs_no_torch(arguments: tuple[str, ...]) -> None:
    modules = modules_imported_by("-m", "bascule.cli", "sparse", *arguments)
    assert "bascule.plan.sparse" in modules
    assert "torch" not in modules and "plotly" not in modules


def test_speed_ups_and_stretches_of_steps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of the whole call, over heads in order; and in which steps a layer is on which mesh."""
    masks = drifting(1)[0]
    steps = np.stack([masks[None]] * 3)
    np.save(tmp_path / "three.npy", steps)
    base = ("sparse", "--masks", str(tmp_path / "three.npy"), "--target", str(TARGET))
    code, out, _ = run(capsys, *base, "--ranks", "2", "--block", "4096")
    assert code == 0
    lens = np.full(24, 4096)
    options = SparseOptions(ranks=2)
    latency = HardwareProfile.load("h100-datasheet").attention_latency(128)
    setting = Setting(options.meshes, lens, lens, latency, 128, 2, TARGET, 2.0, 0.05)
    before, after = (
        setting.latency(setting.load(setting.plan(way, masks, (2, 1))))
        for way in ("in order", "minimal_move")
    )
    table = out.split("rows on other ring ranks")[1]
    row = next(line for line in table.splitlines() if " minimal_move " in line)
    assert f" {before / after:.3f}x " in row and before > after * 1.01
    assert any(f"{name} 0 to 2 " in out for name in ("U2R1", "U1R2"))


@pytest.mark.parametrize("num_layers", [1, 64, 66])
def test_the_table_of_meshes_tells_every_step_of_the_first_layers(
    capsys: pytest.CaptureFixture[str], num_layers: int
) -> None:
    """Its stretches of steps, read back, are what was chosen; layers left out are counted."""
    meshes, masks = ((4, 1), (2, 2), (1, 4)), drifting(1)[0]
    drawn = np.random.default_rng(0).integers(0, len(meshes), (num_layers, 9))
    chosen = [[meshes[place] for place in layer] for layer in drawn]
    runs = tuple(LayerRun({}, tuple(StrategyChoice(x, 1.0) for x in layer)) for layer in chosen)
    study = Study("drawn", setting_of(masks, *meshes), masks, (), runs, ())
    Console(width=300).print(_strategies(study))
    out = capsys.readouterr().out
    read: list[list[tuple[int, int]]] = []
    for row in (line for line in out.splitlines() if re.search("U[0-9]R[0-9]", line)):
        steps: list[tuple[int, int]] = []
        for stretch in re.findall(r"U(\d)R(\d) (\d+)(?: to (\d+))?", row):
            ulysses, ring, first, last = (int(number or -1) for number in stretch)
            assert first == len(steps)
            steps += [(ulysses, ring)] * (max(first, last) - first + 1)
        read.append(steps)
    assert read == chosen[:64]
    left_out = [str(num_layers - 64)] if num_layers > 64 else []
    assert re.findall(r"(\d+) more layers", out) == left_out
