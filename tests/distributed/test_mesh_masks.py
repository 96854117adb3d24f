"""Masks that are added to the scores, and values that are not numbers: as in one process."""

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.nn import functional

from bascule.attention import tiles
from bascule.attention.api import (
    AttentionMesh,
    AttentionOptions,
    SequenceLayout,
    attention,
    gather,
    split,
)
from bascule.attention.kernels.protocol import wide_dtype
from bascule.attention.tiles import digest_of, without_lost_scores
from bascule.errors import ConfigError
from tests.helpers.mesh_cases import Three, difference, make_mesh, reference, three
from tests.helpers.ranks import run_ranks

ALONE = AttentionMesh(None, None, None)
WORLDS = [(2, 1), (1, 2), (2, 2), (3, 1)]
HEADS, KV_HEADS, WIDTH = 6, 3, 8
SEGMENTS = [(13,), (2, 7), (0, 8), (24,)]
# As models hide keys; torch.finfo(dtype).min is None.
HIDING = [None, -1e9, -1e4, -3e38, 1e9]
MASKS = ["keys", "rows", "heads", "keys and causal", "rows and causal"]


def normal(seed: int, length: int, dtype: torch.dtype) -> Three:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return three(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def hiding(kind: str, number: float | None, length: int, seed: int, dtype: torch.dtype) -> Tensor:
    """A mask of which some rows have only keys that are hidden, by a number that is finite."""
    generator = torch.Generator().manual_seed(seed)
    heads, rows = (HEADS if kind == "heads" else 1), (1 if "keys" in kind else length)
    is_hidden = torch.rand(2, heads, rows, length, generator=generator) < 0.4
    if rows == 1:
        is_hidden[0] = True
        is_hidden[1, ..., :3] = True
    else:
        is_hidden[:, :, ::3] = True
    bias = torch.randn(is_hidden.shape, generator=generator).to(dtype)
    return bias.masked_fill(is_hidden, torch.finfo(dtype).min if number is None else number)


def causal_too(mask: Tensor, causal: bool) -> Tensor:
    length = mask.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return mask.masked_fill(later & causal, -math.inf)


def one_process(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    whole = None if mask is None else mask.expand(2, HEADS, q.shape[2], k.shape[2])
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=whole)


def exact_gradients(whole: Three, mask: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """In float64, of softmax of scores that are lost in what is added to them where they are."""
    leaves = three(x.double().requires_grad_() for x in whole)
    highest = mask.double().amax(-1, keepdim=True)
    keeps = highest.abs() * torch.finfo(wide_dtype(whole[0])).eps < 8.0
    out = reference(leaves[0] * keeps, *leaves[1:], mask.double() - highest, False)
    return torch.autograd.grad(out, leaves, grad.double())


# Of 1e4 added to it one process keeps three digits of a score in float32, of 1e9 seven in float64.
ALLOWED = {torch.float64: (3e-7, 1e-12), torch.float32: (2e-3, 1e-5), torch.bfloat16: (2e-2, 1e-2)}


def hidden_rows(ring: int, ulysses: int) -> list[tuple[Any, float, float]]:
    """Largest difference of the output to one process, and of a gradient to the exact one."""
    mesh, found = make_mesh(ring, ulysses), list[tuple[Any, float, float]]()
    for seed, case in enumerate(itertools.product(MASKS, HIDING, ALLOWED)):
        kind, number, dtype = case
        layout = SequenceLayout(SEGMENTS[seed % 4], ring, ulysses, zigzag=seed % 3 == 1)
        whole, causal = normal(seed, layout.seq_len, dtype), "causal" in kind
        mask = hiding(kind, number, layout.seq_len, seed, dtype)
        leaves = three(split(x, mesh, layout, 2).requires_grad_() for x in whole)
        out = attention(
            *leaves, mesh, attn_mask=mask, is_causal=causal, options=AttentionOptions(layout=layout)
        )
        given = gather(out.detach(), mesh, layout, 2)
        wanted = one_process(*whole, causal_too(mask, causal))
        grads = torch.autograd.grad(out, leaves, split(whole[0], mesh, layout, 2))
        exact = exact_gradients(whole, causal_too(mask, causal), whole[0])
        pairs = zip((gather(x, mesh, layout, 2) for x in grads), exact, strict=True)
        off = max(difference(a.double(), b) for a, b in pairs)
        found.append((case, float((given - wanted).abs().max()), off))
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("ring", "ulysses"),
    [(1, 2), (2, 2), *(pytest.param(*x, marks=pytest.mark.stress) for x in ((2, 1), (3, 1)))],
)
def test_rows_hidden_by_a_finite_number_are_those_of_one_process(ring: int, ulysses: int) -> None:
    for found in run_ranks(hidden_rows, ring * ulysses, ring, ulysses):
        for case, out, grad in found:
            _, number, dtype = case
            assert out < ALLOWED[dtype][0] and grad < ALLOWED[dtype][1], (case, out, grad)
            if dtype == torch.float32 and number != -1e4:
                assert out < 2e-6, (case, out)


def attended(mask: Tensor, layout: SequenceLayout) -> int:
    """How often a forward and backward cut a mask, or take its highest; right as in one process."""
    torch.manual_seed(0)
    whole = three(torch.randn(1, 4, 12, 4, dtype=torch.float64) for _ in range(3))
    mesh = make_mesh(layout.ring_degree, layout.ulysses_degree)
    leaves = three(split(x, mesh, layout, 2).requires_grad_() for x in whole)
    cut = mock.Mock(wraps=tiles._masked)
    highest = mock.Mock(wraps=tiles._highest)
    with mock.patch.object(tiles, "_masked", cut), mock.patch.object(tiles, "_highest", highest):
        out = attention(*leaves, mesh, attn_mask=mask, options=AttentionOptions(layout=layout))
        out.sum().backward()
    given = gather(out.detach(), mesh, layout, 2)
    wanted = functional.scaled_dot_product_attention(*whole, attn_mask=mask)
    torch.testing.assert_close(given, wanted, rtol=1e-10, atol=1e-12)
    return cut.call_count + highest.call_count


def cut_once(ring: int, ulysses: int) -> list[list[int]]:
    """Of the first layer with a mask, of the next, and of one after the mask was written to."""
    layout, counts = SequenceLayout((12,), ring, ulysses), list[list[int]]()
    for mask in (torch.randn(12, 12, dtype=torch.float64), torch.rand(1, 4, 12, 12) < 0.8):
        counts.append([attended(mask, layout), attended(mask, layout)])
        mask[..., :3] = 1
        counts[-1].append(attended(mask, layout))
    return counts


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1)])
def test_layers_cut_a_mask_once_and_again_when_it_was_written_to(ring: int, ulysses: int) -> None:
    for counts in run_ranks(cut_once, 2, ring, ulysses):
        assert counts == [[3, 0, 3], [1, 0, 1]]


def test_only_queries_whose_scores_are_lost_are_0() -> None:
    layout, q = SequenceLayout((6,)), torch.ones(2, 1, 6, 4)
    numbers = [0.0, -1e4, -1e9, 1e9, torch.finfo(torch.float32).min, -math.inf]
    mask = torch.tensor(numbers).view(1, 1, 6, 1).expand(1, 1, 6, 6).clone()
    mask[..., 3:] -= 1.0
    lost = {torch.float64: [4], torch.float32: [2, 3, 4], torch.bfloat16: [2, 3, 4]}
    for dtype, rows in lost.items():
        found = without_lost_scores(q.to(dtype), layout, [(0, 6)], mask, False)
        assert (found[:, 0, :, 0] == 0).nonzero()[:, 1].tolist() == 2 * rows
    part = without_lost_scores(q[:, :, :3], layout, [(1, 2), (4, 6)], mask, False)
    assert part[0, 0, :, 0].tolist() == [1.0, 0.0, 1.0]
    assert without_lost_scores(q, layout, [(0, 6)], mask > 0, False) is q
    q[0, 0, 4, 0] = math.nan
    assert without_lost_scores(q, layout, [(0, 6)], mask, False)[0, 0, 4, 0].isnan()


def test_under_a_causal_mask_a_query_sees_itself_and_those_before_it() -> None:
    layout, q = SequenceLayout((4,)), torch.ones(1, 1, 4, 2)
    places = torch.arange(4)
    own, later = places == places[:, None], places > places[:, None]
    for seen, causal, wanted in (
        (own, True, [1.0, 1.0, 1.0, 1.0]),
        (own, False, [1.0, 1.0, 1.0, 1.0]),
        (later, True, [0.0, 0.0, 0.0, 0.0]),
        (later, False, [1.0, 1.0, 1.0, 0.0]),
    ):
        mask = torch.where(seen, 0.0, -1e9)
        for run in ((0, 4), (2, 4)):
            rows = slice(*run)
            found = without_lost_scores(q[:, :, rows], layout, [run], mask, causal)
            assert found[0, 0, :, 0].tolist() == wanted[rows]


def float32_masks(ring: int, ulysses: int) -> list[float]:
    """Of queries of 16 bits: what the output is off, over what one process is."""
    mesh, found = make_mesh(ring, ulysses), list[float]()
    # Of what is far from 0, 16 bits would keep only the first two digits.
    cases = itertools.product((torch.bfloat16, torch.float16), (-1e9, -3e38), (-500.0, 50.0))
    for dtype, number, level in cases:
        layout = SequenceLayout((24,), ring, ulysses)
        whole = normal(0, 24, dtype)
        mask = hiding("rows", number, 24, 1, torch.float32) + level
        out = attention(
            *three(split(x, mesh, layout, 2) for x in whole),
            mesh,
            attn_mask=mask,
            options=AttentionOptions(layout=layout),
        )
        want = one_process(*three(x.float() for x in whole), mask)
        off = [difference(x.float(), want) for x in (gather(out, mesh, layout, 2),)]
        found.append(off[0] / difference(one_process(*whole, mask).float(), want))
    return found


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_a_float32_mask_of_16_bit_queries_keeps_its_digits(ring: int, ulysses: int) -> None:
    for found in run_ranks(float32_masks, 2, ring, ulysses):
        assert max(found) < 2.0, found


def test_a_mask_that_was_written_to_has_another_digest() -> None:
    mask = torch.zeros(1, 1, 3, 3)
    before = digest_of(mask)
    assert digest_of(mask) == before
    mask[0, 0, 1, 2] = 1.0
    assert digest_of(mask) != before


def test_what_torch_refuses_as_a_mask_is_refused() -> None:
    for dtype, wrong in itertools.product(
        (torch.float32, torch.float64, torch.bfloat16),
        (torch.int64, torch.int32, torch.uint8, torch.float16, torch.complex64),
    ):
        q = torch.ones(1, 2, 3, 8, dtype=dtype)
        mask = torch.ones(1, 1, 1, 3, dtype=wrong)
        with pytest.raises(RuntimeError, match="Expected attn_mask dtype"):
            functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        with pytest.raises(ConfigError, match=rf"mask of {wrong} for q of {dtype}.*mask\.bool\(\)"):
            attention(q, q, q, ALONE, attn_mask=mask)


def test_queries_keys_and_values_of_unlike_dtypes_are_refused() -> None:
    q = torch.ones(1, 2, 3, 8)
    wrong = [(q, q, q.bfloat16()), (q.double(), q, q), (q, q.half(), q), (q.int(),) * 3]
    for queries, keys, values in wrong:
        with pytest.raises(ConfigError, match="one floating-point dtype"):
            attention(queries, keys, values, ALONE)


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


# By key: what its value is in channel 0, 1 and 2.
NOT_NUMBERS = [
    {0: (math.inf, -math.inf, math.nan)},
    {12: (math.inf, -math.inf, math.nan)},
    {0: (math.inf, -math.inf, math.inf), 12: (math.inf, -math.inf, -math.inf)},
    {5: (math.inf, 1.0, 1e37), 6: (1.0, -math.inf, 1e37), 12: (0.0, 0.0, 1e37)},
]


def not_numbers(ring: int, ulysses: int) -> list[tuple[Tensor, Tensor]]:
    mesh, layout = make_mesh(ring, ulysses), SequenceLayout((13,), ring, ulysses)
    found: list[tuple[Tensor, Tensor]] = []
    for values, causal in itertools.product(NOT_NUMBERS, (False, True)):
        q, k, v = normal(7, 13, torch.float32)
        for key, channels in values.items():
            v[:, :, key, :3] = torch.tensor(channels)
        local = (split(x, mesh, layout, 2) for x in (q, k, v))
        out = attention(
            *three(local), mesh, is_causal=causal, options=AttentionOptions(layout=layout)
        )
        wanted = one_process(q, k, v, causal_too(torch.zeros(13, 13), True) if causal else None)
        found.append((gather(out, mesh, layout, 2), wanted))
    return found


@pytest.mark.parametrize(("ring", "ulysses"), WORLDS)
def test_values_that_are_not_numbers_spread_as_in_one_process(ring: int, ulysses: int) -> None:
    for found in run_ranks(not_numbers, ring * ulysses, ring, ulysses):
        for number, (out, wanted) in enumerate(found):
            # One process multiplies hidden values with 0, which is nan of an inf.
            seen = out if number % 2 == 0 else torch.where(wanted.isnan(), wanted, out)
            torch.testing.assert_close(seen, wanted, equal_nan=True, rtol=1e-5, atol=1e-6)


def errors_in_16_bits(ring: int) -> list[tuple[Any, list[float]]]:
    """Of gradients: what they are off of those in float64, over what those lose as 16 bits."""
    mesh, found = make_mesh(ring, 1), list[tuple[Any, list[float]]]()
    layout = SequenceLayout((96,), ring, 1)
    for dtype, causal in itertools.product((torch.bfloat16, torch.float16), (False, True)):
        whole, grad = normal(3, 96, dtype), normal(4, 96, dtype)[0]
        leaves = three(x.double().requires_grad_() for x in whole)
        exact = torch.autograd.grad(reference(*leaves, None, causal), leaves, grad.double())
        leaves = three(split(x, mesh, layout, 2).requires_grad_() for x in whole)
        out = attention(*leaves, mesh, is_causal=causal, options=AttentionOptions(layout=layout))
        shares = torch.autograd.grad(out, leaves, split(grad, mesh, layout, 2))
        grads = [gather(x, mesh, layout, 2).double() for x in shares]
        off = [
            difference(x, wanted) / difference(wanted.to(dtype).double(), wanted)
            for x, wanted in zip(grads, exact, strict=True)
        ]
        found.append(((dtype, causal), off))
    return found


@pytest.mark.parametrize("ring", [2, 4])
def test_gradients_around_a_ring_are_rounded_to_16_bits_once(ring: int) -> None:
    for found in run_ranks(errors_in_16_bits, ring, ring):
        for case, off in found:
            assert max(off) < 1.5, (case, off)
