"""Damaged manifests: samples or one clear sentence, never a traceback; markup stays text.

With 1,000 traces (`test_traces_hostile.py`) and 640 profiles (`test_calibration.py`), the suite
tries more than 2,000 files.
"""

import csv
import io
import json
import random
from html import escape
from pathlib import Path
from typing import Any

import pytest

from bascule.errors import ConfigError
from bascule.workload.codes import MAX_LENGTH
from bascule.workload.manifest import SHAPE_COLUMNS, TOKEN_COLUMNS, read_manifest
from tests.helpers.cli import run

NUM_CASES, NUM_COMMANDS = 400, 30
MARKUP = "<img src=x onerror=alert(1)>&amp;<script>1</script>"
ODD_NAMES = "url", "Tokens", "", " width", MARKUP[:40], "a,b", '"', "\0"
NUMBERS: list[Any] = [0, 1, -1, 15, 16, 64, 4096, 10**6, 2**31 - 1, 2**31, 10**18, 10**30, 10**400]
FLOATS: list[Any] = [1.0, 1.5, -0.0, 1e300, float("nan"), float("inf"), True, False, None]
TEXTS: list[Any] = ["", " ", "7", " 7 ", "-7", "1e3", "0x1", "\u0663", "\ud800", "\0\n\x1b[31m"]
NESTS: list[Any] = ["é" * 99, MARKUP, "9" * 5000, [], [1], {}, {"a": [1]}]
NAMES = (*TOKEN_COLUMNS, *SHAPE_COLUMNS, *ODD_NAMES)
VALUES: list[Any] = [*NUMBERS, *FLOATS, *TEXTS, *NESTS]


def row_of(chance: random.Random) -> dict[str, Any]:
    """Mostly a sample, with something odd in it now and then."""
    if chance.random() < 0.4:
        row: dict[str, Any] = {chance.choice(TOKEN_COLUMNS): chance.randrange(5000)}
    else:
        row = {"width": chance.choice((0, 64, 512)), "height": 64, "caption": "a cat"}
    for _ in range(chance.choice((0, 0, 0, 1, 2))):
        row[chance.choice(NAMES)] = chance.choice(VALUES)
    return row


def content_of(chance: random.Random, kind: str) -> bytes:
    """A manifest, whole or damaged."""
    rows = [row_of(chance) for _ in range(chance.choice((0, 1, 3, 8)))]
    if kind == ".jsonl":
        lines = [json.dumps(row) for row in rows]
        if chance.random() < 0.1:
            lines.insert(chance.randrange(len(lines) + 1), chance.choice(("[]", "5", "{", "null")))
        text = "\n".join(lines)
    else:
        names = list(dict.fromkeys(name for row in rows for name in row))
        file = io.StringIO()
        writer = csv.writer(file, escapechar="\\", lineterminator=chance.choice(("\n", "\r\n")))
        writer.writerow(names)
        for row in rows:
            cells = [row.get(name, "") for name in names]
            writer.writerow(cells[: chance.choice((len(cells), len(cells), len(cells), 1))])
        text = file.getvalue()
    content = text.encode("utf-8", "surrogatepass")
    if content and chance.random() < 0.25:
        place = chance.randrange(len(content))
        noise = bytes(chance.randrange(256) for _ in range(3))
        content = chance.choice((content[:place], content[:place] + noise + content[place:]))
    return content


def tried(folder: Path, seed: int) -> tuple[Path, bool]:
    """One manifest, read: whether it holds samples. Anything but a sentence is raised."""
    chance = random.Random(seed)
    kind = chance.choice((".jsonl", ".csv"))
    path = folder / f"m{kind}"
    path.write_bytes(content_of(chance, kind))
    try:
        shapes = read_manifest(path)
    except ConfigError as error:
        told = str(error)
        assert told.startswith((str(path), f"cannot read {path}")), told
        assert len(told) < 900 and "\n" not in told and "\x1b" not in told, told
        return path, False
    assert shapes and all(0 <= shape.seq_len <= MAX_LENGTH for shape in shapes)
    return path, True


def test_damaged_manifests(tmp_path: Path) -> None:
    found = [tried(tmp_path, seed)[1] for seed in range(NUM_CASES)]
    assert len(found) == NUM_CASES
    assert 0.15 < sum(found) / NUM_CASES < 0.85, "nothing, or everything, is refused"


def test_damaged_manifests_on_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    codes: list[int] = []
    for seed in range(NUM_COMMANDS):
        path, is_read = tried(tmp_path, seed)
        command = ("simulate", "--topologies", "none") if seed % 2 else ("plan",)
        code, _, err = run(capsys, *command, "--manifest", str(path), "--ranks", "2")
        assert "Traceback" not in err and (code == 2 or is_read)
        sentences = [line for line in err.splitlines() if line.startswith("bascule: ")]
        assert len(sentences) == (code == 2), err
        codes.append(code)
    assert {0, 2} == set(codes) and len(codes) == NUM_COMMANDS


def test_markup_in_names_and_captions_is_text_on_the_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly")
    name = MARKUP.replace("/", "")
    path, page = tmp_path / f"{name}.jsonl", tmp_path / "a.html"
    rows = [{"width": 64, "height": 64, "caption": MARKUP, MARKUP: MARKUP}] * 4
    path.write_text("\n".join(map(json.dumps, rows)))
    for command in ("plan", "simulate"):
        given = (command, "--manifest", str(path), "--ranks", "2", "--report", str(page))
        monkeypatch.setattr("sys.argv", ["bascule", *given])  # the page quotes it
        code, _, err = run(capsys, *given)
        assert code == 0, err
        text = page.read_text()
        assert escape(name) in text and "<img" not in text and "<script>1<" not in text
