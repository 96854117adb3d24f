"""`bascule generate`: the same pixels on any ranks, each output once, and the rest gone on with."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from bascule.generation.generate_options import GenerateOptions
from tests.helpers.ranks import raised_by, run_ranks

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

ROWS: list[dict[str, Any]] = [
    {"prompt": "a boat", "width": 80, "height": 48, "steps": 2},
    {"prompt": "two boats on a lake", "negative_prompt": "fog", "guidance": 3.0, "steps": 2},
    {"prompt": "", "seed": 11, "width": 48, "height": 80, "steps": 3},
]


def make(prompts: Path, out: Path, **settings: Any) -> tuple[list[str], int]:
    """What was made, and how many steps this rank counted."""
    from bascule.generation.generating import Generation

    torch.set_num_threads(1)
    chosen: dict[str, Any] = {"width": 64, "height": 64} | settings
    options = GenerateOptions(prompts=prompts, out=out, **chosen)
    run, steps = Generation(options, torch.device("cpu")), list[int]()
    made = run.run(steps.append)
    assert all(one["seconds"].keys() == {"encode", "denoise", "decode"} for one in made)
    assert all(min(one["seconds"].values()) > 0 for one in made)
    return [one["file"] for one in made], len(steps)


def several(prompts: Path, folder: Path, jobs: list[dict[str, Any]]) -> list[Any]:
    """Each of the jobs into a folder of its own, in one world."""
    return [make(prompts, folder / str(place), **job) for place, job in enumerate(jobs)]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def alone(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    (found,) = run_ranks(make, 1, prompts, folder)
    assert len(found[0]) == len(ROWS) and found[1] == 7
    return folder


def pixels(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


def same_images(found: Path, wanted: Path) -> None:
    names = sorted(path.name for path in wanted.glob("*.png"))
    assert sorted(path.name for path in found.glob("*.png")) == names and len(names) == len(ROWS)
    for name in names:
        assert np.abs(pixels(found / name) - pixels(wanted / name)).max() <= 1, name


@pytest.mark.parametrize(
    ("num_ranks", "jobs"),
    [
        (2, [{"ring": 2}, {"guidance_ranks": 2}, {"replicas": 2}, {}]),
        (3, [{"ulysses": 3}]),
        (4, [{"replicas": 2, "ulysses": 2}, {"guidance_ranks": 2, "ring": 2}]),
    ],
)
def test_the_same_pixels_on_any_ranks(
    num_ranks: int, jobs: list[dict[str, Any]], prompts: Path, alone: Path, tmp_path: Path
) -> None:
    found = run_ranks(several, num_ranks, prompts, tmp_path, jobs)
    assert all([names for names, _ in one] == [names for names, _ in found[0]] for one in found)
    for place, job in enumerate(jobs):
        same_images(tmp_path / str(place), alone)
        steps = [one[place][1] for one in found]
        assert sum(steps) == 7 * num_ranks // job.get("replicas", 1)
        assert min(steps) > 0


def test_what_is_there_is_not_made_again(prompts: Path, alone: Path, tmp_path: Path) -> None:
    shutil.copytree(alone, tmp_path / "out")
    lost = sorted((tmp_path / "out").glob("*.png"))[1]
    lost.unlink()
    assert run_ranks(make, 2, prompts, tmp_path / "out") == [([lost.name], 2)] * 2
    same_images(tmp_path / "out", alone)
    assert run_ranks(make, 2, prompts, tmp_path / "out") == [([], 0)] * 2


def test_a_video_is_a_file(prompts: Path, tmp_path: Path) -> None:
    av: Any = pytest.importorskip("av")
    jobs: list[dict[str, Any]] = [{"model": "tiny-wan", "frames": 5}]
    files = run_ranks(several, 2, prompts, tmp_path, jobs)[0][0][0]
    folder = tmp_path / "0"
    with av.open(str(folder / files[0])) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert [frame.shape for frame in frames] == [(48, 80, 3)] * 5
    told = json.loads((folder / files[1]).with_suffix(".json").read_text())
    assert told["prompt"] == ROWS[1]["prompt"] and told["guidance"] == 3.0


def refusals(prompts: Path, folder: Path) -> list[str]:
    one, rank = folder / "one.jsonl", dist.get_rank()
    if rank == 0:
        one.write_text('{"prompt": "x", "steps": 1}', encoding="utf-8")
    dist.barrier()
    wrong: list[dict[str, Any]] = [
        {"frames": 5},
        {"width": 3},
        {"ulysses": 8},
        {"prompts": prompts if rank else one},
    ]
    given: list[dict[str, Any]] = [{"prompts": one, "out": folder} | job for job in wrong]
    return [raised_by(lambda job=job: make(**job))[1] for job in given]


def test_wrong_uses_are_refused_on_all_ranks(prompts: Path, tmp_path: Path) -> None:
    for said in run_ranks(refusals, 2, prompts, tmp_path):
        assert "this pipeline takes no num_frames, and frames is 5: leave it out" in said[0]
        assert "prompt 1: the pipeline fails with" in said[1]
        assert "ulysses_degree 8 on 2 ranks: the product must be 2" in said[2]
        assert "prompts" in said[3]
    assert not list(tmp_path.glob("*.png"))
