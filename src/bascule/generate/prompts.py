"""The prompts of `bascule generate`, and the names of what is made of them. Imports no torch."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bascule.errors import ConfigError
from bascule.generate.generate_options import RANGES, TINY, TINY_WAN, GenerateOptions
from bascule.plan.checks import number, whole
from bascule.plan.files import parse_json, read_lines

_MOST_PROMPTS = 10**6
_OF_ALL = "negative_prompt", "width", "height", "frames", "steps", "guidance"
_OF_TINY = {"width": 256, "height": 256, "steps": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one output is made from; None leaves a value to the pipeline.

    Attributes:
        prompt: The text.
        negative_prompt: What to keep away from.
        width: Pixels.
        height: Pixels.
        frames: Of a video.
        steps: Denoising steps.
        guidance: How strongly the text guides.
        seed: Of the noise.
    """

    prompt: str
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0

    def name(self, place: int, options: GenerateOptions) -> str:
        """Of its output, without an ending; another one where pixels would be others."""
        chosen = options.model, options.dtype, options.tiles
        text = repr((chosen, sorted(asdict(self).items())))
        return f"{place:05d}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"

    @property
    def work(self) -> float:
        """How long it takes, in comparison with others of the same pipeline: about its pixels."""
        known = 1024, 1024, 1, 50
        sizes = self.width, self.height, self.frames, self.steps
        width, height, frames, steps = (
            one or other for one, other in zip(sizes, known, strict=True)
        )
        return float(width * height * frames * steps)


def read_prompts(options: GenerateOptions) -> list[Prompt]:
    """The prompts that options give, in their order.

    Raises:
        ConfigError: There is none, or a line of the file is wrong; names it.
    """
    options.check()
    shared: dict[str, Any] = {}
    if options.model in (TINY, TINY_WAN):
        shared |= _OF_TINY | ({"frames": 9} if options.model == TINY_WAN else {})
    for name in _OF_ALL:
        if (value := getattr(options, name)) is not None:
            shared[name] = value
    found = list[Prompt]()
    given: list[dict[str, Any]] = [{"prompt": text} for text in options.prompt]
    for place, row in enumerate(given or _rows(options)):
        own: dict[str, Any] = {"seed": options.seed + place, **row}
        found.append(Prompt(**(shared | own)))
    if not found:
        raise ConfigError(f"--prompts {options.prompts}: has no prompt: give one a line")
    return found


def _rows(options: GenerateOptions) -> Iterator[dict[str, Any]]:
    """What each line of the file says."""
    path = options.prompts
    assert path is not None
    is_json = path.suffix in (".jsonl", ".json")
    for place, line in enumerate(read_lines(path), start=1):
        where = f"--prompts {path}, line {place}"
        if place > _MOST_PROMPTS:
            raise ConfigError(f"{where}: at most {_MOST_PROMPTS} lines")
        if not line.strip():
            continue
        yield _row(where, parse_json(line, where)) if is_json else {"prompt": line.strip()}


def _row(where: str, row: Any) -> dict[str, Any]:
    """A JSON object with a prompt, and fields that are known."""
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ConfigError(f'{where}: give a JSON object with a "prompt" of text')
    unknown = sorted(row.keys() - Prompt.__dataclass_fields__.keys())
    if unknown:
        known = ", ".join(Prompt.__dataclass_fields__)
        raise ConfigError(f"{where}: {unknown[0]!r} is not known: give some of {known}")
    for name, (least, most) in RANGES.items():
        if (value := row.get(name)) is not None:
            whole(f"{where}: {name}", value, least, most)
    if (scale := row.get("guidance")) is not None:
        number(f"{where}: guidance", scale, most=1e6)
    if not isinstance(row.get("negative_prompt", ""), str):
        raise ConfigError(f"{where}: negative_prompt must be text")
    return {name: value for name, value in row.items() if value is not None}
