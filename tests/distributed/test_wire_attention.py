"""Attention on an 8-bit wire: its error, its gradients, its bytes, and what ranks must agree on."""

import itertools
import math
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
from bascule.attention.layout import own_tokens, positions_on
from bascule.comm import wire as wires
from bascule.comm.collectives import Transfers
from bascule.comm.groups import RankGroup
from bascule.comm.wire import Format, Wire, measure_error
from bascule.errors import ConfigError
from tests.helpers.mesh_cases import (
    Three,
    difference,
    make_mask,
    make_mesh,
    reference,
    summed,
    three,
)
from tests.helpers.ranks import raised_by, run_ranks

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
CENTRES = ("none", "given", "taken")


def rounded(x: Tensor, fmt: Format, centre: Tensor | None) -> Tensor:
    """What arrives of rows that are sent at 8 bits: as differences where those are smaller."""
    largest, order = (127.0, math.inf) if fmt == "int8" else (448.0, 2.0)
    wide, offset = x.float(), torch.zeros(())
    if centre is not None:
        sizes = [y.norm(order, dim=-1, keepdim=True) for y in (wide - centre, wide)]
        offset = torch.where(sizes[0] < sizes[1], centre, 0.0)
    codes = wide - offset
    peak = codes.abs().amax(-1, keepdim=True)
    codes = codes / peak.clamp(min=1e-30) * largest
    codes = codes.round() if fmt == "int8" else codes.to(torch.float8_e4m3fn).float()
    return (codes / largest * peak + offset).to(x.dtype)


def straight_through(
    whole: Three,
    grad: Tensor,
    mask: Tensor | None,
    causal: bool,
    layout: SequenceLayout,
    wire: Wire,
) -> list[Tensor]:
    """Output and gradients, from all tokens: each ring rank's queries with the keys that it has."""
    fmt, centres = wire.format, (wire.k_centre, wire.v_centre)
    q, *keys = whole
    if layout.ulysses_degree > 1:
        q, *keys = (rounded(x, fmt, c) for x, c in zip(whole, (None, *centres), strict=True))
    far = [rounded(x, fmt, c) for x, c in zip(keys, centres, strict=True)]
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
        total[0] = rounded(total[0], fmt, wire.out_centre(q.shape[1]))
    return total


def normal(case: dict[str, Any], length: int, dtype: torch.dtype) -> Three:
    """Queries, keys and values, with a large offset in one channel of the last two but a token."""
    batch, heads, kv_heads, dim = case["shape"]
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(batch, num, length, dim, generator=generator, dtype=torch.float64)
        for num in (heads, kv_heads, kv_heads)
    )
    k[:, :, 1:, 3] += 8.0
    v[:, :, 1:, 5] -= 8.0
    return three(x.to(dtype) for x in (q, k, v))


def make_wire(fmt: Format, centres: str, k: Tensor, v: Tensor, mesh: AttentionMesh) -> Wire:
    if centres == "given":
        return Wire(fmt).centred(k, v, mesh.whole)
    return Wire(fmt, takes_centres=centres == "taken")


def layout_of(case: dict[str, Any], mesh: AttentionMesh) -> SequenceLayout:
    zigzag, replicated = case.get("zigzag", False), case.get("replicated", ())
    return SequenceLayout(case["segments"], *mesh.degrees, zigzag, replicated)


def compare(
    mesh: AttentionMesh, case: dict[str, Any], fmt: Format, centres: str
) -> dict[str, float]:
    """Differences to the straight-through estimate, and to what needs no wire."""
    layout, kind = layout_of(case, mesh), case.get("mask", "none")
    batch, heads, _, _ = case["shape"]
    whole = normal(case, layout.seq_len, torch.float64)
    mask = make_mask(kind, batch, heads, layout.seq_len, torch.float64)
    leaves = three(split(x, mesh, layout, 2).requires_grad_() for x in whole)
    own_k, own_v = (own_tokens(x.detach(), layout, mesh.place, 2) for x in leaves[1:])
    wire = make_wire(fmt, centres, own_k, own_v, mesh)
    causal = kind == "causal"
    out = attention(
        *leaves,
        mesh,
        attn_mask=mask,
        is_causal=causal,
        options=AttentionOptions(layout=layout, wire=wire, overlap=case.get("overlap")),
    )
    own_grad = torch.randn(out.shape, generator=torch.manual_seed(dist.get_rank())).to(out)
    grads = torch.autograd.grad(out, leaves, own_grad)
    found = [gather(out.detach(), mesh, layout, 2), *(summed(x, mesh, layout) for x in grads)]

    known = Wire(fmt).centred(own_k, own_v, mesh.whole) if centres == "taken" else wire
    all_grad = summed(own_grad, mesh, layout)
    want = straight_through(whole, all_grad, mask, causal, layout, known)
    exact = reference(*whole, mask, causal)
    spread = (exact - exact.mean(2, keepdim=True)).norm()
    names = ("out", "dq", "dk", "dv")
    errors = {name: difference(a, b) for name, a, b in zip(names, found, want, strict=True)}
    errors["exact"] = float((found[0] - exact).norm() / spread)
    empty = (exact == 0).all(-1)
    errors["empty"] = float(found[0][empty].abs().sum())
    return errors


def compare_all(ring: int, ulysses: int) -> list[tuple[str, str, int, dict[str, float]]]:
    mesh = make_mesh(ring, ulysses)
    formats: tuple[Format, ...] = ("int8", "e4m3")
    return [
        (fmt, centres, number, compare(mesh, case, fmt, centres))
        for fmt, centres in itertools.product(formats, CENTRES)
        for number, case in enumerate(CASES)
    ]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("ring", "ulysses"),
    [
        *[(1, 2), (2, 2), (3, 1)],
        *[pytest.param(*x, marks=pytest.mark.stress) for x in ((2, 1), (1, 3), (4, 1), (2, 3))],
    ],
)
def test_forward_rounds_and_backward_does_not(ring: int, ulysses: int) -> None:
    for found in run_ranks(compare_all, ring * ulysses, ring, ulysses):
        for fmt, centres, number, errors in found:
            where = fmt, centres, CASES[number], errors
            assert errors["empty"] == 0.0, where
            # Values that arrive are float32; what ranks compute themselves is float64.
            assert max(errors[name] for name in ("out", "dq", "dk", "dv")) < 1e-6, where
            if fmt == "int8" and centres != "none":
                assert errors["exact"] < (0.015 if ulysses == 1 else 0.025), where


def error_at(
    ring: int, ulysses: int, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> dict[str, float]:
    """Relative L2 of output for each kind of centre, for longer sequences, and what dtype costs."""
    mesh = make_mesh(ring, ulysses)
    case = {"shape": shape, "segments": (33, 224)}
    layout = layout_of(case, mesh)
    whole = normal(case, layout.seq_len, dtype)
    exact = reference(*three(x.double() for x in whole), None, False)
    spread = (exact - exact.mean(2, keepdim=True)).norm()
    local = three(split(x, mesh, layout, 2) for x in whole)
    found: dict[str, float] = {}
    for centres in (*CENTRES, "no wire"):
        wire = make_wire("int8", centres, *local[1:], mesh) if centres != "no wire" else None
        out = attention(*local, mesh, options=AttentionOptions(layout=layout, wire=wire))
        assert out.dtype == dtype
        error = gather(out, mesh, layout, 2).double() - exact
        found[centres] = float(error.norm() / spread)
    known = Wire("int8").centred(whole[1], whole[2], None)
    measured = measure_error(*whole, known)
    part = measured.out_kv if ulysses == 1 else measured.out_all
    found["measured"] = part.relative_to_spread
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_the_error_is_the_one_that_is_measured(ring: int, ulysses: int, dtype: torch.dtype) -> None:
    for found in run_ranks(error_at, ring * ulysses, ring, ulysses, (1, 6, 3, 128), dtype):
        for centres in ("given", "taken"):
            # In a ring a rank's own keys are exact, so it can be less.
            assert found[centres] < 1.1 * found["measured"] + found["no wire"], found
        assert found["none"] > 2.0 * found["given"] - found["no wire"], found
        if dtype == torch.float32:
            assert found["no wire"] < 1e-5 < found["given"] < 0.02, found


@contextmanager
def counted(mesh: AttentionMesh) -> Iterator[dict[str, int]]:
    """Bytes that this rank sends to others along each axis, and gives to all-reduces."""
    sent = {"ulysses": 0, "ring": 0, "all_reduce": 0}
    begin, reduce = Transfers.__init__, wires.all_reduce
    ring = mesh.ring and mesh.ring.key

    def count_sends(self: Transfers, group: RankGroup, what: Any, out: Any, come: Any) -> None:
        num_bytes = sum(x.nbytes for x in out.values())
        sent["ring" if group.key == ring else "ulysses"] += num_bytes
        begin(self, group, what, out, come)

    def all_reduce(group: RankGroup, what: Any, x: Tensor) -> Tensor:
        before = sent["all_reduce"] + x.nbytes, sent["ring"], sent["ulysses"]
        total = reduce(group, what, x)
        sent["all_reduce"], sent["ring"], sent["ulysses"] = before
        return total

    with (
        mock.patch.object(Transfers, "__init__", count_sends),
        mock.patch.object(wires, "all_reduce", all_reduce),
    ):
        yield sent


def bytes_sent(ring: int, ulysses: int) -> list[dict[str, int]]:
    """In bfloat16, width 128: forward without, with, and with taken centres, then one backward."""
    mesh = make_mesh(ring, ulysses)
    case = {"shape": (2, 7, 7, 128), "segments": (5, 18)}
    layout = layout_of(case, mesh)
    whole = normal(case, layout.seq_len, torch.bfloat16)
    leaves = three(split(x, mesh, layout, 2).requires_grad_() for x in whole)
    found: list[dict[str, int]] = []
    outs: list[Tensor] = []
    for wire in (None, Wire("e4m3"), Wire("int8", takes_centres=True)):
        attention(
            *leaves, mesh, options=AttentionOptions(layout=layout, wire=wire)
        )  # the first call agrees on the form
        with counted(mesh) as sent:
            outs.append(
                attention(*leaves, mesh, options=AttentionOptions(layout=layout, wire=wire))
            )
        found.append(sent)
    for out in outs[:2]:
        with counted(mesh) as sent:
            out.backward(torch.ones_like(out))
        found.append(sent)
    return found


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2), (3, 1), (1, 3)])
def test_half_the_bytes(ring: int, ulysses: int) -> None:
    for plain, packed, centred, plain_back, packed_back in run_ranks(
        bytes_sent, ring * ulysses, ring, ulysses
    ):
        for name, is_used in (("ulysses", ulysses > 1), ("ring", ring > 1)):
            assert (plain[name] > 0) == is_used
            assert packed[name] * 256 == centred[name] * 256 == plain[name] * 132
        assert sum(packed.values()) <= 0.52 * sum(plain.values())
        assert (plain["all_reduce"], packed["all_reduce"]) == (0, 0)
        assert centred["all_reduce"] == 4 * 2 * 2 * 7 * (128 + 1)
        # Gradients as they are; in a ring the keys and values come once more.
        assert packed_back["ulysses"] == plain_back["ulysses"]
        assert plain["ring"] - packed["ring"] == plain_back["ring"] - packed_back["ring"]


def packings() -> tuple[int, int]:
    """Of a ring of four, forward and backward."""
    mesh, calls, pack = make_mesh(4, 1), [0], Wire.pack
    q = torch.randn(1, 2, 5, 8, requires_grad=True)

    def counting(self: Wire, x: Tensor, centre: Tensor | None = None) -> Tensor:
        calls[0] += 1
        return pack(self, x, centre)

    with mock.patch.object(Wire, "pack", counting):
        out = attention(q, q, q, mesh, options=AttentionOptions(wire=Wire("int8")))
        forward = calls[0]
        out.sum().backward()
    return forward, calls[0] - forward


def test_keys_and_values_are_packed_once() -> None:
    assert run_ranks(packings, 4) == [(2, 2)] * 4


Call = dict[str, Any]
DISAGREEING: list[tuple[Call, Call, str]] = [
    ({}, {"wire": "int8"}, "as int8"),
    ({"wire": "int8"}, {"wire": "e4m3"}, "as e4m3"),
    ({"wire": "int8"}, {"wire": "int8", "centres": "taken"}, "takes_centres"),
    ({"wire": "int8"}, {"wire": "int8", "centres": "zero"}, "with k_centre, with v_centre"),
    ({"wire": "int8", "centres": "taken"}, {"wire": "int8", "centres": "zero"}, "takes_centres"),
    ({}, {"wire": "int8", "centres": "taken"}, "takes_centres"),
    ({"wire": "int8"}, {"wire": "int8", "dtype": torch.bfloat16}, "torch.bfloat16"),
]


def disagreements(ring: int, ulysses: int) -> list[tuple[list[str], str]]:
    """The last rank means another call than the others."""
    mesh, said = make_mesh(ring, ulysses), list[tuple[list[str], str]]()
    for number, (first, last, _) in enumerate(DISAGREEING):
        mine = last if dist.get_rank() == ring * ulysses - 1 else first
        x = torch.randn(1, 4, 3 + number, 8, dtype=mine.get("dtype", torch.float32))
        wire = None
        if "wire" in mine:
            centre = torch.zeros(1, 4, 1, 8) if mine.get("centres") == "zero" else None
            wire = Wire(mine["wire"], centre, centre, mine.get("centres") == "taken")
        said.append(
            raised_by(
                lambda x=x, wire=wire: attention(x, x, x, mesh, options=AttentionOptions(wire=wire))
            )
        )
    return said


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_that_disagree_on_the_wire_all_say_so(ring: int, ulysses: int) -> None:
    for said in run_ranks(disagreements, ring * ulysses, ring, ulysses):
        for (_, _, text), (names, sentence) in zip(DISAGREEING, said, strict=True):
            assert "CommError" in names and text in sentence, (text, sentence)
            assert "disagree on the form" in sentence


def test_one_rank_needs_no_wire() -> None:
    mesh = AttentionMesh(None, None, None)
    q, k, v = normal({"shape": (2, 6, 3, 16)}, 9, torch.float64)
    want = reference(q, k, v, None, False)
    for wire in (Wire("int8"), Wire("e4m3", takes_centres=True)):
        assert (
            difference(attention(q, k, v, mesh, options=AttentionOptions(wire=wire)), want) < 1e-12
        )


def test_wrong_wires_are_refused() -> None:
    mesh, q = AttentionMesh(None, None, None), torch.zeros(2, 6, 3, 8)
    wrong = Wire("int8", v_centre=torch.zeros(2, 1, 1, 8))
    with pytest.raises(ConfigError, match=r"\(2, 1, 1, 8\) .* must be \(2, 6, 1, 8\)"):
        attention(q, q, q, mesh, options=AttentionOptions(wire=wrong))
    with pytest.raises(ConfigError, match="takes_centres"):
        Wire("int8", torch.zeros(2, 6, 1, 8), takes_centres=True)


def test_the_error_of_taken_centres_is_that_of_given_ones() -> None:
    q, k, v = normal({"shape": (2, 6, 3, 64)}, 50, torch.float32)
    taken = measure_error(q, k, v, Wire("int8", takes_centres=True))
    assert taken == measure_error(q, k, v, Wire("int8").centred(k, v, None))
    assert taken != measure_error(q, k, v, Wire("int8"))
    assert not Wire("int8", takes_centres=True).centred(k, v, None).takes_centres
