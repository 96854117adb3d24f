"""What callers give, in every form that a hostile or tired one finds: checked in one place."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# What the types forbid is what is tried here.

import math
from collections import deque
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from bascule.errors import ConfigError
from bascule.plan.checks import (
    MAX_NUMBER,
    MAX_WHOLE,
    amounts,
    array,
    by_rank,
    called,
    check_rank,
    floats,
    integer,
    ints,
    listed,
    number,
    of_type,
    rate,
    shown,
    whole,
)
from tests.helpers.refusals import NO_NUMBERS, NO_VECTORS, UNREADABLE, refusal, title


@pytest.mark.parametrize("value", NO_NUMBERS, ids=title)
def test_what_is_no_number_in_range_is_refused(value: Any) -> None:
    for check in (whole, number, rate):
        assert refusal(lambda check=check: check("width", value)).startswith("width is ")
    assert refusal(lambda: whole("Model(width", value, 1)).startswith("Model(width=")
    assert refusal(lambda: number("--width", value)).startswith("--width ")
    if not (type(value) is int and value == -1):
        refusal(lambda: integer("width", value))


def test_numbers_in_range_are_taken_as_plain_ones() -> None:
    for value in (3, np.int8(3), np.uint64(3), torch.tensor(3)):
        assert type(whole("width", value, 3, 3)) is int
    assert type(integer("width", np.int64(-3))) is int
    for value in (2, 2.0, np.float32(2), np.int64(2), Fraction(4, 2)):
        assert type(number("width", value, 2.0, 2.0)) is float
    assert whole("width", MAX_WHOLE) == MAX_WHOLE and number("width", MAX_NUMBER) == MAX_NUMBER
    assert number("width", math.inf, most=math.inf) == math.inf
    assert rate("width", 1e-30) == 1e-30
    for value, check in ((MAX_WHOLE + 1, whole), (1e31, number), (0.0, rate), (1e-31, rate)):
        refusal(lambda check=check, value=value: check("width", value))
    assert "at least 1 and at most 8" in refusal(lambda: whole("width", 9, 1, 8))


@pytest.mark.parametrize("values", NO_VECTORS, ids=title)
def test_what_is_no_vector_of_amounts_is_refused(values: Any) -> None:
    assert "costs" in refusal(lambda: amounts("costs", values))
    assert "sizes" in refusal(lambda: ints("sizes", values, 2))


@pytest.mark.parametrize("values", UNREADABLE, ids=title)
def test_what_numpy_cannot_read_says_what_it_is(values: Any) -> None:
    told = refusal(lambda: array("lengths", values))
    assert "lengths" in told and (type(values).__name__ in told or "masked" in told)


def test_vectors_are_copies_that_cannot_be_written() -> None:
    base = np.arange(10.0)
    for given in (base[::3], base.astype(np.float32)[::3], torch.arange(0.0, 10.0, 3.0)):
        found = amounts("costs", given)
        assert found.tolist() == [0.0, 3.0, 6.0, 9.0] and found.dtype == np.float64
        assert not found.flags.writeable and not np.shares_memory(found, base)
    for given in ([True, False], [Fraction(1), 0], deque([1, 0]), np.array([1, 0], object)):
        assert amounts("costs", given).tolist() == [1.0, 0.0]
    whole_ones = ints("sizes", np.array([1, 2], np.uint8))
    assert whole_ones.dtype == np.int64 and whole_ones.tolist() == [1, 2]
    assert ints("sizes", []).dtype == np.int64


def test_vectors_say_which_entry_is_wrong() -> None:
    assert "costs[1] is -2.0" in refusal(lambda: amounts("costs", [1, -2, -3]))
    assert "costs[0, 1] is nan" in refusal(lambda: amounts("costs", [[1, math.nan]], (2,)))
    assert "overflow" in refusal(lambda: amounts("costs", [1e308, 1e308]))
    assert "costs must have two dimensions" in refusal(lambda: amounts("costs", [1.0], (2,)))
    assert "sizes has -4" in refusal(lambda: ints("sizes", [1, -4]))
    assert "sizes has 9: it must be at least 0, at most 8" in refusal(
        lambda: ints("sizes", [1, 9], most=8)
    )
    assert "give 3 integers" in refusal(lambda: ints("sizes", [1, 2], 3))
    assert "give 2 integers" in refusal(lambda: ints("sizes", [1.0, 2.0]))
    assert floats("seconds", [math.nan, -1]).tolist()[1] == -1.0


@pytest.mark.parametrize("values", [None, 5, "12", b"12", {1: 2}, {1, 2}, np.array(5)], ids=title)
def test_what_has_no_entry_a_rank_is_refused(values: Any) -> None:
    assert "give a list with one entry a source rank" in refusal(lambda: by_rank("lists", values))
    assert "give a list of them" in refusal(lambda: listed("batches", values))


def test_lists_and_what_can_be_gone_through() -> None:
    assert list(by_rank("lists", np.ones((2, 1))))[1].tolist() == [1.0]
    assert listed("batches", (x for x in "ab")) == ["a", "b"]
    assert "give a list" in refusal(lambda: by_rank("lists", (x for x in [[1]])))


def test_a_callers_function_that_fails_is_named() -> None:
    def fails(_: object) -> float:
        raise ZeroDivisionError("of\nzero")

    def refuses(_: object) -> float:
        raise ConfigError("this cost counts FLOPs, not seconds")

    assert called("the cost model", abs, -3) == 3
    told = refusal(lambda: called("the cost model", fails, 1))
    assert told == "the cost model raised ZeroDivisionError: of zero"
    assert refusal(lambda: called("the cost model", refuses, 1)).startswith("this cost counts")
    assert "must be a function" in refusal(lambda: called("the cost model", None, 1))


@pytest.mark.parametrize("rank", [-1, 2, 0.0, "0", None, True, math.nan, 10**400, np.array([0, 1])])
def test_ranks_that_are_not_there(rank: Any) -> None:
    assert "ranks 0 to 1" in refusal(lambda: check_rank(rank, 2))
    assert type(check_rank(np.int64(1), 2)) is int


def test_values_are_shown_short_and_on_one_line() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    assert shown("a\nb") == r"'a\nb'"
    assert len(shown("9" * 5000)) < 90 and shown("9" * 5000).startswith("'9999")
    assert shown(10**5000) == "a value of type int"
    assert shown(Silent()) == "a value of type Silent"
    assert shown(np.float64(2.5)) == "2.5"
    assert "\n" not in shown(np.ones((30, 30)))
    assert "limits is 5: give Limits" in refusal(lambda: of_type("limits", 5, str, "Limits(..)"))
