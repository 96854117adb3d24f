"""Tiles of VAEs over ranks: the model's own tiled results, whoever computed the tiles."""

import pytest
import torch

from tests.helpers.ranks import raised_by, run_ranks
from tests.helpers.tile_cases import check_tiles

SIZES = {
    2: [(1, 5, 44, 28), (2, 1, 12, 12)],
    3: [(0, 1, 16, 16), (1, 9, 40, 52), (1, 1, 20, 12)],
    4: [(1, 1, 36, 16), (0, 5, 8, 8), (1, 5, 28, 28), (1, 1, 8, 40)],
}
"""Of each rank: batch, frames, height, width. Tiles are 16 x 16 at most."""


def all_kinds(kinds: list[str], ways: list[str]) -> list[list[str]]:
    sizes, said = SIZES[torch.distributed.get_world_size()], list[list[str]]()
    for kind in kinds:
        for way in ways:
            for dtype in (torch.float32, torch.float64):
                given = sizes if way == "owner" else [max(sizes)]
                said.append(check_tiles(kind, given, way, dtype))
    return said


@pytest.mark.parametrize("kind", ["kl", "wan", "wan2.2", "qwen"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_tiles_of_all_ranks_are_one_pool(kind: str, size: int) -> None:
    pytest.importorskip("diffusers")
    said = run_ranks(all_kinds, size, [kind], ["owner"])
    assert all(one == said[0] for one in said)
    print(said[0])
    assert all("items moved" in text for one in said[0] for text in one)
