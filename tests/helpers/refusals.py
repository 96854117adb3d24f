"""What must be refused, and how it was."""

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from bascule.errors import ConfigError
from bascule.plan.checks import (
    shown,
)

NO_NUMBERS: list[Any] = [
    None,
    True,
    np.True_,
    "1",
    b"1",
    1j,
    Decimal(1),
    [1],
    (1, 2),
    {1: 2},
    object(),
    np.array([1, 2]),
    np.timedelta64(1),
    torch.ones(2),
    math.nan,
    10**400,
    -(10**400),
    10**5000,
    math.inf,
    -1,
    -0.5,
]

UNREADABLE: list[Any] = [
    torch.ones(2, dtype=torch.bfloat16),
    torch.ones(2, requires_grad=True),
    torch.ones(2, device="meta"),
    torch.eye(2).to_sparse(),
    [torch.ones((), dtype=torch.bfloat16)],
    [[1], [2, 3]],
    np.ma.array([1.0, 2.0], mask=[False, True]),
]

NO_VECTORS: list[Any] = [
    *UNREADABLE,
    None,
    5,
    "12",
    b"12",
    ["1", "2"],
    [None, 1],
    [1j, 2],
    [object(), 1],
    [Decimal(1)],
    {1: 2},
    {1, 2},
    (x for x in [1, 2]),
    np.array([5], "M8[s]"),
    np.array([5], "m8[s]"),
    np.array([(5,)], dtype=[("a", "i4")]),
    [10**400, 1],
    [math.nan, 1],
    [math.inf, 1],
    [-1, 1],
    [[1, 2]],
]


def title(value: Any) -> str:
    """A value in the name of a test: without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", shown(value))


def refusal(call: Callable[[], object]) -> str:
    """The sentence of a ConfigError: on one line, and not long."""
    with pytest.raises(ConfigError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and 10 < len(text) < 500
    return text


def refused(*calls: Callable[[], object]) -> None:
    for call in calls:
        refusal(call)
