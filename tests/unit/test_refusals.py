"""Each wrong argument of a public call is refused in one sentence that holds the words that help.

The tables are in `tests/refusals`, one file an area: `CASES` of (name, call, words).
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bascule.errors import CommError, ConfigError, PlanError

FOLDER = Path(__file__).parents[1] / "refusals"

Case = tuple[str, Callable[[], object], tuple[str, ...]]


def cases() -> dict[str, Case]:
    """All rows of all tables by "area: name"."""
    rows: dict[str, Case] = {}
    for path in sorted(FOLDER.glob("*.py")):
        for case in importlib.import_module(f"tests.refusals.{path.stem}").CASES:
            name = f"{path.stem}: {case[0]}"
            assert name not in rows, f"two rows {name!r}"
            rows[name] = case
    return rows


ROWS = cases()


@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_argument_is_refused(name: str) -> None:
    _, call, words = ROWS[name]
    with pytest.raises((ConfigError, PlanError, CommError)) as caught:
        call()
    text = str(caught.value)
    assert words, "a row without words tests nothing of the sentence"
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])|\n", text)
    assert any(all(word in one for word in words) for one in sentences), text
