"""What a balanced loader can be given, and what follows from it; no ranks."""

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from bascule.comm.agree import Statement
from bascule.comm.groups import RankGroup
from bascule.data.loader import (
    Given,
    LoaderOptions,
    Sources,
    _check_deals,
    agree_on_settings,
    interpret,
)
from bascule.data.packs import Pack
from bascule.data.progress import Progress
from bascule.data.samplers import ResumableSampler
from bascule.data.source import Microbatches, Source
from bascule.data.steps import DataRanks, Rules
from bascule.errors import ConfigError
from bascule.plan.costs import PolynomialCost
from bascule.plan.limits import Limits

NINE: Any = range(9)
GIVEN = Given(
    loader=[],
    cost=PolynomialCost(0.0, 1.0, 0.0),
    length_fn=len,
    accumulate=1,
    sync="microbatch",
    pack=None,
    options=LoaderOptions(timeout_s=60.0),
)


def made(**changes: Any) -> tuple[Given, Source]:
    """The settings with some of them changed, checked."""
    options = {name: changes.pop(name) for name in list(changes) if hasattr(GIVEN.options, name)}
    given = dataclasses.replace(GIVEN, options=dataclasses.replace(GIVEN.options, **options))
    return interpret(dataclasses.replace(given, **changes))


NO_COUNTS = (0, -1, True, 1.0, "1", float("nan"))
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("accumulate", (1, 7), (*NO_COUNTS, None)),
        ("prefetch", (1, 7), (*NO_COUNTS, None)),
        ("batch_size", (1, 7, None), NO_COUNTS),
        ("max_bytes_in_flight", (1, 2**40, None), NO_COUNTS),
        ("min_gain", (0.0, 0, 0.999, np.float32(0.5)), (1.0, -1e-9, NAN, True, "0", None)),
        ("bytes_per_s", (1e-9, 1, INF, None), (0.0, -1.0, NAN, True, "1")),
        ("timeout_s", (1e-3, 1, 9.9e6), (0.0, -1.0, 1.01e7, INF, NAN, True, "1", None)),
        ("sync", ("microbatch", "step"), ("none", None, 1)),
        ("ends", ("drop_last", "pad_empty", "finish"), ("drop", None, 1)),
        ("limits", (Limits(tokens=5), None), (5, {"tokens": 5})),
        ("pack", (Pack(tokens=5), 5, None), (0, -1, "5", 5.0)),
        ("cost", (PolynomialCost(0.0, 1.0, 0.0), len), (None, 1.0)),
        ("length_fn", (len,), (None, 3)),
        ("weight_fn", (len, None), (3,)),
        ("unpack", (list, None), (3, "list")),
        ("collate_fn", (list, None), (3,)),
        ("options", (LoaderOptions(),), (None, {"prefetch": 2})),
    ],
)
def test_arguments_within_their_range_and_no_others(
    name: str, right: tuple[Any, ...], wrong: tuple[Any, ...]
) -> None:
    for value in right:
        made(**{name: value})
    for value in wrong:
        with pytest.raises(ConfigError):
            made(**{name: value})


def test_packs_are_not_grouped_twice() -> None:
    for other in ({"pack": 5}, {"unpack": list}):
        made(**other)
        with pytest.raises(ConfigError):
            made(batch_size=2, **other)


def test_packs_are_not_collated_by_another_function() -> None:
    with pytest.raises(ConfigError, match="leave collate_fn out, or pack"):
        made(pack=Pack(tokens=8), collate_fn=list)


def test_what_a_pack_means() -> None:
    given, _ = made(pack=9)
    assert given.pack == Pack(tokens=9) and given.rules.limits == Limits(tokens=9)
    pack = Pack(tokens=9, fixed=True)
    given, _ = made(pack=pack, limits=Limits(tokens=7))
    assert given.pack is pack and given.rules.limits == Limits(tokens=7)
    assert made(limits=Limits(tokens=7))[0].rules.limits == Limits(tokens=7)
    assert made()[0].rules.limits is None


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, None),
        ({"batch_size": 3}, Microbatches(3, None, len)),
        ({"pack": 9}, Microbatches(None, 9, len)),
        ({"pack": 9, "unpack": list}, None),
    ],
)
def test_how_samples_are_grouped(changes: dict[str, Any], wanted: Microbatches | None) -> None:
    items: list[Any] = [["abc"], ["de", "fghi"], ["jkl"]]
    _, source = made(loader=items, **changes)
    found = list(source.begin((), 0, 1, None))
    if wanted is None:
        assert found == items
    else:
        assert found == list(wanted.split(iter(["abc", "de", "fghi", "jkl"])))


RANKS = DataRanks(RankGroup(lambda: None, 0, (0,), (), "loader"), np.array([0]))


def stated(loader: Any = (), **changes: Any) -> tuple[Statement, Sources]:
    """What a rank says of its settings, and what follows if it is the only one."""
    said: list[Statement] = []

    def note(_: RankGroup, statement: Statement, **__: Any) -> list[Any]:
        said.append(statement)
        return [statement.values]

    _, source = made(loader=loader)
    with mock.patch("bascule.data.loader.agree", note):
        sources = agree_on_settings(RANKS, made(**changes)[0], source, None)
    return said[0], sources


def test_ranks_are_given_the_same_settings() -> None:
    """But may load and collate as they like, and as many steps ahead."""
    changes = {
        "accumulate": 2,
        "sync": "step",
        "limits": Limits(tokens=5),
        "ends": "finish",
        "min_gain": 0.03,
        "max_bytes_in_flight": 9,
        "bytes_per_s": 1e9,
        "timeout_s": 61.0,
        "length_fn": sum,
        "weight_fn": len,
        "unpack": list,
        "cost": PolynomialCost(0.0, 2.0, 0.0),
    }
    rules, others = made()[0].rules, made(**changes)[0].rules
    for field in dataclasses.fields(Rules):
        assert getattr(rules, field.name) != getattr(others, field.name), field.name
    base = dict(stated()[0].settings)
    for name, value in changes.items():
        settings = stated(**{name: value})[0].settings
        assert settings.keys() == base.keys() and settings != base
    for free in ({"collate_fn": list}, {"prefetch": 3}, {"batch_size": 2}):
        assert stated(**free)[0].settings == base


def test_ranks_say_what_they_load() -> None:
    sampler = ResumableSampler(9, rank=0, num_ranks=1, shuffle=False, seed=4)
    for loader, places, numbers, deal in (
        (None, [], [], (0, 0, 0)),
        ([[1], [2], [3]], [0], [3], (0, 0, 0)),
        (iter([[1]]), [0], [-1], (0, 0, 0)),
        (DataLoader(NINE, batch_size=2, sampler=sampler), [0], [5], (9, 0, 4)),
    ):
        statement, sources = stated(loader)
        assert sources.places.tolist() == places and sources.deal == deal
        assert sources.num_microbatches.tolist() == numbers and statement.error is None


def test_a_rank_that_was_given_something_wrong_says_so() -> None:
    said: list[Exception | None] = []

    def note(_: RankGroup, statement: Statement, **__: Any) -> list[Any]:
        said.append(statement.error)
        return [statement.values]

    source, wrong = made()[1], ConfigError("wrong")
    odd, no_cost, no_options = (
        dataclasses.replace(GIVEN, **change)
        for change in ({"cost": lambda lens: lens[:0]}, {"cost": None}, {"options": None})
    )
    with mock.patch("bascule.data.loader.agree", note):
        agree_on_settings(RANKS, odd, source, None)
        for given in (GIVEN, no_cost, no_options):
            agree_on_settings(RANKS, given, source, wrong)
    assert isinstance(said[0], ConfigError) and said[1:] == [wrong] * 3


def test_microbatches_of_an_epoch() -> None:
    def length(ends: str, numbers: list[int]) -> int | None:
        sources = Sources(np.arange(len(numbers)), np.array(numbers, dtype=np.int64), (0, 0, 0))
        return sources.epoch_length(made(accumulate=4, ends=ends)[0].rules)

    assert [length("drop_last", [n, 20]) for n in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]
    for ends in ("pad_empty", "finish"):
        assert [length(ends, [n, 0]) for n in (0, 1, 4, 5, 8)] == [0, 4, 4, 8, 8]
        assert length(ends, [3, -1]) is None and length(ends, []) is None
    assert length("drop_last", [-1, 3]) is None


def test_samplers_must_deal_every_sample_once() -> None:
    """By row: a rank's share, the shares, and what is dealt."""
    places, zeros = np.array([0, 2]), [0, 0, 0, 0, 0]
    for deals in ([zeros, zeros], [[0, 2, 9, 1, 5], [1, 2, 9, 1, 5]]):
        _check_deals(places, np.array(deals))
    _check_deals(np.zeros(0, np.int64), np.zeros((0, 5), np.int64))
    wrong = [
        [[1, 2, 9, 1, 5], [0, 2, 9, 1, 5]],
        [[0, 2, 9, 1, 5], [0, 2, 9, 1, 5]],
        [[0, 3, 9, 1, 5], [1, 3, 9, 1, 5]],
        [[0, 2, 9, 1, 5], [1, 2, 8, 1, 5]],
        [[0, 2, 9, 1, 5], [1, 2, 9, 0, 5]],
        [[0, 2, 9, 1, 5], [1, 2, 9, 1, 4]],
        [[0, 2, 9, 1, 5], zeros],
    ]
    for deals in wrong:
        with pytest.raises(ConfigError):
            _check_deals(places, np.array(deals))


# --- the state of an epoch ------------------------------------------------------------------------

STATE = Progress(2, 5, ((1, 2), (3, 4)), (6, 7), {"loader": "x", "offset": 8})


def test_a_run_goes_on_as_one_of_the_history() -> None:
    found = Progress.from_state(STATE.to_state((9, 1, 5)), (9, 1, 5))
    assert found == Progress(2, 5, ((1, 2), (3, 4), (6, 7)), (), {"loader": "x", "offset": 8})
    idle = dataclasses.replace(STATE, counts=(0, 0), saved=None)
    assert Progress.from_state(idle.to_state(()), ()) == dataclasses.replace(idle, counts=())
    assert Progress.from_state(Progress().to_state(()), ()) == Progress()


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"deal": (9, 1, 4)},
        {"deal": None},
        {"epoch": -1},
        {"step": 1.5},
        {"history": ((),)},
        {"history": ((1, -2),)},
        {"history": None},
        {"counts": (1, 0.5)},
        {"saved": {"loader": "x"}},
        {"saved": {"loader": "x", "offset": -1}},
        {"saved": {"offset": 1}},
    ],
)
def test_what_is_no_state_is_refused(changes: dict[str, Any]) -> None:
    state = STATE.to_state((9, 1, 5))
    with pytest.raises(ConfigError):
        Progress.from_state(state | changes, (9, 1, 5))
    for name in state:
        with pytest.raises(ConfigError):
            Progress.from_state({key: state[key] for key in state if key != name}, (9, 1, 5))


def test_only_loaders_that_collate_are_asked_how() -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.tensor(samples)

    batched, single = (DataLoader(NINE, batch_size=n, collate_fn=collate) for n in (2, None))
    assert made(loader=batched)[1].collate_fn is collate
    assert made(loader=single)[1].collate_fn is not collate
