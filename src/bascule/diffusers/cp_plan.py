"""Make split tables from the plans for context parallelism that diffusers' models have.

A plan (`_cp_plan`) lists the tensors to shard and to gather, but not the tokens that an attention
module attends to. These follow from diffusers' conventions; models that break them are refused.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from bascule.diffusers.arguments import parameters_of
from bascule.diffusers.split_table import Cut, SplitTable, modules_of
from bascule.errors import ConfigError

_IMAGE, _TEXT = "image", "text"
_TEXT_PREFIXES = "encoder_", "txt_", "text_", "caption_", "prompt_"
_JOINT = "add_q_proj", "to_added_qkv"  # modules of an attention over both text and image
_PLAIN = bool, int, float, str


def table_from_plan(model: nn.Module, plan: Mapping[str, Any]) -> SplitTable:
    """Make a split table from a plan; the names of arguments tell which ones hold text tokens."""
    attends, crosses = _attentions(model)
    if not attends:
        raise _refusal(model, "it has no attention module of diffusers in a list of blocks/layers")
    inputs: dict[str, dict[str, Cut]] = {}
    outputs: dict[str, dict[int, Cut]] = {}
    gathers: dict[str, Cut] = {}
    for pattern, name, value in _entries(model, plan):
        if hasattr(value, "gather_dim"):
            gathers[pattern] = Cut(_IMAGE, value.gather_dim)
            continue
        ndim = getattr(value, "expected_dims", None)
        if isinstance(name, int):
            outputs.setdefault(pattern, {})[name] = Cut((), value.split_dim, ndim)
        elif not (crosses and name.startswith(_TEXT_PREFIXES)) and "mask" not in name:
            segment = _TEXT if name.startswith(_TEXT_PREFIXES) else _IMAGE
            inputs.setdefault(pattern, {})[name] = Cut(segment, value.split_dim, ndim)
    for name in {name for pattern in gathers for name in modules_of(model, pattern)}:
        if name in attends:
            raise _refusal(model, f"its plan gathers after {name}, which may look at all tokens")
    cut_segments = {cut.segment for cuts in inputs.values() for cut in cuts.values()}
    if _IMAGE not in cut_segments or not gathers:
        raise _refusal(model, "its plan does not say where to shard and gather the image's tokens")
    segments = (_TEXT, _IMAGE) if _TEXT in cut_segments else (_IMAGE,)
    others = [name for name in _tensors(model) if name not in inputs.get("", {})]
    refused = {name: why for name in others if (why := _why_refused(name, len(segments)))}
    return SplitTable(
        segments=segments,
        inputs=inputs,
        gathers=gathers,
        blocks=dict.fromkeys(attends, ()),
        replicated=tuple(name for name in others if name not in refused),
        outputs=outputs,
        attends=dict.fromkeys(crosses, ()),
        refused=refused,
    )


def _entries(model: nn.Module, plan: Mapping[str, Any]) -> Iterator[tuple[str, str | int, Any]]:
    """Yield a plan's patterns, each with an argument or an output index, and its entry."""
    for pattern, entry in plan.items():
        try:
            modules_of(model, pattern)
        except ConfigError:  # plans count the layers of the full size
            if not any(part.isdecimal() for part in pattern.split(".")):
                raise
            continue
        named = entry.items() if isinstance(entry, Mapping) else [(0, entry)]
        for name, value in named:
            values = list(value) if isinstance(value, list | tuple) else [value]
            if not values or any(value != values[0] for value in values):
                raise _refusal(model, f"its plan treats parts of {name!r} of {pattern!r} unlike")
            if len(values) > 1 and hasattr(values[0], "gather_dim"):
                raise _refusal(model, f"its plan gathers several outputs of {pattern!r}")
            yield pattern, name, values[0]


def _attentions(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of attentions over all cut tokens, and of cross-attentions to a prompt."""
    by_block: dict[str, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if name and callable(getattr(module, "set_processor", None)):
            block, _, last = name.rpartition(".")
            by_block.setdefault(block, {})[last] = module
    attends: list[str] = []
    crosses: list[str] = []
    for block, attentions in by_block.items():
        container, _, index = block.rpartition(".")
        is_listed = index.isdecimal() and container.endswith(("blocks", "layers"))
        is_pair = attentions.keys() == {"attn1", "attn2"}  # self-attention, and to a prompt
        if not is_listed or "." in container or not (is_pair or len(attentions) == 1):
            raise _refusal(
                model, f"it is unknown which tokens {', '.join(attentions)} of {block} attend to"
            )
        first, *others = (f"{block}.{name}" for name in sorted(attentions))
        attends.append(first)
        if is_pair:
            arguments = parameters_of(model.get_submodule(block))
            is_joint = any(
                getattr(attention, name, None) is not None
                for attention in attentions.values()
                for name in _JOINT
            )
            if is_joint or "encoder_hidden_states" not in arguments:
                raise _refusal(model, f"it is unknown which tokens {others[0]} attends to")
            crosses.extend(others)
    if crosses and len(crosses) < len(attends):
        raise _refusal(model, "some of its blocks attend to a prompt, and some do not")
    return attends, crosses


def _tensors(model: nn.Module) -> list[str]:
    """Return the arguments of a model that may be tensors."""
    parameters = inspect.signature(model.forward).parameters
    plain = {name for name, p in parameters.items() if isinstance(p.default, _PLAIN)}
    names = parameters_of(model)
    return [name for name in names if not name.endswith("_kwargs") and name not in plain]


def _why_refused(name: str, num_segments: int) -> str:
    if "controlnet" in name:
        return "the model's plan does not say how to shard it: write a SplitTable that does"
    if "mask" in name and num_segments > 1:
        return (
            "the model's plan does not say which keys of text and image it hides: use prompts "
            "without padding and leave it out, or write a SplitTable that has it as a Mask"
        )
    return ""


def _refusal(model: nn.Module, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} cannot be split by a plan of diffusers: {reason}: write a "
        "SplitTable, as docs/sequence_parallel.md shows (Adding a table), or use "
        "context_parallel(mesh)"
    )
