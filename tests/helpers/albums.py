"""A folder of photos and clips."""

from pathlib import Path

import numpy as np
from PIL import Image


def make_album(folder: Path, num_photos: int = 9) -> Path:
    """Photos and two clips of unlike sizes, some with captions."""
    draw = np.random.default_rng(0)
    folder.mkdir()

    def picture(width: int, height: int) -> Image.Image:
        return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))

    for k in range(num_photos):
        picture(16 + 16 * (k % 3), 16 + 16 * (k % 2)).save(folder / f"{k}.png")
    (folder / "0.txt").write_text("a cat 🐈")
    for clip, num_frames in (("walk", 3), ("run", 2)):
        (folder / clip).mkdir()
        for k in range(num_frames):
            picture(32, 16).save(folder / clip / f"frame{k + 8}.png")
        (folder / f"{clip}.txt").write_text(f"they {clip}")
    return folder
