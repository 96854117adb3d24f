"""Read bodies and queries of calls by OpenAI's API, and pictures, or refuse them in a sentence."""

import base64
import binascii
import hashlib
import io
import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from fastapi import Request
from PIL import Image, ImageOps
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import File, FormParser, parse_options_header

from bascule.generate.options import DEFAULTS, Lora, Prompt
from bascule.serve.options import ServeOptions
from bascule.serve.status import Key, Refusal

_LONGEST_QUOTE = 80
_MOST_SEED = 2**63 - 1
_MOST_PICTURES = 16  # of a call
_MOST_PARTS = 68  # of a multipart form
_MOST_VALUES = 10_000  # in JSON, beside commas and brackets in texts
_LONGEST_SIDE = 2**15
_SIZE, _NAME = r"^(auto|[1-9]\d{0,8}x[1-9]\d{0,8})$", "^[A-Za-z0-9._-]{1,100}$"
_CHARSETS = "utf-8", "utf8", "us-ascii", "ascii"
_SURROGATE = re.compile("[\ud800-\udfff]")
_PICTURES = "image", "image[]", "image_reference", "input_reference"
_FORMATS = "PNG", "JPEG", "WEBP"
_LONGEST_KEY = 255
_KINDS = {"string": "text", "integer": "a whole number", "number": "a number"}
_KINDS |= {"boolean": "true or false"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}

_WORK = re.compile(  # numbers in JSON or a form
    rb'"(size|width|height|n|seconds|fps|frames|num_frames|steps|num_inference_steps)"'
    rb'(?:\s*:\s*"?|(?:\r\n[^\r\n]+)*\r\n\r\n)(\d{1,6}(?:x\d{1,6})?)'
)
_SCANNED = 2**16  # bytes at both ends of a body
_USUAL = {"size": "1024x1024", "steps": "28", "n": "1", "seconds": "0", "fps": "16"}

ALIASES = {"num_inference_steps": "steps", "num_frames": "frames", "num_outputs_per_prompt": "n"}
ALIASES |= {"guidance_scale": "guidance", "true_cfg_scale": "guidance"}
"""Our fields, by their names on other servers."""

_Fields = TypeVar("_Fields", bound=BaseModel)


class _Known(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Form(_Known):
    """Fields of every request; for None, the pipeline chooses the value."""

    prompt: str = Field(min_length=1, description="text")
    negative_prompt: str | None = None
    model: str | None = None
    size: str = Field("auto", pattern=_SIZE, description="WxH in pixels, such as 512x768, or auto")
    steps: int | None = Field(None, ge=1)
    guidance: float | None = Field(None, ge=0, le=1e6)
    seed: int | None = Field(None, ge=0, le=_MOST_SEED)
    deadline_s: float | None = Field(None, gt=0, le=1e9)
    must_meet_deadline: bool = False
    lora: Any = None  # [{"name": "style", "scale": 0.8}, ..]
    user: str | None = None  # ignored, like the next one
    safety_identifier: str | None = None


class Format(_Known):
    """The format of an image; the compression is the quality of JPEG and WebP, 100 by default."""

    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: int | None = Field(None, ge=0, le=100)

    def model_post_init(self, context: Any) -> None:
        """Refuse a compression of a format that has none."""
        if self.output_format == "png" and self.output_compression not in (None, 100):
            text = f"PNG has none, and it is {self.output_compression}"
            raise _wrong("output_compression", f"{text}: give output_format jpeg or webp")

    def encode(self, path: Path) -> bytes:
        """Return a stored PNG in this format."""
        if self.output_format == "png":
            return path.read_bytes()
        quality = 100 if self.output_compression is None else self.output_compression
        with Image.open(path) as stored:
            image, made = stored.convert("RGB"), io.BytesIO()
            image.save(made, self.output_format.upper(), quality=quality)
        return made.getvalue()


class ImageForm(Format, Form):
    """Fields of an image request; OpenAI's last four accept only values without effect here."""

    n: int = Field(1, ge=1)
    response_format: Literal["b64_json", "url", "file"] = "b64_json"
    stream: bool = False
    partial_images: int = Field(0, ge=0, le=0, description="0, as events show whole images")
    quality: Literal["auto", "standard"] = "auto"
    background: Literal["auto", "opaque"] = "auto"
    moderation: Literal["auto", "low"] = "auto"

    def model_post_init(self, context: Any) -> None:
        """Refuse an answer that no client could mean."""
        super().model_post_init(context)
        if self.response_format == "file" and self.n > 1:
            text = f"{self.n} images do not fit in one file: give 1, or another response_format"
            raise _wrong("n", text)
        if self.stream and self.response_format != "b64_json":
            text = f"events carry b64_json, not {self.response_format!r}: leave it out"
            raise _wrong("response_format", text)

    def check_later(self) -> None:
        """Refuse settings of images in an answer, for a call that answers before they are made."""
        if self.stream:
            raise _wrong("stream", "no image is made yet: use /v1/images/generations")
        if self.output_format != "png":
            path = "/v1/requests/{id}/content?output_format=.."
            raise _wrong("output_format", f"no image is made yet: use {path}")


class VideoForm(Form):
    """Fields of a video request."""

    seconds: float | None = Field(None, gt=0, le=1e4)
    frames: int | None = Field(None, ge=1)
    fps: int | None = Field(None, ge=1, le=1000)


class ListQuery(_Known):
    """Query of a list of videos."""

    limit: int = Field(20, ge=1, le=100)
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


class ContentQuery(Format):
    """Query of an output; images have a format."""

    variant: Literal["video"] | None = Field(None, description="video")


class LoraForm(_Known):
    """Fields of a call that loads a LoRA adapter."""

    name: str = Field(pattern=_NAME, description="1 to 100 letters, digits, dots, - or _")


async def read(request: Request, kind: type[Any], options: ServeOptions) -> tuple[Any, list[Any]]:
    """Return the fields of a call, and its pictures as the client sent them."""
    media, settings = parse_options_header(request.headers.get("content-type"))
    _check_charset(settings)
    if media == b"multipart/form-data":
        pairs = await _fields_of(request, settings.get(b"boundary", b""))
    elif media == b"application/json":
        body = b"".join([chunk async for chunk in request.stream()])  # body() would cache it
        pairs = _members(body, 2 * options.max_prompt_chars + _MOST_VALUES)
    else:
        sent = _quoted(media.decode("latin-1"))
        raise Refusal(415, f"Content-Type {sent}: send application/json or multipart/form-data")
    pictures, others = list[Any](), list[tuple[str, Any]]()
    for name, value in pairs:
        if name not in _PICTURES or not issubclass(kind, Form):
            others.append((name, value))
        elif value is not None:
            pictures += value if isinstance(value, list) else [value]
    if (num := len(pictures)) > _MOST_PICTURES:
        raise _wrong("image", f"{num} pictures are too many: give at most {_MOST_PICTURES}")
    fields = {name: value for name, value in _checked(others).items() if value is not None}
    return _validated(kind, _renamed(fields)), pictures


def work_of(body: bytes) -> float:
    """Return pixels times steps of what a call asks for, as far as it says so, unchecked."""
    ends = body[:_SCANNED] + body[_SCANNED:][-_SCANNED:]
    pairs = [(name.decode(), value.decode()) for name, value in _WORK.findall(ends)]
    asked = _USUAL | {ALIASES.get(name, name): value for name, value in pairs}
    if "width" in asked and "height" in asked:
        asked["size"] = f"{asked['width']}x{asked['height']}"
    numbers = {name: [*map(int, value.split("x"))] for name, value in asked.items()}
    frames = numbers.get("frames", [numbers["seconds"][0] * numbers["fps"][0] + 1])
    return math.prod([*numbers["size"], *numbers["steps"], *numbers["n"], *frames], start=1.0)


def queried(request: Request, kind: type[_Fields]) -> _Fields:
    """Return the settings in the query of a call."""
    return _validated(kind, _checked(request.query_params.multi_items()))


def _wrong(name: str, text: str) -> Refusal:
    return Refusal(400, f"{name}: {text}", name)


def _validated(kind: type[_Fields], fields: dict[str, Any]) -> _Fields:
    """Return fields as a form; Refusal of the first one that is wrong."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
    name = str(fault["loc"][0])
    text = f"{name} is missing: give it"
    if fault["type"] == "extra_forbidden":
        text = f"{_quoted(name)} is not known: give some of {', '.join(kind.model_fields)}"
    elif fault["type"] != "missing":
        field = kind.model_json_schema()["properties"][name]
        plain = field.get("anyOf", [field])[0]
        bounds = [f"{words} {plain[key]:,}" for key, words in _BOUNDS.items() if key in plain]
        rule = field.get("description") or " or ".join(plain.get("enum", ()))
        rule = rule or ", ".join([_KINDS[plain["type"]], *bounds])
        text = f"{name} is {_quoted(fault['input'])}: give {rule}"
    raise Refusal(400, text, name)


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields by our names; Refusal if two names of a field have different values."""
    renamed, names = dict[str, Any](), dict[str, str]()
    sides = [fields.pop(name, None) for name in ("width", "height")]
    if any(side is not None for side in sides):
        if None in sides:
            name = ("height", "width")[sides[0] is None]
            raise _wrong(name, "is missing: give width and height, or size")
        fields |= {"width and height": "x".join(map(str, sides))}
    if "true_cfg_scale" in fields and not fields.get("negative_prompt"):
        text = "steers away from a negative_prompt: give one, or guidance"
        raise _wrong("true_cfg_scale", text)
    for alias, value in fields.items():
        name = {**ALIASES, "width and height": "size"}.get(alias, alias)
        value = "jpeg" if (name, value) == ("output_format", "jpg") else value
        before = renamed.get(name, value)
        if before != value and str(before) != str(value):  # a form has texts
            first, second = _quoted(before), _quoted(value)
            message = f"{names[name]} is {first}, and {alias} {second}: give one of them"
            raise Refusal(400, message, name)
        renamed[name], names[name] = value, alias
    return renamed


def key_of(request: Request, form: Form, images: Sequence[bytes]) -> Key | None:
    """Return the key of a call, if it has one, with a digest of all that the call asks for."""
    if (name := request.headers.get("idempotency-key")) is None:
        return None
    if not (0 < len(name) <= _LONGEST_KEY and name.isascii() and name.isprintable()):
        message = f"Idempotency-Key {_quoted(name)}: give 1 to {_LONGEST_KEY} ASCII characters"
        raise Refusal(400, message, "Idempotency-Key")
    asked = [request.url.path, form.model_dump(exclude_defaults=True)]
    parts = [json.dumps(asked, sort_keys=True).encode(), *images]
    return Key(name, hashlib.sha256(b"\n".join(parts)).hexdigest())


def _check_charset(settings: Mapping[bytes, bytes]) -> None:
    charset = settings.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in _CHARSETS:
        raise Refusal(415, f"charset {_quoted(charset)} is not supported: send UTF-8")


def _members(body: bytes, most: int) -> list[tuple[str, Any]]:
    """Return the members of a JSON object, of at most so many values."""
    if sum(map(body.count, (b",", b"[", b"{"))) > most:  # parsing blocks all other calls
        raise Refusal(400, f"the body has more than {most:,} values: send only a request's fields")
    try:
        fields = json.loads(body, object_pairs_hook=_checked)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Refusal(400, 'the body must be a JSON object, such as {"prompt": "a boat"}')
    return list(fields.items())


def _checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return fields; Refusal if one is repeated, a wrong bool, or not encodable as UTF-8."""
    nums = Counter(name for name, _ in pairs)
    for name, value in pairs:
        shown = name.encode(errors="backslashreplace").decode()
        if nums[name] > 1:
            raise Refusal(400, f"{_quoted(name)} comes several times: give it once", shown)
        if isinstance(value, bool) and name not in ("must_meet_deadline", "stream"):
            raise Refusal(400, f"{shown} is {value}: give a number or text", shown)
        texts = [text for text in (name, value) if isinstance(text, str) and not text.isascii()]
        if any(map(_SURROGATE.search, texts)):
            message = f"{_quoted(name)} holds half of a surrogate pair: send whole characters"
            raise Refusal(400, message, shown)
    return dict(pairs)


async def _fields_of(request: Request, boundary: bytes) -> list[tuple[str, Any]]:
    """Return the fields of a multipart form: names, and texts or the bytes of files."""
    parts, ends = list[Any](), list[bool]()
    settings = {"MAX_MEMORY_FILE_SIZE": math.inf, "UPLOAD_ERROR_ON_BAD_CTE": True}
    more: Any = parts.append, parts.append, lambda: ends.append(True), boundary, None, settings
    try:
        parser = FormParser("multipart/form-data", *more)
        async for chunk in request.stream():
            parser.write(chunk)
            if len(parts) > _MOST_PARTS:
                raise FormParserError(f"it has more than {_MOST_PARTS} fields")
        parser.finalize()
        if not ends:
            raise FormParserError("it ends before its last boundary")
        return [_field(part) for part in parts]
    except (FormParserError, UnicodeDecodeError) as error:
        raise Refusal(400, f"the form is malformed: {error}") from error


def _field(part: Any) -> tuple[str, str | bytes]:
    _check_charset(parse_options_header(getattr(part, "content_type", None))[1])
    name = part.field_name.decode()
    if not isinstance(part, File):
        return name, part.value.decode()
    part.file_object.seek(0)
    return name, part.file_object.read()


def check_model(model: str | None, options: ServeOptions) -> None:
    """Refuse the name of another model; None passes."""
    if model not in (None, options.model, options.model_name):
        message = f"model {_quoted(model)} is not served: leave it out, or give "
        raise Refusal(404, f"{message}{options.model_name!r}", "model", "model_not_found")


def prompts_of(form: Form, options: ServeOptions) -> list[Prompt]:
    """Return a prompt for each output; Refusal beyond the server's limits."""
    check_model(form.model, options)
    size = {}
    if form.size != "auto":
        size = dict(zip(("width", "height"), map(int, form.size.split("x")), strict=True))
    frames = fps = None
    if isinstance(form, VideoForm):
        frames, fps = form.frames, form.fps or options.fps
        if form.seconds is not None:
            if frames is not None:
                raise _wrong("frames", "seconds and frames both set a length: give one of them")
            frames = round(form.seconds * fps) + 1  # the first is at 0 s
    num, most_chars = getattr(form, "n", 1), options.max_prompt_chars
    for name, value, most, unit in (
        ("prompt", len(form.prompt), most_chars, "characters"),
        ("negative_prompt", len(form.negative_prompt or ""), most_chars, "characters"),
        ("size", size.get("width", 0) * size.get("height", 0), options.max_pixels, "pixels"),
        ("size", max(size.values(), default=0), _LONGEST_SIDE, "pixels a side"),
        ("frames", frames, options.max_frames, "frames"),
        ("steps", form.steps, options.max_steps, "steps"),
        ("n", num, options.max_images, "images"),
    ):
        if value is not None and value > most:
            raise _wrong(name, f"{value:,} {unit} are too many: give at most {most:,} here")
    fields = {name: getattr(form, name) for name in ("negative_prompt", "steps", "guidance")}
    fields |= {**size, "frames": frames, "fps": fps}
    fields = {name: value for name, value in fields.items() if value is not None}
    settings = DEFAULTS.get(options.model, {}) | fields
    seed = secrets.randbelow(2**31) if form.seed is None else form.seed
    if seed + num - 1 > _MOST_SEED:
        raise _wrong("seed", f"{seed} is too large for {num} images: give a smaller one")
    first = Prompt(prompt=form.prompt, **settings, seed=seed, lora=_loras(form.lora))
    return [replace(first, seed=seed + number) for number in range(num)]


def _loras(value: Any) -> tuple[Lora, ...]:
    """Return the adapters that a client chose, in JSON or, in a form, as its text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            text = f'{_quoted(value)} is not valid JSON: give [{{"name": NAME, "scale": 0.8}}, ..]'
            raise _wrong("lora", text) from None
    loras: Any = () if value is None else value
    return Prompt(prompt="", lora=loras).lora


def picture(sent: Any, most: int) -> bytes:
    """Return a picture of at most so many pixels that a client sent, as PNG, or refuse it."""
    if isinstance(sent, str) and sent.startswith("{"):  # JSON in a form
        with suppress(ValueError, RecursionError):
            sent = json.loads(sent)
    if isinstance(sent, dict):  # as OpenAI's clients write it in JSON
        sent = sent.get("image_url")
    if isinstance(sent, str):
        if sent.strip().lower().startswith(("http:", "https:", "file:", "ftp:")):
            text = "no URL is opened here: send the picture, as a file or in base64"
            raise _wrong("image", text)
        try:
            sent = base64.b64decode(sent.rpartition(",")[2], validate=True)
        except (binascii.Error, ValueError):
            raise _wrong("image", "is not valid base64: encode it again") from None
    if not isinstance(sent, bytes):
        raise _wrong("image", "send a file, or text in base64")
    try:
        with Image.open(io.BytesIO(sent), formats=_FORMATS) as opened:
            if opened.width * opened.height <= most:  # by its header: nothing is decoded yet
                plain = ImageOps.exif_transpose(opened).convert("RGB")
                plain.info.clear()
                plain.save(png := io.BytesIO(), "PNG", compress_level=1)
                return png.getvalue()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        pass
    except Exception:  # PIL raises anything on damaged files
        text = f"cannot be read: send one of {', '.join(_FORMATS)}, whole"
        raise _wrong("image", text) from None
    raise _wrong("image", f"has more than {most:,} pixels, the limit: make it smaller")


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}.."
    return repr(text) if isinstance(value, str) else text
