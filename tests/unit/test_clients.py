"""Clients of the field: each call is answered, or refused with the name of a field of ours."""

import base64
import inspect
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.resources import Images, Models, Videos
from PIL import Image

from bascule.generate.options import Prompt
from bascule.serve import schema
from bascule.serve.forms import ImageForm, VideoForm
from tests.helpers.door import Open, multipart, opened_door, png, stepping

GENERATE, EDIT, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"
PICTURE = "data:image/png;base64," + base64.b64encode(png()).decode()
FILE = "a.png", png()
_OURS = {*ImageForm.model_fields, *VideoForm.model_fields}

pytestmark = pytest.mark.filterwarnings("ignore:(The Sora API|deprecated):DeprecationWarning")


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Open]:
    with opened_door(tmp_path, takes_image=True) as door, stepping(door.service):
        yield door


@pytest.fixture
def videos(tmp_path: Path) -> Iterator[Open]:
    options = {"model": "tiny-wan"}
    with opened_door(tmp_path, options, kind="video", takes_image=True) as door:
        with stepping(door.service):
            yield door


def made_as(data: bytes) -> str:
    with Image.open(io.BytesIO(data)) as image:
        return str(image.format)


def latest(door: Open) -> Prompt:
    return list(door.service.asked.values())[-1].prompt


# OpenAI's client: all of its calls, and all of their arguments

_Calls = dict[str, tuple[Callable[[Any, str], Any], int | None]]
_IMAGES: _Calls = {  # by name: what is called with the id of a request; the status of a refusal
    "generate": (lambda api, _: api.generate(prompt="x").data[0].b64_json, None),
    "edit": (lambda api, _: api.edit(prompt="x", image=FILE).data[0].b64_json, None),
    "create_variation": (lambda api, _: api.create_variation(image=FILE), 404),
}
_VIDEOS: _Calls = {
    "create": (lambda api, _: api.create(prompt="x").status == "queued", None),
    "create_and_poll": (
        lambda api, _: api.create_and_poll(prompt="x", poll_interval_ms=1).status == "completed",
        None,
    ),
    "poll": (lambda api, one: api.poll(one, poll_interval_ms=1).progress == 100, None),
    "retrieve": (lambda api, one: api.retrieve(one).model == "tiny-wan", None),
    "list": (lambda api, one: one in [video.id for video in api.list(limit=1)], None),
    "download_content": (lambda api, one: api.download_content(one).read()[:7] == b"a video", None),
    "edit": (lambda api, _: api.edit(prompt="x", video=FILE), 405),
    "extend": (lambda api, _: api.extend(prompt="x", seconds="4", video=FILE), 405),
    "create_character": (lambda api, _: api.create_character(name="x", video=FILE), 405),
    "get_character": (lambda api, _: api.get_character("x"), 404),
    "remix": (lambda api, one: api.remix(one, prompt="x"), 404),
    "delete": (lambda api, one: api.delete(one).deleted, None),
}
_MODELS: _Calls = {
    "list": (lambda api, _: [one.id for one in api.list()] == ["tiny"], None),
    "retrieve": (lambda api, _: api.retrieve("tiny").created > 0, None),
    "delete": (lambda api, _: api.delete("tiny"), 405),
}


@pytest.mark.parametrize(
    ("resource", "calls"), [(Images, _IMAGES), (Videos, _VIDEOS), (Models, _MODELS)]
)
def test_every_call_of_openais_client(
    resource: type, calls: _Calls, request: pytest.FixtureRequest
) -> None:
    public = {name for name, one in vars(resource).items() if inspect.isfunction(one)}
    assert calls.keys() == {name for name in public if name[0] != "_"}
    door = request.getfixturevalue("videos" if resource is Videos else "images")
    api = getattr(door.client(), resource.__name__.lower())
    name = api.create_and_poll(prompt="x").id if resource is Videos else ""
    for what, (call, refused) in calls.items():
        if refused is None:
            assert call(api, name), what
            continue
        with pytest.raises(openai.APIStatusError, match="/docs lists what is served") as error:
            call(api, name)
        assert error.value.status_code == refused, what


_COMMON: dict[str, tuple[list[Any], list[Any]]] = {  # by argument: answered, refused
    "prompt": (["x"], [""]),
    "model": (["tiny"], ["gpt-image-2"]),
    "n": ([2], [9]),
    "size": (["64x32", "auto"], ["8"]),
    "quality": (["auto", "standard"], ["low", "medium", "high", "hd"]),
    "background": (["auto", "opaque"], ["transparent"]),
    "output_format": (["png", "jpeg", "webp"], ["gif", "svg"]),
    "output_compression": ([100], [50, 101]),  # of a PNG
    "response_format": (["b64_json", "url", "file"], ["text"]),
    "stream": ([False], []),  # True: below
    "partial_images": ([0], [1, 3]),
    "user": (["me"], []),
    "safety_identifier": (["me"], []),
    "complexity": ([], ["low"]),
    "frame_count": ([], [4]),
    "frame_duration_ms": ([], [200]),
    "svg": ([], [{"model": "x"}]),
}
_GENERATE = _COMMON | {"moderation": (["low", "auto"], ["high"]), "style": ([], ["vivid"])}
_EDIT = _COMMON | {"input_fidelity": ([], ["high"]), "mask": ([], [FILE]), "markup": ([], [FILE])}
_EDIT |= {"image": ([FILE, [FILE], [FILE] * 16], [[FILE] * 17])}
_CREATE: dict[str, tuple[list[Any], list[Any]]] = {
    "prompt": (["x"], [""]),
    "model": (["tiny-wan"], ["sora-2"]),
    "seconds": (["4"], ["-1"]),
    "size": (["64x32"], ["8"]),
    "input_reference": ([FILE], [("a.png", b"x")]),  # its dict of a URL it refuses itself
}


@pytest.mark.parametrize(
    ("method", "table"),
    [(Images.generate, _GENERATE), (Images.edit, _EDIT), (Videos.create, _CREATE)],
)
def test_every_argument_of_openais_client(
    method: Any, table: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    takes = inspect.signature(inspect.unwrap(method)).parameters
    takes = {name for name in takes if not name.startswith("extra_")} - {"self", "timeout"}
    assert table.keys() == takes
    door = request.getfixturevalue("videos" if method is Videos.create else "images")
    api = getattr(door.client(), "videos" if method is Videos.create else "images")
    call = getattr(api, method.__name__)
    settings: dict[str, Any] = {"prompt": "x"} | ({"image": FILE} if "image" in takes else {})
    for name, (answered, refused) in table.items():
        for value in answered:
            assert call(**settings | {name: value}), (name, value)
        num = len(door.service.asked)
        for value in refused:
            with pytest.raises(openai.APIStatusError) as error:
                call(**settings | {name: value})
            found = error.value.param or ""
            assert found.startswith(name) or (name, found) == ("input_reference", "image"), found
            assert error.value.status_code in (400, 404), (name, value)
        assert len(door.service.asked) == num, name


# Requests of vLLM-Omni's and SGLang's pages, and of aiperf

_WAVES = {"width": "1280", "height": "720", "num_frames": "80", "fps": "16"}
_WAVES_ASKED = {"width": 1280, "height": 720, "frames": 80, "fps": 16, "steps": 4}
_PEERS: list[tuple[str, Any, str | dict[str, Any]]] = [  # path, body; our field, or what is made
    # docs.vllm.ai/projects/vllm-omni: image_generation_api
    (GENERATE, {"prompt": "x", "size": "1024x1024", "seed": 42}, {"width": 1024, "seed": 42}),
    (GENERATE, {"prompt": "x", "seed": 42, "response_format": "file"}, {"seed": 42}),
    (GENERATE, {"prompt": "x", "num_inference_steps": 50, "seed": 42}, {"steps": 50}),
    (GENERATE, {"prompt": "x", "n": 4, "size": "1024x1024", "seed": 123}, {"seed": 126}),
    (
        GENERATE,
        {"prompt": "x", "negative_prompt": "blurry", "num_inference_steps": 100},
        {"negative_prompt": "blurry", "steps": 100},
    ),
    (GENERATE, {"prompt": "x", "guidance_scale": 4.5}, {"guidance": 4.5}),
    (GENERATE, {"prompt": "x", "true_cfg_scale": 4.0, "negative_prompt": " "}, {"guidance": 4.0}),
    (GENERATE, {"prompt": "x", "true_cfg_scale": 4.0}, "true_cfg_scale"),
    (GENERATE, {"prompt": "x", "infer_align_image_size": True}, "infer_align_image_size"),
    (GENERATE, {"prompt": "x", "model": "Qwen/Qwen-Image", "n": 1}, "model"),
    # image_edit_api
    (EDIT, [("image", png()), ("prompt", "x"), ("output_format", "png")], {"prompt": "x"}),
    (EDIT, [("image", png()), ("image", png()), ("prompt", "x")], {"prompt": "x"}),
    (EDIT, [("url[]", "https://x.y/z.png"), ("prompt", "x"), ("output_format", "jpeg")], "url[]"),
    (EDIT, [("image", png()), ("prompt", "x"), ("output_format", "jpg")], {"prompt": "x"}),
    (EDIT, [("image", png()), ("prompt", "x"), ("stream", "true")], {"prompt": "x"}),
    (EDIT, [("image", png()), ("prompt", "x"), ("reference_image", "x")], "reference_image"),
    # videos_api
    (VIDEOS, {"prompt": "x", **_WAVES, "num_inference_steps": "40"}, _WAVES_ASKED | {"steps": 40}),
    (VIDEOS, {"prompt": "x", "input_reference": png(), **_WAVES}, _WAVES_ASKED),
    (VIDEOS, {"prompt": "x", "image_reference": json.dumps({"image_url": PICTURE})}, {"fps": 16}),
    (VIDEOS, {"prompt": "x", "video_reference": '{"video_url": "https://x.y"}'}, "video_reference"),
    (VIDEOS, {"prompt": "x", "image_reference": '{"image_url": "https://x.y/z.png"}'}, "image"),
    (f"{VIDEOS}/sync", {"prompt": "x", **_WAVES}, _WAVES_ASKED),
    (f"{VIDEOS}/sync", {"prompt": "x", "extra_params": '{"a": 1}'}, "extra_params"),
    (VIDEOS, {"prompt": "x", "size": "832x480", "seconds": "2", "fps": "24"}, {"frames": 49}),
    (VIDEOS, {"prompt": "x", "guidance_scale": "4", "guidance_scale_2": "3"}, "guidance_scale_2"),
    # docs.sglang.ai: diffusion/api/openai_api
    (
        GENERATE,
        {"prompt": "x", "size": "1024x1024", "n": 1, "response_format": "b64_json"},
        {"height": 1024},
    ),
    (EDIT, [("image", png()), ("url", "image_url.jpg"), ("prompt", "x")], "url"),
    (EDIT, [("image", png()), ("prompt", "x"), ("response_format", "url")], {"prompt": "x"}),
    (VIDEOS, {"prompt": "x", "size": "1280x720"}, {"width": 1280}),
    (GENERATE, {"prompt": "x", "num_outputs_per_prompt": 2, "seed": 1}, {"seed": 2}),
    # aiperf: its endpoint image_generation, with and without --streaming and --extra-inputs
    (GENERATE, {"prompt": "x", "model": "tiny", "response_format": "b64_json", "n": 1}, {}),
    (GENERATE, {"prompt": "x", "model": "tiny", "n": 1, "stream": True}, {}),
    (GENERATE, {"prompt": "x", "model": "tiny", "n": 1, "style": "vivid"}, "style"),
    # two names of one field
    (GENERATE, {"prompt": "x", "steps": 5, "num_inference_steps": "5"}, {"steps": 5}),
    (GENERATE, {"prompt": "x", "steps": 5, "num_inference_steps": 6}, "steps"),
    (GENERATE, {"prompt": "x", "size": "64x32", "width": 64, "height": 32}, {"width": 64}),
    (GENERATE, {"prompt": "x", "size": "64x32", "width": 32, "height": 32}, "size"),
    (GENERATE, {"prompt": "x", "width": 64}, "height"),
    (GENERATE, {"prompt": "x", "guidance": 2, "guidance_scale": 3}, "guidance"),
]


def test_requests_of_peers(images: Open, tmp_path: Path) -> None:
    options = {"model": "tiny-wan", "max_steps": 100}
    with (
        opened_door(tmp_path, options, kind="video", takes_image=True) as videos,
        stepping(videos.service),
    ):
        for path, body, wanted in _PEERS:
            door, media = videos if path.startswith(VIDEOS) else images, "application/json"
            num = len(door.service.asked)
            if door is videos or isinstance(body, list):
                body, media = multipart(*(body.items() if isinstance(body, dict) else body))
            status, answer, _ = door.call("POST", path, body, Content_Type=media)
            row = path, body, answer
            if isinstance(wanted, str):
                assert status in (400, 404) and answer["error"]["param"] == wanted, row
                assert wanted in answer["error"]["message"] and len(door.service.asked) == num
                known = any(field in answer["error"]["message"] for field in _OURS)
                assert known or wanted == "true_cfg_scale", row
                continue
            assert status == 200, row
            settings = latest(door)
            assert {name: getattr(settings, name) for name in wanted} == wanted, row
    for method, path in (
        ("GET", "/models"),
        ("GET", "/v1/images/x/content"),
        ("POST", "/v1/set_lora"),
    ):
        status, answer, _ = images.call(method, path)
        assert status == 404 and "/docs lists what is served" in answer["error"]["message"]


# Formats, events, videos at once, pages, keys, heads


def test_formats_of_images(images: Open) -> None:
    nine, path = {"prompt": "x", "seed": 9}, ""
    for kind in ("jpeg", "webp"):
        body = nine | {"output_format": kind, "output_compression": 60}
        answer = images.call("POST", GENERATE, body)[1]
        assert (
            answer["output_format"],
            made_as(base64.b64decode(answer["data"][0]["b64_json"])),
        ) == ((kind, kind.upper()))
        answer = images.call("POST", GENERATE, body | {"response_format": "url"})[1]
        path = answer["data"][0]["url"].removeprefix(images.url)
        assert path.endswith(f"/content?output_format={kind}&output_compression=60")
        status, data, headers = images.call("GET", path)
        assert (status, made_as(data), headers["content-type"]) == (
            200,
            kind.upper(),
            f"image/{kind}",
        )
    _, data, headers = images.call("POST", GENERATE, body | {"response_format": "file"})
    assert made_as(data) == "WEBP" and headers["content-disposition"].endswith('.webp"')
    path = path.partition("?")[0]
    assert made_as(images.call("GET", path)[1]) == "PNG"
    for query, param in (
        ("variant=thumbnail", "variant"),
        ("variant=spritesheet", "variant"),
        ("output_compression=5", "output_compression"),
        ("size=8x8", "size"),
        ("variant=video&variant=video", "variant"),
    ):
        status, answer, _ = images.call("GET", f"{path}?{query}")
        assert (status, answer["error"]["param"]) == (400, param)
    for name, value in (("output_format", "jpeg"), ("stream", True), ("output_compression", 9)):
        status, answer, _ = images.call("POST", "/v1/requests", nine | {name: value})
        assert (status, answer["error"]["param"]) == (400, name)
    both = nine | {"n": 2, "response_format": "file"}
    assert images.call("POST", GENERATE, both)[1]["error"]["param"] == "n"


def test_jpegs_differ_by_compression(images: Open) -> None:
    """The fake service makes one pixel; noise shows what the setting does."""
    (picture := Image.effect_noise((64, 64), 90)).save(path := images.service.folder / "noise.png")
    sizes = list[int]()
    for compression in (0, 50, 100):
        body = {"prompt": "x", "output_format": "jpeg", "output_compression": compression}
        form = ImageForm.model_validate(body)
        sizes.append(len(data := form.encode(path)))
        with Image.open(io.BytesIO(data)) as image:
            assert image.size == picture.size
    assert sizes == sorted(set(sizes))


def test_events_of_images_by_openais_client(images: Open) -> None:
    for call, kind in (
        (lambda **body: images.client().images.generate(**body), "image_generation.completed"),
        (lambda **body: images.client().images.edit(image=FILE, **body), "image_edit.completed"),
    ):
        fields = {"extra_body": {"seed": 5}, "output_format": "webp", "n": 2, "partial_images": 0}
        events = list(call(prompt="x", stream=True, **fields))
        assert [(one.type, one.size, one.output_format) for one in events] == [
            (kind, "256x256", "webp")
        ] * 2
        assert [made_as(base64.b64decode(one.b64_json)) for one in events] == ["WEBP"] * 2
        assert [one.seed for one in events] == [5, 6]
        with pytest.raises(openai.APIError, match="failed: no memory"):
            list(call(prompt="fail", stream=True))
    body = {"prompt": "x", "stream": True, "response_format": "url"}
    assert images.call("POST", GENERATE, body)[1]["error"]["param"] == "response_format"


@pytest.mark.parametrize("has_key", [False, True])
def test_a_client_that_leaves_its_events(has_key: bool, tmp_path: Path) -> None:
    """Its requests are cancelled; but with a key, they wait for the client to come again."""
    body, cancelled = (
        json.dumps({"prompt": "x", "n": 2, "stream": True}).encode(),
        threading.Event(),
    )
    key = "Idempotency-Key: a\r\n" if has_key else ""
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{key}"
    with opened_door(tmp_path) as door:
        door.service.on_cancel = cancelled.set
        sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        with door.connect(sent) as connection:
            seen = b""
            while b": waiting, step 0" not in seen:
                more = connection.recv(4096)
                assert more, seen
                seen += more
        if has_key:
            with stepping(door.service):
                answer = door.call("POST", GENERATE, body, Idempotency_Key="a")[1]
            assert answer.count(b"event: image_generation.completed") == 2
            assert len(door.service.asked) == 2
        else:
            assert cancelled.wait(60)
            states = [one.state for one in door.service.of.values()]
            while states != ["cancelled"] * 2:
                states = [one.state for one in door.service.of.values()]


def test_a_video_at_once(videos: Open) -> None:
    form, media = multipart(("prompt", "x"), ("seed", "7"))
    status, data, headers = videos.call("POST", f"{VIDEOS}/sync", form, Content_Type=media)
    assert (status, data, headers["content-type"]) == (200, b"a video of 7", "video/mp4")
    assert float(headers["x-inference-time-s"]) >= 0
    made = videos.client().videos.retrieve(headers["x-request-id"])
    assert made.status == "completed"
    found = videos.call("GET", f"{VIDEOS}/{made.id}/content?output_format=webp")[1]
    assert found["error"]["param"] == "output_format"
    status, answer, headers = videos.call("POST", f"{VIDEOS}/sync", {"prompt": "fail"})
    assert (status, answer["error"]["code"]) == (500, "request_failed")
    assert headers["x-should-retry"] == "false"


def test_pages_of_videos(videos: Open) -> None:
    api = videos.client().videos
    assert list(api.list()) == []
    ids = [api.create(prompt=f"{k}").id for k in range(5)]
    assert [one.id for one in api.list(limit=2)] == ids[::-1]
    assert [one.id for one in api.list(limit=2, order="asc")] == ids
    page = videos.call("GET", f"{VIDEOS}?limit=2&after={ids[3]}")[1]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
    assert videos.call("GET", f"{VIDEOS}?limit=2&after={ids[2]}")[1]["has_more"] is False
    for query, status, param in (
        ("limit=0", 400, "limit"),
        ("limit=101", 400, "limit"),
        ("order=up", 400, "order"),
        ("page=2", 400, "page"),
        ("after=x", 404, None),
    ):
        found, answer, _ = videos.call("GET", f"{VIDEOS}?{query}")
        assert (found, answer["error"]["param"]) == (status, param)


def test_a_key_makes_nothing_twice(images: Open) -> None:
    body, api = {"prompt": "x", "n": 2}, images.client()
    first, again = (
        api.images.generate(**body, extra_headers={"Idempotency-Key": "a"}) for _ in range(2)
    )
    assert [one.id for one in first.data] == [one.id for one in again.data]
    assert [one.b64_json for one in first.data] == [one.b64_json for one in again.data]
    assert len(images.service.asked) == 2
    for path, other in (
        (GENERATE, body | {"seed": 1}),
        (GENERATE, {"prompt": "x"}),
        ("/v1/requests", body),
        (EDIT, body | {"image": PICTURE}),
    ):
        status, answer, _ = images.call("POST", path, other, Idempotency_Key="a")
        assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")
        assert answer["error"]["param"] == "Idempotency-Key"
    assert len(images.service.asked) == 2
    form, media = multipart(("prompt", "x"), ("image", png()))
    other = form.replace(b"edge", b"rim"), media.replace("edge", "rim")  # clients draw them anew
    changed = multipart(("prompt", "x"), ("image", png(color=(1, 1, 1, 1))))
    for (data, kind), wanted in (((form, media), 200), (other, 200), (changed, 422)):
        answer = images.call("POST", EDIT, data, Content_Type=kind, Idempotency_Key="b")
        assert answer[0] == wanted and len(images.service.asked) == 3
    for name in ("", "é".encode().decode("latin-1"), "x" * 256):
        status, answer, _ = images.call("POST", GENERATE, body, Idempotency_Key=name)
        assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")


def test_heads(images: Open) -> None:
    made = images.call("POST", GENERATE, {"prompt": "x"})[1]["data"][0]["id"]
    for path in ("/health", "/", "/docs", f"/v1/requests/{made}/content"):
        status, data, headers = images.call("HEAD", path)
        assert (status, data) == (200, b"") and int(headers["content-length"]) > 0, path
        assert headers["content-type"] == images.call("GET", path)[2]["content-type"]
    images.service.reason = "rank 1 is gone"
    assert images.call("HEAD", "/health")[0] == 503


# The schema


def test_answers_are_as_the_schema_says(images: Open, videos: Open) -> None:
    """And its bodies name what the server takes."""
    _, said, headers = images.call("GET", "/openapi.json")
    assert headers["content-type"] == "application/json"
    made = images.call("POST", GENERATE, {"prompt": "x"})[1]["data"][0]["id"]
    video = videos.call("POST", VIDEOS, {"prompt": "x"})[1]["id"]
    one = f"/v1/requests/{made}"
    bodies = {
        path: row["post"].get("requestBody") for path, row in said["paths"].items() if "post" in row
    }
    for path in (GENERATE, EDIT):
        for media in ("application/json", "multipart/form-data"):
            fields = bodies[path]["content"][media]["schema"]["properties"]
            assert {"prompt", "steps", "num_inference_steps", "width", "image"} <= fields.keys()
            assert bodies[path]["content"][media]["schema"]["required"] == ["prompt"]
    checked = set[str]()
    for door, method, path, template, model in (
        (images, "POST", GENERATE, GENERATE, schema.IMAGES),
        (images, "GET", one, "/v1/requests/{request_id}", schema.REQUEST),
        (images, "GET", "/v1/requests", "/v1/requests", schema.REQUESTS),
        (images, "POST", "/v1/requests", "/v1/requests", schema.MADE),
        (images, "POST", f"{one}/cancel", "/v1/requests/{request_id}/cancel", schema.REQUEST),
        (images, "GET", "/v1/models", "/v1/models", schema.MODELS),
        (images, "GET", "/v1/models/tiny", "/v1/models/{name}", schema.MODEL),
        (videos, "POST", VIDEOS, VIDEOS, schema.VIDEO),
        (videos, "GET", VIDEOS, VIDEOS, schema.VIDEOS),
        (videos, "GET", f"{VIDEOS}/{video}", f"{VIDEOS}/{{request_id}}", schema.VIDEO),
        (videos, "DELETE", f"{VIDEOS}/{video}", f"{VIDEOS}/{{request_id}}", schema.DELETED),
        (images, "DELETE", one, "/v1/requests/{request_id}", schema.REQUEST),
    ):
        status, answer, _ = door.call(method, path, {"prompt": "x"} if method == "POST" else None)
        model.model_validate(answer)
        answered = said["paths"][template][method.lower()]["responses"]
        name = answered[str(status)]["content"]["application/json"]["schema"]["$ref"].rpartition(
            "/"
        )[2]
        assert said["components"]["schemas"][name]["properties"].keys() == answer.keys(), path
        checked.add(name)
    schema.ERROR.model_validate(images.call("GET", f"{one}x")[1])
    assert len(checked) == 9
