"""How much a steady call costs, counted: collectives, operators of torch, files and functions.

`tests/goldens/counts.json` has a row for each call. Collectives, and operators of ours and of
torch.distributed, are exactly those of the row; other operators of torch are at most those, and so
are files and functions of the library that a plan, a route and attention pass through. Run
`python -m tests.distributed.test_counts` to record them again, after a change that is meant.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bascule
from bascule.attention.api import attention
from bascule.attention.kernels import registry
from bascule.attention.kernels.protocol import Attended, Grads, KernelQuery, OutLse
from bascule.attention.mask import AttentionMask
from bascule.attention.sparse.attend import rows_of, sparse_attention
from bascule.encoders import BalancedEncoder
from bascule.parallel import SequenceParallel
from bascule.plan.sparse import BlockLayout, SparsePlanner, block_lens
from tests.helpers.calls_made import ALL_TO_ALL, RING, calls_made
from tests.helpers.cases import COST
from tests.helpers.loader_cases import loader_of, sample_of
from tests.helpers.mesh_cases import make_mesh
from tests.helpers.ranks import run_ranks

TABLE = Path(__file__).parents[1] / "goldens" / "counts.json"
ROOT = str(Path(bascule.__file__).parent)
BAGS = ("g2r2n1", "g4n1", "g1n4", "g1r3n1+g1n1")
Row = dict[str, Any]


class Operators(TorchDispatchMode):
    """Counts operators by namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.counts[func.namespace] += 1
        return func(*args, **(kwargs or {}))


class Varlen:
    """Stands for a kernel that takes packed sequences in one launch each way."""

    def unfit(self, query: KernelQuery) -> None:
        """It computes anything."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> OutLse:
        """Zeros."""
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(self, grad: Tensor, done: Attended) -> Grads:
        """Zeros."""
        return torch.zeros_like(done.q), torch.zeros_like(done.k), torch.zeros_like(done.v)


def counted(call: Callable[[], object]) -> Row:
    """Count in the first call, and when all is there: forms, buffers and tables."""
    with calls_made() as first:
        call()
    call()
    files, functions = set[str](), 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal functions
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.add(frame.f_code.co_filename)
            functions += 1

    with Operators() as operators, calls_made() as made:
        call()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    exact = {f"first {name}": n for name, n in first.counts.items() if n != made.counts[name]}
    exact |= made.counts | {name: operators.counts[name] for name in ("bascule", "c10d")}
    return {"exact": exact, "most": [operators.counts["aten"], len(files), functions]}


def of_a_step(spec: str, lens: list[int]) -> dict[str, Row]:
    parallel = SequenceParallel(None, spec, COST, kernel="varlen")
    step = parallel.plan(lens)
    num_tokens, ids = step.local.positions.size, torch.arange(sum(lens))
    x, vec, rows = (torch.randn(n, 4).requires_grad_() for n in (len(ids), len(lens), num_tokens))
    q = torch.randn(num_tokens, 8, 2, requires_grad=True)
    recomputed: Callable[[], Any] = lambda: checkpoint(attend, use_reentrant=False)  # noqa: E731

    def attend() -> Tensor:
        return step.attend(q, q, q)

    calls: dict[str, Callable[[], Tensor]] = {
        "samples": lambda: step.gather_samples(vec),
        "route": lambda: step.route(x=x, ids=ids)["x"],
        "attend": attend,
        "restore": lambda: step.restore(rows),
        "mean": lambda: step.mean(x),
    }
    counts = {"plan": counted(lambda: parallel.plan(lens))}
    for name, call in calls.items():
        counts[name] = counted(call)
        counts[f"{name}, backward"] = counted(lambda call=call: call().sum().backward())
    counts["attend, recomputed"] = counted(lambda: recomputed().sum().backward())
    before = step.traffic
    with calls_made() as made:
        step.attend(q, q, q)
    told = step.traffic.total - before.total
    assert told == made.sent_bytes[ALL_TO_ALL] + made.sent_bytes[RING], spec
    return counts


def of_meshes() -> dict[str, Row]:
    mesh, q = make_mesh(2, 2), torch.randn(1, 4, 16, 8, requires_grad=True)
    lens = block_lens((33,), 4)
    layout, draw = BlockLayout.striped(lens, 2, 2), np.random.default_rng(3)
    masks = draw.random((4, len(lens), len(lens))) < 0.3
    plan = SparsePlanner(2, 2).plan(masks, layout, layout, num_kv_heads=4)
    num_own = int(lens[plan.q.home == dist.get_rank()].sum())
    own = torch.randn(1, 4, num_own, 8, requires_grad=True)

    def within_mode() -> Tensor:
        with bascule.context_parallel(mesh):
            return scaled_dot_product_attention(q, q, q)

    calls: dict[str, Callable[[], Tensor]] = {
        "attention": lambda: attention(q, q, q, mesh),
        "SDPA": within_mode,
        "sparse": lambda: sparse_attention(own, own, own, mesh, plan, rows_of(masks)),
    }
    counts: dict[str, Row] = {}
    for name, call in calls.items():
        counts[name] = counted(call)
        counts[f"{name}, backward"] = counted(lambda call=call: call().sum().backward())
    return counts


def of_items() -> dict[str, Row]:
    """An epoch of a loader, of which the thread's operators are not seen, and an encoder."""
    rank = dist.get_rank()
    groups = [
        [sample_of(100 * rank + 9 * n + k, 40 // (1 + k)) for k in range(3)] for n in range(6)
    ]
    torch.manual_seed(0)
    encoder = BalancedEncoder(nn.Linear(4, 2), length_fn=lambda x: x["input"].shape[1], cost=COST)
    images = [torch.ones(1, 3 + 9 * rank + k, 4) for k in range(3)]

    def epoch() -> None:
        with loader_of(iter(groups)) as batches:
            assert len(list(batches)) == 6

    def encode() -> None:
        torch.stack([x.sum() for x in encoder([{"input": x} for x in images])]).sum().backward()

    with calls_made() as made:
        epoch()
    return {"loader": {"exact": dict(made.counts), "most": []}, "encoder": counted(encode)}


def count_all() -> dict[str, Row]:
    """All calls of a step in the first bags, and in the others those that depend on bags."""
    rank, rows = dist.get_rank(), dict[str, Row]()
    with mock.patch.dict(registry.KERNELS, {"varlen": Varlen()}):
        for spec in BAGS:
            few, many = (of_a_step(spec, [3] * n + [7] * rank) for n in (2, 100))
            place = " alone" if "+" in spec and rank == 3 else ""
            for name, row in few.items():
                assert (row["exact"], row["most"][0]) == (
                    many[name]["exact"],
                    many[name]["most"][0],
                )
                if spec == BAGS[0] or name.startswith(("plan", "attend")):
                    rows[f"{spec}{place}: {name}"] = row
    rows |= {f"mesh: {name}": row for name, row in of_meshes().items()} | of_items()
    for name, row in rows.items():
        if not any(word in name for word in ("plan", "route", "attend", "attention", "SDPA")):
            row["most"] = row["most"][:1]
    return rows


def test_steady_calls_cost_what_they_did() -> None:
    table: dict[str, Row] = json.loads(TABLE.read_text())
    found = run_ranks(count_all, 4)
    assert {name for of_rank in found for name in of_rank} == table.keys()
    for of_rank in found:
        for name, row in of_rank.items():
            assert row["exact"] == table[name]["exact"], name
            pairs = zip(row["most"], table[name]["most"], strict=True)
            assert all(number <= most for number, most in pairs), (name, row, table[name])


def of_flux() -> Row:
    """Count the seventh pass of a Flux of one double and one single block."""
    diffusers = import_module("diffusers")
    torch.manual_seed(1)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    inputs: dict[str, Tensor] = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 8),
        "pooled_projections": torch.randn(1, 8),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }
    with bascule.parallelize(model, ulysses_degree=2), torch.no_grad():
        for _ in range(3):  # `counted` makes three before the one in which functions are counted
            model(**inputs)
        return counted(lambda: model(**inputs))


def test_a_steady_pass_of_flux_is_short() -> None:
    pytest.importorskip("diffusers")
    for row in run_ranks(of_flux, 2):
        _, num_files, num_calls = row["most"]
        assert num_files <= 15 and num_calls <= 300, row


if __name__ == "__main__":
    # Ranks find the function in the module of this name, which this one is not.
    text, module = {}, import_module("tests.distributed.test_counts")
    for of_rank in run_ranks(module.count_all, 4):
        for name, row in of_rank.items():
            most = text.get(name, row)["most"]
            row["most"] = [max(pair) for pair in zip(row["most"], most, strict=True)]
            text[name] = row
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in text.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
