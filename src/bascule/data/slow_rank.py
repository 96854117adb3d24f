"""Which rank is slow, and why, by the seconds that ranks gather with each step."""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bascule.arrays import Floats
from bascule.quantities import percent, times

logger = logging.getLogger(__name__)

NO_TIMES = (float("nan"),) * 7
STEP, STEP_S, WAITED_S, COMPUTE_S, WORK, INPUT_S, EXCHANGE_S = range(len(NO_TIMES))
"""Columns of a rank's numbers in `Load.times`.

Five are of the oldest finished step that other ranks do not know, nan if there is none: its number,
its seconds, seconds without a batch, own compute, and planned work (in the unit of the cost model).
Two are of the loader: seconds of the user's loader (0: none), and of moving samples.
"""

_WINDOW, _EVERY = 64, 8  # steps whose medians count, and steps between two looks at them
_LEAST = 0.05  # share of a step that others wait for a slow rank
_SIGMAS = 5.0  # by which a slow rank is above the noise
_TINY = 1e-9
_SAYS = {
    "none": "{rank} is no longer slow, since {since}",
    "length": "{rank} is slow since {since}: its planned work is {ratio} the others'; {waits}",
    "slow rank": "{rank} is slow since {since}: it computes {ratio} the time of the others for "
    "equal work; {waits}",
    "loader": "{rank} is slow since {since}: its input takes {ratio} the others' time; {waits}",
    "link": "{rank} is slow since {since}: moving samples takes {ratio} the others' time; {waits}",
}


class Culprit(NamedTuple):
    """The rank for which others wait; -1 and "none" if none stands out from the noise."""

    place: int = -1  # among the data-parallel ranks, or a server's
    cause: str = "none"  # or "length", "slow rank", "loader", "link"
    ratio: float = 1.0  # of its work, compute for equal work, input or link over others' median
    share: float = 0.0  # of a step, in which others wait for it


def find_culprit(rows: Floats, least: float = _LEAST) -> Culprit:
    """Return the rank that costs others most, by (n, D, 7) numbers of n steps and D ranks.

    Ratios are taken in each step, so lengths may drift. Input and moving cost others at most the
    time in which the training has no batch; compute costs them only the rest. Ranks that exchange
    with a slow link take as long as it does, so it stands out only where most do not.
    """
    step_s, waited_s = np.median(rows[..., [STEP_S, WAITED_S]], axis=(0, 1)).tolist()
    culprit = Culprit(share=least)
    for column, cause in ((COMPUTE_S, "slow rank"), (INPUT_S, "loader"), (EXCHANGE_S, "link")):
        part = np.maximum(rows[..., column], _TINY)
        levels = np.median(np.log(part / np.median(part, axis=1, keepdims=True)), axis=0)
        rank = int(levels.argmax())
        others, ratios = np.delete(levels, rank), _ratios(part, rank)
        ratio, excess_s = (float(np.median(x)) for x in (ratios, part[:, rank] * (1 - 1 / ratios)))
        error = 1.25 * _spread(np.log(ratios)) / len(ratios) ** 0.5  # of a median
        is_noise = np.log(ratio) < _SIGMAS * max(error, _spread(others))
        is_shared = others.max() == levels[rank]  # as by the ranks of a block of a server
        cost_s = excess_s - waited_s if column == COMPUTE_S else min(excess_s, waited_s)
        if is_noise or is_shared or cost_s <= culprit.share * step_s:
            continue
        if column == COMPUTE_S:
            of_work = float(np.median(_ratios(np.maximum(rows[..., WORK], _TINY), rank)))
            is_longer = of_work**2 > ratio  # which explains more than half of it
            cause, ratio = ("length", of_work) if is_longer else (cause, ratio / of_work)
        culprit = Culprit(rank, cause, ratio, cost_s / step_s)
    return Culprit() if culprit.place < 0 else culprit


def _ratios(values: Floats, rank: int) -> Floats:
    """Return (n,) values of a rank over the others' median, from (n, D) values."""
    return values[:, rank] / np.median(np.delete(values, rank, axis=1), axis=1)


def _spread(values: Floats) -> float:
    """Return a standard deviation that outliers leave as it is."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


class Pace:
    """The latest numbers of all ranks, and the culprit of the last two looks; alike on all ranks.

    With `says`, it says once who is slow, and when that ends; `ranks` are the global ranks.
    """

    def __init__(self, ranks: Sequence[int], *, says: bool) -> None:
        self._ranks, self._says, self._since = ranks, says, ""
        self._rows, self._num_rows = deque[Floats](maxlen=_WINDOW), 0
        self.culprit = self._candidate = Culprit()

    def add(self, numbers: Floats, where: str) -> None:
        """Add (D, 7) numbers `where` the job is; they are left out if a rank has none."""
        if len(self._ranks) == 1 or not np.isfinite(numbers).all():
            return
        inputs = numbers[:, INPUT_S]
        if (has_loader := inputs > 0.0).any():
            inputs[~has_loader] = np.median(inputs[has_loader])
        self._rows.append(numbers)
        self._num_rows += 1
        if self._num_rows % _EVERY or self._num_rows < _WINDOW // 2:
            return
        last, before = self._candidate, self.culprit
        least = _LEAST if before.place < 0 else _LEAST / 2
        self._candidate = candidate = find_culprit(np.stack(self._rows), least)
        if candidate[:2] != last[:2]:
            self._since = where
            return
        self.culprit = candidate
        if self._says and candidate[:2] != before[:2]:
            place = before.place if candidate.place < 0 else candidate.place
            facts = {"rank": f"rank {self._ranks[place]}"}
            facts |= {"since": self._since, "ratio": times(candidate.ratio)}
            facts["waits"] = f"ranks wait {percent(candidate.share)} of a step for it"
            logger.warning("%s", _SAYS[candidate.cause].format(**facts))

    def metrics(self) -> dict[str, Any]:
        """Return the slow rank, None if none is, the cause, and the share of a step it costs."""
        culprit = self.culprit
        rank = None if culprit.place < 0 else self._ranks[culprit.place]
        return {"slow_rank": rank, "slow_cause": culprit.cause, "slow_share": culprit.share}
