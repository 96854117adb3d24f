"""Attention on an 8-bit wire: its error, its gradients, its bytes, and what ranks must agree on."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.attention.api import (
    AttentionMesh,
    AttentionOptions,
    SequenceLayout,
    attention,
    gather,
    split,
)
from bascule.attention.layout import positions_on
from bascule.comm.collectives import Transfers
from bascule.comm.groups import RankGroup
from bascule.comm.quantized import Quantized
from tests.helpers.mesh_cases import (
    Three,
    difference,
    draw,
    layout_of,
    make_mask,
    make_mesh,
    reference,
    summed,
    three,
)
from tests.helpers.ranks import on_ranks, raised_by
from tests.helpers.rows import WIRES

# Shapes are batch, heads, key-value heads, width.
CASES: list[dict[str, Any]] = [
    {"shape": (2, 4, 4, 64), "segments": (24,)},
    {"shape": (1, 9, 3, 64), "segments": (5, 18), "mask": "key padding"},
    {"shape": (2, 7, 7, 48), "segments": (29,), "mask": "empty rows"},
    {"shape": (1, 6, 2, 64), "segments": (13,), "mask": "by head"},
    {"shape": (1, 6, 6, 64), "segments": (8, 17), "mask": "additive"},
    {"shape": (1, 8, 1, 64), "segments": (3,)},
    {"shape": (1, 5, 5, 64), "segments": (27,), "mask": "causal", "zigzag": True},
    {"shape": (2, 7, 7, 32), "segments": (5, 18), "replicated": (0,), "mask": "empty rows"},
    {"shape": (1, 6, 6, 64), "segments": (19, 4), "replicated": (1,), "zigzag": True},
    {"shape": (1, 9, 3, 64), "segments": (5, 18), "mask": "key padding", "overlap": True},
    {"shape": (2, 7, 7, 32), "segments": (24,), "mask": "causal", "overlap": True},
]
Places = list[tuple[int, int]]


def rounded(x: Tensor, layout: SequenceLayout, places: list[Places], wire: Quantized) -> Tensor:
    """(B, H, S, D) as it arrives if the tokens of these ranks are packed together."""
    arrived = x.clone()
    for ranks in places:
        runs = [run for place in ranks for run in layout.own_runs(*place)]
        at = torch.tensor([token for run in runs for token in range(*run)], dtype=torch.int64)
        arrived[:, :, at] = wire.unpack(wire.pack(x[:, :, at]), x.dtype)
    return arrived


def straight_through(
    whole: Three,
    grad: Tensor,
    mask: Tensor | None,
    causal: bool,
    layout: SequenceLayout,
    wire: Quantized,
) -> list[Tensor]:
    """Output and gradients, from all tokens: each ring rank's queries with the keys that it has."""
    rings = [
        [(ring, ulysses) for ulysses in range(layout.ulysses_degree)]
        for ring in range(layout.ring_degree)
    ]
    ranks = [[place] for places in rings for place in places]
    q, *keys = whole
    if layout.ulysses_degree > 1:
        q, *keys = (rounded(x, layout, ranks, wire) for x in whole)
    far = [rounded(x, layout, rings, wire) for x in keys]
    total = [torch.zeros_like(q), *(torch.zeros_like(x) for x in whole)]
    for ring in range(layout.ring_degree):
        mine = torch.zeros(layout.seq_len, 1, dtype=torch.bool)
        mine[positions_on(layout, ring, mine.device)] = True
        met = [torch.where(mine, x, there) for x, there in zip(keys, far, strict=True)]
        leaves = three(x.clone().requires_grad_() for x in (q, *met))
        out = reference(*leaves, mask, causal) * mine
        parts = (out.detach(), *torch.autograd.grad(out, leaves, grad))
        total = [a + b for a, b in zip(total, parts, strict=True)]
    if layout.ulysses_degree > 1:
        total[0] = rounded(total[0], layout, ranks, wire)
    return total


def normal(case: dict[str, Any], length: int, dtype: torch.dtype) -> Three:
    """Queries, keys and values, with a large offset in one channel of the last two but a token."""
    q, k, v = draw(case["shape"], length, seed=length)
    k[:, :, 1:, 3] += 8.0
    v[:, :, 1:, 5] -= 8.0
    return three(x.to(dtype) for x in (q, k, v))


def compare(mesh: AttentionMesh, case: dict[str, Any], wire: Quantized) -> None:
    """Compare with the straight-through estimate; of no key at all comes nothing."""
    layout, kind = layout_of(case, mesh), case.get("mask", "none")
    batch, heads, _, _ = case["shape"]
    wholes = normal(case, layout.seq_len, torch.float64)
    mask = make_mask(kind, batch, heads, layout.seq_len, torch.float64)
    leaves = three(split(x, mesh, layout, 2).requires_grad_() for x in wholes)
    causal = kind == "causal"
    out = attention(
        *leaves,
        mesh,
        attn_mask=mask,
        is_causal=causal,
        options=AttentionOptions(
            layout=layout, comm_dtype=wire, overlap=case.get("overlap", False)
        ),
    )
    own_grad = torch.randn(out.shape, generator=torch.manual_seed(dist.get_rank())).to(out)
    grads = torch.autograd.grad(out, leaves, own_grad)
    all_grad, *sums = summed(mesh, layout, own_grad, *grads)
    found = [gather(out.detach(), mesh, layout, 2), *sums]
    want = straight_through(wholes, all_grad, mask, causal, layout, wire)
    for name, got, whole in zip(("out", "dq", "dk", "dv"), found, want, strict=True):
        # Values that arrive are float32; what ranks compute themselves is float64.
        assert (error := difference(got, whole)) < 1e-6, (wire, case, name, error)
    sees_nothing = (reference(*wholes, mask, causal) == 0).all(-1)
    assert not found[0][sees_nothing].any(), (wire, case)


@contextmanager
def counted(mesh: AttentionMesh) -> Iterator[dict[str, int]]:
    """Bytes that this rank sends to others along each axis."""
    sent = {"ulysses": 0, "ring": 0}
    begin, ring = Transfers.__init__, mesh.ring and mesh.ring.key

    def count_sends(self: Transfers, group: RankGroup, what: Any, out: Any, come: Any) -> None:
        num_bytes = sum(x.nbytes for x in out.values())
        sent["ring" if group.key == ring else "ulysses"] += num_bytes
        begin(self, group, what, out, come)

    with mock.patch.object(Transfers, "__init__", count_sends):
        yield sent


def half_the_bytes(mesh: AttentionMesh) -> None:
    """In bfloat16, width 128, 8 tokens a rank: forward as they are and by each wire; backward."""
    ring, ulysses = mesh.degrees
    case = {"shape": (2, 6, 6, 128), "segments": (8 * ring * ulysses,)}
    layout = layout_of(case, mesh)
    whole = normal(case, layout.seq_len, torch.bfloat16)
    leaves = three(split(x, mesh, layout, 2).requires_grad_() for x in whole)
    found: list[dict[str, int]] = []
    outs: list[Tensor] = []
    for wire in (None, Quantized("e4m3"), INT8):
        options = AttentionOptions(layout=layout, comm_dtype=wire)
        attention(*leaves, mesh, options=options)  # the first call agrees on the form
        with counted(mesh) as sent:
            outs.append(attention(*leaves, mesh, options=options))
        found.append(sent)
    spread = (outs[0] - outs[0].mean(2, keepdim=True)).norm()
    for out, most in zip(outs, (0.0, 0.1, 0.1), strict=True):
        assert out.dtype == torch.bfloat16 and (out - outs[0]).norm() <= most * spread
    for out in outs[:2]:
        with counted(mesh) as sent:
            out.backward(torch.ones_like(out))
        found.append(sent)
    plain, packed, int8, plain_back, packed_back = found
    assert (plain["ulysses"] > 0) == (ulysses > 1) and (plain["ring"] > 0) == (ring > 1)
    for name in plain:
        assert int8[name] * 256 == packed[name] * 256 == plain[name] * 132
    # Gradients as they are; in a ring the keys and values come once more.
    assert packed_back["ulysses"] == plain_back["ulysses"]
    assert plain["ring"] - packed["ring"] == plain_back["ring"] - packed_back["ring"]


def packed_once(mesh: AttentionMesh) -> None:
    """Keys and values of a ring, forward and backward."""
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    with mock.patch.object(Quantized, "pack", autospec=True, side_effect=Quantized.pack) as pack:
        out = attention(q, q, q, mesh, options=AttentionOptions(comm_dtype=Quantized("int8")))
        assert pack.call_count == 2
        out.sum().backward()
        assert pack.call_count == 4


INT8 = Quantized("int8")
DISAGREEING: list[tuple[Quantized | None, Quantized | None, torch.dtype, str]] = [
    (None, INT8, torch.float32, "int8"),
    (INT8, Quantized("e4m3"), torch.float32, "e4m3"),
    (INT8, INT8, torch.bfloat16, "torch.bfloat16"),
]


def disagreements(mesh: AttentionMesh) -> None:
    """The last rank means another call than the others; all get an error."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for number, (first, last, dtype, words) in enumerate(DISAGREEING):
        x = torch.randn(1, 4, 3 + number, 8).to(dtype if is_last else torch.float32)
        options = AttentionOptions(comm_dtype=last if is_last else first)
        names, text = raised_by(attention, x, x, x, mesh, options=options)
        assert "CommError" in names and words in text and "disagree on the call" in text, text


ALL = [(1, 2), (2, 2), (3, 1), (2, 1), (1, 3), (4, 1), (2, 3)]


@pytest.mark.parametrize(
    ("ring", "ulysses", "every"),
    [*[(1, 2, 2), (3, 1, 2)], *(pytest.param(*x, 1, marks=pytest.mark.stress) for x in ALL)],
)
@on_ranks(lambda ring, ulysses, **_: ring * ulysses)
def test_attention_on_a_wire_of_8_bits(ring: int, ulysses: int, every: int) -> None:
    """Forward rounds, and backward does not: every so-manieth case, others for another wire."""
    mesh = make_mesh(ring, ulysses)
    pairs = itertools.product(enumerate(WIRES), enumerate(CASES, ulysses))
    for wire, case in [(x, y) for (i, x), (j, y) in pairs if (i + j) % every == 0]:
        compare(mesh, case, wire)
    half_the_bytes(mesh)
    if ulysses == 1:
        packed_once(mesh)
    disagreements(mesh)


def test_one_rank_needs_no_wire() -> None:
    q, k, v = normal({"shape": (2, 6, 3, 16)}, 9, torch.float64)
    want = reference(q, k, v, None, False)
    for wire in WIRES:
        options = AttentionOptions(comm_dtype=wire)
        out = attention(q, k, v, AttentionMesh(None, None, None), options=options)
        assert difference(out, want) < 1e-12
