"""Makes process groups, of ranks that met before: torch would wait for one that never comes."""

import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bascule.comm import notes
from bascule.comm.calls import Begun, Call
from bascule.comm.failures import end_all, failure
from bascule.comm.groups import RankGroup, member_of, resolve
from bascule.comm.watch import Verdict, watch_of_world
from bascule.errors import ConfigError

_LONGEST_S = 1e7
_GLANCE_S = 0.01  # between looks at who has come


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
        ConfigError: The timeout is none.
        CommError: A member did not come in time, or never can.
    """
    check_timeout(timeout_s)
    world, what, verdict = resolve(None), Call("new_group"), None
    place = list(ranks).index(dist.get_rank())
    try:
        verdict = _meet(ranks, name, timeout_s)
        if verdict is not None:
            raise RuntimeError("the group was not made")
        group = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout_s),
            backend=backend,
            use_local_synchronization=True,
            group_desc=f"bascule {name}",
        )
    except RuntimeError as error:
        own = RankGroup(weakref.ref(world), place, tuple(ranks), name)
        raise failure(own, what, error, verdict) from error
    assert isinstance(group, dist.ProcessGroup), f"rank outside its own group {ranks}"
    notes.erase(notes.FAILED, dist.get_rank())  # what ended before does not concern this one
    return member_of(group, name, ranks=dist.get_process_group_ranks(group))


def check_timeout(timeout_s: Any) -> None:
    """Refuse what is no time to wait.

    Raises:
        ConfigError: Names the value and the range.
    """
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < _LONGEST_S:
        raise ConfigError(
            f"timeout_s={timeout_s!r}: must be a number of seconds above 0 and below {_LONGEST_S:g}"
        )


def _meet(ranks: Sequence[int], name: str, timeout_s: float) -> Verdict | None:
    """Wait until all have come; why they never will, if that is so.

    Raises:
        RuntimeError: They did not come in time, or the store is gone.
    """
    watch, own = watch_of_world(end_all), dist.get_rank()
    meeting = f"{name} of ranks {sorted(ranks)}"
    number = watch.meeting(meeting)
    begun = Begun(Call("new_group"), number, 0)
    needs = tuple(rank for rank in ranks if rank != own)
    notes.arrive(f"{meeting}/{number}")
    deadline = time.monotonic() + timeout_s
    with watch.waiting(meeting, begun, needs, f"new_group {name!r}") as wait:
        while wait.verdict is None and notes.num_arrived(f"{meeting}/{number}") < len(ranks):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all of ranks {sorted(ranks)} came within {timeout_s:g} s")
            time.sleep(_GLANCE_S)
    return wait.verdict
