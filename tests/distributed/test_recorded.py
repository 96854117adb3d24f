"""Steps inside compiled blocks, and inside checkpoints that choose what to keep."""

import gc
from collections.abc import Sequence
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

from bascule.errors import CommError, ConfigError
from bascule.parallel import SequenceParallel, Step
from bascule.training import keep_exchanges
from tests.helpers.calls_made import calls_made
from tests.helpers.cases import COST
from tests.helpers.ranks import run_ranks

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
    spec: str,
    backend: str = "aot_eager",
    hostile: bool = True,
    num_steps: int = 4,
    eager_ranks: Sequence[int] = (),
    **settings: Any,
) -> int:
    """Steps of unlike plans; the graphs that these took."""
    parallel, block = SequenceParallel(None, spec, COST), Block(**settings)
    options: dict[str, Any] | None = None
    if backend == "inductor":
        options = {"reorder_for_peak_memory": False}
    call = torch.compile(block, fullgraph=True, backend=backend, options=options)
    if dist.get_rank() in eager_ranks:
        call = block
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
    (2, "g1n2", {}),
    pytest.param(2, "g2n1", {"causal": True, "scale": -0.5}, marks=pytest.mark.stress),
    pytest.param(3, "g1n1+g2n1", {"scale": 0.25}, marks=pytest.mark.stress),
    (4, "g2r2n1", {"causal": True}),
]


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "spec", "settings"), CASES)
def test_compiled_steps_are_plain_ones(
    world_size: int, spec: str, settings: dict[str, Any]
) -> None:
    run_ranks(partial(compiled, spec, **settings), world_size)


def test_two_graphs_serve_all_plans() -> None:
    """The second one takes lengths as symbols."""
    assert run_ranks(partial(compiled, "g2n1", hostile=False, num_steps=6), 2) == [2, 2]


def test_ranks_of_which_some_are_compiled_fit_together() -> None:
    run_ranks(partial(compiled, "g2n1", eager_ranks=[1]), 2)


@pytest.mark.stress
def test_inductor_gives_the_same() -> None:
    """Route and samples in one graph: by the setting that `docs/limits.md` asks for."""
    run_ranks(partial(compiled, "g2n1", "inductor", num_steps=2), 2)


def refused_when_compiled() -> list[str]:
    """What is wrong on one rank alone is the same error on both, from within a graph too."""
    parallel = SequenceParallel(None, "g1n2", COST)
    said: list[str] = []
    for rows in (3, 4):
        step = parallel.plan([3])
        call = torch.compile(lambda x, step=step: step.route(x=x)["x"], backend="aot_eager")
        try:
            call(torch.ones(rows if dist.get_rank() else 3, 2))
        except (ConfigError, CommError) as error:
            said.append(str(error))
    return said


def test_an_error_within_a_graph_is_heard_by_all() -> None:
    for said in run_ranks(refused_when_compiled, 2):
        assert len(said) == 1 and "has 3 rows" in said[0], said


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


def test_a_graph_holds_its_step_until_the_backward() -> None:
    run_ranks(dropped, 2)


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


def test_all_microbatches_of_a_plan_may_wait_for_their_backward() -> None:
    run_ranks(many_in_flight, 2)


def weighted() -> list[str]:
    """Weights that want a gradient, which a mean does not give them; compiled as plain."""
    step = SequenceParallel(None, "g1n1", COST).plan([2])
    said: list[str] = []

    def loss(x: Tensor) -> Tensor:
        return step.mean(x, weights=x.sigmoid())

    for call in (loss, torch.compile(loss, backend="aot_eager")):
        try:
            call(torch.randn(2, requires_grad=True))
        except (ConfigError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_weights_that_want_a_gradient_are_refused_in_a_graph_too() -> None:
    (said,) = run_ranks(weighted, 1)
    assert len(said) == 2 and all("weights.detach()" in text for text in said), said


def twice_derived() -> list[str]:
    """A penalty on a gradient that passes through attention; its incoming gradient is constant."""
    step = SequenceParallel(None, "g1n2", COST).plan([3])
    said: list[str] = []

    def out(x: Tensor) -> Tensor:
        q = step.route(x=x)["x"].unflatten(1, (2, -1))
        return step.restore(step.attend(q, q, q).flatten(1))

    for call in (out, torch.compile(out, backend="aot_eager"), partial(checkpoint, out)):
        settings = {"use_reentrant": False, "context_fn": CONTEXT} if call is not out else {}
        settings = settings if isinstance(call, partial) else {}
        x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        try:
            (grad,) = torch.autograd.grad(call(x, **settings).sum(), x, create_graph=True)
            torch.autograd.grad(grad.square().sum(), x)
            said.append("")
        except (ConfigError, CommError, RuntimeError) as error:
            said.append(str(error))
    return said


def test_a_second_derivative_is_an_error_however_it_is_taken() -> None:
    for said in run_ranks(twice_derived, 2):
        assert len(said) == 3 and all(said), said


CONTEXT = partial(create_selective_checkpoint_contexts, keep_exchanges)


def checkpointed(spec: str) -> list[dict[str, int]]:
    """Collectives of a block: plain, recomputed whole, and with what came from others kept."""
    parallel, block = SequenceParallel(None, spec, COST), Block()
    lens, x, vec = inputs_of(0)
    step = parallel.plan(lens)
    whole = partial(checkpoint, block, use_reentrant=False)
    keeping = partial(checkpoint, block, use_reentrant=False, context_fn=CONTEXT)
    run(block, block, step, x, vec)
    counts: list[dict[str, int]] = []
    want = run(block, block, step, x, vec)
    calls = [block, whole, keeping]
    # torch.compile around a checkpoint, and within one that chooses.
    calls += [torch.compile(one, backend="aot_eager") for one in (keeping, whole)]
    compiled = torch.compile(block, backend="aot_eager")
    calls.append(partial(checkpoint, compiled, use_reentrant=False, context_fn=CONTEXT))
    for call in calls:
        with calls_made() as made:
            assert_same(run(call, block, step, x, vec), want)
        counts.append(dict(made.counts))
    return counts


@pytest.mark.parametrize(
    ("world_size", "spec"),
    [(2, "g2n1"), (2, "g1r2n1"), pytest.param(2, "g1n2", marks=pytest.mark.stress)],
)
def test_checkpoints_that_keep_exchanges_make_none_twice(world_size: int, spec: str) -> None:
    for plain, whole, *others in run_ranks(checkpointed, world_size, spec):
        assert sum(whole.values()) > sum(plain.values())
        keeping, compiled, compiled_whole, _ = others
        assert keeping == compiled == plain
        assert sum(plain.values()) <= sum(compiled_whole.values()) <= sum(whole.values())


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
