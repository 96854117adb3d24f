"""A list of prompts, made by all ranks of a job together; each output once, whole or not at all."""

import importlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup, member_of, new_group, resolve, set_timeout
from bascule.diffusers.degrees import AutoMesh
from bascule.diffusers.parallelize import ParallelHandle, parallelize
from bascule.diffusers.sparse_layers import SparseConfig
from bascule.errors import CommError, ConfigError, PlanError
from bascule.generate import tiny
from bascule.generate.options import IMAGE, VIDEO, GenerateOptions, Prompt, read_prompts
from bascule.plan.solver.solve import assign

_CAPACITY = 64  # of outputs that the first gather has room for
_LONGEST_S = 86400.0  # that replicas wait for the last one; a rank that is gone ends this at once
_NAMES = {"frames": "num_frames", "steps": "num_inference_steps"}  # of a pipeline's arguments


class Generation:
    """Makes outputs for prompts; all ranks of the job make it, and run it, together."""

    @shared("the start of bascule generate")
    def __init__(self, options: GenerateOptions, device: torch.device) -> None:
        self._options = options
        self.prompts = read_prompts(options)
        dtype = options.dtype or ("float32" if device.type == "cpu" else "bfloat16")
        self._pipeline = load_pipeline(options.model, getattr(torch, dtype), device)
        self._pipeline.set_progress_bar_config(disable=True)
        self._takes = inspect.signature(self._pipeline.__call__).parameters
        ending = VIDEO if _NAMES["frames"] in self._takes else IMAGE
        if ending == VIDEO:
            load_av()  # or refuse at once
        self.names = [one.name(place, options) + ending for place, one in enumerate(self.prompts)]
        for place, one in enumerate(self.prompts):
            check_sides(self._pipeline, place, one)
        if options.tiles:
            _enable_tiles(self._pipeline)
        self._handle = self._parallelize()
        if options.compile:
            self._handle.compile()
        self._world: RankGroup = member_of(resolve(None), "world")
        self.rank, every = self._world.rank, range(self._world.size)
        self._replicas = new_group(every, "replicas", options.timeout_s, backend="gloo")
        set_timeout(self._replicas, _LONGEST_S)
        self._is_new = not options.out.exists()
        self.missing = self._find_missing()  # places of prompts, over all replicas
        work = [self.prompts[place].work for place in self.missing]
        num_replicas = self.degrees.get("data_degree", 1)
        shares = assign(work, num_replicas).bin_of if work else ()
        mine = self.rank * num_replicas // self._world.size
        pairs = zip(self.missing, shares, strict=True)
        self.todo = [place for place, replica in pairs if replica == mine]

    @property
    def writes(self) -> bool:
        """True on the rank that writes the outputs of its replica."""
        return self._handle.replica.whole is None or self._handle.replica.whole.rank == 0

    def num_steps(self, place: int) -> int:
        """Return the denoising steps of a prompt."""
        return self.prompts[place].steps or int(self._takes[_NAMES["steps"]].default)

    def run(self, on_step: Callable[[int], None]) -> list[dict[str, Any]]:
        """Make the missing outputs, calling `on_step(place)` a step; return all their records."""
        try:
            for place in self.todo:
                with shared(f"making {self.names[place]}"):
                    self._make(place, on_step)
        except BaseException:
            if self._is_new:
                with suppress(OSError):  # it is not empty
                    self._options.out.rmdir()
            raise
        agree(self._replicas, {}, what="the end")
        return [self._read_record(place) for place in self.missing]

    def _parallelize(self) -> ParallelHandle:
        options = self._options
        num_passes = 2 if all(is_guided(one, self._takes) for one in self.prompts) else 1
        ways: dict[str, Any] = {"comm_dtype": options.wire}
        degrees: Any = options.degrees
        self.degrees: dict[str, int] = degrees
        if options.sparse is not None:
            ways["sparse"] = SparseConfig(keep=options.sparse, passes_per_step=num_passes)
        if degrees:
            return parallelize(self._pipeline, **ways, **degrees)
        auto = AutoMesh(num_passes=num_passes, max_ring_degree=options.longest_ring)
        handle = parallelize(self._pipeline, auto, **ways)
        assert handle.choice is not None
        axes, chosen = ("guidance", "ring", "ulysses"), handle.choice.chosen
        self.degrees = {f"{axis}_degree": getattr(chosen, axis) for axis in axes}
        return handle

    def _find_missing(self) -> list[int]:
        """Find the outputs that do not exist, as the first rank sees it; make their folder."""
        exists, error, folder = np.zeros(0, np.int64), None, self._options.out
        try:
            if self.writes:
                folder.mkdir(parents=True, exist_ok=True)
            exists = np.array([(folder / name).exists() for name in self.names], np.int64)
            if self.writes and not exists.all():
                with tempfile.TemporaryFile(dir=folder):  # fails if this rank may not write there
                    pass
        except OSError as refusal:
            reason = refusal.strerror or refusal
            error = ConfigError(f"--out {folder}: cannot be written: {reason}")
        prompts, what = {"prompts": str(self.names)}, "the missing outputs"
        rows = agree(self._world, prompts, error, what=what, values=exists, capacity=_CAPACITY)
        return np.flatnonzero(rows[0] == 0).tolist()  # files may show later on other hosts

    def _make(self, place: int, on_step: Callable[[int], None]) -> None:
        prompt, name = self.prompts[place], self.names[place]
        arguments = arguments_of(prompt, self._takes)

        def step_ends(_: Any, __: int, ___: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
            on_step(place)
            return inputs

        with self._handle.timed() as times, torch.inference_mode():
            try:
                result = self._pipeline(
                    **arguments,
                    generator=torch.Generator().manual_seed(prompt.seed),
                    callback_on_step_end=step_ends,
                    output_type="pil",
                )
            except (CommError, ConfigError, PlanError):
                raise
            except Exception as error:  # pipelines refuse sizes and texts in their own ways
                raise ConfigError(
                    f"prompt {place + 1}: the pipeline fails with {type(error).__name__}: {error}"
                ) from error
        frames = result.frames[0] if name.endswith(VIDEO) else result.images[:1]
        width, height = frames[0].size
        _check_size(place, prompt, {"width": width, "height": height, "frames": len(frames)})
        if self.writes:
            record = {"file": name, "model": self._options.model, **asdict(prompt)}
            write_record(self._record_path(name), record | {"seconds": times.seconds})
            write_media(self._options.out / name, frames, self._options.fps)

    def _record_path(self, name: str) -> Path:
        return (self._options.out / name).with_suffix(".json")

    def _read_record(self, place: int) -> dict[str, Any]:
        path = self._record_path(self.names[place])
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--out: cannot read {path}: {error.strerror or error}") from error


def load_pipeline(model: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a pipeline from a folder of this machine, or make a tiny one."""

    def load(diffusers: Any, transformers: Any) -> Any:
        transformers.logging.set_verbosity_error()  # advice to install unused packages
        if model in (tiny.TINY, tiny.TINY_WAN):
            pipeline = tiny.pipeline(diffusers, transformers, model)
            return pipeline if dtype == torch.float32 else pipeline.to(dtype)
        from_folder = diffusers.DiffusionPipeline.from_pretrained
        return from_folder(model, torch_dtype=dtype, local_files_only=True)

    return tiny.load(f"--model {model}", load, "diffusers", "transformers").to(device)


def _enable_tiles(pipeline: Any) -> None:
    """Let the VAE work in tiles, or refuse a pipeline whose VAE cannot."""
    vae: Any = getattr(pipeline, "vae", None)
    try:
        vae.enable_tiling()
    except (AttributeError, NotImplementedError) as error:  # diffusers has both
        what = "this pipeline has no VAE"
        if vae is not None:
            what = f"the {type(vae).__name__} of this pipeline has no tiles"
        raise ConfigError(f"--tiles: {what}: leave it out") from error


def _multiple_of(pipeline: Any) -> int:
    """Return what sides of images are multiples of; 1 if it is not known."""
    processors = (getattr(pipeline, f"{kind}_processor", None) for kind in ("image", "video"))
    factors = (getattr(getattr(x, "config", None), "vae_scale_factor", None) for x in processors)
    return next((factor for factor in factors if isinstance(factor, int)), 1)


def check_sides(pipeline: Any, place: int, prompt: Prompt) -> None:
    """Refuse sides of an image that a pipeline would round."""
    multiple, sides = _multiple_of(pipeline), {"width": prompt.width, "height": prompt.height}
    made = {name: side // multiple * multiple for name, side in sides.items() if side}
    if all(made.values()):  # else the pipeline refuses it
        _check_size(place, prompt, made)


def _check_size(place: int, prompt: Prompt, made: Mapping[str, int]) -> None:
    """Refuse a size that the pipeline rounds, where it is known before, or as the output shows."""
    for name, size in made.items():
        if getattr(prompt, name) not in (None, size):
            raise ConfigError(
                f"prompt {place + 1}: {name} is {getattr(prompt, name)}, and this pipeline makes "
                f"it {size}: give {size}"
            )


def is_guided(prompt: Prompt, takes: Mapping[str, Any]) -> bool:
    """Return True if a pipeline computes two branches; a distilled model's scale is an input."""
    if "negative_prompt" not in takes:
        return False
    if "true_cfg_scale" in takes and prompt.negative_prompt is None:
        return False
    default = getattr(takes.get(_scale_of(prompt, takes)), "default", None)
    scale = default if prompt.guidance is None else prompt.guidance
    return isinstance(scale, int | float) and scale > 1.0


def _scale_of(prompt: Prompt, takes: Mapping[str, Any]) -> str:
    """Name the scale of a prompt: `true_cfg_scale` if there is a negative prompt, if possible."""
    scales = ["guidance_scale", "true_cfg_scale"]
    if prompt.negative_prompt is not None:
        scales.reverse()
    return next((name for name in scales if name in takes), "guidance_scale")


def arguments_of(prompt: Prompt, takes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prompt as the arguments of a pipeline; ConfigError if it does not take one."""
    names = _NAMES | {"guidance": _scale_of(prompt, takes)}
    arguments = dict[str, Any]()
    for name, value in asdict(prompt).items():
        if value is None or name == "seed":
            continue
        argument = names.get(name, name)
        if argument not in takes:
            raise ConfigError(
                f"this pipeline takes no {argument}, and {name} is {value!r}: leave it out"
            )
        arguments[argument] = value
    return arguments


def write_media(path: Path, frames: Sequence[Image.Image], fps: int) -> None:
    """Write an image, or the frames of a video (H.264, sides cut to even numbers)."""
    with _appearing(path) as partial:
        if path.suffix == IMAGE:
            frames[0].save(partial, format="PNG")
        else:
            _write_video(partial, frames, fps)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write the settings and times of an output, as JSON."""
    with _appearing(path) as partial:
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """Yield where to write a file, then move it into its place; remove it if writing fails."""
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
        raise ConfigError(f"--out: {path} cannot be written: {reason}") from error


def _write_video(path: Path, frames: Sequence[Image.Image], fps: int) -> None:
    av = load_av()
    width, height = (side // 2 * 2 for side in frames[0].size)
    with av.open(str(path), "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            pixels = np.asarray(frame.convert("RGB"))[:height, :width]
            image = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            file.mux(stream.encode(image))
        file.mux(stream.encode(None))


def load_av() -> Any:
    """Return PyAV, which writes videos; ConfigError if it is not installed."""
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise ConfigError(
            "videos are written by PyAV, which is not installed: pip install 'bascule[video]'"
        ) from error
