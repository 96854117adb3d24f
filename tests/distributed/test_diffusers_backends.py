"""Attention back ends of diffusers over ranks, through its dispatcher; in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers.models.attention_dispatch as dispatch  # pyright: ignore[reportMissingTypeStubs]
import pytest
import torch
from torch import Tensor

from bascule import parallelize
from bascule.diffusers import backend_kernel
from bascule.errors import ConfigError
from tests.helpers.inference_cases import (
    Gradients,
    joined,
    make_inputs,
    make_model,
    same,
    same_gradients,
    step_of,
)
from tests.helpers.inference_toy import grads_of
from tests.helpers.misuse import FLUX
from tests.helpers.oracle import dense_attention
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

AnyDispatch: Any = dispatch
Name: Any = dispatch.AttentionBackendName
CALLS = list[str]()


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Any:
    """Out (B, S, H, D) and an LSE (B, H, S) of which no gradient comes, as flash attention's."""
    qkv = [x.transpose(1, 2) for x in (q, k, v)]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = dense_attention(*qkv, causal=causal, scale=scale)
    return out.transpose(1, 2), lse.detach()


def flash_3(q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
    """As flash_attn_func of kernels-community/flash-attn3."""
    CALLS.append("flash_3")
    made = attended(q, k, v, others["causal"], others["softmax_scale"])
    assert others["num_splits"] == 1 and others["window_size"] == (-1, -1)
    return made if others["return_attn_probs"] else made[0]


def sage(q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
    """As sageattn, which records nothing for gradients."""
    CALLS.append("sage")
    assert others["tensor_layout"] == "NHD"
    with torch.no_grad():
        made = attended(q, k, v, others["is_causal"], others["sm_scale"])
    return made if others["return_lse"] else made[0]


def register(label: str, merges: bool) -> None:
    name = str.__new__(Name, label)
    name._name_ = name._value_ = label

    def mine(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        CALLS.append(label)
        made = attended(query, key, value, is_causal, scale)
        return made if return_lse else made[0]

    AnyDispatch._AttentionBackendRegistry.register(name, supports_context_parallel=merges)(mine)


def install() -> None:
    """Stand in for the kernels of the Hub and their package, and register two back ends."""
    AnyDispatch.is_kernels_available = AnyDispatch.is_kernels_version = lambda *_: True
    for name, kernel in ((Name._FLASH_3_HUB, flash_3), (Name.SAGE_HUB, sage)):
        config = AnyDispatch._HUB_KERNELS_REGISTRY[name]
        config.kernel_fn = config.wrapped_forward_fn = config.wrapped_backward_fn = kernel
    register("merging", True)
    register("plain_mine", False)
    CALLS.clear()


def set_model(name: str, model: Any) -> dict[str, Any]:
    model.set_attention_backend(name)
    return {}


def as_kernel(name: str, model: Any) -> dict[str, Any]:
    return {"kernel": backend_kernel(name)}


def check(label: str, name: str, how: Any, ring: int, ulysses: int, learns: bool = True) -> None:
    """Compare outputs and gradients of two calls with one process's own."""
    install()
    model, inputs = make_model(FLUX).double(), make_inputs(FLUX, torch.float64)

    def call() -> tuple[Tensor, Gradients]:
        if learns:
            return step_of(model, inputs)
        with torch.no_grad():
            return joined(model(**inputs)), {}

    wanted, wanted_grads = call()
    settings = how(name, model)
    with parallelize(model, ring_degree=ring, ulysses_degree=ulysses, **settings) as handle:
        for turn in ("first", "second"):
            output, _ = call()
            same(output, wanted, 1e-10, (label, turn))
            if learns:
                handle.average_gradients()
                same_gradients(grads_of(model), wanted_grads, 1e-10)
    kept = {one._attention_backend for one in model.attn_processors.values()}
    assert kept == {name if how is set_model else None}, label
    assert bool(CALLS) == (label.split(", ")[0] not in ("native", "math", "flex")), label


CASES: dict[str, tuple[Any, ...]] = {  # back end, how it is chosen, ring, Ulysses, gradients
    "native, set, ring": ("native", set_model, 2, 1),
    "native, set, Ulysses": ("native", set_model, 1, 2),
    "native, Ulysses": ("native", as_kernel, 1, 2),
    "math, Ulysses": ("_native_math", as_kernel, 1, 2),
    "flex, set, Ulysses": ("flex", set_model, 1, 2, False),
    "registered, ring": ("merging", as_kernel, 2, 1),
    "registered, Ulysses": ("merging", as_kernel, 1, 2),
    "registered without, Ulysses": ("plain_mine", as_kernel, 1, 2),
    "FA3, set, ring": ("_flash_3_hub", set_model, 2, 1),
    "FA3, set, Ulysses": ("_flash_3_hub", set_model, 1, 2),
    "FA3, ring": ("_flash_3_hub", as_kernel, 2, 1),
    "Sage, ring": ("sage_hub", as_kernel, 2, 1, False),
    "Sage, set, Ulysses": ("sage_hub", set_model, 1, 2, False),
}


@on_ranks(2)
def test_back_ends_attend_over_ranks_as_one_process() -> None:
    for label, case in CASES.items():
        with AnyDispatch.attention_backend("native"):  # which `set_attention_backend` changes
            check(label, *case)


def refused(name: str, how: Any, learns: bool = False, **degrees: Any) -> None:
    install()
    model = make_model(FLUX).double()
    with AnyDispatch.attention_backend("native"):
        settings: dict[str, Any] = how(name, model)
    with parallelize(model, **degrees, **settings):
        out = model(**make_inputs(FLUX, torch.float64), return_dict=False)[0]
        if learns:
            out.sum().backward()


def several(name: str, model: Any) -> dict[str, Any]:
    model.set_attention_backend(name)
    next(iter(model.attn_processors.values()))._attention_backend = Name.FLEX
    return {}


RING, BOTH = {"ring_degree": 2}, {"ulysses_degree": 2}
REFUSED: dict[str, tuple[Callable[..., None], str]] = {
    "registered": (
        partial(refused, "plain_mine", as_kernel, **RING),
        "kernel 'plain_mine' gives no log-sum-exp, but ring_degree=2 needs it to",
    ),
    "flex": (partial(refused, "flex", set_model, **RING), "kernel 'flex' gives no log-sum-exp"),
    "native": (partial(refused, "native", as_kernel, **RING), "'native' gives no log-sum-exp"),
    "FA4": (partial(refused, "flash_4_hub", as_kernel, **RING), "'flash_4_hub'"),
    "overlap": (partial(refused, "plain_mine", as_kernel, overlap=True, **BOTH), "overlap=True"),
    "Sage learns": (partial(refused, "sage_hub", as_kernel, True, **RING), "has no autograd"),
    "unknown": (partial(refused, "fastest", as_kernel, **RING), "no attention back end 'fastest'"),
    "several": (partial(refused, "_flash_3_hub", several, **BOTH), "_flash_3_hub, flex: choose"),
}


def test_what_back_ends_cannot_do_is_refused_by_name() -> None:
    for label, (call, words) in REFUSED.items():
        for kinds, text in run_ranks(raised_by, 2, call):
            assert kinds[0] == "ConfigError" and words in text, (label, kinds, text)


def test_a_back_end_that_is_not_installed_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="back end '_flash_3_hub' of diffusers cannot run here"):
        backend_kernel("_flash_3_hub")
