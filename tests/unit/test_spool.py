"""The spool of a server: what was accepted is there until it has ended, once."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bascule.errors import ConfigError
from bascule.generate.options import Prompt
from bascule.serve.spool import Entry, Spool, flush
from bascule.serve.status import Closing, Status, Unknown

PROMPT = Prompt(prompt="é 船", width=64, guidance=2.5, seed=2**62)


def entry(name: str, created_at: float = 1.5, **facts: Any) -> Entry:
    status = Status(id=name, kind="image", state="waiting", created_at=created_at, prompt=PROMPT)
    return Entry(status, **facts)


def ended(one: Entry, state: str = "done", ended_at: float = 9.0) -> Status:
    return replace(one.status, state=state, step=4, num_steps=4, ended_at=ended_at)


def test_what_waits_is_there_after_a_restart_and_what_ended_ends_once(tmp_path: Path) -> None:
    a, b = entry("a", num_images=2, deadline_at=7.5), entry("b", num_images=2)
    c, pictures = entry("c"), [b"\0png", b"more"]
    spool = Spool(tmp_path / "new" / "spool", "one")
    spool.add([a, b], pictures)
    spool.add([c])
    assert spool.images("a") == spool.images("b") == pictures and spool.images("c") == []
    failed = replace(ended(b, "failed", 8.0), reason="why")
    spool.end(failed)
    spool.end(ended(b, "done"))
    spool.close()

    spool = Spool(tmp_path / "new" / "spool", "one")
    assert spool.waiting() == [a, c] and spool.images("a") == pictures
    spool.end(ended(a))
    assert spool.images("a") == spool.images("b") == []
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
        spool.add([entry("c"), entry("d")], [bytes(10**6)])
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
    with pytest.raises(ConfigError, match="another server uses it"):
        Spool(tmp_path / "a", "one")
    first.close()
    with pytest.raises(ConfigError, match="1 of its requests wait for one, this is two"):
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


def test_only_this_user_reads_a_spool_and_no_link_leads_out_of_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        spool = Spool(tmp_path / "a" / "spool", "one")
        spool.add([entry("a")])
    finally:
        os.umask(before)
    folder = tmp_path / "a" / "spool"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes.pop("spool") == modes.pop("outputs") == modes.pop("states") == 0o700
    assert len(modes) == 4 and set(modes.values()) == {0o600}, modes
    spool.close()
    victim = tmp_path / "victim"
    for name in ("lock", "requests.sqlite"):
        victim.write_text("precious" if name == "lock" else "")
        size = victim.stat().st_size
        (tmp_path / name / "of").mkdir(parents=True)
        (tmp_path / name / "of" / name).symlink_to(victim)
        with pytest.raises(ConfigError, match=f"{name}: it is a link: repair it, or give another"):
            Spool(tmp_path / name / "of", "one")
        assert victim.stat().st_size == size


def test_states_are_those_of_requests_that_wait_and_of_the_same_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, bits = tmp_path / "states", torch.arange(200, dtype=torch.uint8)
    spool = Spool(tmp_path, "one")
    spool.add([entry("a"), entry("b"), entry("c"), entry("d")])
    assert spool.saved("a", "us") is None
    for name in "abcde":
        spool.save(name, bits.flip(0), "us")
        spool.save(name, bits, "us")
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    spool.end(ended(entry("a")))
    with mock.patch.object(Path, "replace", side_effect=OSError(28, "No space left on device")):
        with pytest.raises(OSError, match="No space"):
            spool.save("b", bits.flip(0), "us")
    (folder / "b.new").touch()  # as a kill leaves it
    spool.close()
    spool = Spool(tmp_path, "one")
    assert sorted(path.name for path in folder.iterdir()) == ["b.state", "c.state", "d.state"]
    found = spool.saved("b", "us")
    assert found is not None and torch.equal(found, bits) and found.data_ptr() % 16 == 0
    content = bytearray((folder / "c.state").read_bytes())
    content[-7] ^= 1
    (folder / "c.state").write_bytes(content)
    assert spool.saved("c", "us") is None and spool.saved("d", "others") is None
    assert "request c: its saved state cannot be used, so it starts from the" in caplog.text
    assert "it is damaged" in caplog.text and "us made it, this is others" in caplog.text
    for damaged in (b"", b"\n", b"[]\nx", b"{}\nx", b"\xff\nx", bytes(content[:-1])):
        (folder / "b.state").write_bytes(damaged)
        assert spool.saved("b", "us") is None
    assert not list(folder.iterdir())  # what cannot be used is removed
    spool.close()


def change(folder: Path, *statements: str) -> None:
    """Change a spool that no server has."""
    with closing(sqlite3.connect(folder / "requests.sqlite")) as base, base:
        for one in statements:
            base.execute(one)


def test_a_row_that_cannot_be_read_fails_by_name(tmp_path: Path) -> None:
    changes = {
        "prompt = json_set(prompt, '$.style', 'x')": "unexpected keyword argument 'style'",
        "prompt = json_set(prompt, '$.steps', 0)": "steps",
        "prompt = json_set(prompt, '$.lora', 3)": "lora: give",
        "prompt = '{'": "Expecting property name",
        "prompt = x'00ff'": "cannot be read",
        "state = 'queued'": "state is 'queued'",
        "created_at = 'noon'": "created_at is 'noon'",
        "num_steps = 'many'": "num_steps is 'many'",
        "id = '../../etc'": "id is '../../etc'",
    }
    with closing(Spool(tmp_path, "one")) as spool:
        spool.add([entry(f"{place}") for place in range(len(changes) + 1)])
    for place, one in enumerate(changes):
        change(tmp_path, f"update requests set {one} where id = '{place}'")
    old = "update requests set prompt = json_remove(prompt, '$.lora')"  # as before there were any
    change(tmp_path, f"{old} where id = '{len(changes)}'")
    with closing(Spool(tmp_path, "one")) as spool:
        *wrong, right = [one.status for one in spool.waiting()]
        assert right == entry(f"{len(changes)}").status
        assert [one.state for one in wrong] == ["failed"] * len(changes)
        for status, (sql, reason) in zip(wrong, changes.items(), strict=True):
            assert reason in status.reason and "send it again" in status.reason, sql
            assert spool.output(status).parent == tmp_path / "outputs"
        spool.end(replace(wrong[0], ended_at=9.0))
        assert spool.status("0").state == "failed" and spool.ended(5)[0].id == "0"


@pytest.mark.parametrize(
    ("change_to", "reason"),
    [
        ("pragma user_version = 0", "its format is version 0, this bascule reads 2: finish"),
        ("pragma user_version = 3", "its format is version 3"),
        ("alter table requests drop column reason", "no such column: reason: repair it"),
        ("drop table requests", ""),
    ],
)
def test_a_spool_of_another_version_is_one_sentence(
    tmp_path: Path, change_to: str, reason: str
) -> None:
    Spool(tmp_path, "one").close()
    change(tmp_path, change_to)
    if not reason:
        return Spool(tmp_path, "one").close()
    with pytest.raises(ConfigError, match=f"--spool {tmp_path}.*{reason}"):
        Spool(tmp_path, "one")


def test_starts_count_until_the_ranks_end_well_or_the_machine_starts_anew(tmp_path: Path) -> None:
    def starts(begins: str = "", boot: str | None = None) -> dict[str, int]:
        with closing(Spool(tmp_path, "one")) as spool:
            spool._boot = spool._boot if boot is None else boot
            for name in begins:
                spool.count_start(name, 1)
            return {one.status.id: one.starts for one in spool.waiting()}

    with closing(Spool(tmp_path, "one")) as spool:
        spool.add([entry(name) for name in "ab"])
    assert starts() == {"a": 0, "b": 0}
    assert starts("aabb") == {"a": 2, "b": 2}
    with closing(Spool(tmp_path, "one")) as spool:
        spool.count_start("b", -1)  # it was paused
    assert starts() == {"a": 2, "b": 1}
    assert starts(boot="after a loss of power") == {"a": 0, "b": 0}
    assert starts() == {"a": 2, "b": 1}
    assert starts("b", boot="after a loss of power") == {"a": 0, "b": 1}
    with closing(Spool(tmp_path, "one")) as spool:
        spool.forgive()
        spool.count_start("a", -1)
    assert starts() == {"a": 0, "b": 0}


def test_what_has_ended_is_removed_with_its_output(tmp_path: Path) -> None:
    with closing(Spool(tmp_path, "one")) as spool:
        spool.add([entry(name) for name in "abc"])
        for name, at in (("a", 3.0), ("b", 2.0)):
            spool.end(ended(entry(name), ended_at=at))
            spool.output(spool.status(name)).write_bytes(b"12345")
        assert spool.num_bytes() == 10
        (oldest,) = spool.ended(1, first=True)
        spool.remove(oldest)
        assert oldest.id == "b" and spool.num_bytes() == 5
        with pytest.raises(Unknown):
            spool.status("b")
        assert [one.id for one in spool.ended(5)] == ["a"]
        spool._base.execute("drop table requests")
        with pytest.raises(Closing, match="the spool cannot be read: no such table"):
            spool.status("a")
