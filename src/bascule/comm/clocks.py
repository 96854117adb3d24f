"""What this rank's own compute takes: no wait for others counts where that can be told apart."""

import time

import torch


class CpuClock:
    """CPU time of this thread, from the construction to `stop`."""

    def __init__(self) -> None:
        self._start = time.thread_time()
        self._seconds = 0.0

    def stop(self) -> None:
        """End of what is timed."""
        self._seconds = time.thread_time() - self._start

    def seconds(self) -> float:
        """What it took."""
        return self._seconds


class CudaClock:
    """Time on the current stream, by events that do not synchronise until they are read."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def stop(self) -> None:
        """End of what is timed."""
        self._end.record()

    def seconds(self) -> float:
        """What it took; waits for its end."""
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3


Clock = CpuClock | CudaClock


def start_clock(device: torch.device) -> Clock:
    """A clock that runs."""
    return CudaClock() if device.type == "cuda" else CpuClock()
