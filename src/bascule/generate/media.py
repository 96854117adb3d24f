"""Images, videos and records as files, which appear whole or not at all."""

import importlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bascule.errors import ConfigError

IMAGE, VIDEO = ".png", ".mp4"


def check_can_write(ending: str) -> None:
    """Refuse videos if the library that writes them is missing."""
    if ending == VIDEO:
        _av()


def write_media(path: Path, frames: Sequence[Image.Image], fps: int) -> None:
    """Write an image, or the frames of a video (H.264, sides cut to even numbers)."""
    with _appearing(path) as partial:
        if path.suffix == IMAGE:
            frames[0].save(partial, format="PNG")
        else:
            _write_video(partial, frames, fps)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write the settings and times of an output, as JSON."""
    with _appearing(path) as partial:
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """Yield where to write a file, then move it into its place; remove it if writing fails."""
    partial = path.with_name(f".{path.name}")
    try:
        yield partial
        os.replace(partial, path)
    except Exception as error:  # PyAV raises errors of many kinds
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--out: {path} cannot be written: {reason}") from error


def _write_video(path: Path, frames: Sequence[Image.Image], fps: int) -> None:
    av = _av()
    width, height = (side // 2 * 2 for side in frames[0].size)
    with av.open(str(path), "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            pixels = np.asarray(frame.convert("RGB"))[:height, :width]
            image = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            file.mux(stream.encode(image))
        file.mux(stream.encode(None))


def _av() -> Any:
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise ConfigError(
            "videos are written by PyAV, which is not installed: pip install 'bascule[video]'"
        ) from error
