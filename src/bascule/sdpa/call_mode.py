"""Function modes that hold while a model is called, however the call ends.

A forward pass that a KeyboardInterrupt ends calls no hooks of torch, and its mode stays on the
stack. So a mode that a hook entered counts only while that call of the model is on the stack of its
thread; and it goes below the modes of others, which take off the topmost one when they end.
"""

import sys
import threading
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._device import DeviceContext

_CALL = nn.Module._call_impl.__code__


def num_calls(module: nn.Module, thread: int | None = None, most: int | None = None) -> int:
    """Count the running calls of a module in a thread, by default this one, up to `most`."""
    if thread is None or thread == threading.get_ident():
        frame = sys._getframe()
    else:
        frame = sys._current_frames().get(thread)
    calls = 0
    while frame is not None and calls != most:
        calls += frame.f_code is _CALL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls


def is_called(module: nn.Module) -> bool:
    """Return whether this thread is within a call of a module; a compiler traces only what is."""
    return torch.compiler.is_compiling() or num_calls(module, most=1) > 0


def error_of(module: nn.Module) -> BaseException | None:
    """In a hook that is called anyway: the error that ended the call of a module, if one did."""
    error = sys.exc_info()[1]
    entry = None if error is None else error.__traceback__
    if entry is None or entry.tb_frame.f_code is not _CALL:
        return None
    return error if entry.tb_frame.f_locals.get("self") is module else None


class CallMode(TorchFunctionMode):
    """A mode that may be left on the stack, and then does nothing."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let compilers trace `__torch_function__` as a part of what they compile, never by itself.

        Where a graph breaks while the mode is entered, torch 2.13 would compile it for the first
        function that it is called with, and use that for others: `x.dtype` gave a shape.
        """
        super().__init_subclass__(**options)
        skip_code(cls.__torch_function__.__code__)

    def is_running(self) -> bool:
        """Return whether what entered it still runs."""
        return True

    def enter(self) -> None:
        """Enter, below modes of others; torch's own for devices must stay the lowest."""
        if torch.compiler.is_compiling():
            self.__enter__()
            return
        above: list[TorchFunctionMode] = []
        while (top := _get_current_function_mode()) is not None:
            if isinstance(top, DeviceContext) or (isinstance(top, CallMode) and top.is_running()):
                break
            _pop_mode()
            if not isinstance(top, CallMode):
                above.append(top)
        for mode in (self, *reversed(above)):
            _push_mode(mode)

    def leave(self) -> None:
        """Leave, wherever on the stack it is; nothing if it is not there."""
        if torch.compiler.is_compiling():
            self.__exit__(None, None, None)
            return
        if not any(mode is self for mode in _get_current_function_mode_stack()):
            return
        above: list[TorchFunctionMode] = []
        while (top := _pop_mode()) is not self:
            above.append(top)
        for mode in reversed(above):
            _push_mode(mode)
