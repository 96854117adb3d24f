"""Seconds of the training's part of a step on this rank, measured without waiting for a GPU."""

import time
from collections import deque

import numpy as np
import torch

from bascule.arrays import Floats
from bascule.calibrate.timed import Moment, moment, seconds_between
from bascule.data.slow_rank import COMPUTE_S, EXCHANGE_S, INPUT_S, NO_TIMES, STEP_S


class StepTimer:
    """Times the training's steps; the loader's thread takes one with each gather.

    On a CPU, the CPU time of the training thread counts, without waits. On a GPU, events measure
    the time between two batches, or until `computed`.
    """

    def __init__(self) -> None:
        self._device, self._start = torch.device("cpu"), None
        self._laps = list[tuple[Moment, Moment]]()  # compute of each microbatch
        # Numbers of a step, its laps, and its begin and end: the host may be ahead of a GPU.
        self._finished = deque[tuple[Floats, list[tuple[Moment, Moment]], tuple[Moment, Moment]]]()
        self._done, self._last = deque[Floats](), moment(self._device)

    def begin(self) -> None:
        """Note that the training gets a microbatch."""
        if not self._laps:  # an event before the first use of a GPU would begin a context there
            self._device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        self._start = moment(self._device, time.thread_time)

    def computed(self) -> None:
        """Note that this rank's compute on the microbatch has ended, unless it had before."""
        if self._start is not None:
            self._laps.append((self._start, moment(self._device, time.thread_time)))
            self._start = None

    def finish(self, step: int, waited_s: float, work: float) -> None:
        """Note that the training wants another step; the work is nan if it is not in the plan."""
        times = np.array([step, np.nan, waited_s, np.nan, work, np.nan, np.nan])
        laps, self._laps = self._laps, []
        start, self._last = self._last, moment(self._device)
        if type(start) is not type(self._last):  # the first step on a GPU
            start = laps[0][0]
        self._finished.append((times, laps, (start, self._last)))
        while self._finished and _has_passed(self._finished[0][2][1]):
            times, laps, whole = self._finished.popleft()
            times[STEP_S] = seconds_between(*whole)
            times[COMPUTE_S] = sum(seconds_between(*lap) for lap in laps)
            self._done.append(times)

    def take(self, input_s: float, exchange_s: float) -> Floats:
        """Return (7,) numbers for the other ranks, of the oldest step that they do not know."""
        times = self._done.popleft() if self._done else np.array(NO_TIMES)
        times[[INPUT_S, EXCHANGE_S]] = input_s, exchange_s
        return times


def _has_passed(end: Moment) -> bool:
    return not isinstance(end, torch.cuda.Event) or end.query()
