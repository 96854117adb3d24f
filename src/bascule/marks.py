"""Names of profiler ranges that hold the lengths a rank computed on: bascule's, and a user's.

`bascule::lens [512,64]` is two sequences; bascule writes "bascule::step lens [..]" or
"bascule::batch lens [..]", "lens/4" where four ranks share each, "loaded" for loaded lengths.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from bascule.checks import MAX_LENGTH, is_int

Origin = Literal["", "step", "batch"]
What = Literal["lens", "loaded"]

_MARK = re.compile(r"bascule::(?:(step|batch) )?(lens|loaded)(?:/([0-9]{1,6}))? (\[[0-9, ]*\])")


@dataclass(frozen=True, slots=True)
class LengthMark:
    """The lengths in the name of a range."""

    lens: tuple[int, ...]
    what: What = "lens"  # lengths that the rank computes on, or that it "loaded"
    origin: Origin = ""  # a "step" of `SequenceParallel`, a "batch" of a loader, or a user
    shared_by: int = 1  # ranks that share each sequence

    def __str__(self) -> str:
        origin = f"{self.origin} " if self.origin else ""
        shared = f"/{self.shared_by}" if self.shared_by > 1 else ""
        return f"bascule::{origin}{self.what}{shared} [{','.join(map(str, self.lens))}]"


def marks_of(
    origin: Origin, lens: Sequence[int], loaded: Sequence[int], shared_by: int = 1
) -> list[str]:
    """Name a rank's part in a step; the loaded lengths only if they differ."""
    computed = LengthMark(tuple(lens), "lens", origin, shared_by)
    if shared_by == 1 and sorted(lens) == sorted(loaded):
        return [str(computed)]
    return [str(computed), str(LengthMark(tuple(loaded), "loaded", origin))]


def read_mark(name: str) -> LengthMark | None:
    """Read the lengths in a range's name; None if it has none, or one above 2^40."""
    match = _MARK.fullmatch(name)
    if match is None:
        return None
    origin, what, shared_by, text = match.groups()
    try:
        lens = json.loads(text)
    except ValueError:  # "[1 2]", or a number of thousands of digits
        return None
    if not all(is_int(length) and length <= MAX_LENGTH for length in lens):
        return None
    return LengthMark(
        tuple(lens), cast(What, what), cast(Origin, origin or ""), max(int(shared_by or 1), 1)
    )
