"""What this process keeps of a world of ranks for as long as it lives. All such state is here.

Whoever refers to the same ranks must number their calls together, in whatever object it found them;
a rank has one thread that watches over its waits; operators of torch find meshes by their names.
So each of these is kept by the world, and goes with it.
"""

import secrets
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch.distributed as dist

from bascule.comm.guard.calls import Calls
from bascule.errors import CommError, ConfigError

T = TypeVar("T")

_NUM_KEPT = 32


class Numbered:
    """Objects that operators of torch find by a number, while somebody holds them or after."""

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._kept: dict[int, Any] = {}
        self._last = secrets.randbits(40)  # numbers of an earlier world find nothing in this one

    def add(self, one: object) -> int:
        """Its number from here on."""
        self._last += 1
        self._alive[self._last] = one
        return self._last

    def find(self, number: int) -> Any:
        """The object, if it is alive; of those found, so many of the last stay so.

        A graph that torch recorded holds numbers, and its backward may run when nobody else holds
        the object.

        Raises:
            CommError: It is not.
        """
        one = self._alive.get(number)
        if one is None:
            raise CommError(
                f"number {number} is gone: a compiled backward came more than {_NUM_KEPT} steps "
                "after its forward, or after destroy_process_group; hold the step until then"
            )
        self._kept.pop(number, None)
        self._kept[number] = one
        if len(self._kept) > _NUM_KEPT:
            del self._kept[next(iter(self._kept))]
        return one


class World:
    """What is kept of the ranks of one default process group.

    Attributes:
        calls: Of every process group in use, and of each part of its ranks, by name.
        meshes: The meshes that somebody holds, by name.
        steps: The steps of training.
        stages_cuda: Whether groups of gloo take tensors of CUDA, as copies on the host.
    """

    def __init__(self) -> None:
        self.calls: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Calls]] = (
            weakref.WeakKeyDictionary()
        )
        self.meshes: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.steps = Numbered()
        self.stages_cuda = False
        self._kept: dict[Hashable, Any] = {}

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is kept under a key; made where there is nothing yet."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def forget(self, key: Hashable) -> None:
        """Keep it no longer."""
        self._kept.pop(key, None)


_worlds: "weakref.WeakKeyDictionary[dist.ProcessGroup, World]" = weakref.WeakKeyDictionary()


def this_world() -> World:
    """The one of the default process group.

    Raises:
        ConfigError: torch.distributed is not initialised.
    """
    group = dist.group.WORLD
    if group is None:
        raise ConfigError("torch.distributed is not initialised: call init_process_group first")
    world = _worlds.get(group)
    if world is None:
        world = _worlds[group] = World()
    return world
