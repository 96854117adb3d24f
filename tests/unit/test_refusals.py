"""Each wrong argument of a public call is refused in one sentence that holds the words that help.

Its traceback has one exception, unless a user's own code raised another.

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

OF_OTHER_CODE = {  # whose traceback says where it failed
    *("encoders: tiles below a latent", "encoders: a video without frames"),
    "plan: a cost without pairs",
}


@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_argument_is_refused(name: str) -> None:
    _, call, words = ROWS[name]
    with pytest.raises((ConfigError, PlanError, CommError)) as caught:
        call()
    chained = caught.value.__cause__
    if not caught.value.__suppress_context__:
        chained = caught.value.__context__
    assert chained is None or name in OF_OTHER_CODE, repr(chained)
    text = str(caught.value)
    assert words, "a row without words tests nothing of the sentence"
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])|\n", text)
    assert any(all(word in one for word in words) for one in sentences), text
