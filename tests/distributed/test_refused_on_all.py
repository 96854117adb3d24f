"""What one rank or all ranks give wrongly is the same error on every rank, and all go on."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bascule import BalancedLoader, Limits, SequenceParallel, Sequences, TransformerCost
from bascule.attention.api import AttentionMesh, AttentionOptions, SequenceLayout, attention
from bascule.attention.sparse.attend import rows_of, sparse_attention
from bascule.comm.agree import agree
from bascule.comm.groups import member_of, resolve
from bascule.costs import Cluster, PolynomialCost
from bascule.data import CostTracker
from bascule.errors import CommError, ConfigError, PlanError
from bascule.plan.sparse import BlockLayout, SparsePlanner, block_lens
from tests.helpers.loader_cases import (
    COST,
    FAST,
    PER_RANK,
    endless,
    lists,
    loader_of,
    loader_threads,
)
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

TEN, GAMMA = Limits(tokens=10), TransformerCost(64, gamma=1.5)
ELSEWHERE = torch.ones(4, dtype=torch.bool, device="meta")
LONG = f"{'x' * 3000}a=0, b"
TRIMMED = "on cost: ranks [0]: .. xxx", "a=0, b; ranks [1]: .. xxx", "a=1, byyy", "y ..."
Error = tuple[list[str], str]


def made(topology: str = "g1n1", cost: Any = COST, **settings: Any) -> SequenceParallel:
    return SequenceParallel(None, topology, cost, **settings)


def planned(lens: Any = (3,), **settings: Any) -> object:
    return made(**settings).plan(lens)


def within(lens: Any) -> object:
    return planned(lens, limits=TEN)


def priced(flops: float | None) -> object:
    cluster = None if flops is None else Cluster(1, 2, flops, 1 << 34, 1e11, 1e10, 1e-5)
    return made(cost=TransformerCost(64, seconds_per_unit=1e-3), cluster=cluster)


def changed_cost(cost: TransformerCost) -> object:
    parallel = made()
    parallel.cost = cost
    return parallel.plan([1])


def with_speeds(speeds: list[float]) -> object:
    parallel = made()
    parallel.set_speeds(speeds)
    return parallel.plan([1])


def step_planned(lens: Any = ((1,), (2,)), sync: Any = "step", limits: Any = None) -> object:
    return made(limits=limits).plan_step(lens, sync=sync)


def failed(error: Exception | None) -> object:
    parallel = made()
    return parallel.plan([5]) if error is None else parallel.fail(error)


def attended(q: Any = (6, 4, 8), kv: Any = None, kernel: str | None = None) -> object:
    step = made("g2n1", kernel=kernel).plan([6])
    keys = torch.zeros(kv or q)
    return step.attend(torch.zeros(q), keys, keys)


def attended_with_masks(kinds: Any = None, causal: bool = False) -> object:
    step = made("g1r2n1").plan([4] if kinds is None else Sequences([4], kinds))
    q = torch.zeros(step.local.positions.size, 4, 4)
    return step.attend(q, q, q, causal=causal)


def with_contexts(rows: int = 3, values: Any = None) -> object:
    step, k = made("g1r2n1").plan(Sequences([4], "full", [3])), torch.zeros(6, 4, 4)
    step.route_contexts(text=torch.zeros(rows, 4))
    q = torch.zeros(step.local.positions.size, 4, 4)
    return step.attend_contexts(q, k, k if values is None else values)


def on_mesh(tokens: int = 3, degrees: tuple[int, int] = (2, 1), **settings: Any) -> object:
    names = ("ring", "ulysses")
    mesh = AttentionMesh.of(init_device_mesh("cpu", degrees, mesh_dim_names=names))
    q = torch.zeros(1, 4, tokens, 8)
    return attention(q, q, q, mesh, options=AttentionOptions(**settings))


def on_ulysses(tokens: int) -> object:
    return on_mesh(tokens, (1, 2))


def on_an_axis(name: str) -> object:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=(name, "tp"))
    return AttentionMesh.of(mesh)


def sparse(**call: Any) -> object:
    """Masks of two heads and eight blocks, with plans and masks that differ."""
    mesh = AttentionMesh.of(
        init_device_mesh("cpu", call.get("degrees", (2, 1)), mesh_dim_names=("ring", "ulysses"))
    )
    lens = block_lens((32,), 4)
    layout = BlockLayout.striped(lens, 2, 1)
    masks = np.tril(np.ones((2, 8, 8), bool)) if "kind" not in call else np.ones((2, 8, 8), bool)
    plan = SparsePlanner(2, 1).plan(masks, layout, layout, num_kv_heads=2)
    seen = (lambda _: masks) if call.get("masks") == "whole" else rows_of(masks)
    q = torch.zeros(1, 2, int(lens[layout.home == dist.get_rank()].sum()), 8)
    v = q[:, :, call.get("first", 0) :]
    return sparse_attention(q, q, v, mesh, plan, seen, kernel=call.get("kernel"))


def averaged(values: Any = (6,), weights: Any = None) -> object:
    return made("g2n1").plan([6]).mean(torch.ones(values), weights=weights)


def routed(form: str = "as usual") -> object:
    step = made("g2n1").plan([4])
    x, ids = torch.zeros(4, 6), torch.arange(4)
    forms: dict[str, dict[str, Any]] = {
        "as usual": {"x": x},
        "float64": {"x": x.double()},
        "y": {"y": x},
        "with gradient": {"x": x.clone().requires_grad_()},
        "narrow": {"x": x[:, :5]},
        "x, ids": {"x": x, "ids": ids},
        "ids, x": {"ids": ids, "x": x},
        "3 rows": {"x": x[:3]},
        "no dims": {"x": torch.tensor(1.0)},
        "nothing": {},
    }
    return step.route(**forms[form])


def restored(dtype: torch.dtype = torch.float32, device: str = "cpu") -> object:
    return made("g2n1").plan([4]).restore(torch.zeros(4, dtype=dtype, device=device))


def counted(mask: Any = (True,) * 4) -> object:
    return made("g2n1").plan([4]).count_routed(torch.as_tensor(mask))


def gathered(columns: int) -> object:
    return made("g2n1").plan([4]).gather_samples(torch.zeros(1, columns))


def loader(**settings: Any) -> BalancedLoader:
    samples = settings.pop("samples") if "samples" in settings else lists()
    return loader_of(samples, **settings)


def loaded(**settings: Any) -> list[int]:
    return [int(sample["id"]) for batch in loader(**settings) for sample in batch.data]


def tracked(**settings: Any) -> object:
    return CostTracker(loader(cost=PolynomialCost(0.0, 1.0, 0.0)), **settings)


class Odd:
    """A loader of which one method fails."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def do(self, name: str) -> None:
        if name == self.wrong:
            raise ValueError(f"no {name}")

    def __len__(self) -> int:
        self.do("len")
        return 5

    def __iter__(self) -> Iterator[Any]:
        self.do("iter")
        return iter(lists())

    def state_dict(self) -> dict[str, Any]:
        self.do("save")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.do("load")

    def set_epoch(self, epoch: int) -> None:
        self.do("epoch")


def resumed(samples: Any = None, **change: Any) -> object:
    """Load the state after two steps, changed."""
    parts = loader(samples=lists() if samples is None else samples)
    state = parts.state_dict()
    for batch in parts:
        state = parts.state_dict()
        if batch.step == 1:
            break
    parts.load_state_dict(state | change)
    return list(parts)


def right(lens: Any) -> Any:
    return np.asarray(lens, dtype=float)


def costed(value: Callable[[Any], Any], num_right: int) -> object:
    """Iterate with a cost model that is right so many times."""
    calls = itertools.count()
    return loaded(cost=lambda lens: (right if next(calls) < num_right else value)(lens))


def of_epoch(epoch: int) -> object:
    parts = loader()
    parts.set_epoch(epoch)
    return list(parts)


def one_of_two(index: int) -> object:
    loaders = [loader(samples=endless(0)), loader(samples=endless(1))]
    return next(iter(loaders[index]))


def two_at_once() -> object:
    parts = loader()
    first, second = iter(parts), iter(parts)
    assert next(first).step == next(second).step == 0
    assert [batch.step for batch in second] == [1, 2, 3, 4]
    assert parts.state_dict()["epoch"] == 1
    return next(first)


def closed_within() -> None:
    parts = loader()
    for batch in parts:
        if batch.step == 2:
            parts.close()
            assert parts.state_dict()["step"] == 3


def loaded_within() -> None:
    parts = loader()
    first = iter(parts)
    next(first)
    try:
        parts.load_state_dict(parts.state_dict())
    finally:
        assert [batch.step for batch in first] == [1, 2, 3, 4]  # it was not hurt


def more_tokens(sample: Any) -> int:
    return len(sample["input_ids"]) + 1


def agreed(error: Exception | None = None, cost: str = "") -> object:
    return agree(member_of(resolve(None), "all"), {"cost": cost}, error, what="test", step=1)


def one(*values: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rank 0 gives the usual arguments, rank 1 these."""
    return {}, dict(zip(values[::2], values[1::2], strict=True))  # pyright: ignore


def two(name: str, first: object, second: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rank 0 gives one value of an argument, rank 1 another."""
    return {name: first}, {name: second}


def both(**wrong: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return wrong, wrong


ENDED = ("another iteration of the same loader, ended this iteration",)
MASK = ("rank 1", "give a bool CPU tensor of (4,)")
Row = tuple[Any, ...]
"""The call, its arguments on both ranks, and words of the error."""
DISAGREE: dict[str, Row] = {
    "topology": (made, one("topology", "g2n1"), "disagree on topology", "g2n1"),
    "cost": (made, one("cost", GAMMA), "on cost", "gamma=1.5", "ranks [0]: ", "ranks [1]: "),
    "cost of the user": (made, one("cost", lambda lens: np.asarray(lens) * 1.0), "on cost"),
    "cost, changed later": (changed_cost, two("cost", COST, TransformerCost(65)), "on cost"),
    "limits": (made, one("limits", Limits(tokens=100)), "on limits", "tokens=100"),
    "cluster": (priced, two("flops", 1e12, 2e12), "disagree on cluster"),
    "cluster of one rank": (priced, two("flops", None, 1e12), "cluster"),
    "long settings": (agreed, two("cost", LONG, f"{LONG[:-4]}1, b{'y' * 2000}"), *TRIMMED),
    "speeds": (with_speeds, two("speeds", [1.0, 1.0], [1.0, 0.5]), "disagree on speeds"),
    "microbatches": (step_planned, one("lens", [[1]]), "1, sync=step", "2, sync=step"),
    "sync": (step_planned, one("sync", "microbatch"), "2, sync=step", "2, sync=microbatch"),
    "a failing rank": (failed, two("error", None, OSError("no photo")), "rank 1", "OSError"),
    "form of rows: dtype": (routed, one("form", "float64"), "x float64[6]", "x float32[6]"),
    "form of rows: name": (routed, one("form", "y"), "ranks [1]"),
    "form of rows: gradient": (routed, one("form", "with gradient"), "with gradient"),
    "form of rows: width": (routed, one("form", "narrow"), "ranks [1]"),
    "form of rows: number": (routed, one("form", "x, ids"), "ranks [1]"),
    "restored dtype": (restored, one("dtype", torch.int8), "ranks [1]"),
    "gathered": (gathered, two("columns", 3, 2), "ranks [1]"),
    "heads of one rank": (attended, one("q", (6, 2, 16)), "attend"),
    "mesh: no layout": (on_ulysses, two("tokens", 5, 4), "ranks [0]: a layout of (10,) tokens"),
    "sparse: plan": (sparse, one("kind", "full"), "disagree on the call"),
    "weights of one rank": (averaged, one("weights", torch.ones(6)), "mean"),
    "loader: state": (resumed, one("counts", (2, 1)), "disagree on step"),
    "loader: epoch": (of_epoch, two("epoch", 0, 3), "disagree on step"),
    "loader: another": (one_of_two, two("index", 0, 1), "on loader: ranks [0]: number "),
    "tracker": (tracked, one("warmup", 20), "warmup=20"),
    "another error": (agreed, two("error", None, KeyError(1)), "KeyError"),
}
for _name, _first, _second, _word in (
    ("cost", COST, TransformerCost(65), "d_model=65"),
    ("accumulate", 1, 2, "ranks [1]: 2"),
    ("ends", "finish", "drop_last", "ranks [0]: finish"),
    ("limits", None, Limits(tokens=5), "tokens=5"),
    ("min_gain", 0.0, 0.5, "ranks [1]: 0.5"),
    ("bytes_per_s", 10.0, FAST, "10.0"),
    ("length_fn", len, more_tokens, "more_tokens"),
    ("timeout_s", 60.0, 61.0, "61.0"),
):
    DISAGREE[f"loader: {_name}"] = (loader, two(_name, _first, _second), f"on {_name}", _word)
for _name in ("len", "iter", "save", "epoch", "load"):
    _call = resumed if _name == "load" else loaded
    DISAGREE[f"loader: no {_name}"] = (_call, two("samples", Odd(), Odd(_name)), f"no {_name}")
WRONG: dict[str, Row] = {
    "topology of one rank": (made, one("topology", "g1nx"), "rank 1", "'g1nx'"),
    "ranks left over": (made, both(topology="g3n1"), "there are 2: use 3 ranks"),
    "auto without a cluster": (made, both(topology="auto"), "auto", "a cluster"),
    "no topology": (made, one("topology", None), "rank 1"),
    "speeds of one rank": (with_speeds, both(speeds=[1.0]), "of the 2 ranks"),
    "length below 0": (planned, one("lens", [4, -1]), "step 1, plan: rank 1 of group"),
    "half a token": (planned, one("lens", [2.5]), "rank 1", "length 2.5 "),
    "too long": (planned, one("lens", [2**41]), "rank 1", "2^40"),
    "beyond 64 bits": (planned, one("lens", [2**70]), "rank 1"),
    "ragged": (planned, one("lens", [[3], [4, 5]]), "rank 1"),
    "on no device": (planned, one("lens", torch.ones(1, device="meta")), "rank 1"),
    "length of a microbatch": (step_planned, one("lens", [[1], [-2]]), "microbatch 1", "rank 1"),
    "rows of one rank": (routed, one("form", "3 rows"), "shape (3, 6)", "4 rows"),
    "device": (restored, both(device="meta"), "meta"),
    "a mask of 3 rows": (counted, one("mask", [True] * 3), *MASK),
    "a mask elsewhere": (counted, one("mask", ELSEWHERE), *MASK),
    "rows of attention": (attended, one("q", (7, 4, 8)), "rank 1", "attend"),
    "heads that do not divide": (attended, both(kv=(6, 3, 8)), "4 query heads for 3 key-value"),
    "more ranks than heads": (attended, both(kv=(6, 1, 8)), "at most 1 ranks", "as g1r2n1"),
    "kernel of a device": (attended, both(kernel="aten_flash"), "runs on CUDA devices"),
    "spans of one rank": (attended_with_masks, two("kinds", "causal", "casual"), "rank 1"),
    "masks of one rank": (attended_with_masks, two("kinds", None, "causal"), "ranks [0] give"),
    "masks, and causal too": (
        attended_with_masks,
        both(kinds="full", causal=True),
        "contradicts the masks",
    ),
    "rows of contexts of one rank": (with_contexts, one("rows", 2), "rank 1", "3 rows"),
    "mesh: other lengths": (
        on_mesh,
        both(layout=SequenceLayout((9,), 2, 1)),
        "q has 3 tokens, but",
    ),
    "mesh: other degrees": (on_mesh, both(layout=SequenceLayout((6,), 1, 2)), "on a mesh of 2 x 1"),
    "mesh: tokens": (on_mesh, both(layout=SequenceLayout((7,), 2, 1), tokens=4), "3 of 7"),
    "mesh: an axis": (on_an_axis, both(name="dp"), "('dp', 'tp')"),
    "sparse: values of one rank": (sparse, one("first", 1), "the plan has"),
    "sparse: degrees": (sparse, both(degrees=(1, 2)), "a plan for 2 x 1 ranks (ring x Ulysses)"),
    "sparse: whole masks": (sparse, both(masks="whole"), "rows of a mask"),
    "a mean of a scalar": (averaged, one("values", ()), "rank 1", "mean"),
    "loader: counts": (resumed, both(counts=(90, 90)), "but there are 5"),
    "loader: no samples": (loaded, both(samples=[[{"id": 1}]] * 3), 'a dict has no "input_ids"'),
    "loader: two at once": (two_at_once, both(), *ENDED),
    "loader: closed within": (closed_within, both(), *ENDED),
    "loader: loaded within": (loaded_within, both(), "call loader.close() first"),
    "bad input": (agreed, two("error", None, ConfigError("one")), "one"),
    "no plan": (agreed, two("error", None, PlanError("one")), "one"),
}
for _shape, _dtype in (
    *(((rows, heads, 4), torch.float32) for rows, heads in ((6, 1), (5, 4))),
    ((6, 4, 2), torch.float32),
    ((6, 4, 4), torch.float64),
):
    _values = both(values=torch.zeros(_shape, dtype=_dtype))
    WRONG[f"values of contexts {_shape}"] = (with_contexts, _values, "attend_contexts")
NO_PLAN: dict[str, Row] = {
    "over the limits": (within, two("lens", [1], [21]), "rank 1, sequence 0: 21 tokens", "10"),
    "a microbatch": (step_planned, both(lens=[[20], [20]], limits=TEN), "microbatch 0", "20"),
}
ROWS = {
    **{name: (CommError, *row) for name, row in DISAGREE.items()},
    **{name: (ConfigError, *row) for name, row in WRONG.items()},
    **{name: (PlanError, *row) for name, row in NO_PLAN.items()},
    **{
        f"loader: cost {word} {num_right}, {place}": (
            # Ranks compare what a cost model gives when they make a loader.
            CommError if (word, num_right, place) == ("nan", 0, "one rank") else ConfigError,
            lambda value, num_right=num_right: costed(value, num_right),
            two("value", value if place == "everywhere" else right, value),
            word,
        )
        for word, value in (("nan", lambda lens: lens * np.nan), ("ZeroDivision", lambda _: 1 / 0))
        for num_right in (0, 3)
        for place in ("everywhere", "one rank")
    },
}


def refused(names: list[str]) -> dict[str, Error]:
    """Return the error of each row; after each all ranks plan and move rows, at the end samples."""
    errors: dict[str, Error] = {}
    for name in names:
        _, call, arguments, *_ = ROWS[name]
        errors[name] = raised_by(call, **arguments[dist.get_rank()])
        step = made().plan([3])
        assert step.plan.seq_lens.tolist() == [3, 3]
        x = torch.arange(3.0)
        assert torch.equal(step.restore(step.route(x=x)["x"]), x), name
        assert not loader_threads(), name
    first = PER_RANK * dist.get_rank()
    assert loaded() == list(range(first, first + 5))
    return errors


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Error]]:
    return run_ranks(refused, 2, list(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_same_error_on_all_ranks(name: str, of_ranks: list[dict[str, Error]]) -> None:
    kind, _, _, *words = ROWS[name]
    first, second = (errors[name] for errors in of_ranks)
    assert first == second
    classes, text = first
    assert kind.__name__ in classes and all(word in text for word in words), first
    if kind is CommError:
        assert "ConfigError" not in classes, "an error of ranks that disagree is no bad input"


@on_ranks(4)
def test_a_mesh_of_two_axes_is_refused_and_groups_are_independent() -> None:
    """A mesh of two axes is no group; afterwards the two groups of an axis do not wait."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    rank, group = dist.get_rank(), dist.get_rank() // 2
    refused = raised_by(SequenceParallel, mesh, "g2n1", COST)
    of_axis = SequenceParallel(mesh["sp"], "g2n1", COST)
    of_group = SequenceParallel(
        mesh["sp"].get_group(), "g1n2", COST, plan_group=mesh["sp"].get_group()
    )
    of_world = SequenceParallel(None, "g1n1+g3n1", COST)
    assert of_axis.rank == of_group.rank == rank % 2 and of_world.rank == rank
    own = of_axis.plan([5 + group, 2])
    assert own.plan.seq_lens.tolist() == [5 + group, 2] * 2
    flat, world = of_group.plan([3 + rank]), of_world.plan([rank])
    for step, num_rows in ((own, 7 + group), (world, rank), (flat, 3 + rank), (own, 7 + group)):
        x = 100 * rank + torch.arange(num_rows)
        q = torch.rand(step.local.positions.size, 3, 2)
        assert step.attend(q, q, q).shape == q.shape
        moved = step.route(x=x)["x"]
        assert torch.equal(step.restore(moved), x)
        if step is own:
            assert bool((moved // 200 == group).all())
    if group == 0:  # only one of the two groups takes another step
        assert of_axis.plan([9]).plan.num_ranks == 2
    values = torch.ones(1 + rank, requires_grad=True)
    data_group = dist.group.WORLD
    everywhere = SequenceParallel(mesh["sp"], "g2n1", COST, data_group=data_group).plan([])
    everywhere.mean(values).backward()
    assert values.grad is not None and bool((values.grad == 4 / 10).all())
    classes, text = refused
    assert "ConfigError" in classes and "('dp', 'sp')" in text and "mesh['name']" in text


def without_a_world() -> Error:
    dist.destroy_process_group()
    return raised_by(SequenceParallel, None, "g1n1", COST)


def test_torch_distributed_must_be_initialised() -> None:
    assert "init_process_group" in run_ranks(without_a_world, 1)[0][1]


@on_ranks(2)
def test_what_is_legal_is_planned() -> None:
    """Lengths of any kind of whole number, and of more sequences than the first gather holds."""
    rank = dist.get_rank()
    for lens in ([3.0], np.array([3], np.int32), torch.tensor([3]), (3,)):
        assert made().plan(lens).plan.seq_lens.tolist() == [3, 3]  # pyright: ignore
    parallel = made("g2n1")
    for count in (3, 64, 65, 1000, 2, 1001):
        lens = [7, 1] if rank else list(range(count))
        step = parallel.plan(lens)
        assert step.plan.seq_lens.tolist() == [*range(count), 7, 1]
        x = torch.arange(sum(lens))
        assert torch.equal(step.restore(step.route(x=x)["x"]), x)
    within = made("g2n1", limits=Limits(tokens=10))
    assert within.plan([20] if rank else []).plan.tokens.tolist() == [10, 10]
