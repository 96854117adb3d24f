"""Requests on disk: what was accepted is done once, whatever ends the server in between."""

import fcntl
import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bascule.errors import ConfigError
from bascule.generate.options import IMAGE, VIDEO, Prompt
from bascule.serve.status import Status, Unknown

_KEPT = [one.name for one in fields(Status) if one.name not in ("ranks", "ends_in_s")]
_TABLE = f"""create table if not exists requests (place integer primary key, model text not null,
    image blob, deadline_at real, {", ".join(_KEPT)});
    create unique index if not exists by_id on requests (id);
    create index if not exists by_end on requests (ended_at);"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A request as it is kept until it ends.

    Attributes:
        status: When it came.
        image: PNG that it begins with; None if it has none, or when it is read again.
        deadline_at: Unix seconds.
    """

    status: Status
    image: bytes | None = None
    deadline_at: float | None = None


class Spool:
    """A folder with the requests of a server, in SQLite, and their outputs; one thread at a time.

    Requests are on disk when `add` returns, and their ends when `end` does. `sqlite3.Error` says
    that the disk is full or broken, and that nothing was changed.

    Args:
        folder: Made if it does not exist.
        model: The pipeline: requests that wait for another one are not made by it.

    Raises:
        ConfigError: Another server has the folder, it cannot be written, or holds requests for
            another model.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self._outputs, self._model = folder / "outputs", model
        with ExitStack() as stack:
            try:
                self._outputs.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((folder / "lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                base = sqlite3.connect(folder / "requests.sqlite", check_same_thread=False)
                self._base = stack.enter_context(closing(base))
                base.execute("pragma journal_mode = wal")
                base.execute("pragma synchronous = full")
                base.executescript(_TABLE)
                query = "select model from requests where ended_at is null and model != ?"
                others = base.execute(query, [model]).fetchall()
            except BlockingIOError as error:
                raise ConfigError(
                    f"--spool {folder}: another server has it: stop that one, or give another"
                ) from error
            except (OSError, sqlite3.Error) as error:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"--spool {folder}: cannot be used: {reason}") from error
            if others:
                raise ConfigError(
                    f"--spool {folder}: {len(others)} of its requests wait for {others[0][0]}, and "
                    f"this is {model}: let that one finish them, or give another folder"
                )
            self._open = stack.pop_all()

    def close(self) -> None:
        """Let another server have the folder."""
        self._open.close()

    def add(self, entries: Sequence[Entry]) -> None:
        """Keep requests, all or none."""
        rows = [(self._model, x.image, x.deadline_at, *_row(x.status)) for x in entries]
        marks = ", ".join("?" * (3 + len(_KEPT)))
        query = f"insert into requests (model, image, deadline_at, {', '.join(_KEPT)})"
        with self._base:
            self._base.executemany(f"{query} values ({marks})", rows)

    def end(self, status: Status) -> bool:
        """Keep the end of a request, unless it has ended before; return whether it had not."""
        changes = ", ".join(f"{name} = ?" for name in _KEPT)
        query = f"update requests set {changes}, image = null where id = ? and ended_at is null"
        with self._base:
            return self._base.execute(query, [*_row(status), status.id]).rowcount == 1

    def waiting(self) -> list[Entry]:
        """Return the requests that have not ended, in the order of their arrival."""
        query = f"select deadline_at, {', '.join(_KEPT)} from requests"
        rows = self._base.execute(f"{query} where ended_at is null order by place")
        return [Entry(_status(row[1:]), deadline_at=row[0]) for row in rows]

    def image(self, request_id: str) -> bytes | None:
        """Return the image that a request begins with, until it ends."""
        query = "select image from requests where id = ?"
        return self._base.execute(query, [request_id]).fetchone()[0]

    def ended(self, num: int) -> list[Status]:
        """Return the latest requests that have ended, the last one first."""
        query = f"select {', '.join(_KEPT)} from requests where ended_at is not null"
        rows = self._base.execute(f"{query} order by ended_at desc, place desc limit ?", [num])
        return [_status(row) for row in rows]

    def status(self, request_id: str) -> Status:
        """Return a request as it came, or as it ended; Unknown if there is none."""
        query = f"select {', '.join(_KEPT)} from requests where id = ?"
        row = self._base.execute(query, [request_id]).fetchone()
        if row is None:
            raise Unknown(f"there is no request {request_id!r}")
        return _status(row)

    def output(self, status: Status) -> Path:
        """Return where the output of a request is, or is to be."""
        return self._outputs / f"{status.id}{VIDEO if status.kind == 'video' else IMAGE}"


def flush(path: Path) -> None:
    """Wait until a file that was moved into its place is on disk there."""
    for one in (path, path.parent):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _row(status: Status) -> list[Any]:
    values = [getattr(status, name) for name in _KEPT]
    return [json.dumps(asdict(x)) if isinstance(x, Prompt) else x for x in values]


def _status(row: Sequence[Any]) -> Status:
    values: dict[str, Any] = dict(zip(_KEPT, row, strict=True))
    values["prompt"] = Prompt(**json.loads(values["prompt"]))
    return Status(**values)
