"""Tensors, settings and masks that are given to attention."""

from typing import Any

import pytest
import torch

from bascule.attention.inputs import check_settings, check_tensors, with_positive_scale
from bascule.attention.tiles import digest_of
from bascule.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [5, 800])
def test_a_mask_with_other_values_has_another_digest(dtype: torch.dtype, size: int) -> None:
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


def test_scores_are_the_same_under_a_positive_scale() -> None:
    q = torch.randn(2, 3)
    for scale in (0.5, 0.0, -0.5):
        rows, factor = with_positive_scale(q, scale)
        assert factor > 0 and torch.equal(rows * factor, q * scale)
    rows, factor = with_positive_scale(q, None)
    assert rows is q and factor == 3**-0.5
    assert with_positive_scale(q, 0.5)[0] is q


@pytest.mark.parametrize(
    "given_",
    [
        {"causal": 1},
        {"causal": None},
        {"scale": "1"},
        {"scale": True},
        {"scale": float("inf")},
        {"scale": float("nan")},
    ],
)
def test_settings_that_attention_does_not_have_are_refused(given_: dict[str, Any]) -> None:
    right: dict[str, Any] = {"causal": False, "scale": None}
    for scale in (None, 1, -0.5, 0.0):
        check_settings("attention", **{**right, "scale": scale})
    with pytest.raises(ConfigError):
        check_settings("attention", **{**right, **given_})


ONES = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        [1.0],
        ONES.to_sparse(),
        ONES.double(),
        ONES.long(),
        ONES.bool(),
        ONES.to(torch.cfloat),
        ONES.to(torch.float8_e5m2),
        ONES.to("meta"),
        torch.nested.nested_tensor([ONES[0], ONES[1, :2]], layout=torch.jagged),
    ],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')} {getattr(x, 'device', '')}",
)
def test_tensors_that_attention_does_not_take_are_refused(wrong: Any) -> None:
    for place in range(3):
        given_ = [ONES, ONES, ONES]
        check_tensors("attention", *given_)
        given_[place] = wrong
        with pytest.raises(ConfigError):
            check_tensors("attention", *given_)


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.cfloat, torch.float8_e4m3fn])
def test_one_dtype_is_not_enough(dtype: torch.dtype) -> None:
    x = ONES.to(dtype)
    with pytest.raises(ConfigError):
        check_tensors("attention", x, x, x)
    for good in (torch.float16, torch.bfloat16, torch.float64):
        check_tensors("attention", *[ONES.to(good)] * 3)


@pytest.mark.parametrize("shape", [(2, 0, 4), (2, 3, 0), (1, 0, 2, 4), (1, 2, 2, 0)])
def test_heads_there_must_be(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    with pytest.raises(ConfigError):
        check_tensors("attention", x, x, x)


@pytest.mark.parametrize("shape", [(0, 3, 4), (0, 2, 1, 4), (1, 2, 0, 4)])
def test_tokens_and_batch_may_be_none(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    check_tensors("attention", x, x, x, torch.ones(1))
