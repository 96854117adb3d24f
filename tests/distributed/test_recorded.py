"""Steps and attention that compilers record, and checkpoints that choose what to keep."""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bascule.attention import api, usp
from bascule.attention.api import AttentionMesh, AttentionOptions, SequenceLayout, attention, split
from bascule.attention.layout import gather_tokens, layout_text, reduce_tokens
from bascule.comm.mesh import place_in
from bascule.comm.quantized import Quantized
from bascule.parallel import SequenceParallel, Step
from bascule.train import keep_exchanges
from tests.helpers.calls_made import calls_made
from tests.helpers.cases import COST
from tests.helpers.mesh_cases import (
    Three,
    difference,
    draw,
    layout_of,
    make_mask,
    make_mesh,
    three,
)
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

Grads = list[Tensor]
HEADS, WIDTH, MODEL = (6, 3), 4, 24


class Block(nn.Module):
    """Routes, attends with grouped heads, restores; a modulation for each sample; a mean."""

    def __init__(self, causal: bool = False, scale: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(MODEL, (HEADS[0] + 2 * HEADS[1]) * WIDTH)
        self.out = nn.Linear(HEADS[0] * WIDTH, MODEL)
        self.settings: dict[str, Any] = {"causal": causal, "scale": scale}
        self.double()

    def attention(self, x: Tensor, step: Step) -> Tensor:
        num_q, num_kv = HEADS
        rows = self.qkv(x).unflatten(-1, (num_q + 2 * num_kv, WIDTH))
        q, k, v = rows.split((num_q, num_kv, num_kv), 1)
        return x + self.out(step.attend(q, k, v, **self.settings).flatten(1))

    def forward(self, x: Tensor, vec: Tensor, step: Step) -> Tensor:
        moved = step.route(x=x, place=torch.arange(x.shape[0]))
        shift = step.gather_samples(vec)[step.local_seq_ids][step.token_slot]
        out = self.attention(moved["x"] * (1 + moved["place"][:, None] / 100) + shift, step)
        return step.mean(step.restore(out).square().sum(1))


def inputs_of(number: int, hostile: bool = True) -> tuple[list[int], Tensor, Tensor]:
    """Every step has other lengths; some of the hostile ones have nothing, or one of something."""
    rank = dist.get_rank()
    lens = [[5, 9 + number], [], [3], [1, 1, 2]][(rank + number) % 4]
    if not hostile:
        lens = [4 + rank, 7 + number, *range(2, 2 + number)]
    torch.manual_seed(100 * number + rank)
    x = torch.randn(sum(lens), MODEL, dtype=torch.float64, requires_grad=True)
    vec = torch.randn(len(lens), MODEL, dtype=torch.float64, requires_grad=True)
    return lens, x, vec


def run(call: Any, block: nn.Module, step: Step, x: Tensor, vec: Tensor) -> tuple[Tensor, Grads]:
    loss = call(x, vec, step)
    return loss.detach(), list(torch.autograd.grad(loss, [x, vec, *block.parameters()]))


def assert_same(got: tuple[Tensor, Grads], want: tuple[Tensor, Grads]) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=0.0)
    for a, b in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def compiled(
    spec: str, backend: str = "aot_eager", hostile: bool = True, num_steps: int = 4, **settings: Any
) -> int:
    """Steps of unlike plans; the graphs that these took."""
    parallel, block = SequenceParallel(None, spec, COST), Block(**settings)
    options: dict[str, Any] | None = None
    if backend == "inductor":
        options = {"reorder_for_peak_memory": False}
    call = torch.compile(block, fullgraph=True, backend=backend, options=options)
    for number in range(num_steps):
        lens, x, vec = inputs_of(number, hostile)
        step = parallel.plan(lens)
        run(block, block, step, x, vec)  # agrees on the forms of calls
        before = step.traffic
        with calls_made() as plain:
            want = run(block, block, step, x, vec)
        with calls_made() as made:
            got = run(call, block, step, x, vec)
        assert_same(got, want)
        assert made == plain, (number, made, plain)
        assert step.traffic == before * 3
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


CASES = [
    (2, "g2n1", {"causal": True, "scale": -0.5}),
    (2, "g1n2", {}),
    (3, "g1n1+g2n1", {"scale": 0.25}),
    (4, "g2r2n1", {"causal": True}),
]


@pytest.mark.stress  # daily: two graphs for all plans, and blocks of a rank without samples
@pytest.mark.parametrize(("world_size", "spec", "settings"), CASES)
def test_compiled_steps_are_plain_ones(
    world_size: int, spec: str, settings: dict[str, Any]
) -> None:
    run_ranks(partial(compiled, spec, **settings), world_size)


def test_two_graphs_serve_all_plans() -> None:
    """The second one takes lengths as symbols."""
    settings: dict[str, Any] = {"causal": True, "scale": -0.5, "hostile": False, "num_steps": 6}
    assert run_ranks(partial(compiled, "g2n1", **settings), 2) == [2, 2]


@pytest.mark.stress  # daily: test_compile_modes
def test_inductor_gives_the_same() -> None:
    """Also where a rank has no rows, and so does not use what an exchange brings.

    Route and samples are in one graph: by the setting that `docs/limits.md` asks for.
    """
    run_ranks(partial(compiled, "g2n1", "inductor", num_steps=1), 2)


def dropped() -> None:
    """The backward of a compiled block whose step nobody holds."""
    parallel, block = SequenceParallel(None, "g1n2", COST), Block()
    call = torch.compile(block, fullgraph=True, backend="aot_eager")
    lens, x, vec = inputs_of(0)
    want = run(block, block, parallel.plan(lens), x, vec)
    loss = call(x, vec, parallel.plan(lens))
    gc.collect()
    got = loss.detach(), list(torch.autograd.grad(loss, [x, vec, *block.parameters()]))
    assert_same(got, want)


def many_in_flight() -> None:
    """More microbatches of a plan than were ever kept by number, all before the first backward."""
    parallel = SequenceParallel(None, "g1n2", COST)
    call = torch.compile(lambda x, step: step.attend(x, x, x), backend="aot_eager")
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    steps = parallel.plan_step([[3]] * 40)
    (want,) = torch.autograd.grad(steps[0].attend(x, x, x).sum(), x)
    outs = [call(x, step) for step in steps]
    del steps
    gc.collect()
    for out in outs:
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], want)


def on_a_mesh() -> None:
    """A device mesh is a constant of the graph."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",))
    q = torch.randn(1, 5, 6, 4)

    def attend(q: Tensor) -> Tensor:
        return attention(q, q, q, mesh).sin()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert difference(compiled(q), attend(q)) < 1e-6


CONTEXT = partial(create_selective_checkpoint_contexts, keep_exchanges)


def checkpointed(specs: Sequence[str] = ("g2n1",)) -> None:
    """Collectives of a block: plain, recomputed whole, and with what came from others kept."""
    for spec in specs:
        block, (lens, x, vec) = Block(), inputs_of(0)
        step = SequenceParallel(None, spec, COST).plan(lens)
        whole = partial(checkpoint, block, use_reentrant=False)
        keeping = partial(checkpoint, block, use_reentrant=False, context_fn=CONTEXT)
        compiled = torch.compile(block, backend="aot_eager")
        run(block, block, step, x, vec)
        want, counts = run(block, block, step, x, vec), list[dict[str, int]]()
        # torch.compile around a checkpoint, and within one that chooses.
        calls = [block, whole, keeping]
        calls += [torch.compile(one, backend="aot_eager") for one in (keeping, whole)]
        calls.append(partial(checkpoint, compiled, use_reentrant=False, context_fn=CONTEXT))
        for call in calls:
            with calls_made() as made:
                assert_same(run(call, block, step, x, vec), want)
            counts.append(dict(made.counts))
        plain, recomputed, kept, in_graph, whole_in_graph, _ = counts
        assert sum(recomputed.values()) > sum(plain.values())
        assert kept == in_graph == plain
        assert sum(plain.values()) <= sum(whole_in_graph.values()) <= sum(recomputed.values())


def refused_when_compiled() -> None:
    """What is wrong on one rank alone is the same error on both, from within a graph too."""
    step = SequenceParallel(None, "g1n2", COST).plan([3])
    call = torch.compile(lambda x: step.route(x=x)["x"], backend="aot_eager")
    assert call(torch.ones(3, 2)).shape == (3, 2)
    wrong = torch.ones(3 if dist.get_rank() else 4, 2)
    assert "give 3 rows" in raised_by(call, wrong)[1]


def twice_derived() -> None:
    """A penalty on a gradient that passes through attention; its incoming gradient is constant."""
    step = SequenceParallel(None, "g1n2", COST).plan([3])

    def out(x: Tensor) -> Tensor:
        q = step.route(x=x)["x"].unflatten(1, (2, -1))
        return step.restore(step.attend(q, q, q).flatten(1))

    def penalty(call: Callable[[Tensor], Tensor]) -> None:
        x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        torch.autograd.grad(grad.square().sum(), x)

    keeping = partial(checkpoint, out, use_reentrant=False, context_fn=CONTEXT)
    for call in (out, torch.compile(out, backend="aot_eager"), keeping):
        raised_by(penalty, call)  # of another rank's note, too, who waits for one that compiles
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    out_of_ring = attention(q, q, q, AttentionMesh(None, None, None)).sum()
    twice = partial(torch.autograd.grad, out_of_ring, q, create_graph=True)
    assert "no second derivative" in raised_by(twice)[1]


PROGRAMS = dropped, many_in_flight, on_a_mesh, checkpointed, refused_when_compiled, twice_derived


@pytest.mark.slow
@on_ranks(2)
def test_recorded_programs() -> None:
    for program in PROGRAMS:
        torch._dynamo.reset()
        program()


@pytest.mark.stress
def test_checkpoints_in_a_ring() -> None:
    run_ranks(checkpointed, 2, ("g1r2n1",))


class Attending(Block):
    def forward(self, x: Tensor, step: Step) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.attention(x, step)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attending(), Attending()])

    def forward(self, x: Tensor, step: Step) -> Tensor:
        moved = step.route(x=x)["x"]
        for block in self.blocks:
            moved = block(moved, step)
        return step.restore(moved)


def sharded(spec: str) -> None:
    """Compiled blocks, sharded by FSDP2, against the same without either."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel, plain, model = SequenceParallel(mesh, spec, COST), Stack(), Stack()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for number in range(3):
        lens, x, _ = inputs_of(number)
        step = parallel.plan(lens)
        for stack in (plain, model):
            stack.zero_grad()
            step.mean(stack(x, step).square().sum(1)).backward()
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(got.grad, DTensor) and want.grad is not None
            dist.all_reduce(want.grad)
            want.grad /= dist.get_world_size()
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("spec", ["g2n1", pytest.param("g1n2", marks=pytest.mark.stress)])
def test_compiled_and_sharded_blocks_have_the_gradients_of_plain_ones(spec: str) -> None:
    run_ranks(sharded, 2, spec)


# Attention over meshes: one graph, few recompiles, the numbers of eager mode.

MESH_CASES: list[dict[str, Any]] = [
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


def with_projection(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mesh: AttentionMesh,
    layout: SequenceLayout | None,
    causal: bool,
) -> Tensor:
    """Attention with something before and after it for the compiler to fuse."""
    q, k = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) for x in (q, k))
    out = attention(
        q, k, v, mesh, attn_mask=mask, is_causal=causal, options=AttentionOptions(layout=layout)
    )
    return torch.nn.functional.gelu(out.transpose(1, 2).flatten(2)).sin()


def tensors(case: dict[str, Any], mesh: AttentionMesh, layout: SequenceLayout) -> Three:
    wholes = draw(case["shape"], layout.seq_len, layout.seq_len, torch.float32)
    return three(split(x, mesh, layout, 2).requires_grad_() for x in wholes)


def outcome(fn: Callable[..., Tensor], leaves: Three, *others: Any) -> list[Tensor]:
    out = fn(*leaves, *others)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def compare_to_eager(
    ring: int, ulysses: int, backend: str, numbers: Sequence[int], allowed: float
) -> None:
    mesh = make_mesh(ring, ulysses)
    for case in (MESH_CASES[number] for number in numbers):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        layout, (batch, heads, _, _) = layout_of(case, mesh), case["shape"]
        mask = make_mask(case["mask"], batch, heads, layout.seq_len, torch.float32)
        leaves, others = tensors(case, mesh, layout), (mask, mesh, layout, case["mask"] == "causal")
        compiled = torch.compile(with_projection, fullgraph=True, backend=backend)
        want = outcome(with_projection, leaves, *others)
        found = outcome(compiled, leaves, *others)
        with torch.no_grad():
            found.append(compiled(*leaves, *others))
            want.append(with_projection(*leaves, *others))
        for a, b in zip(found, want, strict=True):
            assert difference(a, b) < allowed, case


@pytest.mark.stress  # daily: of many lengths below, and in test_own_kernels
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (2, 2), (1, 3), (2, 3)])
def test_meshes_compile_to_one_graph(ring: int, ulysses: int) -> None:
    numbers = range(0, len(MESH_CASES), 1 + (ulysses > 1))
    run_ranks(compare_to_eager, ring * ulysses, ring, ulysses, "aot_eager", numbers, 1e-6)


@pytest.mark.stress  # Inductor compiles a step below, and a split model in test_compile_modes
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_inductor_gives_what_eager_gives(ring: int, ulysses: int) -> None:
    numbers = [1, 5]  # masked text, odd lengths; text on every rank
    run_ranks(compare_to_eager, ring * ulysses, ring, ulysses, "inductor", numbers, 1e-5)


def graphs_over_resolutions(
    ring: int, ulysses: int, has_layout: bool, trains: bool, number: int
) -> int:
    """Graphs that so many resolutions take; what they give is compared to eager mode."""
    mesh = make_mesh(ring, ulysses)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(with_projection, fullgraph=True, backend="aot_eager")
    for text, image in RESOLUTIONS[:number]:
        segments = (text, image) if has_layout else ((text + image) * ring * ulysses,)
        layout = SequenceLayout(segments, ring, ulysses)
        mask = torch.ones(1, 1, 1, layout.seq_len, dtype=torch.bool)
        mask[..., text // 2 : text] = False
        case = {"shape": (1, 4, 4, 4)}
        leaves = tensors(case, mesh, layout)
        others = mask if has_layout else None, mesh, layout if has_layout else None, False
        if trains:
            found, wanted = (outcome(fn, leaves, *others) for fn in (compiled, with_projection))
        else:
            with torch.no_grad():
                found, wanted = ([fn(*leaves, *others)] for fn in (compiled, with_projection))
        assert max(map(difference, found, wanted)) < 1e-6
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.stress  # daily: two graphs of all plans, and of lengths in test_compile_modes
@pytest.mark.parametrize(
    ("ring", "ulysses", "has_layout", "trains", "number", "most"),
    [
        (2, 1, True, True, 5, 2),
        *(
            (*case, 10, 3)
            for case in (
                *[(2, 1, True, True), (1, 2, False, True)],
                *[(1, 2, True, True), (2, 1, True, False)],
            )
        ),
    ],
)
def test_resolutions_take_few_recompiles(
    ring: int, ulysses: int, has_layout: bool, trains: bool, number: int, most: int
) -> None:
    arguments = ring, ulysses, has_layout, trains, number
    found = run_ranks(graphs_over_resolutions, ring * ulysses, *arguments)
    # The first graph, one for any image length, and one for any text length too, if that changes.
    assert max(found) <= most, found


def check_operators(ring: int, ulysses: int, dtype: torch.dtype) -> None:
    """Torch's own checks: schemas, aliasing, and that fake results are like real ones."""
    mesh, calls = make_mesh(ring, ulysses), list[tuple[Any, tuple[Any, ...]]]()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    layouts = [(zigzag, False) for zigzag in (False, True)]
    layouts += [(False, True)] * (ulysses > 1)
    for zigzag, overlap in layouts:
        layout = SequenceLayout((5, 18), ring, ulysses, zigzag)
        q, k, v = (
            x.detach().to(dtype).requires_grad_() for x in tensors(MESH_CASES[1], mesh, layout)
        )
        sink = torch.randn(q.shape[1], dtype=dtype, requires_grad=True)
        wires = (None, Quantized("int8"))
        for wire, one in [*((wire, None) for wire in wires), *([] if overlap else [(None, sink)])]:
            options = AttentionOptions(layout, comm_dtype=wire, overlap=overlap)
            form = api._prepare(q, k, v, mesh, None, False, 0.5, options, one is not None)
            settings = None, one, form.sizes, form.name
            calls.append((usp.attend_op, (q, k, v, *settings)))
            out, *kept = usp.attend_op(*(x.detach() for x in (q, k, v)), *settings)
            if ulysses == 1:
                kept = [q.detach(), k.detach(), v.detach(), out, kept[-1]]
            calls.append((torch.ops.bascule.attend_backward.default, (out, kept, *settings)))
    layout = SequenceLayout((5, 18), ring, ulysses)
    rows, name = torch.randn(layout.num_tokens(*mesh.place), 3), layout_text(place_in(mesh), layout)
    calls.append((gather_tokens, (rows, [5, 18], name)))
    calls.append((reduce_tokens, (torch.randn(23, 3), [5, 18], name)))
    for operator, arguments in calls:
        found = torch.library.opcheck(operator, arguments, test_utils=checks)
        assert set(found.values()) == {"SUCCESS"}, found


@pytest.mark.parametrize(
    ("ring", "ulysses"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.stress)]
)
@on_ranks(lambda ring, ulysses, **_: ring * ulysses)
def test_operators_are_what_their_schemas_say(ring: int, ulysses: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_operators(ring, ulysses, dtype)
