"""Options of commands that read a data set from its table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from bascule.errors import ConfigError, QuestionError
from bascule.options import Group, Range, refuse
from bascule.workload.manifest import Manifest, read_manifest
from bascule.workload.tokens import TokenRule


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Options that say how a trainer turns a data set into tokens.

    Attributes:
        model: Model that decides how many tokens an image or clip has: flux.1, wan2.1, ltx2, ..
        columns: Columns with unknown names, by role: width=W,height=H,text=T; text= for no text.
        bucket: Sizes to which images are scaled: 720p, 1024:64 (area:step), or 1024x1024,832x1216.
        max_frames: Most frames that are used of a clip.
        fps: Frames per second that are used of a clip. Default: all frames.
        tokenizer: Tokenizer of transformers, a folder or a name. Default: one token per 4 bytes.
        skip_bad: Leave out rows that cannot be read.
    """

    model: Annotated[str, Group("Data to tokens")] = "flux.1"
    columns: str | None = None
    bucket: str | None = None
    max_frames: Annotated[int | None, Range(1, 10**6)] = None
    fps: Annotated[float | None, Range(1e-3, 1e4)] = None
    tokenizer: str | None = None
    skip_bad: bool = False

    def read_table(self, path: Path) -> Manifest:
        """Read the samples of a table; one `QuestionError` asks for all that it does not say."""
        try:
            return self._read(path)
        except QuestionError as error:
            question, answers = error, dict[str, Any](error.options)
        if self.columns and "columns" in answers:
            answers["columns"] = f"{self.columns},{answers['columns']}"
        try:  # the next question, or error
            rest = replace(self, **answers).read_table(path).summary()[0].rstrip(".")
        except ConfigError as error:
            rest, answers = str(error), answers | getattr(error, "options", {})
        raise QuestionError(f"{question}. Then: {rest.removeprefix(f'{path}: ')}", **answers)

    def _read(self, path: Path) -> Manifest:
        pairs = [pair.partition("=") for pair in (self.columns or "").split(",") if pair]
        if wrong := next((name for name, sign, _ in pairs if not sign), None):
            raise ConfigError(f"--columns {self.columns}: {wrong} has no =; write width=W,height=H")
        rule = TokenRule.of_model(
            self.model,
            bucket=self.bucket,
            fps=self.fps,
            max_frames=self.max_frames,
            tokenize=None if self.tokenizer is None else _tokenizer(self.tokenizer),
        )
        columns = {name.strip(): column.strip() for name, _, column in pairs}
        return read_manifest(path, rule, columns=columns, skip_bad=self.skip_bad)


@dataclass(frozen=True, kw_only=True)
class ManifestOptions(TokenOptions):
    """Options on the table of a data set.

    Attributes:
        manifest: Table of your samples (.parquet, .csv, .json, .jsonl, .tar, .toml), or a folder.
    """

    manifest: Annotated[Path | None, Group("Data")] = None

    def read_manifest(self, max_tokens: int | None = None) -> Manifest:
        """Read the samples of --manifest; refuse samples of more than `max_tokens`."""
        assert self.manifest is not None
        manifest = self.read_table(self.manifest)
        if max_tokens is not None and (longest := int(manifest.lens.max())) > max_tokens:
            wrong = f"--max-tokens {max_tokens}: a sample of {self.manifest} has {longest:,} tokens"
            raise ConfigError(f"{wrong}: raise it, or scale images down, as by --bucket 256:16")
        return manifest

    def check_manifest(self, *others: str) -> None:
        """Refuse options that need --manifest (and the command's `others`) if it is not given."""
        if self.manifest is None:
            names = "columns", "bucket", "fps", "max_frames", "tokenizer", "skip_bad", *others
            refuse(self, names, "only for --manifest")


def _tokenizer(name: str) -> Callable[[Sequence[str]], Sequence[int]]:
    """Return a function that counts tokens of texts by a tokenizer of transformers."""
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
    except ImportError:
        raise ConfigError("--tokenizer: pip install 'bascule[transformers]'") from None
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"--tokenizer {name}: cannot be read: {reason}") from None

    def count(texts: Sequence[str]) -> Sequence[int]:
        return [len(ids) for ids in tokenizer(list(texts))["input_ids"]] if texts else []

    return count
