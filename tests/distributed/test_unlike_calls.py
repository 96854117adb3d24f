"""Ranks that make other calls than the others: never each other's rows, never a wait, an error."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bascule.attention.api import (
    AttentionMesh,
    AttentionOptions,
    SequenceLayout,
    attention,
    gather,
    split,
)
from bascule.attention.sparse.attend import rows_of, sparse_attention
from bascule.comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from bascule.comm.groups import RankGroup
from bascule.comm.guard.calls import Begun, Call, Calls
from bascule.comm.guard.notes import Failure, Position, Waiting
from bascule.comm.guard.verdicts import Verdict, judge
from bascule.comm.guard.watch import Watch
from bascule.errors import CommError, ConfigError
from bascule.parallel import SequenceParallel
from bascule.plan.sparse import BlockLayout, SparsePlanner
from tests.helpers.cases import COST
from tests.helpers.mesh_cases import as_given
from tests.helpers.ranks import raised_by, run_ranks

KNOWN_WITHIN_S = 30.0  # of waits that the groups would allow 60 s; on a quiet machine 2 s
LENS = [30, 9, 2], [4]  # on two ranks; whoever balances them moves some
Heard = tuple[list[str], str, float]


def heard(fn: Callable[[], Any]) -> Heard:
    start = time.monotonic()
    classes, text = raised_by(fn)
    return classes, text, time.monotonic() - start


def assert_known(of_rank: list[Heard], *parts: str) -> None:
    """All ranks have an error, in time; one of the texts has all parts."""
    for classes, text, seconds in of_rank:
        assert {"CommError", "ConfigError"} & set(classes), text
        assert seconds < KNOWN_WITHIN_S, (seconds, text)
    assert any(all(part in text for part in parts) for _, text, _ in of_rank), of_rank


def parallel_of(topology: str = "g1n2") -> SequenceParallel:
    return SequenceParallel(None, topology, COST, timeout_s=60)


def tokens() -> int:
    return sum(LENS[dist.get_rank()])


# --- bags -----------------------------------------------------------------------------------------


def two_exchanges() -> Heard:
    """Of unlike width, each agreed on before."""
    step = parallel_of().plan(LENS[dist.get_rank()])
    narrow, wide = torch.randn(tokens(), 2), torch.randn(tokens(), 9)
    step.route(x=narrow)
    step.route(y=wide)
    calls = [lambda: step.route(x=narrow), lambda: step.route(y=wide)]
    order = calls[:: -1 if dist.get_rank() else 1]
    return heard(lambda: [call() for call in order])


def two_steps() -> Heard:
    parallel = parallel_of()
    steps = [parallel.plan(LENS[dist.get_rank()]), parallel.plan(LENS[dist.get_rank()])]
    x = torch.randn(tokens(), 2)
    for step in steps:
        step.route(x=x)
    order = steps[:: -1 if dist.get_rank() else 1]
    return heard(lambda: [step.route(x=x) for step in order])


def two_steps_in_which_no_row_moves() -> Heard:
    """Ranks meet all the same: who is in another call, or gone, is noticed where it happens."""
    parallel = parallel_of()
    steps = [parallel.plan([4]), parallel.plan([4])]
    assert not any(step.plan.moved_tokens for step in steps)
    for step in steps:
        step.route(x=torch.ones(4, 2))
    order = steps[:: -1 if dist.get_rank() else 1]
    return heard(lambda: [step.route(x=torch.ones(4, 2)) for step in order])


def two_means() -> Heard:
    parallel = parallel_of()
    steps = [parallel.plan(LENS[dist.get_rank()]), parallel.plan(LENS[dist.get_rank()])]
    for step in steps:
        step.mean(torch.ones(tokens()))
    order = steps[:: -1 if dist.get_rank() else 1]
    return heard(lambda: [step.mean(torch.ones(tokens()) * step.number) for step in order])


def two_backwards() -> Heard:
    parallel = parallel_of()
    losses = []
    for _ in range(2):
        step = parallel.plan(LENS[dist.get_rank()])
        x = torch.randn(tokens(), 2, requires_grad=True)
        losses.append(step.restore(step.route(x=x)["x"]).sum())
    order = losses[:: -1 if dist.get_rank() else 1]
    return heard(lambda: [loss.backward() for loss in order])


def two_samples() -> Heard:
    parallel = parallel_of()
    steps = [parallel.plan(LENS[dist.get_rank()]), parallel.plan(LENS[dist.get_rank()])]
    for step in steps:
        step.gather_samples(torch.ones(len(LENS[dist.get_rank()]), 3))
    order = steps[:: -1 if dist.get_rank() else 1]
    return heard(
        lambda: [step.gather_samples(torch.ones(len(LENS[dist.get_rank()]), 3)) for step in order]
    )


def another_collective() -> Heard:
    step = parallel_of().plan(LENS[dist.get_rank()])
    x = torch.ones(tokens(), 2)
    step.mean(step.restore(step.route(x=x)["x"]))
    if dist.get_rank():
        return heard(lambda: step.mean(x))
    return heard(lambda: step.route(x=x))


def plan_for_route() -> Heard:
    parallel = parallel_of()
    step = parallel.plan(LENS[dist.get_rank()])
    x = torch.ones(tokens(), 2)
    step.route(x=x)
    if dist.get_rank():
        return heard(lambda: parallel.plan(LENS[dist.get_rank()]))
    return heard(lambda: step.route(x=x))


def new_form_for_old() -> Heard:
    step = parallel_of().plan(LENS[dist.get_rank()])
    step.route(x=torch.ones(tokens(), 2))
    return heard(lambda: step.route(x=torch.ones(tokens(), 2 + dist.get_rank())))


def unlike_attention() -> Heard:
    step = parallel_of("g2n1").plan(LENS[dist.get_rank()])
    x = torch.randn(step.local.positions.size, 4, 2)
    for causal in (False, True):
        step.attend(x, x, x, causal=causal)
    return heard(lambda: step.attend(x, x, x, causal=bool(dist.get_rank())))


def unlike_attention_in_rings() -> Heard:
    step = parallel_of("g1r2n1").plan(LENS[dist.get_rank()])
    x = torch.randn(step.local.positions.size, 4, 2)
    for scale in (0.5, 1.0):
        step.attend(x, x, x, scale=scale)
    return heard(lambda: step.attend(x, x, x, scale=0.5 + 0.5 * dist.get_rank()))


def one_plans_once_more() -> Heard:
    parallel = parallel_of()
    parallel.plan(LENS[dist.get_rank()])
    if dist.get_rank():
        step = parallel.plan
        return heard(lambda: [step([1]), step([1])])
    return heard(lambda: parallel.plan([1]).route(x=torch.ones(1, 2)))


BAGS: dict[Callable[[], Heard], tuple[str, ...]] = {
    two_exchanges: ("unlike calls", "all_to_all (route)"),
    two_steps: ("unlike calls", "step 1: all_to_all (route)", "step 2: all_to_all (route)"),
    two_steps_in_which_no_row_moves: ("unlike calls", "step 1: all_to_all", "step 2: all_to_all"),
    two_means: ("unlike calls", "step 1: all_reduce (mean)", "step 2: all_reduce (mean)"),
    two_backwards: ("unlike calls", "step 1: all_to_all", "step 2: all_to_all"),
    two_samples: ("unlike calls", "all_gather (samples)"),
    another_collective: ("unlike calls", "all_reduce (mean)", "all_to_all (route)"),
    plan_for_route: ("wait for each other", "all_gather (plan)", "all_to_all (route)"),
    new_form_for_old: ("wait for each other", "all_gather (route)", "all_to_all (route)"),
    unlike_attention: ("unlike calls", "all_to_all (tokens to heads)"),
    unlike_attention_in_rings: ("unlike calls", "ring (keys and values, round 1)"),
    one_plans_once_more: ("step 3: all_gather (plan)", "step 2: all_gather (route)"),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("case", BAGS, ids=lambda case: case.__name__)
def test_unlike_calls_in_bags_end_all_ranks(case: Callable[[], Heard]) -> None:
    assert_known(run_ranks(case, 2), *BAGS[case])


# --- meshes ---------------------------------------------------------------------------------------


def mesh_of(*degrees: int) -> AttentionMesh:
    names = ("ring", "ulysses")
    return AttentionMesh.of(init_device_mesh("cpu", degrees, mesh_dim_names=names))


Settings = dict[str, Any]


@dataclass(frozen=True)
class Lay:
    """A layout of eight tokens, on any mesh of two ranks."""

    zigzag: bool
    stripe: int

    def on(self, degrees: tuple[int, int]) -> SequenceLayout:
        return SequenceLayout((8,), *degrees, zigzag=self.zigzag, stripe=self.stripe)


DIAGONAL = torch.ones(8, 8).tril().bool()
SETTINGS: dict[str, tuple[Settings, Settings]] = {
    "causal": ({}, {"is_causal": True}),
    "scale": ({"scale": 1.0}, {"scale": 0.5}),
    "a mask or none": ({}, {"attn_mask": DIAGONAL}),
    "other values of a mask": ({"attn_mask": DIAGONAL}, {"attn_mask": DIAGONAL.T}),
    "other values of a bias": (
        {"attn_mask": torch.zeros(1, 4, 8, 8)},
        {"attn_mask": torch.ones(1, 4, 8, 8).triu()},
    ),
    "zigzag": (
        {"layout": Lay(True, 0), "is_causal": True},
        {"layout": Lay(False, 0), "is_causal": True},
    ),
    "stripe": ({"layout": Lay(False, 2)}, {"layout": Lay(False, 1)}),
    "kernel": ({"kernel": "plain"}, {"kernel": "cpu_flash"}),
    "causal and a mask": (
        {"attn_mask": DIAGONAL, "is_causal": True},
        {"attn_mask": ~DIAGONAL, "is_causal": True},
    ),
}


def unlike_settings(degrees: tuple[int, int], what: str, used_before: bool) -> Heard:
    mesh = mesh_of(*degrees)
    both: list[Settings] = [
        {name: one.on(degrees) if isinstance(one, Lay) else one for name, one in settings.items()}
        for settings in SETTINGS[what]
    ]
    q = torch.randn(1, 4, 4, 8)
    for settings in both if used_before else ():
        attention(q, q, q, mesh, **as_given(settings))
    settings = both[dist.get_rank() % 2]
    return heard(lambda: attention(q, q, q, mesh, **as_given(settings)))


@pytest.mark.some(6)
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.parametrize("used_before", [True, pytest.param(False, marks=pytest.mark.stress)])
def test_unlike_settings_of_mesh_attention_end_all_ranks(
    what: str, degrees: tuple[int, int], used_before: bool
) -> None:
    parts = ("unlike calls",) if used_before else ()
    assert_known(run_ranks(unlike_settings, 2, degrees, what, used_before), *parts)


def replicated_on_one_rank() -> Heard:
    """Each rank answers for four tokens; one of them has those of both in the first segment."""
    mesh, is_odd = mesh_of(1, 2), dist.get_rank() == 1
    layout = SequenceLayout((4, 4), 1, 2, replicated=(0,) if is_odd else ())
    q = torch.randn(1, 2, 6 if is_odd else 4, 8)
    return heard(lambda: attention(q, q, q, mesh, options=AttentionOptions(layout=layout)))


def test_tokens_replicated_on_one_rank_only_end_all_ranks() -> None:
    assert_known(run_ranks(replicated_on_one_rank, 2), "disagree", "replicated segments (0,)")


def known_forms_of_equal_size(degrees: tuple[int, int]) -> Heard:
    mesh = mesh_of(*degrees)
    both = torch.randn(1, 2, 16, 8), torch.randn(2, 2, 8, 8)
    for q in both:
        attention(q, q, q, mesh)
    q = both[dist.get_rank()]
    return heard(lambda: attention(q, q, q, mesh))


def one_call_less(degrees: tuple[int, int]) -> Heard:
    """As by a cache of steps that one rank uses, and the other does not."""
    mesh = mesh_of(*degrees)
    q = torch.randn(1, 2, 4, 8)
    attention(q, q, q, mesh)
    group = mesh.whole
    assert group is not None

    def run() -> None:
        if dist.get_rank() == 0:
            attention(q, q, q, mesh)
        all_gather(group, Call("gather"), q)

    return heard(run)


def backward_elsewhere(degrees: tuple[int, int]) -> Heard:
    mesh = mesh_of(*degrees)
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = attention(q, q, q, mesh)
    if dist.get_rank() == 0:
        return heard(out.sum().backward)
    return heard(lambda: attention(q, q, q, mesh))


def two_backwards_of_equal_calls(degrees: tuple[int, int]) -> Heard:
    mesh = mesh_of(*degrees)
    leaves = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(2)]
    outs = [attention(q, q, q, mesh) for q in leaves]
    for out in outs:  # in the same order on all ranks: fine
        out.square().sum().backward(retain_graph=True)
    order = outs[:: -1 if dist.get_rank() else 1]
    return heard(lambda: [out.square().sum().backward() for out in order])


MESH_CASES = [
    known_forms_of_equal_size,
    backward_elsewhere,
    one_call_less,
    two_backwards_of_equal_calls,
]


@pytest.mark.some(4)
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
@pytest.mark.parametrize("case", MESH_CASES)
def test_unlike_calls_on_meshes_end_all_ranks(
    case: Callable[[tuple[int, int]], Heard], degrees: tuple[int, int]
) -> None:
    assert_known(run_ranks(case, 2, degrees))


def sparse_unlike(what: str, ring: int, ulysses: int) -> Heard:
    mesh = mesh_of(ring, ulysses)
    home = BlockLayout.striped([4] * 8, ulysses, ring)
    masks = np.random.default_rng(0).random((2, 8, 8)) < 0.6
    masks |= np.eye(8, dtype=bool)
    other = masks.copy()
    other[1, 3] = ~other[1, 3]
    plan = SparsePlanner(ulysses, ring).plan(masks, home)
    x = torch.randn(1, 2, 16, 8)
    sparse_attention(x, x, x, mesh, plan, rows_of(masks))
    odd = dist.get_rank() == 1
    seen = rows_of(other if odd and what == "masks" else masks)
    scale = 0.7 if odd and what == "scale" else 1.0
    return heard(lambda: sparse_attention(x, x, x, mesh, plan, seen, scale=scale))


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
@pytest.mark.parametrize("what", ["masks", "scale"])
def test_unlike_sparse_attention_ends_all_ranks(what: str, degrees: tuple[int, int]) -> None:
    assert_known(run_ranks(sparse_unlike, 2, what, *degrees), "unlike calls")


# --- meshes in any order --------------------------------------------------------------------------


def collectives_by_place(group: RankGroup, own: int) -> None:
    call = Call("test")
    assert all_gather(group, call, torch.tensor([own])).flatten().tolist() == [0, 1, 2, 3]
    x = torch.arange(4.0)[:, None] + 10 * own
    received = torch.empty(4, 1)
    all_to_all(group, call, received, x, [1] * 4, [1] * 4)
    assert received.flatten().tolist() == [own + 10.0 * place for place in range(4)]
    assert reduce_scatter(group, call, x).tolist() == [4.0 * own + 60]
    assert all_reduce(group, call, torch.tensor([float(own)])).tolist() == [6.0]
    large = torch.full((5001,), float(own))
    assert torch.equal(all_reduce(group, call, large), torch.full((5001,), 6.0))
    given = torch.tensor([own])
    assert broadcast(group, call, given).tolist() == [0] and given.tolist() == [own]


def collectives_in_any_order(order: list[list[int]]) -> None:
    device_mesh = DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=("ring", "ulysses"))
    mesh = AttentionMesh.of(device_mesh)
    flat = [rank for row in order for rank in row]
    assert mesh.whole is not None
    own = flat.index(dist.get_rank())
    assert mesh.whole.ranks == tuple(flat) and mesh.whole.rank == own
    # As it is, and as on devices, where the back end's own collectives have another order.
    for group in (mesh.whole, replace(mesh.whole, calls=Calls())):
        collectives_by_place(group, own)
    q = torch.randn(2, 3, 22, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layout = SequenceLayout((5, 17), *mesh.degrees)
    local = split(q, mesh, layout, 2)
    out = gather(
        attention(local, local, local, mesh, options=AttentionOptions(layout=layout)),
        mesh,
        layout,
        2,
    )
    whole = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert float((out - whole).abs().max()) < 1e-12
    out = gather(
        attention(local, local, local, device_mesh, options=AttentionOptions(layout=layout)),
        mesh,
        layout,
        2,
    )
    assert float((out - whole).abs().max()) < 1e-12


@pytest.mark.parametrize("order", [[[0, 2], [1, 3]], [[3, 1], [0, 2]], [[3, 2], [1, 0]]])
def test_the_ranks_of_a_mesh_may_be_in_any_order(order: list[list[int]]) -> None:
    run_ranks(collectives_in_any_order, 4, order)


def meshes_of_unlike_orders() -> None:
    """One after the other on the same ranks, each with forms of its own."""
    q = torch.randn(1, 4, 8, 4, generator=torch.Generator().manual_seed(0))
    whole = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    for order in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]):
        names = ("ring", "ulysses")
        mesh = AttentionMesh.of(DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=names))
        layout = SequenceLayout((8,), *mesh.degrees)
        local = split(q, mesh, layout, 2)
        out = gather(attention(local, local, local, mesh), mesh, layout, 2)
        assert float((out - whole).abs().max()) < 1e-6


def test_meshes_of_unlike_orders_on_the_same_ranks() -> None:
    run_ranks(meshes_of_unlike_orders, 4)


# --- threads --------------------------------------------------------------------------------------


def two_threads() -> list[tuple[float, ...] | str]:
    """By thread, how far off its calls are, or with what it was refused."""
    mesh = mesh_of(1, 2)
    heard: list[tuple[float, ...] | str] = ["", ""]
    done = threading.Event()

    def keep_attending(seed: int) -> None:
        q = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(seed))
        whole = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        rows = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        local, errors = q[:, :, rows], list[float]()
        try:
            for _ in range(5):
                out = attention(local, local, local, mesh)
                errors.append(float((out - whole[:, :, rows]).abs().max()))
            heard[seed] = tuple(errors)
        except (CommError, ConfigError) as error:
            heard[seed] = str(error)
        done.wait(10.0)

    order = [0, 1]
    threads = [threading.Thread(target=keep_attending, args=(seed,)) for seed in order]
    for thread in threads:  # they take turns, and both live
        thread.start()
        thread.join(1.0)
    done.set()
    for thread in threads:
        thread.join()
    return heard


def test_two_threads_on_one_mesh_get_no_wrong_number() -> None:
    first, second = run_ranks(two_threads, 2)
    for heard in (first, second):
        assert isinstance(heard[0], tuple) and max(heard[0]) < 1e-6
        assert isinstance(heard[1], str) and "another thread" in heard[1]


def one_after_the_other() -> list[float]:
    """A thread may take over from one that ended."""
    mesh, errors = mesh_of(1, 2), list[float]()

    def attend() -> None:
        q = torch.ones(1, 2, 4, 4)
        errors.append(float((attention(q, q, q, mesh) - 1.0).abs().max()))

    for _ in range(3):
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
    return errors


def test_a_thread_takes_over_from_one_that_ended() -> None:
    for errors in run_ranks(one_after_the_other, 2):
        assert len(errors) == 3 and max(errors) < 1e-6


def handed_over(skipping: int) -> list[Any]:
    """Three requests in threads that all live; one rank forgets to hand over after the second."""
    mesh, done = mesh_of(1, 2), threading.Event()
    heard: list[Any] = []

    def attend(request: int) -> None:
        torch.manual_seed(request)
        q = torch.randn(1, 2, 8, 4)
        rows = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        whole = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        try:
            out = attention(q[:, :, rows], q[:, :, rows], q[:, :, rows], mesh)
            heard.append(float((out - whole[:, :, rows]).abs().max()))
        except (CommError, ConfigError) as error:
            heard.append(str(error))
        if (request, dist.get_rank()) != (1, skipping):
            mesh.hand_over()
        done.wait(30.0)

    threads = [threading.Thread(target=attend, args=(request,)) for request in range(3)]
    for request, thread in enumerate(threads):
        thread.start()
        while len(heard) <= request:
            time.sleep(0.01)
    done.set()
    for thread in threads:
        thread.join()
    return heard


def test_a_thread_takes_over_where_it_is_handed_over() -> None:
    for errors in run_ranks(handed_over, 2, -1):
        assert len(errors) == 3 and max(errors) < 1e-6


def test_who_is_not_handed_the_mesh_is_refused_and_the_others_hear_it() -> None:
    first, second = run_ranks(handed_over, 2, 1)
    for heard in (first, second):
        assert max(heard[:2]) < 1e-6 and "another thread uses" in heard[2], heard


def test_handing_over_is_a_part_of_the_order_of_calls() -> None:
    marks: list[list[int]] = []
    for place in (1, 1, 2):
        calls, begun = Calls(), list[int]()
        for number in range(3):
            if number == place:
                calls.hand_over()
            begun.append(calls.begin(Call("attend")).mark)
            calls.finish()
        marks.append(begun)
    assert marks[0] == marks[1] and marks[0][0] == marks[2][0] and marks[0][1] != marks[2][1]


def test_a_second_thread_in_a_call_is_refused() -> None:
    calls = Calls()
    calls.begin(Call("first"))
    caught: list[Exception] = []

    def begin() -> None:
        try:
            calls.begin(Call("second"))
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert "another thread" in str(caught[0])
    calls.finish()
    assert calls.begin(Call("second")).number == 1


# --- what is certain of waits ---------------------------------------------------------------------


def position(*waits: Waiting, **begun: list[int]) -> Position:
    calls = {name: tuple((n, 7, f"call {n}") for n in numbers) for name, numbers in begun.items()}
    return Position(1, dict.fromkeys(begun, 1), calls, waits)


def waiting(group: str, needs: tuple[int, ...], number: int, *, id: int = 0) -> Waiting:
    return Waiting(id, 1, group, needs, number, 7, f"{group} {number}")


def judged(wait: Waiting, others: dict[int, Position], **failed: Failure) -> Verdict | None:
    """Of a wait of rank 0."""
    begun = {wait.group: ((wait.number, wait.mark, wait.text),)}
    own = Position(1, {wait.group: 1}, begun, (wait,))
    failures = {int(name.removeprefix("rank")): one for name, one in failed.items()}
    return judge(0, wait, {0: own, **others}.get, failures.get)


def test_slow_ranks_are_waited_for() -> None:
    wait = waiting("all", (1, 2), 5)
    assert judged(wait, {}) is None
    # Rank 1 waits in the same call, or in an earlier one for a rank that computes.
    assert judged(wait, {1: position(waiting("all", (0, 2), 5), all=[4, 5])}) is None
    assert judged(wait, {1: position(waiting("pair", (3,), 2), pair=[2])}) is None
    # It waits in another thread than the one that makes the calls of this group.
    other = Position(1, {"all": 1}, {}, (Waiting(0, 2, "loader", (0,), 3, 7, "loader 3"),))
    assert judged(wait, {1: other}) is None
    # It waits for a third one at the same meeting, which has no calls.
    there = Position(1, {}, {}, (waiting("meeting", (0, 2), 0),))
    assert judged(waiting("meeting", (1, 2), 0), {1: there}) is None
    # It failed after it had come.
    assert judged(wait, {}, rank1=Failure("here", cause="oops", done={"all": 6})) is None


def test_a_circle_of_waits_never_ends() -> None:
    wait = waiting("all", (1, 2), 5)
    found = judged(wait, {1: position(waiting("pair", (0,), 2, id=8), pair=[2])})
    assert found is not None and "rank 0 in all 5; rank 1 in pair 2" in found.text
    assert found.evidence == ((0, 0), (1, 8))
    # Through a third rank; and not, if the third has come.
    chain = {
        1: position(waiting("pair", (2,), 2, id=8), pair=[2]),
        2: position(waiting("three", (0,), 1, id=9), three=[1]),
    }
    found = judged(wait, chain)
    assert found is not None and "rank 2 in three 1" in found.text and len(found.evidence) == 3
    chain[2] = position(waiting("three", (0,), 1, id=9), three=[1], pair=[2], all=[5])
    assert judged(wait, chain) is None


def test_a_rank_that_failed_does_not_come() -> None:
    wait = waiting("all", (1, 2), 5)
    found = judged(wait, {}, rank2=Failure("here", cause="oops", is_input=True, done={"all": 5}))
    assert found is not None and found.text == "rank 2 failed in here: oops" and found.is_input
    assert found.evidence == ((0, 0), (2, None))
    # One that waits for it, too, is freed by that; no circle goes through there.
    chain = {1: position(waiting("pair", (0, 3), 2, id=8), pair=[2])}
    assert judged(wait, chain, rank3=Failure("there", cause="oops")) is None
    # Nor through this one, if it is what failed there.
    circle = {1: position(waiting("pair", (0,), 2, id=8), pair=[2])}
    assert judged(wait, circle, rank0=Failure("here", cause="oops")) is None
    # All failed alike, in the same place, and this one was the first to go on.
    alike = Failure("here", cause="oops", done={"all": 5})
    assert judged(wait, {}, rank0=alike, rank2=alike) is None
    # Both failed, but not in the same place.
    earlier = Failure("there", cause="oops", done={"all": 4})
    found = judged(wait, {}, rank0=alike, rank2=earlier)
    assert found is not None and found.text == "rank 2 failed in there: oops"


def test_another_call_in_its_place_is_certain_at_once() -> None:
    wait = Waiting(0, 1, "all", (1,), 5, 99, "all 5")
    found = judged(wait, {1: position(all=[4, 5])})
    assert found is not None and "unlike calls" in found.text and found.evidence == ()
    assert "rank 0 made all 5 where rank 1 made call 5" in found.text


def suspected() -> None:
    """What looks find of a wait: something else each time, and at last the same."""
    assert dist.group.WORLD is not None
    ended: list[str] = []
    looks: list[int] = []
    is_alike = threading.Event()

    def found(*_: Any) -> Verdict:
        looks.append(len(looks))
        return Verdict("never", ((0, 0 if is_alike.is_set() else len(looks)),))

    watch = Watch(dist.group.WORLD, lambda reason, _: ended.append(reason))
    with mock.patch("bascule.comm.guard.watch.judge", found):
        wait = watch.begin("all", Begun(Call("first"), 0, 7), (0,), "all")
        while len(looks) < 3:
            time.sleep(0.1)
        assert wait.verdict is None and not ended
        is_alike.set()
        while wait.verdict is None:
            time.sleep(0.1)
        watch.end(wait, is_done=False)
        watch.close()
    assert ended == ["never"]


def test_what_is_not_found_twice_ends_no_wait() -> None:
    run_ranks(suspected, 1)


def told_to_nobody() -> None:
    """The rank that has the store ended right after the call that this one waited in."""
    assert dist.group.WORLD is not None
    gone = dist.DistNetworkError("failed to send, got error: Broken pipe")
    watch = Watch(dist.group.WORLD, lambda *_: None)
    wait = watch.begin("all", Begun(Call("last"), 0, 7), (0,), "all")
    wait.is_told = True
    watch._told = "a note of the wait"
    with mock.patch("bascule.comm.guard.notes.erase", side_effect=gone) as erase:
        watch.end(wait, is_done=True)
    assert erase.called
    watch.close()


def test_a_call_that_is_done_needs_no_store() -> None:
    run_ranks(told_to_nobody, 1)


def test_a_position_survives_the_store() -> None:
    one = position(waiting("all", (1, 2), 5), all=[4, 5])
    assert Position.from_json(one.to_json()) == one
