"""Steps and meshes that are first used in inference mode, and then in training."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from bascule.attention.api import AttentionMesh, attention
from bascule.parallel import SequenceParallel, Step
from tests.helpers.cases import COST
from tests.helpers.ranks import on_ranks

LENS = [[30, 9, 2], [4], [7]]


def step_of(step: Step, x: torch.Tensor) -> torch.Tensor:
    moved = step.route(x=x)["x"]
    samples = step.gather_samples(torch.ones(len(LENS[dist.get_rank()]), 6) * x[0, 0])
    moved = moved * samples[step.local_seq_ids][step.token_slot]
    heads = moved[:, None].expand(-1, 6, -1)
    return step.mean(step.restore(step.attend(heads, heads, heads)[:, 0] + moved))


@on_ranks(3)
def test_a_plan_made_in_inference_mode_serves_training() -> None:
    lens = LENS[dist.get_rank()]
    for topology in ("g1n3", "g3n1", "g1r3n1", "g1n1+g2n1"):
        with torch.inference_mode():
            step = SequenceParallel(None, topology, COST).plan(lens)
            _ = step_of(step, torch.ones(sum(lens), 6))
        x = torch.ones(sum(lens), 6, requires_grad=True)
        step_of(step, x).backward()
        assert x.grad is not None and bool((x.grad != 0).all()), topology


@on_ranks(2)
def test_a_mesh_used_in_inference_mode_serves_training() -> None:
    """The gradients are those of one process, of the same loss over all tokens."""
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(8, 8).tril().bool()
    scaled_dot_product_attention(*whole, attn_mask=mask).square().sum().backward()
    assert whole.grad is not None
    own = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    for degrees in ((2, 1), (1, 2)):
        names = ("ring", "ulysses")
        mesh = AttentionMesh.of(init_device_mesh("cpu", degrees, mesh_dim_names=names))
        qkv = whole.detach()[..., own, :].clone()
        with torch.inference_mode():
            attention(qkv[0], qkv[1], qkv[2], mesh, attn_mask=mask)
        q, k, v = qkv.requires_grad_()
        attention(q, k, v, mesh, attn_mask=mask).square().sum().backward()
        torch.testing.assert_close(qkv.grad, whole.grad[..., own, :])
