"""Read what clients send: fields in OpenAI's form and pictures, or refuse in one sentence."""

import base64
import binascii
import io
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import Request
from PIL import Image, ImageOps
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile

from bascule.generate.options import DEFAULTS, Prompt
from bascule.serve.options import ServeOptions
from bascule.serve.status import Submission

_LONGEST_QUOTE = 80
_MOST_SEED = 2**63 - 1
_PICTURES = "image", "image[]", "input_reference"
_FORMATS = "PNG", "JPEG", "WEBP"


@dataclass
class Refusal(Exception):  # noqa: N818 - an answer to a client
    """A call that is refused.

    Attributes:
        status: Of HTTP.
        message: One sentence.
        param: The field that is wrong.
        code: A name of the reason for programs.
        headers: Of the answer.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


class Form(BaseModel):
    """The fields of every request; None leaves a value to the pipeline."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompt: str = Field(min_length=1)
    negative_prompt: str | None = None
    model: str | None = None
    size: str = Field("auto", pattern=r"^(auto|[1-9]\d{0,4}x[1-9]\d{0,4})$")
    steps: int | None = Field(None, ge=1)
    guidance: float | None = Field(None, ge=0, le=1e6)
    seed: int | None = Field(None, ge=0, le=_MOST_SEED)
    deadline_s: float | None = Field(None, gt=0, le=1e9)
    must_meet_deadline: bool = False
    user: str | None = None  # this and all below `n` of images: OpenAI's, where we do the same

    @property
    def num_outputs(self) -> int:
        """Outputs to make."""
        return 1

    def num_frames(self, fps: int) -> int | None:
        """Return the frames of the output."""
        return None


class ImageForm(Form):
    """The fields of images."""

    n: int = Field(1, ge=1)
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png"] = "png"
    quality: Literal["auto", "standard"] = "auto"
    background: Literal["auto", "opaque"] = "auto"
    moderation: Literal["auto", "low"] = "auto"
    stream: Literal[False] = False

    @property
    def num_outputs(self) -> int:
        """Outputs to make."""
        return self.n


class VideoForm(Form):
    """The fields of a video."""

    seconds: float | None = Field(None, gt=0, le=1e4)
    frames: int | None = Field(None, ge=1)

    def num_frames(self, fps: int) -> int | None:
        """Return the frames of the output; the first one is at 0 s, as video models count."""
        if self.seconds is None:
            return self.frames
        if self.frames is not None:
            raise Refusal(400, "seconds and frames say the same: give one of them", "frames")
        return round(self.seconds * fps) + 1


async def read(request: Request, kind: type[Form], options: ServeOptions) -> tuple[Form, Any]:
    """Return the fields of a call, and the picture with them, as it was sent, or None."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media == "multipart/form-data":
        limits = {"max_files": 4, "max_fields": 64, "max_part_size": options.max_body_bytes}
        async with request.form(**limits) as form:
            pairs = [
                (name, await value.read() if isinstance(value, UploadFile) else value)
                for name, value in form.multi_items()
            ]
    elif media == "application/json":
        try:
            fields = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise Refusal(400, 'the body must be a JSON object, such as {"prompt": "a boat"}')
        pairs = list(fields.items())
    else:
        raise Refusal(
            415, f"Content-Type {_quoted(media)}: send application/json or multipart/form-data"
        )
    pictures = [value for name, value in pairs if name in _PICTURES and value is not None]
    if len(pictures) > 1:
        raise Refusal(400, f"image: {len(pictures)} pictures are too many: give one", "image")
    fields = {name: value for name, value in pairs if name not in _PICTURES and value is not None}
    try:
        return kind.model_validate(fields), pictures[0] if pictures else None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            names = ", ".join(kind.model_fields)
            said = f"{_quoted(name)} is not known: give some of {names}"
        elif name == "size":
            said = f"size {_quoted(first['input'])}: give WxH in pixels, such as 512x768, or auto"
        elif first["type"] == "missing":
            said = f"{name} is missing: give it"
        else:
            said = f"{name}: {first['msg']}, not {_quoted(first['input'])}"
        raise Refusal(400, said, name) from None


def submissions(form: Form, image: bytes | None, options: ServeOptions) -> list[Submission]:
    """Return what the fields ask for; Refusal if that is more than the server's limits."""
    if form.model not in (None, options.model, options.model_name):
        said = f"model {_quoted(form.model)} is not served: leave it out, or {options.model_name!r}"
        raise Refusal(404, said, "model", "model_not_found")
    size = {}
    if form.size != "auto":
        size = dict(zip(("width", "height"), map(int, form.size.split("x")), strict=True))
    frames, most_chars = form.num_frames(options.fps), options.max_prompt_chars
    for name, value, most, unit in (
        ("prompt", len(form.prompt), most_chars, "characters"),
        ("negative_prompt", len(form.negative_prompt or ""), most_chars, "characters"),
        ("size", size.get("width", 0) * size.get("height", 0), options.max_pixels, "pixels"),
        ("frames", frames, options.max_frames, "frames"),
        ("steps", form.steps, options.max_steps, "steps"),
        ("n", form.num_outputs, options.max_images, "images"),
    ):
        if value is not None and value > most:
            said = f"{name}: {value:,} {unit} are too many for this server: give at most {most:,}"
            raise Refusal(400, said, name)
    own = {name: getattr(form, name) for name in ("negative_prompt", "steps", "guidance")}
    own |= {**size, "frames": frames}
    settings = DEFAULTS.get(options.model, {}) | {k: v for k, v in own.items() if v is not None}
    seed = secrets.randbelow(2**31) if form.seed is None else form.seed
    if seed + form.num_outputs - 1 > _MOST_SEED:
        raise Refusal(400, f"seed: {seed} is too large: give at most {_MOST_SEED}", "seed")
    return [
        Submission(
            prompt=Prompt(prompt=form.prompt, **settings, seed=seed + place),
            image=image,
            deadline_s=form.deadline_s,
            must_meet_deadline=form.must_meet_deadline,
        )
        for place in range(form.num_outputs)
    ]


def picture(sent: Any, max_pixels: int) -> bytes:
    """Return a picture that was sent, decoded and encoded anew as PNG; Refusal if it is none."""
    if isinstance(sent, dict):  # as OpenAI's clients write it in JSON
        sent = sent.get("image_url")
    if isinstance(sent, str):
        if sent.strip().lower().startswith(("http:", "https:", "file:", "ftp:")):
            said = "image: no URL is opened here: send the picture itself, as a file or in base64"
            raise Refusal(400, said, "image")
        try:
            sent = base64.b64decode(sent.rpartition(",")[2], validate=True)
        except (binascii.Error, ValueError):
            raise Refusal(400, "image: is not valid base64", "image") from None
    if not isinstance(sent, bytes):
        raise Refusal(400, "image: send a file, or text in base64", "image")
    try:
        with Image.open(io.BytesIO(sent), formats=_FORMATS) as opened:
            if opened.width * opened.height <= max_pixels:  # as its head says: none is decoded yet
                plain = ImageOps.exif_transpose(opened).convert("RGB")
                plain.info.clear()
                plain.save(made := io.BytesIO(), "PNG", compress_level=1)
                return made.getvalue()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        pass
    except Exception:  # PIL raises anything on damaged files
        said = f"image: cannot be read: send one of {', '.join(_FORMATS)}, whole"
        raise Refusal(400, said, "image") from None
    said = f"image: has more than {max_pixels:,} pixels, this server's limit: make it smaller"
    raise Refusal(400, said, "image")


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}.."
    return repr(text.encode(errors="replace").decode())
