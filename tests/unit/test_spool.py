"""The spool of a server: what was accepted is there until it has ended, once."""

import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bascule.errors import ConfigError
from bascule.generate.options import Prompt
from bascule.serve.spool import Entry, Spool, flush
from bascule.serve.status import Status, Unknown

PROMPT = Prompt(prompt="é 船", width=64, guidance=2.5, seed=2**62)


def entry(name: str, created_at: float = 1.5, **facts: Any) -> Entry:
    status = Status(id=name, kind="image", state="waiting", created_at=created_at, prompt=PROMPT)
    return Entry(status, **facts)


def ended(one: Entry, state: str = "done", ended_at: float = 9.0) -> Status:
    return replace(one.status, state=state, step=4, num_steps=4, ended_at=ended_at)


def test_what_waits_is_there_after_a_restart_and_what_ended_ends_once(tmp_path: Path) -> None:
    a, b, c = entry("a", image=b"\0png", deadline_at=7.5), entry("b"), entry("c")
    spool = Spool(tmp_path / "new" / "spool", "one")
    spool.add([a, b])
    spool.add([c])
    assert spool.image("a") == b"\0png" and spool.image("b") is None
    failed = replace(ended(b, "failed", 8.0), reason="why")
    assert spool.end(failed)
    assert not spool.end(ended(b, "done"))
    spool.close()

    spool = Spool(tmp_path / "new" / "spool", "one")
    assert spool.waiting() == [replace(a, image=None), c]
    assert spool.end(ended(a)) and spool.image("a") is None
    assert spool.status("a") == ended(a) and spool.status("c") == c.status
    assert spool.ended(20) == [ended(a), failed] and spool.ended(1) == [ended(a)]
    assert spool.output(a.status) == tmp_path / "new" / "spool" / "outputs" / "a.png"
    assert spool.output(replace(a.status, kind="video")).suffix == ".mp4"
    with pytest.raises(Unknown):
        spool.status("d")
    spool.close()


def test_requests_are_added_all_or_none(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "one")
    spool.add([entry("a")])
    with pytest.raises(sqlite3.Error):
        spool.add([entry("b"), entry("a")])
    assert [one.status.id for one in spool.waiting()] == ["a"]
    spool._base.execute("pragma max_page_count = 1")  # as a disk that is full
    with pytest.raises(sqlite3.Error, match="full"):
        spool.add([entry("c"), entry("d", image=bytes(10**6))])
    spool._base.execute("pragma max_page_count = 100000")
    spool.add([entry("e")])
    assert [one.status.id for one in spool.waiting()] == ["a", "e"]
    spool.close()


def test_what_was_added_survives_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tests.unit.test_spool import *\n"
        "spool = Spool(Path(sys.argv[1]), 'one'); spool.add([entry('a'), entry('b')])\n"
        "spool.end(ended(entry('a'))); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, check=False)
    assert done.returncode == -9
    spool = Spool(tmp_path, "one")
    assert [one.status.id for one in spool.waiting()] == ["b"]
    assert [one.id for one in spool.ended(9)] == ["a"]
    spool.close()


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    first = Spool(tmp_path / "a", "one")
    first.add([entry("a")])
    with pytest.raises(ConfigError, match="another server has it"):
        Spool(tmp_path / "a", "one")
    first.close()
    with pytest.raises(ConfigError, match="1 of its requests wait for one, and this is two"):
        Spool(tmp_path / "a", "two")
    Spool(tmp_path / "a", "one").close()  # refused servers have let it go
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        Spool(tmp_path / "file", "one")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "requests.sqlite").write_bytes(b"no base of data" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        Spool(tmp_path / "b", "one")


def test_flush_takes_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    flush(tmp_path / "a")
