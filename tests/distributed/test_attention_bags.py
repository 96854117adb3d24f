"""Attention of steps, in bags with and without rings, equals one process: output and gradients.

A block attends within sequences and from them to their contexts. It is run plain, in checkpoints,
compiled and sharded; the reference is the same block on all sequences with attention written out.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bascule import SequenceParallel, Sequences, Span, Step
from bascule.comm.groups import Staging
from bascule.train import keep_exchanges
from tests.helpers.cases import COST, averaged
from tests.helpers.oracle import packed_attention
from tests.helpers.ranks import on_ranks, run_ranks

WIDTH, HEAD_DIM = 16, 6
# World size: topology, query heads and key-value heads, kernel. Some heads do not divide.
BAGS: dict[int, list[tuple[str, tuple[int, int], str | None]]] = {
    2: [("g1n2", (4, 2), None), ("g2n1", (3, 3), "plain"), ("g1r2n1", (2, 1), "cpu_flash")],
    3: [("g1r3n1", (3, 3), None), ("g2n1+g1n1", (4, 2), "cpu_flash")],
    4: [
        ("g1r4n1", (1, 1), None),
        ("g2r2n1", (6, 3), "cpu_flash"),
        ("g2r2n1", (5, 5), "plain"),
        ("g1n2+g1r2n1", (3, 3), None),
    ],
    6: [("g2r2n1+g1n2", (3, 3), None), ("g2r3n1", (5, 5), "cpu_flash")],
    8: [("g4r2n1", (8, 4), None), ("g2r4n1", (6, 3), "plain")],
}
KINDS = ("no masks", "causal call", "causal", "mixed", "contexts")
LENS = (0, 1, 2, 3, 7, 12, 29)


@dataclass(frozen=True)
class Sample:
    """A sequence: its spans, its tokens and the tokens of its context."""

    spans: list[Span]
    x: Tensor
    context: Tensor


def draw_spans(choose: random.Random, kind: str, length: int) -> list[Span]:
    if kind == "mixed":
        kind = choose.choice(["causal", "full", "documents", "images"])
    if kind not in ("documents", "images"):
        return [Span(length, "causal" in kind)] if length else []
    spans: list[Span] = []
    while length:
        size = choose.randint(1, length)
        causal = choose.random() < 0.5 if kind == "documents" else len(spans) % 2 == 0
        spans.append(Span(size, causal, kind == "documents"))
        length -= size
    return spans


def lengths_of(num_ranks: int, seed: int) -> list[list[int]]:
    """Return nothing, a token a rank, one giant on one rank, then drawn lengths."""
    nothing: list[list[int]] = [[] for _ in range(num_ranks)]
    edges = [nothing, [[1] for _ in nothing], [[0, 61, 1], *nothing[1:]]]
    choose = random.Random(seed)
    drawn = [[choose.choice(LENS) for _ in range(choose.randint(0, 3))] for _ in nothing]
    return edges[seed] if seed < len(edges) else drawn


def draw_samples(seed: int, kind: str, num_ranks: int) -> list[list[Sample]]:
    choose, draw = random.Random(seed), torch.Generator().manual_seed(seed)

    def sample(length: int) -> Sample:
        num_context = choose.choice([0, 1, 5]) if kind == "contexts" else 0
        rows = torch.randn(length + num_context, WIDTH, generator=draw, dtype=torch.float64)
        return Sample(draw_spans(choose, kind, length), *rows.split([length, num_context]))

    return [[sample(length) for length in lens] for lens in lengths_of(num_ranks, seed)]


class Block(nn.Module):
    """Attention within sequences, then to their contexts."""

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = num_heads, num_kv_heads, num_kv_heads
        self.qkv = nn.Linear(WIDTH, sum(self.heads) * HEAD_DIM)
        self.query = nn.Linear(num_heads * HEAD_DIM, num_heads * HEAD_DIM)
        self.kv = nn.Linear(WIDTH, 2 * num_kv_heads * HEAD_DIM)
        self.double()

    def forward(
        self, x: Tensor, context: Tensor, within: Callable[..., Any], across: Callable[..., Any]
    ) -> Tensor:
        x = within(*self.qkv(x).unflatten(1, (-1, HEAD_DIM)).split(self.heads, 1)).flatten(1)
        k, v = self.kv(context).unflatten(1, (-1, HEAD_DIM)).split(self.heads[1], 1)
        return (x + across(self.query(x).unflatten(1, (-1, HEAD_DIM)), k, v).flatten(1)).tanh()


def joined(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Tokens and contexts, as leaves."""
    empty = torch.zeros(0, WIDTH, dtype=torch.float64)
    x, context = [empty, *(s.x for s in samples)], [empty, *(s.context for s in samples)]
    return torch.cat(x).requires_grad_(), torch.cat(context).requires_grad_()


def loss_alone(block: Block, kind: str, ranks: list[list[Sample]]) -> tuple[Tensor, list[Tensor]]:
    """Loss of all samples in one process, and gradients: parameters, tokens and contexts."""
    samples = [sample for of_rank in ranks for sample in of_rank]
    lens, contexts = [len(s.x) for s in samples], [len(s.context) for s in samples]
    settings: dict[str, Any] = {"masks": [sample.spans for sample in samples]}
    if "call" in kind:
        settings = {"causal": True, "scale": 0.7}
    leaves = joined(samples)
    out = block(
        *leaves,
        lambda q, k, v: packed_attention(q, k, v, lens, **settings)[0],
        lambda q, k, v: packed_attention(q, k, v, lens, key_lens=contexts)[0],
    )
    loss = out.square().sum() / max(1, out.numel())
    return loss.detach(), list(torch.autograd.grad(loss, [*block.parameters(), *leaves]))


def planned(parallel: SequenceParallel, kind: str, samples: Sequence[Sample]) -> Step:
    lens = [len(s.x) for s in samples]
    if kind in ("no masks", "causal call"):
        return parallel.plan(lens)
    return parallel.plan(
        Sequences(lens, [s.spans for s in samples], [len(s.context) for s in samples])
    )


def loss_of(run: Any, step: Step, kind: str, x: Tensor, context: Tensor) -> Tensor:
    settings: dict[str, Any] = {"causal": True, "scale": 0.7} if "call" in kind else {}
    across: Callable[..., Any] = lambda q, k, v: torch.zeros_like(q)  # noqa: E731
    if kind == "contexts":
        context, across = step.route_contexts(context=context)["context"], step.attend_contexts
    x = step.route(x=x)["x"]
    return step.mean(
        step.restore(run(x, context, partial(step.attend, **settings), across)).square()
    )


def again(block: Block) -> Any:
    return partial(checkpoint, block, use_reentrant=False)


def keeping(block: Block) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, keep_exchanges)
    return partial(checkpoint, block, use_reentrant=False, context_fn=contexts)


def compiled(block: Block) -> Any:
    return torch.compile(block, fullgraph=True, backend="aot_eager")


def plain(block: Block) -> Any:
    return block


def equal(found: Tensor, wanted: Tensor, case: object) -> None:
    error, norm = float((found - wanted).norm()), float(wanted.norm())
    assert error <= 1e-10 * norm + 1e-13, (case, error, norm)


def compare(
    kinds: Sequence[str],
    seeds: Sequence[int],
    run: Callable[[Block], Any],
    is_sharded: bool,
    every: int = 1,
) -> int:
    """Compare loss and gradients on all bags of this world; return how many were compared.

    Every so-manieth seed, another one for each bag and kind.
    """
    rank, size, compared = dist.get_rank(), dist.get_world_size(), 0
    for bag, (spec, heads, kernel) in enumerate(BAGS[size]):
        parallel = SequenceParallel(None, spec, COST, kernel=kernel)
        block, alone = Block(*heads), Block(*heads)
        if is_sharded:
            fully_shard(block)
        call = run(block)
        for (place, kind), seed in product(enumerate(kinds), seeds):
            if (bag + place + seed) % every:
                continue
            ranks = draw_samples(seed, kind, size)
            want, grads = loss_alone(alone, kind, ranks)
            leaves = joined(ranks[rank])
            block.zero_grad()
            loss = loss_of(call, planned(parallel, kind, ranks[rank]), kind, *leaves)
            loss.backward()
            equal(loss.detach(), want, (spec, kind, seed))
            for found, wanted in zip(
                own_grads(block, leaves), wanted_grads(grads, ranks), strict=True
            ):
                equal(found, wanted, (spec, kind, seed))
            compared += 1
    return compared


def own_grads(block: Block, leaves: Sequence[Tensor]) -> Iterator[Tensor]:
    """Of parameters averaged over ranks, of this rank's inputs those of the global loss."""
    named: list[tuple[str, Any]] = list(block.named_parameters())
    grads: dict[str, Any] = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in named}
    is_sharded = hasattr(next(iter(grads.values())), "full_tensor")
    whole = {n: x.full_tensor() for n, x in grads.items()} if is_sharded else averaged(grads)
    yield from whole.values()
    for leaf in leaves:
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        yield grad / dist.get_world_size()


def wanted_grads(grads: list[Tensor], ranks: list[list[Sample]]) -> list[Tensor]:
    """Of this rank's inputs alone."""
    *parameters, x, context = grads
    rank = dist.get_rank()
    x = x.split([sum(len(s.x) for s in samples) for samples in ranks])[rank]
    context = context.split([sum(len(s.context) for s in samples) for samples in ranks])[rank]
    return [*parameters, x, context]


@pytest.mark.parametrize(
    "world_size", [2, 3, 4, *(pytest.param(n, marks=pytest.mark.stress) for n in (6, 8))]
)
def test_loss_and_gradients_equal_one_process(world_size: int) -> None:
    counts = run_ranks(compare, world_size, KINDS, range(4), plain, False, 4)
    assert counts == [len(KINDS) * len(BAGS[world_size])] * world_size


@pytest.mark.stress
@pytest.mark.parametrize("world_size", BAGS)
def test_loss_and_gradients_equal_one_process_at_length(world_size: int) -> None:
    run_ranks(compare, world_size, KINDS, range(30), plain, False, timeout_s=1500.0)


@pytest.mark.parametrize(
    ("world_size", "run", "is_sharded"),
    [
        *[(2, again, False), (2, keeping, False), (2, compiled, False), (2, plain, True)],
        pytest.param(4, again, False, marks=pytest.mark.stress),
        pytest.param(4, plain, True, marks=pytest.mark.stress),
    ],
    ids=[
        *["checkpoint", "keep_exchanges", "compiled", "FSDP2"],
        *["checkpoint of four", "FSDP2 of four"],
    ],
)
def test_blocks_are_recorded_and_sharded(
    world_size: int, run: Callable[[Block], Any], is_sharded: bool
) -> None:
    kinds, seeds = (("contexts",), (2,)) if run is compiled else (("mixed", "contexts"), (2, 3))
    run_ranks(compare, world_size, kinds, seeds, run, is_sharded, 2)


@on_ranks(2)
def test_each_request_for_memory_may_bring_another_as_on_devices() -> None:
    step = SequenceParallel(None, "g2n1", COST).plan([5, 3])
    q = torch.randn(step.local.positions.size, 3, 2, generator=torch.Generator().manual_seed(1))
    expected = step.attend(q, q, q)

    def take(_: Staging, role: str, shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_full(shape, torch.nan)

    with mock.patch.object(Staging, "take", take):
        assert torch.equal(step.attend(q, q, q), expected)
