"""Items of encoders: split a call into items, count their tokens, and join their features.

Items lie along the first dim of all tensors of a call: one row each, or several, as of patches.
"""

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bascule.checks import whole
from bascule.comm.items import Parcel, attached, joined, leaves_of, mapped, parcel
from bascule.comm.route import has_gradient
from bascule.errors import ConfigError
from bascule.plan.offer import NO_ITEMS, Offer

Item = dict[str, Any]
"""The arguments of a call for one item alone, by name."""

_SHORTEST = 64  # runs of frames of a rank that are as short as the shortest

Length = int | tuple[int, float]
"""Tokens of an item; or tokens, and mean query-key pairs a layer."""


@dataclass(frozen=True)
class EncoderTable:
    """Rules that split a call into items, and join items into a call.

    Attributes:
        length: Counts tokens, from the module and an item; None: the user gives `length_fn`.
        packed: Arguments in which an item has as many rows as its size; in others it has one row.
        sizes: Returns the sizes of a call's items, from its arguments; None: all sizes are 1.
        method: Name of the method that is called; None: the module itself is called.
        split: Splits an item, for a number of ranks that share it, into pieces whose concatenated
            outputs are the item's output. None: items stay whole.
        sources: Arguments, of the model around the module, that contain items. The model calls the
            module once for each that is not None, in this order.
        settings: Describes, in each call, the module's settings that all ranks must share.
    """

    length: Callable[[nn.Module, Item], Length] | None = None
    packed: tuple[str, ...] = ()
    sizes: Callable[[Mapping[str, Any]], Sequence[int]] | None = None
    method: str | None = None
    split: Callable[[Item, int], list[Item]] | None = None
    sources: tuple[str, ...] = field(default=("pixel_values", "pixel_values_videos"))
    settings: Callable[[nn.Module], str] | None = None

    def cut(self, arguments: Mapping[str, Any]) -> list[Item]:
        """Split a call into its items, whose tensors are views."""
        sizes = self.sizes_of(arguments)
        parts = {
            name: x.split(sizes if name in self.packed else 1)
            for name, x in arguments.items()
            if isinstance(x, Tensor)
        }
        return [{**arguments, **{key: x[i] for key, x in parts.items()}} for i in range(len(sizes))]

    def sizes_of(self, arguments: Mapping[str, Any]) -> list[int]:
        """Return the rows that each item of a call has in packed arguments."""
        shapes = {name: tuple(x.shape) for name, x in arguments.items() if isinstance(x, Tensor)}
        rows = {name: shape[0] if shape else -1 for name, shape in shapes.items()}
        counts = {num for name, num in rows.items() if name not in self.packed}
        sizes = [1] * max(counts, default=0) if self.sizes is None else list(self.sizes(arguments))
        total = sum(sizes)
        if counts != {len(sizes)} or any(rows.get(x, total) != total for x in self.packed):
            what = f"arguments of shapes {shapes} differ in their number of items"
            sized = f", or its size in {self.packed}" if self.packed else ""
            raise ConfigError(f"{what}: give tensors with one row per item{sized}")
        return sizes

    def join(self, items: Sequence[Item]) -> Item:
        """Return the arguments of one call for items with the same `form_of`."""
        first = items[0]
        if len(items) == 1:
            return dict(first)
        alike = {name: x for name, x in first.items() if not isinstance(x, Tensor)}
        tensors = first.keys() - alike.keys()
        return alike | {name: torch.cat([item[name] for item in items]) for name in tensors}

    def cut_output(self, output: Any, items: Sequence[Item]) -> list[list[Tensor]]:
        """Split an output into the tensors of each item, in the order of `leaves_of`."""
        sizes = [1 if self.sizes is None else self.sizes(item)[0] for item in items]
        columns = [_cut_rows(leaf, sizes) for leaf in leaves_of(output)]
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in items]


def _cut_rows(leaf: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Cut a tensor into one row for each item, or into rows in proportion to the items' sizes."""
    num, total = leaf.shape[0] if leaf.dim() else -1, sum(sizes)
    if num == len(sizes):
        return leaf.split(1)
    if num < 0 or any(num * size % total for size in sizes):
        items = f"{len(sizes)} items of sizes {list(sizes)[:8]}"
        what = f"an output of shape {tuple(leaf.shape)} cannot be cut into {items}"
        raise ConfigError(f"{what}: the module must return rows for each item in dim 0")
    return leaf.split([num * size // total for size in sizes])


def form_of(item: Item, device: torch.device) -> int:
    """Return a number that is equal for items that fit into one call."""
    tensors = {name: x for name, x in item.items() if isinstance(x, Tensor)}
    shapes = sorted((name, str(x.dtype), *x.shape[1:]) for name, x in tensors.items())
    return batch_key(shapes, item.keys() - tensors.keys(), item, device)


def batch_key(shapes: object, equal: Collection[str], item: Item, device: torch.device) -> int:
    """Return a number that items share if their shapes, and the values named in `equal`, agree."""
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=8)
    rest = {name: item[name] for name in sorted(equal)}
    for part in parcel(rest, device).parts if rest else ():
        digest.update(part.numpy(force=True).tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def called_with(function: Callable[..., Any], args: Sequence[Any], kwargs: Item) -> Item:
    """Return the arguments of a call by name, without arguments that are None."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"the encoder does not accept these arguments: {error}") from None
    named: Item = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ConfigError("the encoder has *args: give all of its arguments by name")
        named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return {name: value for name, value in named.items() if value is not None}


def _qwen_length(module: nn.Module, item: Mapping[str, Any]) -> tuple[int, float]:
    """Count the patches of an image or a video of Qwen-VL, and its mean query-key pairs a layer.

    A frame attends to itself; in Qwen2.5-VL, layers not in `fullatt_block_indexes` use windows.
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
    """Cut a length into pieces of `side`, and sum the squares of the pieces' lengths."""
    return length // side * side**2 + (length % side) ** 2


def _image_length(module: nn.Module, item: Mapping[str, Any]) -> int:
    """Count the patches of an image, or a tile, of pixels (1, C, H, W)."""
    config: Any = module.config
    patch = config.patch_size
    sides = (patch, patch) if isinstance(patch, int) else patch
    height, width = item["pixel_values"].shape[-2:]
    return max(1, (height // sides[0]) * (width // sides[1]))


def _text_length(module: nn.Module, item: Mapping[str, Any]) -> int:
    """Count the tokens of a text with its padding, which is computed as well."""
    tokens = item.get("input_ids")
    return int((item["inputs_embeds"] if tokens is None else tokens).shape[1])


def _pixel_length(module: nn.Module, item: Mapping[str, Any]) -> int:
    """Count the pixels of an image or video (1, C, .., H, W), to which convolutions' time grows."""
    return int(item["x"].shape[2:].numel())


def _grid_sizes(arguments: Mapping[str, Any]) -> list[int]:
    return arguments["grid_thw"].prod(-1).tolist()


def split_frames(item: Item, num_ranks: int) -> list[Item]:
    """Cut a video into runs of frames, for a tower whose patches attend within their frame alone.

    Each run is an even share of the rest, so that short runs fill up what long ones leave uneven:
    at most about 5 runs a rank.
    """
    frames, height, width = item["grid_thw"][0].tolist()
    counts, rest = list[int](), frames
    shortest = max(1, frames // (_SHORTEST * num_ranks))
    while rest:
        counts.append(min(rest, max(shortest, -(-rest // num_ranks))))
        rest -= counts[-1]
    grids = item["grid_thw"].new_tensor([(count, height, width) for count in counts])
    patches = item["hidden_states"].split([count * height * width for count in counts])
    return [
        {**item, "hidden_states": part, "grid_thw": grid[None]}
        for part, grid in zip(patches, grids, strict=True)
    ]


_QWEN = EncoderTable(
    length=_qwen_length, packed=("hidden_states",), sizes=_grid_sizes, split=split_frames
)
_IMAGES = EncoderTable(length=_image_length)
_TEXTS = EncoderTable(length=_text_length, sources=())
_VAE = EncoderTable(length=_pixel_length, method="encode", sources=())

TABLES: Mapping[str, EncoderTable] = {
    f"{library}.models.{name}": table
    for library, tables in {
        "transformers": {
            "qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel": _QWEN,
            "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel": _QWEN,
            "qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniVisionEncoder": _QWEN,
            "qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel": _QWEN,
            "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel": _QWEN,
            "qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeVisionEncoder": _QWEN,
            "qwen3_5.modeling_qwen3_5.Qwen3_5VisionModel": _QWEN,
            "qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeVisionModel": _QWEN,
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
"""Tables by the path of the module's class."""


def table_of(module: nn.Module) -> EncoderTable:
    """Find the table of a module's class, or of its nearest base class; else the default one.

    A subclass may let frames attend to each other, so its videos stay whole.
    """
    classes = [cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule)]
    for cls in classes:
        if table := TABLES.get(f"{cls.__module__}.{cls.__qualname__}"):
            return table if cls is classes[0] else replace(table, split=None)
    return EncoderTable()


@dataclass(frozen=True, slots=True, eq=False)
class LocalItems:
    """The items of this rank, or pieces of items, ready to travel."""

    pieces: Sequence[Item] = ()
    num_pieces: Sequence[int] = ()  # of each item
    parcels: Sequence[Parcel] = ()
    offer: Offer = NO_ITEMS

    def join_pieces(self, leaves: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Concatenate the output tensors of the pieces of each item."""
        pieces = iter(leaves)
        groups = [list(islice(pieces, num)) for num in self.num_pieces]
        return [
            group[0] if len(group) == 1 else [torch.cat(part) for part in zip(*group, strict=True)]
            for group in groups
        ]


def prepare(
    items: Sequence[Item],
    table: EncoderTable,
    length_of: Callable[[Item], Length],
    device: torch.device,
    *,
    num_sharing: int,
    travel: bool,
) -> LocalItems:
    """Split each of this rank's items for `num_sharing` ranks; pack the pieces if they `travel`."""
    pieces, counts, parcels = list[Item](), list[int](), list[Parcel]()
    lens, pairs, forms = list[int](), list[float](), list[int]()
    for place, item in enumerate(items):
        try:
            if len(table.sizes_of(item)) != 1:
                raise ConfigError("it holds several items: give each as an item of its own")
            cut = table.split(item, num_sharing) if table.split and num_sharing > 1 else [item]
            for piece in cut:
                length = length_of(piece)
                tokens, num_pairs = length if isinstance(length, tuple) else (length, -1.0)
                lens.append(whole("length_fn", tokens, 1))
                pairs.append(float(num_pairs))
                forms.append(form_of(piece, device))
                if travel:
                    parcels.append(parcel(mapped(dict(piece), Tensor.detach), device))
                else:
                    tensors = [x for x in piece.values() if isinstance(x, Tensor)]
                    parcels.append(Parcel((), (), sum(x.nbytes for x in tensors)))
        except Exception as error:
            is_ours = isinstance(error, ConfigError)
            text = str(error) if is_ours else repr(error)
            raise ConfigError(f"item {place}: {text}") from None if is_ours else error
        pieces += cut
        counts.append(len(cut))
    num_bytes = [piece.num_bytes for piece in parcels]
    offer = Offer.of([[len(pieces)]], lens, num_bytes=num_bytes, forms=forms, pairs=pairs)
    return LocalItems(pieces, counts, parcels, offer)


class Features(list[Any]):
    """The features of a rank's items, in their order."""

    def __init__(self, outputs: Sequence[Any], token: Tensor | None, template: Any) -> None:
        super().__init__(outputs)
        self.token = token  # a scalar that every rank's backward pass must reach, with gradients
        self.template = template  # an output of the module, or None if no rank had an item

    @property
    def together(self) -> Any:
        """The output of the module for all items in one call; without items it has no rows."""
        if self.template is None:
            raise ConfigError("no rank has an item to encode: give at least one rank an item")
        if not self:
            return self.attach(mapped(self.template, lambda leaf: leaf[:0]))
        return joined(self)

    def attach(self, output: Any) -> Any:
        """Return the same output; its backward pass also runs the encoder's backward pass.

        Every rank attaches its loss: without items, its loss does not depend on the encoder.
        """
        return attach(output, [self.token])


def attach(output: Any, tokens: Sequence[Tensor | None]) -> Any:
    """Return the same output; its backward pass reaches the tokens."""

    def with_tokens(leaf: Tensor) -> Tensor:
        for token in tokens:
            if token is not None and token.requires_grad and has_gradient(leaf):
                leaf = attached(leaf, token)
        return leaf

    return mapped(output, with_tokens)
