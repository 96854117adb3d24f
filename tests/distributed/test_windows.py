"""Windows, chunks, documents, caps and sinks over meshes, against one process and a dense mask."""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.attention import (
    AttentionMesh,
    AttentionOptions,
    PackedSequences,
    Scores,
    SequenceLayout,
    attend_packed,
    attention,
    gather,
    split,
)
from bascule.errors import ConfigError
from tests.helpers.inference_cases import make_mesh
from tests.helpers.ranks import on_ranks, run_ranks

NUM_TOKENS = 37
DOCUMENTS = (1, 20, 3, 13)
NEAR = [(0, 0), (1, 0), (8, 0), (36, 0), (50, 0), (0, 1), (0, 8)]  # window, size of chunks


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    sink: Tensor | None,
    documents: tuple[int, ...] = (),
) -> Tensor:
    """Attend with all scores at hand; causal."""
    if documents:
        parts = zip(*(x.split(documents, 2) for x in (q, k, v)), strict=True)
        return torch.cat([dense(*part, scores=scores, sink=sink) for part in parts], 2)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    each = (q @ k.mT) * q.shape[-1] ** -0.5
    if scores.cap:
        each = scores.cap * torch.tanh(each / scores.cap)
    key = torch.arange(q.shape[2])
    query = key[:, None]
    is_seen = key <= query
    if scores.window:
        is_seen &= key > query - scores.window
    if scores.chunk:
        is_seen &= key // scores.chunk == query // scores.chunk
    each = each.masked_fill(~is_seen, -math.inf)
    if sink is not None:
        each = torch.cat([each, sink[:, None, None].expand(*each.shape[:-1], 1)], -1)
    return each.softmax(-1)[..., : key.numel()] @ v


def operands(batch: int, num_tokens: int, has_sink: bool) -> list[Tensor]:
    """Return float64 q, k, v and a sink, the same everywhere."""
    random = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, num_tokens, 8) for heads in (4, 2, 2)] + [(4,)] * has_sink
    return [torch.randn(x, generator=random, dtype=torch.float64).requires_grad_() for x in shapes]


ALL = [(2, 1, "", 1), (1, 2, "aot_eager", 7), (2, 2, "", 1), (4, 1, "", 1)]


@pytest.mark.parametrize(
    ("ring", "ulysses", "backend", "every"),
    [
        *[(2, 1, "", 7), (1, 2, "eager", 19), (2, 2, "", 11), (4, 1, "", 7)],
        *(pytest.param(*one, marks=pytest.mark.stress) for one in ALL),
    ],
)
@on_ranks(lambda ring, ulysses, **_: ring * ulysses)
def test_meshes_give_what_one_process_gives(
    ring: int, ulysses: int, backend: str, every: int
) -> None:
    """One case of `every`, which shares no factor with how many a choice has: all of them occur."""
    mesh, world = AttentionMesh.of(make_mesh(ring, ulysses)), ring * ulysses
    attend = torch.compile(attention, fullgraph=True, backend=backend) if backend else attention
    more = [(0.5, True)] if backend else [(0.0, False), (0.5, False), (0.5, True)]
    of_documents = [(near, DOCUMENTS) for near in NEAR[::3]]
    cases = product([False, True], [1, 2], [*((x, ()) for x in NEAR), *of_documents], more)
    for zigzag, batch, (near, documents), (cap, has_sink) in list(cases)[::every]:
        layout, scores = SequenceLayout((NUM_TOKENS,), ring, ulysses, zigzag), Scores(*near, cap)
        leaves = operands(batch, NUM_TOKENS, has_sink)
        sink = leaves[3] if has_sink else None
        q, k, v = leaves[:3]
        wanted = dense(q, k, v, scores, sink, documents)
        grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).double()
        q, k, v = (split(x, mesh, layout, 2) for x in (q, k, v))
        options = AttentionOptions(layout, scores=scores, documents=documents)
        settings = {"options": options, "sink": sink}
        out = gather(attend(q, k, v, mesh, is_causal=True, **settings), mesh, layout, 2)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
        grads, wanted_grads = (torch.autograd.grad(x, leaves, grad) for x in (out, wanted))
        for mean, of_whole in zip(grads, wanted_grads, strict=True):
            mean = mean.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(mean / world, of_whole, rtol=0, atol=1e-11)


@pytest.mark.parametrize("near", NEAR)
def test_packed_sequences_on_one_rank(near: tuple[int, int]) -> None:
    scores, lens = Scores(*near, 0.5), [3, 0, 21, 13]
    leaves = operands(1, sum(lens), True)
    q, k, v = (x[0].transpose(0, 1) for x in leaves[:3])
    seqs = PackedSequences.build(lens, q.device)
    out = attend_packed(q, k, v, seqs, causal=True, scores=scores, sink=leaves[3])
    parts = zip(*(x.split(lens, 2) for x in leaves[:3]), strict=True)
    each = [dense(*part, scores=scores, sink=leaves[3]) for part in parts]
    wanted = torch.cat(each, 2)[0].transpose(0, 1)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    pairs = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, wanted))
    for own, other in zip(*pairs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-11)


def refused() -> list[str]:
    mesh, texts = make_mesh(1, 1), list[str]()
    q = torch.randn(1, 2, 6, 8)
    near = AttentionOptions(scores=Scores(window=2))
    for calls in (
        lambda: attention(q, q, q, mesh, options=near),
        lambda: attention(
            q, q, q, mesh, attn_mask=q[0, 0, :, :6] > 0, is_causal=True, options=near
        ),
        lambda: attention(
            *(q, q, q, mesh), is_causal=True, options=AttentionOptions(documents=(2, 3))
        ),
        lambda: attention(q, q, q, mesh, sink=torch.zeros(3)),
        lambda: attention(
            *(q, q, q, mesh), options=AttentionOptions(kernel="cpu_flash", scores=Scores(cap=1.0))
        ),
        lambda: Scores(window=2, chunk=3),
        lambda: Scores(window=-1),
    ):
        with pytest.raises(ConfigError) as error:
            calls()
        texts.append(str(error.value))
    return texts


def test_what_has_no_meaning_is_refused() -> None:
    wanted = [
        "with is_causal=False",
        "a mask: windows, chunks and documents need causal attention in one segment",
        "2 documents of 5 tokens together, the shortest of 2, in 6",
        "sink is (3,): give a number for each of 2 heads",
        "kernel 'cpu_flash' has no soft cap of scores: use one of plain",
        "give a window or chunks",
        "must be an integer, at least 0",
    ]
    for words, text in zip(wanted, run_ranks(refused, 1)[0], strict=True):
        assert words in text, text
