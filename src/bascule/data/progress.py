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
    """The part of an epoch that was delivered, up to the next step; alike on all ranks."""

    epoch: int = 0
    step: int = 0
    history: tuple[tuple[int, ...], ...] = ()  # items of each source rank, in each earlier run
    counts: tuple[int, ...] = ()  # those in this run
    saved: dict[str, Any] | None = None  # own state of this rank's loader, if it has one

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
        """Go on from a state: the run that wrote it becomes the last one of the history."""
        try:
            version, its_deal = state["version"], tuple(state["deal"])
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
        if its_deal != tuple(deal):
            raise ConfigError(
                f"a state of samplers with (num_samples, shuffle, seed) = {its_deal}, and these "
                f"have {tuple(deal)} (zeros: no ResumableSampler): samples would be lost or "
                "repeated"
            )
        return cls(epoch, step, tuple(history), saved=saved)


def _counts(values: Sequence[int]) -> tuple[int, ...]:
    """Check the items of each source rank: there is one at least."""
    counts = tuple(whole_number(count, "a count of the state") for count in values)
    if not counts:
        raise ValueError("no counts in the history")
    return counts
