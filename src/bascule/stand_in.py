"""One object's method replaced by a function around it, without a change to its class."""

from collections.abc import Callable
from typing import Any


class StandIn:
    """The replacement of one method of one object.

    Others may replace the method later, as diffusers and accelerate do with `forward`. `remove`
    then leaves theirs in place, and the stand-in below only calls the method. Copies and pickles
    of the object have their own method.

    Attributes:
        method: The method that is replaced.
        is_on: Whether calls go to `around`.

    Args:
        owner: Its attribute `name` is set; its class stays as it is.
        name: Of the method; "forward" of a module.
        around: Called as `around(method, *args, **kwargs)` in place of the method.
    """

    # No `__dict__`: `functools.update_wrapper` would copy it into the wrappers of others.
    __slots__ = ("__weakref__", "__wrapped__", "around", "is_on", "method", "name", "owner")

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        method = getattr(owner, name)
        while isinstance(method, StandIn) and not method.is_on:
            method = method.method
        self.owner, self.name, self.around = owner, name, around
        self.method = self.__wrapped__ = method  # `inspect.signature` looks for the latter
        self.is_on = True
        setattr(owner, name, self)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call `around`, or after `remove` the method."""
        if not self.is_on:
            return self.method(*args, **kwargs)
        return self.around(self.method, *args, **kwargs)

    @property
    def is_outermost(self) -> bool:
        """Whether the owner calls it first."""
        return vars(self.owner).get(self.name) is self

    def remove(self) -> None:
        """Give the owner its method back; below the stand-in of somebody else, become passive."""
        self.is_on = False
        if self.is_outermost:
            if is_of_class(self.method, self.owner, self.name):
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.method)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.method,)  # a bound method is copied with the object


def is_of_class(method: Any, owner: Any, name: str) -> bool:
    """Return whether a method is the one that the owner's class gives it."""
    is_bound = getattr(method, "__self__", None) is owner
    return is_bound and method.__func__ is getattr(type(owner), name, None)


def _same(method: Any) -> Any:
    return method
