"""Masked and cross attention of a step: outputs and gradients of one process, in float64."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bascule import SequenceParallel, Sequences, Span, Step, TransformerCost
from bascule.training import keep_exchanges, train_step
from tests.helpers.oracle import packed_attention
from tests.helpers.ranks import raised_by, run_ranks

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 4
COST = TransformerCost(WIDTH)
TOPOLOGIES = {2: ["g1n2", "g1r2n1", "g2n1"], 4: ["g1r4n1", "g2r2n1", "g1r2n1+g2n1", "g1n2+g1r2n1"]}
LENS = (0, 1, 2, 3, 7, 12, 29)


@dataclass(frozen=True)
class Sample:
    """A sequence: its spans, its tokens and the tokens of its context."""

    spans: list[Span]
    x: Tensor
    context: Tensor


def draw_spans(choose: random.Random, kind: str) -> list[Span]:
    length = choose.choice(LENS)
    if kind == "mixed":
        kind = choose.choice(["causal", "full", "documents", "images"])
    if not length:
        return []
    if kind in ("causal", "full"):
        return [Span(length, kind == "causal")]
    spans: list[Span] = []
    while length:
        size = choose.randint(1, length)
        is_document = kind == "documents"
        causal = choose.random() < 0.5 if is_document else len(spans) % 2 == 0
        spans.append(Span(size, causal, is_document))
        length -= size
    return spans


def draw_samples(seed: int, kind: str, num_ranks: int) -> list[list[Sample]]:
    choose, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    ranks: list[list[Sample]] = []
    for _ in range(num_ranks):
        of_rank: list[Sample] = []
        for _ in range(choose.randint(0, 3)):
            spans = draw_spans(choose, kind)
            length = sum(span.num_tokens for span in spans)
            num_context = choose.choice([0, 1, 5]) if kind == "contexts" else 0
            rows = torch.randn(length + num_context, WIDTH, generator=draw, dtype=torch.float64)
            of_rank.append(Sample(spans, *rows.split([length, num_context])))
        ranks.append(of_rank)
    return ranks


class Block(nn.Module):
    """Attention within sequences, then to their contexts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=torch.float64)
        self.query = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        within: Callable[..., Tensor],
        across: Callable[..., Tensor],
    ) -> Tensor:
        heads = [HEADS, KV_HEADS, KV_HEADS]
        x = x + within(*self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split(heads, 1)).flatten(1)
        q = self.query(x).unflatten(-1, (-1, HEAD_DIM))
        x = x + across(
            q, *self.kv(context).unflatten(-1, (-1, HEAD_DIM)).split(KV_HEADS, 1)
        ).flatten(1)
        return self.out(x).tanh()


def make_model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(2))


def across_alone(samples: Sequence[Sample], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Cross attention written out, a sample and a head at a time."""
    outs, row, key = [0 * q[:0]], 0, 0
    for sample in samples:
        rows, keys = slice(row, row + len(sample.x)), slice(key, key + len(sample.context))
        row, key = rows.stop, keys.stop
        heads = [
            (HEAD_DIM**-0.5 * q[rows, head] @ k[keys, head // 2].T).softmax(1) @ v[keys, head // 2]
            for head in range(HEADS)
        ]
        outs.append(torch.stack(heads, 1))
    return torch.cat(outs)


def reference(ranks: Sequence[Sequence[Sample]]) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of all samples in one process."""
    samples, model = [sample for of_rank in ranks for sample in of_rank], make_model()
    x = torch.cat([torch.zeros(0, WIDTH, dtype=torch.float64), *(s.x for s in samples)])
    context = torch.cat([torch.zeros(0, WIDTH, dtype=torch.float64), *(s.context for s in samples)])
    lens, masks = [len(sample.x) for sample in samples], [sample.spans for sample in samples]

    def within(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(q, k, v, lens, masks=masks)[0]

    for block in model:
        x = block(x, context, within, partial(across_alone, samples))
    loss = x.square().mean() if x.numel() else x.sum()
    loss.backward()
    return loss.detach(), list(map(gradient, model.parameters()))


def gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def loss_of(
    model: nn.ModuleList, step: Step, samples: Sequence[Sample], wrap: Callable[..., Any]
) -> Tensor:
    empty = torch.zeros(0, WIDTH, dtype=torch.float64)
    x = step.route(x=torch.cat([empty, *(s.x for s in samples)]))["x"]
    context = torch.cat([empty, *(s.context for s in samples)])
    context = step.route_contexts(context=context)["context"]
    for block in model:
        x = wrap(block, x, context, step.attend, step.attend_contexts)
    return step.mean(step.restore(x).square())


def plain(block: nn.Module, *args: Any) -> Tensor:
    return block(*args)


def keeping(block: nn.Module, *args: Any) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, keep_exchanges)
    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)  # pyright: ignore


def again(block: nn.Module, *args: Any) -> Tensor:
    return checkpoint(block, *args, use_reentrant=False)  # pyright: ignore


def sequences_of(samples: Sequence[Sample]) -> Sequences:
    lens, contexts = [len(s.x) for s in samples], [len(s.context) for s in samples]
    return Sequences(lens, [s.spans for s in samples], contexts)


def trained(kinds: Sequence[str], seeds: Sequence[int], wrap: Callable[..., Any]) -> int:
    rank, size, compared = dist.get_rank(), dist.get_world_size(), 0
    parallels = [SequenceParallel(None, spec, COST) for spec in TOPOLOGIES[size]]
    for kind, seed in product(kinds, seeds):
        ranks = draw_samples(seed, kind, size)
        want_loss, want = reference(ranks)
        for parallel in parallels:
            model, step = make_model(), parallel.plan(sequences_of(ranks[rank]))
            loss = loss_of(model, step, ranks[rank], wrap)
            loss.backward()
            torch.testing.assert_close(loss.detach(), want_loss, rtol=1e-10, atol=1e-13)
            for parameter, wanted in zip(model.parameters(), want, strict=True):
                grad = gradient(parameter)
                dist.all_reduce(grad)
                grad /= size
                assert float((grad - wanted).norm()) <= 1e-10 * float(wanted.norm()) + 1e-13
            compared += 1
    return compared


KINDS = ["causal", "documents", "images", "mixed", "contexts"]


@pytest.mark.some(1)
@pytest.mark.parametrize("world_size", TOPOLOGIES)
def test_gradients_equal_one_process(world_size: int) -> None:
    seeds = range(4)
    counts = run_ranks(trained, world_size, KINDS, seeds, plain)
    assert counts == [len(KINDS) * len(seeds) * len(TOPOLOGIES[world_size])] * world_size


@pytest.mark.stress
@pytest.mark.parametrize("world_size", TOPOLOGIES)
def test_gradients_equal_one_process_at_length(world_size: int) -> None:
    run_ranks(trained, world_size, KINDS, range(4, 100), plain, timeout_s=1500.0)


@pytest.mark.some(1)
@pytest.mark.parametrize("wrap", [keeping, again], ids=["keep_exchanges", "checkpoint"])
def test_with_activation_checkpointing(wrap: Callable[..., Any]) -> None:
    run_ranks(trained, 4, ["contexts"], range(2), wrap)


def sharded() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = SequenceParallel(None, "g1r2n1+g2n1", COST)
    for kind, seed in product(("mixed", "contexts"), range(2)):
        ranks, model = draw_samples(seed, kind, size), make_model()
        want_loss, want = reference(ranks)
        for block in model:
            fully_shard(block)
        step = parallel.plan(sequences_of(ranks[rank]))
        part = partial(loss_of, step=step, samples=ranks[rank], wrap=plain)
        loss = train_step(model, [part])  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(loss, want_loss, rtol=1e-10, atol=1e-13)
        for parameter, wanted in zip(model.parameters(), want, strict=True):
            grad: Any = parameter.grad
            torch.testing.assert_close(grad.full_tensor(), wanted, rtol=1e-9, atol=1e-12)


def test_under_fsdp2() -> None:
    run_ranks(sharded, 4)


def compiled() -> None:
    rank, parallel = dist.get_rank(), SequenceParallel(None, "g1r2n1", COST)
    model = make_model()
    blocks = [torch.compile(block, fullgraph=True, backend="aot_eager") for block in model]
    for seed in range(3):
        ranks = draw_samples(100 + seed, "contexts", 2)
        want_loss, _ = reference(ranks)
        step = parallel.plan(sequences_of(ranks[rank]))
        loss = loss_of(blocks, step, ranks[rank], plain)  # pyright: ignore[reportArgumentType]
        loss.backward()
        torch.testing.assert_close(loss.detach(), want_loss, rtol=1e-10, atol=1e-13)


def test_in_compiled_blocks() -> None:
    run_ranks(compiled, 2)


def misused() -> list[str]:
    rank, parallel = dist.get_rank(), SequenceParallel(None, "g1r2n1", COST)
    told: list[str] = []
    wrong = Sequences([4], "casual") if rank == 1 else Sequences([4], "causal")
    told.append(raised_by(parallel.plan, wrong)[1])
    step = parallel.plan(Sequences([4, 9], "causal") if rank else Sequences([5], "full"))
    q = torch.zeros(step.local.positions.size, 2, 4)
    told.append(raised_by(step.attend, q, q, q, causal=True)[1])
    told.append(raised_by(step.attend_contexts, q, q[:1], q[:1])[1])
    told.append(raised_by(parallel.plan, Sequences([4], "causal") if rank else [5])[1])
    step = parallel.plan(Sequences([4], context_lens=[3]))
    q, k = torch.zeros(step.local.positions.size, 4, 4), torch.zeros(6, 4, 4)
    for v in (k[:, :1], k[:5], k[..., :2], k.double()):
        told.append(raised_by(step.attend_contexts, q, k, v)[1])
    told.append(raised_by(step.route_contexts, text=torch.zeros(2 + rank, 4))[1])
    return told


def test_what_is_wrong_is_told_on_all_ranks() -> None:
    for plan, both, keys, mixture, *values, rows in run_ranks(misused, 2):
        assert "rank 1" in plan and "casual" in plan
        assert "planned with masks" in both
        assert "and 0 of contexts" in keys
        assert "ranks [0] give sequences without masks" in mixture
        assert all("attend_contexts" in text for text in values), values
        assert "rank 0" in rows and "3 rows" in rows
