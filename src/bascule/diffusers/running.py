"""The forward passes of a split model that run: begun by calls or resumed, ended by whatever."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bascule.diffusers.forward_pass import Forward
from bascule.errors import ConfigError
from bascule.sdpa.call_mode import num_calls


class Running:
    """The forward passes of a model that were begun and not ended.

    There are several where the model calls itself. One that an interrupt ended is still among them,
    and counts for nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._passes: list[Forward] = []

    @property
    def current(self) -> Forward | None:
        """The innermost one of this thread."""
        if torch.compiler.is_compiling():
            return self._passes[-1] if self._passes else None
        threads = None, threading.get_ident()
        of_thread = [one for one in self._passes if one.thread in threads]
        return next((one for one in reversed(of_thread) if one.is_running()), None)

    @property
    def is_any(self) -> bool:
        """Return whether one runs in any thread."""
        return any(one.is_running() for one in self._passes)

    def forget_ended(self) -> None:
        """End what an interrupt ended, when another call has begun.

        Raises:
            ConfigError: The model runs in another thread.
        """
        if torch.compiler.is_compiling():
            self.end_all()
            return
        calls, threads = num_calls(self._model), (None, threading.get_ident())
        for one in reversed(self._passes.copy()):
            is_own = one.thread in threads
            if not is_own and one.is_running():
                raise ConfigError(
                    f"{type(self._model).__name__} runs in another thread, and its ranks attend "
                    "together: let one thread at a time call it"
                )
            if not is_own or not 0 <= one.depth < calls:
                self.end(one)

    def begin(self, forward: Forward) -> None:
        """Begin one, by the call of the model that runs."""
        if torch.compiler.is_compiling():
            forward.depth, forward.thread = -1, None
        else:
            forward.depth, forward.thread = num_calls(self._model), threading.get_ident()
        self._enter(forward)

    def of_call(self) -> Forward | None:
        """The one that was begun by the call which ends now."""
        if torch.compiler.is_compiling():
            return self.current
        depths, threads = (num_calls(self._model), -1), (None, threading.get_ident())
        of_thread = [one for one in self._passes if one.thread in threads]
        return next((one for one in reversed(of_thread) if one.depth in depths), None)

    @contextmanager
    def resumed(self, forward: Forward) -> Iterator[None]:
        """Compute parts of an earlier one again."""
        before = forward.depth, forward.thread
        forward.depth, forward.thread = 0, threading.get_ident()
        self._enter(forward)
        try:
            yield
        finally:
            self.end(forward)
            forward.depth, forward.thread = before

    def end(self, forward: Forward) -> None:
        """End one."""
        forward.leave()
        for place in reversed(range(len(self._passes))):
            if self._passes[place] is forward:
                del self._passes[place]
                break

    def end_all(self) -> None:
        """End all."""
        for one in reversed(self._passes.copy()):
            self.end(one)

    def _enter(self, forward: Forward) -> None:
        self._passes.append(forward)
        forward.enter()
