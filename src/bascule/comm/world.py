"""What this process keeps of a world of ranks for as long as it lives. All such state is here.

Whoever refers to the same ranks must number their calls together, in whatever object it found them;
a rank has one thread that watches over its waits; operators of torch find meshes by their names.
So each of these is kept by the world, and goes with it.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch.distributed as dist

from bascule.comm.guard.calls import Calls
from bascule.errors import ConfigError

T = TypeVar("T")


class World:
    """What is kept of the ranks of one default process group.

    Attributes:
        calls: Of every process group in use, and of each part of its ranks, by name.
        meshes: The meshes that somebody holds, by name.
    """

    def __init__(self) -> None:
        self.calls: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Calls]] = (
            weakref.WeakKeyDictionary()
        )
        self.meshes: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
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
