"""Requests on disk: each accepted request is done once, whatever ends the server in between."""

import fcntl
import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from bascule.errors import ConfigError
from bascule.generate.options import IMAGE, VIDEO, Prompt
from bascule.options import check_options
from bascule.serve.status import STATES, Closing, Key, Reused, Status, Unknown

_VERSION = 2  # of the tables
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # changes with a loss of power
_COLUMNS = [column.name for column in fields(Status) if column.name not in ("ranks", "ends_in_s")]
_KINDS = get_type_hints(Status)
_PRAGMAS = "pragma journal_mode = wal; pragma synchronous = full; pragma secure_delete = on"
_TABLE = f"""create table if not exists requests (place integer primary key, model text not null,
    deadline_at real, starts integer not null default 0, boot text,
    {", ".join(_COLUMNS)});
    create unique index if not exists by_id on requests (id);
    create index if not exists by_end on requests (ended_at);
    create table if not exists images (id text not null, image blob not null);
    create index if not exists by_owner on images (id);
    create table if not exists loras (name text primary key);
    create table if not exists keys (key text not null, digest text not null, id text not null);
    create index if not exists by_key on keys (key);
    create index if not exists by_request on keys (id);
    pragma user_version = {_VERSION};"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored request that has not ended."""

    status: Status  # at its arrival; "failed" if its row cannot be read
    num_images: int = 0  # of its input
    deadline_at: float | None = None  # Unix seconds
    starts: int = 0  # how often its ranks ended while it ran, since this machine booted


class Spool:
    """Folder of a server's requests, in SQLite, their states and outputs; not thread-safe.

    Requests are on disk when `add` returns, and their ends when `end` does. On `sqlite3.Error` the
    disk is full or broken, and nothing was changed. Only this user may read the files. Another
    pipeline than `model` must not run the requests.

    Raises:
        ConfigError: Another server uses the folder, or the folder cannot be used, is of another
            version, or has requests for another model.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self._outputs, self._states, self._model = folder / "outputs", folder / "states", model
        self._boot = _BOOT_ID.read_text(encoding="ascii") if _BOOT_ID.is_file() else ""
        with ExitStack() as stack:
            try:
                for path in (folder, self._outputs, self._states):
                    path.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = _opened(folder / "lock")
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.close(_opened(folder / "requests.sqlite"))  # SQLite copies its mode
                base = sqlite3.connect(folder / "requests.sqlite", check_same_thread=False)
                self._base = stack.enter_context(closing(base))
                base.executescript(_PRAGMAS)
                (version,) = base.execute("pragma user_version").fetchone()
                is_new = not base.execute("select 1 from sqlite_master").fetchone()
                if version != _VERSION and not is_new:
                    what = f"its format is version {version}, this bascule reads {_VERSION}"
                    fix = "finish it with the bascule that made it, or give another folder"
                    raise ConfigError(f"--spool {folder}: {what}: {fix}")
                base.executescript(_TABLE)
                query = "select model from requests where ended_at is null and model != ?"
                others = base.execute(query, [model]).fetchall()
                # An unreadable table is refused here.
                kept = {self._state(entry.status.id) for entry in self.waiting()}
                for path in set(self._states.iterdir()) - kept:
                    path.unlink()  # of a request that has ended, or half of one
            except BlockingIOError as error:
                what = "another server uses it: stop that server, or give another folder"
                raise ConfigError(f"--spool {folder}: {what}") from error
            except (OSError, sqlite3.Error, Closing) as error:
                reason = getattr(error, "strerror", None) or error
                what = f"cannot be used: {reason}: repair it, or give another folder"
                raise ConfigError(f"--spool {folder}: {what}") from error
            if others:
                what = f"{len(others)} of its requests wait for {others[0][0]}, this is {model}"
                fix = "serve that model until they are done, or give another folder"
                raise ConfigError(f"--spool {folder}: {what}: {fix}")
            self._open = stack.pop_all()

    def close(self) -> None:
        """Release the folder to other servers."""
        self._open.close()

    def add(
        self, entries: Sequence[Entry], images: Sequence[bytes] = (), key: Key | None = None
    ) -> None:
        """Store requests, all or none, the images of each, and the key of their call."""
        rows = [(self._model, entry.deadline_at, *_row(entry.status)) for entry in entries]
        marks = ", ".join("?" * (2 + len(_COLUMNS)))
        query = f"insert into requests (model, deadline_at, {', '.join(_COLUMNS)})"
        ids = [entry.status.id for entry in entries]
        inputs = ((name, image) for name in ids for image in images)
        with self._base:
            self._base.executemany(f"{query} values ({marks})", rows)
            self._base.executemany("insert into images values (?, ?)", inputs)
            keys = [(*key, name) for name in ids] if key is not None else []
            self._base.executemany("insert into keys values (?, ?, ?)", keys)

    def asked(self, key: str, digest: str | None = None) -> list[str]:
        """Return the requests of an earlier call with a key; Reused if its digest is another."""
        rows = self._select("select digest, id from keys where key = ? order by rowid", key)
        if digest is not None and any(other != digest for other, _ in rows):
            raise Reused(key)
        return [request_id for _, request_id in rows]

    def count_start(self, request_id: str, change: int) -> None:
        """Count a start of a request before ranks get it, as it may kill them; -1 takes it back."""
        starts = "max(0, case when boot = ? then starts else 0 end + ?)"
        query = f"update requests set starts = {starts}, boot = ? where id = ?"
        self._try(query, self._boot, change, self._boot, request_id)

    def forgive(self, request_id: str | None = None) -> None:
        """Reset the count of starts of a request, or of all, unless the disk is full."""
        query = "update requests set starts = 0 where ended_at is null and id = coalesce(?, id)"
        self._try(query, request_id)

    def end(self, status: Status) -> None:
        """Store the end of a request, if it has not ended before."""
        changes = ", ".join(f"{name} = ?" for name in _COLUMNS)
        query = f"update requests set {changes} where id = ? and ended_at is null"
        with self._base:
            self._base.execute(query, [*_row(status), status.id])
            self._base.execute("delete from images where id = ?", [status.id])
        self.forget(status.id)

    def remove(self, status: Status) -> None:
        """Remove an ended request, its output and its key; OSError if the output stays."""
        self.output(status).unlink(missing_ok=True)
        with self._base:
            query = "delete from keys where key in (select key from keys where id = ?)"
            self._base.execute(query, [status.id])
            self._base.execute("delete from requests where id = ?", [status.id])

    def save(self, request_id: str, packed: Tensor, made_by: str) -> None:
        """Store a request's packed state in place of an earlier one; OSError keeps that one."""
        content, path = packed.numpy().data, self._state(request_id)
        new, head = path.with_suffix(".new"), {"made_by": made_by, "crc": zlib.crc32(content)}
        try:
            with open(_opened(new), "wb") as file:
                file.truncate()
                file.write(json.dumps(head).encode() + b"\n")
                file.write(content)
            new.replace(path)  # a loss of power may damage it, which is seen by its sum
        finally:
            new.unlink(missing_ok=True)

    def saved(self, request_id: str, made_by: str) -> Tensor | None:
        """Return a request's packed state; None without one that `made_by` can use."""
        path = self._state(request_id)
        try:
            content = bytearray(path.read_bytes())
            begin = content.index(b"\n") + 1
            head = json.loads(content[:begin])
            if head["made_by"] != made_by:
                raise ValueError(f"{head['made_by']} made it, this is {made_by}")
            if head["crc"] != zlib.crc32(memoryview(content)[begin:]):
                raise ValueError("it is damaged")
            return torch.frombuffer(content, dtype=torch.uint8, offset=begin).clone()  # aligned
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            what = "its saved state cannot be used, so it starts from the beginning"
            logger.warning("request %s: %s: %s", request_id, what, error)
            self.forget(request_id)
            return None

    def forget(self, request_id: str) -> None:
        """Remove a request's state, if there is one."""
        with suppress(OSError):  # the next start removes it
            self._state(request_id).unlink(missing_ok=True)

    def waiting(self) -> list[Entry]:
        """Return the requests that have not ended, in the order of arrival."""
        columns = "(select count(*) from images where images.id = requests.id), deadline_at, "
        columns += f"case when boot = ? then starts else 0 end, {', '.join(_COLUMNS)}"
        query = f"select {columns} from requests where ended_at is null order by place"
        return [Entry(_status(row[3:]), *row[:3]) for row in self._select(query, self._boot)]

    def images(self, request_id: str) -> list[bytes]:
        """Return a request's input images; the end of the request removes them."""
        query = "select image from images where id = ? order by rowid"
        return [image for (image,) in self._select(query, request_id)]

    def loras(self) -> list[str]:
        """Return the names of the adapters to load at a start, beside the operator's."""
        return [name for (name,) in self._select("select name from loras order by rowid")]

    def remember(self, name: str, is_loaded: bool) -> None:
        """Let later starts load an adapter, or not, unless the disk is full."""
        query = "insert or ignore into loras values (?)"
        self._try(query if is_loaded else "delete from loras where name = ?", name)

    def ended(self, num: int, *, first: bool = False) -> list[Status]:
        """Return the latest ended requests, newest first; with `first` the earliest."""
        order = "ended_at, place" if first else "ended_at desc, place desc"
        query = f"select {', '.join(_COLUMNS)} from requests where ended_at is not null"
        return [_status(row) for row in self._select(f"{query} order by {order} limit ?", num)]

    def page(self, kind: str, num: int, after: str | None, oldest_first: bool) -> list[str]:
        """Return so many requests of a kind that follow another; Unknown if that is not there."""
        sign, order = (">", "asc") if oldest_first else ("<", "desc")
        values, query = [kind], "select id from requests where kind = ?"
        if after is not None:
            query += f" and place {sign} (select place from requests where id = ?)"
            values.append(self.status(after).id)
        rows = self._select(f"{query} order by place {order} limit ?", *values, num)
        return [request_id for (request_id,) in rows]

    def status(self, request_id: str) -> Status:
        """Return the status of a request at its arrival or end; Unknown if there is none."""
        rows = self._select(f"select {', '.join(_COLUMNS)} from requests where id = ?", request_id)
        if not rows:
            raise Unknown(f"there is no request {request_id!r}")
        return _status(rows[0])

    def output(self, status: Status) -> Path:
        """Return the path of a request's output, which may not exist yet."""
        return self._outputs / f"{status.id}{VIDEO if status.kind == 'video' else IMAGE}"

    def _state(self, request_id: str) -> Path:
        return self._states / f"{request_id}.state"

    def num_bytes(self) -> int:
        """Return the bytes of all outputs."""
        total = 0
        for path in self._outputs.iterdir():
            with suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def _try(self, query: str, *values: Any) -> None:
        with suppress(sqlite3.Error), self._base:
            self._base.execute(query, values)

    def _select(self, query: str, *values: Any) -> list[Any]:
        """Return rows; Closing if they cannot be read from disk."""
        try:
            return self._base.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise Closing(f"the spool cannot be read: {error}") from error


def flush(path: Path) -> None:
    """Wait until a renamed file and its folder's entry are on disk."""
    for entry in (path, path.parent):
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _opened(path: Path) -> int:
    """Open or make a file of the spool; OSError for a link, whose target would change."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        what = "it is a link" if path.is_symlink() else error.strerror
        raise OSError(error.errno, f"{path.name}: {what}") from error


def _row(status: Status) -> list[Any]:
    values = [getattr(status, name) for name in _COLUMNS]
    return [json.dumps(asdict(value)) if isinstance(value, Prompt) else value for value in values]


def _status(row: Sequence[Any]) -> Status:
    """Return the status of a row; if it cannot be read, a failed one with that reason."""
    values: dict[str, Any] = dict(zip(_COLUMNS, row, strict=True))
    try:
        values["prompt"] = Prompt(**json.loads(values["prompt"]))
        check_options(values["prompt"])
        wrong = [name for name in _COLUMNS if not isinstance(values[name], _KINDS[name])]
        wrong += ["state"] if values["state"] not in STATES else []
        wrong += ["id"] if "/" in str(values["id"]) else []  # it names a file
        if wrong:
            raise ValueError(f"{wrong[0]} is {values[wrong[0]]!r}")
        return Status(**values)
    except (ConfigError, TypeError, ValueError) as error:  # of a newer version, or damaged
        facts: dict[str, Any] = {"kind": "image", "created_at": 0.0}
        facts |= {name: value for name, value in values.items() if isinstance(value, _KINDS[name])}
        facts |= {"id": str(values["id"]).replace("/", "?"), "prompt": Prompt(prompt="")}
        reason = f"its row in the spool cannot be read: {error}: send it again"
        facts |= {"state": "failed", "reason": reason}
        return Status(**facts)
