"""Odd tensors, scales, masks, threads and derivatives: right, or refused in a sentence."""

import copy
import pickle
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from bascule.attention.api import AttentionMesh, SequenceLayout, attention, gather, split
from bascule.parallel import SequenceParallel
from tests.helpers.cases import COST
from tests.helpers.inference_cases import make_mesh
from tests.helpers.ranks import raised_by, run_ranks


def mesh_of(ring: int, ulysses: int) -> AttentionMesh:
    return AttentionMesh.of(make_mesh(ring, ulysses))


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
    parallel = SequenceParallel(None, "g2n1", COST, timeout_s=100)
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


def a_mesh_after_its_groups() -> tuple[list[str], str]:
    mesh, q = mesh_of(2, 1), torch.ones(1, 2, 4, 4)
    attention(q, q, q, mesh)
    dist.destroy_process_group()
    return raised_by(attention, q, q, q, mesh)


def test_a_mesh_whose_groups_are_gone_says_so() -> None:
    for classes, text in run_ranks(a_mesh_after_its_groups, 2):
        assert "CommError" in classes and "destroyed" in text, text


def copies() -> list[str]:
    mesh = AttentionMesh.of(make_mesh(1, 2))
    step = SequenceParallel(None, "g2n1", COST, timeout_s=100).plan([2])
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
