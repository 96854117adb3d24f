"""Split tables: one for each model says where its tokens are cut and put together.

A table names modules as `model.named_modules()` does; `*` stands for one part of a name, and "" is
the model itself. Tensors keep their other dims: only the tokens of a segment (text, image) are cut.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor, or each tensor of a list, holds the tokens of a segment.

    Attributes:
        segment: Name of the segment.
        dim: Its dim of tokens.
        ndim: Only a tensor with so many dims holds tokens; None says that all do.
    """

    segment: str
    dim: int = 1
    ndim: int | None = None


@dataclass(frozen=True)
class SplitTable:
    """Says which tensors of a model are cut into the ranks' shares, and which are gathered.

    Attributes:
        segments: Their order in the sequence that is attended to.
        inputs: Arguments that are cut on their way into a module, by module and argument.
        outputs: Parts of tuples that are cut on their way out of a module, by module and place.
        gathers: Tensors that are made whole on their way out of a module.
        blocks: Modules that attend over the mesh, with the segments of what they return.
        whole: Other arguments of the model that are or hold tensors: every rank needs all of them.
        masks: Arguments (B, tokens of a segment) that say which keys are seen, by argument; they
            are taken from the model, and attention sees them whole.
        local: Modules whose attention is left as it is: every rank has their keys.
        unbatched: Arguments of the model without a batch: one for all its samples.
    """

    segments: tuple[str, ...]
    inputs: Mapping[str, Mapping[str, Cut]]
    gathers: Mapping[str, Cut]
    blocks: Mapping[str, tuple[str, ...]]
    whole: tuple[str, ...] = ()
    outputs: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    unbatched: tuple[str, ...] = ()


Link = tuple[nn.Module, str, nn.Module]  # a module, a name in it, and what has this name

_TEXT_IMAGE = "text", "image"

FLUX = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={
        "": {
            "hidden_states": Cut("image"),
            "encoder_hidden_states": Cut("text"),
            "img_ids": Cut("image", dim=-2),
            "txt_ids": Cut("text", dim=-2),
            "controlnet_block_samples": Cut("image"),
            "controlnet_single_block_samples": Cut("image"),
        }
    },
    gathers={"proj_out": Cut("image")},
    blocks=dict.fromkeys(("transformer_blocks.*", "single_transformer_blocks.*"), _TEXT_IMAGE),
    whole=("pooled_projections", "timestep", "guidance"),
    unbatched=("img_ids", "txt_ids"),
)

QWEN_IMAGE = SplitTable(
    segments=_TEXT_IMAGE,
    inputs={
        "": {"hidden_states": Cut("image"), "controlnet_block_samples": Cut("image")},
        "transformer_blocks.0": {"encoder_hidden_states": Cut("text")},
        "transformer_blocks.*": {"modulate_index": Cut("image")},
    },
    outputs={"pos_embed": {0: Cut("image", dim=0), 1: Cut("text", dim=0)}},
    gathers={"proj_out": Cut("image")},
    blocks={"transformer_blocks.*": _TEXT_IMAGE},
    whole=("encoder_hidden_states", "timestep", "guidance", "additional_t_cond"),
    masks={"encoder_hidden_states_mask": "text"},
)

WAN = SplitTable(
    segments=("video",),
    inputs={
        "": {"timestep": Cut("video", ndim=2)},
        "blocks.0": {"hidden_states": Cut("video")},
    },
    outputs={"rope": {0: Cut("video"), 1: Cut("video")}},
    gathers={"proj_out": Cut("video")},
    blocks={"blocks.*": ("video",)},
    whole=("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image"),
    local=("blocks.*.attn2",),
)

COGVIDEOX = SplitTable(
    segments=("text", "video"),
    inputs={
        "": {"image_rotary_emb": Cut("video", dim=0)},
        "transformer_blocks.0": {
            "hidden_states": Cut("video"),
            "encoder_hidden_states": Cut("text"),
        },
    },
    gathers={"proj_out": Cut("video")},
    blocks={"transformer_blocks.*": ("video", "text")},
    whole=("hidden_states", "encoder_hidden_states", "timestep", "timestep_cond", "ofs"),
    unbatched=("image_rotary_emb",),
)

TABLES: Mapping[str, SplitTable] = {
    "diffusers.models.transformers.transformer_flux.FluxTransformer2DModel": FLUX,
    "diffusers.models.transformers.transformer_qwenimage.QwenImageTransformer2DModel": QWEN_IMAGE,
    "diffusers.models.transformers.transformer_wan.WanTransformer3DModel": WAN,
    "diffusers.models.transformers.cogvideox_transformer_3d.CogVideoXTransformer3DModel": COGVIDEOX,
}


def table_of(model: nn.Module) -> SplitTable:
    """The table of a model's class, or of the nearest class that it is made from.

    Raises:
        ConfigError: There is no such entry.
    """
    for cls in type(model).__mro__:
        table = TABLES.get(f"{cls.__module__}.{cls.__qualname__}")
        if table is not None:
            return table
    known = ", ".join(name.rpartition(".")[2] for name in TABLES)
    raise ConfigError(
        f"no split table for {type(model).__name__} (there are: {known}): write one for "
        "parallelize(.., table=SplitTable(..)), as docs/sequence_parallel.md shows (Adding a table)"
    )


def modules_of(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The modules that a pattern of a table names, in the order of the model.

    None for the entries of a list that is there and empty, as of a Flux without single blocks.

    Raises:
        ConfigError: There are none, and no such list.
    """
    modules = dict(model.named_modules())
    found = _matching(modules, pattern)
    if not found:
        lists = _matching(modules, pattern.removesuffix(".*")).values()
        if not lists or not all(isinstance(x, nn.ModuleList) and len(x) == 0 for x in lists):
            raise ConfigError(
                f"the split table names {pattern!r}, and {type(model).__name__} has no such module"
            )
    return found


def links_to(model: nn.Module, names: Iterable[str]) -> tuple[Link, ...]:
    """Each step on the way from a model to modules of these names, once."""
    links: dict[tuple[int, str], Link] = {}
    for name in names:
        parent = model
        for key in name.split("."):
            child = parent._modules[key]
            assert child is not None
            links[id(parent), key] = parent, key, child
            parent = child
    return tuple(links.values())


def _matching(modules: Mapping[str, nn.Module], pattern: str) -> dict[str, nn.Module]:
    regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return {name: module for name, module in modules.items() if regex.fullmatch(name)}
