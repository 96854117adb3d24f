"""The door of a server: what clients send reaches the service, and what it says reaches them."""

import asyncio
import base64
import io
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import numpy as np
import openai
import pytest
from opentelemetry import trace
from PIL import Image

from bascule.errors import ConfigError
from bascule.generate.options import Lora, Prompt
from bascule.serve import guard
from bascule.serve.options import ServeOptions
from tests.helpers.door import Open, multipart, opened_door, png, stepping
from tests.helpers.driven import Driven, driven
from tests.helpers.pages import ROOT, commands_of

GENERATE, EDIT, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"
KEY = "0123456789abcdef"
SIZES: dict[str, Any] = {"width": 256, "height": 256, "steps": 4}  # where a client says none
LIMITS = {"max_pixels": 256 * 256, "max_steps": 50, "max_prompt_chars": 100}
LIMITS |= {"max_body_bytes": 20_000, "max_images": 3, "max_frames": 30}
JSON = "application/json"
HEAD = f"POST {GENERATE} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {JSON}\r\n"


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Open]:
    with opened_door(tmp_path) as door:
        yield door


@pytest.fixture
def videos(tmp_path: Path) -> Iterator[Open]:
    with opened_door(tmp_path, {"model": "tiny-wan"}, kind="video", takes_image=True) as door:
        yield door


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    with opened_door(tmp_path_factory.mktemp("limited"), LIMITS, takes_image=True, room=4) as door:
        yield door


def pixel(data: bytes) -> tuple[int, ...]:
    with Image.open(io.BytesIO(data)) as image:
        return tuple(np.asarray(image)[0, 0].tolist())


# Images, videos, requests


def test_images_by_openais_client(images: Open) -> None:
    extra = {"seed": 5, "steps": 2, "guidance": 1.5, "negative_prompt": "fog", "deadline_s": 60}
    with stepping(images.service):
        made = images.client().images.generate(
            prompt="a boat", n=2, size="64x32", model="tiny", user="me", extra_body=extra
        )
        linked = images.client().images.generate(prompt="é", response_format="url")
    assert [pixel(base64.b64decode(one.b64_json)) for one in made.data] == [(5, 2, 7), (6, 2, 7)]
    assert [one.seed for one in made.data] == [5, 6]
    first, second, third = images.service.asked.values()
    asked: dict[str, Any] = {"width": 64, "height": 32, "steps": 2, "guidance": 1.5}
    asked |= {"prompt": "a boat", "negative_prompt": "fog"}
    assert (first.prompt, second.prompt) == (Prompt(seed=5, **asked), Prompt(seed=6, **asked))
    assert (first.deadline_s, first.must_meet_deadline, first.images) == (60.0, False, [])
    assert third.prompt == Prompt(prompt="é", seed=linked.data[0].seed, **SIZES)
    path = linked.data[0].url.removeprefix(images.url)
    status, content, headers = images.call("GET", path)
    assert status == 200 and pixel(content) == (third.prompt.seed % 256, 4, 7)
    assert headers["content-type"] == "image/png"
    assert headers["x-content-type-options"] == "nosniff"
    assert images.call("GET", "/v1/models")[1]["data"][0]["id"] == "tiny"


def test_loras_by_name(images: Open) -> None:
    style, both = Lora("style"), (Lora("style", 0.5), Lora("b", -1.0))
    text = json.dumps([{"name": "style", "scale": 0.5}, {"name": "b", "scale": -1}])
    form, kind = multipart(("prompt", "a"), ("lora", text))
    for body, media in (
        ({"prompt": "a", "lora": json.loads(text)}, JSON),
        (form, kind),
        ({"prompt": "a", "lora": {"name": "style"}}, JSON),
        ({"prompt": "a", "lora": "style"}, JSON),
        ({"prompt": "a", "lora": None}, JSON),
    ):
        status, made, _ = images.call("POST", "/v1/requests", body, Content_Type=media)
        assert status == 202, made
    found = [one.prompt.lora for one in images.service.asked.values()]
    assert found == [both, both, (style,), (style,), ()]
    row = images.call("GET", "/v1/requests")[1]["data"][0]
    assert row["settings"]["lora"] == json.loads(text)
    for lora, said in (
        ([{"name": "a"}, "a"], "lora: give each adapter once"),
        ([{"path": "/x"}], 'lora: give {"name": NAME, "scale": 0.8}, not'),
        ([{"name": "a", "scale": 1e7}], "lora scale is 10000000.0; it must be finite, at least"),
        ("[", "lora: '[' is not valid JSON: give [{"),
        (3, "lora: "),
    ):
        status, answer, _ = images.call("POST", "/v1/requests", {"prompt": "x", "lora": lora})
        assert (status, answer["error"]["param"]) == (400, "lora"), answer
        assert said in answer["error"]["message"]
    path, row = "/v1/loras", {"id": "new", "object": "lora"}
    assert images.call("GET", path)[1]["data"] == [row | {"id": "style"}]
    assert images.call("POST", path, {"name": "new"})[:2] == (200, row)
    for method, end, body, status, said in (
        ("POST", "", {"name": "wrong"}, 409, "it is loaded already"),
        ("POST", "", {"name": "new", "path": "/x"}, 400, "'path' is not known: give some of name"),
        ("POST", "", {"name": "../new"}, 400, "name is '../new': give 1 to 100 letters, digits"),
        ("POST", "", {"name": "new", "image": "a"}, 400, "'image' is not known: give some of name"),
        ("POST", "", {}, 400, "name is missing: give it"),
        ("DELETE", "/style", None, 400, "rank 1: style stays"),
    ):
        found, answer, _ = images.call(method, f"{path}{end}", body)
        assert (found, answer["error"]["message"][: len(said)]) == (status, said)


def test_a_picture_is_decoded_and_encoded_anew(tmp_path: Path) -> None:
    text = base64.b64encode(png()).decode()
    form, kind = multipart(("prompt", "a"), ("seed", "3"), ("image", png()))
    with opened_door(tmp_path, takes_image=True) as door, stepping(door.service):
        door.client().images.edit(prompt="a", image=png(), extra_body={"seed": 3})
        for body, media in (
            (form, kind),
            ({"prompt": "a", "image": text}, "application/json"),
            ({"prompt": "a", "image": f"data:image/png;base64,{text}"}, "application/json"),
        ):
            assert door.call("POST", EDIT, body, Content_Type=media)[0] == 200
        rotated = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112], exif[0x010E] = 6, "secret"  # turned by 90 degrees; a description
        Image.new("RGB", (4, 3)).save(rotated, "JPEG", exif=exif)
        form, kind = multipart(("prompt", "a"), ("image[]", rotated.getvalue()))
        assert door.call("POST", EDIT, form, Content_Type=kind)[0] == 200
        *same, (turned,) = [one.images for one in door.service.asked.values()]
        (first,) = same[0]
        assert same == [[first]] * 4
        files = [("a.png", png()), ("b.jpg", rotated.getvalue())]
        door.client().images.edit(prompt="a", image=files)
        both = {"prompt": "a", "image": [text, {"image_url": text}], "input_reference": text}
        assert door.call("POST", EDIT, both)[0] == 200
        several = [one.images for one in door.service.asked.values()][-2:]
    assert several == [[first, turned], [first] * 3]
    with Image.open(io.BytesIO(first)) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (4, 3))
        assert np.asarray(image)[0, 0].tolist() == [9, 8, 7]
    with Image.open(io.BytesIO(turned)) as image:
        assert image.size == (3, 4) and not image.getexif() and b"secret" not in turned


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_videos_by_openais_client(videos: Open) -> None:
    api, service = videos.client().videos, videos.service
    made = api.create(prompt="waves", seconds="2", size="64x32", extra_body={"seed": "9"})
    (asked,) = service.asked.values()
    settings: dict[str, Any] = {"width": 64, "height": 32, "steps": 4, "frames": 2 * 16 + 1}
    assert asked.prompt == Prompt(prompt="waves", seed=9, fps=16, **settings)
    assert (made.object, made.status, made.progress) == ("video", "queued", 0)
    assert (made.seconds, made.size, made.model, made.error) == ("2", "64x32", "tiny-wan", None)
    service.step()
    again = api.retrieve(made.id)
    assert (again.status, again.progress, again.completed_at) == ("in_progress", 25, None)
    assert videos.call("GET", f"{VIDEOS}/{made.id}/content")[0] == 409
    with pytest.raises(openai.ConflictError, match="ask again when it is done"):
        api.download_content(made.id)
    for _ in range(3):
        service.step()
    again = api.retrieve(made.id)
    assert (again.status, again.progress) == ("completed", 100)
    assert again.completed_at >= again.created_at
    assert api.download_content(made.id).read() == b"a video of 9"
    assert api.delete(made.id).deleted is True
    with pytest.raises(openai.NotFoundError):
        api.retrieve(made.id)
    other = api.create(prompt="fail", input_reference=("a.png", png()))
    reference = {"image_url": base64.b64encode(png()).decode()}
    body = {"prompt": "x", "input_reference": reference}
    third = videos.call("POST", VIDEOS, body)[1]["id"]
    assert [len(one.images) for one in service.asked.values()] == [0, 1, 1]
    assert api.delete(third).deleted is True
    service.step()
    failed = api.retrieve(other.id)
    assert (failed.status, failed.error.message) == ("failed", "no memory")
    body = {"prompt": "x", "frames": 9}
    assert videos.call("POST", VIDEOS, body)[1]["seconds"] == "0.5"


def test_requests_are_followed_and_cancelled(images: Open) -> None:
    asked = {"prompt": "x", "n": 3, "size": "8x8", "steps": 3, "seed": 1}
    status, made, _ = images.call("POST", "/v1/requests", asked)
    assert status == 202
    first, second, third = (one["id"] for one in made["data"])
    assert re.fullmatch("[0-9a-f]{32}", first)
    row = images.call("GET", f"/v1/requests/{second}")[1]
    assert (row["state"], row["step"], row["num_steps"], row["ends_in_s"]) == ("waiting", 0, 3, 1.5)
    assert (row["prompt"], row["settings"]["width"], row["settings"]["seed"]) == ("x", 8, 2)
    seen: list[tuple[str, int]] = []
    command = ["curl", "-sN", f"{images.url}/v1/requests/{first}/events"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stream:
        assert stream.stdout is not None
        for line in filter(bytes.strip, stream.stdout):
            event = json.loads(line.removeprefix(b"data: "))
            seen.append((event["state"], event["step"]))
            images.service.step()
    assert seen == [("waiting", 0), ("running", 1), ("running", 2), ("done", 3)]
    _, other, _ = images.call("POST", "/v1/requests", asked)
    assert images.call("DELETE", f"/v1/requests/{third}")[1]["state"] == "cancelled"
    listed = images.call("GET", "/v1/requests")[1]
    assert (listed["num_ranks"], listed["model"]) == (2, "tiny")
    states = {one["id"]: one["state"] for one in listed["data"]}
    assert [states[one] for one in (first, second, third)] == ["done", "done", "cancelled"]
    assert len(states) == 6 and states[other["data"][0]["id"]] == "waiting"
    assert pixel(images.call("GET", f"/v1/requests/{first}/content")[1]) == (1, 3, 7)
    images.service.cancel(other["data"][0]["id"])
    images.service.num_ranks = 9
    _, made, _ = images.call("POST", "/v1/requests", {"prompt": "fail"})
    images.service.step()
    failed = made["data"][0]["id"]
    for request_id, code, said in (
        (third, 410, f"request {third} was cancelled"),
        (failed, 500, f"request {failed} failed: no memory"),
        ("0" * 32, 404, "there is no request 000"),
        ("..%2f..%2fetc", 404, "Not Found"),
    ):
        status, answer, _ = images.call("GET", f"/v1/requests/{request_id}/content")
        assert status == code and said in answer["error"]["message"]


# What is refused


def encoded(header: bytes) -> bytes:
    """A form whose text has one more header."""
    form, _ = multipart(("prompt", "x"))
    return form.replace(b"\r\n\r\n", b"\r\n" + header + b"\r\n\r\n")


_PIXELS = base64.b64encode(png(300, 300)).decode()
_FORM, _EDGE = multipart(("prompt", "x"))
_BROKEN: list[tuple[str, bytes, int]] = [  # Content-Type, body, status
    ("text/plain", _FORM, 415),
    ("multipart/form-data", _FORM, 400),
    ("multipart/form-data; boundary=other", _FORM, 400),
    (_EDGE, _FORM[:40], 400),
    (_EDGE, multipart(*[("steps", "1")] * 70)[0], 400),
    (_EDGE, multipart(("prompt", b"\xff"))[0], 400),
    (_EDGE, _FORM[:-10], 400),
    (_EDGE, _FORM.replace(b"x\r\n--", b"\xff\r\n--"), 400),
    (_EDGE, _FORM.replace(b'name="prompt"', b'name="\xff"'), 400),
    (_EDGE, _FORM.replace(b"name=", b"no="), 400),
    (_EDGE, encoded(b"Content-Type: text/plain; charset=x"), 415),
    (_EDGE, encoded(b"Content-Transfer-Encoding: x-own"), 400),
    (_EDGE, encoded(b"Content-Transfer-Encoding: base64"), 400),
    (f"{_EDGE}; charset=latin-1", _FORM, 415),
    (f'{_EDGE}; Charset="punycode"', _FORM, 415),
    (f"{_EDGE}; charset=undefined", _FORM, 415),
    (f"{_EDGE}; charset=", _FORM, 415),
    ("application/json; charset=latin-1", b'{"prompt": "x"}', 415),
    ("application/json; charset=utf-16", '{"prompt": "x"}'.encode("utf-16"), 415),
]
SOON = {"prompt": "x", "deadline_s": 0.5, "must_meet_deadline": True}
_REFUSED: list[tuple[str, Any, int, str, str | None]] = [
    (GENERATE, b"{", 400, "the body is not valid JSON", None),
    (GENERATE, b"\xff\xfe", 400, "the body is not valid JSON", None),
    (GENERATE, b"[" * 9000, 400, "the body is not valid JSON", None),
    (GENERATE, b'{"seed": ' + b"9" * 5000 + b"}", 400, "the body is not valid JSON", None),
    (GENERATE, [], 400, "must be a JSON object", None),
    (GENERATE, {}, 400, "prompt is missing: give it", "prompt"),
    (GENERATE, {"prompt": None}, 400, "prompt is missing", "prompt"),
    (GENERATE, {"prompt": ""}, 400, "prompt is '': give text", "prompt"),
    (GENERATE, {"prompt": ["a"]}, 400, "prompt is ['a']: give text", "prompt"),
    (GENERATE, {"prompt": "x", "negative_prompt": 5}, 400, "is 5: give text", "negative_prompt"),
    (GENERATE, {"prompt": "\ud800"}, 400, "'prompt' holds half of a surrogate pair", "prompt"),
    (GENERATE, {"prompt": "x", "user": "a\udfff"}, 400, "'user' holds half of a surr", "user"),
    (GENERATE, {"prompt": "x", "negative_prompt": "\ud83d"}, 400, "holds ha", "negative_prompt"),
    (GENERATE, {"prompt": "x", "image": {"a\ud800": 1}}, 400, "holds half of", "a\\ud800"),
    (GENERATE, {"prompt": "x", "\ud800": 1}, 400, "'\\ud800' holds half of a surr", "\\ud800"),
    (GENERATE, b'{"prompt": "x", "seed": 1, "seed": 2}', 400, "'seed' comes several times", "seed"),
    (GENERATE, b'{"prompt": ' + b"[" * 12_000, 400, "the body has more than 10,200 values", None),
    (GENERATE, {"prompt": "x", "size": "999999x999999"}, 400, "give at most 65,536", "size"),
    (GENERATE, {"prompt": "x", "size": "1x40000"}, 400, "40,000 pixels a side are too", "size"),
    (GENERATE, {"prompt": "x", "num_inference_steps": 51}, 400, "51 steps are too many", "steps"),
    (GENERATE, {"prompt": "x", "num_inference_steps": 5, "steps": 6}, 400, "give one of", "steps"),
    (f"{GENERATE}?steps=9", {"prompt": "x"}, 400, "?steps=9: no query is read", None),
    (GENERATE, {"prompt": "x", "stps": 3}, 400, "'stps' is not known: give some of", "stps"),
    (GENERATE, {"prompt": "x", "a" * 500: 3}, 400, f"'{'a' * 80}..' is not known", "a" * 500),
    (GENERATE, {"prompt": "x" * 101}, 400, "prompt: 101 characters are too many", "prompt"),
    (GENERATE, {"prompt": "x", "size": "8"}, 400, "size is '8': give WxH in pixels, such", "size"),
    (GENERATE, {"prompt": "x", "size": "0x8"}, 400, "size is '0x8': give WxH in pixels", "size"),
    (GENERATE, {"prompt": "x", "size": [8, 8]}, 400, "size is [8, 8]: give WxH in pixels", "size"),
    (GENERATE, {"prompt": "x", "width": 0, "height": 8}, 400, "size is '0x8': give WxH", "size"),
    (GENERATE, {"prompt": "x", "size": "257x256"}, 400, "65,792 pixels are too many", "size"),
    (GENERATE, {"prompt": "x", "steps": True}, 400, "steps is True: give a number", "steps"),
    (GENERATE, {"prompt": "x", "steps": 1.5}, 400, "steps is 1.5: give a whole number", "steps"),
    (GENERATE, {"prompt": "x", "steps": {}}, 400, "steps is {}: give a whole number, at", "steps"),
    (GENERATE, {"prompt": "x", "steps": 51}, 400, "51 steps are too many", "steps"),
    (GENERATE, {"prompt": "x", "steps": 0}, 400, "0: give a whole number, at least 1", "steps"),
    (GENERATE, {"prompt": "x", "num_inference_steps": "many"}, 400, "is 'many': give a", "steps"),
    (GENERATE, {"prompt": "x", "n": 4}, 400, "give at most 3", "n"),
    (GENERATE, {"prompt": "x", "n": 0}, 400, "n is 0: give a whole number, at least 1", "n"),
    (GENERATE, b'{"prompt": "x", "guidance": NaN}', 400, "is nan: give a number, at", "guidance"),
    (GENERATE, {"prompt": "x", "guidance": 1e7}, 400, "at least 0, at most 1,000,0", "guidance"),
    (GENERATE, {"prompt": "x", "deadline_s": 0}, 400, "is 0: give a number, above 0", "deadline_s"),
    (GENERATE, {"prompt": "x", "seed": -1}, 400, "seed is -1: give a whole number, at", "seed"),
    (GENERATE, {"prompt": "x", "seed": 2**63}, 400, "at most 9,223,372,036,854,775,807", "seed"),
    (GENERATE, {"prompt": "x", "seed": 2**63 - 1, "n": 2}, 400, "is too large", "seed"),
    (GENERATE, {"prompt": "x", "model": "sora-2"}, 404, "model 'sora-2' is not served", "model"),
    (GENERATE, {"prompt": "x", "stream": "no way"}, 400, "'no way': give true or fal", "stream"),
    (GENERATE, {"prompt": "x", "quality": "hd"}, 400, "'hd': give auto or standard", "quality"),
    (GENERATE, {"prompt": "x", "output_format": 3}, 400, "png or jpeg or we", "output_format"),
    (GENERATE, {"prompt": "x", "response_format": "b64"}, 400, "b64_json", "response_format"),
    (GENERATE, {"prompt": "x", "partial_images": 2}, 400, "2: give 0, as eve", "partial_images"),
    (GENERATE, {"prompt": "x", "lora": [3]}, 400, 'lora: give {"name": NAME, "scale"', "lora"),
    (GENERATE, {"prompt": "x", "lora": "gone:2"}, 400, "lora: 'gone' is not loaded; load", "lora"),
    (GENERATE, {"prompt": "x", "size": "12x8"}, 400, "width is 12: give a multiple of 8", "size"),
    (GENERATE, {"prompt": "x", "image": _PIXELS}, 400, "none: use /v1/images/edits", "image"),
    (EDIT, {"prompt": "x"}, 400, "image is missing", "image"),
    (EDIT, {"prompt": "x", "image": _PIXELS}, 400, "has more than 65,536 pixels", "image"),
    (EDIT, {"prompt": "x", "image": "http://x.y/z.png"}, 400, "no URL is opened here", "image"),
    (EDIT, {"prompt": "x", "image": {"image_url": "file:///x"}}, 400, "no URL is opened", "image"),
    (EDIT, {"prompt": "x", "image": "%%"}, 400, "not valid base64", "image"),
    (EDIT, {"prompt": "x", "image": "AAAA"}, 400, "cannot be read: send one of PNG", "image"),
    (EDIT, {"prompt": "x", "image": {}}, 400, "send a file, or text in base64", "image"),
    (EDIT, {"prompt": "x", "image": [None]}, 400, "send a file, or text in base64", "image"),
    (EDIT, {"prompt": "x", "image[]": ["a"] * 9, "image": ["b"] * 8}, 400, "at most 16", "image"),
    (EDIT, {"prompt": "x", "mask": "AAAA"}, 400, "'mask' is not known", "mask"),
    (VIDEOS, {"prompt": "x"}, 404, "tiny makes images: use /v1/images/generations", None),
    ("/nowhere", {}, 404, "POST /nowhere: Not Found", None),
    ("/health", {}, 405, "POST /health: Method Not Allowed", None),
    (GENERATE, {"prompt": "x" * 20_000}, 413, "larger than 20,000 bytes", None),
    (GENERATE, SOON, 422, "the request would be done in 4.2 s", "deadline_s"),
]


def test_what_is_wrong_is_one_sentence(limited: Open) -> None:
    broken = [(GENERATE, body, code, "", mock.ANY, media) for media, body, code in _BROKEN]
    for path, body, code, said, param, media in [*((*row, JSON) for row in _REFUSED), *broken]:
        status, answer, _ = limited.call("POST", path, body, Content_Type=media)
        error, row = answer["error"], (path, code, said, answer)
        assert status == code and said in error["message"] and error["param"] == param, row
        assert error["type"] == "invalid_request_error" and 0 < len(error["message"]) < 400, row
        assert not limited.service.asked, row


def test_what_is_wrong_with_a_video_is_one_sentence(videos: Open) -> None:
    both = {"prompt": "x", "seconds": 2, "frames": 9}
    for fields, said in ((both, "give one of them"), ({"prompt": "x", "n": 2}, "'n' is not known")):
        status, answer, _ = videos.call("POST", VIDEOS, fields)
        assert status == 400 and said in answer["error"]["message"]
    assert videos.call("POST", GENERATE, {"prompt": "x"})[0] == 404
    assert not videos.service.asked


def test_texts_of_forms_are_utf_8(images: Open) -> None:
    form, media = multipart(("prompt", "é"), ("num_inference_steps", "3"))
    named = form.replace(b"\r\n\r\n", b"\r\nContent-Type: text/plain; charset=UTF-8\r\n\r\n")
    based = encoded(b"Content-Transfer-Encoding: base64").replace(b"\r\nx\r\n", b"\r\nw6k=\r\n")
    for body, kind in (
        (form, media),
        (named, f"{media}; charset=UTF-8"),
        (based, media),
        ('{"prompt": "é"}'.encode(), "application/json; charset=utf-8"),
    ):
        assert images.call("POST", "/v1/requests", body, Content_Type=kind)[0] == 202
    prompts = [one.prompt for one in images.service.asked.values()]
    assert [(one.prompt, one.steps) for one in prompts] == [("é", 3), ("é", 3), ("é", 4), ("é", 4)]


def test_a_picture_that_grows_is_not_decoded(limited: Open) -> None:
    for side in (300, 10_000, 100_000):
        head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
        bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head
        bomb += struct.pack(">II", zlib.crc32(head), 2**20) + b"IDAT" + zlib.compress(b"")
        form, kind = multipart(("prompt", "x"), ("image", bomb))
        status, answer, _ = limited.call("POST", EDIT, form, Content_Type=kind)
        assert status == 400 and "has more than 65,536 pixels" in answer["error"]["message"]


def test_bodies_are_counted_as_they_come(limited: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk() -> Iterator[bytes]:
        for _ in range(30):
            yield b"x" * 1000

    lines = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in chunk()) + b"0\r\n\r\n"
    for sent in (f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + lines, sized(99999999999)):
        assert exchanged(limited, sent).startswith(b"HTTP/1.1 413 "), sent[:200]
    monkeypatch.setattr(guard, "_BODIES", 0)  # another client's bytes are on their way
    answer = exchanged(limited, sized(900) + b" " * 100)
    assert answer.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in answer
    monkeypatch.setattr(guard, "_BODY_S", 0.2)
    monkeypatch.setattr(guard, "_BODIES", 9)
    answer = exchanged(limited, sized(900) + b" " * 100)
    assert answer.startswith(b"HTTP/1.1 408 ") and not limited.service.asked


def asking(door: Open, *asked: tuple[str, Any, str]) -> list[tuple[Thread, list[Any]]]:
    """Calls that wait in the queue, by their threads and what they will be answered."""
    calls: list[tuple[Thread, list[Any]]] = []
    for path, body, media in asked:
        answers: list[Any] = []

        def call(path: str = path, body: Any = body, media: str = media, to: Any = answers) -> None:
            to.extend(door.call("POST", path, body, Content_Type=media))

        calls.append((Thread(target=call), answers))
        calls[-1][0].start()
        while len(door.service.asked) < len(calls):
            assert calls[-1][0].is_alive(), answers
            time.sleep(0.01)
    return calls


def test_bodies_count_while_they_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer: clients that wait in the queue keep no others out."""
    monkeypatch.setattr(guard, "_BODIES", 2)
    form, media = multipart(("prompt", "x"), ("image", png()), ("user", "u" * 900))
    with opened_door(tmp_path, {"max_body_bytes": 1500}, takes_image=True) as door:
        calls = asking(door, *[(EDIT, form, media)] * 4, *[(EDIT, body_of(900), JSON)] * 4)
        with stepping(door.service):
            for thread, answers in calls:
                thread.join(60)
                assert answers[0] == 200
        assert door.call("POST", "/v1/requests", form, Content_Type=media)[0] == 202


def body_of(num_bytes: int) -> dict[str, str]:
    picture = base64.b64encode(png()).decode()
    return {"prompt": "x", "image": picture, "user": "u" * num_bytes}


@pytest.mark.parametrize("form", ["b64_json", "url"])
def test_images_that_are_not_done_are_errors(form: str, images: Open) -> None:
    """Whatever is asked for; and no client asks again for what was accepted."""
    body = {"prompt": "x", "response_format": form}
    (thread, answers), (failing, failures) = asking(
        images, (GENERATE, body, JSON), (GENERATE, body | {"prompt": "fail"}, JSON)
    )
    first = next(k for k, one in images.service.asked.items() if one.prompt.prompt == "x")
    images.call("DELETE", f"/v1/requests/{first}")
    images.service.step()
    for call in (thread, failing):
        call.join(60)
    for (status, answer, headers), code, name in (
        (answers, 410, "request_cancelled"),
        (failures, 500, "request_failed"),
    ):
        assert (status, answer["error"]["code"]) == (code, name)
        assert headers["x-should-retry"] == "false"


def sized(num_bytes: int) -> bytes:
    """The head of a request whose body is to have so many bytes."""
    return f"{HEAD}Content-Length: {num_bytes}\r\n\r\n".encode()


def exchanged(door: Open, sent: bytes) -> bytes:
    """The first answer on a connection of bytes."""
    with door.connect(sent) as connection:
        return connection.recv(4096)


def test_silent_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_HEADERS_S", 0.3)
    with opened_door(tmp_path) as door:
        for sent in (b"", b"GET /health HTT"):
            assert exchanged(door, sent) == b""
        assert door.call("GET", "/health")[0] == 200


def test_many_connections_keep_no_other_client_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without a whole request make room; those with one are told when to come again."""
    post = b"POST /v1/requests HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    sent = b"", b"GET /health HTT", post + b"Content-Length: 99\r\n\r\n{", b"GET / HTTP/1.1\r\n"
    monkeypatch.setattr(guard, "_NEW_S", 0.0)
    with opened_door(tmp_path, {"most_waiting": 1}) as door, ExitStack() as stack:  # 1002
        made = door.call("POST", "/v1/requests", {"prompt": "x"})[1]["data"][0]["id"]
        follow = b"GET /v1/requests/%s/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % made.encode()

        def connect(data: bytes) -> socket.socket:
            return stack.enter_context(door.connect(data))

        follower = connect(follow)
        assert follower.recv(12) == b"HTTP/1.1 200"
        for place in range(1100):
            connect(sent[place % len(sent)])
        assert door.call("GET", "/health")[0] == door.call("GET", "/v1/models")[0] == 200
        for _ in range(990):
            assert connect(follow).recv(12) == b"HTTP/1.1 200"
        assert any(connect(follow).recv(12) == b"HTTP/1.1 503" for _ in range(30))
        status, answer, headers = door.call("GET", "/v1/models")
        assert (status, headers["retry-after"]) == (503, "1")
        assert "1,002 calls are open, this server's limit" in answer["error"]["message"]
        assert door.call("GET", "/health")[0] == 200  # for whoever looks after the server
        door.service.step()
        news = b""
        while b"running" not in news:
            more = follower.recv(4096)
            assert more, news
            news += more


def test_a_full_queue_says_when_to_come_again(tmp_path: Path) -> None:
    with opened_door(tmp_path, room=2) as door:
        assert door.call("POST", "/v1/requests", {"prompt": "x", "n": 2})[0] == 202
        status, answer, headers = door.call("POST", GENERATE, {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert answer["error"]["type"] == "rate_limit_error" and headers["retry-after"] == "3"
        with pytest.raises(openai.RateLimitError, match="the queue is full"):
            door.client().images.generate(prompt="x")


# Keys and addresses


def test_the_key_opens(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    with opened_door(tmp_path, {"api_key_file": tmp_path / "key"}) as door:
        for header, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer "}, 401),
            ({"Authorization": "Bearer caf\xe9"}, 401),
            ({"Authorization": f"Basic {KEY}"}, 401),
            ({"Authorization": f"bearer {KEY}"}, 200),
            ({"Authorization": f"Bearer {KEY}", "Host": "x.y", "Origin": "https://x.y"}, 200),
        ):
            found = door.call("GET", "/v1/models", None, **header)
            assert found[0] == status, header
            assert ("www-authenticate" in found[2]) == (status == 401)
            assert door.call("POST", GENERATE, {}, **header)[0] == (400 if status == 200 else 401)
        assert door.call("GET", "/health")[0] == door.call("GET", "/")[0] == 200
        assert door.call("GET", "/metrics")[0] == door.call("GET", "/nowhere")[0] == 401
        with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
            door.client("wrong").models.list()
        assert [one.id for one in door.client(KEY).models.list()] == ["tiny"]


def test_pages_of_others_cannot_call_without_a_key(images: Open) -> None:
    port = images.url.rpartition(":")[2]
    for headers, status in (
        ({"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}, 202),
        ({"Host": "LOCALHOST"}, 202),
        ({"Host": "evil.example"}, 403),
        ({"Host": f"evil.example:{port}"}, 403),
        ({"Host": f"127.0.0.1:{port}", "Origin": "http://evil.example"}, 403),
        ({"Host": f"127.0.0.1:{port}", "Origin": "null"}, 403),
    ):
        assert images.call("POST", "/v1/requests", {"prompt": "x"}, **headers)[0] == status
    assert len(images.service.asked) == 2
    for path in ("/health", "/"):  # they hold no data
        assert images.call("GET", path, Host="evil.example")[0] == 200


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.serve.options.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'bascule[serve]'")):
        ServeOptions().check()


def test_an_address_that_is_taken(images: Open, tmp_path: Path) -> None:
    port = int(images.url.rpartition(":")[2])
    taken = rf"--port {port}: cannot listen there: Address already in use"
    with pytest.raises(ConfigError, match=taken), opened_door(tmp_path, {"port": port}):
        pass
    with opened_door(tmp_path, {"host": "::1"}) as door:
        assert door.url.startswith("http://[::1]:") and door.call("GET", "/health")[0] == 200


# Many clients, clients that go, and the end


def test_a_client_that_vanishes_cancels_its_requests(images: Open) -> None:
    seen, cancelled = threading.Event(), threading.Semaphore(0)
    images.service.on_cancel, images.service.on_submit = cancelled.release, seen.set
    body = json.dumps({"prompt": "x", "n": 2}).encode()
    _, other, _ = images.call("POST", "/v1/requests", {"prompt": "other"})
    seen.clear()
    with images.connect(sized(len(body)) + body):
        assert seen.wait(60)
    assert all(cancelled.acquire(timeout=60) for _ in range(2))
    states = [one.state for one in images.service.of.values()]
    assert states == ["waiting", "cancelled", "cancelled"]
    images.connect(sized(len(body)) + body[:-5]).close()  # it goes while it sends
    with stepping(images.service):
        assert images.client().images.generate(prompt="x").data
    assert images.call("GET", f"/v1/requests/{other['data'][0]['id']}")[1]["state"] == "done"
    assert len(images.service.asked) == 4


def test_a_thousand_clients_at_once(tmp_path: Path) -> None:
    body = b'{"prompt": "x", "steps": 1, "size": "8x8"}'
    head = f"{HEAD}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"

    async def asks(door: Open, sent: bytes) -> tuple[int, bytes]:
        host, port = door.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        answer = await reader.read()
        writer.close()
        return int(answer.split()[1]), answer

    async def all_ask(door: Open) -> list[tuple[int, bytes]]:
        ask = [asyncio.ensure_future(asks(door, head.encode() + body)) for _ in range(1000)]
        while sum(one.done() for one in ask) < 400 or len(door.service.of) < 600:
            await asyncio.sleep(0.01)
        for _ in range(5):  # 600 wait, and others are answered
            healthy = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
            assert (await asyncio.wait_for(asks(door, healthy), 10))[0] == 200
        with stepping(door.service, 0.001):
            return await asyncio.gather(*ask)

    with opened_door(tmp_path, room=600, num_ranks=50) as door:
        threads = threading.active_count()
        answers = asyncio.run(all_ask(door))
        assert Counter(status for status, _ in answers) == {200: 600, 429: 400}
        assert all(b"retry-after: 3" in answer for status, answer in answers if status == 429)
        made = [answer for status, answer in answers if status == 200]
        ids = {re.findall(rb'"id":"(\w+)"', answer)[0].decode() for answer in made}
        assert ids == door.service.of.keys()
        assert threading.active_count() - threads < 60  # not 600
        assert door.door._watchers == {}
        assert door.call("GET", "/health")[0] == 200


def test_the_end_answers_who_waits(tmp_path: Path) -> None:
    with opened_door(tmp_path) as door:
        made = door.call("POST", "/v1/requests", {"prompt": "x"})[1]["data"][0]["id"]
        answers: list[Any] = []
        calls: Any = ("POST", GENERATE, {"prompt": "x"}), ("GET", f"/v1/requests/{made}/events")
        threads = [Thread(target=lambda to=to: answers.append(door.call(*to))) for to in calls]
        for thread in threads:
            thread.start()
        while len(door.door._watchers) < 2:
            time.sleep(0.01)
    for thread in threads:
        thread.join(60)
    ends = {status: body for status, body, _ in answers}
    assert "resumes at its next start" in ends[503]["error"]["message"]
    (headers,) = (headers for status, _, headers in answers if status == 503)
    assert headers["x-should-retry"] == "false"  # it would be made twice
    assert ends[200].count(b"data: ") == 1
    assert [one.state for one in door.service.of.values()] == ["waiting"] * 2  # they are kept


def test_the_service_says_that_it_is_ill(images: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    assert images.call("GET", "/health")[:2] == (200, {"status": "ok"})
    images.service.reason = "rank 1 is gone"
    status, answer, _ = images.call("GET", "/health")
    assert (status, answer["error"]["message"]) == (503, "rank 1 is gone")
    status, answer, headers = images.call("POST", GENERATE, {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (503, "closing")
    assert headers["retry-after"] == "10" and "x-should-retry" not in headers
    images.service.reason = "OSError: no space: '/srv/my/spool/outputs/a.png'"
    calls: list[Any] = [("GET", "/health"), ("POST", "/v1/requests", {"prompt": "x"})]
    for call in calls:
        status, answer, _ = images.call(*call)
        assert (status, answer["error"]["message"]) == (503, "OSError: no space: 'a.png'")
    monkeypatch.setattr("bascule.serve.door._HEALTH_S", 0.1)
    slow = threading.Event()
    images.service.health = lambda: str(slow.wait(5))
    status, answer, _ = images.call("GET", "/health")
    slow.set()
    assert status == 503 and "has not answered" in answer["error"]["message"]
    images.service.statuses = lambda: 1 / 0  # pyright: ignore
    status, answer, _ = images.call("GET", "/v1/requests")
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "division" not in answer["error"]["message"]


def test_answers_name_no_folders_and_the_log_no_mistakes_of_clients(
    images: Open, caplog: pytest.LogCaptureFixture
) -> None:
    form, _ = multipart(("prompt", "x"))
    media = "multipart/form-data; boundary=other"
    assert images.call("POST", GENERATE, form, Content_Type=media)[0] == 400
    assert images.call("POST", GENERATE, {"prompt": "x", "a": 1})[0] == 400
    made = images.call("POST", "/v1/requests", {"prompt": "fail"})[1]["data"][0]["id"]
    images.service.fails_with = "ValueError: no\n  /home/me/model/part.bin"
    images.service.step()
    assert images.call("GET", f"/v1/requests/{made}")[1]["reason"] == "ValueError: no\n  part.bin"
    status, answer, _ = images.call("GET", f"/v1/requests/{made}/content")
    assert status == 500 and "/home" not in answer["error"]["message"]
    assert not caplog.records


def test_a_key_that_others_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path := tmp_path / "key").write_text(KEY)
    for mode, num in ((0o600, 0), (0o400, 0), (0o640, 1), (0o604, 2)):
        path.chmod(mode)
        with opened_door(tmp_path, {"api_key_file": path}):
            assert len(caplog.records) == num
    assert f"can read {path}: chmod 600 {path}" in caplog.records[0].getMessage()


def test_metrics_are_those_of_the_service(images: Open) -> None:
    status, text, headers = images.call("GET", "/metrics")
    assert (status, text) == (200, images.service.metrics())
    assert headers["content-type"].startswith("text/plain; version=")


def test_the_span_of_a_client_is_the_parent(images: Open, caplog: pytest.LogCaptureFixture) -> None:
    for header, name in (
        (f"00-{'a' * 32}-{'b' * 16}-01", "b" * 16),
        (f"00-{'a' * 32}-{'0' * 16}-01", "0" * 16),
        ("x" * 1000, "0" * 16),
    ):
        sent = {"traceparent": header, "tracestate": "=,=" * 300}
        assert images.call("POST", "/v1/requests", {"prompt": "a"}, **sent)[0] == 202
        span = trace.get_current_span(images.service.parent).get_span_context()
        assert trace.format_span_id(span.span_id) == name
    assert not caplog.records


# The page, the guide


def ask_on(page: Driven, prompt: str, **settings: object) -> None:
    """Type a prompt and settings into the form, and submit it."""
    page.until("!document.querySelector('#try button').disabled")
    for name, value in ({"size": "", "steps": "", "prompt": prompt} | settings).items():
        page.run(f"document.querySelector('#try [name={name}]').value = {json.dumps(value)}")
    page.run("document.querySelector('#try button').click()")


def test_the_page_makes_pictures_and_cancels(images: Open, tmp_path: Path) -> None:
    """On a phone, without a key."""
    evil, service = "<img src=x onerror=alert(1)>", images.service
    with driven(tmp_path / "profile") as page:
        page.open(images.url, width=390, height=844)
        page.until("document.body.innerText.includes('nothing yet: try a prompt above')")
        ask_on(page, evil, size="999999x999999")
        page.until("document.getElementById('wrong').innerText.includes('at most 4,194,304')")
        assert page.run("document.querySelector('[aria-invalid]').name") == "size"
        ask_on(page, evil, size="64x32", steps=2, seed=5)
        page.until("document.querySelectorAll('#open li').length === 1")
        assert page.run("document.getElementById('wrong').innerText") == ""
        ask_on(page, "word" * 99)
        ask_on(page, "third")
        page.until("document.querySelectorAll('#open li').length === 3")
        service.step()
        page.until("document.body.innerText.includes('2 running, 1 waiting, 0 paused; 2 of 2')")
        bars = page.run("[...document.querySelectorAll('progress')].map(bar => bar.title)")
        assert bars == ["1 of 2 steps", "1 of 4 steps", "0 of 4 steps"]
        page.run("document.querySelectorAll('#open button')[1].click()")
        page.until("document.querySelector('#ended .cancelled')")
        service.step()
        page.until("document.querySelector('.output')")
        page.run("document.querySelector('.output').scrollIntoView()")  # only then it is loaded
        page.until("document.querySelector('#ended img')?.naturalWidth === 1")
        assert page.run("document.querySelectorAll('img').length") == 1  # no prompt is HTML
        assert page.run("document.querySelector('#ended a[download]').download").endswith(".png")
        assert page.run("document.documentElement.scrollWidth") <= 390
        assert page.run("document.querySelector('#frames').hidden") is True
    assert page.errors[1:] == []  # the first is the size, which was refused
    first, second, third = service.of.values()
    asked = {"prompt": evil, "width": 64, "height": 32, "steps": 2, "seed": 5}
    assert (first.state, second.state, third.state) == ("done", "cancelled", "running")
    assert first.prompt == Prompt(**asked)
    path = f"/v1/requests/{first.id}/cancel"  # unlike DELETE it leaves what is done
    assert images.call("POST", path)[1]["state"] == "done" and first.id in service.of


def test_the_page_asks_for_the_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    options = {"api_key_file": tmp_path / "key", "model": "tiny-wan"}
    with (
        opened_door(tmp_path, options, kind="video", takes_image=True) as door,
        driven(tmp_path / "profile") as page,
    ):
        page.open(door.url)
        page.until("document.getElementById('answer').innerText.includes('needs its key')")
        for key, said in (("x" * 16, "this key is wrong"), (KEY, "0 running")):
            page.run(f"document.querySelector('[type=password]').value = '{key}'")
            page.run("document.querySelector('#login button').click()")
            page.until(f"document.getElementById('answer').innerText.includes('{said}')")
        ask_on(page, "waves", frames=9)
        with stepping(door.service):  # its video is not one
            page.until("document.querySelector('.output')")
            page.run("document.querySelector('.output').scrollIntoView()")
            page.until("document.body.innerText.includes('cannot show it: download it')")
        assert page.run("document.querySelector('#ended a[download]').download").endswith(".mp4")
        page.open(f"{door.url}/docs")
        page.until("document.getElementById('api').open")
        said = page.run("document.getElementById('api').innerText")
    assert [one.prompt.frames for one in door.service.asked.values()] == [9]
    paths = door.door._app.openapi()["paths"].keys() | {"/openapi.json"}
    assert [path for path in paths if path not in said] == []


def test_the_guide_runs(
    images: Open, videos: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of curl, each with the id that the one before it was answered with."""
    monkeypatch.chdir(tmp_path)
    images.service.takes_image, request_id, num = True, "", 0
    with stepping(images.service), stepping(videos.service):
        for words in commands_of("docs/serve.md"):
            if words[0] != "curl":
                continue
            door = videos if "/v1/videos" in " ".join(words) else images
            words = [w.replace("http://127.0.0.1:8000", door.url) for w in words]
            words = [w.replace("/ID", f"/{request_id}") for w in words]
            command = [*words, "--fail-with-body"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, (words, done.stdout)
            if found := re.search('"id":"([0-9a-f]{32})"', done.stdout):
                request_id = found[1]
            num += 1
            while any(not one.has_ended for one in door.service.statuses()):
                time.sleep(0.01)
    assert num == 10
    assert pixel(Path("boat.png").read_bytes())[1:] == (4, 7)
    assert Path("waves.mp4").read_bytes().startswith(b"a video of ")
    assert [len(one.images) for one in images.service.asked.values()] == [0, 0, 1]
    assert [len(one.images) for one in videos.service.asked.values()] == [1]


def test_the_example_runs(images: Open, tmp_path: Path) -> None:
    program = str(ROOT / "examples" / "serve_client.py")
    command = [sys.executable, program, images.url]
    with stepping(images.service):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["written: boat-7.png", "written: boat-8.png"]
    assert done.stdout.splitlines()[-1] == "done, step 4 of 4"
    names = {"boat-7.png": (7, 4, 7), "boat-8.png": (8, 4, 7), "mill.png": (9, 4, 7)}
    assert {name: pixel((tmp_path / name).read_bytes()) for name in names} == names
