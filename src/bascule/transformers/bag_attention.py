"""Attention of a step inside the models of transformers, through the interfaces that these offer.

Shapes: T tokens that this rank computes on, H heads, K key-value heads, D head width.
"""

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from bascule.errors import ConfigError
from bascule.parallel import Step
from bascule.stand_in import as_in_use
from bascule.transformers.separation import Reach, check_separates, reach_of

NAME = "bascule"


def register_attention() -> None:
    """Make `attn_implementation="bascule"` known to transformers, for models of `call_packed`."""
    AttentionInterface.register(NAME, attend_in_bags)
    AttentionMaskInterface.register(NAME, _keep_mask)


def call_packed(
    model: nn.Module,
    step: Step,
    *,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Any:
    """Call a model of transformers on the tokens that this rank computes on, as one row.

    Compute the loss from the logits with `step.mean`, over routed labels. The output has
    (1, max(T, 1), ..), since a rank without tokens computes one, of zeros.

    Args:
        model: A model with `attn_implementation="bascule"`.
        step: From `SequenceParallel.plan`.
        input_ids: (T,), from `step.route`.
        inputs_embeds: (T, ..), from `step.route`, in place of `input_ids`.
        position_ids: (axes, T). Default: the position of each token in its sequence.

    Raises:
        ConfigError: The model would mix sequences, or count positions otherwise than in each alone.
    """
    device, num_tokens = step.token_slot.device, step.token_slot.shape[0]
    if position_ids is None:
        position_ids = torch.from_numpy(step.local.positions).to(device)
    rows = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    rows = {name: x for name, x in rows.items() if x is not None}
    if not torch.compiler.is_compiling():
        if model not in _tried:
            _tried[model] = _try(model, rows, position_ids)
        longest, row = int(step.plan.seq_lens.max(initial=0)), int(step.plan.tokens.max())
        _tried[model].check(type(model).__name__, longest, row)
    if not num_tokens:
        rows = {name: x.new_zeros(1, *x.shape[1:]) for name, x in rows.items()}
        position_ids = position_ids.new_zeros(*position_ids.shape[:-1], 1)
    return _call(model, step, rows, position_ids)


def _call(
    model: nn.Module,
    step: Any,
    rows: dict[str, Tensor],
    positions: Tensor | None,
    *,
    has_mask: bool = True,
) -> Any:
    """Call a model on one row; without positions it counts them itself."""
    inputs: dict[str, Any] = {name: x[None] for name, x in rows.items()}
    if positions is not None:
        inputs["position_ids"] = positions[..., None, :]
    if has_mask:  # transformers takes one of four dims as it is, and makes none from the tokens
        inputs["attention_mask"] = torch.zeros(1, 1, 0, 0, device=step.token_slot.device)
    return model(**inputs, use_cache=False, bascule_step=step)


_tried: "WeakKeyDictionary[nn.Module, Reach]" = WeakKeyDictionary()


class Alone:
    """Attends within a few whole sequences on this rank, in place of a step."""

    def __init__(self, lens: list[int], device: torch.device) -> None:
        self._lens = lens
        self.seen: list[tuple[int, dict[str, Any]]] = []  # window of its mask or 0, and settings
        self.token_slot = torch.arange(sum(lens), device=device)
        self.plan = SimpleNamespace(masks=None, seq_lens=np.array(lens))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
    ) -> Tensor:
        """Attend as `Step.attend` does."""
        settings: dict[str, Any] = {"is_causal": causal, "scale": scale, "enable_gqa": True}
        parts = zip(*(x.transpose(0, 1).split(self._lens, 1) for x in (q, k, v)), strict=True)
        outs = [functional.scaled_dot_product_attention(*part, **settings) for part in parts]
        return torch.cat(outs, 1).transpose(0, 1).contiguous()


def _try(model: nn.Module, rows: dict[str, Tensor], positions: Tensor) -> Reach:
    """Refuse a model that would mix sequences, by a few tokens; return what it reaches."""
    (like,) = rows.values()
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ConfigError(
            f"{type(model).__name__} has output_router_logits=True, and its loss of the router "
            "needs a mask of tokens, which a bag has not: set it to False"
        )
    named = inspect.signature(model.forward).parameters.get("position_ids")
    needs_positions = positions.dim() > 1 or (named is not None and named.default is named.empty)

    def run(sequences: Sequence[Tensor], has_positions: bool) -> Any:
        lens = [len(tokens) for tokens in sequences]
        x = torch.cat(list(sequences)).to(like.device)
        if "inputs_embeds" in rows:  # of whatever makes them
            noise = torch.randn(10, like.shape[1], generator=torch.Generator().manual_seed(0))
            x = noise.to(like.device, like.dtype)[x]
        places = torch.cat([torch.arange(n, device=like.device) for n in lens])
        places = places.expand(*positions.shape[:-1], -1)
        placed = places if has_positions or needs_positions else None
        return _call(model, Alone(lens, like.device), dict.fromkeys(rows, x), placed)

    check_separates(model, run, "such a model cannot be called packed: train it on padded batches")
    alone = Alone([1], like.device)
    with torch.no_grad(), as_in_use(model):
        one = {name: x.new_ones(1, *x.shape[1:]) for name, x in rows.items()}
        _call(model, alone, one, positions.new_zeros(*positions.shape[:-1], 1), has_mask=False)
    windows = [width for width, settings in alone.seen if settings.get("sliding_window") is None]
    return reach_of(model, windows)


def attend_in_bags(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend in a step, called by transformers: (1, H, T, D), (1, K, T, D) to (1, T, H, D)."""
    step = settings.get("bascule_step")
    if not isinstance(step, Step | Alone):
        raise ConfigError(
            f'attn_implementation="{NAME}" with bascule_step={step!r}: call the model by '
            "call_packed(model, step, input_ids=ids), or to generate set its attn_implementation "
            'to "sdpa"; a model that does not pass arguments on to attention cannot attend in bags'
        )
    has_mask = attention_mask is not None and attention_mask.numel() > 0
    if query.shape[0] != 1 or key.shape[2] != query.shape[2] or has_mask:
        raise ConfigError(
            f"{query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} keys, "
            f"{'with' if has_mask else 'without'} a mask: a step takes one row of all tokens, "
            "without padding, prefix or cache; use call_packed(model, step, ..)"
        )
    if isinstance(step, Step):
        check_settings(settings, int(step.plan.seq_lens.max(initial=0)))
    else:
        step.seen.append((0 if attention_mask is None else attention_mask.shape[-1], settings))
    is_causal = settings.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    num_rows, num_tokens = query.shape[2], step.token_slot.shape[0]
    is_padded = num_rows == 1 and num_tokens == 0
    q, k, v = (x[0, :, : 0 if is_padded else None].transpose(0, 1) for x in (query, key, value))
    causal = bool(is_causal) and step.plan.masks is None  # masks of a plan hold for its sequences
    out = step.attend(q, k, v, causal=causal, scale=settings.get("scaling"))
    if is_padded:
        out = torch.cat([out, out.new_zeros(1, *out.shape[1:])])
    return out[None], None


def _keep_mask(
    *args: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **others: Any
) -> Tensor:
    """Return the caller's mask, which attention refuses; else an empty one as wide as a window."""
    return torch.zeros(1, 1, 0, local_size or 0) if attention_mask is None else attention_mask


_UNDERSTOOD = tuple(  # of the settings of attention; others are refused, unless they are off
    "bascule_step is_causal scaling position_ids cache_position logits_to_keep use_cache "
    "num_items_in_batch output_hidden_states return_dict".split()
)


def check_settings(settings: dict[str, Any], longest: float) -> None:
    """Refuse settings of attention that it does not know, for sequences up to a length."""
    for name, value in settings.items():
        if value is None or value is False or name in _UNDERSTOOD:
            continue
        is_wide = name == "sliding_window" and value >= longest
        if not is_wide and not (name == "dropout" and value == 0):
            shown = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else value
            raise ConfigError(
                f"{name}={shown}, which step.attend does not know (the longest sequence has "
                f"{longest} tokens): change the model's configuration, or use its own attention"
            )
