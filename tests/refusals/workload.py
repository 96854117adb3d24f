"""Data codes, streams of samples, photos and segments of traces: one wrong value each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bascule.workload.codes import (
    SampleShape,
    check_world,
    deal,
    parse_data_codes,
    read_lengths,
    sample_lengths,
)
from bascule.workload.manifest import read_manifest
from bascule.workload.photos import PhotoOptions, PhotoStream
from bascule.workload.streams import SyntheticStream
from bascule.workload.traces import Segment, read_traces

CODES = parse_data_codes("g1b1i16f1s0")
HERE = Path(__file__).parent


def photos(**options: Any) -> Callable[[], object]:
    return lambda: PhotoOptions(**options)


def segment(**change: Any) -> Callable[[], object]:
    fields = {"rank": 0, "kind": "compute", "name": "blocks", "start": 0.0, "seconds": 1.0}
    return lambda: Segment(**fields | change)


def stream(codes: str, rank: int = 0, world_size: int = 1) -> Callable[[], object]:
    return lambda: SyntheticStream(codes, rank=rank, world_size=world_size)


CASES = [
    ("codes", stream("junk"), ("term 1 'junk' is not",)),
    (
        "samples",
        lambda: parse_data_codes("g2b1048576i16f1s0"),
        ("data code g2b1048576i16f1s0", "at most 1048576 samples"),
    ),
    ("world", lambda: check_world(CODES, 0), ("world of 0", "nearest legal world size: 1")),
    ("seed", lambda: sample_lengths(CODES, seed=-1, step=0), ("seed", "2^64-1", "-1")),
    ("shape", lambda: SampleShape(-1, 5), ("token counts must be >= 0",)),
    ("frames", lambda: SampleShape(0, 5, frames=2), ("must be a multiple of frames",)),
    ("deal", lambda: deal([1], 0), ("num_ranks is 0", "at least 1")),
    ("lengths", lambda: read_lengths(HERE / "missing.txt"), ("cannot read", "missing.txt")),
    ("manifest", lambda: read_manifest(HERE / "m.csv", patch=0), ("patch is 0", "at least 1")),
    (
        "caption",
        lambda: read_manifest(HERE / "m.csv", bytes_per_token=float("inf")),
        ("bytes_per_token is inf", "finite"),
    ),
    ("rank", stream("g2b1i64f1s0", 2, 2), ("rank is 2", "at most 1")),
    ("stream, world", stream("g2b1i64f1s0", 0, 3), ("nearest legal world size: 2 or 4",)),
    ("stream, samples", stream("g1b65536i64f1s0"), ("less than 65536 samples",)),
    (
        "step",
        lambda: SyntheticStream("g1b1i64f1s0").batch(2**31),
        ("step is 2147483648", "at most 2147483647"),
    ),
    ("patch", photos(patch=0), ("PhotoOptions(patch=0)", "at least 1")),
    ("max_tokens", photos(max_tokens=0), ("PhotoOptions(max_tokens=0)",)),
    ("text_dim", photos(text_dim=0), ("PhotoOptions(text_dim=0)",)),
    ("max_text_tokens", photos(max_text_tokens=-1), ("PhotoOptions(max_text_tokens=-1)",)),
    ("batch_size", lambda: PhotoStream(HERE, 0), ("batch_size is 0", "at least 1")),
    ("photos, rank", lambda: PhotoStream(HERE, 1, rank=1), ("rank is 1", "at most 0")),
    ("folder", lambda: PhotoStream(HERE / "missing", 1), ("must be a folder of photos",)),
    ("no photos", lambda: PhotoStream(HERE, 1), ("no readable photo",)),
    ("no traces", lambda: read_traces(HERE), ("no trace in it",)),
    ("kind", segment(kind="idle"), ("Segment(kind='idle')", '"step" or "compute"')),
    ("segment, rank", segment(rank=-1), ("Segment(rank=-1)",)),
    ("name of a step", segment(kind="step", name="x"), ("the name of a step is its number",)),
    ("start", segment(start=float("nan")), ("Segment(start=nan)", "finite")),
    ("seconds", segment(seconds=-1.0), ("Segment(seconds=-1.0)", "at least 0")),
]
