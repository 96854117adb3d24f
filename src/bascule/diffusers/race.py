"""Let ranks compute small inputs alone where splitting them takes longer.

For a tiny image, the exchanges take longer than the work that they share. Where that begins depends
on kernels, launches and links, so the first passes of each form of inputs try both ways.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bascule.comm.collectives import all_gather
from bascule.comm.groups import RankGroup
from bascule.diffusers.pipeline_run import finished_s
from bascule.quantities import seconds

logger = logging.getLogger(__name__)

_NUM_TIMED = 2  # passes of each way; the faster one counts
_LONGEST_S = 0.1  # of a split pass: one that takes longer stays split, and costs no trial
_LEAST_GAIN = 1.05  # of passes alone, over which results need not agree to the last bit


@dataclass(slots=True)
class _Times:
    """The passes of one form of inputs: seconds of both ways, and which one has won."""

    split_s: list[float] = field(default_factory=list[float])
    alone_s: list[float] = field(default_factory=list[float])
    is_alone: bool | None = None  # None: the race goes on


class Race:
    """Runs the passes of a split model in the faster way: over the mesh, or on each rank alone.

    All ranks of the mesh give the same forms in the same order. A form takes one split pass without
    a clock, two with it, and then two alone. Ranks compare the times of their slowest rank.
    """

    def __init__(self, name: str, group: RankGroup, device: torch.device) -> None:
        self._name, self._group, self._device = name, group, device
        self._times = dict[object, _Times]()
        self.lines = list[str]()  # what was decided, in words

    def run(self, form: object, split: Callable[[], Any], alone: Callable[[], Any]) -> Any:
        """Run a pass of this form of inputs."""
        times = self._times.get(form)
        if times is None:
            self._times[form] = _Times()
            return split()
        if times.is_alone is not None:
            return alone() if times.is_alone else split()
        is_second = len(times.split_s) == _NUM_TIMED
        run, taken_s = (alone, times.alone_s) if is_second else (split, times.split_s)
        start_s = finished_s(self._device)
        output = run()
        taken_s.append(finished_s(self._device) - start_s)
        if len(taken_s) == _NUM_TIMED:
            self._decide(times)
        return output

    def _decide(self, times: _Times) -> None:
        """Compare the split passes with the limit; once there are both, compare the two ways."""
        least = torch.tensor([min(times.split_s), min(times.alone_s, default=0.0)])
        where = f"{self._name}: all_gather (seconds of passes)"
        split_s, alone_s = all_gather(self._group, where, least).amax(dim=0).tolist()
        if not times.alone_s:
            times.is_alone = False if split_s > _LONGEST_S else None
            return
        times.is_alone = split_s > _LEAST_GAIN * alone_s
        if times.is_alone:
            self.lines.append(
                f"{self._name}: a pass of this size takes {seconds(split_s)} over "
                f"{self._group.size} ranks and {seconds(alone_s)} on each rank alone, "
                "so each rank computes it alone"
            )
            if self._group.rank == 0:
                logger.info(self.lines[-1])
