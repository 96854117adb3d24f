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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from PIL import Image
from pyarrow import parquet

BOAT, LAKE = "a red boat", "a red boat sails on the lake"  # 10 and 28 bytes: 3 and 7 tokens
TWO = [(320, 512, BOAT), (1280, 720, LAKE)]
OF_TWO = [20 * 32 + 3, 80 * 45 + 7]
OF_CLIPS = [80 * 45 * 21 + 3, 52 * 30 * 5 + 7]
OF_CLIPS_ALONE = [80 * 45 * 21, 52 * 30 * 5]  # where text is attended to crosswise


@dataclass(frozen=True)
class Table:
    """A file, options of the reader, and the tokens of its rows, or what its refusal says."""

    name: str  # of the file
    content: str | bytes | Mapping[str, bytes | str] | Callable[[Path], object]  # or of a folder
    tokens: list[int] | str
    model: str = "flux.1"
    rule: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    skip_bad: bool = False
    inner: str = ""  # the file to read, of a folder

    def write(self, path: Path) -> None:
        if callable(self.content):
            self.content(path)
            return
        files = self.content if isinstance(self.content, Mapping) else {"": self.content}
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content.encode() if isinstance(content, str) else content)


def rows(names: str, *values: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(names.split(), row, strict=True)) for row in values]


def csv(names: str, *values: tuple[Any, ...], sep: str = ",", end: str = "\n") -> str:
    lines = [sep.join(names.split()), *(sep.join(map(str, row)) for row in values)]
    return end.join(lines) + end


def jsonl(*values: dict[str, Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def arrow(*values: dict[str, Any]) -> Callable[[Path], object]:
    return lambda path: parquet.write_table(pa.Table.from_pylist(list(values)), path)


def image(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def inlined(width: int, height: int) -> dict[str, Any]:
    """An image as the Hub stores it in a column."""
    return {"bytes": image(width, height), "path": None}


def configured(
    name: str,
    toml: str,
    tokens: list[int] | str,
    files: Mapping[str, bytes | str] | None = None,
    model: str = "flux.1",
) -> Table:
    """A folder that the configuration of a trainer describes."""
    return Table(name, {"data.toml": toml, **(files or {})}, tokens, model, inner="data.toml")


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
    table = pa.Table.from_pylist(rows("width height caption", *TWO))
    with pa.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as file:
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (path / "state.json").write_text(json.dumps(state))


WH, WHC, WHF = "width height", "width height caption", "width height frames"
VIDEO = "path num_frames height width text"
VIDEOS = [("/v/0.mp4", 81, 720, 1280, BOAT), ("/v/1.mp4", 17, 480, 832, LAKE)]
OF_MUSUBI = jsonl(*rows(f"{WHC} frames", (832, 480, LAKE, 40), (832, 480, "", 24)))
NO_FRAMES = jsonl(*rows(WHC, (832, 480, LAKE)))
LISTED = {"bucket": "1024x1024,1152x768"}
WAN, AT_16, AT_25 = "wan2.1", {"fps": 16}, {"fps": 25}
SIZED, SQUARE = {"height": 512, "width": 320}, {"width": 64, "height": 64}
TALK = [{"role": "user", "content": f"<image>{BOAT}"}, {"role": "assistant", "content": LAKE}]
SHAREGPT = [{"from": "human", "value": f"<image>\n{BOAT}"}, {"from": "gpt", "value": LAKE}]
LINES = jsonl(*rows(WHC, *TWO))
MANY = "64,64\n" * 100_000
NO_COMMA = "and numbers have no comma: write"
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
FOLDER = {"img/a.png": image(320, 512), "img/a.txt": BOAT, "img/b.png": image(1280, 720)}
PICTURES = {"a.png": image(320, 512), "b.png": image(64, 64), "c.png": image(320, 512)}
EDIT = [
    {"image": "a.png", "prompt": BOAT, "edit_image": ["b.png", "c.png"]},
    {"image": "a.png", "prompt": BOAT, "edit_image": ["b.png"]},
]
CONTROL = [
    {"image_path": "a.png", "caption": BOAT, "control_path_0": "b.png", "control_path_1": "c.png"},
    {"image_path": "a.png", "caption": BOAT, "control_path_0": "b.png"},
]
COUNTED = [640 + 16 + 640 + 3, 640 + 16 + 3]
EDITS: list[tuple[str, Any, str | None, list[int] | str]] = [  # and the column of references
    ("edit", EDIT, None, "count them by --columns reference=edit_image, ignore them by reference="),
    ("control", CONTROL, None, "--columns reference=control_path_0"),
    ("edit_counted", EDIT, "edit_image", COUNTED),
    ("edit_left", EDIT, "", [643, 643]),
    ("control_counted", CONTROL, "control_path", COUNTED),
    ("no_such_reference", EDIT, "kontext", "no column 'kontext'"),
]
SOUND = [
    {"audio_filepath": "a.wav", "duration": 3.5, "text": BOAT},
    {"audio_filepath": "b.wav", "duration": 2, "text": LAKE},
]
GERMAN = {"width": "B", "height": "H", "text": "titel"}
OF_B = {"width": "b.width", "height": "b.height"}
ORIGINAL = {"width": "original_width", "height": "original_height"}
DATACOMP = arrow(*rows("uid text original_width original_height", ("0", BOAT, 320, 512)))
TWO_OF_HUB = [(320, 512)], [(320, 512), (64, 64)]
ONLY_TXT = "[[datasets]]\nresolution = 512\nimage_directory = 'img'\ncaption_extension = '.txt'\n"

TABLES = [
    # Formats.
    Table("plain.csv", csv(WHC, *TWO), OF_TWO),
    Table("crlf.csv", csv(WHC, *TWO, end="\r\n"), OF_TWO),
    Table("bom.csv", csv(WHC, *TWO).encode("utf-8-sig"), OF_TWO),
    Table("utf16.csv", csv(WHC, *TWO).encode("utf-16"), OF_TWO),
    Table("latin.csv", csv(WHC, (320, 512, "un café")).encode("latin-1"), [20 * 32 + 2]),
    Table("semicolon.csv", csv(WHC, *TWO, sep=";", end="\r\n"), OF_TWO),
    Table("pipes.csv", csv(WHC, *TWO, sep="|"), OF_TWO),
    Table("tabs.tsv", csv(WHC, *TWO, sep="\t"), OF_TWO),
    Table("quoted.csv", 'width,height,caption\n64,64,"a, ""b""\nc"\n64,64,\n', [18, 16]),
    Table("pandas.csv", ",width,height,caption\n0,320.0,512.0,a red boat\n", OF_TWO[:1]),
    Table("a.csv.gz", gzip.compress(csv(WHC, *TWO).encode()), OF_TWO),
    Table("a.jsonl.bz2", bz2.compress(LINES.encode()), OF_TWO),
    Table("a.jsonl.zst", pa.compress(LINES.encode(), "zstd", asbytes=True), OF_TWO),
    Table("lines.jsonl", LINES, OF_TWO),
    Table("lines.json", LINES, OF_TWO),
    Table("list.json", json.dumps(rows(WHC, *TWO), indent=1), OF_TWO),
    Table("data.json", json.dumps({"version": 1, "data": rows(WHC, *TWO)}), OF_TWO),
    Table("table.parquet", arrow(*rows(WHC, *TWO)), OF_TWO),
    Table("floats.parquet", arrow(*rows(WHC, (320.0, 512.0, BOAT))), OF_TWO[:1]),
    Table("shard.tar", shard, OF_TWO),
    Table("on_disk", dataset_on_disk, OF_TWO),
    Table("images", FOLDER, [20 * 32 + 3, 80 * 45]),
    Table(
        "imagefolder",
        {"metadata.csv": csv("file_name text", ("a.png", BOAT)), "a.png": image(320, 512)},
        OF_TWO[:1],
    ),
    Table("captions.parquet", arrow({"image": inlined(320, 512), "caption": BOAT}), OF_TWO[:1]),
    # Data sets.
    Table(
        "laion.csv",
        csv("SAMPLE_ID URL TEXT HEIGHT WIDTH NSFW", (1, "https://x/0.jpg", BOAT, 512, 320, "NO")),
        OF_TWO[:1],
    ),
    Table(
        "img2dataset.parquet",
        arrow(*rows(f"key status {WHC} original_width", ("0", "success", 320, 512, BOAT, 640))),
        OF_TWO[:1],
    ),
    Table("datacomp.parquet", DATACOMP, "--columns width=W,height=H"),
    Table("datacomp2.parquet", DATACOMP, OF_TWO[:1], columns=ORIGINAL),
    Table("opensora.csv", csv(VIDEO, *VIDEOS), OF_CLIPS, "hunyuanvideo"),
    Table("wan.csv", csv(VIDEO, *VIDEOS), OF_CLIPS_ALONE, "wan2.1"),
    Table("of_lengths.csv", csv("tokens", (900,), (7,)), [900, 7], "wan2.1"),
    Table("opensora_as_images.csv", csv(VIDEO, *VIDEOS), "--model wan2.1"),
    Table(
        "openvid.csv",
        csv("video caption frame fps seconds", ("a.mp4", BOAT, 81, 24, 3.4)),
        "no image, nor a size, of 'a.mp4'",
    ),
    Table("internvid.csv", csv("YoutubeID Start End Caption", ("x", 1, 2, BOAT)), "'YoutubeID'"),
    Table("cc12m.tsv", csv("url caption", ("https://x/0.jpg", BOAT), sep="\t"), "'url'"),
    Table(
        "coco.json",
        json.dumps({"a.png": {"caption": BOAT, "train_resolution": [320, 512]}}),
        OF_TWO[:1],
    ),
    Table("sizes.csv", 'resolution,caption\n320x512,a red boat\n"[1280, 720]",\n', [643, 3600]),
    Table("sizes.jsonl", jsonl({"resolution": SIZED, "cap": [BOAT]}), OF_TWO[:1]),
    Table("cogvlm.jsonl", jsonl({"cogvlm_caption": BOAT, "tags": "b"} | SIZED), OF_TWO[:1]),
    Table("several.jsonl", jsonl(SQUARE | {"caption": ["a", LAKE]}), [23]),
    Table("chinese.csv", csv(WHC, (64, 64, "一艘红色的船在湖面上航行")), [16 + 9]),
    Table("ids.jsonl", jsonl({"input_ids": [1] * 9}, {"input_ids": [1] * 4}), [9, 4]),
    Table("lengths.csv", csv("length", (900,), (40,)), [900, 40]),
    Table("mixed.jsonl", jsonl({"tokens": 9}, SQUARE), [9, 16]),
    Table(
        "sharegpt",
        {
            "t.jsonl": jsonl({"conversations": SHAREGPT, "images": ["i/a.png"]}),
            "i/a.png": image(320, 512),
        },
        [20 * 32 + 10],
    ),
    Table(
        "swift",
        {
            "t.jsonl": jsonl(*({"messages": TALK, "images": ["a.png"] * num} for num in (2, 0))),
            "a.png": image(320, 512),
        },
        [2 * 20 * 32 + 10, 10],
    ),
    # Trainers.
    configured("kohya", KOHYA, [963, 960] * 2, FOLDER),
    # The second clip is shorter than 25 frames.
    configured("musubi", MUSUBI, [52 * 30, 52 * 30, 52 * 30 * 7], {"clips.jsonl": OF_MUSUBI}, WAN),
    Table(
        "simpletuner",
        FOLDER | {"backend.json": json.dumps(SIMPLETUNER)},
        [963, 44 * 24],  # 384 x 640 and 704 x 384
        inner="backend.json",
    ),
    configured("no_data", KOHYA, "img are not here"),
    configured("musubi_no_frames", MUSUBI, "--columns frames=F", {"clips.jsonl": NO_FRAMES}, WAN),
    configured(
        "diffusion_pipe",
        "resolutions = [512]\n[[directory]]\npath = 'img'\n",
        "[[directory]] of diffusion-pipe are not supported: give the folder of its path",
    ),
    configured("other", "[model]\n", "has no [[datasets]]"),
    configured("list", "datasets = [1]\n", "where keys belong"),
    Table("ai_toolkit.yaml", "job: extension\n", "the folder_path of a configuration of ai-"),
    configured(
        "caption_extension",
        KOHYA + '  caption_extension = ".caption"\n',
        [960, 967] * 2,
        FOLDER | {"img/b.caption": LAKE},
    ),
    configured("only_captioned", ONLY_TXT, [1024 + 3], FOLDER | {"img/deep/c.png": image(64, 64)}),
    # Pictures beside the sample's own.
    *(
        Table(
            name,
            {"t.json": json.dumps(content), **PICTURES},
            tokens,
            inner="t.json",
            columns={} if column is None else {"reference": column},
        )
        for name, content, column, tokens in EDITS
    ),
    Table(
        "frame_and_video.csv",
        csv("image video caption", ("0.png", "0.mp4", BOAT)),
        "has the column 'video', which may hold reference pictures",
    ),
    Table(
        "lengths.csv",
        csv("width height clip_len", (64, 64, 16)),
        "has the column 'clip_len', which may hold frames or seconds",
    ),
    Table("own.csv", csv("width height image_name", (64, 64, "a.png")), [16]),
    Table(
        "hub.parquet",
        arrow(
            *(
                {
                    "images": [inlined(*size) for size in sizes],
                    "texts": [{"user": BOAT, "assistant": LAKE, "source": "made"}],
                }
                for sizes in TWO_OF_HUB
            )
        ),
        [640 + 10, 640 + 16 + 10],
    ),
    Table(
        "edit_first.parquet",  # the first picture is not the sample
        arrow({"edit_image": inlined(64, 64), "image": inlined(320, 512)}),
        [640 + 16],
        columns={"reference": "edit_image"},
    ),
    Table(
        "turns.jsonl",
        jsonl({"messages": [{"who": "a", "says": BOAT}]}),
        "has turns with who, says, and no content or value or text: count no text by --columns ",
    ),
    # Sound.
    Table("sound.jsonl", jsonl(*SOUND), "has duration and no sizes: give the tokens per second"),
    Table("hub_sound.jsonl", jsonl({"audio": "a.wav", "text": BOAT}), "has audio and no sizes"),
    Table("hub_left.jsonl", jsonl({"audio": "a.wav", "text": BOAT}), [3], columns={"duration": ""}),
    Table(
        "two_sizes.jsonl",
        jsonl({"source": SQUARE, "target": SQUARE}),
        "has the columns 'source.width', 'target.width': say which: --columns width=NAME",
    ),
    Table("one_of_sizes.jsonl", jsonl({"a": SIZED, "b": SQUARE}), [16], columns=OF_B),
    Table("sound_25.jsonl", jsonl(*SOUND), [87 + 3, 50 + 7], rule=AT_25),
    Table("sound_left.jsonl", jsonl(*SOUND), [3, 7], columns={"duration": ""}),
    Table("no_text.jsonl", jsonl({"audio_filepath": "a.wav", "duration": 2}), [50], rule=AT_25),
    Table(
        "zero.jsonl",
        jsonl(*({"text": BOAT, "duration": duration} for duration in (None, 0))),
        "row 1: duration is missing; zero.jsonl, row 2: duration is 0",
        rule=AT_25,
    ),
    # Clips.
    Table(
        "seconds.csv",
        csv("width height duration_seconds fps caption", (1280, 720, 5.4, 24, BOAT)),
        [80 * 45 * 33 + 3],
        "hunyuanvideo",
    ),
    Table("at_16.csv", csv(f"{WH} duration", (1280, 720, 5.1)), [80 * 45 * 21], WAN, AT_16),
    Table("no_rate.csv", csv("width height duration", (1280, 720, 5)), "--fps 16"),
    # 49 frames of the half.
    Table("half_rate.csv", csv(f"{WHF} fps", (1280, 720, 99, 32)), [80 * 45 * 13], WAN, AT_16),
    Table("most.csv", csv(WHF, (1280, 720, 300)), [80 * 45 * 21], WAN, {"max_frames": 81}),
    Table("ltx.csv", csv(WHF, (768, 512, 121)), [24 * 16 * 16], "ltx"),
    Table("no_frames.jsonl", jsonl(SQUARE | {"frames": None}), [16]),
    # Buckets.
    Table("bucket.csv", csv(WH, (2048, 1536)), [74 * 55], rule={"bucket": "1024:16"}),
    Table("wan_bucket.csv", csv(WH, (1920, 1080)), [3600], rule={"bucket": "720p"}),
    Table("listed.csv", csv(WH, (300, 200), (200, 300)), [72 * 48, 64 * 64], rule=LISTED),
    # Doubt, and what cannot be read.
    Table("seconds_or_tokens.csv", csv("width height length", (1280, 720, 5)), "tokens=length"),
    Table("n_sec.csv", csv("width height clip_seconds", (64, 64, 5)), "'clip_seconds'"),
    Table("two_texts.csv", csv(f"{WHC} text", (64, 64, "a", "b")), "text=text"),
    Table("one_of.csv", csv(f"{WHC} text", (64, 64, "a", LAKE)), [23], columns={"text": "text"}),
    Table(
        "one_of_two_unknown.csv",
        csv("width height long_caption short_caption", (64, 64, LAKE, "a")),
        [16 + 7],
        columns={"text": "long_caption"},
    ),
    Table(
        "bilder.csv",
        csv("width height Bilder", (1280, 720, 81)),
        "--columns frames=F, of Bilder, or give --columns frames= if all",
        "wan2.1",
    ),
    Table("images_of_wan.csv", csv(WH, (1280, 720)), [80 * 45], "wan2.1", columns={"frames": ""}),
    Table("german.csv", csv("width height titel", (64, 64, LAKE)), "text=titel"),
    Table("chosen.csv", csv("B H titel", (320, 512, BOAT)), [643], columns=GERMAN),
    Table("no_text.csv", csv("width height titel", (64, 64, LAKE)), [16], columns={"text": ""}),
    Table("no_such.csv", csv(WHC, *TWO), "no column 'W'", columns={"width": "W"}),
    Table("twice.csv", "width,height,width\n1,2,3\n", "two columns are named 'width'"),
    Table("no_header.csv", "/v/0.mp4,a boat,102\n", "add such a line"),
    Table("no_width.csv", csv("height caption", (64, "a")), "--columns width=.."),
    Table("unknown.csv", csv("a b", (1, 2)), "a, b"),
    Table("empty.csv", "", "it has none"),
    Table("no_rows.csv", csv(WHC), "holds no samples"),
    Table("nan.csv", csv(WHF, (64, 64, "nan"), (64, 64, 1)), "row 1: frames is nan"),
    Table("nan_skipped.csv", csv(WHF, (64, 64, "nan"), (64, 64, 1)), [16], skip_bad=True),
    Table(
        "missing.jsonl",
        '{"width":64,"height":64}\n{"width":null,"height":64}\n{"width":NaN,"height":0}\n',
        "2 rows cannot be read: missing.jsonl, row 2: width is missing; missing.jsonl, row 3",
    ),
    Table("small.csv", csv(WH, (8, 64)), "smaller than a token of 16"),
    Table("ragged.csv", "width,height\n64,64\n64\n", "Expected 2 columns, got 1"),
    Table("ragged2.csv", "width,height\n64,64\n64\n", [16], skip_bad=True),
    Table("null.jsonl", '{"tokens": 1}\nnull\n', "line 2: None: write an object"),
    Table("nest.jsonl", '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}\n", "recursion"),
    Table("unlike.jsonl", jsonl(*({"tokens": tokens} for tokens in (1, "2", [3]))), [1, 2, 1]),
    Table("tiny", {"a.png": image(8, 64)}, "smaller than a token"),
    Table("broken.jsonl", '{"tokens": 1}\n{"tokens": \n', "line 2: not valid JSON"),
    Table("damaged.parquet", "PAR1 no", "cannot be read as .parquet"),
    Table("musubi.jsonl", jsonl({"image_path": "/d/0.png", "caption": BOAT}), "'/d/0.png'"),
    Table(
        "splits",
        {"data/train_0.csv": "tokens\n1\n", "data/test_0.csv": "tokens\n2\n"},
        "has the splits test, train: give one of them alone",
    ),
    Table("line.csv", f"width,height\n{MANY}0,64\n", "row 100001: width is 0;"),
    Table("cr.csv", f"width,height\r\n{MANY}0,64\r\n", "row 100001: width is 0;"),
    Table("quotes.csv", 'width,height,note\n64,64,"a\nb"\n0,64,c\n', "row 2: width is 0;"),
    Table("blank.csv", "width,height\n64,64\n\n0,64\n", "row 2: width is 0;"),
    Table("blank_first.csv", "\nwidth,height\n64,64\n0,64\n", "row 2: width is 0;"),
    Table("row.jsonl", jsonl(SQUARE, SQUARE | {"width": 0}), "row 2: width is 0;"),
    Table("blank.jsonl", "\n".join([jsonl(SQUARE), jsonl({"width": 0})]), "row 2: width is 0;"),
    Table("comma.csv", 'width,height\n"1280,0",64\n', f"width is 1280,0, {NO_COMMA}"),
    Table("half.csv", "width;height\n1280;3,5\n", f"height is 3,5, {NO_COMMA} 1280"),
    Table("none", lambda _: None, "no such file"),
]
