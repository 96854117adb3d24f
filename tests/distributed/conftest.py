"""What several files of distributed tests are given."""

from pathlib import Path

import pytest
from PIL import Image

NAMES = ("chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png", "hubble_deep_field.jpg")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real photos of different sizes from scikit-image, captions, and a file that is no photo."""
    skimage = pytest.importorskip("skimage")
    source = Path(skimage.__file__).parent / "data"
    folder = tmp_path_factory.mktemp("photos of any size")
    for number, name in enumerate(NAMES):
        with Image.open(source / name) as photo:
            photo.resize((photo.width // (number + 2), photo.height // (number + 2))).save(
                folder / name
            )
    (folder / "chelsea.txt").write_text("a cat 🐈")
    (folder / "broken.png").write_bytes(b"not a photo")
    return folder
