"""Kept: a cache of things that are made when they are first used."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Kept(Generic[K, T]):
    """The last `most` things that were used, by key; the longest unused goes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._things: dict[K, T] = {}

    def get(self, key: K, make: Callable[[], T]) -> T:
        """Return the thing of a key, made where there is none."""
        thing = self._things.pop(key) if key in self._things else make()
        self._things[key] = thing  # behind all others
        if len(self._things) > self._most:
            del self._things[next(iter(self._things))]
        return thing
