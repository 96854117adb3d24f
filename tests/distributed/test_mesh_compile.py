"""`torch.compile` of mesh attention: one graph, few recompiles, the numbers of eager mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh

from bascule.attention import api, usp
from bascule.attention.api import AttentionMesh, AttentionOptions, SequenceLayout, attention, split
from bascule.attention.tokens import form_of, gather_tokens, reduce_tokens
from bascule.comm.mesh import place_in
from bascule.comm.wire import Wire
from tests.helpers.mesh_cases import Three, difference, make_mask, make_mesh, three
from tests.helpers.ranks import raised_by, run_ranks

MESHES = [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (3, 1), (1, 3), (2, 3)]
SOME_MESHES = [(2, 1), (1, 2), (2, 2)]
"""Those that CI compiles; `make stress` compiles for all."""
CASES: list[dict[str, Any]] = [
    {"shape": (1, 12, 12, 8), "segments": (24,), "mask": "none"},
    {"shape": (2, 7, 7, 4), "segments": (5, 18), "mask": "key padding"},
    {"shape": (1, 8, 2, 4), "segments": (13,), "mask": "by head"},
    {"shape": (1, 6, 6, 4), "segments": (3,), "mask": "none"},
    {"shape": (1, 6, 6, 4), "segments": (27,), "mask": "causal", "zigzag": True},
    {"shape": (1, 6, 6, 4), "segments": (7, 12), "mask": "bool", "replicated": (0,)},
]
# Resolutions of an image after 77 or 15 tokens of text: ten pairs, no two alike.
RESOLUTIONS = [(77, h * w) for h, w in ((8, 8), (9, 8), (7, 7), (16, 5), (4, 3))] + [
    (15, h * w) for h, w in ((11, 13), (6, 6), (5, 5), (8, 17), (10, 9))
]

FEW_CASES = [1, 2, 4]
"""Those of 2 x 2 ranks in CI; `make stress` has the others."""

Attend = Callable[..., Tensor]


def with_projection(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mesh: AttentionMesh,
    layout: SequenceLayout | None,
    causal: bool,
    wire: Wire | None = None,
) -> Tensor:
    """Attention with something before and after it for the compiler to fuse."""
    q, k = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) for x in (q, k))
    out = attention(
        q,
        k,
        v,
        mesh,
        attn_mask=mask,
        is_causal=causal,
        options=AttentionOptions(layout=layout, wire=wire),
    )
    return torch.nn.functional.gelu(out.transpose(1, 2).flatten(2)).sin()


def tensors(case: dict[str, Any], mesh: AttentionMesh, layout: SequenceLayout) -> Three:
    batch, heads, kv_heads, dim = case["shape"]
    generator = torch.Generator().manual_seed(layout.seq_len)
    wholes = [
        torch.randn(batch, num, layout.seq_len, dim, generator=generator)
        for num in (heads, kv_heads, kv_heads)
    ]
    return three(split(x, mesh, layout, 2).requires_grad_() for x in wholes)


def outcome(fn: Attend, leaves: Three, *others: Any) -> list[Tensor]:
    out = fn(*leaves, *others)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def compare_to_eager(ring: int, ulysses: int, backend: str, numbers: list[int]) -> list[float]:
    mesh, errors = make_mesh(ring, ulysses), list[float]()
    for case in (CASES[number] for number in numbers):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        layout = SequenceLayout(
            case["segments"], ring, ulysses, case.get("zigzag", False), case.get("replicated", ())
        )
        mask = make_mask(
            case["mask"], case["shape"][0], case["shape"][1], layout.seq_len, torch.float32
        )
        leaves, others = tensors(case, mesh, layout), (mask, mesh, layout, case["mask"] == "causal")
        compiled = torch.compile(with_projection, fullgraph=True, backend=backend)
        want = outcome(with_projection, leaves, *others)
        found = outcome(compiled, leaves, *others)
        with torch.no_grad():
            found.append(compiled(*leaves, *others))
            want.append(with_projection(*leaves, *others))
        errors.append(max(difference(a, b) for a, b in zip(found, want, strict=True)))
    return errors


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ring", "ulysses"),
    [
        mesh if mesh in SOME_MESHES else pytest.param(*mesh, marks=pytest.mark.stress)
        for mesh in MESHES
    ],
)
def test_compiles_to_one_graph_on_every_mesh(ring: int, ulysses: int) -> None:
    numbers = FEW_CASES if (ring, ulysses) == (2, 2) else list(range(len(CASES)))
    found = run_ranks(
        compare_to_eager, ring * ulysses, ring, ulysses, "aot_eager", numbers, timeout_s=220.0
    )
    for errors in found:
        assert max(errors) < 1e-6, errors


@pytest.mark.stress
def test_compiles_to_one_graph_on_two_by_two_ranks() -> None:
    numbers = [number for number in range(len(CASES)) if number not in FEW_CASES]
    for errors in run_ranks(compare_to_eager, 4, 2, 2, "aot_eager", numbers):
        assert max(errors) < 1e-6, errors


def nodes_of_a_ring() -> list[str]:
    """What a compiler sees of masked attention around a ring, forward and backward."""
    mesh, layout = make_mesh(2, 1), SequenceLayout((5, 18), 2, 1)
    seen: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attention(q, k, v, mesh, attn_mask=mask, options=AttentionOptions(layout=layout))

    leaves = tensors(CASES[1], mesh, layout)
    mask = make_mask("key padding", 2, 7, layout.seq_len, torch.float32)
    compiled = torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=note))
    outcome(compiled, leaves, mask)
    return seen


def test_of_a_ring_the_compiler_sees_one_node_each_way() -> None:
    # So nothing of the ring's merge can meet Inductor's tiling analysis, whose assertion
    # (pytorch/pytorch#197077) is about fused reductions.
    operators = ("bascule.attend", "bascule.attend_backward")
    for seen in run_ranks(nodes_of_a_ring, 2):
        views = ("aten.alias", "aten.detach", "<built-in function getitem>")
        named = [name.removesuffix(".default") for name in seen if not name.startswith(views)]
        assert named == list(operators)


def graphs_over_resolutions(ring: int, ulysses: int, has_layout: bool, trains: bool) -> int:
    """Graphs that ten resolutions take; what they give is compared to eager mode."""
    mesh = make_mesh(ring, ulysses)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(with_projection, fullgraph=True, backend="aot_eager")
    for text, image in RESOLUTIONS:
        segments = (text, image) if has_layout else ((text + image) * ring * ulysses,)
        layout = SequenceLayout(segments, ring, ulysses)
        mask = torch.ones(1, 1, 1, layout.seq_len, dtype=torch.bool)
        mask[..., text // 2 : text] = False
        case = {"shape": (1, 4, 4, 4)}
        leaves = tensors(case, mesh, layout)
        others = mask if has_layout else None, mesh, layout if has_layout else None, False
        if trains:
            pairs = zip(
                outcome(compiled, leaves, *others),
                outcome(with_projection, leaves, *others),
                strict=True,
            )
        else:
            with torch.no_grad():
                pairs = [(compiled(*leaves, *others), with_projection(*leaves, *others))]
        assert max(difference(a, b) for a, b in pairs) < 1e-6
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ring", "ulysses", "has_layout", "trains"),
    [
        (2, 1, True, True),
        (1, 2, False, True),
        pytest.param(1, 2, True, True, marks=pytest.mark.stress),
        pytest.param(2, 1, True, False, marks=pytest.mark.stress),
    ],
)
def test_ten_resolutions_take_two_recompiles(
    ring: int, ulysses: int, has_layout: bool, trains: bool
) -> None:
    arguments = ring, ulysses, has_layout, trains
    found = run_ranks(graphs_over_resolutions, ring * ulysses, *arguments)
    # The first graph, one for any image length, and one for any text length too.
    assert max(found) <= 3, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ring", "ulysses"), [pytest.param(2, 1, marks=pytest.mark.stress), (1, 2)]
)
def test_inductor_gives_what_eager_gives(ring: int, ulysses: int) -> None:
    numbers = [1, 5]  # masked text, odd lengths; text on every rank
    found = run_ranks(
        compare_to_eager, ring * ulysses, ring, ulysses, "inductor", numbers, timeout_s=220.0
    )
    for errors in found:
        assert max(errors) < 1e-5, errors


def with_a_wire(ring: int, ulysses: int) -> tuple[list[float], int]:
    """Differences to eager mode over several lengths, and the graphs that they take."""
    mesh, errors = make_mesh(ring, ulysses), list[float]()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(with_projection, fullgraph=True, backend="aot_eager")
    for text, image in RESOLUTIONS[5:9]:
        layout = SequenceLayout((text, image), ring, ulysses)
        leaves = tensors({"shape": (1, 5, 5, 4)}, mesh, layout)
        mask = torch.ones(1, 1, 1, layout.seq_len, dtype=torch.bool)
        mask[..., text // 2 : text] = False
        for wire in (Wire("int8"), Wire("e4m3", takes_centres=True)):
            want = outcome(with_projection, leaves, mask, mesh, layout, False, wire)
            found = outcome(compiled, leaves, mask, mesh, layout, False, wire)
            errors.append(max(difference(a, b) for a, b in zip(found, want, strict=True)))
    return errors, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ring", "ulysses"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.stress)]
)
def test_a_wire_compiles_to_one_graph_for_all_lengths(ring: int, ulysses: int) -> None:
    for errors, graphs in run_ranks(with_a_wire, 2, ring, ulysses):
        assert max(errors) < 1e-6, errors
        # Of each of the two wires the first graph, and one for any image length.
        assert graphs <= 4, graphs


def check_operators(ring: int, ulysses: int, dtype: torch.dtype) -> int:
    """Torch's own checks: schemas, aliasing, and that fake results are like real ones."""
    mesh, calls = make_mesh(ring, ulysses), list[tuple[Any, tuple[Any, ...]]]()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    layouts = [(zigzag, False) for zigzag in (False, True)]
    layouts += [(False, True)] * (ulysses > 1)
    for zigzag, overlap in layouts:
        layout = SequenceLayout((5, 18), ring, ulysses, zigzag)
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors(CASES[1], mesh, layout))
        for wire in (None, Wire("int8"), Wire("int8", takes_centres=True)):
            options = AttentionOptions(layout, wire=wire, overlap=overlap)
            form = api._form(q, k, v, mesh, None, False, 0.5, options)
            settings = None, form.sizes, form.name
            calls.append((usp.attend_op, (q, k, v, *settings)))
            out, *kept = usp.attend_op(*(x.detach() for x in (q, k, v)), *settings)
            if ulysses == 1:
                kept = [q.detach(), k.detach(), v.detach(), out, kept[-1]]
            calls.append((torch.ops.bascule.attend_backward.default, (out, kept, *settings)))
    layout = SequenceLayout((5, 18), ring, ulysses)
    rows, name = torch.randn(layout.num_tokens(*mesh.place), 3), form_of(place_in(mesh), layout)
    calls.append((gather_tokens, (rows, [5, 18], name, True)))
    calls.append((reduce_tokens, (torch.randn(23, 3), [5, 18], name)))
    for operator, arguments in calls:
        found = torch.library.opcheck(operator, arguments, test_utils=checks)
        assert set(found.values()) == {"SUCCESS"}, found
    return len(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_operators_are_what_their_schemas_say(ring: int, ulysses: int, dtype: torch.dtype) -> None:
    assert min(run_ranks(check_operators, ring * ulysses, ring, ulysses, dtype)) >= 4


def with_a_device_mesh() -> float:
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",))
    q = torch.randn(1, 5, 6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))

    def attend(q: Tensor) -> Tensor:
        return attention(q, q, q, device_mesh).sin()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    return difference(compiled(q), attend(q))


def test_a_device_mesh_is_a_constant_of_the_graph() -> None:
    assert max(run_ranks(with_a_device_mesh, 2)) < 1e-6


def second_derivative() -> str:
    mesh = make_mesh(2, 1)
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    out = attention(q, q, q, mesh).sum()
    return raised_by(lambda: torch.autograd.grad(out, q, create_graph=True))[1]


def test_second_derivatives_are_refused() -> None:
    for text in run_ranks(second_derivative, 2):
        assert "no second derivative" in text
