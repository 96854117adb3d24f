"""Threads that end before the interpreter does.

The interpreter stops daemon threads wherever they are. A thread that frees a store or a process
group just then would abort the process, so the interpreter waits for the end of each thread.
"""

import atexit
import threading
import weakref
from collections.abc import Callable

End = Callable[[], float]
_LAST_LINES_S = 1.0  # longest wait for a thread that has done its work

_ends = weakref.WeakKeyDictionary[threading.Thread, "weakref.WeakMethod[End]"]()


def start(run: Callable[[], None], name: str, end: End) -> threading.Thread:
    """Start a thread. At the interpreter's end, the method `end` asks it to end.

    `end` returns the most seconds that the interpreter then waits for the thread.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    _ends[thread] = weakref.WeakMethod(end)
    thread.start()
    return thread


@atexit.register
def _end_all() -> None:
    for thread, method in reversed(list(_ends.items())):
        if thread.is_alive():
            end = method()  # None: its object is freed already
            thread.join(_LAST_LINES_S if end is None else end())
