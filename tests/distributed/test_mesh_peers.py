"""What other libraries compute silently wrong or abort on, and mesh attention must not.

Where a peer gives wrong numbers, its algorithm is written out here in one process and must miss on
the same inputs: a case on which it would be right could not tell the difference.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bascule.attention.api import (
    AttentionMesh,
    AttentionOptions,
    SequenceLayout,
    attention,
    gather,
    split,
)
from bascule.attention.kernels.registry import merge
from tests.helpers.mesh_cases import Three, difference, make_mesh, reference, three
from tests.helpers.ranks import raised_by, run_ranks

EXACT = 1e-10


def normal(heads: int, length: int, seed: int = 0) -> Three:
    generator = torch.Generator().manual_seed(seed)
    shape = 1, heads, length, 8
    return three(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))


def key_padding(length: int, num_hidden: int) -> Tensor:
    """The last tokens of the text, which is first, are padding."""
    mask = torch.ones(1, 1, 1, length, dtype=torch.bool)
    mask[..., length // 2 - num_hidden : length // 2] = False
    return mask


def on_mesh(
    ring: int,
    ulysses: int,
    tensors: Three,
    mask: Tensor | None = None,
    segments: tuple[int, ...] | None = None,
) -> Tensor:
    """The whole output, of mesh attention on whole tensors."""
    mesh = make_mesh(ring, ulysses)
    layout = SequenceLayout(segments or (tensors[0].shape[2],), ring, ulysses)
    local = three(split(x, mesh, layout, 2) for x in tensors)
    out = attention(*local, mesh, attn_mask=mask, options=AttentionOptions(layout=layout))
    return gather(out, mesh, layout, 2)


def error_of(ring: int, ulysses: int, heads: int, length: int, num_hidden: int) -> float:
    tensors = normal(heads, length)
    mask = key_padding(length, num_hidden) if num_hidden else None
    want = reference(*tensors, mask, False)
    return difference(on_mesh(ring, ulysses, tensors, mask), want)


def with_tail_trimmed(tensors: Three, mask: Tensor, num_ranks: int) -> Tensor:
    """diffusers 0.42.1, `ulysses_anything`: each rank's mask padded, only the tail cut off."""
    length = mask.shape[-1]
    longest = -(-length // num_ranks)
    padded = [
        torch.nn.functional.pad(part, (0, longest - part.shape[-1]), value=False)
        for part in mask.tensor_split(num_ranks, dim=-1)
    ]
    return reference(*tensors, torch.cat(padded, dim=-1)[..., :length], False)


def test_diffusers_ulysses_anything_with_a_mask_on_3_ranks_and_13_tokens() -> None:
    tensors, mask = normal(6, 13), key_padding(13, 3)
    assert difference(with_tail_trimmed(tensors, mask, 3), reference(*tensors, mask, False)) > 1e-3
    for ring, ulysses in ((1, 3), (3, 1)):
        assert max(run_ranks(error_of, 3, ring, ulysses, 6, 13, 3)) < EXACT


def ring_in_one_process(
    tensors: Three,
    num_ranks: int,
    mask_of: Callable[[int, int], Tensor | None],
    lse_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """Ring attention of equal shards, with a rule for masks and one for log-sum-exps."""
    q, k, v = (x.chunk(num_ranks, dim=2) for x in tensors)
    outs: list[Tensor] = []
    for here in range(num_ranks):
        parts: list[tuple[Tensor, Tensor]] = []
        for there in range(num_ranks):
            mask = mask_of(here, there)
            scores = q[here] @ k[there].mT / math.sqrt(q[here].shape[-1])
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf)
            lse = scores.logsumexp(-1)
            weights = (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
            parts.append((weights @ v[there], lse_of(lse)))
        out, total = parts[0]
        for more in parts[1:]:
            out, total = merge(out, total, *more)
        outs.append(out)
    return torch.cat(outs, dim=2)


def test_diffusers_ring_with_a_key_value_mask() -> None:
    tensors, mask = normal(4, 16), key_padding(16, 5)
    parts, want = mask.chunk(2, dim=-1), reference(*tensors, mask, False)

    def keep(lse: Tensor) -> Tensor:
        return lse

    reused = ring_in_one_process(tensors, 2, lambda here, _: parts[here], keep)
    assert difference(reused, want) > 0.05
    right = ring_in_one_process(tensors, 2, lambda _, there: parts[there], keep)
    assert difference(right, want) < EXACT
    assert max(run_ranks(error_of, 2, 2, 1, 4, 16, 5)) < EXACT
    assert max(run_ranks(error_of, 4, 2, 2, 4, 16, 5)) < EXACT


def test_yunchang_ring_with_lse_faked_as_zeros() -> None:
    tensors = normal(4, 32)
    faked = ring_in_one_process(tensors, 4, lambda *_: None, torch.zeros_like)
    assert difference(faked, reference(*tensors, None, False)) > 0.05
    assert max(run_ranks(error_of, 4, 4, 1, 4, 32, 0)) < EXACT


def refusals_without_lse() -> list[str]:
    q = torch.zeros(1, 4, 3, 8)
    mesh = make_mesh(2, 1)
    return [
        raised_by(
            lambda name=name: attention(q, q, q, mesh, options=AttentionOptions(kernel=name))
        )[1]
        for name in ("sdpa", "TORCH_MATH")
    ]


def test_yunchang_back_ends_without_lse_are_refused_in_a_ring() -> None:
    for said in run_ranks(refusals_without_lse, 2):
        assert "'sdpa'" in said[0] and "log-sum-exp" in said[0]
        assert "choose one of" in said[1]


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize("length", [66, 15])
def test_yunchang_66_tokens_and_diffusers_15_on_4_ranks(
    ring: int, ulysses: int, length: int
) -> None:
    assert max(run_ranks(error_of, 4, ring, ulysses, 4, length, 0)) < EXACT


@pytest.mark.parametrize(("ring", "ulysses", "heads"), [(1, 2, 5), (1, 4, 5), (1, 4, 6), (2, 2, 5)])
def test_diffusers_5_and_6_heads_on_2_and_4_ranks(ring: int, ulysses: int, heads: int) -> None:
    assert max(run_ranks(error_of, ring * ulysses, ring, ulysses, heads, 15, 2)) < EXACT


def test_xdit_wan_padding_is_not_attended_to() -> None:
    tensors = normal(4, 13)
    padded = three(torch.nn.functional.pad(x, (0, 0, 0, 2)) for x in tensors)  # 3 ranks' 5
    want = reference(*tensors, None, False)
    assert difference(reference(*padded, None, False)[:, :, :13], want) > 0.05
    assert max(run_ranks(error_of, 3, 1, 3, 4, 13, 0)) < EXACT


def error_of_joint_text(ring: int) -> float:
    """Text on every ring rank, as keys of every shard."""
    mesh, layout = make_mesh(ring, 1), SequenceLayout((6, 12), ring, 1, replicated=(0,))
    tensors = normal(4, 18)
    local = three(split(x, mesh, layout, 2) for x in tensors)
    out = gather(attention(*local, mesh, options=AttentionOptions(layout=layout)), mesh, layout, 2)
    return difference(out, reference(*tensors, None, False))


def test_replicated_text_in_every_shard_of_a_ring_is_counted_once() -> None:
    q, k, v = normal(4, 18)
    twice = torch.cat([torch.arange(6), torch.arange(18)])
    counted_twice = reference(q, k[:, :, twice], v[:, :, twice], None, False)
    assert difference(counted_twice, reference(q, k, v, None, False)) > 0.05
    assert max(run_ranks(error_of_joint_text, 2, 2)) < EXACT


def gradient_error() -> dict[str, float]:
    """Torch's operators carry no gradient through their LSE: merging them loses its part."""
    mesh, layout = make_mesh(2, 1), SequenceLayout((16,), 2, 1)
    tensors = three(x.requires_grad_() for x in normal(4, 16))
    local = three(split(x.detach(), mesh, layout, 2).requires_grad_() for x in tensors)
    weight = normal(4, 16, seed=9)[0]
    want = torch.autograd.grad(reference(*tensors, None, False), tensors, weight)
    out = attention(*local, mesh, options=AttentionOptions(layout=layout))
    found = torch.autograd.grad(out, local, split(weight, mesh, layout, 2))
    whole = [gather(x, mesh, layout, 2) for x in found]
    detached = ring_in_one_process(tensors, 2, lambda *_: None, lambda lse: lse.detach())
    wrong = torch.autograd.grad(detached, tensors, weight)
    return {
        "ours": max(difference(a, b) for a, b in zip(whole, want, strict=True)),
        "detached": min(difference(a, b) for a, b in zip(wrong[:2], want[:2], strict=True)),
    }


def test_gradients_do_not_pass_through_a_detached_lse() -> None:
    for errors in run_ranks(gradient_error, 2):
        assert errors["ours"] < EXACT
        assert errors["detached"] > 0.05


def disagreement() -> tuple[list[str], str]:
    """13 tokens on 3 ranks without a layout: each rank takes its own number for everyone's."""
    mesh = make_mesh(1, 3)
    tokens = (5, 4, 4)[dist.get_rank()]
    q = torch.zeros(1, 6, tokens, 8)
    return raised_by(attention, q, q, q, mesh)


def test_ranks_with_unlike_lengths_and_no_layout_raise_alike() -> None:
    for classes, text in run_ranks(disagreement, 3):
        assert "CommError" in classes
        assert "ranks [0]: a layout of (15,) tokens" in text
        assert "ranks [1, 2]: a layout of (12,) tokens" in text


def wrong_number_on_one_rank() -> tuple[list[str], str]:
    mesh, layout = make_mesh(3, 1), SequenceLayout((13,), 3, 1)
    q = torch.zeros(1, 6, 4, 8)
    return raised_by(attention, q, q, q, mesh, options=AttentionOptions(layout=layout))


def test_a_wrong_number_of_tokens_on_one_rank_is_raised_on_all() -> None:
    for classes, text in run_ranks(wrong_number_on_one_rank, 3):
        assert "ConfigError" in classes
        assert "q has 4 tokens, and the layout gives this rank 5 of 13" in text


def silently_smaller() -> tuple[list[str], str]:
    """para-attn takes a ring of 1 where 3 does not divide 4 ranks."""
    mesh = AttentionMesh.of(init_device_mesh("cpu", (4,), mesh_dim_names=("ring",)))
    q = torch.zeros(1, 4, 3, 8)
    return raised_by(
        attention, q, q, q, mesh, options=AttentionOptions(layout=SequenceLayout((12,), 3, 1))
    )


def test_para_attention_ring_of_3_on_4_ranks_is_refused() -> None:
    for classes, text in run_ranks(silently_smaller, 4):
        assert "ConfigError" in classes and "3 x 1 ranks on a mesh of 4 x 1" in text


def refused_gradient_of_a_mask() -> str:
    q = torch.zeros(1, 4, 3, 8)
    mask = torch.zeros(1, 1, 6, 6, requires_grad=True)
    return raised_by(attention, q, q, q, make_mesh(2, 1), attn_mask=mask)[1]


def test_a_mask_that_wants_a_gradient_is_refused() -> None:
    for text in run_ranks(refused_gradient_of_a_mask, 2):
        assert "attn_mask requires a gradient" in text
