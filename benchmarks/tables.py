"""Reading tables of samples: seconds beside those of pyarrow alone, and memory."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from measuring import say, time_interleaved
from pyarrow import csv, parquet
from pyarrow import json as arrow_json

from bascule.workload import read_manifest

TARGET_S = 30.0  # for ten million rows of Parquet and CSV


def tables(*, quick: bool = False) -> dict[str, Any]:
    """Read width, height and caption of ten million rows, of JSON lines one million.

    Two minutes. "bare" is pyarrow's own reading of the same file into one table, with all of its
    threads and its memory.
    "arrow_bytes" is the most that pyarrow held at once while bascule read, without the result.
    """
    num_rows = 10**5 if quick else 10**7
    with tempfile.TemporaryDirectory() as folder:
        table = _table(num_rows)
        lines = [json.dumps(row) for row in table.slice(0, num_rows // 10).to_pylist()]
        files = {name: Path(folder) / f"rows.{name}" for name in ("parquet", "csv", "jsonl")}
        parquet.write_table(table, files["parquet"])
        csv.write_csv(table, files["csv"])
        files["jsonl"].write_text("\n".join(lines))
        del table, lines
        bare = {"parquet": parquet.read_table, "csv": csv.read_csv, "jsonl": arrow_json.read_json}
        rows = [_row(name, path, bare[name], num_rows) for name, path in files.items()]
    return {"rows": rows}


def _table(num_rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    words = pa.array(["a red boat sails on the lake " * n for n in range(8)])
    return pa.table(
        {
            "width": rng.integers(256, 2048, num_rows),
            "height": rng.integers(256, 2048, num_rows),
            "caption": words.take(pa.array(rng.integers(0, 8, num_rows))),
        }
    )


def _row(name: str, path: Path, bare: Callable[[Path], object], num_rows: int) -> dict[str, Any]:
    pool, counted = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(counted)
    num_samples = len(read_manifest(path))
    pa.set_memory_pool(pool)
    most = counted.max_memory()
    seconds = time_interleaved(
        {"bascule": lambda: read_manifest(path), "bare": lambda: bare(path)}, rounds=3
    )
    medians = {way: float(np.median(of_way)) for way, of_way in seconds.items()}
    text = f"{name}: {num_samples:,} rows in {medians['bascule']:.1f} s, {medians['bare']:.1f} bare"
    say(text, name == "jsonl" or medians["bascule"] * 1e7 / num_rows <= TARGET_S)
    return {"format": name, "num_rows": num_samples, "arrow_bytes": most, **medians}
