"""Encoder tables: one for each family says what the items of a call are, and how long each is.

Items lie along the first dim of all tensors of a call: one row each, as the images of a batch, or
several, as the patches of images of unlike sizes. What comes out is cut likewise.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bascule.comm.items import leaves_of, parcel, rebuilt
from bascule.errors import ConfigError
from bascule.plan.checks import number, shown
from bascule.plan.limits import Limits
from bascule.plan.machine import Cluster

Item = dict[str, Any]
"""The arguments of a call for one item alone, by name."""

Length = int | tuple[int, float]
"""Tokens of an item; and pairs of a query and a key that a layer computes, on the mean of them."""


@dataclass(frozen=True)
class EncoderTable:
    """Says how the items of a call are cut apart and put together.

    Attributes:
        length: Tokens of an item, from the module and the item; None: the user gives `length_fn`.
        packed: Arguments in which an item has as many rows as its size; the others have one.
        sizes: The sizes of the items of a call, from its arguments; None: all are 1.
        method: What is called of the module, where it is not the module itself.
        split: An item's pieces, at most so many, of an encoder that computes each by itself: their
            outputs one after another are those of the item. None: items stay whole.
        sources: Arguments of the model around the module that hold items; the module is called
            once for each that is there, in this order.
        settings: What of the module must be the same on all ranks, in each call.
    """

    length: Callable[[nn.Module, Item], Length] | None = None
    packed: tuple[str, ...] = ()
    sizes: Callable[[Mapping[str, Any]], Sequence[int]] | None = None
    method: str | None = None
    split: Callable[[Item, int], list[Item]] | None = None
    sources: tuple[str, ...] = field(default=("pixel_values", "pixel_values_videos"))
    settings: Callable[[nn.Module], str] | None = None

    def cut(self, arguments: Mapping[str, Any]) -> list[Item]:
        """The items of a call; views.

        Raises:
            ConfigError: Arguments have unlike numbers of items.
        """
        given, sizes = self._sizes(arguments)
        num = len(sizes)
        parts = {name: x.split(sizes if name in self.packed else 1) for name, x in given.items()}
        return [{**arguments, **{name: x[i] for name, x in parts.items()}} for i in range(num)]

    def num_items(self, arguments: Mapping[str, Any]) -> int:
        """How many `cut` gives.

        Raises:
            ConfigError: Arguments have unlike numbers of items.
        """
        return len(self._sizes(arguments)[1])

    def _sizes(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[int]]:
        """Arguments that hold items, and the sizes of these."""
        counts = self._counts(arguments)
        given = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        sizes = None if self.sizes is None else list(self.sizes(arguments))
        num = counts.pop() if len(counts) == 1 else -1
        if sizes is not None and len(sizes) != num:
            num = -1
        total = num if sizes is None else sum(sizes)
        shapes = {name: tuple(x.shape) for name, x in given.items()}
        if num < 0 or any(given[name].shape[0] != total for name in self.packed if name in given):
            raise ConfigError(
                f"arguments of shapes {shapes} do not hold as many items each: give tensors with "
                f"one row an item{', or its size in ' + str(self.packed) if self.packed else ''}"
            )
        return given, [1] * num if sizes is None else sizes

    def join(self, items: Sequence[Item]) -> Item:
        """The arguments of one call for items of the same form."""
        first = items[0]
        if len(items) == 1:
            return dict(first)
        alike = {name: x for name, x in first.items() if not isinstance(x, Tensor)}
        tensors = first.keys() - alike.keys()
        return alike | {name: torch.cat([item[name] for item in items]) for name in tensors}

    def parts(self, output: Any, items: Sequence[Item]) -> list[list[Tensor]]:
        """The tensors of an output that belong to each item, in the order of the nest.

        Raises:
            ConfigError: A tensor cannot be cut into the items.
        """
        sizes = [1 if self.sizes is None else self.sizes(item)[0] for item in items]
        columns = [_cut(leaf, sizes) for leaf in leaves_of(output)]
        return [list(own) for own in zip(*columns, strict=True)] if columns else [[] for _ in items]

    def _counts(self, arguments: Mapping[str, Any]) -> set[int]:
        """Numbers of rows of arguments with one row an item."""
        given = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        if any(x.dim() == 0 for x in given.values()):
            raise ConfigError("an argument is a tensor without dims: give one row an item")
        return {x.shape[0] for name, x in given.items() if name not in self.packed}


def _cut(leaf: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """One row an item, or rows as their sizes."""
    num, total = leaf.shape[0] if leaf.dim() else -1, sum(sizes)
    rows, is_whole = [1] * len(sizes), num == len(sizes)
    if not is_whole:
        rows = [num * size // total for size in sizes]
        is_whole = num >= 0 and not any(num * size % total for size in sizes)
    if not is_whole:
        raise ConfigError(
            f"an output of shape {tuple(leaf.shape)} cannot be cut into {len(sizes)} items of "
            f"sizes {list(sizes)[:8]}: the module must give each item rows of the first dim"
        )
    return leaf.split(rows)


def filled(output: Any, leaves: Sequence[Tensor]) -> Any:
    """An output of the same form around other tensors."""
    return rebuilt(output, iter(leaves))


def form_of(item: Item, device: torch.device) -> int:
    """A number that is the same for items that fit into one call."""
    tensors = {name: x for name, x in item.items() if isinstance(x, Tensor)}
    shapes = sorted((name, str(x.dtype), *x.shape[1:]) for name, x in tensors.items())
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=8)
    rest = {name: item[name] for name in sorted(item.keys() - tensors.keys())}
    for part in parcel(rest, device).parts if rest else ():
        digest.update(part.numpy(force=True).tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def called_with(function: Callable[..., Any], args: Sequence[Any], kwargs: Item) -> Item:
    """The arguments of a call by name, without those that are None.

    Raises:
        ConfigError: They are not those of the function.
    """
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"the encoder cannot be called so: {error}") from None
    named: Item = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ConfigError("the encoder takes arguments without names (*args): give them names")
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return {name: value for name, value in named.items() if value is not None}


def of_patches(module: nn.Module, item: Mapping[str, Any]) -> tuple[int, float]:
    """Patches of an image or a video of Qwen-VL, and pairs on the mean of all layers.

    Each frame attends to itself: t frames of h x w patches are t (h w)^2 pairs. Layers of
    Qwen2.5-VL that are not in `fullatt_block_indexes` attend within windows, whose sides are
    `window_size / patch_size` patches, the last of a row or column less.
    """
    config: Any = module.config
    frames, height, width = (int(n) for n in item["grid_thw"][0].tolist())
    full = frames * float(height * width) ** 2
    full_layers = getattr(config, "fullatt_block_indexes", None)
    window = getattr(config, "window_size", None)
    if full_layers is None or not window:
        return frames * height * width, full
    side = window // config.patch_size // config.spatial_merge_size * config.spatial_merge_size
    windowed = frames * float(_squares(height, side) * _squares(width, side))
    num_full = len({layer for layer in full_layers if 0 <= layer < config.depth})
    pairs = (num_full * full + (config.depth - num_full) * windowed) / config.depth
    return frames * height * width, pairs


def _squares(length: int, side: int) -> int:
    """Sum of the squares of a length cut into pieces of a side."""
    return length // side * side**2 + (length % side) ** 2


def of_image(module: nn.Module, item: Mapping[str, Any]) -> int:
    """Patches of an image, or a tile, of pixels (1, C, H, W)."""
    config: Any = module.config
    patch = config.patch_size
    sides = (patch, patch) if isinstance(patch, int) else patch
    height, width = item["pixel_values"].shape[-2:]
    return max(1, (height // sides[0]) * (width // sides[1]))


def of_text(module: nn.Module, item: Mapping[str, Any]) -> int:
    """Tokens of a text as it is padded: padding is computed as well."""
    del module
    tokens = item.get("input_ids")
    return int((item["inputs_embeds"] if tokens is None else tokens).shape[1])


def of_pixels(module: nn.Module, item: Mapping[str, Any]) -> int:
    """Pixels of an image or video (1, C, .., H, W): a VAE's convolutions take as long as these."""
    del module
    return int(item["x"].shape[2:].numel())


def _grid_sizes(arguments: Mapping[str, Any]) -> list[int]:
    return arguments["grid_thw"].prod(-1).tolist()


def _by_frames(item: Item, most: int) -> list[Item]:
    """Runs of frames of a video, or the image: patches attend to those of their frame alone."""
    frames, height, width = item["grid_thw"][0].tolist()
    short, num_long = divmod(frames, num := min(frames, most))
    counts = [short + (place < num_long) for place in range(num)]
    grids = item["grid_thw"].new_tensor([(count, height, width) for count in counts])
    patches = item["hidden_states"].split([count * height * width for count in counts])
    return [
        {**item, "hidden_states": part, "grid_thw": grid[None]}
        for part, grid in zip(patches, grids, strict=True)
    ]


_QWEN = EncoderTable(
    length=of_patches,
    packed=("hidden_states",),
    sizes=_grid_sizes,
    split=_by_frames,
)
_IMAGES = EncoderTable(length=of_image)
_TEXTS = EncoderTable(length=of_text, sources=())
_VAE = EncoderTable(length=of_pixels, method="encode", sources=())

TABLES: Mapping[str, EncoderTable] = {
    f"{library}.models.{name}": table
    for library, tables in {
        "transformers": {
            "qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel": _QWEN,
            "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel": _QWEN,
            "qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel": _QWEN,
            "internvl.modeling_internvl.InternVLVisionModel": _IMAGES,
            "siglip.modeling_siglip.SiglipVisionModel": _IMAGES,
            "clip.modeling_clip.CLIPVisionModel": _IMAGES,
            "clip.modeling_clip.CLIPTextModel": _TEXTS,
            "clip.modeling_clip.CLIPTextModelWithProjection": _TEXTS,
            "t5.modeling_t5.T5EncoderModel": _TEXTS,
            "umt5.modeling_umt5.UMT5EncoderModel": _TEXTS,
        },
        "diffusers": {
            "autoencoders.autoencoder_kl.AutoencoderKL": _VAE,
            "autoencoders.autoencoder_kl_wan.AutoencoderKLWan": _VAE,
            "autoencoders.autoencoder_kl_qwenimage.AutoencoderKLQwenImage": _VAE,
        },
    }.items()
    for name, table in tables.items()
}
"""By the path of the module's class."""


def table_of(module: nn.Module) -> EncoderTable:
    """The table of a module's class, or of the nearest class that it is made from.

    That of a module of no known class has one row an item in every argument, and no length.
    """
    for cls in type(module).__mro__:
        table = TABLES.get(f"{cls.__module__}.{cls.__qualname__}")
        if table is not None:
            return table
    return EncoderTable()


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """How a BalancedEncoder works, where the defaults do not fit.

    Attributes:
        table: What the items of a call are. Default: the one for the module's class.
        limits: What a rank can hold: tokens, items, and bytes of what is encoded; hard.
        home_tolerance: By how much the slowest rank may take longer than in the best plan, so that
            fewer items move: those of a step that is as even as that stay. 0.02 is 2 %.
        cluster: What computing and exchanging take, for whether moving pays; costs are in seconds
            then, or those of a TransformerCost. Default: exchanges are timed once, and the
            encoder's calls from the second to the ninth; from then on, what does not pay stays.
        device: Where the tensors are. Default: the mesh's, or the group's back end's.
        timeout_s: Longest wait of a collective, in seconds.
        features_for: "owner": each rank gives its own items and gets their features. "all": every
            rank gives the same items, as in inference; none is sent, and all get the features.
            "first": likewise, and only the first rank gets them. The last two have no gradients.
    """

    table: EncoderTable | None = None
    limits: Limits | None = None
    home_tolerance: float = 0.02
    cluster: Cluster | None = None
    device: torch.device | str | None = None
    timeout_s: float = 600.0
    features_for: Literal["owner", "all", "first"] = "owner"


SETTINGS = ("module", "weights", "home_tolerance", "features_for", "settings")
"""Names of what `settings_of` gives."""

GETTING = {"owner": 0, "all": None, "first": 1}
"""By `features_for`: ranks that get what all of them gave; None: all."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def settings_of(module: nn.Module, table: EncoderTable, options: EncoderOptions) -> dict[str, str]:
    """What must be the same on all ranks when an encoder is made.

    Raises:
        ConfigError: An option is wrong.
    """
    number("home_tolerance", options.home_tolerance)
    if options.features_for not in GETTING:
        raise ConfigError(
            f"features_for={shown(options.features_for)}: choose one of {list(GETTING)}"
        )
    shapes = f"{type(module).__name__} with parameters of shapes {names_digest(module)}"
    settings = "" if table.settings is None else table.settings(module)
    own = shapes, values_digest(module), str(options.home_tolerance), options.features_for, settings
    return dict(zip(SETTINGS, own, strict=True))


def names_digest(module: nn.Module) -> str:
    """Of the names, dtypes and shapes of the parameters."""
    parts = [(name, str(p.dtype), *p.shape) for name, p in module.named_parameters()]
    return _digest(repr(parts))


def values_digest(module: nn.Module) -> str:
    """Of the values of parameters and buffers; FSDP's shards, unlike on all ranks, are left out.

    From the sums of their bits as integers, which no order of adding changes: one pass over the
    weights on their device, and one number of each to the host.
    """
    given = [*module.parameters(), *module.buffers()]
    return _values([x for x in given if not isinstance(x, DTensor) and not x.is_meta])


def contents_of(tensors: Sequence[Tensor]) -> str:
    """Shapes and a digest of values: the same for the same tensors on all ranks."""
    shapes = [tuple(x.shape) for x in tensors]
    return f"shapes {shapes[:8]} of {len(shapes)} tensors with values {_values(tensors)}"


def _values(tensors: Sequence[Tensor]) -> str:
    parts = [part for x in tensors for part in _plain(x.detach()) if part.numel()]
    sums = [_bits(part).sum(dtype=torch.int64).cpu() for part in parts]
    return _digest(repr([int(one) for one in sums]))


def _plain(x: Tensor) -> list[Tensor]:
    """What a tensor is made of: of quantised weights their codes and scales."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    names, _ = x.__tensor_flatten__()
    return [part for name in names for part in _plain(getattr(x, name))]


def _bits(x: Tensor) -> Tensor:
    real = torch.view_as_real(x) if x.is_complex() else x
    return real.view(_INTEGERS[real.dtype.itemsize])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
