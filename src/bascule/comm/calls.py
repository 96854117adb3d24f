"""The calls of a process group, or of a part of it, numbered on each rank."""

import threading
import zlib
from collections.abc import Sequence

from bascule.errors import CommError, ConfigError


class Calls:
    """The calls of a process group, or of a part of it, on this rank.

    Messages between two ranks carry the number of their call as tag, from a first one for each
    part: so those of two calls in flight are never mixed.
    """

    def __init__(self, key: str = "", ranks: Sequence[int] = (), name: str = "") -> None:
        self.key, self.ranks, self.name = key, tuple(ranks), name
        self.number = 0  # of calls begun
        self.num_messages = 0  # over gloo, which counts each as a collective
        self.ended: str | None = None  # why there can be no more
        self.thread: int | None = None  # that made the last one
        self._num_open = 0
        self._first_tag = zlib.crc32(f"bascule {key.partition(' ')[2]}".encode())
        self._lock = threading.Lock()

    def begin(self, where: str) -> int:
        """Number the next call and return its tag; `finish` ends it.

        Raises:
            CommError: A failure ended the group.
            ConfigError: Another thread is in a call of it: their rows could be mixed.
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
            self.thread = own
            self._num_open += 1
            self.number += 1
            return (self._first_tag + self.number) & 0x7FFFFFFF

    def finish(self) -> None:
        """End a call."""
        with self._lock:
            self._num_open -= 1
