"""Options of `bascule serve`: the pixels that `bascule generate` makes with them."""

import importlib
import json
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from bascule.generate.options import GenerateOptions, Prompt
from bascule.serve import serving
from bascule.serve.options import ServeOptions
from bascule.serve.service import Service
from tests.helpers.ranks import raised_by, run_ranks

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.slow

Settings = dict[str, Any]
SIZES: Settings = {"width": 192, "height": 192, "steps": 4}
PROMPTS = [
    Prompt(prompt="a boat", seed=3, **SIZES),
    Prompt(prompt="two boats", negative_prompt="fog", guidance=3.0, seed=4, **SIZES),
]
PLAIN: Settings = {}
OFFLOADED: Settings = {"offload": True, "guidance_ranks": 2, "longest_ring": 1}
SPARSE: Settings = {"sparse": 0.3, "wire": "int8", "ulysses": 2}
FIRST_BLOCK: Settings = {"cache": "first-block:0.3"}
TAYLOR: Settings = {"cache": "taylorseer:2", "ring": 2}
HALVES: Settings = {"dtype": "bfloat16", "replicas": 2, "tiles": True}


def served(folder: Path, settings: Settings) -> tuple[list[Path], set[tuple[int, ...]]]:
    """Outputs of a server with these options, and the ranks that had them; for rank 0."""
    ids, ranks, stopping = list[str](), set[tuple[int, ...]](), threading.Event()

    class Asked(Service):
        def start(self) -> None:
            super().start()
            ids.extend(one.id for one in self.submit(PROMPTS))
            threading.Thread(target=self.wait).start()

        def wait(self) -> None:
            while not self.health() and not all(self.status(one).has_ended for one in ids):
                time.sleep(0.01)
            stopping.set()

        def changed(self, task: Any, event: Any) -> None:
            super().changed(task, event)
            ranks.add(self._status(task).ranks)

    options = ServeOptions(port=0, spool=folder, **settings)
    options.check()
    with mock.patch.object(serving, "Service", Asked), mock.patch.object(serving, "_POLL_S", 0.02):
        serving.run_server(options, torch.device("cpu"), stopping.is_set)
    return [folder / "outputs" / f"{one}.png" for one in ids], ranks - {()}


def both(folder: Path, ways: list[Settings]) -> list[Any]:
    """Outputs of generate and of serve with each of the options, in one world."""
    from bascule.generate.generation import Generation

    torch.set_num_threads(1)
    made = list[Any]()
    for number, settings in enumerate(ways):
        out = folder / f"generated {number}"
        options = GenerateOptions(prompts=folder / "prompts.jsonl", out=out, **settings)
        run = Generation(options, torch.device("cpu"))
        run.run(lambda *_: None)
        found = [out / name for name in run.names]
        made.append((found, *served(folder / f"served {number}", settings)))
    return made


def pixels(paths: list[Path]) -> Any:
    return np.stack([np.asarray(Image.open(path)).astype(int) for path in paths])


def checked(num_ranks: int, folder: Path, ways: list[Settings], make: Any = both) -> list[Any]:
    """Images of a server and its ranks with each of the options; images as generate makes them."""
    lines = [{n: x for n, x in asdict(one).items() if x is not None} for one in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ways = [{n: num_ranks if x == 2 else x for n, x in way.items()} for way in ways]
    found = list[Any]()
    for way, sides in zip(ways, run_ranks(make, num_ranks, folder, ways)[0], strict=True):
        generated, by_server, ranks = sides
        images = pixels(by_server)
        apart = np.abs(pixels(generated) - images)
        assert len(images) == 2 and apart.max() <= 1, way
        assert apart.mean() < 1e-3, way  # some lie between two values
        found.append((images, ranks))
    return found


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_pixels_of_generate(num_ranks: int, tmp_path: Path) -> None:
    ways = [PLAIN, OFFLOADED, SPARSE, FIRST_BLOCK, TAYLOR, HALVES]
    (plain, _), *others = checked(num_ranks, tmp_path, ways)
    apart = [np.abs(images - plain).mean() for images, _ in others]
    assert apart[0] < 1e-3 and min(apart[1:4]) > 5e-3, apart
    seen = [ranks for _, ranks in others]
    if num_ranks == 2:  # of a mesh all, and of replicas one
        assert seen[1] == seen[3] == {(0, 1)} and seen[4] == {(0,), (1,)}


def in_a_graph(folder: Path, ways: list[Settings]) -> list[Any]:
    """Without inductor, which takes long."""
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return both(folder, ways)


@pytest.mark.nightly
def test_compiled_pixels_of_generate(tmp_path: Path) -> None:
    checked(2, tmp_path, [{"compile": True}], in_a_graph)


def refused(folder: Path) -> list[str]:
    """What a server says of options that its ranks or its model cannot have."""
    diffusers: Any = importlib.import_module("diffusers")
    said = [raised_by(served, folder / "0", {"degrees": (1, 4)})[1]]
    said.append(raised_by(served, folder / "1", {"replicas": 3})[1])
    with mock.patch.object(diffusers.FluxTransformer2DModel, "enable_cache", side_effect=KeyError):
        said.append(raised_by(served, folder / "2", {"cache": "first-block"})[1])
    return said


def test_what_ranks_or_a_model_cannot_do_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(refused, 2, tmp_path):
        assert "--degrees 1 4: requests have 1 2 ranks here: give some" in said[0]
        assert "on 2 ranks: the product of degrees must be 2" in said[1]
        assert "--cache first-block: diffusers does not cache a FluxTransformer2DModel" in said[2]
