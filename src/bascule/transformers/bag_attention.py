"""Attention of a step inside the models of transformers, through the interfaces that these offer.

A model is given the packed tokens that its rank computes on, as one row, and attends within each
whole sequence, on however many ranks that is. Nothing of the model is changed.

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
    """Make `attn_implementation="bascule"` known to transformers, in this process.

    The model is then called by `call_packed`.
    """
    AttentionInterface.register(NAME, attend_in_bags)
    AttentionMaskInterface.register(NAME, no_mask)


def call_packed(model: nn.Module, step: Step, **routed: Tensor) -> Any:
    """Call a model on the tokens that this rank computes on, as one row.

    A rank without tokens gives the model one, of zeros, since models of transformers cannot compute
    none: take the first T rows of what comes out.

    Args:
        model: Of transformers, with `attn_implementation="bascule"`.
        step: Of `SequenceParallel.plan`.
        routed: `input_ids` or `inputs_embeds`, (T, ..), as `step.route` gave them; and
            `position_ids` (axes, T) where the model takes several positions a token. Default: the
            position of each token in its sequence.

    Returns:
        What the model returns; of (1, max(T, 1), ..).
    """
    _check_model(model, step)
    unknown = routed.keys() - {"input_ids", "inputs_embeds", "position_ids"}
    if unknown:
        raise ConfigError(
            f"call_packed({', '.join(sorted(unknown))}=..): give input_ids or inputs_embeds, and "
            "position_ids; compute the loss from the logits with step.mean, over routed labels"
        )
    device, num_tokens = step.token_slot.device, step.token_slot.shape[0]
    positions = routed.pop("position_ids", None)
    if positions is None:
        positions = torch.from_numpy(step.local.positions).to(device)
    rows = {name: x if num_tokens else x.new_zeros(1, *x.shape[1:]) for name, x in routed.items()}
    if not num_tokens:
        positions = positions.new_zeros(*positions.shape[:-1], 1)
    before = step.num_attended
    out = model(
        **{name: x[None] for name, x in rows.items()},
        position_ids=positions[..., None, :],
        # Transformers takes a mask of four dims as it is, and looks into no tokens to make one.
        attention_mask=torch.zeros(1, 1, 0, 0, device=device),
        use_cache=False,
        bascule_step=step,
    )
    if not torch.compiler.is_compiling():
        _check_layers(model, step.num_attended - before)
    return out


def attend_in_bags(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """`Step.attend`, as transformers calls attention.

    Args:
        module: The layer; says whether it is causal.
        query: (1, H, T, D).
        key: (1, K, T, D).
        value: (1, K, T, D).
        attention_mask: None, or one without elements.
        settings: `bascule_step`, `scaling` and `is_causal`, and what must change nothing: no
            dropout, no soft cap, no window shorter than the longest sequence.

    Returns:
        (1, T, H, D), and no weights.

    Raises:
        ConfigError: There is no step, several rows, a mask, or a setting that a step has not.
    """
    step = settings.get("bascule_step")
    if not isinstance(step, Step):
        raise ConfigError(
            f'attn_implementation="{NAME}" attends in a step, and bascule_step={step!r}: call the '
            "model by call_packed(model, step, input_ids=ids); to generate, first call "
            'model.set_attn_implementation("sdpa"). If it was called so, the model does not pass '
            "arguments on to attention, and cannot attend in bags"
        )
    has_mask = attention_mask is not None and attention_mask.numel() > 0
    if query.shape[0] != 1 or has_mask:
        raise ConfigError(
            f"{query.shape[0]} rows, and a mask is {'' if has_mask else 'not '}given: give the "
            "routed tokens of all sequences as one row, by call_packed(model, step, ..)"
        )
    if key.shape[2] != query.shape[2]:
        raise ConfigError(
            f"{query.shape[2]} queries and {key.shape[2]} keys: a step has no prefix and no cache; "
            "use call_packed(model, step, ..)"
        )
    _check_settings(step, settings)
    is_causal = settings.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    num_tokens = step.token_slot.shape[0]
    rows = num_tokens if query.shape[2] == max(num_tokens, 1) else query.shape[2]
    q, k, v = (x[0, :, :rows].transpose(0, 1) for x in (query, key, value))
    causal = bool(is_causal) and step.plan.masks is None  # masks of a plan hold for its sequences
    out = step.attend(q, k, v, causal=causal, scale=settings.get("scaling"))
    if rows < query.shape[2]:
        out = torch.cat([out, out.new_zeros(1, *out.shape[1:])])
    return out[None], None


def no_mask(*args: Any, attention_mask: Tensor | None = None, **settings: Any) -> None:
    """No mask: a step knows its sequences.

    Raises:
        ConfigError: One of padding was given.
    """
    if attention_mask is not None:
        raise ConfigError(
            f"attention_mask of shape {tuple(attention_mask.shape)}: packed tokens have no "
            "padding; use call_packed(model, step, ..)"
        )


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _check_model(model: nn.Module, step: Step) -> None:
    """Refuse what attends to less than a causal mask shows, or counts positions otherwise."""
    config, longest = _text_config(model), int(step.plan.seq_lens.max(initial=0))
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < longest:
        raise ConfigError(
            f"attention_chunk_size={chunk}, and the longest sequence has {longest} tokens: a step "
            "attends within whole sequences; give shorter ones"
        )
    for name, module in model.named_modules():
        is_position = name.rpartition(".")[2] == "position_embeddings"
        if is_position and getattr(module, "padding_idx", None) is not None:
            raise ConfigError(
                f"{name} of {type(model).__name__} counts positions from behind its padding index: "
                "only models that count from 0 can be called packed"
            )


def _check_layers(model: nn.Module, num_attended: int) -> None:
    """Refuse models of which some layers are no attention: state would cross sequences."""
    num_layers = getattr(_text_config(model), "num_hidden_layers", None)
    if num_layers is None or num_attended >= num_layers:
        return
    raise ConfigError(
        f"{num_attended} of {num_layers} layers of {type(model).__name__} attended by way of "
        "bascule: the others (convolution, recurrence, linear attention, or attention of their "
        "own) would mix the sequences of a row; such models cannot be called packed"
    )


def _check_settings(step: Step, settings: dict[str, Any]) -> None:
    longest = int(step.plan.seq_lens.max(initial=0))
    window = settings.get("sliding_window")
    wrong = {
        "dropout": settings.get("dropout") or None,
        "softcap": settings.get("softcap"),
        "sliding_window": window if window is not None and window < longest else None,
        "s_aux": settings.get("s_aux"),  # sinks
        "head_mask": settings.get("head_mask"),
    }
    for name, value in wrong.items():
        if value is not None:
            shown = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else value
            raise ConfigError(
                f"{name}={shown}, and step.attend has none (the longest sequence has {longest} "
                "tokens): change the model's configuration, or use its own attention"
            )
