"""What several files of distributed tests are given, and which cases wait for `make stress`."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

NAMES = ("chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png", "hubble_deep_field.jpg")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is not selected by marks
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Of the cases of a test marked `some(n)`, n stay, spread over them; the others are stress.

    Whoever names a file or a test on the command line gets the same choice. Files with slow tests
    begin first, so that no process waits for a long one at the end.
    """
    cases = defaultdict[tuple[Path, str], list[pytest.Function]](list)
    for item in items:
        if item.get_closest_marker("some") and not item.get_closest_marker("stress"):
            cases[item.path, item.originalname].append(item)
    for alike in cases.values():
        marker = alike[0].get_closest_marker("some")
        assert marker is not None
        (number,) = marker.args
        kept = np.linspace(0, len(alike) - 1, number).round() if number > 1 else [len(alike) // 2]
        for place in set(range(len(alike))).difference(kept):
            alike[place].add_marker(pytest.mark.stress)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


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
