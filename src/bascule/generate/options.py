"""Options and prompts of `bascule generate`, and names of outputs. Imports no torch."""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from bascule.checks import number, shown
from bascule.errors import ConfigError
from bascule.files import read_json_lines, read_lines
from bascule.generate.tiny import TINY, TINY_WAN
from bascule.options import (
    REPEATED,
    Group,
    NewFolder,
    Outputs,
    Range,
    RankOptions,
    check_options,
    flag,
)

IMAGE, VIDEO = ".png", ".mp4"

Pixels = Annotated[int | None, Range(1, 2**15)]
Count = Annotated[int | None, Range(1, 10**4)]
Scale = Annotated[float | None, Range(0.0, 1e6)]
Rate = Annotated[int | None, Range(1, 1000)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
_Degree = Annotated[int | None, Range(1, 2**16)]
DEFAULTS: dict[str, dict[str, Any]] = {TINY: {"width": 256, "height": 256, "steps": 4}}
DEFAULTS[TINY_WAN] = DEFAULTS[TINY] | {"frames": 9}
_WEIGHTS = re.compile(  # of diffusers and transformers, in one file or in pieces
    r"(diffusion_pytorch_|pytorch_)?model(\.(?P<variant>\w+))?(-\d+-of-\d+(\.(?P<legacy>\w+))?)?"
    r"\.(safetensors|bin)"
)
_SETTINGS = "model", "variant", "dtype", "tiles", "wire", "sparse", "fps"  # change all outputs
_MESH = "ulysses", "ring", "replicas"  # any of them gives a mesh, which no output leaves
_EXCLUDED = (  # options, those that each of them excludes, why
    (("longest_ring", "degrees"), _MESH, "a mesh that you give sets the ranks of each output"),
    (("cache",), ("sparse",), "a cache skips blocks that the masks of later steps need"),
    (("compile",), ("cache", "offload"), "a graph contains no decisions between layers"),
    (("cache",), ("offload",), "offload loads layers in one order, and a cache skips some"),
)
_CACHES = {"first-block": 0.05, "taylorseer": 5}  # with their usual numbers
_LARGEST = 1000  # number of a cache
_PREFERRED = "pytorch_lora_weights.safetensors"  # as `save_lora_weights` of diffusers names it
_SAMPLES, _SAMPLE_BYTES = 16, 2**12  # that a digest reads of a file of weights


@dataclass(frozen=True, kw_only=True)
class EngineOptions(RankOptions):
    """A pipeline, and how ranks compute its outputs: options of generate and serve.

    Attributes:
        model: Folder of a pipeline of diffusers; or tiny, or tiny-wan for videos (random weights).
        variant: Variant of the weights, such as fp16. By default the only one of the folder.
        dtype: Data type of the weights. By default bfloat16 on GPUs and float32 on CPUs.
        fps: Frames per second of a video.
        offload: Keep weights in the host's memory, and copy each layer to the GPU before its use.
        ulysses: Ranks that split heads. Without this, --ring and --replicas, outputs change ranks.
        ring: Ranks that pass keys and values around.
        guidance_ranks: Groups of ranks that compute different guidance branches.
        replicas: Groups of ranks that take different prompts.
        longest_ring: Most ranks in a ring, if outputs change ranks.
        sparse: Share of the keys that attention computes, in blocks of 64 tokens with the largest
            products of mean queries and keys. It changes pixels. Default: all.
        wire: Format of 8 bits in which ranks send rows of attention. It changes pixels slightly.
        cache: Reuse results of earlier steps, which changes pixels: first-block:0.05 if the first
            block changes by at most 5 %, or taylorseer:5 in 4 of 5 steps. Outputs keep their ranks.
        tiles: Let the VAE work in tiles, which ranks share. It changes pixels slightly.
        compile: Compile the transformers, once for each number of ranks of an output.
        timeout_s: Seconds after which ranks that share an output stop waiting for each other.
    """

    model: Annotated[str, Group("Pipeline")] = TINY
    variant: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    fps: Annotated[int, Range(1, 1000)] = 16
    offload: bool = False
    ulysses: Annotated[_Degree, Group("Ranks")] = None
    ring: _Degree = None
    guidance_ranks: _Degree = None
    replicas: _Degree = None
    longest_ring: _Degree = None
    sparse: Annotated[float | None, Range(1e-9, 1.0), Group("Speed")] = None
    wire: Literal["int8", "e4m3"] | None = None
    cache: str | None = None
    tiles: bool = False
    compile: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Settings, apart from the prompts, that change outputs."""
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return settings | ({} if self.cache is None else {"cache": self.cache})

    @property
    def mesh(self) -> dict[str, int]:
        """The degrees of a mesh that options give, as arguments of a `Shape`; none without one."""
        degrees = {"data": self.replicas, "guidance": self.guidance_ranks}
        degrees |= {"ring": self.ring, "ulysses": self.ulysses}
        mesh = {name: degree for name, degree in degrees.items() if degree is not None}
        return mesh if mesh.keys() - {"guidance"} else {}

    def cache_of_steps(self) -> tuple[str, float]:
        """Return the name and the number of --cache; ConfigError if there is no such cache."""
        name, _, text = (self.cache or "").partition(":")
        with suppress(KeyError, ValueError):
            value = type(_CACHES[name])(text or _CACHES[name])
            if 0 < value < _LARGEST:
                return name, value
        names = " or ".join(f"{name}:{usual}" for name, usual in _CACHES.items())
        raise ConfigError(f"--cache {self.cache}: give {names}, or a number from 0 to {_LARGEST}")

    def check_engine(self) -> None:
        """Refuse a model that is no pipeline, and options that exclude each other."""
        index = Path(self.model) / "model_index.json"
        if self.model not in (TINY, TINY_WAN) and not index.is_file():
            advice = f"give the folder of a pipeline of diffusers, or {TINY}, or {TINY_WAN}"
            raise ConfigError(f"--model {self.model}: no {index}: {advice}")
        variant_of(self.model, self.variant)
        if self.cache is not None:
            self.cache_of_steps()
        for *sides, why in _EXCLUDED:
            both = [[name for name in names if getattr(self, name, None)] for names in sides]
            if all(both):
                first, second = (flag(names[0]) for names in both)
                raise ConfigError(f"{first} and {second}: {why}: leave one out")
        groups = self.guidance_ranks or 1
        if not self.mesh and groups & (groups - 1):
            what = f"--guidance-ranks {groups}: outputs change between 1, 2, 4, .. ranks"
            raise ConfigError(f"{what}: give a power of two, or also --replicas 1 for one mesh")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Outputs, EngineOptions):
    """Make images or videos with a pipeline of diffusers, shared by all local ranks.

    A file beside each output holds its prompt and times. Outputs that exist are not made again.

    Attributes:
        prompt: Text of an output. Give the option once per output.
        prompts: File of prompts: one per line, or JSON objects (.jsonl) with "prompt" and other
            options: "image" (a path from the file's folder, or a list), "lora" (a list of {"name":
            such a path, "scale": X}), "negative_prompt", "width", "height", "frames", "steps",
            "guidance", "fps", "seed".
        image: Path of an input image, if the pipeline accepts one; "" for none. Give the option
            once per image, if the pipeline accepts several.
        lora: Path of a LoRA (.safetensors, or its folder); PATH:0.8 scales it. Give the option once
            per LoRA: they act together, on all prompts without a "lora" of their own.
        negative_prompt: What an output should not show, if the pipeline uses guidance.
        width: Pixels of an output's width. By default the pipeline decides; tiny ones take 256.
        height: Pixels of an output's height. By default the pipeline decides; tiny ones take 256.
        frames: Frames of a video. By default the pipeline decides; tiny-wan takes 9.
        steps: Denoising steps. By default the pipeline decides; tiny ones take 4.
        guidance: How strongly an output follows its prompt. By default the pipeline decides.
        seed: Seed of the first prompt. Each following prompt gets the next number.
        out: Folder for the images (PNG) and videos (MP4).
    """

    prompt: Annotated[tuple[str, ...], REPEATED, Group("Prompts")] = ()
    prompts: Path | None = None
    image: Annotated[tuple[str, ...], REPEATED] = ()
    lora: Annotated[tuple[str, ...], REPEATED] = ()
    negative_prompt: str | None = None
    width: Annotated[Pixels, Group("Images and videos")] = None
    height: Pixels = None
    frames: Count = None
    steps: Count = None
    guidance: Scale = None
    seed: Seed = 0
    out: Annotated[Path, NewFolder(), Group("Output")] = Path("results/generated")

    def check_source(self) -> None:
        """Refuse options that name no prompts or no pipeline, or exclude each other."""
        if bool(self.prompt) == (self.prompts is not None):
            raise ConfigError("give either --prompt TEXT, once or more, or --prompts FILE")
        self.check_engine()


def variant_of(model: str, variant: str | None) -> str | None:
    """Return the variant of a folder's weights to load; refuse a variant that is not there."""
    plain, variants = set[str](), dict[str, set[str]]()  # components without, with each variant
    for path in Path(model).glob("*/*"):
        if match := _WEIGHTS.fullmatch(path.name):
            name = match["variant"] or match["legacy"]
            (variants.setdefault(name, set()) if name else plain).add(path.parent.name)
    needed = sorted(name for name, components in variants.items() if not components <= plain)
    if variant is not None and variant not in variants:
        names = ", ".join(sorted(variants)) or "none: leave it out"
        raise ConfigError(f"--variant {variant}: the variants of {model} are {names}")
    if variant is None and len(needed) > 1:
        raise ConfigError(f"--variant: {model} has weights of {', '.join(needed)}: give one")
    return variant or next(iter(needed), None)


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter that a request chooses, and the factor of its weights."""

    name: str  # for `bascule generate` its path
    scale: float = 1.0

    @classmethod
    def of(cls, value: Any) -> "Lora":
        """Return an adapter, of {"name": .., "scale": ..} or of "NAME:SCALE"; else ConfigError."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            name, _, scale = value.rpartition(":")
            is_scaled = re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", scale) is not None and bool(name)
            value = {"name": name, "scale": float(scale)} if is_scaled else {"name": value}
        if not isinstance(value, dict) or not value.keys() <= {"name", "scale"}:
            raise ConfigError(f'lora: give {{"name": NAME, "scale": 0.8}}, not {shown(value)}')
        name, scale = value.get("name"), value.get("scale")
        if not isinstance(name, str) or not name:
            raise ConfigError("lora: name is missing: give text")
        return cls(name, number("lora scale", 1.0 if scale is None else scale, -1e3, 1e3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The settings of one output; for None, the pipeline chooses the value."""

    prompt: str
    image: str | tuple[str, ...] | None = None  # "": none on purpose
    lora: tuple[Lora, ...] = ()
    negative_prompt: str | None = None
    width: Pixels = None
    height: Pixels = None
    frames: Count = None
    steps: Count = None
    guidance: Scale = None
    fps: Rate = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        if isinstance(self.image, list | tuple):
            image = tuple(self.image) if len(self.image) > 1 else next(iter(self.image), "")
            object.__setattr__(self, "image", image)
        values: Any = self.lora
        loras = tuple(map(Lora.of, values if isinstance(values, list | tuple) else [values]))
        if len({lora.name for lora in loras}) < len(loras):
            raise ConfigError("lora: give each adapter once")
        object.__setattr__(self, "lora", loras)

    @property
    def images(self) -> tuple[str, ...]:
        """Paths of the input images."""
        return self.image if isinstance(self.image, tuple) else (self.image,) if self.image else ()


def names_of(prompts: Sequence[Prompt], options: GenerateOptions) -> list[str]:
    """Return file names of outputs without suffix; what changes an output changes its name."""
    common, names = (options.settings, _digest(*_samples(options.model))), list[str]()
    for place, prompt in enumerate(prompts):
        images: Any = [_digest(Path(image).read_bytes()) for image in prompt.images]
        settings = asdict(prompt) | {"image": images if images[1:] else [*images, prompt.image][0]}
        del settings["lora"]
        if prompt.fps in (None, options.fps):
            del settings["fps"]
        for lora in prompt.lora:
            digest = _digest(*_pieces(adapter_file(Path(lora.name))))
            settings["lora"] = [*settings.get("lora", ()), (digest, lora.scale)]
        text = repr((common, sorted(settings.items())))
        names.append(f"{place:05d}-{_digest(text.encode())}")
    return names


def are_made(prompts: Sequence[Prompt], options: GenerateOptions) -> bool:
    """Return whether all outputs exist, as images or as videos."""
    paths = [options.out / name for name in names_of(prompts, options)]
    return all(any(os.path.exists(f"{path}{end}") for end in (IMAGE, VIDEO)) for path in paths)


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=4).hexdigest()


def _samples(model: str) -> Iterator[bytes]:
    """Yield bytes that identify a folder's weights and settings, wherever the folder lies."""
    index = Path(model) / "model_index.json"
    yield (components := index.read_bytes() if index.is_file() else b"")
    for path in sorted(Path(model).glob("*/*")):
        if path.is_file() and f'"{path.parent.name}"'.encode() in components:
            yield f"{path.parent.name}/{path.name} ".encode()
            yield from _pieces(path)


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield a file's size and parts of it, which tell it from other files."""
    yield f"{(size := path.stat().st_size)}".encode()
    with path.open("rb") as file:
        for k in range(_SAMPLES):
            file.seek(k * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)


def adapter_file(path: Path) -> Path:
    """Return the file of safetensors that a path means; ConfigError if it means none or several."""
    file = path
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if (file := path / _PREFERRED) not in files:
            if len(files) > 1:
                names = ", ".join(file.name for file in files)
                raise ConfigError(f"{path} has {names}: give the path of one of them")
            file = next(iter(files), path / "*.safetensors")
    if path.exists() and file.suffix != ".safetensors":
        raise ConfigError(f"{file}: only .safetensors is loaded, as other formats may run code")
    if not file.is_file():
        raise ConfigError(f"{file}: there is no such file: give the path of a LoRA's .safetensors")
    return file


def read_picture(path: str) -> Any:
    """Return a picture in RGB, rotated as its EXIF says; ConfigError if it cannot be read."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:  # PIL raises anything on damaged files
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"image {path}: cannot be read as a picture: {reason}") from None


def read_prompts(options: GenerateOptions) -> list[Prompt]:
    """Read the prompts that options give, in order; ConfigError names a line that is wrong."""
    options.check_source()
    common = dict(DEFAULTS.get(options.model, {}))
    for field in fields(Prompt)[1:-1]:
        if (value := getattr(options, field.name)) not in (None, ()):
            common[field.name] = value
    rows: list[tuple[str, Any]] = [("--prompt", {"prompt": text}) for text in options.prompt]
    if (path := options.prompts) is not None:
        if path.suffix in (".jsonl", ".json"):
            rows = list(read_json_lines(path))
        else:
            lines = map(str.strip, read_lines(path))
            rows = [(f"{path}", {"prompt": line}) for line in lines if line]
    if not rows:
        raise ConfigError(f"--prompts {path}: has no prompt: give one per line")
    prompts = list[Prompt]()
    for place, (where, row) in enumerate(rows):
        try:
            settings: dict[str, Any] = common | {"seed": options.seed + place}
            settings |= _checked(row, path.parent) if path is not None else row
            prompts.append(prompt := Prompt(**settings))
            check_options(prompt)
            for image in prompt.images:
                read_picture(image)
            for lora in prompt.lora:
                adapter_file(Path(lora.name))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return prompts


def _checked(row: Any, folder: Path) -> dict[str, Any]:
    """Return the settings of a line, with paths from the folder of the file."""
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ConfigError('give a JSON object with a "prompt" of text')
    names = [field.name for field in fields(Prompt)]
    if unknown := sorted(row.keys() - set(names)):
        words, verb = ", ".join(map(repr, unknown)), "is" if len(unknown) == 1 else "are"
        raise ConfigError(f"{words} {verb} not known: give some of {', '.join(names)}")
    row = {name: value for name, value in row.items() if value is not None}
    if not isinstance(row.get("negative_prompt", ""), str):
        raise ConfigError("negative_prompt must be text")
    images = row.get("image", "")
    images = images if isinstance(images, list) else [images]
    if not all(isinstance(image, str) for image in images):
        raise ConfigError("image must be the path of a picture, or a list of paths")
    if any(images):
        row["image"] = [str(folder / image) for image in images]
    if loras := Prompt(prompt="", lora=row.get("lora", ())).lora:
        row["lora"] = tuple(replace(lora, name=str(folder / lora.name)) for lora in loras)
    return row
