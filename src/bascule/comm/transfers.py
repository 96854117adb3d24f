"""Point-to-point transfers between the ranks of a group, posted together and waited for later."""

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from bascule.comm.groups import RankGroup, reporting, timeout_of


class Transfers:
    """Tensors on their way to and from other ranks; posted when this is made.

    Gloo moves them while the host computes. With NCCL an all-to-all is the same group of sends and
    receives.

    Args:
        group: The ranks.
        name: What errors call it.
        sent: By place in the group, what that rank gets: contiguous, and alive until the wait.
        received: By place in the group, what is written with what that rank sent.

    Raises:
        CommError: The group failed.
    """

    def __init__(
        self,
        group: RankGroup,
        name: str,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
    ) -> None:
        self._group, self._name = group, name
        self._kept = sent, received
        process_group = group.process_group
        operations = [
            dist.P2POp(operation, x, group.ranks[place], group=process_group)
            for operation, xs in ((dist.isend, sent), (dist.irecv, received))
            for place, x in xs.items()
            if x.numel()
        ]
        with reporting(group, name, 0):
            self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Until everything arrived, and was sent; on a device, its stream waits. Call it once.

        Raises:
            CommError: A rank did not come in time.
        """
        devices = {x.device for xs in self._kept for x in xs.values()}
        with reporting(self._group, self._name, 0):
            for work in self._works:
                work.wait(*(_longest_wait(self._group, device) for device in devices))


def _longest_wait(group: RankGroup, device: torch.device) -> timedelta:
    """The group's timeout on the host; 0 leaves the wait to the device's stream."""
    if device.type != "cpu":
        return timedelta(0)
    return timeout_of(group, device) or timedelta(0)
