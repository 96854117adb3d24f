"""Ulysses by ring against one process, for shapes and masks on which peers fail or are wrong."""

import itertools
import math
from typing import Any

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
from bascule.attention.layout import positions_on
from bascule.errors import ConfigError
from tests.helpers.mesh_cases import as_given, difference, make_mask, make_mesh, reference
from tests.helpers.ranks import run_ranks

DEGREES = [
    (ring, ulysses)
    for ring, ulysses in itertools.product((1, 2, 3, 4, 6, 8), repeat=2)
    if ring * ulysses in (2, 3, 4, 6, 8)
]
MASKS = ("none", "key padding", "bool", "additive", "empty rows", "by head", "causal")


def compare(
    ring: int, ulysses: int, case: dict[str, Any], dtype: torch.dtype = torch.float64
) -> dict[str, float]:
    """Errors of output and gradients, each rank's share gathered."""
    mesh = make_mesh(ring, ulysses)
    batch, heads, kv_heads, dim = case["shape"]
    segments, kind = case["segments"], case["mask"]
    zigzag, stripe = case.get("zigzag", False), case.get("stripe", 0)
    layout = SequenceLayout(segments, ring, ulysses, zigzag, stripe=stripe)
    generator = torch.Generator().manual_seed(0)

    def normal(num_heads: int) -> Tensor:
        shape = batch, num_heads, layout.seq_len, dim
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    q, k, v = normal(heads), normal(kv_heads), normal(kv_heads)
    grad = normal(heads).detach()
    mask = make_mask(kind, batch, heads, layout.seq_len, dtype)
    expected = reference(q, k, v, mask, kind == "causal")
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    shares = [split(x.detach(), mesh, layout, 2) for x in (q, k, v)]
    if case.get("values_apart"):
        shares = [x.mT.contiguous().mT for x in shares]
    local = q_local, k_local, v_local = [x.requires_grad_() for x in shares]
    out = attention(
        q_local,
        k_local,
        v_local,
        mesh,
        attn_mask=mask,
        is_causal=kind == "causal",
        options=AttentionOptions(
            layout=layout,
            kernel=case.get("kernel"),
            overlap=case.get("overlap"),
            double_buffer=case.get("double_buffer", True),
        ),
    )
    grads = torch.autograd.grad(out, local, split(grad, mesh, layout, 2))
    found = [gather(x.detach(), mesh, layout, 2) for x in (out, *grads)]
    names = ("out", "dq", "dk", "dv")
    pairs = zip(names, found, (expected.detach(), *wanted), strict=True)
    return {name: difference(a, b) for name, a, b in pairs}


CASES: list[dict[str, Any]] = [
    {"shape": (2, 8, 8, 8), "segments": (24,), "mask": "none"},
    {"shape": (1, 9, 9, 4), "segments": (29,), "mask": "none"},
    {"shape": (1, 8, 8, 4), "segments": (19,), "mask": "none", "values_apart": True},
    {"shape": (2, 16, 4, 4), "segments": (7, 22), "mask": "none"},
    {"shape": (1, 8, 1, 4), "segments": (3,), "mask": "none"},
    {"shape": (2, 8, 8, 4), "segments": (13,), "mask": "none", "kernel": "plain"},
    *({"shape": (2, 11, 11, 4), "segments": (5, 18), "mask": mask} for mask in MASKS[1:6]),
    {"shape": (2, 16, 8, 4), "segments": (13,), "mask": "by head"},
    {"shape": (1, 10, 5, 4), "segments": (13,), "mask": "by head", "overlap": False},
    {"shape": (2, 8, 4, 4), "segments": (13,), "mask": "bool", "kernel": "plain"},
    {"shape": (2, 9, 9, 4), "segments": (4, 13), "mask": "bool", "overlap": False},
    {"shape": (1, 8, 8, 4), "segments": (7, 22), "mask": "bool", "stripe": 4},
    {"shape": (2, 8, 4, 4), "segments": (13,), "mask": "causal", "stripe": 2},
    {"shape": (2, 8, 4, 4), "segments": (27,), "mask": "causal"},
    *(
        {"shape": (2, 9, 9, 4), "segments": (5, 18), "mask": mask, "overlap": True}
        for mask in ("none", "bool", "by head", "causal")
    ),
    {"shape": (1, 8, 4, 4), "segments": (27,), "mask": "causal", "overlap": True},
    {"shape": (1, 8, 8, 4), "segments": (3,), "mask": "causal", "overlap": True},
    {"shape": (2, 8, 4, 4), "segments": (13,), "mask": "none", "double_buffer": False},
    {"shape": (2, 8, 4, 4), "segments": (27,), "mask": "causal", "zigzag": True},
    {"shape": (1, 8, 8, 4), "segments": (5, 8), "mask": "causal", "zigzag": True},
    {"shape": (1, 8, 8, 4), "segments": (3, 17), "mask": "bool", "zigzag": True},
]


def compare_all(ring: int, ulysses: int) -> list[dict[str, float]]:
    return [compare(ring, ulysses, case) for case in CASES]


IN_SHORT = [degrees for degrees in DEGREES if math.prod(degrees) < 6 or degrees in ((3, 2), (2, 4))]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("ring", "ulysses"),
    [x if x in IN_SHORT else pytest.param(*x, marks=pytest.mark.stress) for x in DEGREES],
)
def test_exact_in_float64(ring: int, ulysses: int) -> None:
    for found in run_ranks(compare_all, ring * ulysses, ring, ulysses):
        for case, errors in zip(CASES, found, strict=True):
            assert max(errors.values()) < 1e-10, case


def compare_float32(ring: int, ulysses: int) -> list[dict[str, float]]:
    return [compare(ring, ulysses, case, torch.float32) for case in CASES]


@pytest.mark.some(2)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 2), (4, 1), (1, 4)])
def test_close_in_float32(ring: int, ulysses: int) -> None:
    for found in run_ranks(compare_float32, ring * ulysses, ring, ulysses):
        for case, errors in zip(CASES, found, strict=True):
            assert max(errors.values()) < 1e-6, case


def refusals() -> list[str]:
    mesh = make_mesh(2, 1)
    q = torch.zeros(1, 4, 3, 8)
    said: list[str] = []
    wrong: list[dict[str, Any]] = [
        {"layout": SequenceLayout((9,), 2, 1)},
        {"layout": SequenceLayout((6,), 1, 2)},
        {"attn_mask": torch.ones(1, 1, 1, 5, dtype=torch.bool)},
        {"kernel": "none"},
    ]
    for arguments in wrong:
        try:
            attention(q, q, q, mesh, **as_given(arguments))
        except ConfigError as error:
            said.append(str(error))
    try:
        AttentionMesh.of(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ring")))
    except ConfigError as error:
        said.append(str(error))
    dist.barrier()
    return said


def test_what_cannot_be_attended_is_refused() -> None:
    texts = ("3 tokens", "1 x 2 ranks", "does not broadcast", "choose one of", "('dp', 'ring')")
    for said in run_ranks(refusals, 2):
        assert len(said) == len(texts)
        assert all(text in sentence for text, sentence in zip(texts, said, strict=True))


def test_zigzag_evens_out_causal_work() -> None:
    for length in (640, 637):
        work: dict[bool, list[int]] = {}
        for zigzag in (False, True):
            layout = SequenceLayout((length,), 4, 1, zigzag)
            places = [positions_on(layout, ring, torch.device("cpu")) for ring in range(4)]
            work[zigzag] = [int((place + 1).sum()) for place in places]
        assert max(work[True]) < 1.06 * min(work[True])
        assert max(work[False]) > 5 * min(work[False])
        assert sum(work[True]) == sum(work[False]) == length * (length + 1) // 2
