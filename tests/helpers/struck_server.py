"""Faults in a rank of `bascule serve`, which its `sitecustomize` lets strike at a place.

`BASCULE_STRIKE` is "RANK PLACE NTH"; the rank kills itself when it comes to the place that often.
In the folder `BASCULE_FAULTS_IN`, a file "back" sets the clock back by a day, "full" fills the disk
for outputs, and "struck" says when a rank was killed. The prompt "wrong" fails, and "deadly"
ends its rank. `BASCULE_RESTLESS` puts requests anywhere. In the file "ran", a line "WHAT ID" says
that a request is to start ("begins"), that a rank has it ("runs"), that it has ended or was paused
there ("ends"), and that its start does not count any more ("forgiven").
"""

import errno
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DAY_S = 86400.0
START = "from tests.helpers import struck_server\n\nstruck_server.start()\n"


def start() -> None:
    """Arm this process, if it is a rank."""
    if "RANK" not in os.environ:
        return
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    from bascule.generate import generating
    from bascule.serve import engine, service
    from bascule.serve.options import ServeOptions
    from bascule.serve.orders import Orders
    from bascule.serve.post import Post
    from bascule.serve.spool import Spool
    from tests.helpers.serving import Restless

    folder, now, replace = Path(os.environ["BASCULE_FAULTS_IN"]), time.time, os.replace

    def set_back() -> float:
        return now() - DAY_S if (folder / "back").exists() else now()

    def may_be_full(*args: Any) -> None:
        if (folder / "full").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*args)

    encode = engine.Engine._encode

    def encode_or_fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("prompt") == "wrong":
            raise MemoryError("no memory is left")
        if kwargs.get("prompt") == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, *args, **kwargs)

    engine.Engine._encode = encode_or_fail
    time.time = set_back
    generating.os.replace = may_be_full
    engine.Engine._admit = _told(
        engine.Engine._admit, folder, "runs", lambda _, members: [name for name, _ in members]
    )
    engine.Engine._report = _told(engine.Engine._report, folder, "ends", _ended)
    begins = _told(Spool.count_start, folder, "begins", lambda name, by: [name] if by > 0 else [])
    Spool.count_start = _told(
        begins, folder, "forgiven", lambda name, by: [name] if by < 0 else [], is_after=True
    )
    Spool.forgive = _told(Spool.forgive, folder, "forgiven", lambda *ids: ids, is_after=True)
    strike = os.environ.get("BASCULE_STRIKE", "").split()
    if "BASCULE_RESTLESS" in os.environ:
        ServeOptions.make_policy = lambda self, degrees: Restless(0)
    if not strike or strike[0] != os.environ["RANK"]:
        return
    places: dict[str, tuple[Any, str]] = {
        "waiting": (engine.Engine, "_take"),
        "beginning": (engine.Engine, "_serve"),
        "encoding": (engine.Engine, "_encode"),
        "step": (engine.Engine, "_step"),
        "between steps": (engine.Engine, "_boundary"),
        "moving": (engine.Engine, "_move"),
        "joining": (engine.Engine, "_join"),
        "keeping": (Post, "keep"),
        "fetching": (Post, "fetch"),
        "decoding": (AutoencoderKL, "decode"),
        "accepting": (Spool, "add"),
        "accepted": (Spool, "add"),
        "ordering": (Orders, "order"),
        "writing": (generating.os, "replace"),
        "written": (service, "flush"),
        "ending": (Spool, "end"),
        "ended": (Spool, "end"),
    }
    place, nth = " ".join(strike[1:-1]), int(strike[-1])
    owner, name = places[place]
    setattr(owner, name, _struck(getattr(owner, name), place, nth, folder))


def _ended(batch: Any, what: str, run: Any = None, **_: Any) -> list[str]:
    if what == "paused":
        return [*batch.members]
    return [run.id] if what in ("done", "failed", "cancelled") else []


def _told(
    function: Callable[..., Any],
    folder: Path,
    what: str,
    names: Callable[..., Sequence[str | None]],
    *,
    is_after: bool = False,
) -> Any:
    """The function of an object, whose calls are written down before or after they are made."""

    @functools.wraps(function)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs) if is_after else None
        with (folder / "ran").open("a") as file:
            file.writelines(f"{what} {name}\n" for name in names(*args, **kwargs) if name)
        return result if is_after else function(self, *args, **kwargs)

    return called


def _struck(function: Callable[..., Any], place: str, nth: int, folder: Path) -> Any:
    left = nth

    def kill() -> None:
        (folder / "struck").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(function)
    def reached(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and place == "waiting":
            threading.Timer(1.0, kill).start()
        elif left == 0 and place not in ("accepted", "written", "ended"):
            kill()
        result = function(*args, **kwargs)
        if left == 0 and place in ("accepted", "written", "ended"):
            kill()
        return result

    return reached
