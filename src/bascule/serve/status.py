"""Types that the service and its HTTP server share: the status of a request, four refusals."""

from dataclasses import dataclass

from bascule.generate.options import Prompt

ENDED = "done", "failed", "cancelled"
STATES = "waiting", "running", "paused", *ENDED


class Busy(Exception):  # noqa: N818 - an answer to a client
    """The queue is full.

    Attributes:
        retry_after_s: Predicted seconds until there is room.
    """

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class Late(Exception):  # noqa: N818 - an answer to a client
    """A deadline that must be met cannot be.

    Attributes:
        predicted_s: Predicted seconds until the request would be done.
    """

    def __init__(self, predicted_s: float) -> None:
        super().__init__(
            f"the deadline cannot be met: the request would be done in {predicted_s:.1f} s; give "
            "a later deadline_s, or let it be late: must_meet_deadline false"
        )
        self.predicted_s = predicted_s


class Unknown(Exception):  # noqa: N818 - an answer to a client
    """There is no such request."""


class Closing(Exception):  # noqa: N818 - an answer to a client
    """The server is ending, or its ranks are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of a request.

    Attributes:
        id: Its name, which the service made.
        kind: "image" or "video".
        state: "waiting", "running", "paused", "done", "failed" or "cancelled".
        step: Denoising steps done.
        num_steps: Denoising steps in all; None until they are known.
        ranks: Ranks that compute it now.
        created_at: Unix seconds of its arrival.
        ended_at: Unix seconds of its end.
        ends_in_s: Predicted seconds until it is done.
        reason: Why it failed.
        prompt: Its settings.
    """

    id: str
    kind: str
    state: str
    step: int = 0
    num_steps: int | None = None
    ranks: tuple[int, ...] = ()
    created_at: float
    ended_at: float | None = None
    ends_in_s: float | None = None
    reason: str = ""
    prompt: Prompt

    @property
    def has_ended(self) -> bool:
        """True if nothing more happens to it."""
        return self.state in ENDED
