"""The VAE and the text encoder of a run: loaded from folders, or tiny with random weights; frozen.

Legend of shapes: F frames, H x W pixels, C latent channels, f latent frames of h x w, L tokens.
"""

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bascule.errors import ConfigError
from bascule.plan.costs import PolynomialCost
from bascule.plan.files import parse_json
from bascule.train.run_options import TINY, TINY_WAN, RunOptions
from bascule.workload.photos import PhotoOptions

LATENT_PATCH = 2
"""Side of the latents that become one token."""

_MOST_TEXT_TOKENS = 2**20  # tokenizers without a limit say 1e30
_WAN_GROUP = 4  # frames that diffusers encodes at a time, whatever the config says
_VAES = ("AutoencoderKL", "AutoencoderKLWan", "AutoencoderKLQwenImage")
_TEXTS = {"t5": "T5EncoderModel", "umt5": "UMT5EncoderModel", "clip_text_model": "CLIPTextModel"}


class LatentEncoder(nn.Module):
    """A frozen VAE that maps pixels to the mean and the deviation of their latents.

    Items are encoded one by one, so what an item gives does not depend on the others.

    Attributes:
        is_video: Whether an item is a video (1, 3, F, H, W), else an image (1, 3, H, W).
        spatial: Pixels along a side of a latent.
        frame_group: Frames that become one latent frame, after the first.
        channels: C.

    Raises:
        ConfigError: It takes other images than of three colours, or other groups of frames.
    """

    cost = PolynomialCost(quadratic=0.0, linear=1.0, constant=0.0)

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
            self.spatial, self.frame_group = 2 ** (len(config.block_out_channels) - 1), 1
            self.channels, colours = config.latent_channels, config.in_channels
            shift, divisor = [config.shift_factor or 0.0], [1.0 / config.scaling_factor]
        if colours != 3:
            raise ConfigError(f"takes images of {colours:g} channels: give a VAE for RGB images")
        if self.is_video and self.frame_group != _WAN_GROUP:
            raise ConfigError(
                f"makes one latent frame of {self.frame_group}: give a VAE that makes one of "
                f"{_WAN_GROUP}, as many as diffusers encodes at a time"
            )
        self._constants = [list(map(float, numbers)) for numbers in (shift, divisor)]

    def forward(self, pixels: Tensor) -> Tensor:
        """(1, 2 C, f, h, w), without f for an image, from uint8 pixels of one item."""
        values = pixels.to(torch.promote_types(self.vae.dtype, torch.float32)) / 127.5 - 1.0
        dist = self.vae.encode(values.to(self.vae.dtype)).latent_dist
        return torch.cat([dist.mean, dist.std], dim=1)

    def length(self, item: Mapping[str, Any]) -> int:
        """Pixels: convolutions take as long as these."""
        return int(item["pixels"].shape[2:].numel())

    def items(self, pixels: Tensor) -> list[dict[str, Tensor]]:
        """A sample (3, F, H, W) as items: the whole, or frame by frame."""
        parts = [pixels] if self.is_video else pixels.unbind(1)
        return [{"pixels": part[None].contiguous()} for part in parts]

    def latents(self, features: Sequence[Tensor], normals: Tensor) -> Tensor:
        """Draw a sample's latents and normalise them as the VAE's pipelines do.

        Args:
            features: What `forward` gave for each of its items, float32 at least.
            normals: As many standard normals as latents.

        Returns:
            (C, f, h, w).
        """
        frames = [one[0] if self.is_video else one[0, :, None] for one in features]
        mean, std = torch.cat(frames, dim=1).chunk(2)
        drawn = mean + std * normals.view_as(mean).to(mean)
        shift, divisor = (drawn.new_tensor(x).view(-1, 1, 1, 1) for x in self._constants)
        return (drawn - shift) / divisor

    def described(self) -> str:
        """Its class, and a digest of its weights and constants."""
        return f"{type(self.vae).__name__} ({_digest(self.vae, repr(self._constants))})"


class TextEncoder(nn.Module):
    """A frozen text encoder that maps the tokens of captions to embeddings, without padding.

    Attributes:
        width: Of an embedding.
        most_tokens: Of a caption; longer ones are cut.

    Raises:
        ConfigError: The tokenizer has more tokens than the encoder.
    """

    def __init__(self, encoder: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.encoder: Any = encoder.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        config: Any = encoder.config
        self.width: int = config.hidden_size
        most = getattr(config, "max_position_embeddings", None) or _MOST_TEXT_TOKENS
        self.most_tokens = min(tokenizer.model_max_length, most, _MOST_TEXT_TOKENS)
        if len(tokenizer) > config.vocab_size:
            raise ConfigError(
                f"has {config.vocab_size} embeddings, and its tokenizer {len(tokenizer)} tokens: "
                "give the tokenizer that belongs to it"
            )

    def forward(self, input_ids: Tensor) -> Tensor:
        """(n, L, width) embeddings of n captions of (n, L) tokens."""
        return self.encoder(input_ids=input_ids).last_hidden_state

    def length(self, item: Mapping[str, Any]) -> int:
        """Tokens."""
        return int(item["input_ids"].shape[1])

    def tokenize(self, caption: str) -> tuple[list[int], bool]:
        """Tokens of a caption, cut as the tokenizer cuts them; and whether that was so."""
        tokens = self._tokenizer(caption, truncation=True, max_length=self.most_tokens)["input_ids"]
        if len(tokens) < self.most_tokens:
            return tokens, False
        whole = self._tokenizer(caption, verbose=False)["input_ids"]
        return tokens, len(whole) > len(tokens)

    def described(self) -> str:
        """Its class, and a digest of its weights."""
        return f"{type(self.encoder).__name__} ({_digest(self.encoder, '')})"


@dataclass(frozen=True, slots=True, eq=False)
class FrozenEncoders:
    """What a run encodes with.

    Attributes:
        vae: None: patches of pixels are tokens.
        text: None: bytes of captions are tokens.
    """

    vae: LatentEncoder | None = None
    text: TextEncoder | None = None

    def __bool__(self) -> bool:
        return self.vae is not None or self.text is not None

    @property
    def settings(self) -> dict[str, str]:
        """What decides the losses, by option: classes, and digests of weights."""
        both = {"--vae": self.vae, "--text-encoder": self.text}
        return {name: one.described() for name, one in both.items() if one is not None}

    def photo_options(self, options: RunOptions) -> PhotoOptions:
        """How photos and captions become tokens."""
        chosen: dict[str, Any] = {}
        if self.vae is not None:
            chosen["patch"] = LATENT_PATCH * self.vae.spatial
            chosen["frame_group"] = self.vae.frame_group
            chosen["token_channels"] = LATENT_PATCH**2 * self.vae.channels
        if self.text is not None:
            chosen |= {"tokenize": self.text.tokenize, "text_dim": self.text.width}
        return PhotoOptions(
            max_tokens=options.max_tokens,
            strict=options.strict,
            clip_frames=options.clip_frames,
            **chosen,
        )


def load_encoders(options: RunOptions) -> FrozenEncoders:
    """The encoders that options name, from files of this machine alone.

    Raises:
        ConfigError: A library or a file is missing, or it is no such encoder; names the option.
    """
    dtype: torch.dtype = getattr(torch, options.dtype)
    vae = _named("--vae", options.vae, "diffusers", dtype, _vae)
    text = _named("--text-encoder", options.text_encoder, "transformers", dtype, _text_encoder)
    return FrozenEncoders(vae, text)


def _named(
    option: str,
    name: str | None,
    library: str,
    dtype: torch.dtype,
    load: Callable[[Any, str, torch.dtype], Any],
) -> Any:
    """What an option names; errors begin with both."""
    if name is None:
        return None
    try:
        host = importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"{option} {name}: {library} is not installed: pip install 'bascule[{library}]'"
        ) from error
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of random weights
            return load(host, name, dtype).to(dtype)
    except ConfigError as error:
        raise ConfigError(f"{option} {name}: {error}") from error
    except Exception as error:  # loaders raise anything on damaged files
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{option} {name}: cannot be loaded: {said}") from error


def _vae(host: Any, name: str, dtype: torch.dtype) -> LatentEncoder:
    if name == TINY:
        downs, ups = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
        widths: dict[str, Any] = {"block_out_channels": (16, 32, 32, 32), "norm_num_groups": 8}
        return LatentEncoder(
            host.AutoencoderKL(down_block_types=downs, up_block_types=ups, **widths)
        )
    if name == TINY_WAN:
        sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
        constants = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
        return LatentEncoder(host.AutoencoderKLWan(**sizes, **constants))
    kind = _config_of(Path(name), "a VAE of diffusers").get("_class_name")
    if kind not in _VAES:
        raise ConfigError(f"holds {kind or 'no model of diffusers'}: give {_one_of(_VAES)}")
    cls = getattr(host, kind)
    return LatentEncoder(cls.from_pretrained(name, torch_dtype=dtype, local_files_only=True))


def _text_encoder(host: Any, name: str, dtype: torch.dtype) -> TextEncoder:
    if name == TINY:
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        tokenizer = host.ByT5Tokenizer(model_max_length=512)
        return TextEncoder(
            host.T5EncoderModel(host.T5Config(vocab_size=len(tokenizer), **sizes)), tokenizer
        )
    folder = Path(name)
    kind = _config_of(folder, "a text encoder of transformers").get("model_type")
    if kind not in _TEXTS:
        raise ConfigError(f"holds a model of type {kind}: give {_one_of(tuple(_TEXTS.values()))}")
    cls = getattr(host, _TEXTS[kind])
    encoder = cls.from_pretrained(name, dtype=dtype, local_files_only=True)
    beside = folder.with_name(folder.name.replace("text_encoder", "tokenizer"))
    home = folder if (folder / "tokenizer_config.json").exists() else beside
    if not (home / "tokenizer_config.json").exists():
        raise ConfigError("has no tokenizer: put its files into the folder, or into one beside it")
    return TextEncoder(encoder, host.AutoTokenizer.from_pretrained(home, local_files_only=True))


def _config_of(folder: Path, what: str) -> dict[str, Any]:
    """The config of a model's folder.

    Raises:
        ConfigError: There is none.
    """
    path = folder / "config.json"
    try:
        found = parse_json(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: give the folder of {what}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no config: give the folder of {what}")
    return dict(found)


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _digest(module: nn.Module, rest: str) -> str:
    """Equal where the weights are, and what else is said."""
    digest = hashlib.blake2b(rest.encode(), digest_size=8)
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
