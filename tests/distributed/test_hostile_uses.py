"""Uses that gave wrong numbers without an error, or errors that others did not hear of in time."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from bascule.attention.api import (
    AttentionMesh,
    AttentionOptions,
    SequenceLayout,
    attention,
    gather,
    split,
)
from bascule.data.loader import BalancedLoader
from bascule.parallel import ParallelOptions, SequenceParallel
from tests.helpers.cases import COST
from tests.helpers.inference_cases import make_mesh
from tests.helpers.loader_cases import loader_with
from tests.helpers.loader_checks import await_word, tell
from tests.helpers.ranks import raised_by, run_ranks

KNOWN_WITHIN_S = 30.0  # of waits of 60 s; on a quiet machine 2 s
Heard = tuple[list[str], str, float]


def timed(call: Callable[[], object]) -> Heard:
    start = time.monotonic()
    classes, text = raised_by(call)
    return classes, text, time.monotonic() - start


def mesh_of(ring: int, ulysses: int) -> AttentionMesh:
    return AttentionMesh.of(make_mesh(ring, ulysses), timeout_s=60.0)


def other_numbers_of_tokens() -> list[tuple[list[str], str]]:
    mesh, layout = mesh_of(1, 2), SequenceLayout((9,), 1, 2)
    own = split(torch.arange(9.0)[None], mesh, layout, 1)
    wrong = [own[:, 1:], own[:, :0], torch.cat([own, own[:, :1]], dim=1)]
    heard = [raised_by(gather, x, mesh, layout, 1) for x in wrong]
    heard += [raised_by(gather, own, mesh, layout, dim) for dim in (2, -3, None, 0.0)]
    heard += [raised_by(gather, own, mesh, SequenceLayout((9,), 2, 1), 1)]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(own, torch.ones_like(own))
        heard.append(raised_by(gather, dual, mesh, layout, 1))
    assert torch.equal(gather(own, mesh, layout, 1), torch.arange(9.0)[None])
    return heard


def test_gather_takes_the_tokens_of_the_layout_alone() -> None:
    for heard in run_ranks(other_numbers_of_tokens, 2):
        assert all("ConfigError" in classes and "gather" in text for classes, text in heard), heard


SETTINGS: list[dict[str, Any]] = [{"causal": True}, {"scale": 0.5}]


def other_settings_in_bags_of_one(settings: dict[str, Any]) -> Heard:
    parallel = SequenceParallel(None, "g1n2", COST, timeout_s=60)
    for first in (True, False):
        step = parallel.plan([6])
        q = torch.randn(step.local.positions.size, 4, 2)
        if first:
            step.attend(q, q, q)
    given = settings if dist.get_rank() else {}
    return timed(lambda: step.restore(step.attend(q, q, q, **given)[:, 0]))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_bags_of_one_compare_what_they_attend_with(settings: dict[str, Any]) -> None:
    for classes, text, seconds in run_ranks(other_settings_in_bags_of_one, 2, settings):
        assert "CommError" in classes and "attend" in text, text
        assert seconds < KNOWN_WITHIN_S


def second_derivatives() -> tuple[float, list[tuple[list[str], str]]]:
    """Of a loss over all ranks, against the same in one process; refused where there are none."""
    parallel = SequenceParallel(None, "g2n1", COST, timeout_s=15)
    step, rank = parallel.plan([3 + dist.get_rank()]), dist.get_rank()
    own = torch.arange(1.0, 4.0 + rank, dtype=torch.float64)[:, None].requires_grad_()
    moved = step.route(x=own)["x"]
    (grad,) = torch.autograd.grad((moved**3).sum() + (own**2).sum(), own, create_graph=True)
    back = step.restore(step.route(x=grad)["x"])
    (second,) = torch.autograd.grad((back**2).sum() / 2, own)
    wanted = (3 * own**2 + 2 * own) * (6 * own + 2)

    def twice(call: Callable[[Tensor], Tensor]) -> tuple[list[str], str]:
        leaf = torch.ones(step.local.positions.size, 2, 2, dtype=torch.float64).requires_grad_()

        def derive() -> None:
            (first,) = torch.autograd.grad((call(leaf) ** 2).sum(), leaf, create_graph=True)
            first.sum().backward()

        return raised_by(derive)

    refused = [twice(lambda x: step.attend(x, x, x)), twice(lambda x: step.mean(x)[None])]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(own.detach(), torch.ones_like(own))
        refused.append(raised_by(lambda: step.route(x=dual)))
    return float((second - wanted).abs().max()), refused


def test_second_derivatives_are_right_or_refused() -> None:
    for error, refused in run_ranks(second_derivatives, 2):
        assert error < 1e-9
        assert all(text for _, text in refused) and "forward-mode" in refused[-1][1], refused


def gathered_by_each_thread() -> None:
    """Over all ranks of a mesh, whose group is neither that of the ring nor the other."""
    mesh, layout = mesh_of(2, 2), SequenceLayout((8,), 2, 2)
    own = split(torch.arange(8.0), mesh, layout, 0)
    assert torch.equal(gather(own, mesh, layout, 0), torch.arange(8.0))
    with ThreadPoolExecutor(1) as other:
        whole = other.submit(gather, own, mesh, layout, 0).result()
    assert torch.equal(whole, torch.arange(8.0))


def test_threads_take_turns_on_a_mesh() -> None:
    run_ranks(gathered_by_each_thread, 4)


def loader_of(**options: Any) -> BalancedLoader:
    options = {"timeout_s": 60.0} | options
    samples = [[torch.ones(3)] for _ in range(4)]
    return loader_with(samples, length_fn=len, cost=COST, bytes_per_s=1e9, **options)


def bad_state(loader: BalancedLoader) -> object:
    loader.load_state_dict(5)  # pyright: ignore[reportArgumentType]
    return list(loader)


def bad_epoch(loader: BalancedLoader) -> object:
    loader.set_epoch(-1)
    return list(loader)


def bad_cost(loader: BalancedLoader) -> object:
    loader.set_cost(5)  # pyright: ignore[reportArgumentType]
    return list(loader)


def bad_axis(loader: BalancedLoader) -> object:
    return loader_of(axis="dp")


def bad_group(loader: BalancedLoader) -> object:
    return loader_of(mesh_or_group=5)


WRONG: dict[Callable[..., object], Callable[..., object]] = {
    bad_state: list,
    bad_epoch: list,
    bad_cost: list,
    bad_axis: lambda _: loader_of(),
    bad_group: lambda _: loader_of(),
}
"""What one rank does, and the others meanwhile."""


def one_uses_a_loader_wrongly(wrong: Callable[..., object]) -> Heard:
    """And all make another one afterwards."""
    loader, rank = loader_of(), dist.get_rank()
    heard = timed(lambda: (wrong if rank else WRONG[wrong])(loader))
    tell(f"{rank} heard")
    await_word(f"{1 - rank} heard")
    assert len(list(loader_of())) == 4
    return heard


@pytest.mark.some(3)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: one.__name__)
def test_a_loader_used_wrongly_on_one_rank(wrong: Callable[..., object]) -> None:
    (_, heard, seconds), (_, own, _) = run_ranks(one_uses_a_loader_wrongly, 2, wrong)
    assert own.splitlines()[0][:40] in heard, (heard, own)
    assert seconds < KNOWN_WITHIN_S


def unlike_constructions() -> list[tuple[list[str], str]]:
    heard: list[tuple[list[str], str]] = []
    unlike: list[dict[str, Any]] = [
        {"options": ParallelOptions(kernel="plain")},
        {"timeout_s": 30.0},
        {"options": ParallelOptions(kernel="nope")},
    ]
    for one in unlike:
        options: dict[str, Any] = {"timeout_s": 60.0} | (one if dist.get_rank() else {})
        heard.append(
            raised_by(lambda options=options: SequenceParallel(None, "g1n2", COST, **options))
        )
    return heard


def test_settings_of_the_constructor_are_compared() -> None:
    for heard in run_ranks(unlike_constructions, 2):
        for (classes, text), name in zip(heard, ("kernel", "timeout_s", "nope"), strict=True):
            assert "CommError" in classes and name in text, text


def no_tensors() -> list[tuple[list[str], str]]:
    mesh, q = mesh_of(1, 2), torch.ones(1, 2, 4, 4)
    calls: list[Callable[[], Any]] = [
        lambda: attention(None, None, None, mesh),  # pyright: ignore[reportArgumentType]
        lambda: attention(q.to_sparse(), q, q, mesh),
        lambda: attention(q, q, q, mesh, options=AttentionOptions(wire="int8")),  # pyright: ignore[reportArgumentType]
        lambda: attention(q, q, q, mesh, options=AttentionOptions(kernel=5)),  # pyright: ignore[reportArgumentType]
        lambda: SequenceLayout("9"),  # pyright: ignore[reportArgumentType]
        lambda: SequenceLayout((9,), 0),
        lambda: SequenceLayout((9,), 2, replicated=(1,)),
        lambda: SequenceLayout((9,), 2, stripe="a"),  # pyright: ignore[reportArgumentType]
    ]
    return [raised_by(call) for call in calls]


def test_what_is_no_tensor_and_no_layout_is_refused() -> None:
    for heard in run_ranks(no_tensors, 2):
        assert [text for classes, text in heard if "ConfigError" not in classes] == []


def a_mesh_after_its_groups() -> tuple[list[str], str]:
    mesh, q = mesh_of(2, 1), torch.ones(1, 2, 4, 4)
    attention(q, q, q, mesh)
    dist.destroy_process_group()
    return raised_by(attention, q, q, q, mesh)


def test_a_mesh_whose_groups_are_gone_says_so() -> None:
    for classes, text in run_ranks(a_mesh_after_its_groups, 2):
        assert "CommError" in classes and "destroyed" in text, text


def epoch_before_the_first_iteration() -> int:
    loader = loader_of()
    loader.set_epoch(3)
    return loader.state_dict()["epoch"]


def test_the_state_before_the_first_iteration_has_its_epoch() -> None:
    assert run_ranks(epoch_before_the_first_iteration, 1) == [3]
