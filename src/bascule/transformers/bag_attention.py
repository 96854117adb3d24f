"""Attention in a balanced step for models of transformers, through its AttentionInterface.

Shapes: T tokens that this rank computes, H heads, K key-value heads, D head_dim.
"""

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from bascule.attention import PackedSequences, Scores, SequenceLayout, attend_packed
from bascule.comm.shared_row import SharedRow
from bascule.errors import ConfigError
from bascule.parallel import Step
from bascule.sdpa import SequenceParallelMode
from bascule.transformers.delta_rule import delta_layers, split_layers
from bascule.transformers.separation import Reach, check_separates

NAME = "bascule"


def register_attention() -> None:
    """Register `attn_implementation="bascule"` with transformers, for models of `call_packed`."""
    AttentionInterface.register(NAME, attend_in_bags)
    AttentionMaskInterface.register(NAME, _keep_mask)


def call_packed(
    model: nn.Module,
    step: Step,
    *,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    position_ids: Tensor | None = None,
    output_router_logits: bool = False,
) -> Any:
    """Call a model of transformers on the tokens that this rank computes, as one row.

    Compute the loss from the logits with `step.mean`, over routed labels. The output has shape
    (1, max(T, 1), ..): a rank without tokens computes one zero token, and its `aux_loss` is 0.

    Args:
        model: A model with `attn_implementation="bascule"`.
        step: From `SequenceParallel.plan`.
        input_ids: (T,), from `step.route`.
        inputs_embeds: (T, ..), from `step.route`, in place of `input_ids`.
        position_ids: (axes, T). Default: the position of each token in its sequence.
        output_router_logits: True lets a mixture of experts return the `aux_loss` of all tokens in
            the row; it needs bags of one rank. Default: the model's configuration decides.

    Raises:
        ConfigError: The model would mix sequences, or count positions across them.
    """
    device, num_tokens = step.token_slot.device, step.token_slot.shape[0]
    if position_ids is None:
        position_ids = torch.from_numpy(step.local.positions).to(device)
    rows = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    rows = {name: x for name, x in rows.items() if x is not None}
    if not torch.compiler.is_compiling():
        reach, layers = _tried.get(model) or (None, delta_layers(model))
        split_layers(layers)  # each time, as an undo may have come between
        if reach is None:
            reach = _try(model, rows, position_ids)
            _tried[model] = reach, layers
        longest, row = int(step.plan.seq_lens.max(initial=0)), int(step.plan.tokens.max())
        reach.check(type(model).__name__, longest, row)
    if not num_tokens:
        rows = {name: x.new_zeros(1, *x.shape[1:]) for name, x in rows.items()}
        position_ids = position_ids.new_zeros(*position_ids.shape[:-1], 1)
    options = {"output_router_logits": True} if output_router_logits else {}
    out = _call(model, step, rows, position_ids, **options)
    if not num_tokens and getattr(out, "aux_loss", None) is not None:
        out.aux_loss = out.aux_loss * 0.0
    return out


def _call(
    model: nn.Module, step: Any, rows: dict[str, Tensor], positions: Tensor | None, **options: bool
) -> Any:
    """Call a model on one row; without positions it counts them itself."""
    inputs: dict[str, Any] = {name: x[None] for name, x in rows.items()}
    if positions is not None:
        inputs["position_ids"] = positions[..., None, :]
    set_step(step)
    try:
        return model(**inputs, use_cache=False, bascule_step=step, **options)
    finally:
        set_step(None)


_tried: "WeakKeyDictionary[nn.Module, tuple[Reach, list[nn.Module]]]" = WeakKeyDictionary()
"""The reach of each tried model, and its gated delta layers."""


_step_of_call: "ContextVar[Any]" = ContextVar("bascule step", default=None)


def set_step(step: Any) -> None:
    """Attach the step to masks made from now on, for layers that ignore keyword arguments."""
    if not torch.compiler.is_compiling():
        _step_of_call.set(step)


class OverMesh(NamedTuple):
    """Attention over a mesh, instead of a step, within documents of these lengths."""

    mode: SequenceParallelMode
    layout: SequenceLayout
    documents: tuple[int, ...] = ()

    @property
    def row(self) -> SharedRow:
        """Documents and their shards, for layers that split heads over the mesh."""
        layout, mesh = self.layout, self.mode.mesh
        self.mode.has_attended, lens = True, self.documents or (layout.seq_len,)
        if layout.replicated:
            raise ConfigError("gated delta layers do not support replicated tokens: leave out one")

        def make() -> SharedRow:
            ranks = list(product(range(layout.ring_degree), range(layout.ulysses_degree)))
            runs = [run for rank in ranks for run in layout.shares(*rank)]
            order = np.argsort(np.concatenate([np.arange(*run) for run in runs]))
            return SharedRow(lens, mesh.whole, [layout.num_tokens(*rank) for rank in ranks], order)

        return mesh.cache.get(("row", layout, lens), make)


class Alone:
    """Attention within a few whole sequences on this rank, instead of a step."""

    def __init__(self, lens: list[int], device: torch.device) -> None:
        self._seqs, self.row = PackedSequences.build(lens, device), SharedRow(lens)
        self.has_attended, self.is_one = False, len(lens) == 1
        self.token_slot = torch.arange(sum(lens), device=device)
        self.plan = SimpleNamespace(masks=None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        """Attend as `Step.attend` does."""
        self.has_attended = True
        return attend_packed(q, k, v, self._seqs, **settings)


def _try(model: nn.Module, rows: dict[str, Tensor], positions: Tensor) -> Reach:
    """Refuse a model that mixes a few tokens of sequences in a row; return its reach."""
    (like,) = rows.values()
    option = inspect.signature(model.forward).parameters.get("position_ids")
    needs_positions = positions.dim() > 1 or (option is not None and option.default is option.empty)

    def run(sequences: Sequence[Tensor], has_positions: bool) -> Any:
        lens = [len(tokens) for tokens in sequences]
        x = torch.cat(list(sequences)).to(like.device)
        if "inputs_embeds" in rows:  # random embeddings, one a token id
            noise = torch.randn(10, like.shape[1], generator=torch.Generator().manual_seed(0))
            x = noise.to(like.device, like.dtype)[x]
        ids = torch.cat([torch.arange(n, device=like.device) for n in lens])
        ids = ids.expand(*positions.shape[:-1], -1) if has_positions or needs_positions else None
        return _call(model, Alone(lens, like.device), dict.fromkeys(rows, x), ids)

    check_separates(model, run, "such a model cannot be called packed: train it on padded batches")
    return Reach.of(model)


def attend_in_bags(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend in a step or over a mesh, called by transformers; (B, H, T, D) to (B, T, H, D)."""
    step = settings.get("bascule_step") or getattr(attention_mask, _STEP, None)
    if not isinstance(step, Step | Alone | OverMesh):
        raise ConfigError(
            f'attn_implementation="{NAME}" with bascule_step={step!r}: call the model by '
            "call_packed(model, step, input_ids=ids), or to generate set its attn_implementation "
            'to "sdpa"; a model that does not pass arguments on to attention cannot attend in bags'
        )
    has_mask = attention_mask is not None and attention_mask.numel() > 0
    is_row = query.shape[0] == 1 or isinstance(step, OverMesh)
    if not is_row or key.shape[2] != query.shape[2] or has_mask:
        what = f"{query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} keys"
        mask = "with a mask" if has_mask else "without a mask"
        needed = "one row of all tokens, without padding, prefix or cache; use call_packed"
        raise ConfigError(f"{what}, {mask}: a step needs {needed}(model, step, ..)")
    if settings.get("output_router_logits") and _shares_tokens(step):
        fix = "set it to False, or use bags of one rank"
        raise ConfigError(f"output_router_logits=True where ranks share sequences: {fix}")
    is_causal = settings.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    scores = _scores_of(attention_mask, settings)
    if isinstance(step, Alone) and step.is_one:
        _check_mask(module, attention_mask, bool(is_causal), query.device)
    scale, sink, width = settings.get("scaling"), settings.get("s_aux"), value.shape[-1]
    if width != query.shape[-1]:  # as in multi-head latent attention; exchanges need equal widths
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        widest = max(width, query.shape[-1])
        query, key, value = (
            functional.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value)
        )
    if isinstance(step, OverMesh):
        options = {"is_causal": bool(is_causal), "scale": scale, "enable_gqa": True}
        options |= {"scores": scores, "sink": sink, "documents": step.documents}
        out = step.mode.over_mesh(query, key, value, **options)
        return out.transpose(1, 2)[..., :width].contiguous(), None
    num_rows, num_tokens = query.shape[2], step.token_slot.shape[0]
    is_padded = num_rows == 1 and num_tokens == 0
    q, k, v = (x[0, :, : 0 if is_padded else None].transpose(0, 1) for x in (query, key, value))
    causal = bool(is_causal) and step.plan.masks is None  # a plan's masks replace the layer's
    out = step.attend(q, k, v, causal=causal, scale=scale, scores=scores, sink=sink)
    if is_padded:
        out = torch.cat([out, out.new_zeros(1, *out.shape[1:])])
    return out[None, ..., :width], None


def _shares_tokens(step: Step | Alone | OverMesh) -> bool:
    """Return True if ranks share sequences."""
    if isinstance(step, OverMesh):
        return step.mode.mesh.whole is not None
    return isinstance(step, Step) and int(step.plan.topology.bag_sizes.max()) > 1


def _keep_mask(
    *args: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    mask_function: Callable[..., Tensor] | None = None,
    config: Any = None,
    **others: Any,
) -> Tensor:
    """Return the caller's mask if it hides tokens, which attention refuses; else an empty one.

    The empty mask's shape encodes window and kind: (size + 1, 2 if chunked else 1, 0, 0).
    """
    is_compiled = torch.compiler.is_compiling()
    if attention_mask is not None and (is_compiled or not attention_mask.all()):
        return attention_mask
    is_chunk = local_size is not None and local_size == getattr(config, "attention_chunk_size", 0)
    mask = torch.zeros(1 + (local_size or 0), 2 if is_chunk else 1, 0, 0)
    if not is_compiled:
        setattr(mask, _FUNCTION, mask_function)
        setattr(mask, _STEP, _step_of_call.get())
    return mask


_STEP = "bascule_step"
_FUNCTION = "bascule_function"  # mask function of transformers, to compare with our masks

_SETTINGS = tuple(  # of attention that are understood; others are refused, unless they are off
    "bascule_step is_causal scaling softcap s_aux position_ids cache_position logits_to_keep "
    "use_cache num_items_in_batch output_hidden_states output_router_logits return_dict".split()
)


def _scores_of(mask: Tensor | None, settings: dict[str, Any]) -> Scores:
    """Return the window, chunks and soft cap of a layer; refuse settings not understood."""
    size, kind = (0, 1) if mask is None else (mask.shape[0] - 1, mask.shape[1])
    for name, value in settings.items():
        is_off = value is None or value is False or (name == "dropout" and value == 0)
        if is_off or name in _SETTINGS or (name == "sliding_window" and value == size):
            continue
        shown = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else value
        fix = "change the model's configuration, or use its own attention"
        raise ConfigError(f"{name}={shown}, which bascule's attention does not know: {fix}")
    cap = settings.get("softcap") or 0.0
    return Scores(chunk=size, cap=cap) if kind == 2 else Scores(window=size, cap=cap)


def _check_mask(module: nn.Module, mask: Tensor | None, causal: bool, device: torch.device) -> None:
    """Refuse a mask function that differs from `Scores` for sampled queries of a long text."""
    function = getattr(mask, _FUNCTION, None)
    if function is None or mask is None:
        return
    size, zero = mask.shape[0] - 1, torch.zeros(1, 1, dtype=torch.int64, device=device)
    span = max(size, 4)
    rows = torch.tensor([0, 1, span - 1, span, 2 * span, 3 * span - 1], device=device)[:, None]
    columns = torch.arange(3 * span, device=device)
    wanted = columns <= rows if causal else (columns >= 0).expand(rows.shape[0], -1)
    if size:
        is_chunk = mask.shape[1] == 2
        wanted = wanted & (rows // size == columns // size if is_chunk else rows - columns < size)
    try:
        is_alike = torch.equal(function(zero, zero, rows, columns).expand_as(wanted), wanted)
    except IndexError:  # the mask depends on token values
        is_alike = False
    if not is_alike:
        what = f"{type(module).__name__} has a mask that is not causal, a window or chunks"
        raise ConfigError(f"{what}, which bascule's attention does not know: use the model's own")
