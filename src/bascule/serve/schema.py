"""What `/openapi.json` says of the server's calls: bodies, queries and answers."""

from functools import partial
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from bascule.serve.forms import ALIASES, Form, ImageForm
from bascule.serve.status import Status

_answer: Any = partial(create_model, __config__=ConfigDict(extra="forbid"))
_Text = str | None

FAULT = _answer("Fault", message=str, type=str, param=_Text, code=_Text)
ERROR = _answer("Error", error=FAULT)
IMAGE = _answer("Image", id=str, seed=int, b64_json=(str, None), url=(str, None))
IMAGES = _answer("Images", created=int, output_format=str, data=list[IMAGE])
VIDEO = _answer(
    "Video",
    **dict.fromkeys(("id", "model", "seconds", "size", "prompt"), str),
    object=Literal["video"],
    status=Literal["queued", "in_progress", "completed", "failed"],
    progress=int,
    created_at=int,
    completed_at=int | None,
    error=dict[str, str] | None,
)
_PAGE: Any = {"first_id": _Text, "last_id": _Text, "has_more": bool}
VIDEOS = _answer("Videos", object=Literal["list"], data=list[VIDEO], **_PAGE)
DELETED = _answer("Deleted", id=str, object=Literal["video.deleted"], deleted=bool)
MODEL = _answer("Model", id=str, object=Literal["model"], created=int, owned_by=str)
MODELS = _answer("Models", object=Literal["list"], data=list[MODEL])
LORA = _answer("Lora", id=str, object=Literal["lora"])
LORAS = _answer("Loras", object=Literal["list"], data=list[LORA])
LORA_REMOVED = _answer("LoraRemoved", __base__=LORA, deleted=bool)
_ROW: Any = {"object": Literal["request"], "prompt": str, "settings": dict[str, Any]}
REQUEST = _answer("Request", **get_type_hints(Status) | _ROW)
MADE = _answer("Made", object=Literal["list"], data=list[REQUEST])
REQUESTS = _answer("Requests", __base__=MADE, kind=str, takes_image=bool, model=str, num_ranks=int)
HEALTH = _answer("Health", status=Literal["ok"])


def query_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Return how OpenAPI describes the query of a call."""
    fields = kind.model_json_schema()["properties"].items()
    return {
        "parameters": [{"name": name, "in": "query", "schema": field} for name, field in fields]
    }


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Return how OpenAPI describes the body of a call: fields, other names, and the pictures."""
    media = dict[str, Any]()
    for name, picture in (
        ("application/json", {"type": "string", "contentEncoding": "base64"}),
        ("multipart/form-data", {"type": "string", "format": "binary"}),
    ):
        schema = kind.model_json_schema()
        fields = schema["properties"]
        for alias, field in ALIASES.items():
            if field in fields:
                fields[alias] = fields[field] | {"description": f"the same as {field}"}
        if issubclass(kind, Form):
            for side in ("width", "height"):
                fields[side] = {"type": "integer", "description": "both give the size"}
            pictures = {"anyOf": [picture, {"type": "array", "items": picture}]}
            fields["image" if issubclass(kind, ImageForm) else "input_reference"] = pictures
        media[name] = {"schema": schema}
    return {"requestBody": {"required": True, "content": media}}
