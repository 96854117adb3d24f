"""What one rank loads: grouped, dealt over ranks, and taken up where a run stopped."""

import random
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from bascule.data.samplers import History, ResumableSampler
from bascule.data.source import Microbatches, Saved, Source, state_of, words_of
from bascule.errors import ConfigError


def deal(size: int, num_ranks: int, history: History = (), **settings: Any) -> list[list[int]]:
    dealt: list[list[int]] = []
    for rank in range(num_ranks):
        sampler = ResumableSampler(size, rank=rank, num_ranks=num_ranks, **settings)
        sampler.resume(history)
        dealt.append(list(sampler))
        assert len(sampler) == len(dealt[-1])
    return dealt


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return [one for items in lists for one in items]


@pytest.mark.parametrize("size", [0, 1, 5, 12, 13])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_is_dealt_once(size: int, num_ranks: int, shuffle: bool) -> None:
    dealt = deal(size, num_ranks, shuffle=shuffle)
    assert sorted(flat(dealt)) == list(range(size))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    if not shuffle:
        assert dealt[0] == list(range(size))[::num_ranks]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    sampler = ResumableSampler(50, rank=0, num_ranks=1, seed=3)
    torch.manual_seed(1)
    first = list(sampler)
    torch.manual_seed(2)
    assert list(sampler) == first != list(range(50))
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first != second
    assert list(ResumableSampler(50, rank=0, num_ranks=1, seed=4)) not in (first, second)


def test_what_is_left_is_dealt_over_any_number_of_ranks() -> None:
    draw = random.Random(0)
    for trial in range(200):
        size, history, taken = draw.randint(0, 40), list[list[int]](), list[int]()
        for _ in range(draw.randint(1, 4)):
            dealt = deal(size, draw.randint(1, 5), history, seed=trial)
            counts = [draw.randint(0, len(share)) for share in dealt]
            taken += flat(share[:n] for share, n in zip(dealt, counts, strict=True))
            history.append(counts)
        rest = deal(size, draw.randint(1, 5), history, seed=trial)
        assert sorted(taken + flat(rest)) == list(range(size))


def test_more_than_there_is_was_not_delivered() -> None:
    sampler = ResumableSampler(5, rank=0, num_ranks=2)
    sampler.resume([[1, 1], [2, 1]])
    assert len(sampler) == 0
    with pytest.raises(ConfigError, match=r"6 samples were delivered .* there are 5"):
        sampler.resume([[1, 1], [2, 2]])


def read(source: Source, history: History = (), saved: Saved | None = None) -> list[list[Any]]:
    return list(source.begin(history, 0, 1, saved))


def by_number(num_samples: int) -> Microbatches:
    return Microbatches(num_samples, None, int)


def test_samples_are_grouped_by_number_whatever_lists_they_come_in() -> None:
    for loader in ([0, 1, 2, 3, 4], [[0], [], [1, 2, 3], [4]], [[0, 1, 2, 3, 4]]):
        assert read(Source(loader, by_number(2))) == [[0, 1], [2, 3], [4]]
    assert read(Source([[0], [], [1, 2]], None)) == [[0], [], [1, 2]]
    assert read(Source([], by_number(2))) == [] == read(Source(None, None))
    # A tuple is a sample, not a list of samples.
    assert read(Source([(1, 2), (3, 4)], by_number(1))) == [[(1, 2)], [(3, 4)]]


def test_samples_are_grouped_by_tokens() -> None:
    def grouped(*lens: int) -> list[list[int]]:
        return read(Source(list(lens), Microbatches(None, 10, int)))

    assert grouped(4, 6, 1, 10, 3) == [[4, 6], [1], [10], [3]]
    assert grouped(11, 2, 30, 1, 1) == [[11], [2], [30], [1, 1]]
    assert grouped(0, 0, 10, 0) == [[0, 0, 10, 0]]
    assert grouped() == []


class Counting(Dataset[int]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, place: int) -> int:
        return place


class Stream(IterableDataset[int]):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def refuse(samples: list[int]) -> torch.Tensor:
    raise AssertionError("collated before the exchange")


def test_a_data_loader_gives_samples_and_its_collate_fn_is_kept() -> None:
    inner: DataLoader[Any] = DataLoader(Counting(), 4, collate_fn=refuse)
    source = Source(inner, None)
    assert source.collate_fn is refuse and source.num_microbatches == 3
    assert read(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]] == read(source)
    assert inner.collate_fn is refuse  # the user's loader is as it was
    single: DataLoader[Any] = DataLoader(Counting(), batch_size=None)
    assert read(Source(single, by_number(6))) == [list(range(6)), list(range(6, 11))]
    assert read(Source(DataLoader(Stream(), 3), None)) == [[0, 1, 2], [3, 4, 5], [6]]
    given: DataLoader[Any] = DataLoader(Counting(), batch_sampler=[[3, 1], [], [5]])
    assert read(Source(given, None)) == [[3, 1], [], [5]]


def test_the_number_of_microbatches_where_it_is_known() -> None:
    assert Source(None, None).num_microbatches == 0 and Source(None, None).is_empty
    assert Source([[1], [2]], None).num_microbatches == 2
    for source in (Source([1, 2], by_number(2)), Source(iter([[1]]), None)):
        assert source.num_microbatches == -1


def test_whatever_shuffles_hears_of_the_epoch() -> None:
    stream = Stream()
    Source(DataLoader(stream, 2), None).set_epoch(4)
    assert stream.epoch == 4
    sampler = DistributedSampler(Counting(), 2, 0, seed=1)
    source = Source(DataLoader(Counting(), 3, sampler=sampler), None)
    first, second, again = (source.set_epoch(epoch) or read(source) for epoch in (0, 1, 0))
    assert first == again != second


@pytest.mark.parametrize("grouping", [None, 1, 2, 3, 5])
def test_a_plain_loader_goes_on_after_what_was_delivered(grouping: int | None) -> None:
    groups = None if grouping is None else by_number(grouping)
    lists = [[0, 1], [2], [3, 4, 5], [6, 7, 8, 9]]
    for skip in range(11):
        source = Source(lists, groups)
        left = read(source, [[skip]])
        twice = read(source, [[skip // 2], [skip - skip // 2]])
        assert flat(left) == flat(twice) == list(range(skip, 10))
        if grouping is not None:
            assert all(len(group) == grouping for group in left[:-1])
    with pytest.raises(ConfigError, match=r"3 loaders .* this run has 1: .* ResumableSampler"):
        read(Source(lists, groups), [[1, 1, 1]])
    with pytest.raises(ConfigError, match=r"11 samples were delivered .* there are 10"):
        read(Source(lists, groups), [[4], [7]])


class WithState:
    """Lists of samples, with a state of its own."""

    def __init__(self, lists: list[list[int]]) -> None:
        self.lists, self.place, self.loaded = lists, 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.place < len(self.lists):
            self.place += 1
            self.loaded += 1
            yield self.lists[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def by_tokens(num_tokens: int) -> Microbatches:
    """Samples of one token; the sample that does not fit any more was loaded, too."""
    return Microbatches(None, num_tokens, lambda _: 1)


def after(saved: Saved, taken: list[int]) -> Saved:
    """Return a state as the next run gets it, in which these samples are delivered."""
    first, state = saved
    return first - len(taken), state


@pytest.mark.parametrize(
    "groups",
    [None, *map(by_number, (1, 2, 3, 5)), *map(by_tokens, (1, 2, 3, 4))],
    ids=lambda one: "lists" if one is None else f"{one.num_samples} {one.num_tokens}",
)
def test_a_loader_with_a_state_goes_on_from_it(groups: Microbatches | None) -> None:
    lists = [[0, 1], [2], [3, 4, 5], [6, 7, 8, 9]]
    points, taken = list[tuple[list[int], Any]](), list[int]()
    reading = Source(WithState(lists), groups).begin((), 0, 1, None)
    before = reading.saved()
    for group in reading:
        taken = taken + group
        points += [(taken, after(before, taken)), (taken, after(reading.saved(), taken))]
        before = reading.saved()
    for taken, saved in points:
        again = Source(WithState(lists), groups).begin([[len(taken)]], 0, 1, saved)
        assert taken + flat(again) == list(range(10))
        # And once more, from the middle of that.
        second = Source(WithState(lists), groups).begin([[len(taken)]], 0, 1, saved)
        first = next(second, [])
        state, twice = after(second.saved(), first), [[len(taken)], [len(first)]]
        third = Source(WithState(lists), groups).begin(twice, 0, 1, state)
        assert taken + first + flat(third) == list(range(10))
    # The state spares what is far behind from being loaded again.
    loader = WithState(lists)
    list(Source(loader, groups).begin([[9]], 0, 1, points[-3][1]))
    assert loader.loaded <= 2


def test_a_resumable_sampler_spares_the_skipped_samples() -> None:
    seen: list[int] = []

    class Seen(Counting):
        def __getitem__(self, place: int) -> int:
            seen.append(place)
            return place

    sampler = ResumableSampler(11, rank=0, num_ranks=1, shuffle=False)
    source = Source(DataLoader(Seen(), 2, sampler=sampler), None)
    assert read(source, [[3, 4]]) == [[6, 8], [9, 10]]
    assert sorted(set(seen)) == [i for i in range(11) if i // 2 >= (3, 4)[i % 2]]
    seen.clear()
    assert len(read(source)) == 6 and len(seen) == 11  # the next epoch is whole


COLLATED = {"ids": torch.zeros(4, 7), "labels": torch.zeros(4)}


@pytest.mark.parametrize(
    "item",
    [
        *(COLLATED, tuple(COLLATED.values()), COLLATED["ids"], 5, "text"),
        *([*COLLATED.values()], [["a", "b"], torch.zeros(2)], [np.zeros(3)], [[1, 2], [3, 4]]),
    ],
)
def test_what_may_be_a_collated_batch_is_refused(item: Any) -> None:
    """Of a DataLoader without a batch size, too; not where the user says what an item is."""
    for loader in ([item], DataLoader(cast(Any, [item]), batch_size=None)):
        with pytest.raises(ConfigError, match=r"collated batch.* LoaderOptions\(unpack=\.\.\)"):
            read(Source(loader, None))
        (packs,) = read(Source(loader, None, has_packs=True))
        assert len(packs) == (len(item) if isinstance(item, list) else 1)
        if not isinstance(item, list):
            assert str(read(Source(loader, by_number(1)))) == str([[item]])
            continue
        with pytest.raises(ConfigError, match="collated batch"):
            read(Source(loader, by_number(1)))


def test_samples_of_a_data_loader_may_be_anything() -> None:
    for sample in (torch.zeros(2), np.zeros(2), [1, 2], None, COLLATED):
        loader: DataLoader[Any] = DataLoader(cast(Any, [sample] * 3), 2)
        assert read(Source(loader, None)) == [[sample] * 2, [sample]]


class CountsSamples(DataLoader[Any]):
    """Counts the samples of its batches by itself, as MosaicML's StreamingDataLoader."""

    seen = first = 0

    def count(self, batch: Any) -> int:
        if isinstance(batch, dict):
            return len(next(iter(batch.values())))
        return len(batch) if isinstance(batch, torch.Tensor) else len(batch[0])

    def __iter__(self) -> Any:
        self.seen, first = 0, self.first
        for batch in super().__iter__():
            self.seen += self.count(batch)
            if self.seen > first:
                yield batch
        self.first = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["seen"]


def count_field(_: CountsSamples, batch: Any) -> int:
    return len(batch["ids"])


@pytest.mark.parametrize("count", [CountsSamples.count, count_field, lambda _, batch: len(batch)])
@pytest.mark.parametrize("sample", [{"ids": 1, "b": 2, "c": 3}, (1, 2, 3), torch.zeros(5), 7])
def test_a_loader_that_counts_its_batches_counts_samples(count: Any, sample: Any) -> None:
    """Its `collate_fn` makes batches of what it likes; here they are lists of samples."""
    loader: Any = type("Loader", (CountsSamples,), {"count": count})
    numbered = cast(Any, [(number, sample) for number in range(9)])
    for stop in range(1, 5):
        reading = Source(loader(numbered, 2), None).begin((), 0, 1, None)
        taken = [number for _ in range(stop) for number, _ in next(reading)]
        saved = after(reading.saved(), taken)
        rest = Source(loader(numbered, 2), None).begin([[len(taken)]], 0, 1, saved)
        assert taken + [number for samples in rest for number, _ in samples] == list(range(9))


class Collates(DataLoader[Any]):
    """Keeps one iterator for all epochs, as YOLO's InfiniteDataLoader."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept = super().__iter__()

    def __iter__(self) -> Any:
        return self.kept


def test_a_loader_whose_batches_were_collated_before_is_refused() -> None:
    for groups in (None, by_number(2)):
        with pytest.raises(ConfigError, match="yields a Tensor, maybe a collated batch"):
            read(Source(Collates(Counting(), 4), groups))
        told = Collates(Counting(), 4, False, None, None, 0, list)
        assert flat(read(Source(told, groups))) == list(range(11))


def test_workers_that_live_on_collate_no_longer() -> None:
    loader: DataLoader[Any] = DataLoader(
        Counting(), 4, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    collated = [batch.tolist() for batch in loader]
    source = Source(loader, None)
    assert read(source) == collated == read(source) == [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
def test_an_order_that_no_other_run_draws_is_not_resumed() -> None:
    loader: DataLoader[Any] = DataLoader(Counting(), 4, shuffle=True)
    assert len(read(Source(loader, None))) == 3
    with pytest.raises(ConfigError, match="a RandomSampler draws another order in each run"):
        read(Source(loader, None), [[4]])
    stateful: Any = StatefulDataLoader(Counting(), 4, shuffle=True)
    reading = Source(stateful, None).begin((), 0, 1, None)
    saved, taken = reading.saved(), next(reading)
    fresh: Any = StatefulDataLoader(Counting(), 4, shuffle=True)
    rest = read(Source(fresh, None), [[4]], after(saved, taken))
    assert sorted(taken + flat(rest)) == list(range(11))


def test_a_state_that_cannot_travel_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(WithState):
        def state_dict(self) -> Any:
            return {"place": {self.place}}

    lists = [[0, 1], [2], [3, 4]]
    reading = Source(Odd(lists), None).begin((), 0, 1, None)
    first, words = reading.saved()
    assert first == words.size == 0
    assert "state_dict() of the Odd cannot be saved" in caplog.text
    assert next(reading) == [0, 1]
    assert read(Source(Odd(lists), None), [[2]], (0, words)) == [[2], [3, 4]]


def test_states_travel_as_they_are() -> None:
    state = {"a": [1, 2**80, None], "b": (torch.arange(3), np.ones(2)), "c": {"d": b"x", "e": 0.1}}
    assert str(state_of(words_of(state))) == str(state)
    assert words_of(None).size == 0 and state_of(words_of(None)) is None


def test_an_iterator_that_is_used_up_is_an_error_in_the_next_epoch() -> None:
    source = Source(iter([[1], [2]]), None)
    assert read(source) == [[1], [2]]
    with pytest.raises(ConfigError, match="list_iterator, which yields its samples once"):
        read(source)
    assert read(Source(iter([]), None)) == [] == read(Source([], None))
    endless = Source(iter([[1], [2]]), None)
    assert next(endless.begin((), 0, 1, None)) == [1] and read(endless) == [[2]]


def test_batch_samplers_hear_of_the_epoch() -> None:
    class Batches:
        epoch = 0

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[self.epoch]])

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    batches: Any = Batches()
    source = Source(DataLoader(Counting(), batch_sampler=batches), None)
    source.set_epoch(3)
    assert read(source) == [[3]]
