"""What one rank or all ranks give wrongly is the same error on every rank, and all go on."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bascule import (
    BalancedLoader,
    Limits,
    SequenceParallel,
    Sequences,
    TransformerCost,
)
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
from tests.helpers.ranks import raised_by, run_ranks

SECONDS = TransformerCost(64, seconds_per_unit=1e-3)
Error = tuple[list[str], str]


def cluster_of(flops_per_s: float, ranks_per_node: int = 2) -> Cluster:
    return Cluster(1, ranks_per_node, flops_per_s, 1 << 34, 1e11, 1e10, 1e-5)


def made(topology: str = "g1n1", cost: Any = COST, **settings: Any) -> SequenceParallel:
    return SequenceParallel(None, topology, cost, **settings)


def planned(lens: Any = (3,), **settings: Any) -> object:
    return made(**settings).plan(lens)


def planned_by(name: str) -> object:
    return planned(planner=name)


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


def attended_with_masks(lens: Any, kinds: Any = None, contexts: Any = None, **call: Any) -> object:
    step = made("g1r2n1").plan(lens if kinds is None else Sequences(lens, kinds, contexts))
    q = torch.zeros(step.local.positions.size, 4, 4)
    if contexts is None:
        return step.attend(q, q, q, causal=call.get("causal", False))
    k = torch.zeros(6, 4, 4)
    step.route_contexts(text=torch.zeros(call.get("rows", 3), 4))
    return step.attend_contexts(q, k, call.get("values", k))


def on_mesh(tokens: int = 3, degrees: tuple[int, int] = (2, 1), **settings: Any) -> object:
    names = ("ring", "ulysses")
    mesh = AttentionMesh.of(init_device_mesh("cpu", degrees, mesh_dim_names=names))
    q = torch.zeros(1, 4, tokens, 8)
    return attention(q, q, q, mesh, options=AttentionOptions(**settings))


def on_an_axis(name: str) -> object:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=(name, "ring"))
    return AttentionMesh.of(mesh)


def sparse(**call: Any) -> object:
    """Masks of two heads and eight blocks, with plans and masks that differ."""
    mesh = AttentionMesh.of(
        init_device_mesh("cpu", call.get("degrees", (2, 1)), mesh_dim_names=("ring", "ulysses"))
    )
    lens = block_lens((32,), 4)
    layout = BlockLayout.striped(lens, 1, 2)
    masks = np.tril(np.ones((2, 8, 8), bool)) if "kind" not in call else np.ones((2, 8, 8), bool)
    plan = SparsePlanner(1, 2).plan(masks, layout, layout, num_kv_heads=2)
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


def gathered(*shape: int) -> object:
    return made("g2n1").plan([4]).gather_samples(torch.zeros(shape))


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


def both(**wrong: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return wrong, wrong


ENDED = ("this iteration was ended by close(), or by another iteration",)
MASK = ("rank 1", "give a bool tensor of (4,) on the host")
Row = tuple[Callable[..., object], tuple[dict[str, Any], dict[str, Any]], type, tuple[str, ...]]
ROWS: dict[str, Row] = {
    # Settings.
    "topology": (made, one("topology", "g2n1"), CommError, ("disagree on topology", "g2n1")),
    "topology of one rank": (made, one("topology", "g1nx"), ConfigError, ("rank 1", "'g1nx'")),
    "ranks left over": (made, both(topology="g3n1"), ConfigError, ("world of 2",)),
    "bag of no rank": (made, both(topology="g0n1"), ConfigError, ("'g0n1'",)),
    "topology with a comma": (made, both(topology="g1n1,g1n1"), ConfigError, ("'g1n1,g1n1'",)),
    "topology of nothing": (made, both(topology=""), ConfigError, ("''",)),
    "cost": (
        made,
        one("cost", TransformerCost(64, gamma=1.5)),
        CommError,
        ("disagree on cost", "gamma=1.5", "ranks [0]: ", "ranks [1]: "),
    ),
    "cost of the user": (
        made,
        one("cost", lambda lens: np.asarray(lens) * 1.0),
        CommError,
        ("disagree on cost",),
    ),
    "cost, changed later": (
        changed_cost,
        ({"cost": COST}, {"cost": TransformerCost(65)}),
        CommError,
        ("disagree on cost",),
    ),
    "planner": (
        made,
        one("planner", "knapsack"),
        CommError,
        ("disagree on planner", "knapsack"),
    ),
    "no planner": (planned_by, both(name="magic"), ConfigError, ("'magic'",)),
    "locality_tolerance": (
        made,
        one("locality_tolerance", 0.5),
        CommError,
        ("disagree on locality_tolerance",),
    ),
    "limits": (
        made,
        one("limits", Limits(tokens=100)),
        CommError,
        ("disagree on limits", "tokens=100"),
    ),
    "cluster": (
        made,
        (
            {"cost": SECONDS, "cluster": cluster_of(1e12)},
            {"cost": SECONDS, "cluster": cluster_of(2e12)},
        ),
        CommError,
        ("disagree on cluster",),
    ),
    "cluster of one rank": (
        made,
        ({"cost": SECONDS}, {"cost": SECONDS, "cluster": cluster_of(1e12)}),
        CommError,
        ("cluster",),
    ),
    "kernel": (made, one("kernel", "plain"), CommError, ("kernel",)),
    "timeout": (
        lambda timeout_s: made(timeout_s=timeout_s),
        ({"timeout_s": 60.0}, {"timeout_s": 30.0}),
        CommError,
        ("timeout_s",),
    ),
    "auto without a cluster": (made, both(topology="auto"), ConfigError, ("auto", "a cluster")),
    "auto on four ranks": (
        made,
        both(topology="auto", cluster=cluster_of(1e12, ranks_per_node=4)),
        ConfigError,
        ("4", "2"),
    ),
    "long settings": (
        agreed,
        ({"cost": f"{'x' * 3000}a=0, b"}, {"cost": f"{'x' * 3000}a=1, b{'y' * 2000}"}),
        CommError,
        ("disagree on cost: ranks [0]: .. xxx", "a=0, b; ranks [1]: .. xxx", "a=1, byyy", "y ..."),
    ),
    "no topology": (made, one("topology", None), ConfigError, ("rank 1",)),
    "a list of degrees": (made, one("topology", [1, 2]), ConfigError, ("rank 1",)),
    "speeds of one rank": (with_speeds, both(speeds=[1.0]), ConfigError, ("of the 2 ranks",)),
    "speeds": (
        with_speeds,
        ({"speeds": [1.0, 1.0]}, {"speeds": [1.0, 0.5]}),
        CommError,
        ("disagree on speeds",),
    ),
    # Lengths.
    "length below 0": (
        planned,
        one("lens", [4, -1]),
        ConfigError,
        ("step 1, plan: rank 1 of group 'plan': sequence 1: length -1 ",),
    ),
    "half a token": (planned, one("lens", [2.5]), ConfigError, ("rank 1", "length 2.5 ")),
    "no number": (planned, one("lens", [math.nan]), ConfigError, ("rank 1", "length nan ")),
    "infinite": (planned, one("lens", [math.inf]), ConfigError, ("rank 1", "inf")),
    "two dims": (planned, one("lens", [[1, 2]]), ConfigError, ("rank 1",)),
    "text": (planned, one("lens", ["x"]), ConfigError, ("rank 1",)),
    "too long": (planned, one("lens", [2**41]), ConfigError, ("rank 1", "2^40")),
    "truth": (planned, one("lens", [True]), ConfigError, ("rank 1",)),
    "beyond 64 bits": (planned, one("lens", [2**70]), ConfigError, ("rank 1",)),
    "no lengths": (planned, one("lens", None), ConfigError, ("rank 1",)),
    "ragged": (planned, one("lens", [[3], [4, 5]]), ConfigError, ("rank 1",)),
    "on no device": (planned, one("lens", torch.ones(1, device="meta")), ConfigError, ("rank 1",)),
    "over the limits": (
        planned,
        ({"lens": [1], "limits": Limits(tokens=10)}, {"lens": [21], "limits": Limits(tokens=10)}),
        PlanError,
        ("rank 1, sequence 0: 21 tokens", "10"),
    ),
    # Steps of several microbatches.
    "microbatches": (
        step_planned,
        one("lens", [[1]]),
        CommError,
        ("microbatches", "1, sync=step", "2, sync=step"),
    ),
    "sync": (
        step_planned,
        one("sync", "microbatch"),
        CommError,
        ("2, sync=step", "2, sync=microbatch"),
    ),
    "no sync": (step_planned, one("sync", "never"), ConfigError, ("'never'", "rank 1")),
    "length of a microbatch": (
        step_planned,
        one("lens", [[1], [-2]]),
        ConfigError,
        ("microbatch 1", "-2", "rank 1"),
    ),
    "no microbatch": (step_planned, both(lens=[]), ConfigError, ("no microbatches",)),
    "a microbatch over the limits": (
        step_planned,
        both(lens=[[20], [20]], limits=Limits(tokens=12)),
        PlanError,
        ("microbatch 0", "20"),
    ),
    # Errors of the user's code.
    "a failing rank": (
        failed,
        ({"error": None}, {"error": OSError("photo 7 is unreadable")}),
        CommError,
        ("rank 1", "OSError", "photo 7 is unreadable"),
    ),
    "failing ranks": (
        failed,
        both(error=ValueError("broken " + "x" * 1000)),
        CommError,
        ("also on ranks [1]", "broken xxx"),
    ),
    # Tensors.
    "form of rows: dtype": (
        routed,
        one("form", "float64"),
        CommError,
        ("x float64[6]", "x float32[6]", "ranks [0]"),
    ),
    "form of rows: name": (routed, one("form", "y"), CommError, ("ranks [1]",)),
    "form of rows: gradient": (routed, one("form", "with gradient"), CommError, ("with gradient",)),
    "form of rows: width": (routed, one("form", "narrow"), CommError, ("ranks [1]",)),
    "form of rows: number": (routed, one("form", "x, ids"), CommError, ("ranks [1]",)),
    "form of rows: order": (
        routed,
        ({"form": "x, ids"}, {"form": "ids, x"}),
        CommError,
        ("ranks [1]",),
    ),
    "rows of one rank": (routed, one("form", "3 rows"), ConfigError, ("shape (3, 6)", "4 rows")),
    "rows": (routed, both(form="3 rows"), ConfigError, ("4 rows",)),
    "no dims": (routed, both(form="no dims"), ConfigError, ("4 rows",)),
    "no tensor": (routed, both(form="nothing"), ConfigError, ("at least one tensor",)),
    "restored dtype": (restored, one("dtype", torch.int8), CommError, ("ranks [1]",)),
    "device": (restored, both(device="meta"), ConfigError, ("meta",)),
    "gathered": (
        lambda shape: gathered(*shape),
        ({"shape": (1, 3)}, {"shape": (1, 2)}),
        CommError,
        ("ranks [1]",),
    ),
    "a mask of 3 rows": (counted, one("mask", [True] * 3), ConfigError, MASK),
    "a mask of numbers": (counted, one("mask", [1] * 4), ConfigError, MASK),
    "a mask elsewhere": (
        counted,
        one("mask", torch.ones(4, dtype=torch.bool, device="meta")),
        ConfigError,
        MASK,
    ),
    # Attention and means.
    "heads of one rank": (attended, one("q", (6, 2, 16)), CommError, ("attend",)),
    "rows of attention": (attended, one("q", (7, 4, 8)), ConfigError, ("rank 1", "attend")),
    "heads that do not divide": (
        attended,
        both(kv=(6, 3, 8)),
        ConfigError,
        ("4 query heads for 3 key-value heads",),
    ),
    "no heads": (attended, both(kv=(6, 0, 8)), ConfigError, ("0",)),
    "more ranks than heads": (
        attended,
        both(kv=(6, 1, 8)),
        ConfigError,
        ("1 key-value heads", "at most 1 ranks", "use g1r2n1"),
    ),
    "too few tokens": (attended, both(q=(5, 4, 8)), ConfigError, ("gives this rank 6",)),
    "two dims of heads": (attended, both(q=(6, 4)), ConfigError, ("(6, 4)",)),
    "kernel of a device": (
        attended,
        both(kernel="aten_flash"),
        ConfigError,
        ("'aten_flash' runs on CUDA devices",),
    ),
    "spans of one rank": (
        attended_with_masks,
        ({"lens": [4], "kinds": "causal"}, {"lens": [4], "kinds": "casual"}),
        ConfigError,
        ("rank 1", "casual"),
    ),
    "masks of one rank": (
        attended_with_masks,
        ({"lens": [5]}, {"lens": [4], "kinds": "causal"}),
        ConfigError,
        ("ranks [0] give sequences without masks",),
    ),
    "masks, and causal too": (
        attended_with_masks,
        both(lens=[5], kinds="full", causal=True),
        ConfigError,
        ("planned with masks",),
    ),
    "rows of contexts of one rank": (
        attended_with_masks,
        (
            {"lens": [4], "contexts": [3], "kinds": "full"},
            {"lens": [4], "contexts": [3], "kinds": "full", "rows": 2},
        ),
        ConfigError,
        ("rank 1", "3 rows"),
    ),
    **{
        f"values of contexts {shape} {dtype}": (
            attended_with_masks,
            both(lens=[4], kinds="full", contexts=[3], values=torch.zeros(shape, dtype=dtype)),
            ConfigError,
            ("attend_contexts",),
        )
        for shape, dtype in (
            ((6, 1, 4), torch.float32),
            ((5, 4, 4), torch.float32),
            ((6, 4, 2), torch.float32),
            ((6, 4, 4), torch.float64),
        )
    },
    "mesh: layout of others": (
        on_mesh,
        both(layout=SequenceLayout((9,), 2, 1)),
        ConfigError,
        ("q has 3 tokens, and the layout gives this rank",),
    ),
    "mesh: other degrees": (
        on_mesh,
        both(layout=SequenceLayout((6,), 1, 2)),
        ConfigError,
        ("1 x 2 ranks on a mesh of 2 x 1",),
    ),
    "mesh: lengths without a layout": (
        on_mesh,
        ({"degrees": (1, 2), "tokens": 5}, {"degrees": (1, 2), "tokens": 4}),
        CommError,
        ("ranks [0]: a layout of (10,) tokens", "ranks [1]: a layout of (8,) tokens"),
    ),
    "mesh: tokens of one rank": (
        on_mesh,
        both(layout=SequenceLayout((7,), 2, 1), tokens=4),
        ConfigError,
        ("q has 4 tokens, and the layout gives this rank 3 of 7",),
    ),
    "mesh: kernel without LSE": (on_mesh, both(kernel="sdpa"), ConfigError, ("log-sum-exp",)),
    "mesh: an axis": (on_an_axis, both(name="dp"), ConfigError, ("('dp', 'ring')",)),
    "sparse: plan": (sparse, one("kind", "full"), CommError, ("disagree on the form",)),
    "sparse: values of one rank": (sparse, one("first", 1), ConfigError, ("the plan has",)),
    "sparse: degrees": (
        sparse,
        both(degrees=(1, 2)),
        ConfigError,
        ("a plan for 1 x 2 ranks (Ulysses x ring) on a mesh of 2 x 1",),
    ),
    "sparse: whole masks": (sparse, both(masks="whole"), ConfigError, ("rows of a mask",)),
    "sparse: kernel": (sparse, both(kernel="cpu_flash"), ConfigError, ("kernel 'cpu_flash'",)),
    "a mean of a scalar": (averaged, one("values", ()), ConfigError, ("rank 1", "mean")),
    "weights of one rank": (averaged, one("weights", torch.ones(6)), CommError, ("mean",)),
    # Loaders.
    **{
        f"loader: {name}": (
            loader,
            ({name: first}, {name: second}),
            CommError,
            (f"disagree on {name}: ranks [0]: ", word),
        )
        for name, first, second, word in (
            ("cost", COST, TransformerCost(65), "d_model=65"),
            ("accumulate", 1, 2, "ranks [1]: 2"),
            ("ends", "finish", "drop_last", "ranks [0]: finish"),
            ("limits", None, Limits(tokens=5), "tokens=5"),
            ("min_gain", 0.0, 0.5, "ranks [1]: 0.5"),
            ("bytes_per_s", 10.0, FAST, "10.0"),
            ("length_fn", len, more_tokens, "more_tokens"),
            ("timeout_s", 60.0, 61.0, "61.0"),
        )
    },
    **{
        f"loader: no {name}": (
            resumed if name == "load" else loaded,
            ({"samples": Odd()}, {"samples": Odd(name)}),
            CommError,
            ("rank 1", f"no {name}"),
        )
        for name in ("len", "iter", "save", "epoch", "load")
    },
    **{
        f"loader: cost {word} {num_right}, {place}": (
            costed,
            (
                {"value": value if place == "everywhere" else right, "num_right": num_right},
                {"value": value, "num_right": num_right},
            ),
            # Ranks compare what a cost model gives when they make a loader.
            CommError if (word, num_right, place) == ("nan", 0, "one rank") else ConfigError,
            (word,),
        )
        for word, value in (("nan", lambda lens: lens * np.nan), ("ZeroDivision", lambda _: 1 / 0))
        for num_right in (0, 3)
        for place in ("everywhere", "one rank")
    },
    "loader: room": (
        lambda num: loaded(
            samples=num * [2 * group for group in lists()], max_bytes_in_flight=1, ends="finish"
        ),
        ({"num": 1}, {"num": 0}),
        PlanError,
        ("would receive",),
    ),
    "loader: counts": (resumed, both(counts=(90, 90)), ConfigError, ("and there are 5",)),
    "loader: ranks": (resumed, both(counts=(1, 1, 1)), ConfigError, ("3 loaders stopped",)),
    "loader: state": (resumed, one("counts", (2, 1)), CommError, ("disagree on step",)),
    "loader: epoch": (of_epoch, ({"epoch": 0}, {"epoch": 3}), CommError, ("disagree on step",)),
    "loader: no epoch": (of_epoch, both(epoch=-1), ConfigError, ("epoch is -1",)),
    "loader: another": (
        one_of_two,
        ({"index": 0}, {"index": 1}),
        CommError,
        ("disagree on loader: ranks [0]: number ",),
    ),
    "loader: an int": (loaded, both(samples=5), CommError, ("'int' object is not iterable",)),
    "loader: no samples": (
        loaded,
        both(samples=[[None]] * 3),
        ConfigError,
        ('a NoneType without "input_ids"',),
    ),
    "loader: accumulate of one rank": (
        loader,
        one("accumulate", 0),
        ConfigError,
        ("rank 1", "BalancedLoader(accumulate=0)"),
    ),
    "loader: no cost": (
        lambda: loader().set_cost(5),  # pyright: ignore[reportArgumentType]
        both(),
        ConfigError,
        ("cost model is 5",),
    ),
    "loader: two at once": (two_at_once, both(), ConfigError, ENDED),
    "loader: closed within": (closed_within, both(), ConfigError, ENDED),
    "loader: loaded within": (loaded_within, both(), ConfigError, ("close the loader first",)),
    "tracker": (tracked, one("warmup", 20), CommError, ("warmup=20",)),
    # Errors that ranks tell each other: bad input, or not.
    "bad input": (
        agreed,
        ({"error": None}, {"error": ConfigError("one")}),
        ConfigError,
        ("one",),
    ),
    "no plan": (agreed, ({"error": None}, {"error": PlanError("one")}), ConfigError, ("one",)),
    "another error": (agreed, ({"error": None}, {"error": KeyError(1)}), CommError, ("KeyError",)),
}


def refused(names: list[str]) -> dict[str, Error]:
    """Return the error of each row; after each all ranks plan and move rows, at the end samples."""
    errors: dict[str, Error] = {}
    for name in names:
        call, arguments, _, _ = ROWS[name]
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
    *_, kind, words = ROWS[name]
    first, second = (errors[name] for errors in of_ranks)
    assert first == second
    classes, text = first
    assert kind.__name__ in classes and all(word in text for word in words), first
    if kind is CommError:
        assert "ConfigError" not in classes, "an error of ranks that disagree is no bad input"


def other_groups() -> Error:
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
    return refused


def test_a_mesh_of_two_axes_is_refused_and_groups_are_independent() -> None:
    for classes, text in run_ranks(other_groups, 4):
        assert "ConfigError" in classes and "('dp', 'sp')" in text and "mesh['name']" in text


def without_a_world() -> Error:
    dist.destroy_process_group()
    return raised_by(SequenceParallel, None, "g1n1", COST)


def test_torch_distributed_must_be_initialised() -> None:
    assert "init_process_group" in run_ranks(without_a_world, 1)[0][1]


def legal() -> None:
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


def test_what_is_legal_is_planned() -> None:
    run_ranks(legal, 2)
