"""Damaged manifests: samples or one clear sentence, never a traceback."""

import csv
import io
import json
import random
from pathlib import Path
from typing import Any

from bascule.errors import ConfigError
from bascule.workload.codes import MAX_LENGTH
from bascule.workload.columns import ROLES
from bascule.workload.manifest import read_manifest

NUM_CASES = 400
MARKUP = "<img src=x onerror=alert(1)>&amp;<script>1</script>"
ODD_NAMES = "url", "Tokens", "", " width", MARKUP[:40], "a,b", '"', "\0"
NUMBERS: list[Any] = [0, 1, -1, 15, 16, 64, 4096, 10**6, 2**31 - 1, 2**31, 10**18, 10**30, 10**400]
FLOATS: list[Any] = [1.0, 1.5, -0.0, 1e300, float("nan"), float("inf"), True, False, None]
TEXTS: list[Any] = ["", " ", "7", " 7 ", "-7", "1e3", "0x1", "\u0663", "\ud800", "\0\n\x1b[31m"]
NESTS: list[Any] = ["é" * 99, MARKUP, "9" * 5000, [], [1], {}, {"a": [1]}]
NAMES = (*(name for names in ROLES.values() for name in names[:3]), *ODD_NAMES)
VALUES: list[Any] = [*NUMBERS, *FLOATS, *TEXTS, *NESTS]


def row_of(chance: random.Random) -> dict[str, Any]:
    """Mostly a sample, with something odd in it now and then."""
    if chance.random() < 0.4:
        row: dict[str, Any] = {chance.choice(ROLES["tokens"]): chance.randrange(5000)}
    else:
        row = {"width": chance.choice((0, 64, 512)), "height": 64, "caption": "a cat"}
    for _ in range(chance.choice((0, 0, 0, 0, 1, 2))):
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


def test_damaged_manifests(tmp_path: Path) -> None:
    num_read = 0
    for seed in range(NUM_CASES):
        chance = random.Random(seed)
        kind = chance.choice((".jsonl", ".csv"))
        path = tmp_path / f"m{kind}"
        path.write_bytes(content_of(chance, kind))
        try:
            manifest = read_manifest(path)
        except ConfigError as error:
            message = str(error)
            assert message.startswith(str(path)), message
            assert len(message) < 900 and not {"\n", "\x1b"} & {*message}, message
        else:
            assert len(manifest) and 0 <= manifest.lens.min() <= manifest.lens.max() <= MAX_LENGTH
            assert all(manifest.shape(k).seq_len == manifest.lens[k] for k in range(len(manifest)))
            num_read += 1
    assert 0.15 < num_read / NUM_CASES < 0.85, "nothing, or everything, is refused"
