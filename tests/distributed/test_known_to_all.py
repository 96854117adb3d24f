"""A rank that fails alone: all others end at once, with its error, whatever they wait for."""

import copy
import gc
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bascule.attention import packed
from bascule.comm.groups import member_of, resolve
from bascule.comm.guard import failures, notes
from bascule.errors import CommError, ConfigError
from bascule.parallel import ParallelOptions, SequenceParallel, Step
from tests.helpers.cases import COST
from tests.helpers.ranks import raised_by, run_ranks, run_to_the_end

KNOWN_WITHIN_S = 30.0  # of waits that the groups would allow 60 s; on a quiet machine 2 s
LENS = [[30, 9, 2], [4], [7]]
Heard = tuple[list[str], str, float]


def used_step(topology: str) -> tuple[SequenceParallel, Step, torch.Tensor]:
    """A second step, after one that made all the exchanges."""
    parallel = SequenceParallel(None, topology, COST, timeout_s=60)
    lens = LENS[dist.get_rank()]
    x = torch.randn(sum(lens), 4, requires_grad=True)
    for _ in range(2):
        step = parallel.plan(lens)
        moved = step.route(x=x)["x"]
        heads = moved[:, None].expand(-1, 6, -1)
        home = step.restore(step.attend(heads, heads, heads)[:, 0])
        step.gather_samples(torch.ones(len(lens), 3))
        step.mean(home).backward()
    return parallel, parallel.plan(lens), x


def wrong_rows(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    return step.route(x=x[1:])


def no_tensor(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    return step.route(x=None)  # pyright: ignore[reportArgumentType]


def sparse_tensor(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    return step.route(x=x.detach().to_sparse())


def wrong_heads(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    q = step.route(x=x)["x"][:, None].expand(-1, 6, -1)
    return step.attend(q, q[:, :4], q[:, :4])


def wrong_rows_of_heads(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    q = step.route(x=x)["x"][:, None].expand(-1, 6, -1)
    return step.attend(q[1:], q[1:], q[1:])


def complex_values(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    return step.mean(torch.ones(3, dtype=torch.complex64))


def wrong_samples(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    return step.gather_samples(torch.ones(17, 3))


def wrong_restore(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    return step.restore(torch.ones(10_000, 4))


def own_code(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    with step:
        step.route(x=x)
        raise ZeroDivisionError("the loss of this rank")


def own_hook(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    """An error in the user's code within the backward pass."""

    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError("the hook of this rank")

    with step:
        moved = step.route(x=x)["x"]
        moved.register_hook(fail)
        heads = moved[:, None].expand(-1, 6, -1)
        home = step.restore(step.attend(heads, heads, heads)[:, 0])
        step.gather_samples(torch.ones(len(LENS[dist.get_rank()]), 3))
        step.mean(home).backward()


def without_text(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    with step:
        raise NoTextError


def interrupted(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    with step:
        raise KeyboardInterrupt


def interrupted_in_attention(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    """Without a `with`: the step itself tells of it."""
    q = step.route(x=x)["x"][:, None].expand(-1, 6, -1)
    with mock.patch.object(packed, "attend", side_effect=KeyboardInterrupt):
        step.attend(q, q, q)


def goes_on(parallel: SequenceParallel, step: Step, x: torch.Tensor) -> Any:
    moved = step.route(x=x)["x"]
    heads = moved[:, None].expand(-1, 6, -1)
    home = step.restore(step.attend(heads, heads, heads)[:, 0])
    step.gather_samples(torch.ones(len(LENS[dist.get_rank()]), 3))
    step.mean(home).backward()
    for _ in range(3):
        goes_on(parallel, parallel.plan(LENS[dist.get_rank()]), x)


CASES: dict[Callable[..., Any], str] = {
    wrong_rows: "rows on cpu",
    no_tensor: "not a tensor",
    sparse_tensor: "dense",
    wrong_heads: "6 query heads for 4 key-value heads",
    wrong_rows_of_heads: "tokens",
    complex_values: "torch.complex64",
    wrong_samples: "17",
    wrong_restore: "10000",
    own_code: "ZeroDivisionError: the loss of this rank",
    own_hook: "ZeroDivisionError: the hook of this rank",
    interrupted: "KeyboardInterrupt",
    interrupted_in_attention: "KeyboardInterrupt",
    without_text: "NoTextError: its text cannot be had",
}


def one_fails(topology: str, case: Callable[..., Any]) -> Heard:
    given = used_step(topology)
    start = time.monotonic()
    try:
        (case if dist.get_rank() == 1 else goes_on)(*given)
    except BaseException as error:
        names = [cls.__name__ for cls in type(error).__mro__]
        if isinstance(error, NoTextError):
            return names, "", time.monotonic() - start
        # As a user's handler would: the process goes on, so that no closed connection tells.
        return names, str(error), time.monotonic() - start
    raise AssertionError("nothing was raised")


MORE = [pytest.param(topology, marks=pytest.mark.stress) for topology in ("g3n1", "g1r3n1")]


@pytest.mark.some(5)
@pytest.mark.parametrize("topology", ["g1n1+g2n1", *MORE])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_one_rank_fails_in_a_step(case: Callable[..., Any], topology: str) -> None:
    of_rank = run_ranks(one_fails, 3, topology, case)
    is_input = "ConfigError" in of_rank[1][0]
    for rank in (0, 2):
        classes, text, seconds = of_rank[rank]
        assert "CommError" in classes and "rank 1 failed" in text and CASES[case] in text, text
        assert ("ConfigError" in classes) == is_input
        assert seconds < KNOWN_WITHIN_S, (seconds, text)


def bad_lengths() -> list[tuple[list[str], str]]:
    parallel = SequenceParallel(None, "g1n1", COST, timeout_s=60)
    bad: list[Any] = [
        torch.tensor([3.0], dtype=torch.bfloat16),
        torch.tensor([3], device="meta"),
        torch.tensor([3.0], requires_grad=True),
        [10**400],
        [2**70],
        None,
        object(),
        {"a": 1},
        [[3], [4, 5]],
    ]
    return [raised_by(parallel.plan, one if dist.get_rank() else [3]) for one in bad]


def test_lengths_of_any_kind_are_refused_on_all_ranks() -> None:
    for first, second in zip(*run_ranks(bad_lengths, 2), strict=True):
        assert first == second and "CommError" in first[0] and "rank 1" in first[1], first


def bad_topologies() -> list[tuple[list[str], str]]:
    odd = dist.get_rank() == 1
    bad: list[Any] = [None, [1, 2], b"g1n1", 3]
    return [
        raised_by(SequenceParallel, None, one if odd else "g1n1", COST, timeout_s=60) for one in bad
    ]


def test_topologies_of_any_kind_are_refused_on_all_ranks() -> None:
    for first, second in zip(*run_ranks(bad_topologies, 2), strict=True):
        assert first == second and "CommError" in first[0] and "rank 1" in first[1], first


WRONG: list[dict[str, Any]] = [
    {"timeout_s": "x"},
    {"timeout_s": float("nan")},
    {"timeout_s": 0},
    {"timeout_s": 1e300},
    {"options": 3},
    {"options": ParallelOptions(device="xyz")},
    {"options": ParallelOptions(device=1.5)},  # pyright: ignore[reportArgumentType]
    {"options": ParallelOptions(data_group=3)},  # pyright: ignore[reportArgumentType]
    *([] if torch.cuda.is_available() else [{"options": ParallelOptions(device="cuda")}]),
    {"plan_group": "plan"},
    {"mesh_or_group": [0, 1]},
    {"options": ParallelOptions("magic"), "cost": None},
]


def one_constructs_wrongly(wrong: dict[str, Any]) -> Heard:
    options: dict[str, Any] = {"mesh_or_group": None, "cost": COST, "timeout_s": 60}
    if dist.get_rank() == 1:
        options |= wrong
    start = time.monotonic()
    try:
        parallel = SequenceParallel(topology="g2n1", **options)
        parallel.plan([3])
    except Exception as error:
        return [c.__name__ for c in type(error).__mro__], str(error), time.monotonic() - start
    raise AssertionError("nothing was raised")


@pytest.mark.some(5)
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_one_rank_constructs_wrongly(wrong: dict[str, Any]) -> None:
    (classes, text, seconds), (own, _, _) = run_ranks(one_constructs_wrongly, 2, wrong)
    assert "CommError" in classes and "rank 1" in text, text
    assert {"ConfigError", "CommError"} & set(own)
    assert seconds < KNOWN_WITHIN_S


def small_data_group() -> tuple[list[str], str]:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = alone[dist.get_rank()]
    assert isinstance(own, dist.ProcessGroup)
    options = ParallelOptions(data_group=own)
    return raised_by(SequenceParallel, None, "g1n2", COST, options=options)


def test_a_data_group_without_all_ranks_is_refused() -> None:
    for classes, text in run_ranks(small_data_group, 2):
        assert "ConfigError" in classes and "data_group" in text and "without" in text


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def own_plan_group_on_one_rank() -> Heard:
    group = dist.group.WORLD if dist.get_rank() else None
    start = time.monotonic()
    classes, text = raised_by(SequenceParallel, None, "g2n1", COST, timeout_s=3, plan_group=group)
    return classes, text, time.monotonic() - start


def test_a_plan_group_on_one_rank_only() -> None:
    for classes, text, _ in run_ranks(own_plan_group_on_one_rank, 2):
        assert "CommError" in classes, text


def wrong_alike() -> None:
    """And right afterwards, on the same groups."""
    _, step, x = used_step("g2n1" if dist.get_world_size() == 2 else "g1r3n1")
    moved = step.route(x=x)["x"]
    q = moved[:, None].expand(-1, 6, -1).detach()
    want = step.attend(q, q, q, scale=0.3)
    wrong: list[Callable[[], Any]] = [
        lambda: step.attend(q, q, None),  # pyright: ignore[reportArgumentType]
        lambda: step.attend(q.to("meta"), q.to("meta"), q.to("meta")),
        lambda: step.attend(q, q, q, scale="x"),  # pyright: ignore[reportArgumentType]
        lambda: step.attend(q, q, q, scale=torch.tensor(1.0)),  # pyright: ignore[reportArgumentType]
        lambda: step.attend(q, q, q, scale=float("nan")),
        lambda: step.attend(q, q, q, causal="no"),  # pyright: ignore[reportArgumentType]
        lambda: step.mean([1.0]),  # pyright: ignore[reportArgumentType]
        lambda: step.mean(torch.ones(3), weights="x"),  # pyright: ignore[reportArgumentType]
        lambda: step.mean(torch.ones(3, device="meta")),
    ]
    for call in wrong:
        classes, text = raised_by(call)
        assert "ConfigError" in classes, text
        assert torch.equal(step.attend(q, q, q, scale=0.3), want)
    name = "\udc80"
    assert torch.equal(step.route(**{name: x})[name], moved)


@pytest.mark.parametrize("world_size", [2, 3])
def test_wrong_calls_on_all_ranks_alike_end_nothing(world_size: int) -> None:
    run_ranks(wrong_alike, world_size)


def mixed_dtypes() -> tuple[list[str], str]:
    """On bags of unlike sizes: one rank needs nobody."""
    step = SequenceParallel(None, "g1n1+g2n1", COST, timeout_s=60).plan([6])
    shape = (step.local.positions.size, 4, 2)
    q = torch.zeros(shape)
    return raised_by(step.attend, q, q.double() if dist.get_rank() else q, q)


def test_mixed_dtypes_are_refused_on_all_ranks() -> None:
    for classes, text in run_ranks(mixed_dtypes, 3):
        assert "CommError" in classes and "float64" in text, text


def odd_strides() -> None:
    """Tensors of one element count as contiguous with any strides."""
    parallel = SequenceParallel(None, "g1n2", COST, timeout_s=15)
    rank = dist.get_rank()
    step = parallel.plan([1])
    for one in (
        torch.arange(6.0)[rank :: 6 - rank][None],
        torch.randn(1, 5).T[:1],
        torch.randn(1, 3, 4)[:, 0],
        torch.randn(5, 4).T[:, :1][:1],
        torch.randn(1, 7)[:, 3:4].T,
    ):
        assert one.shape[0] == 1
        leaf = one.clone().requires_grad_()
        there = step.route(x=leaf)["x"]
        if one.numel() == 1:
            odd = there.as_strided(there.shape, [9] * there.dim())
            assert torch.equal(step.restore(odd), one)
        grad = torch.ones(1, 1).expand(1, one.shape[1:].numel()).T.reshape(one.shape)
        there.backward(grad)
        assert leaf.grad is not None and bool((leaf.grad == 1).all())
        first = torch.cat([step.gather_samples(one), torch.zeros_like(one)])
        assert first.shape[0] == 3


def test_tensors_of_one_row_travel_with_any_strides() -> None:
    run_ranks(odd_strides, 2)


def ended_stays_ended() -> list[str]:
    parallel, step, x = used_step("g1n2")
    texts = []
    for _ in range(2):
        try:
            (wrong_rows if dist.get_rank() == 1 else goes_on)(parallel, step, x)
        except Exception as error:
            texts.append(str(error))
    again = SequenceParallel(None, "g2n1", COST, timeout_s=15)  # and others can be made
    lens = LENS[dist.get_rank()]
    rows = torch.arange(sum(lens))
    step = again.plan(lens)
    assert torch.equal(step.restore(step.route(x=rows)["x"]), rows)
    return texts


def test_what_a_failure_ended_stays_ended_and_new_groups_work() -> None:
    for texts in run_ranks(ended_stays_ended, 2):
        assert len(texts) == 2


def makes_and_drops(rounds: int) -> None:
    """Steps that fail leave nothing behind that keeps their tensors."""
    parallel = SequenceParallel(None, "g1n2", COST, timeout_s=15)
    for _ in range(rounds):
        step = parallel.plan(LENS[dist.get_rank()])
        assert copy.copy(step).plan is step.plan
        with pytest.raises(CommError):
            parallel.fail(ValueError("again"))
        del step
    gc.collect()
    assert sum(isinstance(one, Step) for one in gc.get_objects()) <= 2  # of the last two plans


def test_failures_that_all_ranks_agree_on_end_nothing() -> None:
    assert all(one.error is None for one in run_to_the_end(makes_and_drops, 2, 5))


def all_fail_alike() -> list[str]:
    """And go on: one at once, the other after a while."""
    parallel, step, _ = used_step("g2n1")
    texts = []
    for _ in range(2):
        try:
            step.attend(torch.ones(3), torch.ones(3), torch.ones(3))
        except Exception as error:
            texts.append(type(error).__name__)
        if dist.get_rank() == 1:
            time.sleep(4.0)
        step = parallel.plan(LENS[dist.get_rank()])
    step.mean(torch.ones(3))
    return texts


def test_all_ranks_that_fail_alike_can_go_on() -> None:
    for texts in run_ranks(all_fail_alike, 2):
        assert texts == ["ConfigError", "ConfigError"]


def still_failed() -> list[bool]:
    """After a call that was interrupted, and after one that was not."""
    group = member_of(resolve(None), "all")
    failures.tell(ConfigError("oops"), "here")
    found: list[bool] = []
    for interrupt in (KeyboardInterrupt, None):
        with suppress(KeyboardInterrupt), failures.call(group, "a wait"):
            if interrupt is not None:
                raise interrupt
        found.append(notes.read_failure(dist.get_rank()) is not None)
    return found


def test_a_rank_goes_on_by_no_call_that_was_interrupted() -> None:
    assert run_ranks(still_failed, 1) == [[True, False]]


def fails_beside_a_slow_thread() -> tuple[str, float]:
    """Rank 1 handles an error while the others wait for another, slow thread of it."""
    _, step, _ = used_step("g1n2")
    second, rows = SequenceParallel(None, "g1n2", COST, timeout_s=15), torch.arange(3.0)[:, None]
    ended: list[float] = []

    def work() -> None:
        for pause_s in (0.0, 3.0 * dist.get_rank()):
            time.sleep(pause_s)
            moved = second.plan([3]).route(x=rows)["x"]
            ended.append(float(moved.sum()))

    thread = threading.Thread(target=work)
    thread.start()
    while not ended and thread.is_alive():
        time.sleep(0.01)
    text = ""
    if dist.get_rank() == 1:
        _, text = raised_by(step.restore, torch.ones(10_000, 4))
    thread.join()
    assert len(ended) == 2
    return text, float(step.mean(torch.ones(3)))


def test_a_thread_is_not_taken_for_one_that_failed() -> None:
    (_, first), (text, second) = run_ranks(fails_beside_a_slow_thread, 2)
    assert "10000" in text and first == second == 1.0
