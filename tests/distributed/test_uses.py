"""Odd tensors, scales, masks, threads and derivatives: right, or refused in a sentence."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from bascule.attention.api import (
    AttentionMesh,
    AttentionOptions,
    SequenceLayout,
    attention,
    gather,
    split,
)
from bascule.parallel import SequenceParallel
from tests.helpers.cases import COST
from tests.helpers.inference_cases import make_mesh
from tests.helpers.ranks import raised_by, run_ranks


def mesh_of(ring: int, ulysses: int) -> AttentionMesh:
    return AttentionMesh.of(make_mesh(ring, ulysses), timeout_s=60.0)


def other_numbers_of_tokens() -> list[tuple[list[str], str]]:
    mesh, layout = mesh_of(1, 2), SequenceLayout((9,), 1, 2)
    own = split(torch.arange(9.0)[None], mesh, layout, 1)
    wrong = [own[:, 1:], own[:, :0], torch.cat([own, own[:, :1]], dim=1)]
    heard = [raised_by(gather, x, mesh, layout, 1) for x in wrong]
    heard += [raised_by(gather, own, mesh, layout, dim) for dim in (2, -3, None, 0.0)]
    heard += [raised_by(gather, own, mesh, SequenceLayout((9,), 2, 1), 1)]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(own, torch.ones_like(own))
        heard.append(raised_by(gather, dual, mesh, layout, 1))
    assert torch.equal(gather(own, mesh, layout, 1), torch.arange(9.0)[None])
    return heard


def test_gather_takes_the_tokens_of_the_layout_alone() -> None:
    for heard in run_ranks(other_numbers_of_tokens, 2):
        assert all("ConfigError" in classes and "gather" in text for classes, text in heard), heard


def second_derivatives() -> tuple[float, list[tuple[list[str], str]]]:
    """Of a loss over all ranks, against the same in one process; refused where there are none."""
    parallel = SequenceParallel(None, "g2n1", COST, timeout_s=15)
    step, rank = parallel.plan([3 + dist.get_rank()]), dist.get_rank()
    own = torch.arange(1.0, 4.0 + rank, dtype=torch.float64)[:, None].requires_grad_()
    moved = step.route(x=own)["x"]
    (grad,) = torch.autograd.grad((moved**3).sum() + (own**2).sum(), own, create_graph=True)
    back = step.restore(step.route(x=grad)["x"])
    (second,) = torch.autograd.grad((back**2).sum() / 2, own)
    wanted = (3 * own**2 + 2 * own) * (6 * own + 2)

    def twice(call: Callable[[Tensor], Tensor]) -> tuple[list[str], str]:
        leaf = torch.ones(step.local.positions.size, 2, 2, dtype=torch.float64).requires_grad_()

        def derive() -> None:
            (first,) = torch.autograd.grad((call(leaf) ** 2).sum(), leaf, create_graph=True)
            first.sum().backward()

        return raised_by(derive)

    refused = [twice(lambda x: step.attend(x, x, x)), twice(lambda x: step.mean(x)[None])]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(own.detach(), torch.ones_like(own))
        refused.append(raised_by(lambda: step.route(x=dual)))
    return float((second - wanted).abs().max()), refused


def test_second_derivatives_are_right_or_refused() -> None:
    for error, refused in run_ranks(second_derivatives, 2):
        assert error < 1e-9
        assert all(text for _, text in refused) and "forward-mode" in refused[-1][1], refused


def gathered_by_each_thread() -> None:
    """Over all ranks of a mesh, whose group is neither that of the ring nor the other."""
    mesh, layout = mesh_of(2, 2), SequenceLayout((8,), 2, 2)
    own = split(torch.arange(8.0), mesh, layout, 0)
    assert torch.equal(gather(own, mesh, layout, 0), torch.arange(8.0))
    with ThreadPoolExecutor(1) as other:
        whole = other.submit(gather, own, mesh, layout, 0).result()
    assert torch.equal(whole, torch.arange(8.0))


def test_threads_take_turns_on_a_mesh() -> None:
    run_ranks(gathered_by_each_thread, 4)


def no_tensors() -> list[tuple[list[str], str]]:
    mesh, q = mesh_of(1, 2), torch.ones(1, 2, 4, 4)
    calls: list[Callable[[], Any]] = [
        lambda: attention(None, None, None, mesh),  # pyright: ignore[reportArgumentType]
        lambda: attention(q.to_sparse(), q, q, mesh),
        lambda: attention(q, q, q, mesh, options=AttentionOptions(comm_dtype="int4")),  # pyright: ignore[reportArgumentType]
        lambda: attention(q, q, q, mesh, options=AttentionOptions(kernel=5)),  # pyright: ignore[reportArgumentType]
        lambda: SequenceLayout("9"),  # pyright: ignore[reportArgumentType]
        lambda: SequenceLayout((9,), 0),
        lambda: SequenceLayout((9,), 2, replicated=(1,)),
        lambda: SequenceLayout((9,), 2, stripe="a"),  # pyright: ignore[reportArgumentType]
    ]
    return [raised_by(call) for call in calls]


def test_what_is_no_tensor_and_no_layout_is_refused() -> None:
    for heard in run_ranks(no_tensors, 2):
        assert [text for classes, text in heard if "ConfigError" not in classes] == []


def a_mesh_after_its_groups() -> tuple[list[str], str]:
    mesh, q = mesh_of(2, 1), torch.ones(1, 2, 4, 4)
    attention(q, q, q, mesh)
    dist.destroy_process_group()
    return raised_by(attention, q, q, q, mesh)


def test_a_mesh_whose_groups_are_gone_says_so() -> None:
    for classes, text in run_ranks(a_mesh_after_its_groups, 2):
        assert "CommError" in classes and "destroyed" in text, text


def copies() -> list[str]:
    mesh = AttentionMesh.of(make_mesh(1, 2), timeout_s=15.0)
    step = SequenceParallel(None, "g2n1", COST, timeout_s=15).plan([2])
    calls: list[Callable[[], object]] = [
        lambda: copy.deepcopy(step),
        lambda: pickle.dumps(step),
        lambda: copy.deepcopy(mesh),
        lambda: torch.func.grad(lambda x: step.route(x=x)["x"].sum())(torch.ones(2)),
    ]
    return [raised_by(call)[1] for call in calls]


def test_what_cannot_be_copied_or_transformed_says_so() -> None:
    for *copied, transformed in run_ranks(copies, 2):
        assert all("cannot be copied or pickled" in text for text in copied), copied
        assert "torch.autograd.grad" in transformed


def gradients_of_lost_scores(ring: int, ulysses: int) -> list[float]:
    """Largest differences to one process, of rows with scores; and of the others' gradient."""
    mesh, size = AttentionMesh.of(make_mesh(ring, ulysses), timeout_s=15.0), 8
    layout = SequenceLayout((size,), ring, ulysses)
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(1, 2, size, 4, generator=generator) for _ in range(4)]
    mask = torch.zeros(1, 1, size, size)
    mask[:, :, 5:] = torch.finfo(torch.float32).min
    grad = wholes.pop()
    lost = grad.clone()
    lost[:, :, :5] = 0
    found: list[float] = []
    for weights in (grad - lost, lost):
        leaves = [x.clone().requires_grad_() for x in wholes]
        q, k, v = (split(x, mesh, layout, 2) for x in leaves)
        out = gather(
            attention(q, k, v, mesh, attn_mask=mask, options=AttentionOptions(layout=layout)),
            mesh,
            layout,
            2,
        )
        (out * weights).sum().backward()
        alone = [x.clone().requires_grad_() for x in wholes]
        want = functional.scaled_dot_product_attention(*alone, attn_mask=mask)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        if weights is lost:
            found.append(max(float(x.grad.abs().max()) for x in leaves[:2] if x.grad is not None))
            continue
        (want * weights).sum().backward()
        for x, y in zip(leaves, alone, strict=True):
            assert x.grad is not None and y.grad is not None
            dist.all_reduce(x.grad)
            found.append(float((x.grad - y.grad).abs().max()))
    return found


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_what_loses_its_scores_in_a_mask_gives_them_no_gradient(ring: int, ulysses: int) -> None:
    for *seen, lost in run_ranks(gradients_of_lost_scores, 2, ring, ulysses):
        assert max(seen) < 1e-5
        assert lost == 0.0


def scales_that_are_not_positive(ring: int, ulysses: int) -> list[float]:
    """Torch's flash attention gives nan for them under a causal mask (2.13, CPU)."""
    mesh, layout = AttentionMesh.of(make_mesh(ring, ulysses)), SequenceLayout((9,), ring, ulysses)
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(1, 2, 9, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)
    found: list[float] = []
    for scale in (-0.3, 0.0):
        leaves = [x.clone().requires_grad_() for x in wholes]
        q, k, v = (split(x, mesh, layout, 2) for x in leaves)
        out = gather(
            attention(
                q, k, v, mesh, is_causal=True, scale=scale, options=AttentionOptions(layout=layout)
            ),
            mesh,
            layout,
            2,
        )
        out.sum().backward()
        alone = [x.clone().requires_grad_() for x in wholes]
        scores = (alone[0] @ alone[1].mT * scale).masked_fill(later, float("-inf"))
        want = scores.softmax(-1) @ alone[2]
        want.sum().backward()
        found.append(float((out - want).abs().max()))
        for x, y in zip(leaves, alone, strict=True):
            assert x.grad is not None and y.grad is not None
            dist.all_reduce(x.grad)
            found.append(float((x.grad - y.grad).abs().max()))
    return found


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_scales_that_are_not_positive(ring: int, ulysses: int) -> None:
    for found in run_ranks(scales_that_are_not_positive, 2, ring, ulysses):
        assert max(found) < 1e-10, found


def odd_strides() -> None:
    """Tensors of one element count as contiguous with any strides."""
    parallel = SequenceParallel(None, "g1n2", COST, timeout_s=15)
    rank = dist.get_rank()
    step = parallel.plan([1])
    for one in (
        torch.arange(6.0)[rank :: 6 - rank][None],
        torch.randn(1, 5).T[:1],
        torch.randn(1, 3, 4)[:, 0],
        torch.randn(5, 4).T[:, :1][:1],
        torch.randn(1, 7)[:, 3:4].T,
    ):
        assert one.shape[0] == 1
        leaf = one.clone().requires_grad_()
        there = step.route(x=leaf)["x"]
        if one.numel() == 1:
            odd = there.as_strided(there.shape, [9] * there.dim())
            assert torch.equal(step.restore(odd), one)
        grad = torch.ones(1, 1).expand(1, one.shape[1:].numel()).T.reshape(one.shape)
        there.backward(grad)
        assert leaf.grad is not None and bool((leaf.grad == 1).all())
        first = torch.cat([step.gather_samples(one), torch.zeros_like(one)])
        assert first.shape[0] == 3


def test_tensors_of_one_row_travel_with_any_strides() -> None:
    run_ranks(odd_strides, 2)
