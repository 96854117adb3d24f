"""Data codes, streams of samples, photos and segments of traces: one wrong value each."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bascule.train.photos import PhotoOptions, PhotoStream
from bascule.train.streams import SyntheticStream
from bascule.workload.codes import check_world, deal, parse_data_codes, read_lengths, sample_lengths
from bascule.workload.manifest import read_manifest
from bascule.workload.tokens import TokenRule
from bascule.workload.traces import (
    Segment,
    StepParts,
    balancing_worth,
    read_traces,
    step_parts,
    write_steps,
)
from bascule.workload.traces.worth import RunLengths, lengths_of, read_lens
from tests.helpers.trace_cases import Run, event

CODES = parse_data_codes("g1b1i16f1s0")
HERE = Path(__file__).parent
Call = Callable[[], object]


def segment(**change: Any) -> Call:
    fields = {"rank": 0, "kind": "compute", "name": "blocks", "start": 0.0, "seconds": 1.0}
    return lambda: Segment(**fields | change)


def stream(codes: str, rank: int = 0, world_size: int = 1) -> Call:
    return lambda: SyntheticStream(codes, rank=rank, world_size=world_size)


Reader = Callable[[Path], object]


def on(read: Reader, **files: str) -> Call:
    """Read a file, or a folder of several; "__" in a name is a dot."""

    def call() -> object:
        with TemporaryDirectory() as folder:
            paths = [Path(folder) / name.replace("__", ".") for name in files]
            for path, text in zip(paths, files.values(), strict=True):
                path.write_text(text, encoding="utf-8")
            return read(paths[0] if len(paths) == 1 else Path(folder))

    return call


OWN = ((0.10, 0.30, 0.20), (0.25, 0.15, 0.20), (0.12, 0.36, 0.24), (0.10, 0.20, 0.30))


def traces(read: Reader, other: Run | None = None, name: str = "", **change: object) -> Call:
    """Read three ranks' traces; that of rank 1 may be of another run, and have one more range.

    With a change, there is a file like that of rank 0 besides.
    """

    def call() -> object:
        run = Run(OWN)
        run.extra[1] = [event("user_annotation", name, 100.1, 100.1, 1)]
        with TemporaryDirectory() as folder:
            run.write(Path(folder))
            if other is not None:
                (Path(folder) / "host_1.pt.trace.json").write_text(json.dumps(other.trace(1)))
            if change:
                (Path(folder) / "host_0.json").write_text(json.dumps(run.trace(0) | change))
            return read(Path(folder))

    return call


def parts_of(folder: Path) -> StepParts:
    return step_parts(read_traces(folder)[0])


def lens_of(folder: Path) -> RunLengths:
    return lengths_of(read_traces(folder)[0])


def worth(lens: dict[tuple[int, int], list[int]]) -> Reader:
    return lambda folder: balancing_worth(parts_of(folder), RunLengths(lens, lens))


def written(*ranks: int) -> Reader:
    steps = [Segment(rank, "step", "0", 0.0, 1.0) for rank in ranks]
    return lambda folder: write_steps(folder, steps, 2)


def stream_of(path: Path) -> object:
    return PhotoStream(path if path.is_dir() else path.parent, 1)


def strictly(path: Path) -> object:
    return PhotoStream(path, 1, options=PhotoOptions(strict=True))


SEVEN = {(5 + step, rank): [100 + step, 7 * rank] for step in range(4) for rank in range(3)}
MIX = "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0"
SPECS = [
    ("", "term 1 ''"),
    ("g4b5i512f1s0,,g4b5i512f1s0", "term 2 ''"),
    ("g4b5i512f1s0junk", "'g4b5i512f1s0junk'"),
    ("xg4b5i512f1s0", "'xg4b5i512f1s0'"),
    ("g4b5i512f1s0,g4b5i512f1", "term 2 'g4b5i512f1'"),
    ("g4b5i512f1s2", "'g4b5i512f1s2'"),
    ("g04b5i512f1s0", "'g04b5i512f1s0'"),
    ("g٤b5i512f1s0", "'g٤b5i512f1s0'"),
    ("g" + "9" * 5000 + "b5i512f1s0", "is not g{"),
    ("256px", "for example g4b5i512f1s0"),
    ("g0b5i512f1s0", "data code g0b5i512f1s0: DataCode(num_ranks=0)"),
    ("g4b5i15f1s0", "DataCode(resolution=15): must be an integer, at least 16"),
    ("g4b5i512f0s0", "DataCode(num_frames=0)"),
]
WORLDS = [
    (31, "fit a world of 31; nearest legal world size: 32"),
    (40, "nearest legal world size: 32 or 64"),
]
LENGTHS = [
    ("1 2\n3 x4\n", "a.txt, line 2: 'x4' is not a length"),
    ("1_000", "line 1: '1_000'"),
    ("٣", "line 1: '٣'"),
    ("9" * 5000, "line 1: '999"),
    ("2147483648", "line 1: 2147483648 is not a length"),
    ("# nothing\n", "holds no lengths"),
    ("[1, 2.0]", "rank 0, item 1: 2.0 is not"),
    ("[[1], [true]]", "rank 1, item 0: True is not"),
    ("[NaN]", "rank 0, item 0: nan is not"),
    ("[[1], 2]", "rank 1 is 2, but other ranks are lists"),
    ("[[1], [-2]]", "rank 1, item 0: -2 is not"),
    ("[" * 100_000, "not valid JSON"),
    ("[" + "9" * 5000 + "]", "not valid JSON"),
]
ROWS_OF_CSV = [
    ("width,height\n64,64\n64,x\n", "a.csv, row 2: height is x"),
    ('caption,width,height\n"two\nlines",64,64\na,64,-1\n', "row 2: height is -1"),
    ("width\n64\n", "has width, but no height among width"),
    ("width,height\n64,\n", "row 1: height is missing"),
    ("width,height\n64,0\n", "row 1: height is 0"),
    ("width,height\n64,15\n", "row 1: smaller than a token of 16 x 16 pixels"),
    ("width,height,frames\n64,64,0\n", "row 1: frames is 0"),
    ('width,height\n64,"64\n', "does not end with one"),
    ("width,height\n999999999,999999999\n", "row 1: more than 2147483647 tokens"),
    ("width,height,text_tokens\n64,64,99999999999\n", "row 1: more than"),
    ("id,depth\n1,2\n", "none of its columns (id, depth) is known: say which: --columns"),
    ("length,x\n,1\n", "row 1: length is missing"),
    ("seq_len\n-1\n", "row 1: seq_len is -1"),
    ("tokens\n2147483648\n", "row 1: more than 2147483647 tokens"),
    ("tokens,height, tokens\n10,2,20\n", "two columns are named 'tokens'"),
]
ROWS_OF_JSON = [
    ("\n[64, 64]\n", "give a list of rows with names; for lists of lengths use --file"),
    ("10\n20\n", "is 10: give a list of rows with names; for lists of lengths use --file"),
    ("", "holds no samples"),
    ('{"width": 64.5, "height": 64}', "row 1: width is 64.5"),
    ('{"width": 0.5, "height": 64}', "a.jsonl: 1 row cannot be read: "),
    ('{"width": true, "height": 64}', "row 1: width is True"),
    ("{}", "none of its columns (it has none) is known"),
]
CAPTIONS = [
    ('{"file": "a.png", "caption": "x"}\n{"file"', "line 2: not valid JSON"),
    ('["a.png", "x"]', 'line 1: needs "file" and "caption"'),
    ('{"file": "a.png", "caption": null}', 'line 1: needs "file" and "caption"'),
    ('{"file": "a.png", "caption": "x"}\n' * 2, "line 2: 'a.png' has a caption already"),
]
RUNS = [
    ('{"step": 0}', "line 1 is"),
    ('{"step": -1, "rank": 0, "lens": []}', "step is -1"),
    ('{"step": 0, "rank": true, "lens": []}', "rank is True"),
    ('{"step": 0, "rank": 0, "lens": [1.5]}', "length 1.5"),
    ('{"step": 0, "rank": 0, "lens": 3}', "flat list"),
    ("{", "not valid JSON"),
]
TRACES = [
    ({"traceEvents": []}, "does not show where steps begin"),
    ({"distributedInfo": {"rank": -1}}, "names rank -1"),
    ({"distributedInfo": {"rank": 3, "world_size": 3}}, "damaged"),
    ({"distributedInfo": {"rank": 1, "world_size": 3}}, "rank 1 have the same steps"),
    ({"distributedInfo": {"rank": 3, "world_size": 4}}, "world sizes 3, 4"),
    ({"distributedInfo": {}}, "needs a rank"),
]


TABLES: list[tuple[str, Callable[[Any], Callable[[], object]], list[tuple[Any, str]]]] = [
    ("code", lambda spec: partial(parse_data_codes, spec), SPECS),
    ("world", lambda size: partial(check_world, parse_data_codes(MIX), size), WORLDS),
    ("lengths", lambda text: on(read_lengths, a__txt=text), LENGTHS),
    ("csv", lambda text: on(read_manifest, a__csv=text), ROWS_OF_CSV),
    ("jsonl", lambda text: on(read_manifest, a__jsonl=text), ROWS_OF_JSON),
    ("captions", lambda text: on(stream_of, captions__jsonl=text, a__png=""), CAPTIONS),
    ("lens", lambda text: on(read_lens, a__jsonl=text), RUNS),
    ("trace", lambda change: traces(read_traces, **change), TRACES),
]
CASES = [
    ("codes", stream("junk"), ("term 1 'junk' is not",)),
    ("samples", lambda: parse_data_codes("g2b1048576i16f1s0"), ("at most 1048576 samples",)),
    ("world", lambda: check_world(CODES, 0), ("world of 0", "nearest legal world size: 1")),
    ("seed", lambda: sample_lengths(CODES, seed=-1, step=0), ("seed", "2^64-1", "-1")),
    ("deal", lambda: deal([1], 0), ("num_ranks is 0", "at least 1")),
    ("lengths", lambda: read_lengths(HERE / "missing.txt"), ("cannot read", "missing.txt")),
    ("rank", stream("g2b1i64f1s0", 2, 2), ("rank is 2", "at most 1")),
    ("stream, world", stream("g2b1i64f1s0", 0, 3), ("nearest legal world size: 2 or 4",)),
    ("stream, samples", stream("g1b65536i64f1s0"), ("less than 65536 samples",)),
    ("step", lambda: SyntheticStream("g1b1i64f1s0").batch(2**31), ("step is 2147483648",)),
    ("batch_size", lambda: PhotoStream(HERE, 0), ("batch_size is 0", "at least 1")),
    ("folder", lambda: PhotoStream(HERE / "missing", 1), ("must be a folder of photos",)),
    ("no photos", lambda: PhotoStream(HERE, 1), ("no readable photo",)),
    ("no traces", lambda: read_traces(HERE), ("has no trace: give the folder",)),
    ("kind", segment(kind="idle"), ("Segment(kind='idle')", '"step" or "compute"')),
    ("name of a step", segment(kind="step", name="x"), ("the name of a step is its number",)),
    ("seconds", segment(seconds=-1.0), ("Segment(seconds=-1.0)", "at least 0")),
    (
        "lines",
        on(lambda path: read_lengths(path, num_ranks=4), a__txt="1\n2\n3\n"),
        ("not 4; use 3",),
    ),
    ("manifest, suffix", on(read_manifest, a__xls="x"), ("cannot read .xls: give one of",)),
    ("model", lambda: TokenRule.of_model("wan9"), ("'wan9' is not known", "wan2.1")),
    ("bucket", lambda: TokenRule(bucket="big"), ("bucket 'big'", "1024:64")),
    ("role", on(lambda p: read_manifest(p, columns={"x": "y"}), a__csv=""), ("one of tokens",)),
    ("unreadable photos", on(stream_of, a__png="", b__png=""), ("(2 unreadable); put photos",)),
    ("strict", on(strictly, a__png="", b__png=""), ("cannot read the photo", "a.png")),
    ("photos of a file", on(lambda path: PhotoStream(path, 1), a__png=""), ("a folder of photos",)),
    ("other steps", traces(parts_of, Run(OWN, first=50)), ("traces have no common step",)),
    ("a host", traces(parts_of, Run(OWN, on_device=False)), ("without kernels of a device",)),
    ("bags", traces(lens_of, name="bascule::step lens/2 [8]"), ("shared its sequences with 1",)),
    ("lens", traces(worth({(90, 0): [4]})), ("lengths are given of steps 90 to 90",)),
    ("lens that explain nothing", traces(worth(SEVEN)), ("do not explain",)),
    ("traces of another run", on(written(0, 1), rank0__json="", rank2__json=""), ("rank2.json",)),
    ("rank of a segment", on(written(5), a__txt="", b__txt=""), ("rank 5, and the run has 2",)),
    *(
        (f"{name} {place}", make(wrong), (words,))
        for name, make, rows in TABLES
        for place, (wrong, words) in enumerate(rows)
    ),
]
