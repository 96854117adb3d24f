"""Joint attention: text that every rank has whole, beside an image that is shared."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bascule.attention.api import AttentionOptions, SequenceLayout, attention, gather, split
from tests.helpers.mesh_cases import (
    difference,
    make_mask,
    make_mesh,
    reference,
    summed,
    three,
)
from tests.helpers.ranks import run_ranks

MESHES = [(1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3), (4, 2)]
CASES: list[dict[str, Any]] = [
    {"shape": (2, 9, 9, 4), "segments": (5, 17), "replicated": (0,)},
    {"shape": (1, 9, 3, 4), "segments": (17, 5), "replicated": (1,)},
    {"shape": (1, 9, 9, 4), "segments": (11, 3, 8), "replicated": (1,)},
    {"shape": (2, 7, 7, 4), "segments": (2, 19, 4, 6), "replicated": (0, 3)},
    {"shape": (1, 7, 7, 4), "segments": (3, 6, 5), "replicated": (2, 0)},
    {"shape": (1, 7, 7, 4), "segments": (1, 2), "replicated": (0,)},
    {"shape": (1, 7, 7, 4), "segments": (6,), "replicated": (0,)},
    {"shape": (1, 7, 7, 4), "segments": (0, 13), "replicated": (0,)},
    *(
        {"shape": (2, 7, 7, 4), "segments": (5, 18), "replicated": (0,), "mask": mask}
        for mask in ("key padding", "empty rows", "by head", "causal")
    ),
    {"shape": (1, 7, 7, 4), "segments": (21,), "replicated": (0,), "mask": "causal", "zig": True},
    {"shape": (1, 7, 7, 4), "segments": (18, 5), "replicated": (1,), "mask": "bool", "zig": True},
]


def layout_of(case: dict[str, Any], ring: int, ulysses: int) -> SequenceLayout:
    return SequenceLayout(
        case["segments"], ring, ulysses, case.get("zig", False), case["replicated"]
    )


def compare(ring: int, ulysses: int, case: dict[str, Any]) -> float:
    """Every rank has a gradient of its own for its copy of the text; they add up."""
    mesh, layout = make_mesh(ring, ulysses), layout_of(case, ring, ulysses)
    batch, heads, kv_heads, dim = case["shape"]
    kind, shape = case.get("mask", "none"), (batch, heads, layout.seq_len, dim)
    generator = torch.Generator().manual_seed(1)
    sizes = (heads, kv_heads, kv_heads)
    wholes = three(
        torch.randn(batch, num, *shape[2:], generator=generator, dtype=torch.float64)
        for num in sizes
    )
    mask = make_mask(kind, batch, heads, layout.seq_len, torch.float64)
    leaves = three(split(x.detach(), mesh, layout, 2).requires_grad_() for x in wholes)
    out = attention(
        *leaves,
        mesh,
        attn_mask=mask,
        is_causal=kind == "causal",
        options=AttentionOptions(layout=layout),
    )
    generator.manual_seed(100 + dist.get_rank())
    own_grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad(out, leaves, own_grad)

    expected_leaves = three(x.requires_grad_() for x in wholes)
    expected = reference(*expected_leaves, mask, kind == "causal")
    wanted = torch.autograd.grad(expected, expected_leaves, summed(own_grad, mesh, layout))
    found = [summed(x, mesh, layout) for x in grads]
    errors = [difference(a, b) for a, b in zip(found, wanted, strict=True)]
    errors.append(difference(out.detach(), split(expected.detach(), mesh, layout, 2)))
    errors.append(difference(gather(out.detach(), mesh, layout, 2), expected.detach()))
    return max(errors)


def compare_all(ring: int, ulysses: int) -> list[float]:
    return [compare(ring, ulysses, case) for case in CASES]


@pytest.mark.some(4)
@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_replicated_text_counts_once(ring: int, ulysses: int) -> None:
    for found in run_ranks(compare_all, ring * ulysses, ring, ulysses):
        for case, error in zip(CASES, found, strict=True):
            assert error < 1e-10, case


def gathered_gradients(ring: int, ulysses: int, replicated: tuple[int, ...]) -> float:
    """All ranks compute the same loss of the gathered tokens; its gradient is the ranks' sum."""
    mesh, layout = make_mesh(ring, ulysses), SequenceLayout((4, 9), ring, ulysses, True, replicated)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 3, 13, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    local = split(whole, mesh, layout, 2).requires_grad_()
    (grad,) = torch.autograd.grad(gather(local, mesh, layout, -2), local, weight)
    return difference(summed(grad, mesh, layout), weight)


@pytest.mark.parametrize("replicated", [(), (0,), (0, 1)])
def test_gather_gives_each_token_its_gradient_once(replicated: tuple[int, ...]) -> None:
    assert max(run_ranks(gathered_gradients, 4, 2, 2, replicated)) == 0.0


def test_every_token_is_answered_for_once() -> None:
    for case in CASES:
        for ring, ulysses in MESHES:
            layout = layout_of(case, ring, ulysses)
            counts = torch.zeros(layout.seq_len)
            for place in ((r, u) for r in range(ring) for u in range(ulysses)):
                own = [run for runs in layout.own(*place) for run in runs]
                for start, stop in own:
                    counts[start:stop] += 1
            assert (counts == 1).all()
            sizes = [layout.ring_len(r) for r in range(ring)]
            assert max(sizes) - min(sizes) <= 2 * len(layout.segments)
