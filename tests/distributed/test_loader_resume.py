"""A run that stops anywhere goes on with exactly the samples that were not delivered."""

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from bascule.data.loader import BalancedLoader
from bascule.data.samplers import ResumableSampler
from tests.helpers.loader_cases import allow_workers, heard_by
from tests.helpers.loader_checks import State, balanced, check_chains, flat, numbers, over, run
from tests.helpers.ranks import by_one_rank, run_ranks


def gathered(group: Any, ids: list[int]) -> Counter[int]:
    """Of all ranks of a group."""
    table: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(table, ids, group=group)
    return Counter(i for part in table for i in part)


POINTS = {"batch_size": 2, "size": 29}


def stop_everywhere(settings: list[dict[str, Any]]) -> list[tuple[list[State], list[list[int]]]]:
    """Of each run, the state after every microbatch, and what each microbatch gave this rank."""
    told = []
    for one in settings:
        delivered, states = run(over(group=None, **POINTS, **one))
        told.append((states[:-1], [ids for _, ids in delivered]))
    return told


def go_on(settings: list[dict[str, Any]], states: list[list[State]]) -> list[list[list[int]]]:
    """What this rank gets of the rest, for each state of each run."""
    rests = []
    for one, of_run in zip(settings, states, strict=True):
        rests.append([])
        for state in of_run:
            loader = over(group=None, **POINTS, **one)
            loader.load_state_dict(state)
            delivered, _ = run(loader)
            assert not delivered or delivered[0][0] == (0, state["step"], 0)
            rests[-1].append(flat(delivered))
    return rests


@pytest.mark.some(2)
@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 3), (4, 2), (3, 1)])
def test_every_point_of_an_epoch_at_the_same_and_other_numbers_of_ranks(
    first: int, second: int
) -> None:
    settings = [{"accumulate": 2, "ends": "finish"}, {"accumulate": 1, "ends": "pad_empty"}]
    stopped = run_ranks(stop_everywhere, first, settings)
    states = [of_run for of_run, _ in stopped[0]]
    assert all(told[k][0] == states[k] for told in stopped for k in range(2))
    rests = run_ranks(go_on, second, settings, states)
    for k, of_run in enumerate(states):
        assert len(of_run) >= -(-29 // (2 * first))
        for point in range(len(of_run)):
            before = [i for told in stopped for ids in told[k][1][:point] for i in ids]
            after = [i for rest in rests for i in rest[k][point]]
            assert sorted(before + after) == list(range(29)), (k, point, before, after)


def test_runs_resumed_again_and_again_on_other_numbers_of_ranks() -> None:
    assert check_chains(range(8)) >= 16


def other_workers() -> None:
    allow_workers()
    size, group = 23, dist.group.WORLD
    whole, states = run(over(size, group, batch_size=2, accumulate=2))
    stopped, _ = run(over(size, group, batch_size=2, accumulate=2, num_workers=2), 3)
    assert stopped == whole[:3]
    loader = over(size, group, batch_size=2, accumulate=2, num_workers=1)
    loader.load_state_dict(states[3])
    again, _ = run(loader)
    assert gathered(group, flat(stopped) + flat(again)) == Counter(range(size))
    assert loader.state_dict()["epoch"] == 1


def epochs() -> None:
    """Epochs shuffle on; a state is of its epoch; the next epoch after a resumed one is whole."""
    size, group = 17, dist.group.WORLD
    loader = over(size, group, batch_size=2)
    first, states = run(loader)
    second, later = run(loader)
    assert {key[0] for key, _ in first} == {0} and {key[0] for key, _ in second} == {1}
    assert gathered(group, flat(first)) == gathered(group, flat(second)) == Counter(range(size))
    order = [ids for _, ids in first]
    assert order != [ids for _, ids in second]
    again = over(size, group, batch_size=2)
    again.set_epoch(1)
    assert run(again)[0] == second
    again.set_epoch(0)
    assert [ids for _, ids in run(again)[0]] == order
    resumed = over(size, group, batch_size=2)
    resumed.load_state_dict(later[2])
    resumed.set_epoch(1)  # as training scripts do; keeps what was resumed
    rest, _ = run(resumed)
    assert gathered(group, flat(second[:2]) + flat(rest)) == Counter(range(size))
    third, _ = run(resumed)
    assert {key[0] for key, _ in third} == {2}
    assert gathered(group, flat(third)) == Counter(range(size))
    # A state of the first epoch, loaded after a whole second one.
    resumed.load_state_dict(states[3])
    back, _ = run(resumed)
    assert gathered(group, flat(first[:3]) + flat(back)) == Counter(range(size))


def left_early() -> None:
    """`break`, then iterate again: the same epoch from where the iteration began, as of a
    DataLoader."""
    size, group = 17, dist.group.WORLD
    loader = over(size, group, batch_size=2)
    before, _ = run(loader, 2)
    after, _ = run(loader)
    assert before and after[: len(before)] == before
    assert gathered(group, flat(after)) == Counter(range(size))


def plain(kind: str, size: int, group: Any, num_workers: int = 0) -> BalancedLoader:
    """A loader that knows nothing of balancing; the second of three ranks only computes."""
    num_ranks = dist.get_world_size(group)
    if num_ranks == 3 and dist.get_rank(group) == 1:
        return balanced(None, group, accumulate=2)
    num_loading = num_ranks - (num_ranks == 3)
    index = dist.get_rank(group) // (2 if num_ranks == 3 else 1)
    data = numbers(size)
    sampler = DistributedSampler(data, num_loading, index, seed=3)
    make: Any = DataLoader
    if kind == "stateful":
        make = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    inner = make(data, 3, sampler=sampler, num_workers=num_workers, collate_fn=list)
    return balanced(inner, group, accumulate=2)


def same_world(kind: str, num_workers: int = 0) -> None:
    allow_workers()
    size, group = 24, dist.group.WORLD
    assert group is not None
    whole, states = run(plain(kind, size, group, num_workers))
    assert gathered(group, flat(whole)) == Counter(range(size))
    for k in range(1, len(states) - 1, 1 + 2 * num_workers):
        loader = plain(kind, size, group, num_workers)
        # Some hosts save the state of the first rank alone.
        loader.load_state_dict(by_one_rank(lambda k=k: states[k]))
        rest, further = run(loader, 1 + k % 2)
        loader = plain(kind, size, group, num_workers)
        loader.load_state_dict(by_one_rank(lambda: further[-1]))  # noqa: B023 - called here
        rest += run(loader)[0] if further[-1]["epoch"] == 0 else []
        found = gathered(group, flat(whole[:k]) + flat(rest))
        assert found == Counter(range(size)), (k, found)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "num_workers"),
    [("plain", 2, 0), ("plain", 3, 0), ("stateful", 3, 0), ("stateful", 2, 1)],
)
def test_any_loader_resumes_at_the_same_number_of_ranks(
    kind: str, num_ranks: int, num_workers: int
) -> None:
    run_ranks(same_world, num_ranks, kind, num_workers)


def stop_in_the_middle() -> list[State]:
    return [run(plain(kind, 24, dist.group.WORLD), 2)[1][-1] for kind in ("plain", "stateful")]


def other_world(states: list[State]) -> list[tuple[list[str], str]]:
    heard = []
    for kind, state in zip(("plain", "stateful"), states, strict=True):
        loader = plain(kind, 24, dist.group.WORLD)
        loader.load_state_dict(state)
        heard.append(heard_by(lambda loader=loader: next(iter(loader))))
    return heard


def test_another_number_of_ranks_needs_a_resumable_sampler() -> None:
    states = run_ranks(stop_in_the_middle, 2)[0]
    for classes, text in run_ranks(other_world, 1, states)[0]:
        assert "ConfigError" in classes
        assert "2 loaders" in text and "this run has 1" in text and "ResumableSampler" in text


def ready_made() -> None:
    """Packs of two and three samples that the loader gives; a state counts packs, not samples."""
    rank = dist.get_rank()
    names = [[100 * rank + 10 * k + j for j in range(2 + (k + rank) % 2)] for k in range(7)]
    packs = [{"ids": group, "tokens": [3 + 7 * (i % 5) for i in group]} for group in names]
    mine = list(zip(packs[::2], [*packs[1::2], None], strict=True))
    lists = [[pack for pack in pair if pack is not None] for pair in mine]

    def unpack(pack: dict[str, list[int]]) -> list[dict[str, int]]:
        pairs = zip(pack["ids"], pack["tokens"], strict=True)
        return [{"id": i, "tokens": tokens} for i, tokens in pairs]

    def fresh() -> BalancedLoader:
        return balanced(lists, None, unpack=unpack, length_fn=lambda sample: sample["tokens"])

    everything = Counter(
        100 * r + 10 * k + j for r in range(2) for k in range(7) for j in range(2 + (k + r) % 2)
    )
    whole, states = run(fresh())
    assert gathered(dist.group.WORLD, flat(whole)) == everything and len(whole) == 4
    for k in range(1, 4):
        assert states[k]["counts"] == (2 * k, 2 * k)
        loader = fresh()
        loader.load_state_dict(states[k])
        rest, _ = run(loader)
        assert rest == whole[k:]


def unreadable() -> None:
    """What is None is left out and counted; a step of nothing else is passed over."""
    group, rank = dist.group.WORLD, dist.get_rank()
    # Both samples of a step of two ranks, and one of another step.
    data: Any = [None if sample["id"] in (2, 3, 8) else sample for sample in numbers(14)]

    def fresh(ends: str) -> BalancedLoader:
        sampler = ResumableSampler(14, rank=rank, num_ranks=2, shuffle=False)
        inner: DataLoader[Any] = DataLoader(data, 1, sampler=sampler, collate_fn=list)
        return balanced(inner, group, ends=ends)

    for ends in ("drop_last", "pad_empty", "finish"):
        loader = fresh(ends)
        whole, states = run(loader)
        steps = [step for (_, step, _), _ in whole]
        assert steps == ([*range(7)] if ends == "finish" else [0, 2, 3, 4, 5, 6])
        everything = Counter(set(range(14)) - {2, 3, 8})
        assert gathered(group, flat(whole)) == everything
        assert gathered(group, [loader.metrics()["none_samples"]]) == Counter([2, 1])
        for k in range(1, len(whole)):
            again = fresh(ends)
            again.load_state_dict(states[k])
            assert gathered(group, flat(whole[:k]) + flat(run(again)[0])) == everything


@pytest.mark.parametrize("what", [other_workers, epochs, left_early, ready_made, unreadable])
def test_nothing_is_lost_or_repeated_across(what: Callable[[], None]) -> None:
    run_ranks(what, 2)


def other_deals() -> list[tuple[list[str], str]]:
    """Samplers with unlike seeds or sizes; states of other samples."""
    rank, group = dist.get_rank(), dist.group.WORLD

    def fresh(num_samples: int = 20, seed: int = 0, shuffle: bool = True) -> BalancedLoader:
        sampler = ResumableSampler(num_samples, rank=rank, num_ranks=2, shuffle=shuffle, seed=seed)
        inner: DataLoader[Any] = DataLoader(numbers(20), 2, sampler=sampler, collate_fn=list)
        return balanced(inner, group)

    heard = [heard_by(fresh, seed=rank), heard_by(fresh, num_samples=20 - 4 * rank)]
    _, states = run(fresh(), 2)
    others: list[dict[str, Any]] = [{"seed": 5}, {"shuffle": False}, {"num_samples": 16}]
    for kwargs in others:
        heard.append(heard_by(fresh(**kwargs).load_state_dict, states[-1]))
    heard.append(heard_by(plain("plain", 20, group).load_state_dict, states[-1]))
    wrong: list[Any] = [{"a": 1}, None]
    heard += [heard_by(fresh().load_state_dict, state) for state in wrong]
    return heard


def test_samplers_and_states_of_other_samples_are_refused() -> None:
    one, other = run_ranks(other_deals, 2)
    assert one == other
    for classes, text in one[:6]:
        assert "ConfigError" in classes and "give " in text, text
    assert "(20, 1, 0) and (20, 1, 1)" in one[0][1] and "(16, 1, 0)" in one[1][1]
    assert all("not a loader state" in text for _, text in one[6:])
