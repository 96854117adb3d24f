"""Steps from pixels and captions, stage by stage: what balancing encoders is worth, and a picture.

    python benchmarks/bench_stages.py    # some minutes on two idle cores; draws docs/stages.svg

Two ranks of one thread train by `bascule bench` on photos of scikit-image of unlike sizes, with
captions of unlike lengths: text encoder (T5), VAE (AutoencoderKL) and MM-DiT, without and with
balancing, in turns. Encoders are tiny, with random weights. Targets: every stage's measured
speed-up is at least 95 % of the predicted one, and a step is never slower than without balancing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import skimage
from _common import write_results
from PIL import Image

NAMES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
SCALES = (0.25, 0.4, 0.6)
SOURCE = Path(skimage.__file__).parent / "data"
PICTURE = Path(__file__).parents[1] / "docs" / "stages.svg"
MODEL = ["--d-model", "128", "--num-heads", "2", "--num-double", "1", "--num-single", "1"]
ENCODERS = ["--vae", "tiny", "--text-encoder", "tiny"]


def write_photos(folder: Path) -> None:
    """Twelve photos, from 100 to 300 pixels high, with captions of 20 to 460 bytes."""
    for number, name in enumerate(NAMES):
        for place, scale in enumerate(SCALES):
            with Image.open(SOURCE / name) as photo:
                size = round(photo.width * scale), round(photo.height * scale)
                path = folder / f"{Path(name).stem}-{place}.png"
                photo.resize(size).save(path)
            path.with_suffix(".txt").write_text(
                "some words to encode " * (1 + 2 * number + 5 * place)
            )


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        photos = Path(home) / "photos"
        photos.mkdir()
        write_photos(photos)
        arguments = ["bench", "--photos", str(photos), "--ranks", "2", "--batch-size", "6"]
        arguments += [*MODEL, *ENCODERS, "--steps", str(options.steps), "--out", home]
        command = [sys.executable, "-m", "bascule.cli", *arguments, "--picture"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, str(options.picture)], check=True, env=environment)
        summary = json.loads((Path(home) / "summary.json").read_text())
    names = ("stages", "loss_difference", "grad_difference", "measured_ratio", "predicted_ratio")
    write_results("stages", {name: summary[name] for name in names})


if __name__ == "__main__":
    main()
