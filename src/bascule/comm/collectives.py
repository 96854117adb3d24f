"""Every collective of bascule: rows and numbers between the ranks of a group.

A whole group in its own order uses the collectives of torch. A part of a group, a mesh in another
order, and an all-to-all over gloo send messages, tagged with the number of the call. Gloo groups
accept CUDA tensors only after `groups.stage_cuda`. Ranks are indices into `RankGroup.ranks`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.comm.groups import RankGroup, this_world, timeout_of
from bascule.errors import ConfigError

# torch 2.13 renamed these two; both names exist in some versions.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_HOST = torch.device("cpu")
_ASYNC = dist.AllToAllOptions()
_ASYNC.asyncOp = True
Tensors = Mapping[int, Tensor]  # by rank


class Transfers:
    """Point-to-point transfers of tensors with other ranks; the constructor posts them.

    `sent` has a contiguous tensor for each receiving rank, `received` a tensor to write for each
    sending rank. Ranks that neither send nor receive make the call, too.
    """

    def __init__(self, group: RankGroup, where: str, sent: Tensors, received: Tensors) -> None:
        self._group, self._where = group, where
        self._on_device: Tensors = {}
        like = next(iter((*sent.values(), *received.values())), None)
        if like is not None and is_staged(group, like):
            _wait_for_stream(like)  # before memory that kernels may still read is written
            copies = {id(x): _host_copy(x) for x in sent.values()}  # one tensor may go to many
            self._on_device, sent = received, {to: copies[id(x)] for to, x in sent.items()}
            received = {of: _on_host(x) for of, x in received.items()}
            like = None
        self._tensors = sent, received  # which must live until the wait
        self._by_gloo = group.calls.is_gloo and (like is None or like.is_cpu)
        self._process_group = group.process_group
        self._works = group.calls.post(where, self._post)

    def _post(self, tag: int) -> list[dist.Work]:
        (sent, received), group, calls = self._tensors, self._process_group, self._group.calls
        if self._by_gloo:  # torch's functions take longer than a small message; ranks always meet
            works, places = list[dist.Work](), self._group.places
            for start, xs in ((group.recv, received), (group.send, sent)):
                for place, x in xs.items():
                    works.append(start([x], places[place], tag))
            calls.num_messages += len(works)
            return works
        operations = [
            dist.P2POp(operation, x, self._group.ranks[place], group, tag)
            for operation, xs in ((dist.irecv, received), (dist.isend, sent))
            for place, x in xs.items()
            if x.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Wait until everything arrived and was sent; on a device, its stream waits."""
        self._group.calls.wait(self._where, self._wait)
        for place, x in self._on_device.items():
            x.copy_(self._tensors[1][place])

    def _wait(self) -> None:
        # Gloo's messages know only the timeout that the group was made with.
        timeout = timeout_of(self._process_group, _HOST) if self._by_gloo else None
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)


def start_all_to_all(
    group: RankGroup,
    where: str,
    received: Tensor,
    sent: Tensor,
    recv_splits: list[int],
    send_splits: list[int],
) -> Callable[[], None]:
    """Start an all-to-all of rows, by splits; return a function that waits for it."""
    by_gloo = group.calls.is_gloo and (sent.is_cpu or is_staged(group, sent))
    if by_gloo or not group.is_whole:
        into = dict(enumerate(received.split_with_sizes(recv_splits)))
        out = dict(enumerate(sent.split_with_sizes(send_splits)))
        staying = into.pop(group.rank), out.pop(group.rank)
        transfers = Transfers(group, where, out, into)
        staying[0].copy_(staying[1])
        return transfers.wait
    process_group = group.process_group

    def post(tag: int) -> dist.Work:  # torch's Python function takes as long as a small exchange
        return process_group.alltoall_base(received, sent, recv_splits, send_splits, _ASYNC)

    work = group.calls.post(where, post)

    def wait() -> None:
        group.calls.wait(where, work.wait)
        _ = sent, received  # keeps them alive until here

    return wait


def all_gather(group: RankGroup, where: str, x: Tensor) -> Tensor:
    """Return the tensors of all N ranks, of one shape and dtype, as (N, ...)."""
    if is_staged(group, x):
        return _like(x, all_gather(group, where, _host_copy(x)))
    x = x.contiguous()
    gathered = x.new_empty(group.size, *x.shape)
    if group.is_whole:
        _call(group, where, all_gather_single, as_bytes(gathered), as_bytes(x))
        return gathered
    parts = as_bytes(gathered).view(group.size, -1).unbind(0)
    gathered[group.rank] = x
    to = dict.fromkeys(group.others, as_bytes(x))
    Transfers(group, where, to, {place: parts[place] for place in group.others}).wait()
    return gathered


def reduce_scatter(group: RankGroup, where: str, parts: Tensor) -> Tensor:
    """Return the sum over ranks of their parts for this rank: (N, ...) to (...), same dtype."""
    if is_staged(group, parts):
        return _like(parts, reduce_scatter(group, where, _host_copy(parts)))
    parts = parts.contiguous()
    if group.is_whole:
        total = parts.new_empty(parts.shape[1:])
        _call(group, where, reduce_scatter_single, total.view(-1), parts.view(-1))
        return total
    received = torch.empty_like(parts)
    start_all_to_all(group, where, received, parts, [1] * group.size, [1] * group.size)()
    return received.sum(dim=0)


def all_reduce(group: RankGroup, where: str, x: Tensor) -> Tensor:
    """Return the sum of a tensor over the ranks, the same on all of them."""
    if is_staged(group, x):
        return _like(x, all_reduce(group, where, _host_copy(x)))
    if not group.has_all:
        return all_gather(group, where, x).sum(dim=0)
    total = x.clone(memory_format=torch.contiguous_format)
    _call(group, where, dist.all_reduce, total)
    return total


def broadcast(group: RankGroup, where: str, x: Tensor) -> Tensor:
    """Return the tensor of the first rank, on every rank."""
    if is_staged(group, x):
        return _like(x, broadcast(group, where, _host_copy(x)))
    x = x.clone(memory_format=torch.contiguous_format)
    if group.has_all:
        _call(group, where, dist.broadcast, x, group.ranks[0])
        return x
    is_first = group.rank == 0
    to = dict.fromkeys(group.others, x) if is_first else {}
    Transfers(group, where, to, {} if is_first else {0: x}).wait()
    return x


def _call(group: RankGroup, where: str, collective: Callable[..., Any], *args: Any) -> None:
    """Make a collective of torch, and wait for it."""
    process_group = group.process_group
    group.calls.begin(where)
    group.calls.wait(where, partial(collective, *args, group=process_group))


def _on_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _host_copy(x: Tensor) -> Tensor:
    copy = _on_host(x)
    copy.copy_(x)
    return copy


def _like(x: Tensor, copy: Tensor) -> Tensor:
    on_device = x.new_empty(copy.shape)
    on_device.copy_(copy)
    return on_device


def _wait_for_stream(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()


def is_staged(group: RankGroup, x: Tensor) -> bool:
    """Return whether a tensor is sent as a copy on the host, which needs `stage_cuda`."""
    if not x.is_cuda or group.calls.has_cuda:
        return False
    if not this_world().stages_cuda:
        wrong = f"gloo group {group.name!r} sends tensors of the host only, not of {x.device}"
        raise ConfigError(f"{wrong}: use NCCL, or call bascule.comm.stage_cuda() on every rank")
    return True


def as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, flat; a single element may have any strides."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def table_on(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy a plan's table to a device; training can use it, even if made in inference mode."""
    with torch.inference_mode(False):
        return torch.from_numpy(array).to(device, non_blocking=True)
