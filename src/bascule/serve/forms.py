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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from fastapi import Request
from PIL import Image, ImageOps
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import File, FormParser, parse_options_header

from bascule.errors import ConfigError
from bascule.generate.options import DEFAULTS, Lora, Prompt
from bascule.serve.options import ServeOptions
from bascule.serve.status import Key, Refusal

_LONGEST_QUOTE = 80
_MOST_SEED = 2**63 - 1
_MOST_PARTS = 68  # of a multipart form
_MOST_VALUES = 10_000  # in JSON, beside commas and brackets in texts
_LONGEST_SIDE = 2**15
_CHARSETS = "utf-8", "utf8", "us-ascii", "ascii"
_SURROGATE = re.compile("[\ud800-\udfff]")
_PICTURES = "image", "image[]", "image_reference", "input_reference"
_FORMATS = "PNG", "JPEG", "WEBP"
_LONGEST_KEY = 255

ALIASES = {"num_inference_steps": "steps", "num_frames": "frames", "num_outputs_per_prompt": "n"}
ALIASES |= {"guidance_scale": "guidance", "true_cfg_scale": "guidance"}
"""Our fields, by their names on other servers."""

Query = TypeVar("Query", bound=BaseModel)


class Form(BaseModel):
    """Fields of every request; for None, the pipeline chooses the value."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompt: str = Field(min_length=1)
    negative_prompt: str | None = None
    model: str | None = None
    size: str = Field("auto", pattern=r"^(auto|[1-9]\d{0,8}x[1-9]\d{0,8})$")
    steps: int | None = Field(None, ge=1)
    guidance: float | None = Field(None, ge=0, le=1e6)
    seed: int | None = Field(None, ge=0, le=_MOST_SEED)
    deadline_s: float | None = Field(None, gt=0, le=1e9)
    must_meet_deadline: bool = False
    lora: Any = None  # [{"name": "style", "scale": 0.8}, ..]
    user: str | None = None  # ignored, like the next one
    safety_identifier: str | None = None


class Format(BaseModel):
    """The format of an image; the compression is the quality of JPEG and WebP, 100 by default."""

    model_config = ConfigDict(extra="forbid")

    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: int | None = Field(None, ge=0, le=100)

    def model_post_init(self, context: Any) -> None:
        """Refuse a compression of a format that has none."""
        if self.output_format == "png" and self.output_compression not in (None, 100):
            message = f"output_compression: PNG has none, and it is {self.output_compression}"
            raise Refusal(400, f"{message}: give output_format jpeg or webp", "output_compression")

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
    partial_images: int = Field(0, ge=0, le=0)
    quality: Literal["auto", "standard"] = "auto"
    background: Literal["auto", "opaque"] = "auto"
    moderation: Literal["auto", "low"] = "auto"

    def model_post_init(self, context: Any) -> None:
        """Refuse an answer that no client could mean."""
        super().model_post_init(context)
        if self.response_format == "file" and self.n > 1:
            message = f"n: {self.n} images do not fit in one file: give 1, or another"
            raise Refusal(400, f"{message} response_format", "n")
        if self.stream and self.response_format != "b64_json":
            message = f"response_format: events carry b64_json, not {self.response_format!r}"
            raise Refusal(400, f"{message}: leave it out", "response_format")

    def check_later(self) -> None:
        """Refuse settings of images in an answer, for a call that answers before they are made."""
        if self.stream or self.output_format != "png":
            name, path = "output_format", "/v1/requests/{id}/content?output_format=.."
            if self.stream:
                name, path = "stream", "/v1/images/generations"
            raise Refusal(400, f"{name}: no image is made yet: use {path}", name)


class VideoForm(Form):
    """Fields of a video request."""

    seconds: float | None = Field(None, gt=0, le=1e4)
    frames: int | None = Field(None, ge=1)
    fps: int | None = Field(None, ge=1, le=1000)

    def num_frames(self, fps: int) -> int | None:
        """Return the number of frames; the first frame is at 0 s. Refuse two lengths."""
        if self.seconds is None:
            return self.frames
        if self.frames is not None:
            raise Refusal(400, "seconds and frames both set a length: give one of them", "frames")
        return round(self.seconds * fps) + 1


class ListQuery(BaseModel):
    """Query of a list of videos."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(20, ge=1, le=100)
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


class ContentQuery(Format):
    """Query of an output; images have a format."""

    variant: Literal["video"] | None = None


class LoraForm(BaseModel):
    """Fields of a call that loads a LoRA adapter."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern="^[A-Za-z0-9._-]{1,100}$")


async def read(request: Request, kind: type[Any], options: ServeOptions) -> tuple[Any, Any]:
    """Return the fields of a call, and its picture as the client sent it, or None."""
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
    pictures = [value for name, value in pairs if name in _PICTURES and value is not None]
    if len(pictures) > 1:
        raise Refusal(400, f"image: {len(pictures)} pictures are too many: give one", "image")
    pairs = [(name, value) for name, value in pairs if name not in _PICTURES]
    fields = {name: value for name, value in _checked(pairs).items() if value is not None}
    try:
        return kind.model_validate(_renamed(fields)), pictures[0] if pictures else None
    except ValidationError as error:
        raise _refusal(error, kind, options.max_pixels) from None


def queried(request: Request, kind: type[Query]) -> Query:
    """Return the settings in the query of a call."""
    try:
        return kind.model_validate(_checked(request.query_params.multi_items()))
    except ValidationError as error:
        raise _refusal(error, kind) from None


def _refusal(error: ValidationError, kind: type[BaseModel], max_pixels: int = 0) -> Refusal:
    """Return a sentence on the first thing that is wrong with fields."""
    first = error.errors(include_url=False, include_context=False)[0]
    name, value = ".".join(map(str, first["loc"])), _quoted(first["input"])
    message = f"{name}: {first['msg']}, not {value}"
    if first["type"] == "extra_forbidden":
        message = f"{_quoted(name)} is not known: give some of {', '.join(kind.model_fields)}"
    elif name == "size":
        message = f"size {value}: give WxH in pixels, such as 512x768, or auto; "
        message += f"at most {max_pixels:,} pixels"
    elif first["type"] == "missing":
        message = f"{name} is missing: give it"
    return Refusal(400, message, name)


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields by our names; Refusal if two names of a field have different values."""
    renamed, names = dict[str, Any](), dict[str, str]()
    sides = [fields.pop(name, None) for name in ("width", "height")]
    if any(side is not None for side in sides):
        if None in sides:
            name = ("height", "width")[sides[0] is None]
            raise Refusal(400, f"{name} is missing: give width and height, or size", name)
        fields |= {"width and height": "x".join(map(str, sides))}
    if "true_cfg_scale" in fields and not fields.get("negative_prompt"):
        message = "true_cfg_scale: steers away from a negative_prompt: give one, or guidance"
        raise Refusal(400, message, "true_cfg_scale")
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


def key_of(request: Request, form: Form, image: bytes | None) -> Key | None:
    """Return the key of a call, if it has one, with a digest of all that the call asks for."""
    if (name := request.headers.get("idempotency-key")) is None:
        return None
    if not (0 < len(name) <= _LONGEST_KEY and name.isascii() and name.isprintable()):
        message = f"Idempotency-Key {_quoted(name)}: give 1 to {_LONGEST_KEY} ASCII characters"
        raise Refusal(400, message, "Idempotency-Key")
    asked = [request.url.path, form.model_dump(exclude_defaults=True)]
    text = json.dumps(asked, sort_keys=True).encode() + b"\n" + (image or b"")
    return Key(name, hashlib.sha256(text).hexdigest())


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
            raise Refusal(400, f"{_quoted(name)} is {value}: give a number or text", shown)
        texts = [text for text in (name, value) if isinstance(text, str) and not text.isascii()]
        if any(map(_SURROGATE.search, texts)):
            message = f"{_quoted(name)} holds half of a surrogate pair: send whole characters"
            raise Refusal(400, message, shown)
    return dict(pairs)


async def _fields_of(request: Request, boundary: bytes) -> list[tuple[str, Any]]:
    """Return the fields of a multipart form: names, and texts or the bytes of files."""
    parts, ends = list[Any](), list[bool]()
    settings = {"MAX_MEMORY_FILE_SIZE": math.inf, "UPLOAD_ERROR_ON_BAD_CTE": True}
    callbacks: Any = parts.append, parts.append, lambda: ends.append(True)
    options: Any = boundary, None, settings
    try:
        parser = FormParser("multipart/form-data", *callbacks, *options)
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
        fps = form.fps or options.fps
        frames = form.num_frames(fps)
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
            message = f"{name}: {value:,} {unit} are too many: give at most {most:,} here"
            raise Refusal(400, message, name)
    fields = {name: getattr(form, name) for name in ("negative_prompt", "steps", "guidance")}
    fields |= {**size, "frames": frames, "fps": fps}
    fields = {name: value for name, value in fields.items() if value is not None}
    settings = DEFAULTS.get(options.model, {}) | fields
    seed = secrets.randbelow(2**31) if form.seed is None else form.seed
    if seed + num - 1 > _MOST_SEED:
        raise Refusal(400, f"seed: {seed} is too large: give at most {_MOST_SEED}", "seed")
    first = Prompt(prompt=form.prompt, **settings, seed=seed, lora=_loras(form.lora))
    return [replace(first, seed=seed + number) for number in range(num)]


def _loras(value: Any) -> tuple[Lora, ...]:
    """Return the adapters that a client chose, in JSON or, in a form, as its text."""
    try:
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            value = json.loads(value)
        settings: dict[str, Any] = {} if value is None else {"lora": value}
        return Prompt(prompt="", **settings).lora
    except (ConfigError, ValueError, RecursionError) as error:
        raise Refusal(400, f"lora: {error}".replace("lora: lora", "lora"), "lora") from None


def picture(sent: Any, max_pixels: int) -> bytes:
    """Decode a picture that a client sent, and return it as PNG; Refusal if that fails."""
    if isinstance(sent, str) and sent.startswith("{"):  # JSON in a form
        with suppress(ValueError, RecursionError):
            sent = json.loads(sent)
    if isinstance(sent, dict):  # as OpenAI's clients write it in JSON
        sent = sent.get("image_url")
    if isinstance(sent, str):
        if sent.strip().lower().startswith(("http:", "https:", "file:", "ftp:")):
            message = "image: no URL is opened here: send the picture, as a file or in base64"
            raise Refusal(400, message, "image")
        try:
            sent = base64.b64decode(sent.rpartition(",")[2], validate=True)
        except (binascii.Error, ValueError):
            raise Refusal(400, "image: is not valid base64: encode it again", "image") from None
    if not isinstance(sent, bytes):
        raise Refusal(400, "image: send a file, or text in base64", "image")
    try:
        with Image.open(io.BytesIO(sent), formats=_FORMATS) as opened:
            if opened.width * opened.height <= max_pixels:  # by its header: nothing is decoded yet
                plain = ImageOps.exif_transpose(opened).convert("RGB")
                plain.info.clear()
                plain.save(png := io.BytesIO(), "PNG", compress_level=1)
                return png.getvalue()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        pass
    except Exception:  # PIL raises anything on damaged files
        message = f"image: cannot be read: send one of {', '.join(_FORMATS)}, whole"
        raise Refusal(400, message, "image") from None
    message = f"image: has more than {max_pixels:,} pixels, this server's limit: make it smaller"
    raise Refusal(400, message, "image")


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..")
