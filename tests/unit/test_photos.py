"""Folders of photos and clips: read as they are, and what cannot be read is named."""

import json
import logging
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bascule.errors import ConfigError
from bascule.train import photos
from bascule.train.photos import PhotoOptions, PhotoStream
from bascule.train.streams import SampleBatch, SampleStream, flow_noise, flow_timesteps


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(folder: Path, name: str, width: int = 32, height: int = 32, seed: int = 0) -> np.ndarray:
    pixels = picture(width, height, seed)
    Image.fromarray(pixels).save(folder / name)
    return pixels


def unpatchify(batch: SampleBatch, patch: int = 16) -> np.ndarray:
    """The only photo of a batch as (height, width, 3) uint8, placed by its positions."""
    pos = batch.pos[batch.is_image].long().numpy()
    rows, columns = pos[:, 1].max() + 1, pos[:, 2].max() + 1
    image = np.zeros((rows, patch, columns, patch, 3), dtype=np.uint8)
    values = ((batch.image.numpy() + 1) * 127.5).round().astype(np.uint8)
    for (_, row, column), token in zip(pos, values, strict=True):
        image[row, :, column] = token.reshape(3, patch, patch).transpose(1, 2, 0)
    return image.reshape(rows * patch, columns * patch, 3)


def only(folder: Path, **options: Any) -> SampleBatch:
    stream = PhotoStream(folder, 1, options=PhotoOptions(**options))
    assert len(stream.files) == 1
    return stream.batch(0)


def album(folder: Path, count: int) -> Path:
    for index in range(count):
        save(folder, f"{index:02d}.png", 16 * (1 + index % 3), 32, seed=index)
    return folder


@pytest.mark.parametrize("patch", [8, 16])
def test_a_photo_becomes_its_patches_around_its_centre(tmp_path: Path, patch: int) -> None:
    pixels = save(tmp_path, "a.png", 37, 51)
    batch = only(tmp_path, patch=patch)
    assert np.array_equal(unpatchify(batch, patch), pixels[1:49, 2:34])
    assert batch.image.dtype == torch.float32 and batch.image.abs().max() <= 1
    assert batch.seq_lens == batch.image_lens == [2 * 3 * (16 // patch) ** 2]


@pytest.mark.parametrize(
    ("width", "height", "max_tokens", "grid"),
    [
        (1, 1, 4096, (1, 1)),
        (1, 100, 4096, (6, 1)),
        (160, 160, 100, (10, 10)),
        (160, 160, 99, (9, 9)),
        (640, 320, 32, (4, 8)),
        (5000, 3, 10, (1, 10)),
        (3, 5000, 10, (10, 1)),
        (1600, 16, 7, (1, 7)),
        (64, 64, 1, (1, 1)),
    ],
)
def test_grid_of_a_photo(
    tmp_path: Path, width: int, height: int, max_tokens: int, grid: tuple[int, int]
) -> None:
    save(tmp_path, "a.png", width, height)
    batch = only(tmp_path, max_tokens=max_tokens)
    assert tuple((batch.pos[:, 1:].amax(dim=0) + 1).int().tolist()) == grid
    assert batch.image_lens == [grid[0] * grid[1]]


def test_scaling_keeps_the_picture(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 320, dtype=np.uint8)
    Image.fromarray(np.tile(ramp[None, :, None], (320, 1, 3))).save(tmp_path / "a.png")
    small = unpatchify(only(tmp_path, max_tokens=25))
    assert small.shape == (80, 80, 3)
    assert np.abs(small[40, :, 0].astype(int) - ramp[2::4]).max() <= 3


def test_every_kind_of_image_becomes_rgb(tmp_path: Path) -> None:
    kinds: dict[str, tuple[str, Any, int]] = {
        "bilevel.png": ("1", 1, 255),
        "float.tif": ("F", 0.5, 128),
        "gif.gif": ("P", 0, 0),
        "grey.jpg": ("L", 100, 100),
        "grey_alpha.png": ("LA", (0, 0), 255),
        **dict.fromkeys(("sixteen.png", "sixteen.tif"), ("I;16", 200 * 256 + 5, 200)),
        "thirtytwo.tif": ("I", 200 * 256 + 5, 200),
    }
    for name, (mode, value, _) in kinds.items():
        Image.new(mode, (32, 32), value).save(tmp_path / name)
    Image.new("CMYK", (32, 32), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg")
    Image.new("RGBA", (32, 32), (255, 0, 0, 128)).save(tmp_path / "half.png")
    palette = Image.new("P", (32, 32), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.save(tmp_path / "z1.png")
    palette.save(tmp_path / "z2.png", transparency=1)
    stream = PhotoStream(tmp_path, 12)
    assert stream.skipped == 0
    batch = stream.batch(0)
    order = [photo.path.name for photo in stream._draw(range(12))]  # pyright: ignore[reportPrivateUsage]
    tokens = ((batch.image + 1) * 127.5).round().int().split(batch.image_lens)
    seen = {
        name: tuple(part.reshape(-1, 3, 256)[0, :, 0].tolist())
        for name, part in zip(order, tokens, strict=True)
    }
    red, green, blue = seen.pop("cmyk.jpg")
    assert red > 230 and max(green, blue) < 40
    assert seen.pop("half.png")[0] == 255
    expected = {name: (grey,) * 3 for name, (_, _, grey) in kinds.items()}
    assert seen == expected | {"z1.png": (10, 20, 30), "z2.png": (255, 255, 255)}


def test_the_camera_orientation_is_applied(tmp_path: Path) -> None:
    pixels = picture(48, 32)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(unpatchify(only(tmp_path)), np.rot90(pixels, -1))


def damaged(folder: Path) -> list[str]:
    """Files that look like photos and cannot be decoded."""
    save(folder, "good.png")
    whole = (folder / "good.png").read_bytes()
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "flipped.png").write_bytes(whole[:200] + bytes([whole[200] ^ 255]) + whole[201:])
    (folder / "text.jpg").write_text("not a photo")
    save(folder, "cut.jpg", 64, 64)
    jpeg = (folder / "cut.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (folder / "gone.jpg").symlink_to(folder / "nothing.jpg")
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    sizes, check = struct.pack(">I", 13), struct.pack(">I", zlib.crc32(chunk))
    (folder / "bomb.png").write_bytes(whole[:8] + sizes + chunk + check + whole[33:])
    return ["bomb.png", "cut.jpg", "cut.png", "empty.png", "flipped.png", "gone.jpg", "text.jpg"]


def test_damaged_photos_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = damaged(tmp_path)
    save(tmp_path, "other.png", 48, 48)
    with caplog.at_level(logging.WARNING):
        streams = [PhotoStream(tmp_path, 2, rank=rank, world_size=2) for rank in range(2)]
    assert [stream.skipped for stream in streams] == [len(bad)] * 2
    assert streams[0].files == streams[1].files == ("good.png", "other.png")
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in bad)
    assert " object at 0x" not in record.getMessage()
    assert sorted(streams[0].batch(0).image_lens) == [4, 9]


def test_other_files_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "my photos"
    folder.mkdir()
    save(folder, "A photo.PNG")
    save(folder, "noise.png")
    (folder / "noise.png").rename(folder / ".noise.png")
    (folder / "notes.md").write_text("x")
    (folder / "readme").write_text("x")
    (folder / "album.png").mkdir()
    stream = PhotoStream(folder, 1, options=PhotoOptions(strict=True))
    assert stream.files == ("A photo.PNG",)
    assert stream.skipped == 0


def test_captions(tmp_path: Path) -> None:
    captions = {"a.png": "a 🦊", "b.png": "beside", "c.png": "listed"}
    for index, name in enumerate(captions):
        save(tmp_path, name, seed=index)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + " a 🦊\n".encode())
    (tmp_path / "b.txt").write_text("beside")
    rows = [{"file": "b.png", "caption": "unused"}, {"file": "c.png", "caption": "listed", "id": 1}]
    (tmp_path / "captions.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    save(tmp_path, "d.png", seed=4)
    stream = PhotoStream(tmp_path, 4, options=PhotoOptions(text_dim=8))
    batch = stream.batch(0)
    assert batch.text.shape == (6 + 6 + 6, 8)
    assert stream.text_dim == stream.vec_dim == 8
    table = stream._embedding  # pyright: ignore[reportPrivateUsage]
    names = [photo.path.name for photo in stream._draw(range(4))]  # pyright: ignore[reportPrivateUsage]
    lens = [total - image for total, image in zip(batch.seq_lens, batch.image_lens, strict=True)]
    for name, text, pooled in zip(names, batch.text.split(lens), batch.pooled, strict=True):
        expected = table[list(captions.get(name, "").encode())]
        assert torch.equal(text, expected)
        assert torch.allclose(pooled, expected.mean(dim=0) if len(expected) else torch.zeros(8))
    again = PhotoStream(tmp_path, 4, options=PhotoOptions(text_dim=8), seed=5)
    assert torch.equal(again._embedding, table)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("caption", "options", "num_tokens"),
    [
        (b"x" * 2000, {}, 512),
        (b"x" * 2000, {"max_text_tokens": 0}, 0),
        ("é".encode("latin-1"), {}, 1),  # another encoding is bytes
    ],
)
def test_long_and_odd_captions(
    tmp_path: Path, caption: bytes, options: dict[str, Any], num_tokens: int
) -> None:
    save(tmp_path, "a.png")
    (tmp_path / "a.txt").write_bytes(caption)
    assert only(tmp_path, **options).seq_lens == [4 + num_tokens]


def test_captions_of_no_photo_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, "a.png")
    (tmp_path / "captions.jsonl").write_text('{"file": "b.png", "caption": "\\ud800"}')
    assert only(tmp_path).seq_lens == [4]
    assert "names 1 missing photos: b.png" in caplog.text


def test_every_photo_comes_once_per_epoch_whatever_the_batch(tmp_path: Path) -> None:
    source = PhotoStream(album(tmp_path, 7), 3)
    drawn = [photo.path.name for photo in source._draw(range(21))]  # pyright: ignore[reportPrivateUsage]
    epochs = [drawn[0:7], drawn[7:14], drawn[14:21]]
    assert all(tuple(sorted(epoch)) == source.files for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    orders = [PhotoStream(tmp_path, 3, seed=seed).samples(range(21)).image for seed in (0, 0, 1)]
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0][:99], orders[2][:99])
    assert PhotoStream(tmp_path, 15).batch(3).sample_ids.tolist() == list(range(45, 60))


def test_ranks_share_one_global_batch(tmp_path: Path) -> None:
    album(tmp_path, 9)
    whole: SampleStream = PhotoStream(tmp_path, 6, seed=2)
    for step in range(4):
        one = whole.batch(step)
        for world_size in (2, 3, 6):
            of_rank = partial(PhotoStream, tmp_path, 6 // world_size, world_size=world_size, seed=2)
            parts = [of_rank(rank=rank).batch(step) for rank in range(world_size)]
            for name in ("image", "pos", "is_image", "pooled", "sample_ids"):
                joined = torch.cat([getattr(part, name) for part in parts])
                assert torch.equal(joined, getattr(one, name)), name
            noise = torch.cat([flow_noise(part, seed=1) for part in parts])
            assert torch.equal(noise, flow_noise(one, seed=1))
            times = torch.cat([flow_timesteps(part, seed=1) for part in parts])
            assert torch.equal(times, flow_timesteps(one, seed=1))


def test_ranks_that_gather_read_a_share_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And have the same samples as ranks that read all; one rank's refusal is all ranks'."""
    album(tmp_path, 7)
    (tmp_path / "03.png").write_bytes(b"x")
    read: list[Path] = []
    parts: list[Any] = []
    decode = photos._decode  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(photos, "_decode", lambda path, o: read.append(path) or decode(path, o))

    def first(settings: Any, error: Any, *, values: Any) -> Any:
        parts.append((settings, error, values))
        raise EOFError

    for rank in range(3):
        with pytest.raises(EOFError):
            PhotoStream(tmp_path, 2, rank=rank, world_size=3, gather=first)
    assert sorted(path.name for path in read) == [f"{place:02d}.png" for place in range(7)]
    assert len({str(settings) for settings, *_ in parts}) == 1
    alone = PhotoStream(tmp_path, 2, rank=1, world_size=3)
    values = [part for *_, part in parts]
    with caplog.at_level(logging.WARNING):
        shared = [
            PhotoStream(tmp_path, 2, rank=rank, world_size=3, gather=lambda *_, **__: values)
            for rank in range(3)
        ]
    assert {stream.files for stream in shared} == {alone.files} and len(alone.files) == 6
    assert torch.equal(shared[1].batch(1).image, alone.batch(1).image)
    assert [stream.skipped for stream in shared] == [1] * 3 and "03.png" in caplog.text
    parts.clear()
    with pytest.raises(EOFError):
        options = PhotoOptions(strict=True)
        PhotoStream(tmp_path, 2, rank=0, world_size=3, gather=first, options=options)
    assert "03.png" in str(parts[0][1])


@pytest.mark.parametrize("cache_bytes", [0, 4 * 768])
def test_the_cache_changes_nothing(tmp_path: Path, cache_bytes: int) -> None:
    album(tmp_path, 5)
    other = PhotoStream(tmp_path, 5, options=PhotoOptions(cache_bytes=cache_bytes))
    assert torch.equal(PhotoStream(tmp_path, 5).batch(1).image, other.batch(1).image)


def test_a_photo_that_changes_or_goes_later_is_named(tmp_path: Path) -> None:
    save(tmp_path, "a.png")
    stream = PhotoStream(tmp_path, 1, options=PhotoOptions(cache_bytes=0))
    save(tmp_path, "a.png", 64, 64)
    with pytest.raises(ConfigError, match=r"a\.png has changed its size"):
        stream.batch(0)
    (tmp_path / "a.png").unlink()
    with pytest.raises(ConfigError, match=r"cannot read the photo .*a\.png"):
        stream.batch(0)
