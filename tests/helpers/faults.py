"""Faults that strike one rank of a world at a place, and what the other ranks make of them."""

import errno
import functools
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch.distributed as dist

from bascule.comm import failures
from bascule.comm.failures import Calls, watch_of_world

Kind = Literal["kill", "stop", "raise", "full", "cut", "late"]
"""Killed; stopped for good; an error in the user's code; a full disk; a link cut; slow once."""

PATIENCE_S = 30.0
"""How long a rank that failed lives on, so that no closed connection tells the others."""

_OWN_OF_TORCH = ("pt_autograd", "Dummy")


class OwnError(Exception):
    """Of the user's code."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one rank at a place that it comes to."""

    kind: Kind
    # a call of bascule as errors name it, "... posted" for when its messages are on their way, or
    # a place that the program of the test names
    place: str
    victim: int
    ranks: int  # in the world
    step: int = 3  # agreements on what is new are in the first
    nth: int = 1  # of that place in the step: backward passes make the calls of forward again
    topology: str = ""
    wrapper: str = ""  # of the model: "", "ddp" or "fsdp"

    def __str__(self) -> str:
        nth = f" {self.nth}" if self.nth > 1 else ""
        where = " ".join(filter(None, (self.topology, self.wrapper)))
        return (
            f"{self.kind} rank {self.victim} of {self.ranks} at {self.place}{nth} {where}".strip()
        )


class Striker:
    """Strikes this rank, if it is the victim, at the place of a fault; notes when in the folder."""

    def __init__(self, fault: Fault, folder: Path, rank: int) -> None:
        self._fault, self._folder = fault, folder
        self._is_victim = rank == fault.victim
        self._times = Counter[tuple[str, int]]()

    def at(self, place: str, step: int) -> None:
        """This rank comes to a place."""
        fault = self._fault
        self._times[place, step] += 1
        if (place, step) != (fault.place, fault.step) or not self._is_victim:
            return
        if self._times[place, step] == fault.nth:
            strike(fault, self._folder)

    def hits(self, function: Callable[..., Any], place: str, step: Callable[[], int]) -> Any:
        """The function, which is a place."""

        @functools.wraps(function)
        def reached(*args: Any, **kwargs: Any) -> Any:
            self.at(place, step())
            return function(*args, **kwargs)

        return reached

    def in_calls(self) -> AbstractContextManager[Any]:
        """Within, every call of bascule is a place, before and after its messages are posted."""
        begin, wait = Calls.begin, Calls.wait

        def strike(where: str, suffix: str = "") -> None:
            step, _, what = where.rpartition(": ")
            self.at(f"{what}{suffix}", int(step.split(":")[0].removeprefix("step ") or 0))

        def begin_and_strike(calls: Calls, where: str) -> int:
            strike(where)
            return begin(calls, where)

        def wait_and_strike(calls: Calls, where: str, arrived: Callable[[], object]) -> None:
            strike(where, " posted")
            wait(calls, where, arrived)

        stack = ExitStack()
        stack.enter_context(mock.patch.object(Calls, "begin", begin_and_strike))
        stack.enter_context(mock.patch.object(Calls, "wait", wait_and_strike))
        return stack


def look_often() -> float:
    """Seconds between looks of this rank from now on; a few of them pass before it ends a wait.

    Not while a rank goes on that failed: on a busy machine it might come too late.
    """
    failures.LOOK_S = watch_of_world()._look_s = 0.25  # pyright: ignore[reportPrivateUsage]
    return failures.LOOK_S


def strike(fault: Fault, folder: Path) -> None:
    """Do to this rank what the kind says, and write down when."""
    (folder / "struck").write_text(str(time.monotonic()))
    if fault.kind == "late":
        time.sleep(5 * failures.LOOK_S)
        return
    if fault.kind == "raise":
        raise OwnError(f"the fault of rank {fault.victim}")
    if fault.kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if fault.kind == "cut":  # of a node of its own
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        return
    os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended."""

    error: str  # names of the classes of its error, and its text with its notes
    at_s: float  # on the clock of the machine, which all ranks share
    threads: tuple[str, ...]  # left when its process groups were destroyed


def ended_by(fault: Fault, folder: Path, program: Callable[[Fault, Striker], None]) -> Ended:
    """Run a program on this rank, which the fault must end."""
    error = ""
    try:
        program(fault, Striker(fault, folder, dist.get_rank()))
    except Exception as met:
        names = [kind.__name__ for kind in type(met).__mro__]
        error = "\n".join([f"{names}: {met}", *getattr(met, "__notes__", [])])
    at_s = time.monotonic()
    (folder / f"ended {dist.get_rank()}").touch()
    if dist.get_rank() == fault.victim:
        _wait(lambda: len(list(folder.glob("ended *"))) == fault.ranks)
    dist.destroy_process_group()
    _wait(lambda: not _threads())
    return Ended(error, at_s, tuple(_threads()))


def _threads() -> list[str]:
    own = threading.current_thread()
    return [
        one.name
        for one in threading.enumerate()
        if one is not own and not one.name.startswith(_OWN_OF_TORCH)
    ]


def _wait(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.05)


def cause_of(fault: Fault) -> str:
    """What the error of every other rank says."""
    return {
        "raise": f"OwnError: the fault of rank {fault.victim}",
        "full": "No space left on device",
    }.get(fault.kind, f"no report from ranks [{fault.victim}]")


def write_down(fault: Fault, seconds: float) -> None:
    """For who wants a table of all faults: a line each."""
    if path := os.environ.get("BASCULE_FAULT_TIMES"):
        with Path(path).open("a") as file:
            file.write(f"{seconds:.1f}\t{fault}\n")
