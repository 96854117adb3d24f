"""Bad input: the same error on every rank, before any exchange whose sizes could differ."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bascule.comm.agree import Statement, agree
from bascule.comm.groups import member_of, resolve
from bascule.errors import CommError, ConfigError, PlanError
from bascule.parallel import ParallelOptions, SequenceParallel
from bascule.plan.costs import TransformerCost
from bascule.plan.limits import Limits
from bascule.plan.machine import Cluster
from tests.helpers.cases import COST
from tests.helpers.ranks import raised_by, run_ranks

Error = tuple[list[str], str]


def same_on_all(of_rank: list[Error]) -> Error:
    assert all(error == of_rank[0] for error in of_rank), of_rank
    return of_rank[0]


def refused_lengths() -> list[Error]:
    odd = dist.get_rank() == 1
    parallel = SequenceParallel(None, "g1n1+g2n1", COST)
    bad: list[Any] = [[4, -1], [2.5], [math.nan], [math.inf], [[1, 2]], ["x"], [2**41], [True]]
    errors = [raised_by(parallel.plan, lens if odd else [3]) for lens in bad]
    assert parallel.plan([3]).plan.seq_lens.tolist() == [3, 3, 3]  # and goes on
    return errors


def test_illegal_lengths() -> None:
    errors = [
        same_on_all(list(of_rank)) for of_rank in zip(*run_ranks(refused_lengths, 3), strict=True)
    ]
    for classes, text in errors:
        assert {"CommError", "ConfigError"} <= set(classes) and "rank 1" in text, text
    texts = [text for _, text in errors]
    assert "step 1, plan: rank 1 of group 'plan': sequence 1: length -1 " in texts[0]
    assert all(text.count("rank 1") == 1 and "rank 0" not in text for text in texts), texts
    assert "sequence 0: length 2.5 " in texts[1] and "length nan " in texts[2]
    assert "2^40" in texts[6]


def whole_numbers() -> None:
    parallel = SequenceParallel(None, "g1n1", COST)
    given: list[Any] = [[3.0], np.array([3], np.int32), torch.tensor([3]), (3,)]
    for lens in given:
        assert parallel.plan(lens).plan.seq_lens.tolist() == [3, 3]


def test_whole_numbers_of_any_kind_are_lengths() -> None:
    run_ranks(whole_numbers, 2)


def cluster_of(flops_per_s: float) -> Cluster:
    return Cluster(1, 3, flops_per_s, 1 << 34, 1e11, 1e10, 1e-5)


def differing_settings() -> list[Error]:
    odd = dist.get_rank() == 2
    both: list[tuple[Any, Any, dict[str, Any], dict[str, Any]]] = [
        ("g1n1", "g2n1+g1n1", {}, {}),
        ("g1n1", "g1n1", {"cost": COST}, {"cost": TransformerCost(64, gamma=1.5)}),
        ("g1n1", "g1n1", {}, {"options": ParallelOptions("knapsack")}),
        ("g1n1", "g1n1", {}, {"options": ParallelOptions(home_tolerance=0.5)}),
        ("g1n1", "g1n1", {"limits": None}, {"limits": Limits(tokens=100)}),
        ("g1n1", "g1n1", {"cost": COST}, {"cost": lambda lens: np.asarray(lens) * 1.0}),
        ("g1n1", "g1n1", {"cluster": cluster_of(1e12)}, {"cluster": cluster_of(2e12)}),
    ]
    errors: list[Error] = []
    for most_spec, odd_spec, most, other in both:
        in_seconds = TransformerCost(64, seconds_per_unit=1e-3)
        usual = in_seconds if "cluster" in most else COST
        options = {"cost": usual} | (other if odd else most)
        cost = options.pop("cost")
        errors.append(
            raised_by(SequenceParallel, None, odd_spec if odd else most_spec, cost, **options)
        )
    parallel = SequenceParallel(None, "g1n1", COST)
    if odd:
        parallel.cost = TransformerCost(65)  # changed under way, before a plan
    errors.append(raised_by(parallel.plan, [1]))
    return errors


def test_ranks_with_different_settings() -> None:
    of_rank = run_ranks(differing_settings, 3)
    errors = [same_on_all(list(errors)) for errors in zip(*of_rank, strict=True)]
    wanted = ["topology", "cost", "planner", "home_tolerance"]
    wanted += ["limits", "cost", "cluster", "cost"]
    for (classes, text), what in zip(errors, wanted, strict=True):
        assert "CommError" in classes and "ConfigError" not in classes
        assert f"disagree on {what}" in text, text
        assert "ranks [0, 1]: " in text and "ranks [2]: " in text, text
    assert "g2n1" in errors[0][1] and "gamma=1.5" in errors[1][1] and "knapsack" in errors[2][1]
    assert "tokens=100" in errors[4][1]


def failures() -> list[Error]:
    odd = dist.get_rank() == 0
    parallel = SequenceParallel(None, "g2n1", COST)
    if odd:
        errors = [raised_by(parallel.fail, OSError("photo 7 is unreadable"))]
    else:
        errors = [raised_by(parallel.plan, [5])]
    both = raised_by(parallel.fail, ValueError(f"rank {dist.get_rank()} " + "x" * 1000))
    assert parallel.plan([5]).number == 3
    return [*errors, both]


def test_a_failing_rank_tells_all() -> None:
    of_rank = run_ranks(failures, 2)
    classes, text = same_on_all([errors[0] for errors in of_rank])
    assert "CommError" in classes
    assert "rank 0" in text and "OSError" in text and "photo 7 is unreadable" in text
    _, both = same_on_all([errors[1] for errors in of_rank])
    assert "also on ranks [1]" in both and "rank 0 xxx" in both


def refused_topologies() -> list[Error]:
    specs = ["g2n1", "g4n2", "g0n1", "g1n1,g2n1", ""]
    errors = [raised_by(SequenceParallel, None, spec, COST) for spec in specs]
    odd = dist.get_rank() == 1
    errors.append(raised_by(SequenceParallel, None, "g1nx" if odd else "g1n1", COST))
    errors.append(
        raised_by(SequenceParallel(None, "g1n1", COST, options=ParallelOptions("magic")).plan, [1])
    )
    SequenceParallel(None, "g1n1", COST)
    return errors


def test_topologies_that_do_not_fit() -> None:
    of_rank = run_ranks(refused_topologies, 3)
    errors = [same_on_all(list(errors)) for errors in zip(*of_rank, strict=True)]
    assert all("ConfigError" in classes for classes, _ in errors)
    assert "world of 3" in errors[0][1] and "'g0n1'" in errors[2][1]
    assert "rank 1" in errors[5][1] and "'g1nx'" in errors[5][1]
    assert "'magic'" in errors[6][1]


def within_limits() -> Error:
    parallel = SequenceParallel(None, "g1n1+g2n1", COST, limits=Limits(tokens=10))
    assert int(parallel.plan([9, 1] if dist.get_rank() == 0 else [5]).plan.tokens.max()) <= 10
    error = raised_by(parallel.plan, [21 if dist.get_rank() == 2 else 1])
    assert parallel.plan([20] if dist.get_rank() == 2 else []).plan.tokens.tolist() == [0, 10, 10]
    return error


def test_limits_that_cannot_be_met() -> None:
    classes, text = same_on_all(run_ranks(within_limits, 3))
    assert "PlanError" in classes and "rank 2, sequence 0: 21 tokens" in text and "20" in text


def too_few_heads(num_kv_heads: int, topology: str) -> Error:
    step = SequenceParallel(None, topology, COST).plan([6])
    num_tokens = step.local.positions.size
    q, kv = torch.zeros(num_tokens, 4, 2), torch.zeros(num_tokens, num_kv_heads, 2)
    return raised_by(step.attend, q, kv, kv)


@pytest.mark.parametrize("topology", ["g3n1", "g1n1+g2n1"])
def test_a_bag_with_more_ranks_than_heads_is_refused_on_all_ranks(topology: str) -> None:
    num_kv_heads = 2 if topology == "g3n1" else 1
    classes, text = same_on_all(run_ranks(too_few_heads, 3, num_kv_heads, topology))
    assert "ConfigError" in classes
    assert f"{num_kv_heads} key-value heads" in text and f"at most {num_kv_heads} ranks" in text


def refused_tensors() -> list[Error]:
    step = SequenceParallel(None, "g2n1", COST).plan([3, 1])
    x = torch.zeros(step.local.positions.size, 4, 2)
    return [
        raised_by(step.attend, x, x[:, :3], x[:, :3]),
        raised_by(step.attend, x, x, x[:, :2]),
        raised_by(step.attend, x[1:], x, x),
        raised_by(step.attend, x[:, 0], x[:, 0], x[:, 0]),
        raised_by(step.attend, x, x[:, :0], x[:, :0]),
        raised_by(step.route, x=torch.zeros(3)),
        raised_by(step.route, x=torch.tensor(1.0)),
        raised_by(step.restore, x.to("meta")),
        raised_by(
            SequenceParallel(None, "g2n1", COST, options=ParallelOptions(kernel="aten_flash"))
            .plan([2])
            .attend,
            x,
            x,
            x,
        ),
    ]


def test_tensors_that_do_not_fit_the_plan() -> None:
    for errors in run_ranks(refused_tensors, 2):
        assert all("ConfigError" in classes for classes, _ in errors), errors
        assert "4 query heads for 3 key-value heads" in errors[0][1]
        assert "gives this rank 4" in errors[2][1] and "4 rows" in errors[5][1]
        assert "'aten_flash' runs on CUDA devices" in errors[8][1]


def many_sequences() -> None:
    rank = dist.get_rank()
    parallel = SequenceParallel(None, "g1n1+g2n1", COST)
    for count in (3, 64, 65, 1000, 2, 1001):
        lens = [7, 1] if rank else list(range(count))
        step = parallel.plan(lens)
        assert step.plan.seq_lens.tolist() == [*range(count), 7, 1, 7, 1]
        x = torch.arange(sum(lens))
        assert torch.equal(step.restore(step.route(x=x)["x"]), x)


def test_more_sequences_than_the_first_gather_has_room_for() -> None:
    run_ranks(many_sequences, 3)


def meshes() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    rank, group = dist.get_rank(), dist.get_rank() // 2
    refused = raised_by(SequenceParallel, mesh, "g2n1", COST)
    of_axis = SequenceParallel(mesh["sp"], "g2n1", COST)
    of_group = SequenceParallel(
        mesh["sp"].get_group(), "g1n2", COST, plan_group=mesh["sp"].get_group()
    )
    of_world = SequenceParallel(None, "g1n1+g3n1", COST, timeout_s=15.0)
    assert of_axis.rank == of_group.rank == rank % 2 and of_world.rank == rank
    own = of_axis.plan([5 + group, 2])
    assert own.plan.seq_lens.tolist() == [5 + group, 2] * 2
    flat = of_group.plan([3 + rank])
    world = of_world.plan([rank])
    for step, num_rows in ((own, 7 + group), (world, rank), (flat, 3 + rank), (own, 7 + group)):
        x = 100 * rank + torch.arange(num_rows)
        q = torch.rand(step.local.positions.size, 3, 2)
        assert step.attend(q, q, q).shape == q.shape
        moved = step.route(x=x)["x"]
        assert torch.equal(step.restore(moved), x)
        if step is own:
            assert bool((moved // 200 == group).all())
    # The two groups do not wait for each other: only one of them takes another step.
    if group == 0:
        assert of_axis.plan([9]).plan.num_ranks == 2
    values = torch.ones(1 + rank, requires_grad=True)
    everywhere = SequenceParallel(
        mesh["sp"], "g2n1", COST, options=ParallelOptions(data_group=dist.group.WORLD)
    ).plan([])
    everywhere.mean(values).backward()
    assert values.grad is not None and bool((values.grad == 4 / 10).all())
    return {"refused": refused}


def test_mesh_axes_and_independent_groups() -> None:
    for result in run_ranks(meshes, 4):
        classes, text = result["refused"]
        assert "ConfigError" in classes and "('dp', 'sp')" in text and "mesh['name']" in text


def without_a_world() -> Error:
    dist.destroy_process_group()
    return raised_by(SequenceParallel, None, "g1n1", COST)


def test_torch_distributed_must_be_initialised() -> None:
    assert "init_process_group" in run_ranks(without_a_world, 1)[0][1]


def unlike_heads_and_scalars() -> list[str]:
    """What each rank hears when only the last one attends or averages otherwise."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    parallel = SequenceParallel(None, "g2n1", TransformerCost(64), timeout_s=15)
    step = parallel.plan([6])
    heard = []
    shape = (6, 2, 16) if rank == last else (6, 4, 8)
    per_token = torch.ones(()) if rank == last else torch.ones(6)
    for call in (
        lambda: step.attend(*(torch.zeros(shape) for _ in range(3))),
        lambda: step.attend(*(torch.zeros(6 + (rank == last), 4, 8) for _ in range(3))),
        lambda: step.mean(per_token),
    ):
        with pytest.raises(CommError) as caught:
            call()
        heard.append(str(caught.value))
    return heard


def test_ranks_that_attend_or_average_otherwise_are_refused_on_all() -> None:
    for texts in zip(*run_ranks(unlike_heads_and_scalars, 2), strict=True):
        assert len(set(texts)) == 1
        assert "attend" in texts[0] or "mean" in texts[0]


def weights_on_the_last_rank() -> Error:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    step = SequenceParallel(None, "g2n1", COST, timeout_s=15).plan([6])
    x = torch.ones(6, requires_grad=True)
    return raised_by(step.mean, x, weights=x.detach() if rank == last else None)


def test_weights_on_one_rank_only_are_refused_on_all() -> None:
    classes, text = same_on_all(run_ranks(weights_on_the_last_rank, 2))
    assert "CommError" in classes and "mean" in text


def told_in_an_agreement() -> list[Error]:
    group, none = member_of(resolve(None), "all"), np.zeros(0, np.int64)
    errors: list[Exception] = [ConfigError("one"), PlanError("one"), ValueError("one"), KeyError(1)]
    own = errors if dist.get_rank() else [None] * len(errors)
    said = [Statement({}, none, error) for error in own]
    return [raised_by(agree, group, one, what="test", step=1, capacity=0) for one in said]


def test_bad_input_of_a_rank_is_told_from_its_other_errors() -> None:
    first, second = run_ranks(told_in_an_agreement, 2)
    is_input = ["RemoteConfigError" in classes for classes, _ in first]
    assert first == second and is_input == [True, True, False, False]
    assert all("CommError" in classes for classes, _ in first)
