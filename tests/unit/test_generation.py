"""Prompts of `bascule generate`, its files, and what it refuses before any rank is launched."""

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bascule.errors import ConfigError
from bascule.generate.options import GenerateOptions, Prompt, read_prompts
from tests.helpers.cli import Console, run


def test_prompts_of_the_command_and_of_files(tmp_path: Path) -> None:
    options = GenerateOptions(prompt=("a", "b"), seed=5, width=64)
    found = read_prompts(options)
    assert [(one.prompt, one.seed) for one in found] == [("a", 5), ("b", 6)]
    assert {(one.width, one.height, one.steps) for one in found} == {(64, 256, 4)}
    again = Prompt(prompt="a", seed=5, width=64, height=256, steps=4)
    names = [one.name(0, options) for one in (*found, again)]
    names.append(found[0].name(0, GenerateOptions(prompt=("a",), model="tiny-wan")))
    assert names[0] == names[2] and len(set(names)) == 3
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\n  two words \n", encoding="utf-8")
    found = read_prompts(GenerateOptions(prompts=lines, model="tiny-wan"))
    texts = [("one", 0, 9), ("two words", 1, 9)]
    assert [(one.prompt, one.seed, one.frames) for one in found] == texts
    objects = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "x", "seed": 9, "guidance": 2.5, "steps": None}, {"prompt": "y"}]
    objects.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = read_prompts(GenerateOptions(prompts=objects, guidance=7.0, steps=3))
    assert [(one.seed, one.guidance, one.steps) for one in found] == [(9, 2.5, 3), (1, 7.0, 3)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: not valid JSON"),
        ("[]", 'line 1: give a JSON object with a "prompt" of text'),
        ('{"prompt": 3}', 'line 1: give a JSON object with a "prompt" of text'),
        ('{"prompt": "x", "size": 3}', "line 1: 'size' is not known: give some of prompt"),
        ('{"prompt": "x", "size": 3, "n": 1}', "'n', 'size' are not known: give some of prompt"),
        ('{"prompt": "x", "width": 0}', "line 1: --width 0: must be an integer, at least 1"),
        ('{"prompt": "x", "width": 6.5}', "line 1: --width 6.5: must be an integer"),
        ('{"prompt": "x", "seed": -1}', "line 1: --seed -1: must be an integer, at least 0"),
        ('{"prompt": "x", "guidance": NaN}', "line 1: --guidance nan: must be finite"),
        ('{"prompt": "x", "negative_prompt": 1}', "line 1: negative_prompt must be text"),
        ("", "has no prompt: give one a line"),
    ],
)
def test_bad_lines_are_refused(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ConfigError) as met:
        read_prompts(GenerateOptions(prompts=path))
    assert said in str(met.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either --prompt TEXT, once or more, or --prompts FILE"),
        (["--prompt", "x", "--prompts", "y"], "give either --prompt TEXT"),
        (["--prompts", "nowhere.txt"], "cannot read nowhere.txt"),
        (["--prompt", "x", "--model", "nowhere"], "give the folder of a pipeline of diffusers"),
        (["--prompt", "x", "--ring", "0"], "--ring 0: must be an integer, at least 1"),
        (["--prompt", "x", "--ring", "2", "--longest-ring", "2"], "--longest-ring: is for a mesh"),
        (["--prompt", "x", "--sparse", "1.5"], "--sparse 1.5: must be"),
        (["--prompt", "x", "--height", "-8"], "--height -8: must be an integer, at least 1"),
        (["--prompt", "x", "--guidance", "inf"], "--guidance inf: must be finite"),
        (["--prompt", "x", "--fps", "0"], "--fps 0: must be an integer, at least 1"),
        (["--prompt", "x", "--json", "no/where.json"], "--json no/where.json: cannot be written"),
    ],
)
def test_wrong_uses_are_one_sentence(arguments: list[str], said: str, capsys: Console) -> None:
    code, out, err = run(capsys, "generate", *arguments)
    assert (code, out) == (2, "")
    assert said in err and err.startswith("bascule: ") and err.count("\n") == 1


def test_a_pipeline_without_an_argument_refuses_what_needs_it() -> None:
    pytest.importorskip("torch")
    from bascule.generate.generating import arguments_of, is_guided

    names = "prompt", "width", "num_inference_steps", "guidance_scale"
    takes: dict[str, Any] = dict.fromkeys(names)
    prompt = Prompt(prompt="x", width=8, steps=2, guidance=3.0)
    assert arguments_of(prompt, takes) == dict(zip(names, ("x", 8, 2, 3.0), strict=True))
    for wrong, said in (
        (Prompt(prompt="x", frames=5), "num_frames, and frames is 5"),
        (Prompt(prompt="x", negative_prompt="y"), "negative_prompt, and negative_prompt is 'y'"),
    ):
        with pytest.raises(ConfigError, match=f"takes no {said}: leave it out"):
            arguments_of(wrong, takes)
    both = {**takes, "true_cfg_scale": 1.0, "negative_prompt": None}
    scaled = Prompt(prompt="x", negative_prompt="y", guidance=3.0)
    assert arguments_of(scaled, both)["true_cfg_scale"] == 3.0
    assert arguments_of(prompt, both)["guidance_scale"] == 3.0
    assert not is_guided(Prompt(prompt="x"), {**takes, "negative_prompt": None})  # of no scale


@pytest.mark.parametrize(
    ("pipeline", "guided", "plain"),
    [
        ("FluxPipeline", [(3.0, "y")], [(None, None), (3.0, None), (None, "y"), (1.0, "y")]),
        ("Flux2Pipeline", [], [(None, None), (3.0, None)]),
        ("FluxControlPipeline", [], [(None, None), (3.0, None)]),
        ("FluxFillPipeline", [], [(None, None), (3.0, None)]),
        ("QwenImagePipeline", [(None, "y"), (3.0, "")], [(None, None), (3.0, None), (1.0, "y")]),
        ("WanPipeline", [(None, None), (3.0, None), (None, "y")], [(1.0, None), (1.0, "y")]),
    ],
)
def test_guided_is_what_computes_two_branches(
    pipeline: str,
    guided: list[tuple[float | None, str | None]],
    plain: list[tuple[float | None, str | None]],
) -> None:
    diffusers: Any = pytest.importorskip("diffusers")
    from bascule.generate.generating import is_guided

    takes = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
    for is_so, cases in ((True, guided), (False, plain)):
        for scale, negative in cases:
            prompt = Prompt(prompt="x", guidance=scale, negative_prompt=negative)
            assert is_guided(prompt, takes) == is_so, (scale, negative)


def test_files_are_there_whole_or_not_at_all(tmp_path: Path) -> None:
    from bascule.generate.generating import write_media, write_record

    frames = [Image.fromarray(np.full((18, 21, 3), 60 * i, np.uint8)) for i in range(3)]
    write_media(tmp_path / "one.png", frames[1:2], 8)
    with Image.open(tmp_path / "one.png") as image:
        assert image.size == (21, 18) and image.getpixel((0, 0)) == (60, 60, 60)
    av: Any = pytest.importorskip("av")
    write_media(tmp_path / "clip.mp4", frames, 8)
    with av.open(str(tmp_path / "clip.mp4")) as file:
        found = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        assert float(file.streams.video[0].average_rate) == 8.0
    assert [frame.shape for frame in found] == [(18, 20, 3)] * 3
    assert [round(float(frame.mean()) / 60) for frame in found] == [0, 1, 2]
    write_record(tmp_path / "one.json", {"file": "one.png"})
    assert json.loads((tmp_path / "one.json").read_text()) == {"file": "one.png"}
    thin = Image.new("RGB", (1, 16))  # an error of PyAV alone
    wrong = [(tmp_path / "thin.mp4", thin)]
    for folder in (tmp_path / "nowhere", tmp_path / "one.png"):  # no folder; a file in its place
        wrong += [(folder / name, frames[0]) for name in ("new.png", "new.mp4")]
    for path, frame in wrong:
        with pytest.raises(ConfigError, match=rf"--out: .*{path.name} cannot be written: "):
            write_media(path, [frame], 8)
        if frame is not thin:
            with pytest.raises(ConfigError, match=r"--out: .*new.json cannot be written: "):
                write_record(path.with_suffix(".json"), {})
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == ["clip.mp4", "one.json", "one.png"]
