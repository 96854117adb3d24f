"""The calls that the ranks of a process group make together, numbered and marked.

Ranks must make the same calls in the same order. A call's mark says which one it is, and which came
before; on the host a message carries it as its tag, so that the messages of unlike calls never
meet: no wrong rows, and no buffer that is too small for what arrives. That costs no byte and no
message.
"""

import threading
import zlib
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bascule.comm.staging import Staging
from bascule.errors import CommError, ConfigError

_NUM_REMEMBERED, _NUM_AGREED = 32, 4096


@dataclass(frozen=True)
class Call:
    """What one call of all ranks of a group is; alike on all of them.

    Attributes:
        what: The collective, as errors name it.
        step: The step that it belongs to; 0 where there are none.
        form: Whatever else must be the same on all ranks, as text: dtypes, widths, settings.
        kind: What alone must be the same, where the ranks compare the rest themselves.
    """

    what: str
    step: int = 0
    form: str = ""
    kind: str = ""

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}"

    @cached_property
    def meaning(self) -> bytes:
        """What goes into its mark."""
        return (self.kind or f"{self}|{self.form}").encode(errors="replace")


class Begun(NamedTuple):
    """A call that this rank has begun.

    Attributes:
        call: What it is.
        number: How many calls of the group came before it on this rank.
        mark: 31 bits of it and of all calls before; what its messages are tagged with.
    """

    call: Call
    number: int
    mark: int


class Calls:
    """The calls of one process group on this rank, and the memory that they use again.

    Args:
        has_tags: Whether messages between hosts carry tags, as those of gloo do.
        has_cuda: Whether the back end takes tensors of CUDA from device to device.

    Attributes:
        has_tags: As given.
        has_cuda: As given.
        staging: Memory for its exchanges.
        recent: The last calls begun.
        ended: Why there can be no more; None while there can.
        thread: The thread that made the last call.
        num_done: Calls that this rank has done its part of.
        num_messages: Messages between hosts that they took so far.
    """

    def __init__(self, *, has_tags: bool = False, has_cuda: bool = True) -> None:
        self.has_tags, self.has_cuda = has_tags, has_cuda
        self.staging = Staging()
        self.recent: deque[Begun] = deque(maxlen=_NUM_REMEMBERED)
        self.ended: str | None = None
        self.thread: int | None = None
        self._agreed: dict[Hashable, None] = {}
        self.num_done = self.num_messages = 0
        self._owner: int | None = None
        self._refused: set[int] = set()
        self._num_open = 0
        self._meant = 0
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        """How many calls were begun."""
        return self.recent[-1].number + 1 if self.recent else 0

    def has_agreed(self, form: Hashable) -> bool:
        """Whether all ranks have agreed on a form of call; the last few thousand are known."""
        return form in self._agreed

    def agree(self, form: Hashable) -> None:
        """Note that all ranks have agreed on a form of call."""
        self._agreed[form] = None
        if len(self._agreed) > _NUM_AGREED:  # the oldest, which is the same on all ranks
            del self._agreed[next(iter(self._agreed))]

    def mean(self, settings: str) -> None:
        """Mark all calls from here on with what this rank does besides, as all must."""
        self._meant = zlib.crc32(settings.encode(errors="replace"), self._meant)

    def begin(self, call: Call) -> Begun:
        """Number and mark the next call; `finish` ends it.

        Raises:
            CommError: An earlier failure ended the group.
            ConfigError: Another thread uses this group: their rows could be mixed.
        """
        if self.ended is not None:
            raise CommError(f"{call}: its process group was ended before: {self.ended}")
        own = threading.get_ident()
        with self._lock:
            if (self._num_open and self.thread != own) or not self._may_use(own, call):
                self._refused.add(own)
                raise ConfigError(
                    f"{call}: another thread uses the same process group, and ranks could let them "
                    "take turns in unlike orders: let one thread use it, give each its own, or "
                    "have the other one call hand_over() on its mesh when it is done"
                )
            self._meant = zlib.crc32(call.meaning, self._meant)
            begun = Begun(call, self.number, self._meant & 0x7FFFFFFF)
            self.recent.append(begun)
            self.thread = own
            self._refused.discard(own)
            self._num_open += 1
        return begun

    def _may_use(self, thread: int, call: Call) -> bool:
        """Whether rows may move for this thread: for one as long as it lives, and for autograd's.

        Agreements, in which ranks compare what they mean, may be made by any.
        """
        if call.kind or thread == self._owner:
            return True
        if self._owner is None or (not _is_alive(self._owner) and _is_alive(thread)):
            self._owner = thread
        return thread == self._owner or not _is_alive(thread)

    def is_of_another(self, thread: int) -> bool:
        """Whether another living thread makes its calls, and this one did not try to."""
        maker = self.thread if self._owner is None else self._owner
        return maker not in (None, thread) and thread not in self._refused and _is_alive(maker)

    def hand_over(self) -> None:
        """Let another thread move rows from here on: at the same place on all ranks."""
        with self._lock:
            self._owner = None
        self.mean("handed over")

    def finish(self, *, is_done: bool = True) -> None:
        """Say that a call is over; done, if this rank gave all that others need of it."""
        with self._lock:
            self._num_open -= 1
            self.num_done += is_done


def _is_alive(thread: int | None) -> bool:
    """Whether a thread was begun by Python, as autograd's are not, and goes on."""
    return any(one.ident == thread for one in threading.enumerate())
