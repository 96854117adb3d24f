"""Load pipelines, turn prompts into arguments of their calls, and write outputs to files."""

import inspect
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from bascule.checks import shown
from bascule.errors import ConfigError
from bascule.generate import tiny
from bascule.generate.options import IMAGE, Prompt, read_picture, variant_of
from bascule.quantities import seconds
from bascule.workload.tables import load_av

_ARGUMENTS = {"frames": "num_frames", "steps": "num_inference_steps"}  # by field of a `Prompt`
_FROM_PICTURES = re.compile("Img2Img|I2I|I2V|ImageToVideo|Image2Video|Edit|Inpaint|Refiner")
# Pipelines for which a list is one set of pictures; for others it is a batch, or wrong.
_SEVERAL = re.compile(
    "(BriaFibo2|BriaFiboEdit|Flux2|Flux2Klein|Flux2KleinKV|GlmImage|QwenImage21|QwenImageEditPlus"
    "|ZImageOmni)Pipeline"
)
_FRAME_FACTORS = "vae_scale_factor_temporal", "vae_temporal_compression_ratio"
_log = logging.getLogger(__name__)


class Sound(NamedTuple):
    """Sound of a video."""

    samples: NDArray[np.float32]  # (channels, samples), from -1 to 1
    rate: int  # samples per second


def load_pipeline(
    model: str, dtype: torch.dtype, device: torch.device, variant: str | None = None
) -> Any:
    """Load a pipeline from a local folder, or make a tiny one with random weights."""

    def load(diffusers: Any, transformers: Any) -> Any:
        transformers.logging.set_verbosity_error()  # advice to install unused packages
        if model in (tiny.TINY, tiny.TINY_WAN):
            made = tiny.pipeline(diffusers, transformers, model)
            return made if dtype == torch.float32 else made.to(dtype)  # diffusers warns of `to`
        settings: Any = {"torch_dtype": dtype, "variant": variant_of(model, variant)}
        return diffusers.DiffusionPipeline.from_pretrained(model, local_files_only=True, **settings)

    begin_s = time.monotonic()
    _log.info("loading %s ..", model)
    pipeline = tiny.load(f"--model {model}", load, "diffusers", "transformers").to(device)
    _log.info("loaded %s in %s", model, seconds(time.monotonic() - begin_s))
    return pipeline


def sound_rate(pipeline: Any) -> int | None:
    """Return the samples per second of a pipeline's sound; None if the pipeline makes none."""
    vocoder = getattr(getattr(pipeline, "vocoder", None), "config", None)
    rate = getattr(vocoder, "output_sampling_rate", None)  # of LTX-2; else as Kandinsky 6 has it
    return rate or getattr(pipeline, "audio_sample_rate", None)


def media_of(
    pipeline: Any, output: Any, *, is_video: bool
) -> tuple[Sequence[Image.Image], Sound | None]:
    """Return the images or frames of the engine's output, and its sound if it has one."""
    rate, sound = sound_rate(pipeline), None
    if rate is not None:
        output, waves = output
        if waves is not None:
            samples = torch.as_tensor(waves[0]).float().cpu().numpy()
            sound = Sound(np.atleast_2d(samples), rate)
    return (output[0] if is_video else output), sound


def check_prompt(
    pipeline: Any, prompt: Prompt, takes: Mapping[str, Any], *, num_pictures: int | None
) -> None:
    """Refuse a prompt at which the pipeline would fail, or make another output than it asks for.

    `takes` are the parameters of the pipeline's call. `num_pictures` is 0 if the prompt has no
    image on purpose ("image" is ""), and None if it does not say.
    """
    arguments, kind = arguments_of(prompt, takes), type(pipeline).__name__
    if num_pictures and "image" not in takes:
        raise ConfigError(f"image: a {kind} takes none: leave it out")
    if (num_pictures or 0) > 1 and not _SEVERAL.fullmatch(kind):
        raise ConfigError(f"image: a {kind} takes one picture, not {num_pictures}: give one")
    if "image" in takes and not num_pictures:
        needed = takes["image"].default is inspect.Parameter.empty or _FROM_PICTURES.search(kind)
        if needed or (num_pictures is None and "Kontext" in kind):
            advice = "give one" if needed else "give one, or an empty one to do without"
            raise ConfigError(f"image: a {kind} makes outputs from a picture: {advice}")
    processors = (getattr(pipeline, f"{media}_processor", None) for media in ("image", "video"))
    configs = (getattr(processor, "config", None) for processor in processors)
    factors = (getattr(config, "vae_scale_factor", None) for config in configs)
    multiple = next((factor for factor in factors if isinstance(factor, int)), 1)  # of a side
    sides = {"width": prompt.width, "height": prompt.height}
    if "max_area" in takes and len(set(map(bool, sides.values()))) > 1:
        raise ConfigError(f"a {kind} would scale both sides: give width and height, or neither")
    made = {name: side // multiple * multiple or multiple for name, side in sides.items() if side}
    check_size(prompt, made, rule=f", or another multiple of {multiple}")
    factors = (getattr(pipeline, name, None) for name in _FRAME_FACTORS)
    if prompt.frames is not None and (factor := next(filter(None, factors), 0)):
        made = {"frames": (prompt.frames - 1) // factor * factor + 1}
        check_size(prompt, made, rule=f", or 1 more than another multiple of {factor}")
    if (check := getattr(pipeline, "check_inputs", None)) is not None:
        if num_pictures:
            arguments.setdefault("image", Image.new("RGB", (multiple, multiple)))
        values = {name: getattr(takes[name], "default", None) for name in takes} | arguments
        try:
            check(**{name: values.get(name) for name in inspect.signature(check).parameters})
        except ValueError as error:
            raise ConfigError(f"a {kind} refuses the prompt: {error}") from None
        except Exception:  # the check reads what the call itself makes first
            return


def check_size(prompt: Prompt, made: Mapping[str, int], where: str = "", rule: str = "") -> None:
    """Refuse a prompt if the pipeline makes other sizes; `rule` tells which other sizes fit."""
    for name, size in made.items():
        if (asked := getattr(prompt, name)) not in (None, size):
            what = f"{where}{name} is {asked}"
            raise ConfigError(f"{what}, and this pipeline makes it {size}: give {size}{rule}")


def is_guided(prompt: Prompt, takes: Mapping[str, Any]) -> bool:
    """Return whether a pipeline runs two guidance branches; a distilled model runs one."""
    if "negative_prompt" not in takes:
        return False
    if "true_cfg_scale" in takes and prompt.negative_prompt is None:
        return False
    default = getattr(takes.get(_scale_of(prompt, takes)), "default", None)
    scale = default if prompt.guidance is None else prompt.guidance
    return isinstance(scale, int | float) and scale > 1.0


def _scale_of(prompt: Prompt, takes: Mapping[str, Any]) -> str:
    """Return the argument for guidance; with a negative prompt prefer `true_cfg_scale`."""
    names = ["guidance_scale", "true_cfg_scale"]
    if prompt.negative_prompt is not None:
        names.reverse()
    return next((name for name in names if name in takes), "guidance_scale")


def arguments_of(prompt: Prompt, takes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prompt as arguments of a pipeline; ConfigError if it does not accept one."""
    names = _ARGUMENTS | {"guidance": _scale_of(prompt, takes)}
    arguments = dict[str, Any]()
    for name, value in asdict(prompt).items():
        if value is None or name in ("seed", "lora") or (name == "image" and not value):
            continue
        if name == "fps":  # of the file, and of what is made for it if the pipeline asks
            arguments |= dict.fromkeys({"frame_rate", "fps"} & takes.keys(), value)
            continue
        argument = names.get(name, name)
        if argument not in takes:
            what = f"{name} is {shown(value)}, and this pipeline takes no {argument}"
            raise ConfigError(f"{what}: leave it out")
        arguments[argument] = value
        if name == "image":
            pictures = list(map(read_picture, prompt.images))
            arguments[argument] = pictures if len(pictures) > 1 else pictures[0]
    if "max_area" in takes and prompt.width and prompt.height:
        arguments["max_area"] = prompt.width * prompt.height  # else sizes are scaled to 1024 x 1024
    return arguments


def write_media(
    path: Path, frames: Sequence[Image.Image], fps: int, sound: Sound | None = None
) -> None:
    """Write an image, or a video: H.264, sides cut to even numbers, and AAC if it has sound."""
    with _replacing(path) as partial:
        if path.suffix == IMAGE:
            frames[0].save(partial, format="PNG", compress_level=1)  # level 6: 2.6 times as long
            return
        av = load_av(partial)
        width, height = (side // 2 * 2 for side in frames[0].size)
        with av.open(str(partial), "w", format="mp4") as file:
            stream = file.add_stream("libx264", rate=Fraction(fps))
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            if sound is not None:  # first: else the file's writer holds all pictures until it comes
                _write_sound(av, file, sound)
            for frame in frames:
                pixels = np.asarray(frame.convert("RGB"))[:height, :width]
                image = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
                file.mux(stream.encode(image))
            file.mux(stream.encode(None))


def _write_sound(av: Any, file: Any, sound: Sound) -> None:
    layout = {1: "mono", 2: "stereo"}.get(len(sound.samples))
    if layout is None:
        what = f"its sound has {len(sound.samples)} channels"
        raise ConfigError(f"{what}: bascule writes one or two")
    if not np.isfinite(sound.samples).all():
        what = "its sound has NaN, as where float16 overflows"
        raise ConfigError(f"{what}: give --dtype bfloat16 or float32")
    stream = file.add_stream("aac", rate=sound.rate, layout=layout)
    samples = np.ascontiguousarray(sound.samples.clip(-1, 1), np.float32)
    waves = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
    waves.sample_rate = sound.rate
    file.mux(stream.encode(waves))
    file.mux(stream.encode(None))


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write the settings and times of an output, as JSON."""
    with _replacing(path) as partial:
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; rename its file to `path` at the end, or remove it on an error."""
    partial = path.with_name(f".{path.name}")
    try:
        yield partial
        os.replace(partial, path)
    except Exception as error:  # PyAV raises errors of many kinds
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path.name} cannot be written: {reason}") from error
