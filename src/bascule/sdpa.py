"""Context parallelism for any code that calls torch's scaled_dot_product_attention.

A function mode of torch replaces the calls. Shapes: as in `attention.api`; T tokens of this rank,
S of the whole sequence.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn, overrides
from torch._dynamo.eval_frame import skip_code
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from bascule.attention.api import (
    AttentionMesh,
    AttentionOptions,
    SequenceLayout,
    attention,
    gather,
    split,
)
from bascule.attention.kernels.registry import Kernel
from bascule.attention.mask import Scores
from bascule.comm.agree import agree
from bascule.comm.failures import leave
from bascule.comm.quantized import CommDtype
from bascule.errors import ConfigError

_DENSE = functional.scaled_dot_product_attention
num_modes = torch._C._len_torch_function_stack
"""Return the number of entered function modes, without one that is replacing a function now."""

_HIDING = (  # functions that attend where no mode sees it
    functional.multi_head_attention_forward,
    torch._native_multi_head_attention,  # pyright: ignore[reportPrivateImportUsage]
    torch._transformer_encoder_layer_fwd,  # pyright: ignore[reportPrivateImportUsage]
)

_SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)  # of layers with own attention code
_RESHAPES = (torch.reshape, Tensor.reshape, Tensor.view, torch.unflatten)

# All other functions, hundreds in a forward pass, are called at once. Compilers trace tuples.
_REPLACED = (_DENSE, Tensor.unflatten, *_RESHAPES, *_HIDING, *_SOFTMAX)

_MAX_CHECKED = 64  # compared calls with replicated keys of one shape: a pass of most models
_SAMPLES = 128  # compared numbers of the keys, and as many of the values
_MAX_DISTANCE = 0.05  # of the norm: kinds of GPUs round unlike, and other tokens are 1 apart

_AMBIGUOUS = (
    "{0} keys can be this rank's own tokens or a sequence declared as replicated: compute one of "
    "the two within .local(), and do not declare {0}"
)


class SequenceParallelMode(TorchFunctionMode):
    """A function mode within which scaled_dot_product_attention attends over a mesh."""

    def __init__(
        self,
        mesh: AttentionMesh,
        layout: SequenceLayout | None = None,
        replicated: Collection[int] = (),
        options: AttentionOptions | None = None,
        *,
        watches: bool = False,
    ) -> None:
        super().__init__()
        self.mesh, self.options = mesh, options or AttentionOptions()
        self.has_attended = False  # at least once, over the mesh
        self.sparse: Any = None  # plans of block-sparse attention, if the model has them
        self._layout, self._replicated = layout, frozenset(replicated)
        self._is_named = False  # the last call named q, k and v, so modes of others see it so
        self._num_local = 0  # entered `local` scopes
        self._watches = watches  # look for layers with a softmax of their own
        self._options: dict[int, AttentionOptions] = {}  # by tokens of this rank
        # Tokens of this rank, and sizes of square softmaxes. Compilers trace no `set[int]()`.
        self._local_tokens: set[int] = set() if layout is None else {layout.num_tokens(*mesh.place)}
        self._softmax_sizes: set[int] = set()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__torch_function__" in vars(cls):
            skip_code(cls.__torch_function__.__code__)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace a function of torch."""
        kwargs = kwargs or {}
        return self._replace(func, args, kwargs) if func in _REPLACED else func(*args, **kwargs)

    def _replace(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if func is Tensor.unflatten:  # compilers cannot trace the method from here
            func = torch.unflatten
        if func in _RESHAPES:
            x = args[0] if args else kwargs["input"]
            if x.numel() == 0:
                return _reshape_empty(func, x, args[1:], kwargs)
            return func(*args, **kwargs)
        is_compiled = torch.compiler.is_compiling()
        if func in _SOFTMAX:
            if self._watches and not is_compiled and not self.attends_locally():
                scores = args[0] if args else kwargs["input"]
                if scores.dim() > 2 and scores.shape[-1] == scores.shape[-2] > 1:
                    self._watch(self._softmax_sizes, scores.shape[-1])
            return func(*args, **kwargs)
        if num_modes():
            self._is_named = "query" in kwargs
        if self.attends_locally():
            if func is _DENSE and num_modes() and (modes := modes_of_others()):
                return self._show(modes, None, *args, **kwargs)
            return as_it_is(func, *args, **kwargs)
        if func in _HIDING:
            wrong = f"{func.__name__} (nn.MultiheadAttention) cannot be split over ranks"
            raise ConfigError(f"{wrong}: call F.scaled_dot_product_attention, or enter .local()")
        return self.over_mesh(*args, **kwargs)

    def over_mesh(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attend as `scaled_dot_product_attention` does, also with scores, a sink and documents."""
        if torch.compiler.is_compiling():
            return self._attend(*args, **kwargs)
        try:
            return self._attend(*args, **kwargs)
        except Exception as error:  # a refusal on this rank ends the waits of others
            leave(error, "scaled_dot_product_attention over a mesh")
            raise

    @contextmanager
    def local(self) -> Iterator[None]:
        """Compute attention within this scope locally: every rank has all keys and values."""
        self._num_local += 1
        try:
            yield
        finally:
            self._num_local -= 1

    def local_layouts(self, query: Tensor, key: Tensor, modes: Sequence[TorchFunctionMode]) -> Any:
        """Return layouts of queries and keys for `_show`, where attention stays local."""
        return None, None

    def _show(
        self,
        modes: Sequence[TorchFunctionMode],
        layouts: tuple[SequenceLayout | None, SequenceLayout | None] | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **settings: Any,
    ) -> Tensor:
        """Attend to all tokens within the modes of others; return this rank's tokens of the output.

        `layouts` has one for queries, one for keys and values; None: every rank has all of them.
        """
        of_queries, of_keys = layouts or self.local_layouts(query, key, modes)
        pairs = (query, of_queries), (key, of_keys), (value, of_keys)
        qkv = [x if at is None else as_it_is(gather, x, self.mesh, at, 2) for x, at in pairs]
        names = ("query", "key", "value") if self._is_named else ()
        named = dict[str, Any](zip(names, qkv, strict=False)) | settings
        named |= {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        before = overrides._get_current_function_mode_stack()
        for _ in before:
            overrides._pop_mode()
        try:
            for mode in modes:
                overrides._push_mode(mode)
            out = cast(Any, _DENSE)(*qkv[len(names) :], **named)
        finally:
            while num_modes():
                overrides._pop_mode()
            for mode in before:
                overrides._push_mode(mode)
        return out if of_queries is None else as_it_is(split, out, self.mesh, of_queries, 2)

    def zero_unseen(self, out: Tensor, mask: Tensor | None, layout: SequenceLayout) -> Tensor:
        """Zero the output of tokens that see nothing, if the model needs that."""
        return out

    # No property: compilers trace none of a mode that was entered before the graph.
    def attends_locally(self) -> bool:
        """Return whether attention is computed locally now."""
        return self._num_local > 0

    def refuse(self, module: nn.Module, args: object) -> None:
        """Refuse models of transformers, in a hook that runs before each module's forward."""
        # Only such models have this method, so transformers need not be imported.
        if not hasattr(module, "set_attn_implementation") or torch.compiler.is_compiling():
            return
        if not self.attends_locally():
            name = type(module).__name__
            raise ConfigError(
                f"context_parallel: {name} is a model of transformers, whose windows and positions "
                "follow from the tokens that it gets: enter bascule.transformers.context_parallel("
                "model, mesh); or .local(), if every rank has all its tokens"
            )

    def resolve(self, query: Tensor, mask: Tensor | None) -> tuple[AttentionOptions, Tensor | None]:
        """Return a call's options, with the layout of its sequence, and the whole mask."""
        num_tokens, is_compiling = query.shape[2], torch.compiler.is_compiling()
        options = None if is_compiling else self._options.get(num_tokens)
        if options is None:
            ring, ulysses = self.mesh.degrees
            layout = self._layout or SequenceLayout((num_tokens * ring * ulysses,), ring, ulysses)
            options = replace(self.options, layout=layout)
            if not is_compiling:
                self._options[num_tokens] = options
        return options, mask

    def other_keys(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return all keys and values if they come from a second sharded sequence, or None."""
        return None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        """Attend over the mesh."""
        settings: Any = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
        return attention(query, key, value, self.mesh, options=options, **settings)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        scores: Scores | None = None,
        sink: Tensor | None = None,
        documents: tuple[int, ...] = (),
    ) -> Tensor:
        """Check a call, and attend over the mesh if the keys are of the queries' sequence."""
        if dropout_p > 0.0:
            raise ConfigError(
                f"attention over a mesh has no dropout, dropout_p is {dropout_p}: set it to 0"
            )
        if query.dim() != 4 or key.dim() != 4:
            shapes = f"q {tuple(query.shape)}, k {tuple(key.shape)}"
            legal = "give (batch, heads, tokens, head_dim) each"
            raise ConfigError(f"attention over a mesh: {shapes}: {legal}")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ConfigError(
                f"{query.shape[1]} query heads for {key.shape[1]} key heads: set enable_gqa=True"
            )
        others = self.other_keys(query, key, value)
        if others is not None:
            is_other, (key, value) = others[0] is not key, others
            has_mask = attn_mask is not None and attn_mask.shape[-2:-1] not in ((), (1,))
            if is_other and (is_causal or has_mask):
                shape = None if attn_mask is None else tuple(attn_mask.shape)
                raise ConfigError(
                    f"attention to keys of another sharded sequence, is_causal={is_causal} and a "
                    f"mask of shape {shape}: give is_causal=False and a mask (batch, 1, 1, keys)"
                )
        num_tokens, num_keys = query.shape[2], key.shape[2]
        may_be_cross = self._replicated or num_keys != num_tokens
        modes = modes_of_others() if num_modes() else ()
        whole: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        is_cross = others is None and may_be_cross and self._is_cross(num_tokens, num_keys)
        if is_cross and self._watches and self.mesh.whole and not torch.compiler.is_compiling():
            _check_whole(self.mesh, key, value)
        if others is not None or is_cross:
            if modes and others is not None:
                refuse_modes(modes, "attention to keys of another sharded sequence")
            if modes:
                layouts = self.resolve(query, None)[0].layout, None
                return self._show(modes, layouts, query, key, value, attn_mask, **whole)
            return as_it_is(_DENSE, query, key, value, attn_mask, **whole)
        device = query.device.type
        is_cast = torch.is_autocast_enabled(device)
        if is_cast:
            dtype = torch.get_autocast_dtype(device)
            query, key, value, attn_mask = [_cast(x, dtype) for x in (query, key, value, attn_mask)]
        options, mask = self.resolve(query, attn_mask)
        assert options.layout is not None
        if mask is not None and (mask.dim() < 1 or mask.shape[-1] != options.layout.seq_len):
            raise ConfigError(
                f"attention over a mesh: a mask {tuple(mask.shape)} for {options.layout.seq_len} "
                "tokens: give the mask of the whole sequence, the same on every rank"
            )
        self.has_attended = True
        if modes:
            if scores is not None or self.sparse is not None:
                refuse_modes(modes, "block-sparse attention, or one with windows or a sink")
            layouts = options.layout, options.layout
            out = self._show(modes, layouts, query, key, value, mask, **whole)
            return self.zero_unseen(out, mask, options.layout)
        is_watched = self._watches and not torch.compiler.is_compiling()
        if is_watched and query.shape[2] not in self._local_tokens:
            self._watch(self._local_tokens, query.shape[2])
        # Inputs are cast: autocast within would cast the steps of attention, too.
        with torch.autocast(device, enabled=False) if is_cast else nullcontext():
            if scores is None:
                return self.attend(query, key, value, options, mask, is_causal, scale)
            options = replace(options, scores=scores, documents=documents)
            settings: Any = {"is_causal": is_causal, "scale": scale, "sink": sink}
            return attention(query, key, value, self.mesh, options=options, **settings)

    def _watch(self, numbers: set[int], num: int) -> None:
        """Add to the counts of local tokens or the sizes of softmaxes; refuse a number in both."""
        numbers.add(num)
        if sizes := self._softmax_sizes & self._local_tokens:
            raise ConfigError(
                f"context_parallel: softmax over {min(sizes)} keys of one rank: a layer computes "
                "attention without F.scaled_dot_product_attention: call that, or enter .local()"
            )

    def _is_cross(self, num_queries: int, num_keys: int) -> bool:
        """Return whether the keys are those of another sequence, which every rank has whole."""
        # `in` would make compilers fix a symbolic number.
        if self._replicated and any(num_keys == number for number in self._replicated):
            if self._layout is None and num_queries == num_keys:
                raise ConfigError(_AMBIGUOUS.format(num_keys))
            return True
        if num_keys != num_queries:
            if self.mesh.whole is None:  # the only rank has all tokens
                return True
            way_out = f"compute it within .local(), as some ranks have {num_keys} tokens"
            if self._layout is None or num_keys not in _tokens_of(self._layout):
                way_out = f"say so with context_parallel(..., replicated=({num_keys},))"
            raise ConfigError(
                f"attention of {num_queries} queries to {num_keys} keys: self-attention needs as "
                "many keys as queries. Run the model without a cache of keys (use_cache=False); if "
                f"every rank has all keys, as of a prompt, {way_out} or in the table's `attends`"
            )
        return False


# Compilers inline it, but must not compile it alone: where a graph breaks within the mode, torch
# 2.13 would use the code for the first function for others, too: `x.dtype` gave a shape.
skip_code(SequenceParallelMode.__torch_function__.__code__)


@contextmanager
def context_parallel(
    mesh: "AttentionMesh | DeviceMesh",
    layout: SequenceLayout | None = None,
    *,
    replicated: Collection[int] = (),
    comm_dtype: CommDtype | None = None,
    kernel: Kernel | None = None,
    overlap: bool = False,
    checked: nn.Module | None = None,
) -> Iterator[SequenceParallelMode]:
    """Make F.scaled_dot_product_attention of any model attend over the mesh, within the `with`.

    Each rank gives the queries, keys and values of its own tokens, (B, H, T, D) each. A mask covers
    the whole sequence, is the same on every rank, and broadcasts to (B, H, S, S); its last dim is
    S. Causal attention, `scale` and `enable_gqa` mean the same as in torch; dropout is refused.

    Only calls of torch's function are replaced; layers that call softmax themselves are refused. A
    model that calls flash-attn, xformers or flex attention directly keeps its local attention. Some
    models leave out a mask if this rank's tokens need none, as when a window is longer than this
    rank's part, or packed documents end with it: give such a model the whole mask.

    With `gather` at the end of the model, average the gradients of parameters over ranks, as DDP
    and FSDP do.

    Args:
        mesh: The ranks.
        layout: Which tokens each rank has. Default: one segment, the same number on every rank.
        replicated: Lengths of sequences of keys that every rank has whole, such as a prompt.
            Attention to them stays local; so does attention within `.local()` of the yielded mode.
        comm_dtype: Dtype of tensors sent between ranks, as in `AttentionOptions`.
        kernel: Name of the block kernel, or your own.
        overlap: True lets Ulysses exchange while it computes.
        checked: A model whose output was compared with one process. Without it, models of
            transformers are refused; see `bascule.transformers.context_parallel`.

    Raises:
        ConfigError: A call cannot be split, a number of keys is ambiguous, or no code within the
            `with` called scaled_dot_product_attention.
    """
    if isinstance(mesh, DeviceMesh):
        mesh = AttentionMesh.of(mesh)
    if layout is not None:
        for num_keys in _tokens_of(layout).intersection(replicated):
            raise ConfigError(_AMBIGUOUS.format(num_keys))
    options = AttentionOptions(None, kernel, comm_dtype, overlap)
    mode = SequenceParallelMode(mesh, layout, replicated, options, watches=True)
    hook = None if checked is not None else register_module_forward_pre_hook(mode.refuse)
    try:
        with mode:
            yield mode
    finally:
        if hook is not None:
            hook.remove()
    if not mode.has_attended:
        raise ConfigError(
            "context_parallel: no layer called F.scaled_dot_product_attention: let the model use it"
        )


def _tokens_of(layout: SequenceLayout) -> set[int]:
    """Return all numbers of tokens that ranks have in a layout."""
    places = product(range(layout.ring_degree), range(layout.ulysses_degree))
    return {layout.num_tokens(*place) for place in places}


def _check_whole(mesh: AttentionMesh, key: Tensor, value: Tensor) -> None:
    """Refuse keys declared as replicated that differ between ranks in some sampled values.

    The first calls with keys of a shape take one all-gather each; later calls are trusted.
    """
    if key.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    group = mesh.whole
    calls = mesh.cache.get(("replicated keys", key.shape, value.shape), Counter[str])
    calls["checked"] += 1
    if group is None or calls["checked"] > _MAX_CHECKED or is_fake(key):
        return
    samples = [
        x.detach().flatten()[:: x.numel() // _SAMPLES | 1].double().nan_to_num()
        for x in (key, value)
    ]
    gathered = agree(
        group.control or group,
        {"replicated keys": f"keys {tuple(key.shape)}, values {tuple(value.shape)}"},
        what="attention to replicated keys",
        values=torch.cat(samples).cpu().numpy().view(np.int64),
        capacity=4 * _SAMPLES,
    )
    first, *others = (numbers.view(np.float64) for numbers in gathered)
    for rank, numbers in enumerate(others, 1):
        if not np.linalg.norm(numbers - first) <= _MAX_DISTANCE * np.linalg.norm(first):
            raise ConfigError(
                f"attention to {key.shape[2]} keys, declared as replicated={key.shape[2]}, but "
                f"rank {rank} has others than rank 0: do not declare them, or use no cache"
            )


def as_it_is(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function outside all modes, including the mode of a model around this one."""
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def modes_of_others() -> list[TorchFunctionMode]:
    """Return the entered modes, except bascule's and torch's own, such as a default device."""
    return [
        mode
        for mode in overrides._get_current_function_mode_stack()
        if not isinstance(mode, SequenceParallelMode)
        and not type(mode).__module__.startswith("torch.")
    ]


def refuse_modes(modes: Sequence[TorchFunctionMode], what: str) -> NoReturn:
    """Refuse other packages' modes around attention that cannot show them all tokens."""
    names = " and ".join([type(mode).__name__ for mode in modes])
    raise ConfigError(
        f"{names} (a TorchFunctionMode) is entered around {what}, where it would see one rank's "
        "tokens or none: enter it around other layers, or undo the split first"
    )


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Cast an argument as autocast does for scaled_dot_product_attention: float64 stays."""
    if x is None or x.dtype == torch.float64 or not x.is_floating_point():
        return x
    return x.to(dtype)


# --- tensors without elements, as a rank without tokens has them ----------------------------------


def _reshape_empty(
    func: Callable[..., Tensor], x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """Reshape a tensor without elements, for which torch cannot infer a -1.

    As in (..., tokens, -1, 2) or (-1, tokens): dims on the same side of the tokens imply it.
    """
    kwargs = {name: value for name, value in kwargs.items() if name not in ("input", "self")}
    if func is torch.unflatten:
        dim = args[0] if args else kwargs["dim"]
        sizes = args[1] if len(args) > 1 else kwargs["sizes"]
        if -1 not in sizes or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
            return func(x, *args, **kwargs)
        dim %= x.dim()
        return x.view(_inferred(x.shape, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :])))
    if len(args) > 1:
        return func(x, _inferred(x.shape, args))
    sizes = args[0] if args else kwargs.get("shape", kwargs.get("size"))
    if not isinstance(sizes, Sequence):  # one size, or another dtype
        return func(x, *args, **kwargs)
    return func(x, _inferred(x.shape, sizes))


def _inferred(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Infer a -1 from the dims on its side of the tokens, whose size is 0; else return `sizes`."""
    sizes = tuple(sizes)
    if -1 not in sizes or 0 not in sizes:
        return sizes
    at, zeros = sizes.index(-1), [dim for dim, size in enumerate(sizes) if size == 0]
    before = [dim for dim, size in enumerate(shape) if size == 0]
    if at > zeros[-1]:
        whole, others = shape[before[-1] + 1 :], sizes[zeros[-1] + 1 :]
    elif at < zeros[0]:
        whole, others = shape[: before[0]], sizes[: zeros[0]]
    else:
        return sizes
    elements, divisor = math.prod(whole), math.prod([size for size in others if size != -1])
    if divisor == 0 or elements % divisor:
        return sizes
    return tuple([elements // divisor if size == -1 else size for size in sizes])
