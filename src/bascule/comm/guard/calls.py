"""The calls that the ranks of a process group make together, numbered.

Ranks must make the same calls in the same order. On the host, messages of a call carry its number
as their tag, so that two calls in flight between the same ranks are never mixed.
"""

import threading
import zlib
from collections.abc import Hashable
from typing import NamedTuple

from bascule.comm.staging import Staging
from bascule.errors import CommError, ConfigError

_NUM_AGREED = 4096


class Begun(NamedTuple):
    """A call that this rank has begun.

    Attributes:
        where: The call, as errors name it.
        number: How many calls of the group came before it on this rank.
        tag: Of its messages.
    """

    where: str
    number: int
    tag: int


class Calls:
    """The calls of one process group, or of a part of it, on this rank.

    Args:
        part: The part; "" for the whole group. Its tags begin elsewhere than those of other parts.
        has_tags: Whether messages between hosts carry tags, as those of gloo do.
        has_cuda: Whether the back end takes tensors of CUDA from device to device.

    Attributes:
        has_tags: As given.
        has_cuda: As given.
        staging: Memory for its exchanges, which is used again.
        number: How many calls were begun.
        ended: Why there can be no more; None while there can.
        thread: The thread that made the last call.
        num_done: Calls that this rank has done its part of.
        num_messages: Messages between hosts that they took so far.
    """

    def __init__(self, part: str = "", *, has_tags: bool = False, has_cuda: bool = True) -> None:
        self.has_tags, self.has_cuda = has_tags, has_cuda
        self.staging = Staging()
        self.number = 0
        self.ended: str | None = None
        self.thread: int | None = None
        self._agreed: dict[Hashable, None] = {}
        self.num_done = self.num_messages = 0
        self._num_open = 0
        self._first_tag = zlib.crc32(f"bascule{part}".encode())
        self._lock = threading.Lock()

    def has_agreed(self, form: Hashable) -> bool:
        """Whether all ranks have agreed on a form of call; the last few thousand are known."""
        return form in self._agreed

    def agree(self, form: Hashable) -> None:
        """Note that all ranks have agreed on a form of call."""
        self._agreed[form] = None
        if len(self._agreed) > _NUM_AGREED:  # the oldest, which is the same on all ranks
            del self._agreed[next(iter(self._agreed))]

    def begin(self, where: str) -> Begun:
        """Number the next call; `finish` ends it.

        Raises:
            CommError: An earlier failure ended the group.
            ConfigError: Another thread is in a call of this group: their rows could be mixed.
        """
        if self.ended is not None:
            raise CommError(f"{where}: its process group was ended before: {self.ended}")
        own = threading.get_ident()
        with self._lock:
            if self._num_open and self.thread != own:
                raise ConfigError(
                    f"{where}: another thread is in a call of the same process group: give each "
                    "thread its own group, or let them take turns, in the same order on all ranks"
                )
            begun = Begun(where, self.number, (self._first_tag + self.number) & 0x7FFFFFFF)
            self.number += 1
            self.thread = own
            self._num_open += 1
        return begun

    def is_of_another(self, thread: int) -> bool:
        """Whether another living thread made the last call."""
        return self.thread not in (None, thread) and _is_alive(self.thread)

    def finish(self, *, is_done: bool = True) -> None:
        """Say that a call is over; done, if this rank gave all that others need of it."""
        with self._lock:
            self._num_open -= 1
            self.num_done += is_done


def _is_alive(thread: int | None) -> bool:
    """Whether a thread was begun by Python, as autograd's are not, and goes on."""
    return any(one.ident == thread for one in threading.enumerate())
