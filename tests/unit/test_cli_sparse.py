"""`bascule sparse`: its numbers against brute force, its picture, and what mistakes cost."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bascule.cli import sparse_picture
from bascule.cli.sparse import SparseOptions
from bascule.cli.sparse_picture import draw, write_picture
from bascule.cli.sparse_study import WAYS, Mesh, Setting, run_layer, study
from bascule.errors import ConfigError
from bascule.plan.sparse_latency import AttentionLatency, AttentionLoad
from bascule.plan.sparse_masks import WAN21, save_masks, synthetic_masks
from tests.unit.test_cli import run
from tests.unit.test_imports import modules_imported_by

Bools = NDArray[np.bool_]

GUIDE = Path(__file__).parents[2] / "docs" / "sparse_attention.md"
LATENCY = AttentionLatency(1e-5, 1e-9, 2e-5, 3e-9, 1e-8, 5e-6)
DEAR_ROUNDS = AttentionLatency(0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
DEAR_ALL_TO_ALLS = AttentionLatency(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
HEAD_DIM, ITEMSIZE, TOLERANCE = 16, 2, 0.05
TARGET = 1.1  # few blocks cannot be much more even, and the search for it takes long


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def drifting(num_steps: int) -> list[Bools]:
    model = replace(WAN21, grid=(4, 6, 8), num_heads=6, block=8, step_drift=0.15)
    return [synthetic_masks(model, step=step) for step in range(num_steps)]


def setting_of(masks: Bools, *meshes: Mesh, latency: AttentionLatency = LATENCY) -> Setting:
    q_lens, kv_lens = (np.full(size, 8) for size in masks.shape[1:])
    return Setting(meshes, q_lens, kv_lens, latency, HEAD_DIM, ITEMSIZE, TARGET, 2.0, TOLERANCE)


def rho(masks: Bools, rank_of: NDArray[np.int64], kv_of: NDArray[np.int64], mesh: Mesh) -> float:
    """Equations 1 to 3 of db-SP, one block at a time.

    Args:
        masks: (H, Q, K).
        rank_of: (H, Q) rank that computes.
        kv_of: (U, K) ring rank of each key block in each ring.
        mesh: (U, R).
    """
    ulysses, ring = mesh
    work = np.zeros((ulysses, ring, ring))
    for head, q, kv in np.argwhere(masks):
        ring_rank, group = divmod(rank_of[head, q], ulysses)
        work[group, ring_rank, (ring_rank - kv_of[group, kv]) % ring] += 1
    slowest = work.max(axis=1).sum(axis=1).max()
    return float(slowest / (work.sum() / (ulysses * ring)))


@pytest.mark.parametrize("mesh", [(1, 1), (4, 1), (2, 2), (1, 4), (3, 2)])
@pytest.mark.parametrize("shape", [(6, 20, 20), (5, 17, 9), (2, 3, 12)])
def test_every_way_is_as_even_as_it_says(mesh: Mesh, shape: tuple[int, int, int]) -> None:
    random = np.random.default_rng(shape)
    masks = random.random(shape) < random.random((shape[0], 1, 1))
    setting = setting_of(masks, mesh)
    found = study("random", [[masks]], setting)
    assert [x.way for x in found.outcomes] == list(WAYS)
    for x in found.outcomes:
        plan = setting.plan(x.way, masks, mesh)
        assert x.imbalance == pytest.approx(max(rho(masks, plan.rank_of, plan.kv_of, mesh), 1.0))
        assert 1.0 <= x.critical_path_imbalance <= x.imbalance + 1e-12
        assert x.planning_s > 0 or x.way == "in order"


@pytest.mark.parametrize("mesh", [(4, 1), (2, 2), (1, 4), (3, 2)])
def test_in_order_is_heads_and_blocks_in_runs(mesh: Mesh) -> None:
    masks = np.ones((5, 13, 11), bool)
    plan = setting_of(masks, mesh).plan("in order", masks, mesh)
    ring_rank, ring = np.divmod(plan.rank_of, mesh[0])
    for table, size in ((ring, mesh[0]), (ring_rank.T, mesh[1]), (plan.kv_of.T, mesh[1])):
        assert (table == table[:, :1]).all() and (np.diff(table[:, 0]) >= 0).all()
        counts = np.bincount(table[:, 0], minlength=size)
        assert counts.max() - counts.min() <= 1
    assert plan.moved == (0.0, 0.0)


def test_the_load_is_that_of_the_slowest_rank() -> None:
    masks = drifting(1)[0][:, :, :21]  # ring ranks have 5 or 6 key blocks
    for mesh in ((1, 1), (4, 1), (2, 2), (1, 4)):
        setting = setting_of(masks, mesh)
        plan = setting.plan("in order", masks, mesh)
        load = setting.load(plan)
        num_ranks, pairs = plan.num_ranks, float(masks.sum()) * 64
        assert load.degrees == mesh
        assert load.work == pytest.approx(plan.imbalance * pairs / num_ranks)
        assert load.all_to_all_bytes * num_ranks == plan.wire_bytes(HEAD_DIM, ITEMSIZE)
        rows = [sum(plan.kv_rows(rank).lens) for rank in range(num_ranks)]
        most = 2 * max(rows) * HEAD_DIM * ITEMSIZE
        assert load.p2p_bytes == (most if mesh[1] > 1 else 0)


def test_a_kept_plan_is_judged_by_the_masks_that_it_meets() -> None:
    steps, mesh = drifting(6), (2, 2)
    setting = setting_of(steps[0], mesh)
    found = run_layer(iter(steps), setting, (0.0, 9.0))
    first = setting.plan("minimal_move", steps[0], mesh)
    never = found.reuses[mesh, 9.0]
    assert never.state.plan == first and never.state.num_planned == 1
    expected = [rho(masks, first.rank_of, first.kv_of, mesh) for masks in steps]
    assert never.imbalances == pytest.approx(expected)
    # At tolerance 0 a step runs with what was planned from the step before.
    always = found.reuses[mesh, 0.0]
    plan = setting.plan("minimal_move", steps[-2], mesh)
    assert always.imbalances[-1] == pytest.approx(rho(steps[-1], plan.rank_of, plan.kv_of, mesh))
    for reuse in found.reuses.values():
        assert reuse.state.num_planned + reuse.state.num_kept == len(steps)
    planned = [found.reuses[mesh, x].state.num_planned for x in (0.0, TOLERANCE, 9.0)]
    assert planned[0] > planned[2] and planned == sorted(planned, reverse=True)


def test_the_chosen_mesh_has_the_lowest_prediction() -> None:
    steps = drifting(3)
    for latency, mesh in ((DEAR_ROUNDS, (4, 1)), (DEAR_ALL_TO_ALLS, (1, 4))):
        setting = setting_of(steps[0], (4, 1), (2, 2), (1, 4), latency=latency)
        aligned = replace(setting, target=9.0)  # nothing moves, so a ring alone sends nothing
        choices = run_layer(iter(steps), aligned, ()).choices
        assert [choice.degrees for choice in choices] == [mesh] * 3
        assert [choice.num_choices for choice in choices] == [1, 2, 3]


def test_the_machine_is_that_of_the_options() -> None:
    seq_len, num_heads, head_dim = 3000, 8, 64
    options = SparseOptions(head_dim=head_dim, tflops=2.0, gbs=0.5, latency_us=7.0)
    dense = AttentionLoad.even((1, 1), seq_len=seq_len, num_heads=num_heads, head_dim=head_dim)
    flops = 2 * 2 * seq_len**2 * num_heads * head_dim  # two products, two FLOPs a term
    assert options.latency(dense) == pytest.approx(flops / 2e12 + 7e-6)
    sent, passed = AttentionLoad(2, 1, 0.0, 1e6, 0.0), AttentionLoad(1, 2, 0.0, 0.0, 1e6)
    assert options.latency(sent) == pytest.approx(2 * 7e-6 + 1e6 / 0.5e9 + 7e-6)
    assert options.latency(passed) == pytest.approx(7e-6 + 1e6 / 0.5e9 + 7e-6)


def test_means_are_over_layers() -> None:
    masks = drifting(2)
    mesh = (2, 2)
    found = study("two", [[x] for x in masks], setting_of(masks[0], mesh))
    rows = [x.imbalance for x in found.outcomes if x.way == "paper"]
    assert len(rows) == 2 and rows[0] != rows[1]
    assert found.mean(mesh, "paper").imbalance == pytest.approx(sum(rows) / 2)


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
    assert "assumed, not measured" in out
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
    setting = Setting(options.meshes, lens, lens, options.latency, 16, 2, TARGET, 2.0, 0.05)
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


@pytest.mark.parametrize("masks", [np.zeros((2, 4, 4), bool), np.ones((1, 1, 1), bool)])
def test_masks_of_nothing_and_of_one_block(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, masks: Bools
) -> None:
    np.save(tmp_path / "few.npy", masks)
    code, out, _ = run(capsys, "sparse", "--masks", str(tmp_path / "few.npy"), "--ranks", "8")
    assert code == 0
    assert "nan" not in out


def test_the_guide_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text()
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(code, str(GUIDE), "exec"), {})
    commands = re.findall(r"```sh\nbascule (.*?)\n```", text, re.S)
    assert commands
    for command in commands:
        code, out, _ = run(capsys, *command.split())
        assert code == 0 and "U4R2" in out


def test_a_picture_shows_the_study() -> None:
    steps = drifting(3)
    setting = setting_of(steps[0], (4, 1), (2, 2), (1, 4), latency=DEAR_ALL_TO_ALLS)
    setting = replace(setting, target=9.0)  # nothing moves: a ring alone has no all-to-all
    tolerances, rewards = (0.0, 0.1), (0.0, 1.0, 4.0)
    found = study("drifting", [steps, steps], setting, tolerances, rewards)
    traces: Any = draw(found, 5).data
    mask, ranks, chosen, *lines = traces
    assert (mask.z == steps[0][5]).all()
    assert (ranks.z == setting.plan("minimal_move", steps[0], (2, 2)).rank_of).all()
    assert chosen.z.shape == (2, 3)
    names = [chosen.colorbar.ticktext[place] for place in chosen.z.ravel()]
    told = [x.degrees for run_of in found.runs for x in run_of.choices]
    assert names == ["U{}R{}".format(*mesh) for mesh in told] == ["U1R4"] * 6
    assert len(lines) == 2 * 2 * 3
    by_tolerance, by_reward = lines[:6], lines[6:]
    for place, mesh in enumerate(setting.meshes):
        kept, plans = by_tolerance[2 * place : 2 * place + 2]
        reuses = [found.runs[0].reuses[mesh, x] for x in (0.0, TOLERANCE, 0.1)]
        assert kept.x == (0.0, TOLERANCE, 0.1) and kept.yaxis != plans.yaxis
        assert kept.y == pytest.approx([np.mean(x.imbalances) for x in reuses])
        assert plans.y == tuple(x.state.num_planned for x in reuses)
        even, moved = by_reward[2 * place : 2 * place + 2]
        assert even.x == moved.x == rewards
        plans = [
            replace(setting, reward=reward).plan("paper", steps[0], mesh) for reward in rewards
        ]
        assert even.y == pytest.approx([plan.imbalance for plan in plans])
        assert moved.y == pytest.approx([plan.moved[0] for plan in plans])


def test_a_picture_is_a_page_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    masks = str(small_file(tmp_path))
    arguments = ("--masks", masks, "--ring", "2", "--layers", "1", "--picture", str(page))
    code, out, _ = run(capsys, "sparse", *arguments, "--target", str(TARGET))
    assert code == 0 and f"written: {page}" in out.replace("\n", "")
    text = page.read_text()
    assert "who computes what" in text and "Plotly.newPlot" in text
    assert "<script src" not in text


def test_an_image_needs_a_browser_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = pytest.importorskip("plotly.graph_objects")

    def no_browser(*_: object, **__: object) -> None:
        raise RuntimeError("Kaleido requires Google Chrome to be installed.")

    monkeypatch.setattr(go.Figure, "write_image", no_browser)
    with pytest.raises(ConfigError, match=r"Chrome or Chromium.*\.html"):
        write_picture(tmp_path / "out.png", go.Figure())
    with pytest.raises(ConfigError, match="cannot be written"):
        write_picture(tmp_path / "gone" / "out.html", go.Figure())


@pytest.mark.parametrize(
    ("ending", "missing"), [(".html", "plotly"), (".png", "plotly"), (".png", "kaleido")]
)
def test_a_picture_names_the_package_that_it_needs(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    missing: str,
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        sparse_picture, "find_spec", lambda name: None if name == missing else known("numpy")
    )
    arguments = ("--model", "wan2.1", "--ranks", "2", "--picture", str(tmp_path / f"x{ending}"))
    code, _, err = run(capsys, "sparse", *arguments)
    assert code == 2 and f"pip install {missing}" in err


WAN = ("--model", "wan2.1", "--block", "1280")


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
        ((*WAN, "--ranks", "2", "--gbs", "0"), "--gbs 0"),
        ((*WAN, "--ranks", "2", "--tflops", "nan"), "--tflops nan"),
        ((*WAN, "--ranks", "2", "--latency-us", "-1"), "all_to_all_latency_s"),
        ((*WAN, "--ranks", "2", "--tolerance", "-1"), "tolerance is -1"),
        ((*WAN, "--ranks", "2", "--reward", "nan"), "--reward nan"),
        ((*WAN, "--ranks", "2", "--picture", "out.jpg"), "out.jpg: must end in .html or .png"),
        ((*WAN, "--ranks", "2", "--picture", "/nonexistent/out.html"), "/nonexistent"),
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
