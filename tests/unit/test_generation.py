"""Prompts of `bascule generate`, its files, and what it refuses before any rank is launched."""

import inspect
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bascule.errors import ConfigError
from bascule.generate.options import (
    GenerateOptions,
    Lora,
    Prompt,
    names_of,
    read_prompts,
    variant_of,
)


def test_prompts_of_the_command_and_of_files(tmp_path: Path) -> None:
    options = GenerateOptions(prompt=("a", "b"), seed=5, width=64)
    found = read_prompts(options)
    assert [(one.prompt, one.seed) for one in found] == [("a", 5), ("b", 6)]
    assert {(one.width, one.height, one.steps) for one in found} == {(64, 256, 4)}
    again = Prompt(prompt="a", seed=5, width=64, height=256, steps=4)
    names = [names_of([one], options)[0] for one in (*found, again)]
    assert names[0] == names[2] != names[1]
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


def of_files(folder: Path, **files: bytes) -> str:
    """A folder of a pipeline with these files, by their names with __ for /."""
    for name, content in {"model_index.json": b"{}", **files}.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


def test_names_change_with_whatever_changes_the_files(tmp_path: Path) -> None:
    files = {"t__model.safetensors": b"w" * 10**6, "s__config.json": b"1", "out__x.json": b""}
    model = of_files(tmp_path / "m", **files)
    (Path(model) / "model_index.json").write_text('{"t": 1, "s": 2}')
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    prompt = Prompt(prompt="x", image=str(tmp_path / "a.png"))

    def name(prompt: Prompt = prompt, model: str = model, **options: Any) -> str:
        return names_of([prompt], GenerateOptions(prompt=("x",), model=model, **options))[0]

    first, names = name(), set[str]()
    changes: list[dict[str, Any]] = [{"fps": 30}, {"dtype": "float16"}, {"tiles": True}]
    changes += [{"wire": "int8"}, {"sparse": 0.5}, {"variant": "fp16"}, {"model": "tiny"}]
    names |= {name(**change) for change in changes}
    prompts = replace(prompt, steps=3), replace(prompt, seed=3), replace(prompt, image="")
    names |= {name(other) for other in prompts}
    assert name(ranks=3, timeout_s=9.0, out=tmp_path) == first and first not in names
    (Path(model) / "out" / "x.json").write_text("an output")
    assert len(names) == 10 and name() == first
    for file, content in (("s/config.json", b"2"), ("t/model.safetensors", b"v" * 10**6)):
        before = name()
        (Path(model) / file).write_bytes(content)  # of the same size
        names |= {before, name()}
    lora, before = tmp_path / "x.safetensors", name()
    lora.write_bytes(b"w" * 10**6)
    for choice in ((Lora(str(lora)),), (Lora(str(lora), 0.5),)):
        names |= {name(replace(prompt, lora=choice))}
    lora.write_bytes(b"v" * 10**6)
    names |= {before, name(replace(prompt, lora=(Lora(str(lora)),)))}
    names |= {name(replace(prompt, image=(prompt.images * 2)))}
    Image.new("RGB", (2, 2), (1, 1, 1)).save(tmp_path / "a.png")
    assert len(names | {name()}) == 18


@pytest.mark.parametrize(
    ("files", "asked", "name"),
    [
        (["t/model.safetensors"], None, None),
        (["t/model.fp16.safetensors", "u/model.fp16-00001-of-00002.safetensors"], None, "fp16"),
        (["t/diffusion_pytorch_model-00001-of-00002.fp16.bin", "u/model.bin"], None, "fp16"),
        (["t/model.safetensors", "t/model.fp16.safetensors"], None, None),
        (["t/model.safetensors", "t/model.fp16.safetensors"], "fp16", "fp16"),
        (["t/model.fp16.safetensors", "t/model.bf16.safetensors"], "bf16", "bf16"),
        (["t/model.fp16.safetensors", "t/model.bf16.safetensors"], None, "weights of bf16, fp16: "),
        (["t/model.fp16.safetensors"], "bf16", "--variant bf16: the variants of .* are fp16"),
        (["t/model.safetensors"], "fp16", "--variant fp16: .* are none: leave it out"),
    ],
)
def test_a_variant_is_the_only_one_or_given(
    files: list[str], asked: str | None, name: str | None, tmp_path: Path
) -> None:
    model = of_files(tmp_path, **dict.fromkeys(files, b""))
    if name in (None, "fp16", "bf16"):
        assert variant_of(model, asked) == name
        return
    with pytest.raises(ConfigError, match=name):
        GenerateOptions(prompt=("x",), model=model, variant=asked).check_source()


def test_loras_of_prompts(tmp_path: Path) -> None:
    for file in ("a.safetensors", "deep/b.safetensors", "two/c.safetensors", "two/d.safetensors"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    path, first = tmp_path / "prompts.jsonl", str(tmp_path / "a.safetensors")
    rows: list[dict[str, Any]] = [{"prompt": "x"}, {"prompt": "y", "lora": []}]
    rows += [{"prompt": "z", "lora": [{"name": "deep", "scale": -2}, "a.safetensors:0.5"]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = GenerateOptions(prompts=path, lora=(f"{first}:.75",))
    deep = str(tmp_path / "deep")
    assert [one.lora for one in read_prompts(options)] == [
        (Lora(first, 0.75),),
        (),
        (Lora(deep, -2.0), Lora(first, 0.5)),
    ]
    for lora, said in (
        ([{"name": "none"}], "line 1: .*none: there is no such file"),
        ([{"name": "none.safetensors"}], "none.safetensors: there is no such file: give the path"),
        ([{"name": "two"}], "two has c.safetensors, d.safetensors: give the path of one of them"),
        ([{"name": "deep"}, "deep:2"], "line 1: lora: give each adapter once"),
        ([{"scale": 1}], "line 1: lora: name is missing: give text"),
        ([{"name": "deep", "path": "x"}], 'lora: give {"name": NAME, "scale": 0.8}, not {\'n'),
        ([{"name": "deep", "scale": "x"}], "lora scale is 'x'; it must be finite, at least -1,000"),
        ([{"name": "deep", "scale": 1e9}], "it must be finite, at least -1,000 and at most 1,000"),
        (3, 'lora: give {"name": NAME, "scale": 0.8}, not 3'),
    ):
        path.write_text(json.dumps({"prompt": "x", "lora": lora}))
        with pytest.raises(ConfigError, match=said):
            read_prompts(options)


def test_pictures_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    Image.new("RGB", (3, 2), (200, 0, 0)).save(tmp_path / "deep" / "red.png")
    (tmp_path / "deep" / "cut.png").write_bytes((tmp_path / "deep" / "red.png").read_bytes()[:50])
    path = tmp_path / "deep" / "prompts.jsonl"
    rows = [{"prompt": "x", "image": "red.png"}, {"prompt": "y"}, {"prompt": "z", "image": ""}]
    path.write_text("\n".join(map(json.dumps, rows)))
    other = str(tmp_path / "deep" / "red.png")
    prompts = read_prompts(GenerateOptions(prompts=path))
    assert [one.image for one in prompts] == [str(path.parent / "red.png"), None, ""]
    prompts = read_prompts(GenerateOptions(prompts=path, image=(other,)))
    assert [one.image for one in prompts] == [str(path.parent / "red.png"), other, ""]
    prompts = read_prompts(GenerateOptions(prompt=("x",), image=(other, other)))
    assert [one.images for one in prompts] == [(other, other)]
    path.write_text(json.dumps({"prompt": "x", "image": ["red.png", "red.png"]}))
    (two,) = read_prompts(GenerateOptions(prompts=path))
    assert two.images == (other, other)
    for image, said in (
        ("no.png", "line 1: image .*no.png: cannot be read as a picture: No such file"),
        ("prompts.jsonl", "line 1: image .*: cannot be read as a picture: cannot identify"),
        ("cut.png", "line 1: image .*cut.png: cannot be read as a picture: "),
        ([3], "line 1: image must be the path of a picture, or a list of paths"),
        (["red.png", "no.png"], "line 1: image .*no.png: cannot be read as a picture: No such"),
    ):
        path.write_text(json.dumps({"prompt": "x", "image": image}))
        with pytest.raises(ConfigError, match=said):
            read_prompts(GenerateOptions(prompts=path))


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
        ("", "has no prompt: give one per line"),
    ],
)
def test_bad_lines_are_refused(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ConfigError) as met:
        read_prompts(GenerateOptions(prompts=path))
    assert said in str(met.value)


def test_a_pipeline_without_an_argument_refuses_what_needs_it() -> None:
    pytest.importorskip("torch")
    from bascule.generate.generating import arguments_of, is_guided

    names = "prompt", "width", "num_inference_steps", "guidance_scale"
    takes: dict[str, Any] = dict.fromkeys(names)
    prompt = Prompt(prompt="x", width=8, steps=2, guidance=3.0)
    assert arguments_of(prompt, takes) == dict(zip(names, ("x", 8, 2, 3.0), strict=True))
    for wrong, said in (
        (Prompt(prompt="x", frames=5), "frames is 5, and this pipeline takes no num_frames"),
        (Prompt(prompt="x", negative_prompt="y"), "negative_prompt is 'y', and .* takes no neg"),
    ):
        with pytest.raises(ConfigError, match=f"^{said}.*: leave it out"):
            arguments_of(wrong, takes)
    both = {**takes, "true_cfg_scale": 1.0, "negative_prompt": None}
    scaled = Prompt(prompt="x", negative_prompt="y", guidance=3.0)
    assert arguments_of(scaled, both)["true_cfg_scale"] == 3.0
    assert arguments_of(prompt, both)["guidance_scale"] == 3.0
    assert not is_guided(Prompt(prompt="x"), {**takes, "negative_prompt": None})  # of no scale


FLUXES = "2", "Control", "Fill"
Guidance = tuple[float | None, str | None]


@pytest.mark.parametrize(
    ("pipeline", "guided", "plain"),
    [
        ("FluxPipeline", [(3.0, "y")], [(None, None), (3.0, None), (None, "y"), (1.0, "y")]),
        *((f"Flux{kind}Pipeline", [], [(None, None), (3.0, None)]) for kind in FLUXES),
        ("QwenImagePipeline", [(None, "y"), (3.0, "")], [(None, None), (3.0, None), (1.0, "y")]),
        ("WanPipeline", [(None, None), (3.0, None), (None, "y")], [(1.0, None), (1.0, "y")]),
    ],
)
def test_guided_is_what_computes_two_branches(
    pipeline: str, guided: list[Guidance], plain: list[Guidance]
) -> None:
    diffusers: Any = pytest.importorskip("diffusers")
    from bascule.generate.generating import is_guided

    takes = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
    for is_so, cases in ((True, guided), (False, plain)):
        for scale, negative in cases:
            prompt = Prompt(prompt="x", guidance=scale, negative_prompt=negative)
            assert is_guided(prompt, takes) == is_so, (scale, negative)


def test_what_a_pipeline_would_change_is_refused_before_the_work() -> None:
    diffusers: Any = pytest.importorskip("diffusers")
    transformers: Any = pytest.importorskip("transformers")
    from bascule.generate import tiny
    from bascule.generate.generating import arguments_of, check_prompt

    flux, wan = (tiny.pipeline(diffusers, transformers, x) for x in (tiny.TINY, tiny.TINY_WAN))
    change = diffusers.FluxImg2ImgPipeline.from_pipe(flux)
    kontext = diffusers.FluxKontextPipeline.from_pipe(flux)

    def check(pipeline: Any, num_pictures: int | None = None, **settings: Any) -> dict[str, Any]:
        takes = inspect.signature(pipeline.__call__).parameters
        prompt = Prompt(prompt="x", **settings)
        check_prompt(pipeline, prompt, takes, num_pictures=num_pictures)
        return arguments_of(prompt, takes)

    check(flux)
    check(flux, width=48, height=16)
    check(wan, width=48, height=32, frames=9)
    check(change, 1, width=48)
    assert check(kontext, 1, width=48, height=32)["max_area"] == 48 * 32
    check(kontext, 0, width=48, height=32)
    for pipeline, num_pictures, settings, said in (
        (flux, None, {"width": 8, "height": 8}, "width is 8, and .* makes it 16: give 16"),
        (flux, None, {"width": 16, "height": 1}, "height is 1, and .* makes it 16: give 16"),
        (flux, None, {"width": 257}, "^width is 257, and this pipeline makes it 256: give 256"),
        (wan, None, {"width": 24, "height": 16}, "refuses the prompt: .*divisible by 16"),
        (wan, None, {"frames": 6}, "frames is 6, and this pipeline makes it 5: give 5"),
        (flux, 1, {}, "^image: a FluxPipeline takes none: leave it out"),
        (change, None, {"width": 48}, "Img2ImgPipeline makes outputs from a picture: give one$"),
        (change, 0, {"width": 48}, "^image: a .* makes outputs from a picture: give one$"),
        (kontext, None, {}, "from a picture: give one, or an empty one to do without"),
        (kontext, 2, {}, "^image: a FluxKontextPipeline takes one picture, not 2: give one"),
        (kontext, 1, {"width": 48}, "would scale both sides: give width and height, or neither"),
        (flux, None, {"image": "x.png"}, "image is 'x.png', and .* takes no image: leave it out"),
    ):
        with pytest.raises(ConfigError, match=said):
            check(pipeline, num_pictures, **settings)


def test_sound_is_written_beside_the_frames(tmp_path: Path) -> None:
    """As LTX-2 and Kandinsky 6 return it, after its way between ranks."""
    torch: Any = pytest.importorskip("torch")
    av: Any = pytest.importorskip("av")
    pytest.importorskip("diffusers")
    from bascule.generate.generating import arguments_of, media_of, write_media
    from bascule.serve.post import pack, unpack

    config = SimpleNamespace(output_sampling_rate=24000)
    ltx = SimpleNamespace(vocoder=SimpleNamespace(config=config), audio_sampling_rate=16000)
    kandinsky = SimpleNamespace(vocoder=SimpleNamespace(config=None), audio_sample_rate=32000)
    frames = [Image.new("RGB", (16, 16), (60 * k,) * 3) for k in range(3)]
    turns = torch.arange(12000) / 24000 * 2 * torch.pi
    stereo = torch.stack([torch.sin(440 * turns) / 2, torch.zeros(12000)])[None]
    mono = 3 * torch.sin(440 * turns * 24000 / 32000)[None]  # louder than a file can be
    path = tmp_path / "clip.mp4"
    for pipeline, waves, rate, channels in (
        (ltx, stereo.bfloat16(), 24000, 2),
        (kandinsky, mono, 32000, 1),
    ):
        output = unpack(pack([[frames], waves]), torch.device("cpu"))
        write_media(path, *media_of(pipeline, output, is_video=True)[:1], 6)
        with av.open(str(path)) as file:
            assert not file.streams.audio
        made, sound = media_of(pipeline, output, is_video=True)
        write_media(path, made, 6, sound)
        with av.open(str(path)) as file:
            assert len(list(file.decode(video=0))) == 3
        with av.open(str(path)) as file:
            audio = file.streams.audio[0]
            assert (audio.codec_context.name, audio.rate, audio.channels) == ("aac", rate, channels)
            heard = np.concatenate([part.to_ndarray() for part in file.decode(audio=0)], axis=1)
        assert abs(heard.shape[1] - 12000) <= 2048  # AAC has frames of 1,024 samples
        loudest = np.abs(np.fft.rfft(heard[0])).argmax() * rate / heard.shape[1]
        assert abs(loudest - 440) < 5
        peak = np.abs(heard[0, 2000:-2000]).max()
        assert 0.4 < peak < (0.6 if channels == 2 else 1.3)
        assert channels == 1 or np.abs(heard[1]).max() < 0.01
    silent = unpack(pack([[frames], None]), torch.device("cpu"))
    assert media_of(kandinsky, silent, is_video=True)[1] is None
    assert media_of(SimpleNamespace(), frames, is_video=False) == (frames, None)
    for waves, said in (
        (torch.full((1, 2, 99), float("nan")), "its sound has NaN"),
        (torch.zeros(1, 3, 99), "its sound has 3 channels: bascule writes one or two"),
    ):
        with pytest.raises(ConfigError, match=said):
            write_media(path, frames, 6, media_of(ltx, ([frames], waves), is_video=True)[1])
    prompt = Prompt(prompt="x", fps=24)  # a pipeline that knows the rate makes as much sound
    takes = {"prompt": None, "frame_rate": None}
    assert arguments_of(prompt, takes) == {"prompt": "x", "frame_rate": 24.0}
    assert arguments_of(prompt, {"prompt": None}) == {"prompt": "x"}


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
        with pytest.raises(ConfigError, match=rf"^{path.name} cannot be written: ") as error:
            write_media(path, [frame], 8)
        assert str(tmp_path) not in str(error.value)  # clients of a server read it
        if frame is not thin:
            with pytest.raises(ConfigError, match=r"^new\.json cannot be written: "):
                write_record(path.with_suffix(".json"), {})
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == ["clip.mp4", "one.json", "one.png"]
