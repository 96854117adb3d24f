"""Judge from a run whether moving pays: a few steps stay as loaded, next to steps that move.

One of two steps in a row, a *pair*, stays; which one changes every four pairs, so nothing that the
job does every few steps is mistaken for a gain. A step's value is its seconds over its predicted
makespan as loaded: this prediction alone is used, and steps of any size compare. A pair's gain is
the value of the step that stays over the other's; neighbours are free of drift.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bascule.arrays import Floats

CLEAR_GAIN = 1.5
"""Predicted gain from which no step stays, unless moving is in doubt: a step that stays costs half
a step, and with cost model and price each a fifth wrong there would still be a gain."""

_LEAST = 0.98  # gain below which moving is slower
_WARMUP = 3  # first steps: they compile and allocate
_FEWEST, _AGAIN, _MOST = 8, 4, 32  # pairs: before a judgement; later trials; without a judgement
_DOUBTED = 4  # pairs from which moving may be in doubt
_KEPT = 64  # newest pairs that count: a run changes
_REST = 300  # steps between trials
_SPARED = 20  # steps between pairs for a predicted gain of 2: together, pairs cost less than 5 %
_TURNED = 4  # pairs after which the order turns


class Turn(NamedTuple):
    """A step of a pair."""

    pair: int
    stays: bool


@dataclass(slots=True)
class Trial:
    """Judges whether moving pays. Fed with equal numbers, it decides alike on all ranks.

    Moving is slower if Wilcoxon's signed-rank test finds a gain below 0.98: with n pairs, its
    normal score is below -(0.9 + 14/n), which is strict at first because it is tested after every
    pair. Of simulated jobs with a gain of 1.05 and 5 to 20 % noise, it stops 1 in 100.
    """

    is_slower: bool = False  # moving, beyond the noise
    _num_asked: int = -_WARMUP  # steps of pairs so far
    _num_new: int = 0  # pairs of this trial
    _rest: int = 0  # steps until the next pair or trial
    _logs: list[float] = field(default_factory=list[float])  # of the pairs' gains, newest last
    _is_in_doubt: bool = False
    _open: tuple[int, float] = -1, 0.0  # a pair with one step, and what that adds to the log

    def turn(self, predicted_gain: float) -> Turn | None:
        """Say whether the next step that may stay does; None if it moves and is not measured."""
        if self.is_slower or (predicted_gain > CLEAR_GAIN and not self._is_in_doubt):
            return None
        if self._rest:
            self._rest -= 1
            return None
        self._num_asked += 1
        if self._num_asked <= 0:
            return None
        pair, second = divmod(self._num_asked - 1, 2)
        if second and not self._is_in_doubt:
            self._rest = int(_SPARED * (predicted_gain - 1.0))
        return Turn(pair, stays=bool(second) != bool(pair // _TURNED % 2))

    def add(self, turn: Turn, value: float) -> None:
        """Add a step's seconds over its predicted makespan as loaded."""
        log = math.log(value) if turn.stays else -math.log(value)
        if self._open[0] != turn.pair:
            self._open = turn.pair, log
            return
        self._logs = [*self._logs[1 - _KEPT :], self._open[1] + log]
        self._num_new += 1
        num = len(self._logs)
        self._is_in_doubt = num >= _DOUBTED and _middle(np.array(self._logs)) < 0.0
        if num >= _FEWEST:
            score = _signed_rank(np.array(self._logs) - math.log(_LEAST))
            self.is_slower = score < -(0.9 + 14.0 / num)
            if self._num_new >= (_AGAIN if score > 2.0 else _MOST):
                self._rest, self._num_new = _REST, 0

    def restart(self) -> None:
        """Begin a new pair: predictions have another unit, or other steps follow."""
        self._num_asked += self._num_asked % 2
        self._open = -1, 0.0

    @property
    def gain(self) -> tuple[float, float] | None:
        """The measured gain and its standard error; None before the fewest pairs."""
        if len(self._logs) < _FEWEST:
            return None
        logs = np.array(self._logs)
        spread = 1.4826 * float(np.median(np.abs(logs - _middle(logs))))
        gain = math.exp(_middle(logs))
        return gain, gain * spread / math.sqrt(logs.size)

    def state(self) -> tuple[float, ...]:
        """Return all but the open pair and doubts as numbers, for `restore`."""
        return self.is_slower, self._num_asked, self._num_new, self._rest, *self._logs

    def restore(self, state: Sequence[float]) -> None:
        """Go on from a state."""
        slower, self._num_asked, self._num_new, self._rest = map(int, state[:4])
        self.is_slower, self._logs = bool(slower), list(state[4:])
        self.restart()


def _middle(values: Floats) -> float:
    """Return Hodges and Lehmann's median of means of two, which one long step does not move."""
    means = (values + values[:, None]) / 2
    return float(np.median(means[np.triu_indices(values.size)]))


def _signed_rank(values: Floats) -> float:
    """Return the normal score of Wilcoxon's signed-rank test; below 0 if most are negative."""
    num = values.size
    ranks = np.argsort(np.argsort(np.abs(values), kind="stable"), kind="stable") + 1
    variance = num * (num + 1) * (2 * num + 1) / 24
    return float((ranks[values > 0].sum() - num * (num + 1) / 4) / math.sqrt(variance))
