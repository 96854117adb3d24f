"""`in_place_of` attention of yunchang, xDiT and ParaAttention, which are installed: against one
process in float64, and against what the other package computes on CPUs.

The packages have no kernel for CPUs that gives sums of exponentials, so that rings get torch's.
xDiT asks at its import for an accelerator, which it is told that there is.
"""

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from bascule import SparseConfig, context_parallel
from bascule.attention.api import AttentionMesh, SequenceLayout, split
from bascule.peers import in_place_of
from tests.helpers.mesh_cases import difference, make_mesh, reference
from tests.helpers.oracle import dense_attention
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

MESHES = [
    *[(1, 2), (2, 1), (2, 2)],
    *(pytest.param(*mesh, marks=pytest.mark.stress) for mesh in [(4, 1), (1, 4)]),
]
EXACT, CLOSE = 1e-10, 1e-6  # to one process in float64; to other packages, some of it in float32
Attention = Callable[..., Tensor]
_flash_of_cpus = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def flash(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """torch's kernel for CPUs under the arguments of that for CUDA."""
    out, lse = _flash_of_cpus(q, k, v, *args, **options)
    return out, lse


def has(package: str) -> bool:
    """Whether it is installed; it need not import here."""
    return importlib.util.find_spec(package) is not None


# Marks, as ranks cannot skip.
pytestmark = pytest.mark.skipif(not has("yunchang"), reason="yunchang is not installed")


def xdit() -> tuple[Any, Any]:
    """xDiT's modules of `USP` and of its attention layer, imported as with an accelerator."""
    device = SimpleNamespace(gcnArchName="")
    answers = {"is_available": True, "current_device": 0, "get_device_name": "GPU"}
    answers |= {"get_device_capability": (9, 0), "get_device_properties": device}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        # xfuser 0.7.0 asks yunchang 0.6.4 for what it does not have, for accelerators of others.
        stack.enter_context(mock.patch("yunchang.ring.utils.update_npu_out", create=True))
        usp = importlib.import_module("xfuser.model_executor.layers.usp")
        importlib.import_module("xfuser.core.long_ctx_attention.ring")
        return usp, importlib.import_module("xfuser.core.long_ctx_attention.hybrid.attn_layer")


def groups(ring: int, ulysses: int) -> None:
    from yunchang import set_seq_parallel_pg  # pyright: ignore[reportMissingImports]

    set_seq_parallel_pg(ulysses, ring, dist.get_rank(), dist.get_world_size())


def layer_of(kind: str = "basic", attn_type: str = "TORCH_FLASH") -> Any:
    from yunchang import LongContextAttention  # pyright: ignore[reportMissingImports]
    from yunchang.kernels import AttnType  # pyright: ignore[reportMissingImports]

    return LongContextAttention(ring_impl_type=kind, attn_type=AttnType[attn_type])


def place(ring: int, ulysses: int) -> tuple[int, int]:
    return divmod(dist.get_rank() % (ring * ulysses), ulysses)


def own(x: Tensor, layout: SequenceLayout) -> Tensor:
    at = place(layout.ring_degree, layout.ulysses_degree)
    return torch.cat([x[:, :, start:stop] for start, stop in layout.shares(*at)], 2)


def swapped(function: Attention) -> Attention:
    """A function of (B, T, H, D) as one of (B, H, T, D)."""

    def attend(*tensors: Tensor) -> Tensor:
        return function(*(x.transpose(1, 2) for x in tensors)).transpose(1, 2)

    return attend


def error_of(
    attend: Attention,
    layout: SequenceLayout,
    *,
    heads: tuple[int, int] = (4, 4),
    text: int = 0,
    front: bool = False,
    alone: Attention | None = None,
    **options: Any,
) -> float:
    """The largest error of outputs and gradients of tensors, and of joint ones, on this rank."""
    sizes = [heads[0], heads[1], heads[1]]
    whole = [normal(2, h, layout.seq_len, 8, seed=seed) for seed, h in enumerate(sizes)]
    joint = [normal(2, h, text, 8, seed=3 + seed) for seed, h in enumerate(sizes) if text]
    local = [own(x, layout).requires_grad_() for x in whole]
    local_joint = [x.clone().requires_grad_() for x in joint]
    leaves = [x.requires_grad_() for x in whole + joint]
    pairs = zip(whole, joint, strict=True) if text else [(x, x[:, :, :0]) for x in whole]
    q, k, v = (torch.cat((y, x) if front else (x, y), 2) for x, y in pairs)
    want = dense_attention(q, k, v, **options)[0] if alone is None else alone(q, k, v)
    grad = normal(*want.shape, seed=9)

    def cut(x: Tensor, with_text: bool = True) -> Tensor:
        """What a rank has of it."""
        sizes = (text, layout.seq_len) if front else (layout.seq_len, text)
        parts = list(x.split(sizes, 2))
        parts[int(front)] = own(parts[int(front)], layout)
        parts[int(not front)] = parts[int(not front)] * with_text
        return torch.cat(parts, 2)

    out = attend(*local, *local_joint)
    out.backward(cut(grad, dist.get_rank() == 0))  # copies of the text count once
    want.backward(grad)
    for x in local_joint:
        assert x.grad is not None
        dist.all_reduce(x.grad)
    wanted = [own(x.grad, layout) for x in whole if x.grad is not None]
    wanted += [x.grad for x in joint if x.grad is not None]
    grads = [x.grad for x in (*local, *local_joint) if x.grad is not None]
    pairs = [(out.detach(), cut(want.detach())), *zip(grads, wanted, strict=True)]
    assert len(grads) == len(leaves)
    return max(difference(a, b) for a, b in pairs)


def in_place_of_yunchang(ring: int, ulysses: int) -> dict[str, float]:
    from yunchang import (  # pyright: ignore[reportMissingImports]
        EXTRACT_FUNC_DICT,
        LongContextAttentionQKVPacked,
    )

    groups(ring, ulysses)
    size = ring * ulysses
    even, odd = (SequenceLayout((length,), ring, ulysses) for length in (12 * size, 29))
    layer, errors = layer_of(), dict[str, float]()

    def errors_in(name: str, layout: SequenceLayout, call: Any = None, **options: Any) -> None:
        attend = in_place_of(layer, layout=None if layout is even else layout)
        own_call = swapped(lambda q, k, v: attend(q, k, v, **(call or {})))
        errors[name] = error_of(own_call, layout, **options)

    errors_in("plain", even)
    errors_in("scale", even, {"softmax_scale": 0.3, "deterministic": True}, scale=0.3)
    errors_in("causal", even, {"causal": True}, causal=True)
    errors_in("unlike lengths, heads that do not divide", odd, heads=(5, 5))
    errors_in("shared keys", odd, {"causal": True}, heads=(8, 4), causal=True)
    place_in = torch.arange(29)
    near = (place_in[:, None] - place_in).ge(0) & (place_in[:, None] - place_in).le(6)
    errors_in("window", odd, {"causal": True, "window_size": (6, 0)}, mask=near)

    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (1.5 * (q @ k.mT * 8**-0.5 / 1.5).tanh()).softmax(-1) @ v

    errors_in("cap", even, {"softcap": 1.5}, alone=capped)
    if ring == 1:
        packed = in_place_of(LongContextAttentionQKVPacked())
        own_call = swapped(lambda *qkv: packed(torch.stack(qkv, 2)))
        errors["packed"] = error_of(own_call, even)
    layer.forward = in_place_of(layer)  # as a program has it
    errors["as a module"] = error_of(swapped(layer), even)

    x = normal(2, even.seq_len, 4, 8)
    for kind in ("basic", "zigzag", "strip"):  # the order of tokens that yunchang's users cut
        cut = EXTRACT_FUNC_DICT[kind](x, dist.get_rank(), size, rd=ring, ud=ulysses)
        attend = in_place_of(layer_of(kind))
        if kind != "basic" and ring > 1 and ulysses > 1:
            assert "an order of its own" in raised_by(attend, cut, cut, cut, causal=True)[1]
            continue
        whole = x.transpose(1, 2)
        want = reference(whole, whole, whole, None, True).transpose(1, 2)
        want = EXTRACT_FUNC_DICT[kind](want, dist.get_rank(), size, rd=ring, ud=ulysses)
        errors[kind] = difference(attend(cut, cut, cut, causal=True), want)
    return errors


def beside_yunchang(ring: int, ulysses: int) -> dict[str, float]:
    """Its own layer on CPUs, with torch's kernel; a ring of yunchang merges in float32."""
    groups(ring, ulysses)
    local = [normal(2, 6, 4, 8, seed=3 * dist.get_rank() + i) for i in range(3)]
    errors = dict[str, float]()
    kernel = "yunchang.kernels.attention._scaled_dot_product_flash_attention"
    for causal in (False, True):
        layer = layer_of()
        with mock.patch(kernel, flash):
            theirs = layer(*local, causal=causal)
        errors[f"causal {causal}"] = difference(in_place_of(layer)(*local, causal=causal), theirs)
    return errors


def as_in_the_guide(ring: int, ulysses: int) -> dict[str, float]:
    """The lines of docs/context_parallel.md, for a number of tokens that ranks do not divide."""
    from yunchang import (  # pyright: ignore[reportMissingImports]
        LongContextAttention,
        set_seq_parallel_pg,
    )
    from yunchang.kernels import AttnType  # pyright: ignore[reportMissingImports]

    mesh = make_mesh(ring, ulysses)
    rank, world_size, num_tokens, errors = dist.get_rank(), dist.get_world_size(), 333, {}
    q, k, v = (normal(1, num_tokens, 5, 8, seed=seed) for seed in range(3))
    set_seq_parallel_pg(ulysses, ring, rank, world_size)
    layer = LongContextAttention(attn_type=AttnType.TORCH_EFFICIENT)
    layer.forward = in_place_of(layer)
    whole = [x[:, : 12 * world_size].transpose(1, 2) for x in (q, k, v)]
    want = reference(whole[0], whole[1], whole[2], None, False).transpose(1, 2)
    chunks = [x[:, : 12 * world_size].chunk(world_size, 1)[rank] for x in (q, k, v)]
    errors["even"] = difference(layer(*chunks), want.chunk(world_size, 1)[rank])

    layout = SequenceLayout((num_tokens,), ring, ulysses)
    layer.forward = in_place_of(layer, layout=layout)
    out = layer(*(split(x, mesh, layout, dim=1) for x in (q, k, v)))
    want = reference(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, False)
    errors["uneven"] = difference(out, split(want, mesh, layout, 2).transpose(1, 2))

    sparse = SparseConfig(keep=0.4)
    layout = SequenceLayout((num_tokens,), ring, ulysses, stripe=sparse.dealt)
    layer.forward = in_place_of(layer, layout=layout, sparse=sparse)
    out = layer(*(split(x, mesh, layout, dim=1) for x in (q, k, v)))
    one = AttentionMesh(None, None, None)
    layer.forward = in_place_of(
        layer, mesh=one, layout=replace(layout, ring_degree=1, ulysses_degree=1), sparse=sparse
    )
    errors["sparse"] = difference(out, split(layer(q, k, v), mesh, layout, 1))
    return errors


def in_place_of_xdit(ring: int, ulysses: int) -> dict[str, float]:
    groups(ring, ulysses)
    size, errors = ring * ulysses, dict[str, float]()
    even, odd = (SequenceLayout((length,), ring, ulysses) for length in (6 * size, 29))
    usp, layers = xdit()
    module = layers.xFuserLongContextAttention(attn_type=layer_of().attn_type)
    for layout in (even, odd):
        bound = None if layout is even else layout
        attend = in_place_of(usp.USP, layout=bound)
        of_module = in_place_of(module, layout=bound)
        sizes: Any = {"heads": (4, 4) if layout is even else (6, 6)}
        for strategy in ("front", "rear"):

            def joint(*tensors: Tensor, attend: Attention = attend, at: str = strategy) -> Tensor:
                names: Any = {"attn_layer": torch.nn.Identity(), "combine_qkv_a2a": True}
                return attend(*tensors[:3], 0.0, False, *tensors[3:], at, **names)

            def by_layer(*x: Tensor, attend: Attention = of_module, at: str = strategy) -> Tensor:
                roles = ("query", "key", "value")
                text = {f"joint_tensor_{role}": one for role, one in zip(roles, x[3:], strict=True)}
                return attend(None, *x[:3], **text, joint_strategy=at)

            sizes |= {"text": 7, "front": strategy == "front"}
            name = f"{strategy}, {layout.seq_len} tokens"
            errors[f"USP, {name}"] = error_of(joint, layout, **sizes)
            errors[f"layer, {name}"] = error_of(swapped(by_layer), layout, **sizes)
    attend = in_place_of(usp.USP)
    found = error_of(lambda q, k, v: attend(q, k, v, kv_head_repeat=2), even, heads=(8, 4))
    errors["shared keys"] = found
    errors["causal"] = error_of(lambda q, k, v: attend(q, k, v, 0.0, True), even, causal=True)
    return errors


def beside_xdit(ring: int, ulysses: int) -> dict[str, float]:
    """Its own function and layer on CPUs, with yunchang's groups and torch's kernel."""
    groups(ring, ulysses)
    errors = dict[str, float]()
    local = [normal(2, 4, 6, 8, seed=3 * dist.get_rank() + seed) for seed in range(3)]
    text = [normal(2, 4, 5, 8, seed=100 + seed) for seed in range(3)]
    usp, layers = xdit()
    with ExitStack() as stack:
        settings = SimpleNamespace(use_spargeattn_head_balance=False)
        backend = usp.AttentionBackendType.SDPA_FLASH
        state = SimpleNamespace(attention_backend=backend, runtime_config=settings, fp8_comms=None)
        sizes = {"sequence": ring * ulysses, "ulysses": ulysses, "ring": ring}
        for name, size in sizes.items():
            many = f"get_{name}_parallel_world_size"
            stack.enter_context(mock.patch.object(usp, many, return_value=size))
        rank = place(ring, ulysses)[1]
        stack.enter_context(mock.patch.object(usp, "get_ulysses_parallel_rank", return_value=rank))
        stack.enter_context(mock.patch.object(usp, "get_runtime_state", return_value=state))
        kernels = importlib.import_module("xfuser.core.distributed.attention_backend")
        aten = SimpleNamespace(_scaled_dot_product_flash_attention=flash)
        stack.enter_context(mock.patch.object(kernels, "aten", aten))
        kernel = "yunchang.kernels.attention._scaled_dot_product_flash_attention"
        stack.enter_context(mock.patch(kernel, flash))
        module = layers.xFuserLongContextAttention(attn_type=layer_of().attn_type)
        for strategy in (None, "front", "rear"):
            names, call = ("query", "key", "value"), dict[str, Any]()
            if strategy is not None:
                call |= {f"joint_{name}": x for name, x in zip(names, text, strict=True)}
                call["joint_strategy"] = strategy
            theirs = usp.USP(*local, **call)
            errors[f"USP, {strategy}"] = difference(in_place_of(usp.USP)(*local, **call), theirs)
            q, k, v = (x.transpose(1, 2).contiguous() for x in local)
            for name in names if strategy is not None else ():
                call[f"joint_tensor_{name}"] = call.pop(f"joint_{name}").transpose(1, 2)
            theirs = module(None, q, k, v, **call)
            ours = in_place_of(module)(None, q, k, v, **call)
            errors[f"layer, {strategy}"] = difference(ours, theirs)
    return errors


def para_attention(ring: int, ulysses: int) -> tuple[Any, Any, Any]:
    """Its functions and mode, the function of these ranks, and its mesh."""
    from para_attn import para_attn_interface as its  # pyright: ignore[reportMissingImports]

    names = ("batch", "ring", "ulysses")
    mesh = init_device_mesh("cpu", (1, ring, ulysses), mesh_dim_names=names)
    return its, its.ulysses_attn_func if ring == 1 else its.ring_attn_func, mesh


def in_place_of_para_attention(ring: int, ulysses: int) -> dict[str, float]:
    _, function, mesh = para_attention(ring, ulysses)
    size, errors = ring * ulysses, dict[str, float]()
    even, odd = (SequenceLayout((length,), ring, ulysses) for length in (6 * size, 29))
    axis, mask = mesh["ulysses" if ring == 1 else "ring"], normal(even.seq_len, even.seq_len) < 0.5

    def errors_in(name: str, layout: SequenceLayout, call: Any, **options: Any) -> None:
        bound = None if layout is even else layout
        attend = in_place_of(function, layout=bound)
        for group in (axis, axis.get_group(), None) if min(ring, ulysses) == 1 else ():
            own_call = partial(attend, **call, mesh=group)
            errors[f"{name}, {type(group).__name__}"] = error_of(own_call, layout, **options)

        def in_mode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with context_parallel(mesh, bound):
                return scaled_dot_product_attention(q, k, v, **call)

        errors[f"{name}, mode"] = error_of(in_mode, layout, **options)

    errors_in("plain", even, {})
    errors_in("scale", even, {"scale": 0.3}, scale=0.3)
    errors_in("causal", even, {"is_causal": True}, causal=True)
    errors_in("mask", even, {"attn_mask": mask}, mask=mask)
    errors_in("unlike lengths, heads that do not divide", odd, {}, heads=(5, 5))
    return errors


def beside_para_attention(ring: int, ulysses: int) -> dict[str, float]:
    """Its functions and its mode on CPUs, with torch's kernel in a ring."""
    its, function, mesh = para_attention(ring, ulysses)
    q, k, v = (normal(2, 4, 6, 8, seed=3 * dist.get_rank() + seed) for seed in range(3))
    errors = dict[str, float]()
    with mock.patch("para_attn.ops.attention_forward_with_lse", flash):
        for causal in (False, True):
            call: Any = {"is_causal": causal}
            if min(ring, ulysses) == 1:
                axis = mesh["ulysses" if ring == 1 else "ring"]
                theirs = function(q, k, v, mesh=axis, **call)
                ours = in_place_of(function)(q, k, v, mesh=axis, **call)
                errors[f"function, {causal}"] = difference(ours, theirs)
            with its.UnifiedAttnMode(mesh):
                theirs = scaled_dot_product_attention(q, k, v, **call)
            with context_parallel(mesh):
                ours = scaled_dot_product_attention(q, k, v, **call)
            errors[f"mode, {causal}"] = difference(ours, theirs)
    return errors


def with_peers(ring: int, ulysses: int) -> list[tuple[dict[str, float], float]]:
    """Errors against each reference, and how large they may be; a rank imports the peers once."""
    parts: list[tuple[Callable[[int, int], dict[str, float]], float]] = [
        (as_in_the_guide, EXACT),
        (in_place_of_yunchang, EXACT),
        (beside_yunchang, CLOSE),
        (sparse_in_place, EXACT),
    ]
    if has("xfuser"):
        parts += [(in_place_of_xdit, EXACT), (beside_xdit, CLOSE)]
    if has("para_attn"):
        parts += [(in_place_of_para_attention, EXACT), (beside_para_attention, CLOSE)]
    return [(part(ring, ulysses), limit) for part, limit in parts]


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_in_place_of_peers(ring: int, ulysses: int) -> None:
    for parts in run_ranks(with_peers, ring * ulysses, ring, ulysses):
        for errors, limit in parts:
            assert max(errors.values()) < limit, errors


def in_replicas(ring: int, ulysses: int) -> float:
    """Ranks of which only some share a sequence: theirs may need a process group of their own."""
    groups(ring, ulysses)
    layout = SequenceLayout((29,), ring, ulysses)
    return error_of(swapped(in_place_of(layer_of(), layout=layout)), layout)


@pytest.mark.parametrize(
    ("ring", "ulysses"), [(1, 2), (2, 1), pytest.param(2, 2, marks=pytest.mark.stress)]
)
def test_in_place_of_yunchang_in_replicas(ring: int, ulysses: int) -> None:
    assert max(run_ranks(in_replicas, 2 * ring * ulysses, ring, ulysses)) < EXACT


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.stress)]
)
@on_ranks(2)
def test_in_place_of_others_in_one_graph(backend: str) -> None:
    """In one graph, where the mesh is given."""
    groups(1, 2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    functions = [swapped(in_place_of(layer_of(), mesh=mesh))]
    if has("xfuser"):
        layer = torch.nn.Identity()
        functions.append(partial(in_place_of(xdit()[0].USP, mesh=mesh), attn_layer=layer))
    if has("para_attn"):
        functions.append(in_place_of(para_attention(1, 2)[1], mesh=mesh))
    layout = SequenceLayout((24,), 1, 2)
    calls = [torch.compile(one, fullgraph=True, backend=backend) for one in functions]
    errors = [error_of(call, layout) for call in calls]
    assert max(errors) < EXACT, errors


def sparse_in_place(ring: int, ulysses: int) -> dict[str, float]:
    """Masks of three calls of a layer, whose plan follows them, and two layers with a rule."""
    groups(ring, ulysses)
    layout = SequenceLayout((8 * 13 - 3,), ring, ulysses, stripe=8)
    masks = np.random.default_rng(0).random((3, 1, 5, 13, 13)) < 0.4
    masks[..., 0] = True
    masks[:, :, 1:3] = True  # heads that see all, for work to move
    lens, errors, seen = [8] * 12 + [5], dict[str, float](), None
    attend = in_place_of(layer_of(), layout=layout, sparse=SparseConfig(masks=masks, block=8))
    for step, mask in enumerate(masks[:, 0]):
        seen = torch.from_numpy(mask.repeat(lens, axis=1).repeat(lens, axis=2))
        errors[f"step {step}"] = error_of(swapped(attend), layout, heads=(5, 5), mask=seen)
    if has("para_attn") and min(ring, ulysses) == 1:
        _, function, mesh = para_attention(ring, ulysses)
        sparse = SparseConfig(masks=masks[-1], block=8)
        attend = in_place_of(function, mesh=mesh, layout=layout, sparse=sparse)
        errors["para_attn"] = error_of(attend, layout, heads=(5, 5), mask=seen)
    if not has("xfuser"):
        return errors
    usp, layers = xdit()[0].USP, [torch.nn.Identity() for _ in range(2)]
    sparse, no_mesh = SparseConfig(keep=0.4, block=8), AttentionMesh(None, None, None)
    attend = in_place_of(usp, layout=layout, sparse=sparse)
    whole = SequenceLayout(layout.segments, stripe=8)
    for call in range(4):
        one = in_place_of(usp, mesh=no_mesh, layout=whole, sparse=sparse)
        of_layer = partial(attend, head_balance_layer=layers[call % 2])
        errors[f"rule, call {call}"] = error_of(of_layer, layout, heads=(5, 5), alone=one)
    return errors


def assert_refused(calls: list[tuple[str, Callable[[], object]]]) -> None:
    texts = [(words, raised_by(call)[1]) for words, call in calls]
    for words, text in texts:
        assert words in text, texts


@on_ranks(2)
def test_refused_in_place_of_yunchang() -> None:
    from yunchang import UlyssesAttention  # pyright: ignore[reportMissingImports]

    groups(1, 2)
    x, layer, other = normal(1, 6, 4, 8), layer_of(), layer_of()
    slopes, sparse = torch.zeros(4), SparseConfig(keep=0.5, block=8)
    stripes = SequenceLayout((12,), 1, 2, stripe=4)
    other.attn_processor = torch.nn.Identity()
    own, with_sparse = in_place_of(layer), in_place_of(layer, sparse=sparse)
    dealt = in_place_of(layer, layout=stripes, sparse=sparse)
    ulysses = UlyssesAttention(attn_type=layer.attn_type)
    assert_refused(
        [
            ("dropout_p (0.1)", lambda: own(x, x, x, 0.1)),
            ("alibi_slopes (Tensor)", lambda: own(x, x, x, alibi_slopes=slopes)),
            ("return_attn_probs (True)", lambda: own(x, x, x, return_attn_probs=True)),
            ("window_size without", lambda: own(x, x, x, window_size=(4, 4))),
            ("causal with sparse (True)", lambda: with_sparse(x, x, x, causal=True)),
            ("give it stripe=8", lambda: dealt(x, x, x)),
            ("attn_processor (Identity)", lambda: in_place_of(other)),
            ("give one of USP", lambda: in_place_of(ulysses)),
            ("give one of USP", lambda: in_place_of(scaled_dot_product_attention)),
            ("as many keys as queries", lambda: own(x, x[:, :5], x)),
            ("disagree on the call", lambda: own(*[x[:, dist.get_rank() :]] * 3)),
        ]
    )


@pytest.mark.skipif(not has("xfuser"), reason="xfuser is not installed")
@on_ranks(2)
def test_refused_in_place_of_xdit() -> None:
    from yunchang.globals import PROCESS_GROUP  # pyright: ignore[reportMissingImports]

    usp, layers = xdit()
    x, text = normal(1, 4, 6, 8), normal(1, 4, 3, 8)
    attend = in_place_of(usp.USP)
    PROCESS_GROUP.RING_PG = PROCESS_GROUP.ULYSSES_PG = None
    assert_refused([("no process groups yet", lambda: attend(x, x, x))])
    groups(1, 2)
    caches = importlib.import_module("xfuser.core.cache_manager.cache_manager")
    cached = torch.nn.Identity()
    caches.get_cache_manager().register_cache_entry(
        cached, layer_type="attn", cache_type="sequence_parallel_attn_cache"
    )
    sana = layers.xFuserSanaLinearLongContextAttention
    assert_refused(
        [
            ("valid_kv_len", lambda: attend(x, x, x, attention_kwargs={"valid_kv_len": 3})),
            ("1 joint tensors", lambda: attend(x, x, x, joint_query=text, joint_strategy="rear")),
            ("'middle'", lambda: attend(x, x, x, 0.0, False, text, text, text, "middle")),
            ("PipeFusion", lambda: attend(x, x, x, attn_layer=cached)),
            ("give one of USP", lambda: in_place_of(sana.forward)),
        ]
    )
