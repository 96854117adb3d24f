"""Types that the service and its HTTP server share: the status of a request, and refusals."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bascule.generate.options import Prompt

ENDED = "done", "failed", "cancelled"
STATES = "waiting", "running", "paused", *ENDED


@dataclass
class Refusal(Exception):  # noqa: N818 - an answer to a client
    """A refused call."""

    status: int  # of HTTP
    message: str  # one sentence
    param: str | None = None  # name of the wrong field
    code: str | None = None  # name of the reason, for programs
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # of the answer

    def __str__(self) -> str:
        return self.message


class Key(NamedTuple):
    """Name that a client gave a call, so that the same call again makes nothing twice."""

    name: str
    digest: str  # of what the call asks for


class Reused(Refusal):
    """Refusal because a key came before, with a call that asked for something else."""

    def __init__(self, key: str) -> None:
        message = f"Idempotency-Key {key}: came before with another call: send a new key"
        super().__init__(422, message, "Idempotency-Key", "idempotency_key_reused")


class Busy(Refusal):
    """Refusal because too many requests wait; room is predicted in `retry_after_s`."""

    def __init__(self, retry_after_s: float) -> None:
        message = f"the queue is full; try again in {retry_after_s:.0f} s"
        headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
        super().__init__(429, message, code="queue_full", headers=headers)


class Late(Refusal):
    """Refusal because a request would be late: its end is predicted in `predicted_s`."""

    def __init__(self, predicted_s: float) -> None:
        fix = "give a later one, or allow a late end by must_meet_deadline false"
        message = f"deadline_s: the request would be done in {predicted_s:.1f} s: {fix}"
        super().__init__(422, message, "deadline_s", "deadline_too_early")


class Unknown(Refusal):
    """Refusal because there is no such request, or no output."""

    def __init__(self, message: str) -> None:
        super().__init__(404, message)


class Closing(Refusal):
    """Refusal because the server is ending, its ranks are gone, or its disk is full."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="closing", headers={"Retry-After": "10"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of a request."""

    id: str  # name that the service gave it
    kind: str  # "image" or "video"
    state: str  # one of `STATES`
    step: int = 0  # denoising steps done
    num_steps: int | None = None  # denoising steps in total; None until they are known
    ranks: tuple[int, ...] = ()  # that compute it now
    created_at: float  # Unix seconds of its arrival
    ended_at: float | None = None  # Unix seconds of its end
    ends_in_s: float | None = None  # predicted seconds until it is done
    reason: str = ""  # why it failed
    prompt: Prompt  # its settings

    @property
    def size(self) -> str:
        """Width and height of the output, and the frames of a video: 832x480x81; or auto."""
        sides = self.prompt.width, self.prompt.height, self.prompt.frames
        return "x".join(str(side) for side in sides if side) or "auto"

    @property
    def has_ended(self) -> bool:
        """True if the request is done, failed or cancelled."""
        return self.state in ENDED
