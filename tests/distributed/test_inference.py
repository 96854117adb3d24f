"""context_parallel for any model: exact, and refused where it cannot be."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

from bascule.attention.api import AttentionMesh, SequenceLayout, attention, gather, split
from bascule.diffusers import context_parallel, parallelize
from bascule.errors import ConfigError
from tests.helpers.inference_cases import difference, make_mesh, same
from tests.helpers.inference_toy import TABLE, make_toy, toy_inputs
from tests.helpers.oracle import dense_attention
from tests.helpers.ranks import on_ranks

MESHES = [  # ring, Ulysses
    *[(1, 2), (2, 1), (2, 2)],
    *(pytest.param(*mesh, marks=pytest.mark.stress) for mesh in [(1, 4), (4, 1)]),
]
sdpa: Callable[..., Tensor] = functional.scaled_dot_product_attention


def options_of(kind: str, batch: int, tokens: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    if kind == "key padding":
        mask = torch.rand(batch, 1, 1, tokens, generator=generator) < 0.6
        return {"attn_mask": mask | (torch.arange(tokens) == 0)}
    if kind == "full":
        mask = torch.rand(tokens, tokens, generator=generator) < 0.5
        return {"attn_mask": mask | torch.eye(tokens, dtype=torch.bool)}
    if kind == "additive":
        return {"attn_mask": torch.randn(batch, 1, 1, tokens, generator=generator).double()}
    return {"causal": {"is_causal": True}, "scaled": {"scale": 0.7}}.get(kind, {})


KINDS = ("plain", "key padding", "full", "additive", "causal", "scaled", "gqa")


def compare(ring: int, ulysses: int, kind: str) -> None:
    """Output and gradients of joint attention, then cross attention to keys that all ranks have."""
    mesh = AttentionMesh.of(make_mesh(ring, ulysses))
    layout = SequenceLayout((7, 16), ring, ulysses)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, tokens: int) -> Tensor:
        return torch.randn(2, heads, tokens, 8, generator=generator, dtype=torch.float64)

    heads, kv_heads = 6, 3 if kind == "gqa" else 6
    q, k, v = draw(heads, 23), draw(kv_heads, 23), draw(kv_heads, 23)
    k2, v2, weights = draw(heads, 50), draw(heads, 50), draw(heads, 23)
    options = options_of(kind, 2, 23)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask, scale = options.get("attn_mask"), options.get("scale")
    first, _ = dense_attention(q, k, v, mask, causal="is_causal" in options, scale=scale)
    wanted, _ = dense_attention(first, k2, v2)
    grads = torch.autograd.grad(wanted, leaves, weights)
    local = [split(x.detach(), mesh, layout, 2).requires_grad_() for x in leaves]
    with context_parallel(mesh, layout, replicated=[50]):
        found = sdpa(sdpa(*local, **options, enable_gqa=kind == "gqa"), k2, v2)
    local_grads = torch.autograd.grad(found, local, split(weights, mesh, layout, 2))
    for part, whole in zip((found, *local_grads), (wanted, *grads), strict=True):
        same(gather(part.detach(), mesh, layout, 2), whole, 1e-10, kind)


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
@on_ranks(lambda ring, ulysses: ring * ulysses)
def test_attention_of_any_model_is_exact(ring: int, ulysses: int) -> None:
    for kind in KINDS:
        compare(ring, ulysses, kind)


@on_ranks(2)
def test_even_shares_need_no_layout_and_local_attention_stays() -> None:
    mesh = make_mesh(1, 2)
    rank = mesh.get_local_rank("ulysses")
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 4, 12, 8, generator=generator) for _ in range(2))
    alike = torch.randn(1, 4, 6, 8, generator=generator)
    mine = slice(6 * rank, 6 * rank + 6)
    with context_parallel(mesh) as mode:
        found = sdpa(q[:, :, mine], k[:, :, mine], k[:, :, mine])
        with mode.local():
            local = sdpa(alike, alike, alike)
    same(found, dense_attention(q, k, k)[0][:, :, mine], 1e-6)
    same(local, dense_attention(alike, alike, alike)[0], 1e-6, "local")
    same(sdpa(alike, alike, alike), local, 1e-6, "after")


@contextmanager
def watched(seen: list[bool]) -> Iterator[None]:
    """Note whether torch casts what mesh attention is made of."""

    def attend(*args: Any, **options: Any) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return attention(*args, **options)

    with mock.patch("bascule.sdpa.attention", attend):
        yield


@pytest.mark.parametrize(("ring", "ulysses"), MESHES[:2])
@on_ranks(2)
def test_dtypes_under_autocast(ring: int, ulysses: int) -> None:
    """What torch's attention does with dtypes, and what it does over a mesh."""
    mesh = AttentionMesh.of(make_mesh(ring, ulysses))
    layout = SequenceLayout((9,), ring, ulysses)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v, bias = draw(1, 4, 9, 8), draw(1, 4, 9, 8), draw(1, 4, 9, 8), draw(1, 1, 9, 9)
    weights = draw(1, 4, 9, 8)
    casts_within: list[bool] = []

    def error_of(*qkv: Tensor, **options: Any) -> float:
        results: list[list[Tensor]] = []
        for is_split in (False, True):
            mine = [split(x, mesh, layout, 2) if is_split else x for x in qkv]
            mine = [x.detach().requires_grad_() for x in mine]
            grad = split(weights, mesh, layout, 2) if is_split else weights
            with torch.autocast("cpu", torch.bfloat16):
                if is_split:
                    with context_parallel(mesh, layout), watched(casts_within):
                        out = sdpa(*mine, **options)
                else:
                    out = sdpa(*mine, **options)
            parts = [out, *torch.autograd.grad(out, mine, grad.to(out.dtype))]
            parts = [gather(x.detach(), mesh, layout, 2) for x in parts] if is_split else parts
            results.append(parts)
        assert [x.dtype for x in results[0]] == [x.dtype for x in results[1]]
        pairs = zip(*results, strict=True)
        return max(difference(a.float(), b.float()) for a, b in pairs)

    half = torch.bfloat16
    assert 0 < error_of(q, k, v) < 1e-2
    assert 0 < error_of(q, k, v, attn_mask=bias) < 1e-2
    assert 0 < error_of(q, k, v.to(half), attn_mask=bias > 0) < 1e-2, "rotated in float32"
    assert 0 < error_of(q.half(), k.half(), v.half(), attn_mask=bias.half()) < 1e-2
    assert error_of(q.double(), k.double(), v.double(), attn_mask=bias.double()) < 1e-12
    assert casts_within == [False] * 5
    mine = [split(x, mesh, layout, 2) for x in (q, k, v)]

    def act(*qkv: Tensor) -> None:
        with context_parallel(mesh, layout):
            sdpa(*qkv)

    mixed = refused(lambda: act(mine[0], mine[1], mine[2].to(half)))
    assert "q is torch.float32, k torch.float32, v torch.bfloat16" in mixed
    with torch.autocast("cpu", half):
        mixed = refused(lambda: act(mine[0].double(), mine[1], mine[2]))
    assert "q is torch.float64, k torch.bfloat16, v" in mixed


def refused(act: Callable[[], object]) -> str:
    try:
        act()
    except ConfigError as error:
        assert not _get_current_function_mode_stack()
        return str(error)
    return "nothing was refused"


@on_ranks(2)
def test_what_cannot_be_split_is_refused_on_every_rank() -> None:
    mesh, layout = make_mesh(1, 2), SequenceLayout((9,), 1, 2)
    tokens = layout.num_tokens(0, mesh.get_local_rank("ulysses"))
    q, keys = torch.zeros(1, 4, tokens, 8), torch.zeros(1, 4, 7, 8)
    cached = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    few, part = torch.zeros(1, 2, tokens, 8), torch.ones(1, 1, 1, tokens, dtype=torch.bool)
    attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def call(*args: Any, among: dict[str, Any] | None = None, **options: Any) -> str:
        def act() -> None:
            with context_parallel(mesh, **(among or {"layout": layout})):
                sdpa(*args, **options)

        return refused(act)

    def nothing() -> None:
        with context_parallel(mesh, layout):
            q.softmax(-1)

    def hidden() -> None:
        with context_parallel(mesh, layout):
            attend(q[0, :, :, :], q[0], q[0])

    def own_products(**among: Any) -> Callable[[], None]:
        def act() -> None:
            with context_parallel(mesh, **among) as mode:
                with mode.local():
                    torch.einsum("bhqd,bhkd->bhqk", q, q).softmax(-1)
                q.softmax(-1)
                scores = torch.einsum("bhqd,bhkd->bhqk", q, q)
                sdpa(nn.functional.softmax(scores, dim=-1) @ q, q, q)

        return act

    own = "a layer computes attention without F.scaled_dot_product_attention"
    others = q.new_zeros(1, 4, 9 - tokens, 8)
    said = [
        (refused(own_products(layout=layout)), own),
        (refused(own_products()), own),
        (call(q, q, q, dropout_p=0.1), "dropout_p is 0.1"),
        (call(q, keys, keys), "to 7 keys: self-attention needs"),
        (call(q, q, q, attn_mask=part), "for 9 tokens: give the mask of the whole sequence"),
        (call(q, few, few), "set enable_gqa=True"),
        (call(q[0], q[0], q[0]), "give (batch, heads, tokens, head_dim)"),
        (call(q[:, :, :1], q[:, :, :1], q[:, :, :1]), "q has 1 tokens"),
        (
            call(q, q, q, among={"layout": layout, "replicated": [4]}),
            "4 keys can be this rank's own tokens",
        ),
        (call(keys, keys, keys, among={"replicated": [7]}), "7 keys can be this rank's own tokens"),
        (call(q, others, others), "compute it within .local(), as some ranks have"),
        (
            call(q, cached, cached, among={"layout": layout, "replicated": [6]}),
            "declared as replicated=6, but rank 1 has others than rank 0",
        ),
        (refused(nothing), "no layer called F.scaled_dot_product_attention"),
        (refused(hidden), "cannot be split over ranks"),
    ]
    for text, words in said:
        assert words in text, (words, text)


@on_ranks(4)
def test_a_mesh_with_other_axes_is_taken_by_its_named_part() -> None:
    """The rings and Ulysses ranks of a mesh with a third axis: replicas that do not meet."""
    axes = "ring", "fsdp", "ulysses"
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=axes)
    replica = mesh.get_local_rank("fsdp")
    place, layout = AttentionMesh.of(mesh), SequenceLayout((9,), 1, 2)
    x = torch.randn(1, 4, 9, 8, generator=torch.Generator().manual_seed(replica)).double()
    own = split(x, place, layout, 2)
    with context_parallel(mesh, layout):
        out = gather(sdpa(own, own, own), place, layout, 2)
    model, inputs = make_toy(), toy_inputs(seed=replica)
    wanted = model(**inputs)
    with parallelize(model, mesh, table=TABLE):
        outputs = model(**inputs)
    same(out, dense_attention(x, x, x)[0], 1e-10)
    same(outputs, wanted, 1e-10)


@on_ranks(2)
def test_rounding_that_is_declared_passes() -> None:
    """Inputs that differ by rounding between ranks, as declared."""
    model, inputs = make_toy(), toy_inputs()
    wanted = model(**inputs)
    inputs["image"] = inputs["image"] * (1 + 1e-6 * dist.get_rank())
    with parallelize(model, ulysses_degree=2, table=TABLE, input_tolerance=1e-3):
        assert 0 < difference(model(**inputs), wanted) < 1e-5
