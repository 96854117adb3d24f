"""Encoders: calls that cannot be cut into items, outputs that cannot, and VAEs without tiles."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from bascule.encoders.encoder import EncoderOptions
from bascule.encoders.items import TABLES, EncoderTable, called_with
from bascule.encoders.tiled_vae import TileCalls, noted, settings_of
from tests.helpers.tile_cases import tiny_vae

ROWS, QWEN = EncoderTable(), next(iter(TABLES.values()))
GRIDS, PATCHES = torch.tensor([(1, 4, 6), (3, 2, 2)]), torch.zeros(36, 2)


def cut(table: EncoderTable, **call: Any) -> Callable[[], object]:
    return lambda: table.cut(call)


def parts(output: torch.Tensor, table: EncoderTable, **call: Any) -> Callable[[], object]:
    return lambda: table.cut_output(output, table.cut(call))


def encode(x: int, y: int | None = None) -> None: ...


def packed(*images: int) -> None: ...


def tiles(way: str, x: torch.Tensor, *sizes: int) -> Callable[[], object]:
    def call() -> object:
        vae = tiny_vae("wan")
        if sizes:
            vae.enable_tiling(*sizes)
        return noted(vae, way, x)

    return call


def no_number() -> object:
    vae = tiny_vae("kl")
    vae.tile_latent_min_size = "8"
    return settings_of(TileCalls(vae))


UNLIKE = ("differ in their number of items",)


def option(**wrong: Any) -> Callable[[], object]:
    return lambda: EncoderOptions(**wrong)


CASES = [
    ("features_for", option(features_for="none"), ("features_for='none'", '"owner"')),
    ("timeout_s", option(timeout_s=0), ("timeout_s=0", "at least 0.001")),
    ("unlike rows", cut(ROWS, x=torch.eye(3), mask=torch.ones(2, 2)), UNLIKE),
    ("no dims", cut(ROWS, x=torch.tensor(1.0)), UNLIKE),
    ("too few patches", cut(QWEN, hidden_states=PATCHES[:-1], grid_thw=GRIDS), UNLIKE),
    ("no rows", parts(torch.tensor(1.0), ROWS, x=torch.eye(3)), ("cannot be cut into 3 items",)),
    (
        "output of other rows",
        parts(PATCHES[:-1], QWEN, hidden_states=PATCHES, grid_thw=GRIDS),
        ("cannot be cut into 2 items of sizes",),
    ),
    (
        "missing",
        lambda: called_with(encode, (), {}),
        ("does not accept these arguments: missing a required",),
    ),
    ("takes *args", lambda: called_with(packed, (1, 2), {}), ("has *args",)),
    ("no VAE", lambda: settings_of(TileCalls(nn.Linear(2, 2))), ("a Linear cannot tile",)),
]
SMALL, STILL = torch.zeros(1, 4, 1, 8, 8), torch.zeros(1, 3, 8, 8)
if find_spec("diffusers"):
    CASES += [
        ("tile of text", no_number, ("tile_latent_min_size of the AutoencoderKL is '8'",)),
        (
            "tiles below a latent",
            tiles("decode", SMALL, 1, 1, 1, 1),
            ("cannot decode a sample of",),
        ),
        ("a video without frames", tiles("encode", STILL), ("cannot encode a sample of shape",)),
    ]
