"""What a VAE asks of its encoder or decoder: noted tile by tile, and answered."""

from collections import deque

import pytest
import torch

from bascule.encoders.tiled_vae import TileCalls, answered, noted, pixels_of
from tests.helpers.tile_cases import other_vae, own_tiled, sample_of, tiny_vae, values_of

pytest.importorskip("diffusers")


@pytest.mark.parametrize("kind", ["hunyuan", "cogvideox", "ltx"])
def test_other_families_are_cut_and_blended_likewise(kind: str) -> None:
    vae, x = other_vae(kind).double(), sample_of(kind, "decode", (1, 9, 56, 56), 0, torch.float64)
    with torch.no_grad():
        tiles, _ = noted(vae, "decode", x)
        answers = deque([TileCalls(vae)(**tile) for tile in tiles])
        found = values_of(answered(vae, answers, "decode", x))
        expected = own_tiled(vae, "decode", x)
    assert not answers and len(tiles) >= 9
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_tile_costs_the_pixels_that_it_has_or_becomes() -> None:
    def costs(kind: str, way: str, size: tuple[int, ...]) -> list[int]:
        vae = tiny_vae(kind)
        tiles, _ = noted(vae, way, sample_of(kind, way, size, 0, torch.float32))
        return [pixels_of(TileCalls(vae), tile) for tile in tiles]

    assert costs("kl", "encode", (1, 1, 16, 20)) == [256, 128, 64, 32]
    assert costs("kl", "decode", (1, 1, 16, 20)) == [64, 32, 16, 8]
    for kind in ("wan", "qwen"):
        assert costs(kind, "encode", (1, 5, 20, 12)) == [5 * 192, 5 * 96]
        assert costs(kind, "decode", (1, 5, 20, 12)) == [5 * 48, 5 * 24]  # of three latents
        assert costs(kind, "decode", (1, 1, 12, 12)) == [36]


def test_whole_samples_are_one_tile_and_none_are_no_tile() -> None:
    vae = tiny_vae("wan")
    assert len(noted(vae, "encode", torch.zeros(3, 3, 5, 16, 16))[0]) == 3
    tiles, nothing = noted(vae, "encode", torch.zeros(0, 3, 5, 40, 40))
    assert not tiles and len(values_of(nothing)) == 0
