"""How many collectives and how many torch operations a step costs: counted below the library."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from bascule.attention.kernels import registry
from bascule.attention.kernels.protocol import Attended, Grads, KernelQuery, OutLse
from bascule.attention.mask import AttentionMask
from bascule.parallel import ParallelOptions, SequenceParallel, Step
from tests.helpers.calls_made import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    calls_made,
)
from tests.helpers.cases import (
    COST,
    averaged,
    config_of,
    make_model,
    named_gradients,
    own_samples,
    random_batch,
)
from tests.helpers.ranks import run_ranks

Counts = dict[str, int]


class OpCounter(TorchDispatchMode):
    """Counts every operation that reaches torch's dispatcher, but those that send and receive."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.num_ops += func.namespace not in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(log: dict[str, Counts], name: str) -> Iterator[None]:
    with calls_made() as made:
        yield
    log[name] = dict(made.counts)


def count_by_hand(topology: str) -> list[dict[str, Counts]]:
    """What each call costs: the first time, and from then on."""
    logs: list[dict[str, Counts]] = []
    parallel = SequenceParallel(None, topology, COST)
    for _ in range(2):
        log: dict[str, Counts] = {}
        with counted(log, "plan"):
            step = parallel.plan([5, 3, 9])
        vec = torch.randn(3, 2, requires_grad=True)
        x = torch.randn(17, 4, requires_grad=True)
        with counted(log, "samples"):
            vecs = step.gather_samples(vec)
        with counted(log, "samples back"):
            vecs.sum().backward()
        with counted(log, "route"):
            moved = step.route(x=x, ids=torch.arange(17), pos=torch.zeros(17, 3))["x"]
        leaf = moved.detach()[:, None].expand(-1, 9, -1).contiguous().requires_grad_()
        with counted(log, "attend"):
            out = step.attend(leaf, leaf * 2, leaf * 3)
        with counted(log, "attend back"):
            out.sum().backward()
        with counted(log, "restore"):
            home = step.restore(moved)
        with counted(log, "mean"):
            loss = step.mean(home)
        with counted(log, "restore and route back"):
            loss.backward()
        logs.append(log)
    return logs


@pytest.mark.parametrize(
    ("world_size", "topology", "in_bags"),
    [(1, "g1n1", [0]), (2, "g1n2", [0, 0]), (2, "g2n1", [2, 2]), (3, "g1n1+g2n1", [0, 2, 2])],
)
def test_collectives_of_each_call(world_size: int, topology: str, in_bags: list[int]) -> None:
    for (first, later), in_bag in zip(
        run_ranks(count_by_hand, world_size, topology), in_bags, strict=True
    ):
        attention = {ALL_TO_ALL: in_bag} if in_bag else {}
        assert later == {
            "plan": {ALL_GATHER: 1},
            "samples": {ALL_GATHER: 1},
            "samples back": {REDUCE_SCATTER: 1},
            "route": {ALL_TO_ALL: 1},
            "attend": attention,
            "attend back": attention,
            "restore": {ALL_TO_ALL: 1},
            "mean": {ALL_REDUCE: 1},
            "restore and route back": {ALL_TO_ALL: 2},
        }
        # What the ranks exchange for the first time, they agree on first.
        new_form = {
            "samples": {ALL_GATHER: 2},
            "route": {ALL_TO_ALL: 1, ALL_GATHER: 1},
            "restore": {ALL_TO_ALL: 1, ALL_GATHER: 1},
            "mean": {ALL_REDUCE: 1, ALL_GATHER: 1},
            "attend": attention | {ALL_GATHER: 1},
        }
        assert first == later | new_form


def count_in_training(topology: str, checkpoint: bool) -> tuple[Counts, Counts]:
    """Forward and backward of the model's third step: two blocks, hence two attentions."""
    model = make_model(config_of(3, 3))
    if checkpoint:
        for blocks in (model.double_blocks, model.single_blocks):
            wrap_each(blocks)
    parallel = SequenceParallel(None, topology, COST)
    log: dict[str, Counts] = {}
    for seed in range(3):
        samples = own_samples(random_batch(2, seed), model.config, parallel.rank)
        with counted(log, "forward"):
            step = parallel.plan(samples.seq_lens)
            loss = step.mean(samples.losses(model(samples.inputs, step)))
        with counted(log, "backward"):
            loss.backward()
    averaged(named_gradients(model))
    return log["forward"], log["backward"]


def wrap_each(blocks: nn.ModuleList) -> None:
    for place, block in enumerate(blocks):
        blocks[place] = checkpoint_wrapper(block)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(("topology", "attention"), [("g1n2", 0), ("g2n1", 4)])
def test_collectives_of_a_training_step(topology: str, attention: int, checkpoint: bool) -> None:
    for forward, backward in run_ranks(count_in_training, 2, topology, checkpoint):
        assert forward == {ALL_GATHER: 2, ALL_TO_ALL: 2 + attention, ALL_REDUCE: 1}
        recomputed = attention if checkpoint else 0
        assert backward == {ALL_TO_ALL: 2 + attention + recomputed, REDUCE_SCATTER: 1}


class VarlenKernel:
    """Stands for a kernel that takes packed sequences in one launch each way."""

    def unfit(self, form: KernelQuery) -> None:
        """It computes anything."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        """Zeros."""
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        """Zeros."""
        return torch.zeros_like(done.q), torch.zeros_like(done.k), torch.zeros_like(done.v)


def operations(step: Step) -> tuple[int, int]:
    """Torch operations of an attention call, forward and backward; of the plan's second call."""
    num_tokens = step.local.positions.size
    q, k, v = (torch.randn(num_tokens, heads, 2) for heads in (10, 5, 5))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out: Tensor = step.attend(*leaves)
    with OpCounter() as forward:
        out = step.attend(*leaves)
    with OpCounter() as backward:
        out.sum().backward()
    return forward.num_ops, backward.num_ops


def count_operations(topology: str) -> list[tuple[int, int]]:
    with mock.patch.dict(registry.KERNELS, {"varlen": VarlenKernel()}):
        parallel = SequenceParallel(None, topology, COST, options=ParallelOptions(kernel="varlen"))
        return [operations(parallel.plan([3] * count)) for count in (2, 64, 2048)]


@pytest.mark.parametrize("topology", ["g1n3", "g3n1", "g2n1+g1n1", "g1r2n1+g1n1"])
def test_attention_takes_as_many_operations_for_many_sequences(topology: str) -> None:
    for few, some, many in run_ranks(count_operations, 3, topology):
        assert few == some == many
        assert min(few) > 5


def count_moving() -> list[int]:
    """Of steps for which memory is there: buffers grow when more moves than ever before."""
    parallel = SequenceParallel(None, "g1n1+g2n1", COST)
    counts: list[int] = []
    for num_seqs in (2, 200, 2, 200, 2, 200):
        lens = [3] * num_seqs
        step = parallel.plan(lens)
        x, ids = torch.randn(sum(lens), 4, requires_grad=True), torch.arange(sum(lens))
        with OpCounter() as counter:
            step.restore(step.route(x=x, ids=ids)["x"]).sum().backward()
            step.gather_samples(torch.ones(num_seqs, 2))
        counts.append(counter.num_ops)
    return counts[4:]


def test_moving_takes_as_many_operations_for_many_sequences() -> None:
    for few, many in run_ranks(count_moving, 3):
        assert few == many
