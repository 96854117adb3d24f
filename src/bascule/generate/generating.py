"""A list of prompts, made by all ranks of a job together; each output once."""

import inspect
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bascule.arrays import Ints
from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup, member_of, new_group, resolve, set_timeout
from bascule.diffusers.degrees import AutoMesh
from bascule.diffusers.parallelize import ParallelHandle, parallelize
from bascule.errors import CommError, ConfigError, PlanError
from bascule.generate.generate_options import GenerateOptions
from bascule.generate.media import IMAGE, VIDEO, check_can_write, write_media, write_record
from bascule.generate.prompts import Prompt, read_prompts
from bascule.generate.tiny_pipelines import load_pipeline
from bascule.plan.solver.solve import assign

_CAPACITY = 64  # of outputs that the first gather has room for
_LONGEST_S = 86400.0  # that replicas wait for the last one; a rank that is gone ends this at once
_NAMES = {"frames": "num_frames", "steps": "num_inference_steps"}  # of a pipeline's arguments


class Generation:
    """Makes outputs for prompts; all ranks of the job make it, and run it, together.

    Attributes:
        names: Of all outputs, in the order of the prompts, with their endings.
        prompts: All of them.
        left: Those that this rank's replica is to make, by their places.
        degrees: Ranks along each axis, as `parallelize` was given them, or chose them.

    Args:
        options: Of the command.
        device: This rank's.

    Raises:
        ConfigError: The options do not fit the pipeline, the prompts or each other.
        CommError: Ranks were given different things, or one is gone.
    """

    @shared("the start of bascule generate")
    def __init__(self, options: GenerateOptions, device: torch.device) -> None:
        self._options, self._device = options, device
        self.prompts = read_prompts(options)
        dtype = "float32" if device.type == "cpu" else "bfloat16"
        self._pipeline = load_pipeline(
            options.model, getattr(torch, options.dtype or dtype), device
        )
        self._pipeline.set_progress_bar_config(disable=True)
        self._takes = inspect.signature(self._pipeline.__call__).parameters
        ending = VIDEO if _NAMES["frames"] in self._takes else IMAGE
        check_can_write(ending)
        self.names = [one.name(place, options) + ending for place, one in enumerate(self.prompts)]
        if options.tiles:
            _enable_tiles(self._pipeline)
        self._handle = self._parallelized()
        if options.compile:
            self._handle.compile()
        self._world: RankGroup = member_of(resolve(None), "world")
        every = range(self._world.size)
        self._replicas = new_group(every, "replicas", options.timeout_s, backend="gloo")
        set_timeout(self._replicas, _LONGEST_S)
        self._all_left = self._agreed_left()
        self.left = self._own_share()

    @property
    def writes(self) -> bool:
        """Return whether this rank writes the outputs of its replica."""
        return self._handle.replica.whole is None or self._handle.replica.whole.rank == 0

    @property
    def rank(self) -> int:
        """Of the job."""
        return self._world.rank

    @property
    def num_left(self) -> int:
        """Outputs that all replicas are to make."""
        return len(self._all_left)

    def num_steps(self, place: int) -> int:
        """Denoising steps of a prompt."""
        return self.prompts[place].steps or int(self._takes[_NAMES["steps"]].default)

    def run(self, on_step: Callable[[int], None]) -> list[dict[str, Any]]:
        """Make what is left.

        Args:
            on_step: Called after each denoising step of this replica, with the prompt's place.

        Returns:
            What is known of every output that was made now, by all replicas.

        Raises:
            ConfigError: The pipeline refuses a prompt, or a file cannot be written.
            CommError: A rank failed.
        """
        for place in self.left:
            with shared(f"making {self.names[place]}"):
                self._make(place, on_step)
        self._agree(self._replicas, "the end", np.zeros(0, np.int64))
        return [self._record(place) for place in self._all_left]

    def _parallelized(self) -> ParallelHandle:
        """The pipeline over all ranks."""
        given: Any = self._options.degrees
        if given:
            self.degrees = dict[str, int](given)
            return parallelize(self._pipeline, **given)
        num_passes = 2 if all(is_guided(one, self._takes) for one in self.prompts) else 1
        handle = parallelize(self._pipeline, AutoMesh(num_passes=num_passes))
        assert handle.choice is not None
        chosen = handle.choice.chosen
        self.degrees = {
            "guidance_degree": chosen.guidance,
            "ring_degree": chosen.ring,
            "ulysses_degree": chosen.ulysses,
        }
        return handle

    def _agreed_left(self) -> list[int]:
        """The outputs that are not there, as the first rank sees it."""
        is_there, error = np.zeros(0, np.int64), None
        try:
            is_there = self._find()
        except OSError as met:
            reason = met.strerror or met
            error = ConfigError(f"--out {self._options.out}: cannot be written: {reason}")
        first = self._agree(self._world, "what is left", is_there, error)[0]
        return np.flatnonzero(first == 0).tolist()  # files may show later on other hosts

    def _find(self) -> Ints:
        """Which outputs are there; makes the folder, where more are to be written to it."""
        folder = self._options.out
        if self.writes:
            folder.mkdir(parents=True, exist_ok=True)
        is_there = [(folder / name).exists() for name in self.names]
        if self.writes and not all(is_there):
            with tempfile.TemporaryFile(dir=folder):  # whether this rank may write there
                pass
        return np.array(is_there, np.int64)

    def _own_share(self) -> list[int]:
        """What this replica makes: prompts are spread so that all replicas take about as long."""
        if not self._all_left:
            return []
        num_replicas = self.degrees.get("data_degree", 1)
        mine = self._world.rank * num_replicas // self._world.size
        work = [self.prompts[place].work for place in self._all_left]
        shares = zip(self._all_left, assign(work, num_replicas).bin_of, strict=True)
        return [place for place, replica in shares if replica == mine]

    def _agree(
        self, group: RankGroup, what: str, values: Ints, error: Exception | None = None
    ) -> list[Ints]:
        prompts = {"prompts": str(self.names)}
        return agree(group, prompts, error, what=what, values=values, capacity=_CAPACITY)

    def _make(self, place: int, on_step: Callable[[int], None]) -> None:
        prompt, name = self.prompts[place], self.names[place]
        arguments = arguments_of(prompt, self._takes)

        def step_ends(_: Any, __: int, ___: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
            on_step(place)
            return given

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
        _check_size(place, prompt, frames)
        if not self.writes:
            return
        made = {"file": name, "model": self._options.model, **asdict(prompt)}
        write_record(self._beside(name), made | {"seconds": times.seconds})
        write_media(self._options.out / name, frames, self._options.fps)

    def _beside(self, name: str) -> Path:
        """The file of what an output was made from."""
        return (self._options.out / name).with_suffix(".json")

    def _record(self, place: int) -> dict[str, Any]:
        path = self._beside(self.names[place])
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--out: cannot read {path}: {error.strerror or error}") from error


def _enable_tiles(pipeline: Any) -> None:
    """Let the VAE work in tiles.

    Raises:
        ConfigError: It cannot.
    """
    vae: Any = getattr(pipeline, "vae", None)
    try:
        vae.enable_tiling()
    except (AttributeError, NotImplementedError) as error:  # diffusers has both
        what = "this pipeline has no VAE"
        if vae is not None:
            what = f"the {type(vae).__name__} of this pipeline has no tiles"
        raise ConfigError(f"--tiles: {what}: leave it out") from error


def _check_size(place: int, prompt: Prompt, frames: Sequence[Image.Image]) -> None:
    """Refuse a size that the pipeline rounds: only what it makes tells which these are.

    Raises:
        ConfigError: Names the size that was made.
    """
    width, height = frames[0].size
    for name, made in {"width": width, "height": height, "frames": len(frames)}.items():
        asked = getattr(prompt, name)
        if asked not in (None, made):
            raise ConfigError(
                f"prompt {place + 1}: {name} is {asked}, and this pipeline makes it {made}: "
                f"give {made}"
            )


def is_guided(prompt: Prompt, takes: Mapping[str, Any]) -> bool:
    """Return whether a pipeline computes two branches for a prompt, by its arguments.

    Those that take a negative prompt do so where their scale is above 1; those with
    `true_cfg_scale` only where there is a negative prompt, too. The scale of all others is an input
    of a model that was distilled, which has one branch.
    """
    if "negative_prompt" not in takes:
        return False
    if "true_cfg_scale" in takes and prompt.negative_prompt is None:
        return False
    default = getattr(takes.get(_scale_of(prompt, takes)), "default", None)
    scale = default if prompt.guidance is None else prompt.guidance
    return isinstance(scale, int | float) and scale > 1.0


def _scale_of(prompt: Prompt, takes: Mapping[str, Any]) -> str:
    """The argument that says how strongly a prompt guides."""
    scales = ["guidance_scale", "true_cfg_scale"]
    if prompt.negative_prompt is not None:
        scales.reverse()
    return next((name for name in scales if name in takes), "guidance_scale")


def arguments_of(prompt: Prompt, takes: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt as the arguments of a pipeline.

    Guidance is `true_cfg_scale` where a pipeline has it and there is a negative prompt, else
    `guidance_scale`.

    Args:
        prompt: None is left out.
        takes: The arguments that there are.

    Raises:
        ConfigError: The pipeline does not take something that was given.
    """
    scale = _scale_of(prompt, takes)
    found = dict[str, Any]()
    for name, value in asdict(prompt).items():
        if value is None or name == "seed":
            continue
        argument = scale if name == "guidance" else _NAMES.get(name, name)
        if argument not in takes:
            raise ConfigError(
                f"this pipeline takes no {argument}, and {name} is {value!r}: leave it out"
            )
        found[argument] = value
    return found
