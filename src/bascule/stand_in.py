"""Reversible replacements of one method of one object, and helpers for trial calls of models."""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code


class StandIn:
    """A wrapper that replaces one method of one object; copies and pickles have the method itself.

    Other packages may replace the method later, as diffusers and accelerate do with `forward`.
    `remove` then leaves their replacement in place; the stand-in below only calls the method.
    """

    # No `__dict__`: `functools.update_wrapper` would copy it into the wrappers of others.
    __slots__ = (
        *("__weakref__", "__wrapped__", "around", "is_on", "is_plain", "method", "name", "owner"),
    )

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        method = getattr(owner, name)
        while isinstance(method, StandIn) and not method.is_on:
            method = method.method
        self.owner, self.name, self.around = owner, name, around
        self.method = self.__wrapped__ = method  # `inspect.signature` reads `__wrapped__`
        is_bound = getattr(method, "__self__", None) is owner
        function = getattr(method, "__func__", None)
        self.is_plain = is_bound and function is getattr(type(owner), name, None)  # the class's own
        self.is_on = True  # calls go to `around`
        setattr(owner, name, self)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call `around`; after `remove`, the method."""
        if not self.is_on:
            return self.method(*args, **kwargs)
        return self.around(self.method, *args, **kwargs)

    def remove(self) -> None:
        """Give the owner its method back; below another package's replacement, only stop."""
        self.is_on = False
        owners, bound = [self.owner], getattr(self.method, "__self__", None)
        # hooks of others may have moved the stand-in to the module, and be gone
        if isinstance(bound, nn.Module) and bound is not self.owner:
            owners.append(bound)
        for owner in owners:
            for name in [name for name, value in vars(owner).items() if value is self]:
                if self.is_plain and owner is self.owner and name == self.name:
                    delattr(owner, name)
                else:
                    setattr(owner, name, self.method)

    def __reduce__(self) -> tuple[Any, ...]:
        return _method_itself, (self.method,)  # a bound method is copied with the object


# Compilers inline the call, but must not compile it alone: a break within would break twice.
skip_code(StandIn.__call__.__code__)


def _method_itself(method: Any) -> Any:
    return method


_OVERRIDE: Any = "_bascule_override"


class Override:
    """A replacement of one method of one object, by a subclass with the name of its class.

    Unlike `StandIn`, it can replace special methods such as `__call__`, and does not change the
    object's attributes. Copies and pickles have the original class, unless `with_copies`.
    Compiled code calls the replaced method.
    """

    def __init__(
        self, owner: Any, name: str, around: Callable[..., Any], *, with_copies: bool = False
    ) -> None:
        self._owner, self._is_on, self.is_removed = owner, True, False
        self._calling = set[int]()  # threads in `around`, which call the replaced method
        base: Any = type(owner)
        method: Any = getattr(base, name)

        @wraps(method)
        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            is_overridden = self._is_on and not self.is_removed and (this is owner or with_copies)
            if torch.compiler.is_compiling() or not is_overridden:
                return method(this, *args, **kwargs)
            if (thread := threading.get_ident()) in self._calling:
                return method(this, *args, **kwargs)
            self._calling.add(thread)
            try:
                return around(partial(method, this), *args, **kwargs)
            finally:
                self._calling.remove(thread)

        def reduce(this: Any, protocol: Any) -> tuple[Any, ...]:
            return object.__new__, (_class_below(base),), base.__reduce_ex__(this, protocol)[2]

        members = {"__module__": base.__module__, "__qualname__": base.__qualname__, name: call}
        members |= {"__doc__": base.__doc__, _OVERRIDE: self}
        if not with_copies:
            members["__reduce_ex__"] = reduce
        owner.__class__ = type(base.__name__, (base,), members)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Call the replaced method within this scope."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def remove(self) -> None:
        """Give the object its class back: at once, or as soon as later overrides are removed."""
        self.is_removed = True
        while (last := vars(type(self._owner)).get(_OVERRIDE)) is not None and last.is_removed:
            self._owner.__class__ = type(self._owner).__base__


def _class_below(cls: Any) -> Any:
    """Return the class below all overrides."""
    while _OVERRIDE in vars(cls):
        cls = cls.__base__
    return cls


@contextmanager
def as_in_use(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode and eagerly: compilers would specialise on the trial's shapes."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, is_training in training.items():
            module.training = is_training


def module_of(error: BaseException, model: nn.Module) -> str:
    """Return the name of the innermost module of a model in which an error was raised."""
    names = {module: name for name, module in model.named_modules()}
    frames = traceback.walk_tb(error.__traceback__)
    owners = [frame.f_locals.get("self") for frame, _ in frames]
    inside = [names[owner] for owner in owners if isinstance(owner, nn.Module) and owner in names]
    return inside[-1] if inside else ""
