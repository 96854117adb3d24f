"""The part of an epoch that was delivered, and its saved state."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bascule.data.source import whole_number
from bascule.errors import ConfigError

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """The part of an epoch that was delivered, up to the next step; alike on all ranks.

    Items that each source rank had delivered in each earlier run are the `history`, those of this
    run the `counts`. `saved` is where this rank's loader goes on, if it has a state of its own.
    """

    epoch: int = 0
    step: int = 0
    history: tuple[tuple[int, ...], ...] = ()
    counts: tuple[int, ...] = ()
    saved: dict[str, Any] | None = None

    def after(self, step: int, counts: Sequence[int], saved: dict[str, Any] | None) -> "Progress":
        """Return it after a microbatch of a step, with so many items of each source rank."""
        done = self.counts or (0,) * len(counts)
        sums = tuple(map(sum, zip(done, counts, strict=True)))
        return dataclasses.replace(self, step=step + 1, counts=sums, saved=saved)

    def to_state(self, deal: Sequence[int]) -> dict[str, Any]:
        """Return plain values; `deal` is that of the `ResumableSampler`s whose samples they are."""
        return {"version": STATE_VERSION, "deal": tuple(deal), **dataclasses.asdict(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], deal: Sequence[int]) -> "Progress":
        """Go on from a state: the run that wrote it becomes the last one of the history.

        Raises:
            ConfigError: This is no such state, or one of other samples.
        """
        try:
            version, given = state["version"], tuple(state["deal"])
            history = [_counts(counts) for counts in state["history"]]
            if any(state["counts"]):
                history.append(_counts(state["counts"]))
            epoch, step = (whole_number(state[name], name) for name in ("epoch", "step"))
            saved = state["saved"]
            if saved is not None:
                saved = {"loader": saved["loader"], "offset": whole_number(saved["offset"], "it")}
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this is not a loader state written by state_dict: {error!r}"
            ) from error
        if version != STATE_VERSION:
            raise ConfigError(
                f"a loader state of version {version!r}: this bascule reads {STATE_VERSION}"
            )
        if given != tuple(deal):
            raise ConfigError(
                f"a state of samplers with (num_samples, shuffle, seed) = {given}, and these have "
                f"{tuple(deal)} (zeros: no ResumableSampler): samples would be lost or repeated"
            )
        return cls(epoch, step, tuple(history), saved=saved)


def _counts(given: Sequence[int]) -> tuple[int, ...]:
    """Check the items of each source rank: there is one at least."""
    counts = tuple(whole_number(count, "a count of the state") for count in given)
    if not counts:
        raise ValueError("no counts in the history")
    return counts
