"""Steps from pixels and captions: losses and gradients are the same wherever it is encoded."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.stage_cases import check_all, failing_ahead, refused_run
from tests.helpers.train_runs import losses, make_album, run

BOTH, CLIPS = {"vae": "tiny", "text_encoder": "tiny"}, {"vae": "tiny-wan", "text_encoder": "tiny"}
SPLITS = {
    2: [list(range(7)), []],  # a rank without a photo
    3: [[], list(range(9)), [9]],
    4: [[0], list(range(1, 11)), [], []],
}
FEW = {2: [[0], []], 3: [[0], [1], []], 4: [[], [], [0], []]}


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos and clips, most with captions."""
    folder = make_album(tmp_path_factory.mktemp("albums") / "album")
    for k in range(1, 7):
        (folder / f"{k}.txt").write_text("words and more " * k)
    return folder


@pytest.mark.some(1)
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.stress)])
def test_losses_and_gradients_are_those_of_one_process(size: int, album: Path) -> None:
    pytest.importorskip("diffusers")
    cases: list[tuple[dict[str, Any], list[list[int]], bool]] = [
        (BOTH, SPLITS[size], True),  # a clip is its frames, one by one
        (CLIPS, SPLITS[size], True),  # clips and photos
        ({"text_encoder": "tiny"}, SPLITS[size], True),  # a step of texts alone
        ({"vae": "tiny", "clip_frames": 0}, SPLITS[size], True),
        (BOTH, FEW[size], False),  # nothing is worth a move
    ]
    said = run_ranks(check_all, size, album, cases)
    assert all(one == said[0] for one in said)


@pytest.fixture(scope="module")
def whole(album: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of a run that nothing stops: eleven samples, four a step."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_ranks(run, 2, epoch(album, folder)) == [3, 3]
    return losses(folder)


def epoch(album: Path, folder: Path) -> dict[str, Any]:
    given = {"data": None, "photos": album, "epochs": 1, "out": folder}
    return given | BOTH | {"batch_size": 4, "accumulate": 2}


@pytest.mark.some(1)
@pytest.mark.parametrize("after", [2, 4])
def test_a_stopped_run_goes_on_with_the_same_curve(
    after: int, album: Path, whole: list[float], tmp_path: Path
) -> None:
    settings = epoch(album, tmp_path)
    assert run_ranks(run, 2, settings, 2) == [2, 2]
    resumed = settings | {"resume": True}
    assert run_ranks(run, after, resumed, None, 1) == [3] * after
    assert losses(tmp_path) == pytest.approx(whole, rel=1e-10)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        assert record["encoders"].keys() == {"text_encoder", "vae"}
        assert all(0 < record["mean_s"][name] for name in ("text_encoder", "vae"))
    for other, said in (
        ({"vae": "tiny-wan"}, "saved with --vae AutoencoderKL"),
        ({"text_encoder": None}, "this run has no --text-encoder"),
    ):
        for names, text in run_ranks(refused_run, 2, resumed | other):
            assert "ConfigError" in names and said in text and "\n" not in text, text


def test_encoding_behind_the_step_before_gives_the_same_curve(
    album: Path, whole: list[float], tmp_path: Path
) -> None:
    settings = epoch(album, tmp_path) | {"encode_ahead": True}
    assert run_ranks(run, 2, settings, 2) == [2, 2]
    assert run_ranks(run, 2, settings | {"resume": True}, None, 1) == [3, 3]
    assert losses(tmp_path) == pytest.approx(whole, rel=1e-10)
    for record in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        assert record["encoders"]["vae"]["items"] > 0
        assert all(0 < record["mean_s"][name] for name in ("text_encoder", "vae"))


def test_what_one_rank_cannot_load_ahead_ends_all(album: Path, tmp_path: Path) -> None:
    settings = epoch(album, tmp_path) | {"encode_ahead": True}
    for names, text in run_ranks(failing_ahead, 2, settings, 2):
        assert {"ConfigError", "CommError"} & set(names), names
        assert "the folder is gone" in text


def test_a_rank_without_a_library_ends_all_with_one_sentence(album: Path, tmp_path: Path) -> None:
    settings = epoch(album, tmp_path)
    for missing, other in (("diffusers", {}), ("transformers", {"vae": None})):
        for names, text in run_ranks(refused_run, 3, settings | other, missing):
            assert "ConfigError" in names, names
            assert f"{missing} is not installed: pip install" in text and "\n" not in text
