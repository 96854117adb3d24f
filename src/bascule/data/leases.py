"""Process groups that are lent to one loader after the other.

The thread of an iteration needs a process group that nobody else uses meanwhile: two threads in one
group of gloo get each other's bytes. Torch keeps every group, with its threads and connections,
until all are destroyed. So an iteration borrows a group, and gives it back when its thread is done.

All ranks must borrow the same one, but they give back at unlike moments: a rank ends its iteration
by itself, at the latest when its thread is done. What a rank sees of its own iterations is thus no
ground to choose on. So ranks choose together: as an iteration begins, each says in one small gather
which groups are free with it, and all take the first that is free with everyone, or make another
one. A group that a rank still uses is not free there, hence not chosen anywhere. The pools of all
ranks hold the same groups in the same places, because groups are made only as the outcome of this
gather. It runs on a group of its own, on which loaders are also constructed; both are done by all
ranks, in the same order, by the thread that trains. So no group ever has two threads.

There are never more groups than iterations that went on at once, and one.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bascule.comm.agree import Statement, agree
from bascule.comm.groups import RankGroup, set_timeout
from bascule.comm.guard.failures import is_ended
from bascule.comm.new_groups import new_group
from bascule.comm.world import this_world

_CAPACITY = 9  # integers a rank that the first gather has room for: eight groups


@dataclass(slots=True, eq=False)
class _Place:
    """A group of a pool.

    Attributes:
        group: The group.
        is_lent: Whether this rank uses it.
    """

    group: RankGroup
    is_lent: bool = False

    @property
    def is_free(self) -> bool:
        """Whether this rank could use it."""
        return not self.is_lent and self.group.calls.ended is None


@dataclass(frozen=True, slots=True)
class Lease:
    """A group that nobody else uses.

    Attributes:
        group: The group.
        use: A random number, the same on all ranks, that tells this use of the group from others.
        give_back: Says that this rank's thread makes no further calls of it.
    """

    group: RankGroup
    use: int
    give_back: Callable[[], None]


class Pool:
    """The groups of some ranks that loaders share. All of these ranks construct it.

    Args:
        members: Global ranks.
        timeout_s: Longest wait for a member.

    Attributes:
        control: What the thread that trains uses, to construct loaders and to borrow.
    """

    def __init__(self, members: Sequence[int], timeout_s: float) -> None:
        self.control = new_group(members, "loader", timeout_s, backend="gloo")
        self._places: list[_Place] = []
        self._num_loaders = 0

    def next_name(self) -> str:
        """What tells a loader from the others of these ranks; the same on all of them."""
        self._num_loaders += 1
        return f"number {self._num_loaders} of those made"

    def borrow(
        self, settings: Mapping[str, str], error: Exception | None, timeout_s: float
    ) -> Lease:
        """A group that is free on all ranks. All call it, in the same order.

        Args:
            settings: What must be the same on all ranks for them to begin.
            error: Why this rank cannot begin; all ranks then raise it, and none borrows.
            timeout_s: Longest wait for a rank, here and in calls of the group.

        Raises:
            RemoteConfigError: A rank cannot begin because of bad input.
            CommError: A rank cannot begin, the settings differ, or a rank did not come.
        """
        set_timeout(self.control, timeout_s)
        free = [place.is_free for place in self._places]
        own = np.array([secrets.randbits(62), *free], dtype=np.int64)
        said = agree(
            self.control,
            Statement(settings, own, error),
            what="beginning an iteration",
            step=0,
            capacity=max(_CAPACITY, own.size),
        )
        free_everywhere = np.flatnonzero(np.stack(said)[:, 1:].all(axis=0)).tolist()
        if not free_everywhere:
            group = new_group(self.control.ranks, "loader", timeout_s, backend="gloo")
            self._places.append(_Place(group))
        place = self._places[free_everywhere[0] if free_everywhere else -1]
        set_timeout(place.group, timeout_s)
        place.is_lent = True

        def give_back() -> None:
            place.group.calls.hand_over()
            place.is_lent = False

        return Lease(place.group, int(said[0][0]), give_back)


def pool_of(members: Sequence[int], timeout_s: float) -> Pool:
    """The pool of these global ranks, made where there is none that works. All of them call it.

    Raises:
        CommError: A member did not come.
    """
    world, key = this_world(), (Pool, tuple(members))
    pool = world.kept(key, lambda: Pool(members, timeout_s))
    if is_ended(pool.control):
        world.forget(key)
        pool = world.kept(key, lambda: Pool(members, timeout_s))
    set_timeout(pool.control, timeout_s)
    return pool
