"""Samples from the ranks that loaded them to those that compute on them, in one all-to-all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from bascule.arrays import Ints
from bascule.comm.collectives import all_to_all
from bascule.comm.groups import RankGroup
from bascule.comm.guard.calls import Call
from bascule.comm.samples.sample_bytes import Parcel, read
from bascule.data.samples.loaded import DataRanks, Loaded, Sample
from bascule.plan.batch import Plan
from bascule.plan.routes import ranges


@dataclass(frozen=True, eq=False)
class Deliveries:
    """Which sample goes to which rank in which microbatch; what pads comes last.

    Attributes:
        ids: Sample of each delivery.
        dest: Data-parallel rank that gets it.
        micro: Microbatch in which it does.
        num_padding: Deliveries at the end that repeat a sample where a rank has none.
    """

    ids: Ints
    dest: Ints
    micro: Ints
    num_padding: int

    @property
    def is_padding(self) -> npt.NDArray[np.bool_]:
        """Of each delivery."""
        return np.arange(self.ids.size) >= self.ids.size - self.num_padding


def deliver(loaded: Loaded, plans: Sequence[Plan], *, pad: bool) -> Deliveries:
    """Each sample to its rank; with `pad`, the shortest one also to ranks that would have none.

    Of those that count in the mean, if there are any: the mean over what pads must be a number.
    """
    dest = np.concatenate([plan.bag_of for plan in plans])
    ids, micro = np.arange(dest.size), loaded.micro
    num_micro, num_ranks = loaded.counts.shape
    if not pad or not ids.size:
        return Deliveries(ids, dest, micro, 0)
    held = np.bincount(micro * num_ranks + dest, minlength=num_micro * num_ranks)
    empty = np.flatnonzero(held == 0)
    counted = np.flatnonzero(loaded.weights > 0) if loaded.weights.any() else ids
    shortest = np.full(empty.size, counted[loaded.lens[counted].argmin()])
    return Deliveries(
        np.concatenate([ids, shortest]),
        np.concatenate([dest, empty % num_ranks]),
        np.concatenate([micro, empty // num_ranks]),
        empty.size,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """The bytes that each rank of the group sends to each other one.

    Attributes:
        delivery: (k,) deliveries that are sent, ordered by receiver, then as delivered.
        sender: (k,) rank of the group.
        receiver: (k,) rank of the group.
        ids: (k,) sample.
        num_bytes: (k,) its size.
        bytes_to: (group size, group size) bytes that a receiver (row) gets from a sender.
    """

    delivery: Ints
    sender: Ints
    receiver: Ints
    ids: Ints
    num_bytes: Ints
    bytes_to: Ints

    @classmethod
    def of(cls, loaded: Loaded, deliveries: Deliveries, ranks: DataRanks) -> "Transfer":
        """Every delivery goes to all peers of its rank, except to who has the sample already."""
        leaders, size = ranks.leaders, ranks.group.size
        members = np.argsort(ranks.place, kind="stable")
        num_members = np.bincount(ranks.place)
        first = np.cumsum(num_members) - num_members
        repeats = num_members[deliveries.dest]
        delivery = np.repeat(np.arange(deliveries.dest.size), repeats)
        receiver = members[ranges(first[deliveries.dest], repeats)]
        sender = leaders[loaded.source[deliveries.ids[delivery]]]
        order = np.argsort(receiver, kind="stable")
        order = order[(sender != receiver)[order]]
        delivery, sender, receiver = delivery[order], sender[order], receiver[order]
        ids = deliveries.ids[delivery]
        num_bytes = loaded.num_bytes[ids]
        flows = np.bincount(receiver * size + sender, num_bytes, size * size)
        bytes_to = flows.reshape(size, size).astype(np.int64)
        return cls(delivery, sender, receiver, ids, num_bytes, bytes_to)


def exchange(
    transfer: Transfer,
    group: RankGroup,
    parcels: Mapping[int, Parcel],
    step: int,
) -> dict[int, Sample]:
    """Send and receive; the samples that arrived, by delivery. No collective if nothing moves."""
    if not transfer.ids.size:
        return {}
    send_splits = transfer.bytes_to[:, group.rank].tolist()
    recv_splits = transfer.bytes_to[group.rank].tolist()
    sent = torch.empty(sum(send_splits), dtype=torch.uint8)
    received = torch.empty(sum(recv_splits), dtype=torch.uint8)
    end = 0
    for sample_id in transfer.ids[transfer.sender == group.rank].tolist():
        parcel = parcels[sample_id]
        parcel.write(sent[end : end + parcel.num_bytes])
        end += parcel.num_bytes
    call = Call("all_to_all (samples)", step)
    all_to_all(group, call, received, sent, recv_splits, send_splits)
    own = np.flatnonzero(transfer.receiver == group.rank)
    own = own[np.argsort(transfer.sender[own], kind="stable")]
    ends = np.cumsum(transfer.num_bytes[own])
    starts = ends - transfer.num_bytes[own]
    places = zip(transfer.delivery[own].tolist(), starts.tolist(), ends.tolist(), strict=True)
    return {delivery: read(received[start:end]) for delivery, start, end in places}
