"""Clips beside photos: folders of frames, and videos."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bascule.errors import ConfigError
from bascule.train.photos import PhotoOptions, PhotoStream


def grey(folder: Path, name: str, value: int, size: tuple[int, int] = (32, 16)) -> None:
    folder.mkdir(exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(folder / name)


def clip(folder: Path, values: list[int]) -> None:
    for number, value in enumerate(values):
        grey(folder, f"frame{number}.png", value)


def stream(folder: Path, **options: Any) -> PhotoStream:
    given: dict[str, Any] = {"clip_frames": 4, **options}
    return PhotoStream(folder, 1, options=PhotoOptions(**given))


def frames_of(clips: PhotoStream) -> list[int]:
    """The grey of each frame of the only sample."""
    batch = clips.samples([0])
    frame = batch.pos[batch.is_image][:, 0]
    values = ((batch.image[:, 0] + 1) * 127.5).round().int()
    return [int(values[frame == k].unique()) for k in range(int(frame.max()) + 1)]


def test_a_folder_of_numbered_frames_is_a_clip(tmp_path: Path) -> None:
    clip(tmp_path / "walk", list(range(11)))  # frame10 comes after frame9
    (tmp_path / "walk.txt").write_text("abc")
    (shape,) = stream(tmp_path).raw([0]).shapes
    assert (shape.frames, shape.image_tokens, shape.text_tokens, shape.grid_width) == (4, 8, 3, 2)
    assert frames_of(stream(tmp_path)) == [0, 3, 7, 10]  # evenly spaced
    assert frames_of(stream(tmp_path, clip_frames=11)) == list(range(11))


def test_photos_and_clips_are_one_data_set(tmp_path: Path) -> None:
    clip(tmp_path / "walk", [1, 2])
    grey(tmp_path, "a.png", 3)
    (tmp_path / "notes").mkdir()
    mixed = stream(tmp_path)
    assert mixed.files == ("a.png", "walk")
    assert sorted(shape.frames for shape in mixed.raw([0, 1]).shapes) == [1, 2]
    assert mixed.samples([0, 1]).image.shape == (6, 768)
    assert PhotoStream(tmp_path, 1).files == ("a.png",)


def test_a_clip_keeps_within_its_tokens(tmp_path: Path) -> None:
    for number in range(4):
        grey(tmp_path / "walk", f"{number}.png", 5, (64, 64))
    (shape,) = stream(tmp_path, max_tokens=16).raw([0]).shapes
    assert shape.frames == 4 and shape.image_tokens <= 16
    (shape,) = stream(tmp_path, max_tokens=2).raw([0]).shapes
    assert (shape.frames, shape.image_tokens) == (2, 2)


def test_a_video_is_a_clip(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "walk.mp4"), "w") as video:
        track = video.add_stream("mpeg4", rate=10)
        track.width, track.height, track.pix_fmt = 32, 16, "yuv420p"
        for value in np.linspace(0, 240, 7).astype(np.uint8):
            frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), value), format="rgb24")
            video.mux(track.encode(frame))
        video.mux(track.encode())
    clips = stream(tmp_path)
    (shape,) = clips.raw([0]).shapes
    assert (shape.frames, shape.image_tokens) == (4, 8)
    batch = clips.samples([0])
    frame = batch.pos[batch.is_image][:, 0]
    means = [float(batch.image[frame == k].mean()) for k in range(4)]
    assert means == pytest.approx([-1.0, -1 + 160 / 255, -1 + 320 / 255, -1 + 480 / 255], abs=0.06)


def test_what_cannot_be_read_is_skipped_or_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grey(tmp_path / "walk", "1.png", 1, (16, 16))
    grey(tmp_path / "walk", "2.png", 1, (32, 16))
    with pytest.raises(ConfigError, match="no readable photo"):
        stream(tmp_path)
    with pytest.raises(ConfigError, match="must have one"):
        stream(tmp_path, strict=True)
    (tmp_path / "film.mp4").write_bytes(b"no video")
    grey(tmp_path, "a.png", 3)
    if importlib.util.find_spec("av"):
        mixed = stream(tmp_path)
        assert mixed.files == ("a.png",) and mixed.skipped == 2
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"film\.mp4: .* pip install 'bascule\[video\]'"):
        stream(tmp_path)
