"""The fixed part of a call of attention: text, digests, settings, and the tensors it takes."""

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from bascule.attention.call_marks import digest_of, rows_of_call
from bascule.attention.call_spec import (
    CallSpec,
    check_settings,
    check_tensors,
    spec_of,
    with_positive_scale,
)
from bascule.comm.wire import Wire
from bascule.errors import ConfigError

SPEC = CallSpec("mesh:", 8, 4, True, 3, True, 0.125, "plain", "int8", "rows")
OTHER: dict[str, Any] = {
    "mesh": "other:",
    "num_heads": 12,
    "num_kv_heads": 2,
    "zigzag": False,
    "stripe": 0,
    "causal": False,
    "scale": 0.1 + 0.2,
    "kernel": "",
    "wire": "",
    "rows": "others",
    "is_blocking": True,
}


def test_a_call_is_what_its_text_says() -> None:
    assert set(OTHER) == {field.name for field in fields(CallSpec)}
    texts = {SPEC.text}
    for name, value in OTHER.items():
        changed = replace(SPEC, **{name: value})
        assert spec_of(changed.text) == changed != SPEC
        texts.add(changed.text)
    assert spec_of(SPEC.text) == SPEC and len(texts) == 1 + len(OTHER)
    assert spec_of(CallSpec("").text) == CallSpec("")


def test_rows_of_a_call_tell_all_that_changes_them() -> None:
    q, mask = torch.zeros(1, 2, 3, 8), torch.zeros(3, 3)
    centre = torch.zeros(1, 2, 1, 8)
    tensors = (q, q.double(), q[..., :4])
    masks = (None, mask, mask[None], mask.bool())
    wires = (
        *(None, Wire("int8"), Wire("e4m3"), Wire("int8", takes_centres=True)),
        *(Wire("int8", centre), Wire("int8", None, centre), Wire("int8", centre, centre)),
    )
    cases = list(itertools.product(tensors, wires, masks, ((), (0,), (1,))))
    assert len({rows_of_call(*case) for case in cases}) == len(cases)
    assert rows_of_call(q + 1, None, mask + 1, ()) == rows_of_call(q, None, mask, ())


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
    assert digest_of(None) == "none" != digest_of(mask.to("meta")) == str((size, size))


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
        {"kernel": 1},
    ],
)
def test_settings_that_attention_does_not_have_are_refused(given_: dict[str, Any]) -> None:
    right: dict[str, Any] = {"causal": False, "scale": None}
    for scale in (None, 1, -0.5, 0.0):
        check_settings("attention", **{**right, "scale": scale, "kernel": "plain"})
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
