"""Tensors, settings and masks that are given to attention."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from bascule.attention.api import AttentionMesh, attention
from bascule.attention.tiles import cached_by_mask, digest_of
from bascule.attention.usp import check_settings, check_tensors, with_positive_scale
from bascule.errors import ConfigError

ALONE = AttentionMesh(None, None, None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [5, 800])
def test_a_mask_with_other_values_has_another_digest(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)  # not symmetric, as one in 1,024 of 5 x 5 values is
    mask = (torch.randn(size, size) > 0).to(dtype)
    first = digest_of(mask)
    assert digest_of(mask) == first == digest_of(mask.clone())
    assert digest_of(mask[:, : size - 1]) != digest_of(mask[: size - 1])
    assert digest_of(mask.T.contiguous()) != first
    for row in (0, size // 2, size - 1):
        changed = mask.clone()
        changed[row, -1] = not changed[row, -1]
        assert digest_of(changed) != first
    mask[0, 0] = not mask[0, 0]
    assert digest_of(mask) != first
    with torch.inference_mode():  # no versions are counted there
        inside = mask.clone()
        before = digest_of(inside)
        assert before == digest_of(mask)
        inside[0, 0] = not inside[0, 0]
        assert digest_of(inside) != before
    assert digest_of(mask[:0]) != digest_of(mask[:, :0])
    assert digest_of(mask.to("meta")) == str((size, size))


@pytest.mark.parametrize("kind", ["bool", "float", "bfloat", "expanded", "strided", "inference"])
def test_a_mask_counts_as_it_is_now_however_it_was_written_to(kind: str) -> None:
    with torch.inference_mode(kind == "inference"):
        written = np.ones((8, 8), bool)
        mask = torch.from_numpy(written)
        if kind in ("float", "bfloat"):
            mask = torch.zeros(1, 8, 8, dtype=torch.float32 if kind == "float" else torch.bfloat16)
        elif kind == "expanded":
            mask = torch.ones(1, 1, 8, dtype=torch.bool)
        elif kind == "strided":
            mask = torch.ones(8, 16, dtype=torch.bool)[:, ::2]
        memory, made = mask.data, list[Tensor]()
        mask = mask.expand(2, 3, 8) if kind == "expanded" else mask

        def now() -> Tensor:
            return cached_by_mask(mask, "a form", lambda: made.append(mask) or mask.clone())

        assert now() is now() and len(made) == 1
        memory[..., 4:] = 0 if mask.dtype == torch.bool else -1e9
        assert torch.equal(now(), mask) and len(made) == 2
        written[:, 1:] = False
        memory[..., 0] = 0
        assert torch.equal(now(), mask) and now() is now()


def test_a_mask_that_numpy_changed_is_attended_as_it_is() -> None:
    written, q = np.ones((8, 8), bool), torch.randn(1, 2, 8, 4).double()
    mask = torch.from_numpy(written)
    for first in (8, 4, 1):
        written[:, first:] = False
        wanted = scaled_dot_product_attention(q, q, q, attn_mask=mask)
        torch.testing.assert_close(attention(q, q, q, ALONE, attn_mask=mask), wanted)


def test_scores_are_the_same_under_a_positive_scale() -> None:
    q = torch.randn(2, 3)
    for scale in (0.5, 0.0, -0.5):
        rows, factor = with_positive_scale(q, scale)
        assert factor > 0 and torch.equal(rows * factor, q * scale)
    rows, factor = with_positive_scale(q, None)
    assert rows is q and factor == 3**-0.5
    assert with_positive_scale(q, 0.5)[0] is q


def test_what_is_right_is_taken() -> None:
    for scale in (None, 1, -0.5, 0.0):
        check_settings("attention", False, scale)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        check_tensors("attention", *[torch.ones(2, 3, 4, dtype=dtype)] * 3)


@pytest.mark.parametrize("shape", [(0, 3, 4), (0, 2, 1, 4), (1, 2, 0, 4)])
def test_tokens_and_batch_may_be_none(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    check_tensors("attention", x, x, x, torch.ones(1))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_derivatives_are_refused() -> None:
    q = torch.randn(1, 2, 5, 8)
    mask = torch.zeros(1, 1, 1, 5)

    def of_other(x: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda y: attention(x, x, x, ALONE) * y

    def tangent_of_dual() -> None:
        with forward_ad.dual_level():
            attention(q, forward_ad.make_dual(q, q), q, ALONE)

    calls: list[Callable[[], Any]] = [
        lambda: torch.func.jvp(lambda x: attention(x, q, q, ALONE), (q,), (q,)),
        lambda: torch.func.jvp(lambda x: attention(q, q, x, ALONE), (q,), (q,)),
        lambda: torch.func.jvp(lambda x: attention(q, q, q, ALONE, attn_mask=x), (mask,), (mask,)),
        lambda: torch.func.jacfwd(lambda x: attention(x, q, q, ALONE).sum())(q),
        lambda: torch.func.jvp(lambda x: torch.func.jvp(of_other(x), (q,), (q,))[1], (q,), (q,)),
        tangent_of_dual,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"attention.*forward-mode derivative"):
            call()
    with pytest.raises(Unsupported, match="ConfigError"):
        torch.compile(calls[0], fullgraph=True, backend="eager")()
    with pytest.raises(ConfigError, match=r"attention under torch\.vmap"):
        torch.vmap(lambda x: attention(x, x, x, ALONE))(q[None])
    with forward_ad.dual_level():  # of other tensors
        assert attention(q, q, q, ALONE).shape == q.shape


def test_other_derivatives_that_do_not_exist_raise() -> None:
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    with pytest.raises(ConfigError, match="no second derivative"):
        torch.autograd.grad(attention(q, q, q, ALONE).sum(), q, create_graph=True)
