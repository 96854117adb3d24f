"""Process groups with what a failing collective must report. Built once and passed in.

The differences between versions of torch, and the few names of it that are not public, live here.
"""

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    Store,
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
)

from bascule.comm.staging import Staging
from bascule.errors import CommError, ConfigError

logger = logging.getLogger(__name__)

# torch 2.13 renamed these two; both names exist in some versions.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# How long survivors of a failed collective wait for each other's sign of life.
ROLL_CALL_S = 2.0


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group, this rank's place in it, and its members.

    Torch keeps a group until it is destroyed, and does not end well if somebody else still does
    then: threads of gloo outlive the interpreter and abort the process. So it is only referred to.

    Attributes:
        reference: Gives the process group, or None once it was destroyed.
        rank: This rank in the group.
        ranks: Global rank of each member, in order.
        name: How errors call the group.
        staging: Memory for its exchanges.
    """

    reference: Callable[[], dist.ProcessGroup | None]
    rank: int
    ranks: tuple[int, ...]
    name: str
    staging: Staging = field(default_factory=Staging, compare=False, repr=False)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """What torch's collectives take.

        Raises:
            CommError: It was destroyed.
        """
        group = self.reference()
        if group is None:
            raise CommError(
                f"the process group {self.name!r} of ranks {list(self.ranks)} was destroyed: build "
                "what uses it again after init_process_group"
            )
        return group

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


def resolve(mesh_or_group: "DeviceMesh | dist.ProcessGroup | None") -> dist.ProcessGroup:
    """The process group of a one-axis mesh, a group, or (None) the default group.

    Raises:
        ConfigError: The mesh has several axes, or torch.distributed is not initialised.
    """
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            raise ConfigError(
                f"a mesh with axes {mesh_or_group.mesh_dim_names}: choose one, as in "
                "mesh['name'], whose ranks share the work"
            )
        return mesh_or_group.get_group()
    if mesh_or_group is not None:
        return mesh_or_group
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise ConfigError("torch.distributed is not initialised: call init_process_group first")
    return dist.group.WORLD


def new_group(
    ranks: Sequence[int], name: str, timeout_s: float, *, backend: str | None = None
) -> RankGroup:
    """Create a group; only its members need to call, all of them in the same order.

    Args:
        ranks: Global ranks.
        name: How errors call it.
        timeout_s: Longest wait of a collective on it, in seconds.
        backend: None takes the default group's.

    Raises:
        CommError: A member did not come in time.
    """
    try:
        group = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout_s),
            backend=backend,
            use_local_synchronization=True,
            group_desc=f"bascule {name}",
        )
    except RuntimeError as error:
        own = ranks.index(dist.get_rank())
        raise failure(
            RankGroup(weakref.ref(resolve(None)), own, tuple(ranks), name), "new_group", 0, error
        ) from error
    assert isinstance(group, dist.ProcessGroup), f"rank outside its own group {ranks}"
    return RankGroup(weakref.ref(group), dist.get_rank(group), tuple(ranks), name)


def member_of(group: dist.ProcessGroup, name: str) -> RankGroup:
    """This rank's view of an existing group."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return RankGroup(weakref.ref(group), dist.get_rank(group), ranks, name)


def timeout_of(group: RankGroup, device: torch.device) -> timedelta | None:
    """With what timeout a group was made; None if its back end does not tell.

    Gloo's point-to-point knows only that one, not one set later.
    """
    backend = group.process_group._get_backend(device)
    return getattr(getattr(backend, "options", None), "_timeout", None)


@contextmanager
def reporting(group: RankGroup, collective: str, step: int) -> Iterator[None]:
    """Turn a failure of a collective into a CommError that says where, and who is missing."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CommError):
            raise
        raise failure(group, collective, step, error) from error


def failure(group: RankGroup, collective: str, step: int, error: BaseException) -> CommError:
    """The error to raise when `collective` failed, with the roll call of the group; logged."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    message = (
        f"step {step}: {collective} failed on group {group.name!r} of ranks {list(group.ranks)} "
        f"({roll_call(group, collective, step)}): {reason}"
    )
    logger.error("%s", message)
    return CommError(message)


def roll_call(group: RankGroup, collective: str, step: int) -> str:
    """Who else noticed, and where: each survivor signs in the store and waits a moment."""
    own = dist.get_rank()
    try:
        store = _get_default_store()
        store.set(f"bascule/failed/{step}/{own}", collective)
        store.set(f"bascule/last_failed/{own}", f"step {step}: {collective}")
        missing = _missing(store, group, step)
        elsewhere = _elsewhere(store, group, collective, step)
    except (RuntimeError, ValueError) as error:
        return f"no roll call, the store is gone with its host: {type(error).__name__}"
    said = "every rank reported the failure"
    if missing:
        said = f"missing: no report from ranks {missing} within {ROLL_CALL_S:g} s"
    return "; ".join([said, *elsewhere])


def _missing(store: Store, group: RankGroup, step: int) -> list[int]:
    """The ranks that did not sign for this step in time."""
    deadline = time.monotonic() + ROLL_CALL_S
    while True:
        missing = [
            rank for rank in group.ranks if not store.check([f"bascule/failed/{step}/{rank}"])
        ]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.05)


def _elsewhere(store: Store, group: RankGroup, collective: str, step: int) -> list[str]:
    """Where the ranks that last reported from another collective or step did so."""
    here, elsewhere = f"step {step}: {collective}", list[str]()
    for rank in group.ranks:
        key = f"bascule/last_failed/{rank}"
        last = store.get(key).decode() if store.check([key]) else here
        if last != here:
            elsewhere.append(f"rank {rank} last failed in {last}")
    return elsewhere
