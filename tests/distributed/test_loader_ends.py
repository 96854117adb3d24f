"""Ranks run out of samples at different steps: agreed, nothing lost, nothing twice, no hang."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from bascule.data import prefetch
from bascule.errors import ConfigError
from tests.helpers.loader_cases import PER_RANK, loader_of, loader_threads, sample_of
from tests.helpers.loader_checks import ids_of
from tests.helpers.ranks import on_ranks, run_ranks


def left_over() -> list[tuple[list[int], int]]:
    """Samples delivered and how many were dropped, where two, one, or no loader knows its size."""
    rank, results = dist.get_rank(), list[tuple[list[int], int]]()
    for nums, is_sized in (((8, 0), True), ((10, 14), True), ((100, 4), True), ((9, 5), False)):
        samples = [sample_of(PER_RANK * rank + k, 5) for k in range(nums[rank])]
        inner: Any = DataLoader(samples, batch_size=2, collate_fn=list)  # pyright: ignore
        ended = loader_of(inner if is_sized else ([one] for one in samples), accumulate=2)
        ids = [i for batch in ended for i in ids_of(batch)]
        assert ended.state_dict()["epoch"] == 1 and not loader_threads()
        results.append((ids, ended.metrics()["dropped_samples"]))
    return results


def test_what_drop_last_leaves_out_is_counted_where_it_is_known() -> None:
    one, other = run_ranks(left_over, 2)
    assert [num for _, num in one] == [8, 2, 96, 2] and [num for _, num in other] == [0, 6, 0, 1]
    expected = [[], [*range(8)], [*range(4)], [*range(4)]]
    for (ids, _), (more, _), wanted in zip(one, other, expected, strict=True):
        assert sorted(ids + more) == [*wanted, *(PER_RANK + i for i in wanted)]


def warnings_of(num_samples: int, **settings: Any) -> list[str]:
    """What two epochs without a batch that counts say on this rank."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bascule.data.steps").addHandler(handler)
    loader = loader_of([[sample_of(k, 5)] for k in range(num_samples)], **settings)
    assert not any(batch.loss_scale for _ in range(2) for batch in loader)
    logging.getLogger("bascule.data.steps").removeHandler(handler)
    return heard


def without_gain() -> tuple[list[str], list[str]]:
    """One of two ranks has no sample; all samples have the weight 0."""
    nothing = warnings_of(3 * (1 - dist.get_rank()), ends="drop_last")
    return nothing, warnings_of(3, weight_fn=lambda _: 0)


def test_epochs_that_train_on_nothing_say_once_why() -> None:
    ((said,), (weights,)), nothing = run_ranks(without_gain, 2)
    assert "data-parallel ranks [1]" in said and 'ends="pad_empty"' in said
    assert "step 0: weight_fn gave 0 for all samples" in weights and nothing == ([], [])


def two_loaders() -> list[Any]:
    """Training and validation, with unlike lengths; validation in the middle of training."""
    rank = dist.get_rank()

    def lists(first: int, num: int) -> list[list[dict[str, Any]]]:
        ids = [first + PER_RANK * rank + k for k in range(2 * num)]
        made = [sample_of(i, 4 + (k // 2 * 7 + rank * 9) % 30) for k, i in enumerate(ids)]
        return [made[k : k + 2] for k in range(0, 2 * num, 2)]

    training = loader_of(lists(0, 6 + rank), ends="finish", prefetch=4)
    validation = loader_of(lists(50_000, 3 - rank), ends="pad_empty", prefetch=4)
    seen: list[Any] = []
    for epoch in range(2):
        for batch in training:
            assert batch.epoch == epoch
            seen.append(("training", epoch, batch.step, ids_of(batch)))
            time.sleep(0.003 * rank)
            if batch.step % 3 == 1:
                checked = [("validation", epoch, b.step, ids_of(b)) for b in validation]
                assert len(checked) == 3
                seen += checked
            # The main thread's own collectives do not meet those of the loaders' threads.
            total = torch.ones(1)
            dist.all_reduce(total)
            assert int(total) == 2
    # Both at once, step by step.
    for batch, other in zip(training, validation, strict=False):
        seen.append(("training", 2, batch.step, ids_of(batch)))
        seen.append(("validation", 2, other.step, ids_of(other)))
    training.close()
    assert not loader_threads()
    return seen


def test_training_and_validation_alternate_and_overlap() -> None:
    of_rank = run_ranks(two_loaders, 2)
    assert [one[:3] for one in of_rank[0]] == [one[:3] for one in of_rank[1]]
    for k, (kind, _, step, _) in enumerate(of_rank[0]):
        ids = sorted(i for seen in of_rank for i in seen[k][3])
        first, num = (0, (6, 7)) if kind == "training" else (50_000, (3, 2))
        starts = [first + PER_RANK * rank + 2 * step for rank in range(2) if step < num[rank]]
        assert ids == [start + j for start in starts for j in range(2)], (kind, step)


@on_ranks(2)
def test_no_data_on_any_rank() -> None:
    for ends in ("drop_last", "pad_empty", "finish"):
        for samples in ([], None):
            loader = loader_of(samples, ends=ends)
            assert list(loader) == [] and list(loader) == []
            assert loader.metrics()["steps"] == 0
            assert loader.state_dict()["epoch"] == 2
    assert not loader_threads()


@on_ranks(1)
def test_as_many_steps_are_made_ahead_as_were_asked_for() -> None:
    """The thread is told of the room for another one, rather than finds it at its next look."""
    prefetch._LOOK_S = 1000.0  # pyright: ignore[reportPrivateUsage]
    for ahead in (1, 2, 3):
        loaded: list[int] = []

        def load(loaded: list[int] = loaded) -> Iterator[list[dict[str, Any]]]:
            for k in range(20):
                loaded.append(k)
                yield [sample_of(k, 3)]

        with loader_of(load(), prefetch=ahead) as loader:
            iterator = iter(loader)
            next(iterator)
            deadline = time.monotonic() + 100.0
            while len(loaded) < 1 + ahead and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.2)  # one more would come at once, most of the time
            assert len(loaded) == 1 + ahead


@on_ranks(1)
def test_an_older_iteration_ends_without_the_newer_one() -> None:
    """It is dropped when the next one of the same loader is under way."""
    training = loader_of([[sample_of(k, 4)] for k in range(6)], ends="finish")
    older: Any = iter(training)
    seen = [ids_of(next(older))]
    newer = iter(training)
    seen.append(ids_of(next(newer)))
    older.close()
    with pytest.raises(ConfigError):  # the newer one goes on
        training.load_state_dict(training.state_dict())
    seen += [ids_of(batch) for batch in newer]
    assert seen == [[0], [0], [1], [2], [3], [4], [5]]
    assert not loader_threads() and training.metrics()["dropped_samples"] == 0
    training.load_state_dict(training.state_dict())
    # What a `with` leaves to its end, a loop behind it does not.
    with training:
        for _ in training:
            break
    for _ in training:
        break
    assert not loader_threads()
