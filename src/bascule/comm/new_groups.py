"""Makes process groups, of ranks that met before: torch would wait for one that never comes."""

import hashlib
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bascule.comm.groups import RankGroup, member_of, resolve
from bascule.comm.guard import notes
from bascule.comm.guard.failures import end_all, failure
from bascule.comm.guard.verdicts import Verdict
from bascule.comm.guard.watch import watch_of_world
from bascule.errors import ConfigError
from bascule.plan.checks import real

_LONGEST_S = 1e7  # four months: it fits into the clocks of all back ends
_SLICE_S = 1.0  # of a wait, between looks whether it can end


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
        ConfigError: The timeout is not a positive number of seconds.
        CommError: A member did not come in time, or never can.
    """
    check_timeout(timeout_s)
    world, verdict = resolve(None), None
    in_order = sorted(ranks)
    place = in_order.index(dist.get_rank())
    meeting = f"{name} of ranks {in_order}"
    number = watch_of_world(end_all).num_met(meeting)
    try:
        verdict = _meet(in_order, name, f"{meeting}/{number}", number, timeout_s)
        if verdict is not None:
            raise RuntimeError("the group was not made")
        watch_of_world(end_all).count_meeting(meeting)
        group = _connect(in_order, f"{meeting}/{number}", f"bascule {name}", timeout_s, backend)
    except RuntimeError as error:
        own = RankGroup(weakref.ref(world), place, tuple(in_order), (), name)
        raise failure(own, "new_group", error, verdict) from error
    notes.erase(notes.FAILED, dist.get_rank())  # what ended before does not concern this one
    return member_of(group, name)


def is_timeout(timeout_s: object) -> bool:
    """Whether it is a number of seconds that ranks can wait."""
    return 0.0 < (real(timeout_s) or 0.0) < _LONGEST_S


def check_timeout(timeout_s: object) -> None:
    """Refuse what is no time to wait.

    Raises:
        ConfigError: Names the value and the range.
    """
    if not is_timeout(timeout_s):
        raise ConfigError(
            f"timeout_s={timeout_s!r}: must be a number of seconds above 0 and below {_LONGEST_S:g}"
        )


def _meet(
    ranks: Sequence[int], name: str, meeting: str, number: int, timeout_s: float
) -> Verdict | None:
    """Wait until all have come; why they never will, if that is so.

    Who goes away takes its coming back, so that the next try is the same meeting for all.

    Raises:
        RuntimeError: They did not come in time, or the store is gone.
    """
    watch = watch_of_world(end_all)
    watch.go_on(meeting, number)
    num, deadline = notes.arrive(meeting), time.monotonic() + timeout_s
    wait = watch.begin(meeting, number, tuple(ranks))
    try:
        if num == len(ranks):
            notes.call_together(meeting)
        while num < len(ranks) and wait.verdict is None and time.monotonic() < deadline:
            within_s = min(_SLICE_S, max(deadline - time.monotonic(), 0.001))
            num = len(ranks) if notes.are_together(meeting, within_s) else num
    finally:
        watch.end(wait, is_done=num == len(ranks))
    if num < len(ranks) and notes.arrive(meeting, -1) < len(ranks) - 1:
        if wait.verdict is None:
            raise RuntimeError(f"not all of ranks {ranks} came within {timeout_s:g} s")
        return wait.verdict
    if num < len(ranks):
        notes.arrive(meeting)  # the last one came just now
    return None


def _connect(
    ranks: list[int], meeting: str, description: str, timeout_s: float, backend: str | None
) -> dist.ProcessGroup:
    """Make the group of ranks that met, under a name that comes from where they met.

    `dist.new_group` names a group after how many groups a rank has. Ranks that have unlike numbers,
    as after a group of some ranks, would look for each other under unlike names (torch 2.13).
    """
    world = resolve(None)
    default_backend, store = c10d._world.pg_map[world]
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend or default_backend),
        store,
        cast(Any, hashlib.sha256(meeting.encode()).hexdigest()),
        timeout=timedelta(seconds=timeout_s),
        device_id=world.bound_device_id,
        group_desc=description,
    )
    assert isinstance(group, dist.ProcessGroup), f"rank outside its own group {ranks}"
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    if "cuda:nccl" in dist.get_backend_config(group) and torch.cuda.is_available():
        # NCCL connects in the first call, which all members must make; parts of it come later.
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return group
