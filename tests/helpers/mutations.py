"""JSON with some places changed, as damaged files have it."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# What is mutated has no type.

import copy
import random
from collections.abc import Sequence
from typing import Any

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, -1e308, 5e-324, 2**63, 10**400),
    *(float("nan"), float("inf"), "", "1", "x" * 5000, "\ud800 \0\n" * 50, "[/x]"),
    *([], [0], [[[[]]]], {}, {"rank": 1}, {"a": [{}]}, {"fits": []}, [1.0] * 2000, ["a"] * 3),
]


def mutated(chance: random.Random, value: Any, values: Sequence[Any] = VALUES) -> Any:
    """A copy with some places changed, taken away, doubled or scaled."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 2, 5))):
        places = _places(value)
        if not places:
            break
        holder, key = chance.choice(places)
        old, way = holder[key], chance.randrange(5)
        if way == 0:
            del holder[key]
        elif way == 1 and isinstance(holder, list):
            holder.insert(chance.randrange(len(holder) + 1), copy.deepcopy(old))
        elif way == 2 and isinstance(old, int | float) and not isinstance(old, bool):
            holder[key] = old * chance.choice((-1, 0, 1e-30, 1e-9, 1e9, 1e30, 2))
        else:
            holder[key] = copy.deepcopy(chance.choice(values))
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place that can be changed: its container and its key."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        one = todo.pop()
        for key in list(one) if isinstance(one, dict) else range(len(one)):
            found.append((one, key))
            if isinstance(one[key], dict | list):
                todo.append(one[key])
    return found
