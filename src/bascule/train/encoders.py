"""Frozen encoders before the model, and their balanced stages of a step.

Shapes: F frames, H x W pixels, C latent channels, f latent frames of h x w, L tokens, p patch side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bascule.comm.values import values_digest
from bascule.encoders import BalancedEncoder, EncoderOptions
from bascule.encoders.plan import Encoding
from bascule.errors import ConfigError
from bascule.files import parse_json
from bascule.generate import tiny
from bascule.machine.cluster import Cluster
from bascule.machine.costs import Cost
from bascule.machine.fits import fit_item_latency
from bascule.options import flag
from bascule.quantities import count
from bascule.train.model import mean_over_ranks, median_seconds
from bascule.train.options import RunOptions
from bascule.train.photos import PhotoOptions
from bascule.train.stopwatch import Stopwatch
from bascule.train.streams import (
    RawBatch,
    SampleBatch,
    Widths,
    pack_encoded,
    patches,
    sample_normals,
)
from bascule.workload.codes import PATCH_PIXELS

TEXT_ENCODER, VAE, TRANSFORMER = "text_encoder", "vae", "transformer"  # stages

_LATENT_PATCH = 2  # side of the latents of one token
_MOST_TOKENS = 2**20  # of a caption; tokenizers without a limit say 1e30
_TINY_TOKENS = 512
_LONGEST, _LONGEST_SIDE = 512, 48  # of what is timed: tokens of a caption, latents of a side
_SIZES, _REPEATS = 6, 3  # timed sizes, and runs of each
_WAN_GROUP = 4  # frames that diffusers encodes at a time, whatever the config says
_VAES = ("AutoencoderKL", "AutoencoderKLWan", "AutoencoderKLQwenImage")
_TEXTS = {"t5": "T5EncoderModel", "umt5": "UMT5EncoderModel", "clip_text_model": "CLIPTextModel"}


class LatentEncoder(nn.Module):
    """A frozen VAE: pixels to mean and deviation of their latents, item by item."""

    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae: Any = vae.eval().requires_grad_(False)
        self.vae.enable_slicing()
        config: Any = vae.config
        self.is_video = type(vae).__name__ != "AutoencoderKL"
        if self.is_video:
            patch = config.get("patch_size") or 1
            self.spatial = patch * 2 ** len(config.temperal_downsample)
            self.frame_group = 2 ** sum(config.temperal_downsample)
            self.channels = config.z_dim
            colours = config.get("in_channels", config.get("input_channels", 3)) / patch**2
            shift, divisor = config.latents_mean, config.latents_std
        else:
            self.spatial = 2 ** (len(config.block_out_channels) - 1)  # pixels a side of a latent
            self.frame_group = 1  # frames of a latent frame, after the first
            self.channels, colours = config.latent_channels, config.in_channels
            shift, divisor = [config.shift_factor or 0.0], [1.0 / config.scaling_factor]
        if colours != 3:
            channels = count(round(colours), "channel")
            raise ConfigError(f"needs images of {channels}: give a VAE for RGB images")
        if self.is_video and self.frame_group != _WAN_GROUP:
            fix = f"one of {_WAN_GROUP}, as many as diffusers encodes at a time"
            what = f"makes one latent frame of {self.frame_group}"
            raise ConfigError(f"{what}: give a VAE that makes {fix}")
        self._constants = [list(map(float, numbers)) for numbers in (shift, divisor)]

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode uint8 pixels of an item, (1, 3, F, H, W) or (1, 3, H, W), to (1, 2 C, f, h, w)."""
        values = pixels.to(torch.promote_types(self.vae.dtype, torch.float32)) / 127.5 - 1.0
        dist = self.vae.encode(values.to(self.vae.dtype)).latent_dist
        return torch.cat([dist.mean, dist.std], dim=1)

    def items(self, pixels: Tensor) -> list[dict[str, Tensor]]:
        """Split a sample (3, F, H, W) into items: videos stay whole, else each frame is one."""
        parts = [pixels] if self.is_video else pixels.unbind(1)
        return [{"pixels": part[None].contiguous()} for part in parts]

    def latents(self, features: Sequence[Tensor], normals: Tensor) -> Tensor:
        """Draw a sample's normalised latents (C, f, h, w) from features and standard normals."""
        frames = [feature[0] if self.is_video else feature[0, :, None] for feature in features]
        mean, std = torch.cat(frames, dim=1).chunk(2)
        drawn = mean + std * normals.view_as(mean).to(mean)
        shift, divisor = (drawn.new_tensor(row).view(-1, 1, 1, 1) for row in self._constants)
        return (drawn - shift) / divisor

    def digest(self) -> str:
        """Return the name of the VAE's class, a digest of its weights, and its constants."""
        return f"{type(self.vae).__name__} {values_digest(self.vae)} {self._constants}"


class TextEncoder(nn.Module):
    """A frozen text encoder that maps the tokens of captions to embeddings, without padding."""

    def __init__(self, encoder: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.encoder: Any = encoder.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        config: Any = encoder.config
        self.width: int = config.hidden_size
        most = getattr(config, "max_position_embeddings", None) or _MOST_TOKENS
        self.most_tokens = min(tokenizer.model_max_length, most, _MOST_TOKENS)
        if len(tokenizer) > config.vocab_size:
            what = f"has {config.vocab_size} embeddings, and its tokenizer {len(tokenizer)} tokens"
            raise ConfigError(f"{what}: give the tokenizer that belongs to it")

    def forward(self, input_ids: Tensor) -> Tensor:
        """Encode (n, L) tokens of n captions to (n, L, width)."""
        return self.encoder(input_ids=input_ids).last_hidden_state

    def tokenize(self, caption: str) -> tuple[list[int], bool]:
        """Return the tokens of a caption, and whether the tokenizer truncated it."""
        tokens = self._tokenizer(caption, truncation=True, max_length=self.most_tokens)["input_ids"]
        if len(tokens) < self.most_tokens:
            return tokens, False
        whole = self._tokenizer(caption, verbose=False)["input_ids"]
        return tokens, len(whole) > len(tokens)

    def digest(self) -> str:
        """Return the name of the encoder's class, with a digest of weights."""
        return f"{type(self.encoder).__name__} {values_digest(self.encoder)}"


@dataclass(frozen=True, slots=True, eq=False)
class FrozenEncoders:
    """The encoders of a run; without one, patches of pixels or bytes of captions are tokens."""

    vae: LatentEncoder | None = None
    text: TextEncoder | None = None

    def __bool__(self) -> bool:
        return self.vae is not None or self.text is not None

    @property
    def stages(self) -> dict[str, Any]:
        """The encoders by the names of their stages, in the order in which they run."""
        stages = {TEXT_ENCODER: self.text, VAE: self.vae}
        return {name: module for name, module in stages.items() if module is not None}

    @property
    def settings(self) -> dict[str, str]:
        """The settings that decide the losses, by option: classes, and digests of weights."""
        return {flag(name): encoder.digest() for name, encoder in self.stages.items()}

    def photo_options(self, options: RunOptions) -> PhotoOptions:
        """Return how photos and captions become tokens."""
        widths: dict[str, Any] = {}
        if self.vae is not None:
            widths["patch"] = _LATENT_PATCH * self.vae.spatial
            widths["frame_group"] = self.vae.frame_group
            widths["token_channels"] = _LATENT_PATCH**2 * self.vae.channels
        if self.text is not None:
            widths |= {"tokenize": self.text.tokenize, "text_dim": self.text.width}
        return PhotoOptions(
            max_tokens=options.max_tokens,
            strict=options.strict,
            clip_frames=options.clip_frames,
            **widths,
        )


def load_encoders(options: RunOptions) -> FrozenEncoders:
    """Load the encoders that options name, from local files only."""
    dtype: torch.dtype = getattr(torch, options.dtype)
    vae = text = None
    if (name := options.vae) is not None:
        vae = tiny.load(f"--vae {name}", partial(_load_vae, name, dtype), "diffusers")
    if (name := options.text_encoder) is not None:
        load = partial(_load_text, name, dtype)
        text = tiny.load(f"--text-encoder {name}", load, "transformers")
    return FrozenEncoders(vae, text)


def _load_vae(name: str, dtype: torch.dtype, diffusers: Any) -> LatentEncoder:
    if name in (tiny.TINY, tiny.TINY_WAN):
        return LatentEncoder(tiny.vae(diffusers, name)).to(dtype)
    kind = _config_of(Path(name), "a VAE of diffusers").get("_class_name")
    if kind not in _VAES:
        raise ConfigError(f"holds {kind or 'no model of diffusers'}: give {_one_of(_VAES)}")
    load = getattr(diffusers, kind).from_pretrained
    return LatentEncoder(load(name, torch_dtype=dtype, local_files_only=True)).to(dtype)


def _load_text(name: str, dtype: torch.dtype, transformers: Any) -> TextEncoder:
    if name == tiny.TINY:
        tokenizer = tiny.tokenizer(transformers, _TINY_TOKENS)
        return TextEncoder(tiny.t5(transformers), tokenizer).to(dtype)
    folder = Path(name)
    kind = _config_of(folder, "a text encoder of transformers").get("model_type")
    if kind not in _TEXTS:
        raise ConfigError(f"holds a model of type {kind}: give {_one_of(tuple(_TEXTS.values()))}")
    load = getattr(transformers, _TEXTS[kind]).from_pretrained
    beside = folder.with_name(folder.name.replace("text_encoder", "tokenizer"))
    source = folder if (folder / "tokenizer_config.json").exists() else beside
    if not (source / "tokenizer_config.json").exists():
        raise ConfigError(f"has no tokenizer: put its files into the folder, or into {beside}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
    return TextEncoder(load(name, dtype=dtype, local_files_only=True), tokenizer).to(dtype)


def _config_of(folder: Path, what: str) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = parse_json(path.read_text(encoding="utf-8"), str(path))
    except OSError:
        raise ConfigError(f"{path} cannot be read: give the folder of {what}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no config: give the folder of {what}")
    return dict(config)


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


class EncoderStages:
    """Balanced encoders of samples, text first; the encoding rank does not affect latents."""

    def __init__(
        self,
        encoders: FrozenEncoders,
        mesh: DeviceMesh,
        widths: Widths,
        options: RunOptions,
        device: torch.device,
        watch: Stopwatch,
        cluster: Cluster | None = None,
    ) -> None:
        self._widths, self._seed, self._watch = widths, options.seed, watch
        self._vae, self._device = encoders.vae, device
        self._balanced = {
            name: BalancedEncoder(
                module.to(device),
                # tokens of a text, or pixels
                length_fn=lambda item: sum(x.shape[1:].numel() for x in item.values()),
                cost=_cost_of(module, device, mesh),
                mesh_or_group=mesh,
                options=EncoderOptions(cluster=cluster, device=device, timeout_s=options.timeout_s),
            )
            for name, module in encoders.stages.items()
        }

    @property
    def last(self) -> dict[str, Encoding | None]:
        """The last step of each stage, by its name; None if no rank had an item."""
        return {name: encoder.last for name, encoder in self._balanced.items()}

    @torch.no_grad()
    def encode(self, batches: Sequence[RawBatch]) -> list[SampleBatch]:
        """Encode all microbatches of this rank's step at once."""
        ids = [sample_id for batch in batches for sample_id in batch.ids]
        pixels = [frames for batch in batches for frames in batch.pixels]
        texts = iter(self._embed([text for batch in batches for text in batch.texts]))
        images = iter(self._image_tokens(pixels, ids))
        encoded = list[SampleBatch]()
        for batch in batches:
            num = len(batch.ids)
            parts = list(islice(images, num)), list(islice(texts, num))
            encoded.append(pack_encoded(batch, *parts, self._widths))
        return encoded

    def _embed(self, texts: list[Tensor]) -> list[Tensor]:
        """Return embeddings (tokens, text_dim) of each text; the encoder skips empty texts."""
        texts = [text.to(self._device) for text in texts]
        if TEXT_ENCODER not in self._balanced:
            return texts
        items = [{"input_ids": text[None]} for text in texts if len(text)]
        features = iter(self._run(TEXT_ENCODER, items))
        none = torch.empty(0, self._widths.text_dim, device=self._device)
        return [_widen(next(features)[0]) if len(text) else none for text in texts]

    def _image_tokens(self, pixels: list[Tensor], ids: list[int]) -> list[Tensor]:
        """Return image tokens (tokens, in_channels) of each sample."""
        pixels = [frames.to(self._device) for frames in pixels]
        if self._vae is None:
            return [patches(frames.float() / 127.5 - 1.0, PATCH_PIXELS) for frames in pixels]
        items = [self._vae.items(frames) for frames in pixels]
        features = iter(self._run(VAE, [item for sample in items for item in sample]))
        images = list[Tensor]()
        for sample_id, sample in zip(ids, items, strict=True):
            encoded = [_widen(next(features)) for _ in sample]
            num = sum(feature.numel() for feature in encoded) // 2
            normals = sample_normals([sample_id], [num], 1, seed=self._seed, stream="latent")
            images.append(patches(self._vae.latents(encoded, normals), _LATENT_PATCH))
        return images

    def _run(self, stage: str, items: list[dict[str, Any]]) -> list[Tensor]:
        with self._watch.timed(stage):
            return self._balanced[stage](items)


def _cost_of(module: LatentEncoder | TextEncoder, device: torch.device, mesh: DeviceMesh) -> Cost:
    """Return the measured seconds of an item by its values: tokens of a text, or pixels."""
    if isinstance(module, LatentEncoder):
        sides = module.spatial * np.geomspace(4, _LONGEST_SIDE, _SIZES).round().astype(int)
        frames = (1,) if module.is_video else ()
        shapes, dtype = [(3, *frames, side, side) for side in sides.tolist()], torch.uint8
    else:
        lengths = np.geomspace(4, min(module.most_tokens, _LONGEST), _SIZES).round().astype(int)
        shapes, dtype = [(length,) for length in np.unique(lengths).tolist()], torch.int64
    items = [torch.zeros(1, *shape, dtype=dtype, device=device) for shape in shapes]
    with torch.no_grad():
        seconds = [median_seconds(partial(module, item), device, _REPEATS) for item in items]
    return fit_item_latency([item.numel() for item in items], mean_over_ranks(mesh, seconds))


def watch_encoders(encoders: FrozenEncoders, watch: Stopwatch) -> None:
    """Time the forwards on this rank ("vae work" ..); the rest of a stage is communication."""
    for name, module in encoders.stages.items():
        module.forward = watch.timed(f"{name} work")(module.forward)


def _widen(x: Tensor) -> Tensor:
    """Widen to float32 at least, since noise is added."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
