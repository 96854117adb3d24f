"""What callers give is returned in its right type, or refused in one sentence."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from bascule.checks import (
    MAX_NUMBER,
    MAX_WHOLE,
    amounts,
    choice,
    each,
    fields,
    ints,
    number,
    shown,
    whole,
)
from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Model:
    """A dataclass whose fields are checked."""

    width: int
    gamma: float = 0.0
    scale: float | None = None
    order: str = "first"
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        order = choice, "first", "last"
        sizes = each, whole, 1
        fields(self, width=(whole, 1, 8), gamma=number, scale=number, order=order, sizes=sizes)


def test_fields_hold_plain_values() -> None:
    model = Model(np.int32(3), 2, sizes=[1, np.int8(2)])  # pyright: ignore[reportArgumentType]
    assert model == Model(3, 2.0, None, "first", (1, 2))
    assert [type(x) for x in (model.width, model.gamma, model.sizes[1])] == [int, float, int]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"width": 0}, "Model(width=0): must be an integer, at least 1 and at most 8"),
        ({"width": 2.0}, "Model(width=2.0): must be an integer"),
        ({"width": True}, "Model(width=True): must be an integer"),
        ({"width": None}, "Model(width=None): must be an integer"),
        ({"width": 1, "gamma": math.nan}, "Model(gamma=nan): must be finite, at least 0"),
        ({"width": 1, "gamma": None}, "Model(gamma=None): must be finite"),
        ({"width": 1, "scale": 10**400}, "must be finite, at least 0 and at most 1.0 x 10³⁰"),
        ({"width": 1, "order": "middle"}, 'Model(order=\'middle\'): must be "first" or "last"'),
        ({"width": 1, "sizes": [1, 0]}, "Model(sizes[1]=0): must be an integer"),
        ({"width": 1, "sizes": "11"}, "Model(sizes='11'): must be a list"),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Model(**wrong)
    assert text in str(caught.value)


def test_ranges_include_their_ends() -> None:
    assert whole("width", MAX_WHOLE) == MAX_WHOLE and number("width", MAX_NUMBER) == MAX_NUMBER
    assert number("width", math.inf, most=math.inf) == math.inf
    for check, value in ((whole, MAX_WHOLE + 1), (number, 1e31), (number, "1")):
        with pytest.raises(ConfigError, match=r"^width is "):
            check("width", value)
    with pytest.raises(ConfigError, match=r"^--width -1: must be"):
        whole("--width", -1)


def test_arrays_are_copies_of_their_own_dtype() -> None:
    given = np.array([1, 2], np.int8)
    taken = ints("ranks", given)
    given[0] = 9
    assert taken.tolist() == [1, 2] and taken.dtype == np.int64
    assert ints("ranks", []).size == 0
    assert not amounts("loads", [1, 2.5]).flags.writeable
    for values in ([1.5], [-1], [[1]], ["1"], [True], [2**60]):
        with pytest.raises(ConfigError, match=r"^ranks "):
            ints("ranks", values)
    for values in ([-1.0], [math.nan], [math.inf], [[1.0]], ["1"], [1j], [1e308, 1e308]):
        with pytest.raises(ConfigError, match=r"^loads"):
            amounts("loads", values)
    with pytest.raises(ConfigError, match=r"give 3 integers"):
        ints("ranks", [1], 3)


def test_a_long_value_is_shown_on_one_short_line() -> None:
    assert shown(np.float64(2.5)) == "2.5"
    text = shown(["a\nb"] * 100)
    assert len(text) < 80 and "\n" not in text
