"""Attention of a step inside the models of transformers, through the interfaces that these offer.

Shapes: T tokens that this rank computes on, H heads, K key-value heads, D head width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from bascule.errors import ConfigError
from bascule.parallel import Step

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
    _check_model(model, step)
    device, num_tokens = step.token_slot.device, step.token_slot.shape[0]
    if position_ids is None:
        position_ids = torch.from_numpy(step.local.positions).to(device)
    rows = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    rows = {name: x for name, x in rows.items() if x is not None}
    if not num_tokens:
        rows = {name: x.new_zeros(1, *x.shape[1:]) for name, x in rows.items()}
        position_ids = position_ids.new_zeros(*position_ids.shape[:-1], 1)
    before = step.num_attended
    out = model(
        **{name: x[None] for name, x in rows.items()},
        position_ids=position_ids[..., None, :],
        # Transformers takes a mask of four dims as it is, and makes none from the tokens.
        attention_mask=torch.zeros(1, 1, 0, 0, device=device),
        use_cache=False,
        bascule_step=step,
    )
    num_layers = getattr(_text_config(model), "num_hidden_layers", None) or 0
    num_attended = step.num_attended - before
    if num_attended < num_layers and not torch.compiler.is_compiling():
        raise ConfigError(
            f"{num_attended} of {num_layers} layers of {type(model).__name__} attended in the "
            "step: the others (convolutions, recurrences, linear attention, or attention of the "
            "model's own) mix the sequences of a row; such models cannot be called packed"
        )
    return out


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
    if not isinstance(step, Step):
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
    _check_settings(step, settings)
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


def _keep_mask(*args: Any, attention_mask: Tensor | None = None, **settings: Any) -> Tensor | None:
    """Return the caller's mask, which attention refuses: a step knows its sequences."""
    return attention_mask


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _check_model(model: nn.Module, step: Step) -> None:
    """Refuse chunks of attention, and positions that do not begin at 0."""
    chunk = getattr(_text_config(model), "attention_chunk_size", None)
    if chunk is not None and chunk < (longest := int(step.plan.seq_lens.max(initial=0))):
        raise ConfigError(
            f"attention_chunk_size={chunk}, and the longest sequence has {longest} tokens: a step "
            "attends within whole sequences; give shorter ones"
        )
    for name, module in model.named_modules():
        if (
            name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ):
            raise ConfigError(
                f"{name} of {type(model).__name__} counts positions from behind its padding index: "
                "only models that count from 0 can be called packed"
            )


def _check_settings(step: Step, settings: dict[str, Any]) -> None:
    longest, window = int(step.plan.seq_lens.max(initial=0)), settings.get("sliding_window")
    refused = {
        "dropout": settings.get("dropout") or None,
        "softcap": settings.get("softcap"),
        "sliding_window": window if window is not None and window < longest else None,
        "s_aux": settings.get("s_aux"),  # sinks
        "head_mask": settings.get("head_mask"),
    }
    for name, value in refused.items():
        if value is not None:
            shown = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else value
            raise ConfigError(
                f"{name}={shown}, and step.attend has none (the longest sequence has {longest} "
                "tokens): change the model's configuration, or use its own attention"
            )
