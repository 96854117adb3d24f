"""Every collective of bascule: rows and numbers between the ranks of a group.

On the host each is a set of messages from rank to rank, tagged with the number of its call
(`calls`), so that two calls in flight are never mixed. On other devices they are the
collectives of the back end, or its point-to-point, whose messages have no tags. Groups of gloo take
tensors of CUDA only where the user chose it (`groups.stage_cuda`): as messages between hosts.

All take the places of `RankGroup.ranks`, whatever order the process group itself has.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.comm.groups import RankGroup, timeout_of
from bascule.comm.guard.failures import begin, call, failure
from bascule.comm.staging import HostCopies, table_on
from bascule.comm.world import this_world
from bascule.errors import ConfigError

# torch 2.13 renamed these two; both names exist in some versions.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_HOST = torch.device("cpu")
_SMALL = 4096  # elements that an all-reduce on the host gathers whole


class Transfers:
    """Tensors on their way to and from other ranks; posted when this is made.

    Gloo moves them while the host computes. With NCCL an all-to-all is the same group of sends and
    receives.

    Args:
        group: The ranks.
        where: The call, as errors name it; ranks that neither send nor receive make it, too.
        sent: By place in the group, what that rank gets: contiguous, and alive until the wait.
        received: By place in the group, what is written with what that rank sent.
        collective: Moves them instead of messages, where the back end has one.

    Raises:
        CommError: The group failed.
        ConfigError: Tensors of CUDA, and the group does not take them.
    """

    def __init__(
        self,
        group: RankGroup,
        where: str,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        collective: Callable[[], dist.Work | None] | None = None,
    ) -> None:
        self._group = group
        self._copies: HostCopies | None = None
        if any(is_staged(group, x) for xs in (sent, received) for x in xs.values()):
            self._copies = HostCopies(sent, received)
            sent, received = self._copies.sent, self._copies.received
        self._kept = sent, received  # what is written to must live until the wait
        self._is_tagged = (
            collective is None
            and group.calls.has_tags
            and all(x.is_cpu for xs in self._kept for x in xs.values())
        )
        self._ongoing = begin(group, where)
        self._works: list[dist.Work] = []
        try:
            if collective is not None:
                work = collective()
                self._works += [] if work is None else [work]
            elif self._is_tagged:
                self._post_tagged()
            else:
                self._post()
        except RuntimeError as error:
            group.calls.finish(is_done=False)
            raise failure(group, where, error) from error

    def _post_tagged(self) -> None:
        """Messages of no bytes, too: ranks always meet. What `dist.isend` checks is known here."""
        process_group, tag = self._group.process_group, self._ongoing.begun.tag
        sent, received = self._kept
        for place, x in received.items():
            self._works.append(process_group.recv([x], self._group.places[place], tag))
        for place, x in sent.items():
            self._works.append(process_group.send([x], self._group.places[place], tag))
        self._group.calls.num_messages += len(received) + len(sent)

    def _post(self) -> None:
        """All in one group of sends and receives."""
        sent, received = self._kept
        operations = [
            dist.P2POp(operation, x, self._group.ranks[place], group=self._group.process_group)
            for operation, xs in ((dist.irecv, received), (dist.isend, sent))
            for place, x in xs.items()
            if x.numel()
        ]
        self._works.extend(dist.batch_isend_irecv(operations) if operations else [])

    def wait(self) -> None:
        """Until everything arrived, and was sent; on a device, its stream waits. Call it once.

        Raises:
            CommError: A rank did not come in time.
        """
        try:
            if self._works:
                timeout = timeout_of(self._group, _HOST) if self._is_tagged else None
                with self._ongoing:
                    for work in self._works:
                        work.wait() if timeout is None else work.wait(timeout)
            if self._copies is not None:
                self._copies.arrive()
        finally:
            self._group.calls.finish()


def all_to_all(
    group: RankGroup,
    where: str,
    received: Tensor,
    sent: Tensor,
    recv_splits: Sequence[int],
    send_splits: Sequence[int],
) -> None:
    """Send rows to each rank and receive from each, in the order of places; see `AllToAll`."""
    AllToAll(group, where, received, sent, recv_splits, send_splits).wait()


class AllToAll:
    """Rows on their way from each rank to each; posted when this is made.

    Args:
        group: The ranks.
        where: The call, as errors name it.
        received: Written with what arrives; contiguous.
        sent: Contiguous; alive until the wait.
        recv_splits: Rows of `received` from each rank, in the order of places.
        send_splits: Rows of `sent` to each rank.
    """

    def __init__(
        self,
        group: RankGroup,
        where: str,
        received: Tensor,
        sent: Tensor,
        recv_splits: Sequence[int],
        send_splits: Sequence[int],
    ) -> None:
        self._own: tuple[Tensor, Tensor] | None = None
        if not _goes_by_messages(group, sent):
            splits = list(recv_splits), list(send_splits)
            collective = partial(_all_to_all_of_backend, group, received, sent, *splits)
            self._transfers = Transfers(group, where, {0: sent}, {0: received}, collective)
            return
        come = dict(enumerate(received.split_with_sizes(recv_splits)))
        to = dict(enumerate(sent.split_with_sizes(send_splits)))
        self._own = come.pop(group.rank), to.pop(group.rank)
        self._transfers = Transfers(group, where, to, come)

    def wait(self) -> None:
        """As that of `Transfers`."""
        if self._own is not None:
            self._own[0].copy_(self._own[1])
        self._transfers.wait()


def _all_to_all_of_backend(
    group: RankGroup,
    received: Tensor,
    sent: Tensor,
    recv_splits: list[int],
    send_splits: list[int],
) -> dist.Work | None:
    process_group = group.process_group
    if group.is_in_order:
        options = dist.AllToAllOptions()  # torch's Python function takes as long as a small one
        options.asyncOp = True
        return process_group.alltoall_base(received, sent, recv_splits, send_splits, options)
    in_order = sorted(range(group.size), key=group.places.__getitem__)
    parts = received.split(recv_splits), sent.split(send_splits)
    come, to = ([part[place] for place in in_order] for part in parts)
    return dist.all_to_all(come, to, group=process_group, async_op=True)


def all_gather(group: RankGroup, where: str, own: Tensor) -> Tensor:
    """(N, ...) what each rank gives, in the order of places.

    Args:
        group: N ranks.
        where: The call, as errors name it.
        own: Of the same shape and dtype on all ranks; any dtype.
    """
    own = own.contiguous()
    gathered = own.new_empty(group.size, *own.shape)
    into, given = as_bytes(gathered), as_bytes(own)
    if not _goes_by_messages(group, own):
        with call(group, where):
            all_gather_single(into, given, group=group.process_group)
        return gathered if group.is_in_order else gathered[table_on(_places_of(group), own.device)]
    parts = into.view(group.size, -1).unbind(0)
    come = {place: parts[place] for place in group.others}
    transfers = Transfers(group, where, dict.fromkeys(group.others, given), come)
    gathered[group.rank] = own
    transfers.wait()
    return gathered


def reduce_scatter(group: RankGroup, where: str, parts: Tensor) -> Tensor:
    """The sum over the ranks of their part for this one: (N, ...) to (...).

    In the dtype of `parts`, and on the host in the order of places.
    """
    if not _goes_by_messages(group, parts):
        if not group.is_in_order:
            parts = parts[table_on(_places_of(group).argsort(), parts.device)]
        own = parts.new_empty(parts.shape[1:])
        with call(group, where):
            into, given = own.view(-1), parts.contiguous().view(-1)
            reduce_scatter_single(into, given, group=group.process_group)
        return own
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    all_to_all(group, where, received, parts, [1] * group.size, [1] * group.size)
    return received.sum(dim=0)


def all_reduce(group: RankGroup, where: str, x: Tensor) -> Tensor:
    """The sum of a tensor over the ranks, the same on all of them.

    On the host every rank adds up what all gave, in the order of places; of a large tensor each
    adds up a part, and gives it to the others.
    """
    if _goes_by_messages(group, x):
        if x.numel() <= _SMALL:
            return all_gather(group, where, x).sum(dim=0)
        padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % group.size))
        own = reduce_scatter(group, where, padded.view(group.size, -1))
        return all_gather(group, where, own).flatten()[: x.numel()].view(x.shape)
    total = x.clone()
    with call(group, where):
        dist.all_reduce(total, group=group.process_group)
    return total


def broadcast(group: RankGroup, where: str, x: Tensor) -> Tensor:
    """The tensor of the first rank, on every rank."""
    x = x.clone(memory_format=torch.contiguous_format)
    if not _goes_by_messages(group, x):
        with call(group, where):
            dist.broadcast(x, group.ranks[0], group=group.process_group)
        return x
    is_first = group.rank == 0
    to = dict.fromkeys(group.others, x) if is_first else {}
    Transfers(group, where, to, {} if is_first else {0: x}).wait()
    return x


def _goes_by_messages(group: RankGroup, x: Tensor) -> bool:
    """Where these carry tags, or where the collectives of the back end need other ranks, too."""
    return (group.calls.has_tags and (x.is_cpu or is_staged(group, x))) or group.is_part


def is_staged(group: RankGroup, x: Tensor) -> bool:
    """Whether a tensor travels as a copy on the host.

    Raises:
        ConfigError: It cannot travel otherwise, and the user did not choose it.
    """
    if not x.is_cuda or group.calls.has_cuda:
        return False
    if not this_world().stages_cuda:
        raise ConfigError(
            f"a tensor on {x.device}, and the group {group.name!r} is of gloo, which moves those "
            "of the host: use NCCL; or, for several ranks on one GPU, call "
            "bascule.comm.stage_cuda() on every rank, which copies through the host"
        )
    return True


def _places_of(group: RankGroup) -> npt.NDArray[np.int64]:
    """Of each member, its place in the process group's own order."""
    return np.array(group.places, np.int64)


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor, flat.

    A tensor of one element counts as contiguous with any strides, and cannot be viewed with most.
    """
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
