"""Puts back what a function may change of its process.

Not the plans that torch.distributed.checkpoint keeps for each class: who saves takes fresh ranks.
"""

import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from diffusers.models import attention_dispatch
from torch.overrides import (
    _get_current_function_mode_stack,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]
)

_END_BY_THEMSELVES = ("bascule watch", "bascule store", "pt_autograd", "Dummy", "tqdm", "QueueF")
"""Threads that a process may have: torch's, and those that look after a process group that went."""

_PATIENCE_S = 2.0


class State:
    """What a function may change of its process, as it was when the process began."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = Path.cwd()
        self._argv = list(sys.argv)
        self._handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
        self._loggers = {
            name: (one.level, one.propagate, list(one.handlers))
            for name in (None, "bascule")
            for one in [logging.getLogger(name)]
        }
        self._registry = vars(attention_dispatch)["_AttentionBackendRegistry"]
        self._attention = self._registry._active_backend, self._registry._checks_enabled
        self._numbers = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._dtype, self._num_threads = torch.get_default_dtype(), torch.get_num_threads()

    def put_back(self) -> bool:
        """Put all of it back; return False if something of the function goes on.

        Its process groups are destroyed. What it left to be collected, as a loader whose thread
        ends with it, is collected.
        """
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._put_back_process()
        own, of_numpy, of_torch = self._numbers
        random.setstate(own)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        torch.set_default_dtype(self._dtype)
        torch.set_num_threads(self._num_threads)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        self._registry._active_backend, self._registry._checks_enabled = self._attention
        if torch._dynamo.utils.counters:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
        gc.collect()
        gc.freeze()
        is_in_a_mode = _get_current_function_mode_stack() or _get_current_dispatch_mode_stack()
        return not (is_in_a_mode or multiprocessing.active_children() or _threads_left())

    def _put_back_process(self) -> None:
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        os.chdir(self._folder)
        sys.argv[:] = self._argv
        for name in [name for name, module in sys.modules.items() if module is None]:
            del sys.modules[name]  # as if it were not installed
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for name, (level, propagate, handlers) in self._loggers.items():
            logger = logging.getLogger(name)
            logger.setLevel(level)
            logger.propagate, logger.handlers[:] = propagate, handlers


def _threads_left() -> list[threading.Thread]:
    left = [
        one
        for one in threading.enumerate()
        if one is not threading.current_thread() and not one.name.startswith(_END_BY_THEMSELVES)
    ]
    for one in left:
        one.join(_PATIENCE_S)
    return [one for one in left if one.is_alive()]
