"""Tables as users of other trainers and data sets have them, with the tokens that they mean.

Forms are from the public documentation of the trainers and data sets that are named; contents are
made up. Tokens are written down by hand: floor(height / 16) * floor(width / 16) * (1 + (frames - 1)
// 4) visual ones, ceil(UTF-8 bytes / 4) of text.
"""

import bz2
import gzip
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from PIL import Image
from pyarrow import parquet

BOAT, LAKE = "a red boat", "a red boat sails on the lake"  # 10 and 28 bytes: 3 and 7 tokens
TWO = [(320, 512, BOAT), (1280, 720, LAKE)]
OF_TWO = [20 * 32 + 3, 80 * 45 + 7]
CLIPS = [(1280, 720, 81, BOAT), (832, 480, 17, LAKE)]
OF_CLIPS = [80 * 45 * 21 + 3, 52 * 30 * 5 + 7]
OF_CLIPS_ALONE = [80 * 45 * 21, 52 * 30 * 5]  # where text is attended to crosswise


@dataclass(frozen=True)
class Table:
    """A file, options of the reader, and the tokens of its rows, or what its refusal says."""

    name: str  # of the file
    write: Callable[[Path], object]
    tokens: list[int] | str
    model: str = "flux.1"
    rule: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    inner: str = ""  # the file to read, of a folder


def text(content: str, encoding: str = "utf-8") -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content.encode(encoding))


def rows(names: str, values: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [dict(zip(names.split(), row, strict=True)) for row in values]


def csv(names: str, values: list[tuple[Any, ...]], sep: str = ",", end: str = "\n") -> str:
    lines = [sep.join(names.split()), *(sep.join(map(str, row)) for row in values)]
    return end.join(lines) + end


def lines(values: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def arrow(values: list[dict[str, Any]]) -> Callable[[Path], object]:
    return lambda path: parquet.write_table(pa.Table.from_pylist(values), path)


def image(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def folder(**files: bytes | str) -> Callable[[Path], object]:
    """Write files by name, "__" standing for "." and "___" for "/"."""

    def write(path: Path) -> None:
        for name, content in files.items():
            place = path / name.replace("___", "/").replace("__", ".")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def shard(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for number, (width, height, caption) in enumerate(TWO):
            parts = {"png": image(width, height), "txt": caption.encode()}
            for suffix, content in parts.items():
                member = tarfile.TarInfo(f"part/{number:05}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def dataset_on_disk(path: Path) -> None:
    """A data set as `datasets.Dataset.save_to_disk` leaves it."""
    path.mkdir()
    table = pa.Table.from_pylist(rows("width height caption", TWO))
    with pa.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as file:
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (path / "state.json").write_text(json.dumps(state))


WHC = "width height caption"
VIDEO = "path num_frames height width text"
VIDEOS = [("/v/0.mp4", 81, 720, 1280, BOAT), ("/v/1.mp4", 17, 480, 832, LAKE)]
TALK = [{"role": "user", "content": f"<image>{BOAT}"}, {"role": "assistant", "content": LAKE}]
SHAREGPT = [{"from": "human", "value": f"<image>\n{BOAT}"}, {"from": "gpt", "value": LAKE}]
KOHYA = """[general]
enable_bucket = true
resolution = 512
[[datasets]]
  [[datasets.subsets]]
  image_dir = "img"
  num_repeats = 2
"""
MUSUBI = """[general]
resolution = [832, 480]
enable_bucket = true
[[datasets]]
video_jsonl_file = "clips.jsonl"
target_frames = [1, 25]
"""
SIMPLETUNER = [
    {"id": "mine", "type": "local", "instance_data_dir": "img", "resolution": 0.262144}
    | {"resolution_type": "area", "repeats": 0},
    {"id": "text", "dataset_type": "text_embeds", "cache_dir": "cache"},
    {"id": "mask", "dataset_type": "conditioning", "instance_data_dir": "img"},
    {"id": "off", "type": "local", "instance_data_dir": "img", "disabled": True},
]
FOLDER = {"img___a__png": image(320, 512), "img___a__txt": BOAT, "img___b__png": image(1280, 720)}
PICTURES = {"a__png": image(320, 512), "b__png": image(64, 64), "c__png": image(320, 512)}
EDIT = [
    {"image": "a.png", "prompt": BOAT, "edit_image": ["b.png", "c.png"]},
    {"image": "a.png", "prompt": BOAT, "edit_image": ["b.png"]},
]
CONTROL = [
    {"image_path": "a.png", "caption": BOAT, "control_path_0": "b.png", "control_path_1": "c.png"},
    {"image_path": "a.png", "caption": BOAT, "control_path_0": "b.png"},
]
EDITS: list[tuple[str, Any, dict[str, Any], list[int] | str]] = [
    ("edit", EDIT, {}, "count them by --columns reference=edit_image, or not by reference="),
    ("control", CONTROL, {}, "--columns reference=control_path_0"),
    (
        "edit_counted",
        EDIT,
        {"options": {"columns": {"reference": "edit_image"}}},
        [640 + 16 + 640 + 3, 640 + 16 + 3],
    ),
    ("edit_left", EDIT, {"options": {"columns": {"reference": ""}}}, [643, 643]),
    (
        "control_counted",
        CONTROL,
        {"options": {"columns": {"reference": "control_path"}}},
        [640 + 16 + 640 + 3, 640 + 16 + 3],
    ),
    (
        "no_such_reference",
        EDIT,
        {"options": {"columns": {"reference": "kontext"}}},
        "no column 'kontext'",
    ),
]
SOUND = [
    {"audio_filepath": "a.wav", "duration": 3.5, "text": BOAT},
    {"audio_filepath": "b.wav", "duration": 2, "text": LAKE},
]
COLUMNS = {"width": "B", "height": "H", "text": "titel"}

TABLES = [
    # Formats.
    Table("plain.csv", text(csv(WHC, TWO)), OF_TWO),
    Table("crlf.csv", text(csv(WHC, TWO, end="\r\n")), OF_TWO),
    Table("bom.csv", text(csv(WHC, TWO), "utf-8-sig"), OF_TWO),
    Table("utf16.csv", text(csv(WHC, TWO), "utf-16"), OF_TWO),
    Table("latin.csv", text(csv(WHC, [(320, 512, "un café")]), "latin-1"), [20 * 32 + 2]),
    Table("semicolon.csv", text(csv(WHC, TWO, ";", "\r\n")), OF_TWO),
    Table("pipes.csv", text(csv(WHC, TWO, "|")), OF_TWO),
    Table("tabs.tsv", text(csv(WHC, TWO, "\t")), OF_TWO),
    Table("quoted.csv", text('width,height,caption\n64,64,"a, ""b""\nc"\n64,64,\n'), [18, 16]),
    Table("pandas.csv", text(",width,height,caption\n0,320.0,512.0,a red boat\n"), OF_TWO[:1]),
    Table("a.csv.gz", lambda p: p.write_bytes(gzip.compress(csv(WHC, TWO).encode())), OF_TWO),
    Table(
        "a.jsonl.bz2", lambda p: p.write_bytes(bz2.compress(lines(rows(WHC, TWO)).encode())), OF_TWO
    ),
    Table(
        "a.jsonl.zst",
        lambda p: p.write_bytes(pa.compress(lines(rows(WHC, TWO)).encode(), "zstd", asbytes=True)),
        OF_TWO,
    ),
    Table("lines.jsonl", text(lines(rows(WHC, TWO))), OF_TWO),
    Table("lines.json", text(lines(rows(WHC, TWO))), OF_TWO),
    Table("list.json", text(json.dumps(rows(WHC, TWO), indent=1)), OF_TWO),
    Table("data.json", text(json.dumps({"version": 1, "data": rows(WHC, TWO)})), OF_TWO),
    Table("table.parquet", arrow(rows(WHC, TWO)), OF_TWO),
    Table("floats.parquet", arrow(rows(WHC, [(320.0, 512.0, BOAT)])), OF_TWO[:1]),
    Table("shard.tar", shard, OF_TWO),
    Table("on_disk", dataset_on_disk, OF_TWO),
    Table("images", folder(**FOLDER), [20 * 32 + 3, 80 * 45]),
    Table(
        "imagefolder",
        folder(metadata__csv=csv("file_name text", [("a.png", BOAT)]), a__png=image(320, 512)),
        OF_TWO[:1],
    ),
    Table(
        "captions.parquet",
        arrow([{"image": {"bytes": image(320, 512), "path": None}, "caption": BOAT}]),
        OF_TWO[:1],
    ),
    # Data sets.
    Table(
        "laion.csv",
        text(
            csv(
                "SAMPLE_ID URL TEXT HEIGHT WIDTH NSFW",
                [(1, "https://x/0.jpg", BOAT, 512, 320, "NO")],
            )
        ),
        OF_TWO[:1],
    ),
    Table(
        "img2dataset.parquet",
        arrow(rows(f"key status {WHC} original_width", [("0", "success", 320, 512, BOAT, 640)])),
        OF_TWO[:1],
    ),
    Table(
        "datacomp.parquet",
        arrow(rows("uid text original_width original_height", [("0", BOAT, 320, 512)])),
        "--columns width=W,height=H",
    ),
    Table(
        "datacomp2.parquet",
        arrow(rows("uid text original_width original_height", [("0", BOAT, 320, 512)])),
        OF_TWO[:1],
        options={"columns": {"width": "original_width", "height": "original_height"}},
    ),
    Table("opensora.csv", text(csv(VIDEO, VIDEOS)), OF_CLIPS, "hunyuanvideo"),
    Table("wan.csv", text(csv(VIDEO, VIDEOS)), OF_CLIPS_ALONE, "wan2.1"),
    Table("of_lengths.csv", text(csv("tokens", [(900,), (7,)])), [900, 7], "wan2.1"),
    Table("opensora_as_images.csv", text(csv(VIDEO, VIDEOS)), "--model wan2.1"),
    Table(
        "openvid.csv",
        text(csv("video caption frame fps seconds", [("a.mp4", BOAT, 81, 24, 3.4)])),
        "no image, nor a size, of 'a.mp4'",
    ),
    Table(
        "internvid.csv",
        text(csv("YoutubeID Start End Caption", [("x", 1, 2, BOAT)])),
        "'YoutubeID'",
    ),
    Table("cc12m.tsv", text(csv("url caption", [("https://x/0.jpg", BOAT)], "\t")), "'url'"),
    Table(
        "coco.json",
        text(json.dumps({"a.png": {"caption": BOAT, "train_resolution": [320, 512]}})),
        OF_TWO[:1],
    ),
    Table(
        "resolution.csv",
        text('resolution,caption\n320x512,a red boat\n"[1280, 720]",\n'),
        [643, 3600],
    ),
    Table(
        "sizes.jsonl",
        text(lines([{"resolution": {"height": 512, "width": 320}, "cap": [BOAT]}])),
        OF_TWO[:1],
    ),
    Table(
        "cogvlm.jsonl",
        text(lines([{"cogvlm_caption": BOAT, "tags": "b", "width": 320, "height": 512}])),
        OF_TWO[:1],
    ),
    Table(
        "several.jsonl", text(lines([{"width": 64, "height": 64, "caption": ["a", LAKE]}])), [23]
    ),
    Table("chinese.csv", text(csv(WHC, [(64, 64, "一艘红色的船在湖面上航行")])), [16 + 9]),
    Table("ids.jsonl", text(lines([{"input_ids": [1] * 9}, {"input_ids": [1] * 4}])), [9, 4]),
    Table("lengths.csv", text(csv("length", [(900,), (40,)])), [900, 40]),
    Table("mixed.jsonl", text(lines([{"tokens": 9}, {"width": 64, "height": 64}])), [9, 16]),
    Table(
        "sharegpt",
        folder(
            t__jsonl=lines([{"conversations": SHAREGPT, "images": ["i/a.png"]}]),
            i___a__png=image(320, 512),
        ),
        [20 * 32 + 10],
    ),
    Table(
        "swift",
        folder(
            t__jsonl=lines(
                [{"messages": TALK, "images": ["a.png", "a.png"]}, {"messages": TALK, "images": []}]
            ),
            a__png=image(320, 512),
        ),
        [2 * 20 * 32 + 10, 10],
    ),
    # Trainers.
    Table("kohya", folder(**FOLDER, data__toml=KOHYA), [963, 960] * 2, inner="data.toml"),
    Table(
        "musubi",
        folder(
            clips__jsonl=lines(rows(f"{WHC} frames", [(832, 480, LAKE, 40), (832, 480, "", 24)])),
            data__toml=MUSUBI,
        ),
        [52 * 30, 52 * 30, 52 * 30 * 7],  # the second clip is shorter than 25 frames
        "wan2.1",
        inner="data.toml",
    ),
    Table(
        "simpletuner",
        folder(**FOLDER, backend__json=json.dumps(SIMPLETUNER)),
        [963, 44 * 24],  # 384 x 640 and 704 x 384
        inner="backend.json",
    ),
    Table("no_data", folder(data__toml=KOHYA), "img are not here", inner="data.toml"),
    Table(
        "musubi_without_frames",
        folder(clips__jsonl=lines(rows(WHC, [(832, 480, LAKE)])), data__toml=MUSUBI),
        "--columns frames=F",
        "wan2.1",
        inner="data.toml",
    ),
    Table(
        "diffusion_pipe",
        folder(data__toml="resolutions = [512]\n[[directory]]\npath = 'img'\n"),
        "[[directory]] of diffusion-pipe are not applied: give the folder of its path",
        inner="data.toml",
    ),
    Table("other", folder(data__toml="[model]\n"), "has no [[datasets]]", inner="data.toml"),
    Table("list", folder(data__toml="datasets = [1]\n"), "where keys belong", inner="data.toml"),
    Table("ai_toolkit.yaml", text("job: extension\n"), "the folder_path of a configuration of ai-"),
    Table(
        "caption_extension",
        folder(
            **FOLDER, img___b__caption=LAKE, data__toml=KOHYA + '  caption_extension = ".caption"\n'
        ),
        [960, 967] * 2,
        inner="data.toml",
    ),
    Table(
        "only_captioned",
        folder(
            **FOLDER,
            img___deep___c__png=image(64, 64),
            data__toml="[[datasets]]\nresolution = 512\nimage_directory = 'img'\n"
            "caption_extension = '.txt'\n",
        ),
        [32 * 32 + 3],
        inner="data.toml",
    ),
    # Pictures beside the sample's own.
    *(
        Table(name, folder(t__json=json.dumps(content), **PICTURES), said, inner="t.json", **more)
        for name, content, more, said in EDITS
    ),
    Table(
        "frame_and_video.csv",
        text(csv("image video caption", [("0.png", "0.mp4", BOAT)])),
        "has the column 'video', whose name says pictures",
    ),
    Table("own.csv", text(csv("width height image_name", [(64, 64, "a.png")])), [16]),
    Table(
        "hub.parquet",
        arrow(
            [
                {
                    "images": [{"bytes": image(*size), "path": None} for size in sizes],
                    "texts": [{"user": BOAT, "assistant": LAKE, "source": "made"}],
                }
                for sizes in ([(320, 512)], [(320, 512), (64, 64)])
            ]
        ),
        [640 + 10, 640 + 16 + 10],
    ),
    Table(
        "edit_first.parquet",  # the first picture is not the sample
        arrow(
            [
                {
                    "edit_image": {"bytes": image(64, 64), "path": None},
                    "image": {"bytes": image(320, 512), "path": None},
                }
            ]
        ),
        [640 + 16],
        options={"columns": {"reference": "edit_image"}},
    ),
    Table(
        "turns.jsonl",
        text(lines([{"messages": [{"who": "a", "says": BOAT}]}])),
        "has turns with who, says, and no content or value or text: count no text by --columns ",
    ),
    # Sound.
    Table("sound.jsonl", text(lines(SOUND)), "has duration and no sizes: say how many"),
    Table(
        "hub_sound.jsonl", text(lines([{"audio": "a.wav", "text": BOAT}])), "has audio and no sizes"
    ),
    Table(
        "hub_sound_left.jsonl",
        text(lines([{"audio": "a.wav", "text": BOAT}])),
        [3],
        options={"columns": {"duration": ""}},
    ),
    Table(
        "two_sizes.jsonl",
        text(lines([{k: {"width": 64, "height": 64} for k in ("source", "target")}])),
        "has the columns 'source.width', 'target.width': say which: --columns width=NAME",
    ),
    Table(
        "one_of_two_sizes.jsonl",
        text(lines([{"a": {"width": 64, "height": 64}, "b": {"width": 128, "height": 64}}])),
        [32],
        options={"columns": {"width": "b.width", "height": "b.height"}},
    ),
    Table("sound_25.jsonl", text(lines(SOUND)), [87 + 3, 50 + 7], rule={"fps": 25}),
    Table("sound_left.jsonl", text(lines(SOUND)), [3, 7], options={"columns": {"duration": ""}}),
    Table(
        "no_text.jsonl",
        text(lines([{"audio_filepath": "a.wav", "duration": 2}])),
        [50],
        rule={"fps": 25},
    ),
    Table(
        "zero.jsonl",
        text(lines([{"text": BOAT, "duration": x} for x in (None, 0)])),
        "row 1: duration is missing; zero.jsonl, row 2: duration is 0",
        rule={"fps": 25},
    ),
    # Clips.
    Table(
        "seconds.csv",
        text(csv("width height duration_seconds fps caption", [(1280, 720, 5.4, 24, BOAT)])),
        [80 * 45 * 33 + 3],
        "hunyuanvideo",
    ),
    Table(
        "at_16_fps.csv",
        text(csv("width height duration", [(1280, 720, 5.1)])),
        [80 * 45 * 21],
        "wan2.1",
        {"fps": 16},
    ),
    Table("no_rate.csv", text(csv("width height duration", [(1280, 720, 5)])), "--fps 16"),
    Table(
        "half_rate.csv",
        text(csv("width height frames fps", [(1280, 720, 99, 32)])),
        [80 * 45 * 13],  # 49 frames
        "wan2.1",
        {"fps": 16},
    ),
    Table(
        "most.csv",
        text(csv("width height frames", [(1280, 720, 300)])),
        [80 * 45 * 21],
        "wan2.1",
        {"max_frames": 81},
    ),
    Table("ltx.csv", text(csv("width height frames", [(768, 512, 121)])), [24 * 16 * 16], "ltx"),
    Table("no_frames.jsonl", text(lines([{"width": 64, "height": 64, "frames": None}])), [16]),
    # Buckets.
    Table(
        "bucket.csv",
        text(csv("width height", [(2048, 1536)])),
        [74 * 55],
        rule={"bucket": "1024:16"},
    ),
    Table(
        "wan_bucket.csv", text(csv("width height", [(1920, 1080)])), [3600], rule={"bucket": "720p"}
    ),
    Table(
        "listed.csv",
        text(csv("width height", [(300, 200), (200, 300)])),
        [72 * 48, 64 * 64],
        rule={"bucket": "1024x1024,1152x768"},
    ),
    # Doubt, and what cannot be read.
    Table(
        "seconds_or_tokens.csv", text(csv("width height length", [(1280, 720, 5)])), "tokens=length"
    ),
    Table("n_sec.csv", text(csv("width height clip_seconds", [(64, 64, 5)])), "'clip_seconds'"),
    Table(
        "two_texts.csv", text(csv("width height caption text", [(64, 64, "a", "b")])), "text=text"
    ),
    Table(
        "one_of_two.csv",
        text(csv("width height caption text", [(64, 64, "a", LAKE)])),
        [16 + 7],
        options={"columns": {"text": "text"}},
    ),
    Table(
        "one_of_two_unknown.csv",
        text(csv("width height long_caption short_caption", [(64, 64, LAKE, "a")])),
        [16 + 7],
        options={"columns": {"text": "long_caption"}},
    ),
    Table(
        "bilder.csv",
        text(csv("width height Bilder", [(1280, 720, 81)])),
        "--columns frames=F, of Bilder, or that all are images by --columns frames=",
        "wan2.1",
    ),
    Table(
        "images_of_wan.csv",
        text(csv("width height", [(1280, 720)])),
        [80 * 45],
        "wan2.1",
        options={"columns": {"frames": ""}},
    ),
    Table("german.csv", text(csv("width height titel", [(64, 64, LAKE)])), "text=titel"),
    Table(
        "chosen.csv",
        text(csv("B H titel", [(320, 512, BOAT)])),
        [643],
        options={"columns": COLUMNS},
    ),
    Table(
        "no_text.csv",
        text(csv("width height titel", [(64, 64, LAKE)])),
        [16],
        options={"columns": {"text": ""}},
    ),
    Table("no_such.csv", text(csv(WHC, TWO)), "no column 'W'", options={"columns": {"width": "W"}}),
    Table("twice.csv", text("width,height,width\n1,2,3\n"), "two columns are named 'width'"),
    Table("no_header.csv", text("/v/0.mp4,a boat,102\n"), "add such a line"),
    Table("no_width.csv", text(csv("height caption", [(64, "a")])), "--columns width=.."),
    Table("unknown.csv", text(csv("a b", [(1, 2)])), "a, b"),
    Table("empty.csv", text(""), "it has none"),
    Table("no_rows.csv", text(csv(WHC, [])), "holds no samples"),
    Table(
        "nan.csv",
        text(csv("width height frames", [(64, 64, "nan"), (64, 64, 1)])),
        "row 1: frames is nan",
    ),
    Table(
        "nan_skipped.csv",
        text(csv("width height frames", [(64, 64, "nan"), (64, 64, 1)])),
        [16],
        options={"skip_bad": True},
    ),
    Table(
        "missing.jsonl",
        text('{"width":64,"height":64}\n{"width":null,"height":64}\n{"width":NaN,"height":0}\n'),
        "2 rows cannot be read: missing.jsonl, row 2: width is missing; missing.jsonl, row 3",
    ),
    Table("small.csv", text(csv("width height", [(8, 64)])), "smaller than a token of 16"),
    Table("ragged.csv", text("width,height\n64,64\n64\n"), "Expected 2 columns, got 1"),
    Table("ragged2.csv", text("width,height\n64,64\n64\n"), [16], options={"skip_bad": True}),
    Table("lists.jsonl", text("[1, 2]\n[3]\n"), "--file"),
    Table("null.jsonl", text('{"tokens": 1}\nnull\n'), "line 2: None is no row"),
    Table("nest.jsonl", text('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}\n"), "recursion"),
    Table("unlike.jsonl", text(lines([{"tokens": x} for x in (1, "2", [3])])), [1, 2, 1]),
    Table("tiny", folder(a__png=image(8, 64)), "smaller than a token"),
    Table("broken.jsonl", text('{"tokens": 1}\n{"tokens": \n'), "line 2: not valid JSON"),
    Table("file.xyz", text("a"), "cannot read .xyz"),
    Table("damaged.parquet", text("PAR1 no"), "cannot be read as .parquet"),
    Table("musubi.jsonl", text(lines([{"image_path": "/d/0.png", "caption": BOAT}])), "'/d/0.png'"),
    Table("negative.csv", text(csv("tokens", [(-1,)])), "tokens is -1"),
    Table(
        "splits",
        folder(data___train_0__csv="tokens\n1\n", data___test_0__csv="tokens\n2\n"),
        "has the splits test, train: give one of them alone",
    ),
    Table("none", lambda _: None, "no such file"),
]
