"""What a balanced loader makes of its arguments; no ranks. Wrong ones: `tests/refusals/data.py`."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from bascule.data.loader import LoaderOptions, _set_up, _Setup, _Sources
from bascule.data.packs import Pack
from bascule.data.progress import Progress
from bascule.data.samplers import ResumableSampler
from bascule.data.source import Microbatches
from bascule.plan.costs import PolynomialCost
from bascule.plan.limits import Limits

NINE: Any = range(9)
GIVEN: dict[str, Any] = {
    "loader": (),
    "cost": PolynomialCost(0.0, 1.0, 0.0),
    "length_fn": len,
    "accumulate": 1,
    "sync": "microbatch",
    "pack": None,
}


def made(**changes: Any) -> _Setup:
    """The settings with some of them changed."""
    names = LoaderOptions.__dataclass_fields__.keys() & changes.keys()
    options = LoaderOptions(**{name: changes.pop(name) for name in names})
    return _set_up(**{**GIVEN, **changes}, options=options)


def test_a_pack_limits_the_tokens_of_a_rank() -> None:
    pack = Pack(tokens=9, fixed=True)
    for changes, limits in (
        ({"pack": 9}, Limits(tokens=9)),
        ({"pack": pack, "limits": Limits(tokens=7)}, Limits(tokens=7)),
        ({"limits": Limits(tokens=7)}, Limits(tokens=7)),
        ({}, None),
    ):
        assert made(**changes).rules.limits == limits


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
    found = list(made(loader=items, **changes).source.begin((), 0, 1, None))
    if wanted is None:
        assert found == items
    else:
        assert found == list(wanted.split(iter(["abc", "de", "fghi", "jkl"])))


def test_all_settings_but_those_of_a_rank_alone_are_compared() -> None:
    """Ranks may load and collate as they like, and as many steps ahead."""
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
    base = made().settings
    for name, value in changes.items():
        settings = made(**{name: value}).settings
        assert settings.keys() == base.keys() and settings != base
    for free in ({"collate_fn": list}, {"prefetch": 3}, {"batch_size": 2}):
        assert made(**free).settings == base


def sources_of(*loaders: Any, **changes: Any) -> _Sources:
    """What is agreed by ranks with these loaders."""
    setups = [made(loader=one, **changes) for one in loaders]
    return _Sources.of(np.stack([one.words for one in setups]), setups[0].rules)


def test_who_loads_and_what_is_dealt() -> None:
    sampler = ResumableSampler(9, rank=0, num_ranks=1, shuffle=False, seed=4)
    for loader, places, number, deal in (
        (None, [], None, (0, 0, 0)),
        ([[1], [2], [3]], [0], 3, (0, 0, 0)),
        (iter([[1]]), [0], None, (0, 0, 0)),
        (DataLoader(NINE, batch_size=2, sampler=sampler), [0], 5, (9, 0, 4)),
    ):
        sources = sources_of(loader)
        assert sources.places.tolist() == places and sources.deal == deal
        assert sources.num_microbatches == number


def test_microbatches_of_an_epoch() -> None:
    def length(ends: str, *numbers: int) -> int | None:
        loaders = [iter(()) if n < 0 else [[1]] * n for n in numbers]
        return sources_of(*loaders, accumulate=4, ends=ends).num_microbatches

    assert [length("drop_last", n, 20) for n in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]
    for ends in ("pad_empty", "finish"):
        assert [length(ends, n, 0) for n in (0, 1, 4, 5, 8)] == [0, 4, 4, 8, 8]
        assert length(ends, 3, -1) is None
    assert length("drop_last", -1, 3) is None


# --- the state of an epoch ------------------------------------------------------------------------

STATE = Progress(2, 5, ((1, 2), (3, 4)), (6, 7), {"loader": "x", "offset": 8})


def test_a_run_goes_on_as_one_of_the_history() -> None:
    found = Progress.from_state(STATE.to_state((9, 1, 5)), (9, 1, 5))
    assert found == Progress(2, 5, ((1, 2), (3, 4), (6, 7)), (), {"loader": "x", "offset": 8})
    idle = dataclasses.replace(STATE, counts=(0, 0), saved=None)
    assert Progress.from_state(idle.to_state(()), ()) == dataclasses.replace(idle, counts=())
    assert Progress.from_state(Progress().to_state(()), ()) == Progress()


def test_only_loaders_that_collate_are_asked_how() -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.tensor(samples)

    batched, single = (DataLoader(NINE, batch_size=n, collate_fn=collate) for n in (2, None))
    assert made(loader=batched).source.collate_fn is collate
    assert made(loader=single).source.collate_fn is not collate
