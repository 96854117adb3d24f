"""`bascule generate`: the same pixels on any ranks, each output once, and the rest gone on with."""

import json
import os
import shutil
import signal
import time
from collections import Counter
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.elastic.multiprocessing.api import SignalException

from bascule.cli import launch
from bascule.cli.launch import stopping_quietly
from bascule.comm.groups import member_of, resolve, set_timeout
from bascule.generate.options import GenerateOptions, names_of, read_prompts
from tests.helpers.cli import run as run_command
from tests.helpers.loras import save_lora
from tests.helpers.ranks import raised_by, run_ranks, run_to_the_end
from tests.helpers.serving import Restless

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

Settings = dict[str, Any]
ROWS: list[Settings] = [
    {"prompt": "a boat", "width": 80, "height": 48, "steps": 2},
    {"prompt": "two boats on a lake", "negative_prompt": "fog", "guidance": 3.0, "steps": 2},
    {"prompt": "", "seed": 11, "width": 48, "height": 80, "steps": 3},
]


def make(
    prompts: Path, out: Path, *, restless: int | None = None, **settings: Any
) -> tuple[list[str], list[int]]:
    """What was made, and the steps that each rank took, both as rank 0 knows them."""
    from bascule.generate import generation

    torch.set_num_threads(1)
    chosen: Settings = {"width": 64, "height": 64} | settings
    options = GenerateOptions(prompts=prompts, out=out, **chosen)
    run, steps = generation.Generation(options, torch.device("cpu")), Counter[int]()
    policy = generation.Balanced if restless is None else partial(Restless, restless)
    with mock.patch.object(generation, "Balanced", policy):
        made = run.run(lambda _, ranks: steps.update(ranks))
    assert all(one["seconds"].keys() == {"encode", "denoise", "decode"} for one in made)
    assert all(min(one["seconds"].values()) > 0 for one in made)
    return [one["file"] for one in made], [steps[rank] for rank in range(dist.get_world_size())]


def several(prompts: Path, folder: Path, jobs: list[Settings]) -> list[Any]:
    """Each of the jobs into a folder of its own, in one world."""
    return [make(prompts, folder / str(place), **job) for place, job in enumerate(jobs)]


def loud(prompts: Path, out: Path) -> None:
    """Make videos by a pipeline that returns half a second of sound, too."""
    from bascule.generate import tiny

    quiet = tiny.pipeline

    def pipeline(*arguments: Any) -> Any:
        made = quiet(*arguments)
        call = type(made).__call__

        @wraps(call)
        def speak(self: Any, *args: Any, **kwargs: Any) -> Any:
            return *call(self, *args, **kwargs), torch.ones(1, 1, 8000)

        made.__class__ = type("Loud", (type(made),), {"__call__": speak})
        made.audio_sample_rate = 16000
        return made

    with mock.patch.object(tiny, "pipeline", pipeline):
        make(prompts, out, model="tiny-wan", frames=5)


def written(folder: Path, *rows: Settings) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("prompts"), *ROWS)


@pytest.fixture(scope="module")
def alone(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    (found,) = run_ranks(make, 1, prompts, folder)
    assert len(found[0]) == len(ROWS) and found[1] == [7]
    return folder


def pixels(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


def images(folder: Path) -> list[Any]:
    """Pixels of all images in a folder, in the order of their paths."""
    return [pixels(path) for path in sorted(folder.glob("**/*.png"))]


def same_images(found: Path, wanted: Path, num: int = len(ROWS)) -> None:
    names = sorted(path.name for path in wanted.glob("*.png"))
    assert sorted(path.name for path in found.glob("*.png")) == names and len(names) == num
    for name in names:
        assert np.abs(pixels(found / name) - pixels(wanted / name)).max() <= 1, name


@pytest.mark.parametrize(
    ("num_ranks", "jobs"),
    [
        (2, [{"ring": 2}, {"guidance_ranks": 2, "replicas": 1}, {"replicas": 2}, {}]),
        pytest.param(3, [{"ulysses": 3}], marks=pytest.mark.stress),
        pytest.param(
            *(4, [{"replicas": 2, "ulysses": 2}, {"guidance_ranks": 2, "ring": 2}]),
            marks=pytest.mark.stress,
        ),
    ],
)
def test_the_same_pixels_on_any_ranks(
    num_ranks: int, jobs: list[Settings], prompts: Path, alone: Path, tmp_path: Path
) -> None:
    found = run_ranks(several, num_ranks, prompts, tmp_path, jobs)[0]
    for place, (job, (names, steps)) in enumerate(zip(jobs, found, strict=True)):
        same_images(tmp_path / str(place), alone)
        assert len(names) == len(ROWS) and min(steps) > 0
        if job:
            assert sum(steps) == 7 * num_ranks // job.get("replicas", 1)
        else:  # a step is taken by one rank at least, and by all at most
            assert 7 <= sum(steps) <= 7 * num_ranks


MIXED: list[Settings] = [
    {"prompt": f"boat {k}", "width": side, "height": side, "steps": steps}
    for k, (side, steps) in enumerate([(128, 5), (32, 2), (64, 3), (32, 6), (96, 3), (48, 1)])
]
RESTLESS: list[Settings] = [
    {},
    {"negative_prompt": "fog", "guidance": 3.0, "tiles": True},  # of all: two guidance groups
    {"sparse": 0.3},
]


@pytest.mark.parametrize(
    ("num_ranks", "kinds"),
    [(2, RESTLESS[1:]), *(pytest.param(num, RESTLESS, marks=pytest.mark.stress) for num in (2, 4))],
)
def test_the_same_pixels_whatever_the_scheduler_does(
    num_ranks: int, kinds: list[Settings], tmp_path: Path
) -> None:
    save_lora(tmp_path / "style", 1, text=True)
    style = {"lora": [{"name": "style", "scale": 0.5}]}
    mixed = written(tmp_path, *(row | style if k % 2 else row for k, row in enumerate(MIXED)))
    run_ranks(several, 1, mixed, tmp_path / "alone", kinds)
    jobs = [job | {"restless": seed} for seed, job in enumerate(kinds)]
    found = run_ranks(several, num_ranks, mixed, tmp_path / "moved", jobs)[0]
    for place in range(len(jobs)):
        same_images(tmp_path / "moved" / str(place), tmp_path / "alone" / str(place), len(MIXED))
        assert sum(found[place][1]) > 20  # some steps are taken by several ranks


def shares(prompts: Path, out: Path, factor: int, **settings: Any) -> list[float]:
    """Each rank's share of all work, where a step takes as long as its image is large.

    It takes `factor` times as long on the last rank. A step of several ranks is shared evenly.
    """
    from bascule.generate.generation import Generation

    torch.set_num_threads(1)
    options = GenerateOptions(prompts=prompts, out=out, **settings)
    run, size = Generation(options, torch.device("cpu")), dist.get_world_size()
    model: Any = run._engine._splits[0].model
    forward, is_last = model.norm_out.forward, dist.get_rank() == size - 1

    def slow(hidden: Any, *args: Any) -> Any:
        time.sleep(hidden.shape[1] * (factor if is_last else 1) * 15e-3)
        return forward(hidden, *args)

    model.norm_out.forward = slow
    work = [0.0] * size

    def on_step(place: int, ranks: range) -> None:
        for rank in ranks:
            work[rank] += (run.prompts[place].width or 0) ** 2 / len(ranks)

    run.run(on_step)
    return [one / max(sum(work), 1) for one in work]


@pytest.mark.parametrize(
    ("settings", "factor", "wanted"),
    [
        pytest.param({"replicas": 2}, 1, [1 / 2, 1 / 2], marks=pytest.mark.stress),
        ({"replicas": 2}, 3, [3 / 4, 1 / 4]),
        ({}, 1, [1 / 2, 1 / 2]),
    ],
)
def test_ranks_take_work_as_they_can(
    settings: Settings, factor: int, wanted: list[float], tmp_path: Path
) -> None:
    rows = [
        {"prompt": "boat", "width": side, "height": side, "steps": steps}
        for side, steps in [(96, 2), (80, 3), (64, 4), (48, 6), (48, 2), (32, 3)] * 2
    ]
    arguments = written(tmp_path, *rows), tmp_path / "out", factor
    found = run_ranks(partial(shares, **settings), 2, *arguments)[0]
    assert found == pytest.approx(wanted, abs=0.13)  # the share of the largest prompt


@pytest.mark.stress  # daily: below, without inductor
def test_sparse_attention_is_compiled(tmp_path: Path) -> None:
    prompts, job = written(tmp_path, {"prompt": "boat", "steps": 2}), {"sparse": 0.3}
    for jobs, out in ([job], "eager"), ([job | {"compile": True}], "compiled"):
        run_ranks(several, 2, prompts, tmp_path / out, jobs)
    same_images(tmp_path / "compiled" / "0", tmp_path / "eager" / "0", 1)


def save_tiny(folder: Path, **sizes: int) -> None:
    """Save the tiny pipeline, or with a transformer of other sizes."""
    from bascule.generate.generating import load_pipeline

    pipeline = load_pipeline("tiny", torch.float32, torch.device("cpu"))
    if sizes:
        kind, config = type(pipeline.transformer), pipeline.transformer.config
        pipeline.transformer = kind.from_config({**config, **sizes})
    pipeline.save_pretrained(folder)


def of_few_blocks(prompts: Path, folder: Path, job: Settings) -> None:
    """Save a pipeline that compiles soon, and make what it makes alone."""
    save_tiny(folder / "model", num_layers=1, num_single_layers=0)
    make(prompts, folder / "alone", model=str(folder / "model"), **job)


def made_in_a_graph(
    prompts: Path, out: Path, model: str, job: Settings
) -> tuple[list[str], list[int]]:
    """As `make`, compiled without inductor, which takes long."""
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return make(prompts, out, model=model, compile=True, **job)


@pytest.mark.nightly
@pytest.mark.parametrize("job", [{"sparse": 0.3}, pytest.param({}, marks=pytest.mark.stress)])
def test_prompts_of_compiled_models_stay(job: Settings, tmp_path: Path) -> None:
    prompts, out = written(tmp_path, ROWS[0]), tmp_path / "out"
    run_ranks(of_few_blocks, 1, prompts, tmp_path, job)
    _, steps = run_ranks(made_in_a_graph, 2, prompts, out, str(tmp_path / "model"), job)[0]
    assert steps == [2, 2]  # it has as many ranks as there are
    same_images(out, tmp_path / "alone", 1)


@pytest.mark.nightly
def test_a_saved_folder_gives_the_pixels_of_one_process(
    prompts: Path, alone: Path, tmp_path: Path
) -> None:
    folder, out = tmp_path / "saved", tmp_path / "one" / "0"
    run_ranks(save_tiny, 1, folder)
    jobs: list[Settings] = [{"model": str(folder)}, {"model": str(folder), "ring": 2}]
    ((one,),) = run_ranks(several, 1, prompts, out.parent, jobs[:1])
    found = run_ranks(several, 2, prompts, tmp_path, jobs)
    for place in range(len(jobs)):
        assert found[0][place][0] == one[0]
        same_images(tmp_path / str(place), out)
    for name, of_tiny in zip(sorted(one[0]), images(alone), strict=True):  # of the same weights
        assert np.abs(pixels(out / name) - of_tiny).max() <= 1, name


@pytest.mark.nightly
def test_rows_of_8_bits_change_pixels_a_little(prompts: Path, alone: Path, tmp_path: Path) -> None:
    jobs: list[Settings] = [{"wire": "int8", "ring": 2}, {"wire": "e4m3", "ulysses": 2}]
    run_ranks(several, 2, prompts, tmp_path, jobs)
    wanted = images(alone)
    for place in range(len(jobs)):
        pairs = zip(images(tmp_path / str(place)), wanted, strict=True)
        both = [np.abs(a - b) for a, b in pairs]
        assert 0 < max(one.max() for one in both) < 32 and max(one.mean() for one in both) < 2


@pytest.mark.nightly
def test_sparse_attention_gives_the_same_pixels_on_any_ranks(tmp_path: Path) -> None:
    row = {"prompt": "a large boat", "width": 384, "height": 256, "steps": 2}
    prompts = written(tmp_path, row)
    jobs: list[Settings] = [{"sparse": 0.3}, {"sparse": 0.3, "longest_ring": 1}]
    guided: Settings = {"sparse": 0.3, "negative_prompt": "fog", "guidance": 3.0}
    run_ranks(several, 1, prompts, tmp_path / "one", [*jobs, guided, {}])
    jobs = [{"sparse": 0.3, "ring": 2}, jobs[1], guided | {"guidance_ranks": 2}]
    run_ranks(several, 2, prompts, tmp_path / "two", jobs)
    *sparse, whole = images(tmp_path / "one")
    for a, b in zip(sparse, images(tmp_path / "two"), strict=True):
        assert np.abs(a - b).max() <= 1
    assert np.abs(sparse[0] - whole).max() > 1  # it leaves blocks out


@pytest.mark.nightly
def test_what_is_there_is_not_made_again(prompts: Path, alone: Path, tmp_path: Path) -> None:
    shutil.copytree(alone, tmp_path / "out")
    lost = sorted((tmp_path / "out").glob("*.png"))[1]
    lost.unlink()
    ((files, steps), _) = run_ranks(make, 2, prompts, tmp_path / "out")
    assert files == [lost.name] and 2 <= sum(steps) <= 4
    same_images(tmp_path / "out", alone)
    assert run_ranks(make, 2, prompts, tmp_path / "out") == [([], [0, 0])] * 2


@pytest.mark.nightly
def test_a_video_is_a_file(prompts: Path, tmp_path: Path) -> None:
    av: Any = pytest.importorskip("av")
    jobs: list[Settings] = [{"model": "tiny-wan", "frames": 5}]
    files = run_ranks(several, 2, prompts, tmp_path, jobs)[0][0][0]
    folder = tmp_path / "0"
    with av.open(str(folder / files[0])) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert [frame.shape for frame in frames] == [(48, 80, 3)] * 5
    told = json.loads((folder / files[1]).with_suffix(".json").read_text())
    assert told["prompt"] == ROWS[1]["prompt"] and told["guidance"] == 3.0
    run_ranks(loud, 2, prompts, tmp_path / "loud")
    for path in (tmp_path / "loud").glob("*.mp4"):
        with av.open(str(path)) as file:
            assert len(list(file.decode(video=0))) == 5
        with av.open(str(path)) as file:
            assert abs(sum(part.samples for part in file.decode(audio=0)) - 8000) <= 2048
    assert len(list((tmp_path / "loud").glob("*.mp4"))) == len(ROWS)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_one_sentence_that_says_how_to_go_on(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_: object) -> None:
        raise SignalException("a signal", signal.Signals(number))

    with mock.patch.object(launch.run, "main", stopped):
        arguments = "--ranks", "2", "--prompt", "a boat", "--out", str(tmp_path)
        code, _, error = run_command(capsys, "generate", *arguments)
    assert code == 1 and "Traceback" not in error, error
    assert "stopped by a signal, and so were its ranks; finished outputs are in" in error


@pytest.mark.nightly
def test_no_rank_starts_where_nothing_is_left_to_make(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (name,) = names_of(read_prompts(GenerateOptions(prompt=("x",))), GenerateOptions())
    (tmp_path / f"{name}.png").touch()
    with mock.patch.object(launch.run, "main", side_effect=AssertionError):
        code, out, _ = run_command(capsys, "generate", "--prompt", "x", "--out", str(tmp_path))
    assert code == 0 and f"nothing is left to make in {tmp_path}" in " ".join(out.split())


def stop_quietly(number: int) -> None:
    with stopping_quietly():
        os.kill(os.getpid(), number)
        time.sleep(60.0)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_is_stopped_ends_without_a_word(number: int) -> None:
    (rank,) = run_to_the_end(stop_quietly, 1, number)
    assert rank.exit_code == 130, rank


def refusals(prompts: Path, folder: Path) -> dict[str, tuple[list[str], str]]:
    """How wrong uses end, by the words that say why."""
    from bascule.generate.generation import Generation

    one, rank = folder / "one.jsonl", dist.get_rank()
    if rank == 0:
        one.write_text('{"prompt": "x", "steps": 1}', encoding="utf-8")
    dist.barrier()
    wrong: dict[str, Settings] = {
        "frames is 5, and this pipeline takes no num_frames: leave it out": {"frames": 5},
        "width is 3, and this pipeline makes it 16: give 16, or another multiple": {"width": 3},
        "Ulysses 8 on 2 ranks: the product of degrees must be 2": {"ulysses": 8},
        "disagree on prompts": {"prompts": prompts if rank else one},
        "width is 100, and this pipeline makes it 96: give 96": {"width": 100, "height": 64},
        "rank 0 of group 'world': --out ": {"out": prompts, "replicas": 2},  # a file
        "prompts.jsonl/below: cannot be written": {"out": prompts / "below", "replicas": 2},
        "--out /proc: cannot be written": {"out": Path("/proc"), "replicas": 2},
        "rank 0 of group 'world': --out": {"out": folder / "a" if rank else prompts, "replicas": 2},
    }
    ends = {
        words: raised_by(lambda job=job: make(**({"prompts": one, "out": folder} | job)))
        for words, job in wrong.items()
    }
    with mock.patch(f"{VAE}.enable_tiling", mock.Mock(side_effect=NotImplementedError)):
        ends["--tiles: this pipeline has no VAE that can tile: leave it out"] = raised_by(
            make, one, folder, tiles=True
        )
    for words, sides in {  # before anything is computed, or in the pipeline: no folder is left
        "width is 33, and this pipeline makes it 32: give 32": {"width": 33},
        "the pipeline fails with ValueError: no encoder": {},
    }.items():
        with mock.patch(
            "diffusers.FluxPipeline.encode_prompt", side_effect=ValueError("no encoder")
        ):
            ends[words] = raised_by(make, one, folder / "new", **sides)
        assert rank or not (folder / "new").exists()  # the first one makes it
    assert not list(folder.glob("*.png"))
    options = GenerateOptions(prompts=prompts, out=folder, replicas=2, width=64, height=64)
    run = Generation(options, torch.device("cpu"))
    if rank == 0:  # something is in the way of the record of an output
        (folder / f".{Path(run.names[1]).stem}.json").mkdir()
    ends[".json cannot be written: Is a directory"] = raised_by(run.run, lambda *_: None)
    return ends


VAE = "diffusers.models.autoencoders.autoencoder_kl.AutoencoderKL"


def test_wrong_uses_are_refused_on_all_ranks(prompts: Path, tmp_path: Path) -> None:
    for ends in run_ranks(refusals, 2, prompts, tmp_path):
        for words, (names, text) in ends.items():
            assert words in text and "\n" not in text, (words, text)
            assert "ConfigError" in names or "disagree" in words, names


def slow(folder: Path, kind: str) -> Any:
    """Two replicas, the second of which takes far longer than a collective may, or does not end."""
    from bascule.generate.generation import Generation

    torch.set_num_threads(1)
    options = GenerateOptions(
        prompt=("a", "b"), out=folder, replicas=2, width=64, height=64, steps=1, timeout_s=6.0
    )
    run = Generation(options, torch.device("cpu"))
    set_timeout(member_of(resolve(None), "world"), 2.0)
    model: Any = run._engine._splits[0].model
    forward = model.proj_out.forward

    def strike(*args: Any, **kwargs: Any) -> Any:
        time.sleep(4.0 * (kind != "goes on"))
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "failed":
            raise ValueError("out of luck")
        return forward(*args, **kwargs)

    if dist.get_rank() == 1:
        model.proj_out.forward = strike
    if kind in ("slow", "goes on"):
        return [one["file"] for one in run.run(lambda *_: None)]
    return raised_by(run.run, lambda *_: None)


@pytest.mark.nightly
def test_a_slow_replica_is_waited_for(tmp_path: Path) -> None:
    assert len(run_ranks(slow, 2, tmp_path, "slow")[0]) == 2


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["killed", "failed"])
def test_a_replica_that_is_gone_ends_the_others(kind: str, tmp_path: Path) -> None:
    survivor, victim = run_to_the_end(slow, 2, tmp_path, kind)
    assert survivor.error is None, survivor.error
    names, text = survivor.value
    if kind == "killed":
        assert victim.exit_code == -signal.SIGKILL
        assert "no sign of life from rank 1" in text and "CommError" in names
        assert len(run_ranks(slow, 2, tmp_path, "goes on")[0]) < 2  # the first rank's is there
        assert len(list(tmp_path.glob("*.png"))) == 2
    else:
        assert "the pipeline fails with ValueError: out of luck" in text, text
        assert "ConfigError" in names and text.startswith("prompt ")
        assert text in victim.value[1] and "RemoteConfigError" in victim.value[0]
