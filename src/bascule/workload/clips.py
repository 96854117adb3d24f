"""Short clips: a folder of numbered frames, or a video file that PyAV reads.

At most so many frames of a clip are taken, evenly spaced, its first and last among them.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bascule.errors import ConfigError

VIDEO_SUFFIXES = frozenset((".m4v", ".mkv", ".mov", ".mp4", ".webm"))
"""File names that are taken for videos, in any case."""

_NUMBER = re.compile("[0-9]+$")


def clip_paths(folder: Path, frame_suffixes: frozenset[str]) -> Iterator[Path]:
    """The clips of a folder: subfolders with numbered frames, and videos; in any order."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir() and _frame_paths(path, frame_suffixes):
            yield path
        elif path.suffix.lower() in VIDEO_SUFFIXES:
            yield path


def read_frames(
    path: Path, most: int, frame_suffixes: frozenset[str], *, group: int = 1
) -> list[Image.Image]:
    """At most so many frames of a clip, of one size: one, and whole groups of frames.

    Raises:
        ConfigError: PyAV is missing, the video has no frame, or frames differ in size.
        Whatever decoders raise on damaged bytes.
    """
    if path.is_dir():
        frames = _of_folder(path, most, frame_suffixes, group)
    else:
        frames = _of_video(path, most, group)
    if not frames:
        raise ConfigError(f"{path} has no frame")
    sizes = {frame.size for frame in frames}
    if len(sizes) > 1:
        raise ConfigError(f"frames of sizes {sorted(sizes)}; all frames of a clip must have one")
    return frames


def check_videos(paths: list[Path]) -> None:
    """Refuse video files where nothing can read them.

    Raises:
        ConfigError: Names a file and what to install.
    """
    videos = [path for path in paths if path.suffix.lower() in VIDEO_SUFFIXES and path.is_file()]
    if videos:
        _pyav(videos[0])


def _frame_paths(folder: Path, suffixes: frozenset[str]) -> list[Path]:
    """Numbered images of a folder by their numbers, then names."""
    numbered = [
        (int(number[0]), path.name, path)
        for path in folder.iterdir()
        if path.suffix.lower() in suffixes and (number := _NUMBER.search(path.stem))
    ]
    return [path for *_, path in sorted(numbered)]


def _of_folder(path: Path, most: int, suffixes: frozenset[str], group: int) -> list[Image.Image]:
    paths = _frame_paths(path, suffixes)
    frames: list[Image.Image] = []
    for place in sorted(_chosen(len(paths), most, group)):
        with Image.open(paths[place]) as frame:
            frame.load()
            frames.append(frame)
    return frames


def _of_video(path: Path, most: int, group: int) -> list[Image.Image]:
    av = _pyav(path)
    with av.open(str(path)) as video:
        num_frames = sum(packet.size > 0 for packet in video.demux(video=0))
    wanted = _chosen(num_frames, most, group)
    with av.open(str(path)) as video:
        frames = enumerate(video.decode(video=0))
        return [frame.to_image() for place, frame in frames if place in wanted]


def _chosen(num_frames: int, most: int, group: int) -> set[int]:
    num = min(num_frames, most)
    num -= (num - 1) % group if num else 0
    places = np.linspace(0, num_frames - 1, num).round()
    return set(places.astype(int).tolist())


def _pyav(path: Path) -> Any:
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise ConfigError(
            f"{path}: videos are read by PyAV, which is not installed: "
            "pip install 'bascule[video]', or give folders of frames"
        ) from error
