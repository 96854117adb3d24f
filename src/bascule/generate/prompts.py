"""The prompts of `bascule generate`, and the names of their outputs. Imports no torch."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from bascule.errors import ConfigError
from bascule.generate.options import Count, GenerateOptions, Pixels, Scale, Seed
from bascule.generate.tiny import TINY, TINY_WAN
from bascule.options import check_options
from bascule.plan.files import read_json_lines, read_lines

_DEFAULTS: dict[str, dict[str, Any]] = {TINY: {"width": 256, "height": 256, "steps": 4}}
_DEFAULTS[TINY_WAN] = _DEFAULTS[TINY] | {"frames": 9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The settings of one output; None leaves a value to the pipeline."""

    prompt: str
    negative_prompt: str | None = None
    width: Pixels = None
    height: Pixels = None
    frames: Count = None
    steps: Count = None
    guidance: Scale = None
    seed: Seed = 0

    def name(self, place: int, options: GenerateOptions) -> str:
        """Return the name of its output, without an ending; it changes with the pixels."""
        text = repr((options.model, options.dtype, options.tiles, sorted(asdict(self).items())))
        return f"{place:05d}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"

    @property
    def work(self) -> float:
        """Its time relative to other prompts of the pipeline: about its pixels."""
        sizes = (self.width or 1024) * (self.height or 1024) * (self.frames or 1)
        return float(sizes * (self.steps or 50))


def read_prompts(options: GenerateOptions) -> list[Prompt]:
    """Return the prompts of the options, in order; ConfigError names a line that is wrong."""
    options.check_source()
    common = dict(_DEFAULTS.get(options.model, {}))
    for field in fields(Prompt)[1:-1]:
        if (value := getattr(options, field.name)) is not None:
            common[field.name] = value
    rows = [("--prompt", {"prompt": text}) for text in options.prompt] or list(_rows(options))
    if not rows:
        raise ConfigError(f"--prompts {options.prompts}: has no prompt: give one a line")
    return [
        _prompt(where, {**common, "seed": options.seed + place, **row})
        for place, (where, row) in enumerate(rows)
    ]


def _rows(options: GenerateOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the settings of each line of the file, after its place."""
    path = options.prompts
    assert path is not None
    if path.suffix not in (".jsonl", ".json"):
        lines = (line.strip() for line in read_lines(path))
        yield from ((f"{path}", {"prompt": line}) for line in lines if line)
        return
    names = [field.name for field in fields(Prompt)]
    for where, row in read_json_lines(path):
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise ConfigError(f'{where}: give a JSON object with a "prompt" of text')
        if unknown := sorted(row.keys() - set(names)):
            raise ConfigError(
                f"{where}: {unknown[0]!r} is not known: give some of {', '.join(names)}"
            )
        if not isinstance(row.get("negative_prompt") or "", str):
            raise ConfigError(f"{where}: negative_prompt must be text")
        yield where, {name: value for name, value in row.items() if value is not None}


def _prompt(where: str, settings: dict[str, Any]) -> Prompt:
    prompt = Prompt(**settings)
    try:
        check_options(prompt)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return prompt
