"""Tiles of VAEs over ranks: the model's own tiled results, whoever computed the tiles."""

import runpy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bascule.encoders import EncoderOptions, EncoderTable, TiledVAE
from tests.helpers.encoder_cases import check_gradients, gradients_of
from tests.helpers.pages import ROOT
from tests.helpers.pipeline_cases import generated, make_pipeline, prompt_of, seeded
from tests.helpers.ranks import by_one_rank, on_ranks, raised_by, run_ranks
from tests.helpers.tile_cases import own_tiled, sample_of, tiny_vae, values_of

pytest.importorskip("diffusers")

SIZES = {
    2: [(1, 5, 44, 28), (2, 1, 12, 12)],
    3: [(0, 1, 16, 16), (1, 9, 40, 52), (1, 1, 20, 12)],
    4: [(1, 1, 36, 16), (0, 5, 8, 8), (1, 5, 28, 28), (1, 1, 8, 40)],
}
"""Of each rank: batch, frames, height, width. Tiles are 16 x 16 at most."""
SHARED = {2: [(1, 5, 44, 28), (1, 1, 12, 12)], 3: [(2, 3, 20, 36)], 4: [(1, 1, 16, 24)]}
"""What all ranks give, one after another; also fewer tiles than ranks."""
FLOAT, DOUBLE = torch.float32, torch.float64


def check_tiles(vae: Any, kind: str, sizes: list[tuple[int, ...]], features_for: str) -> list[str]:
    """Both ways, beside the model's own tiles; return what the tiles of each way say."""
    rank, said = dist.get_rank(), list[str]()
    options = EncoderOptions(features_for=features_for)  # pyright: ignore[reportArgumentType]
    tiled, place = TiledVAE(vae, options=options), rank if features_for == "owner" else 0
    for way in ("encode", "decode"):
        x = sample_of(kind, way, sizes[place], place, DOUBLE)
        with torch.no_grad():
            state = dict(vars(vae))
            found = values_of(getattr(tiled, way)(x))
            assert vars(vae) == state and not vae.use_tiling
            expected = own_tiled(vae, way, x) if len(x) else found
        is_owner = features_for != "first" or rank == 0
        assert len(found) == len(x) * is_owner and found.shape[1] == expected.shape[1]
        if is_owner:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        said.append(str(tiled.last))
    return said


def check_training(vae: Any, kind: str) -> None:
    """Gradients of images, and of all parameters; one rank has an image, and others have none."""
    rank = dist.get_rank()
    plain, tiled = tiny_vae(kind).double(), TiledVAE(vae)
    for way in ("encode", "decode"):
        x = sample_of(kind, way, (int(rank == 0), 3, 28, 20), rank, DOUBLE).requires_grad_()
        found = values_of(getattr(tiled, way)(x))
        weights = torch.arange(found.numel(), dtype=DOUBLE).sin().view_as(found)
        (found * weights).sum().backward()
        if rank == 0:
            y = x.detach().requires_grad_()
            (own_tiled(plain, way, y) * weights).sum().backward()
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-12)
        check_gradients(gradients_of(vae), gradients_of(plain))


def all_tiles(kind: str) -> tuple[list[str], list[list[str]]]:
    size, vae = dist.get_world_size(), tiny_vae(kind).double()
    owned = check_tiles(vae, kind, SIZES[size], "owner")
    shared = [check_tiles(vae, kind, [x], way) for x in SHARED[size] for way in ("all", "first")]
    check_training(vae, kind)
    return owned, shared


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(
            *(kind, size),
            marks=[] if (kind, size) in (("kl", 3), ("wan2.2", 2)) else pytest.mark.stress,
        )
        for kind in ("kl", "wan", "wan2.2", "qwen")
        for size in SIZES
    ],
)
def test_tiles_and_gradients_are_the_models_own(kind: str, size: int) -> None:
    said = run_ranks(all_tiles, size, kind)
    assert all(one == said[0] for one in said)
    assert all("items moved" in text and "none" not in text for text in said[0][0])


def rows_of_calls() -> list[list[int]]:
    """Tiles of each call of the decoder, of one sample that both ranks want, and of three."""
    vae, rows = tiny_vae("kl"), [list[int](), list[int]()]
    tiled = TiledVAE(vae, options=EncoderOptions(features_for="all"))
    for num_samples, own in ((1, rows[0]), (3, rows[1])):
        hook = vae.decoder.register_forward_pre_hook(
            lambda _, args, own=own: own.append(len(args[0]))
        )
        with torch.no_grad():
            tiled.decode(sample_of("kl", "decode", (num_samples, 1, 40, 40), 0, FLOAT))
        hook.remove()
    return rows


def test_a_call_has_as_many_tiles_as_the_models_own() -> None:
    one, several = zip(*run_ranks(rows_of_calls, 2), strict=True)
    assert all(set(rows) == {1} for rows in one)
    assert all(max(rows) == 3 for rows in several)
    assert sum(map(sum, several)) == 3 * sum(map(sum, one))
    assert sum(map(len, several)) < 2 * sum(map(len, one))


def all_pools() -> list[str]:
    """Unlike samples of a rank; a mesh's axis; and a VAE that tiles by itself."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    vae = tiny_vae("qwen")
    tiled = TiledVAE(vae, mesh_or_group=mesh["columns"])
    said = list[str]()
    sizes = [[], [(1, 5, 16, 40), (1, 1, 16, 16)], [(1, 1, 8, 8)], [(1, 1, 40, 16)]][rank]
    with torch.no_grad():
        xs = [sample_of("qwen", "decode", size, rank, FLOAT) for size in sizes]
        found = tiled.decode(xs, return_dict=False)
        assert len(found) == len(xs)
        for x, (one,) in zip(xs, found, strict=True):
            torch.testing.assert_close(one, own_tiled(vae, "decode", x))
        said.append(str(tiled.last))
        vae.enable_tiling(12, 12, 8, 8)
        x = sample_of("qwen", "encode", (1, 1, 20, 20), rank, FLOAT)
        found = values_of(tiled.encode(x))
        torch.testing.assert_close(found, values_of(vae.encode(x)))
        said.append(str(tiled.last))
    return said


def test_unlike_samples_over_an_axis_of_a_mesh_and_tiles_of_ones_own() -> None:
    said = run_ranks(all_pools, 4)
    assert said[0] == said[1] and said[2] == said[3] and said[0] != said[2]
    assert said[0] == [
        "6 of 9 items moved: imbalance 1.03 instead of 2.00",
        "none of 18 items moved: imbalance 1.00 as given; no plan gains enough",
    ]


def pipelines() -> list[int]:
    """Pixels of pipelines that are not edited; images that each rank got."""
    rank, counts = dist.get_rank(), list[int]()
    ways: tuple[tuple[str, Any], ...] = ("flux", "all"), ("flux", "first"), ("wan", "all")
    for name, way in ways:
        pipeline, prompt = make_pipeline(name), prompt_of(name, is_guided=False)
        vae, config = pipeline.vae, dict(pipeline.config)
        vae.enable_tiling()
        expected = generated(name, pipeline, prompt, generator=seeded(1))
        vae.disable_tiling()
        options = EncoderOptions(features_for=way)
        tiled = TiledVAE(vae, options=options)
        installed = tiled.install(pipeline)
        assert isinstance(pipeline.vae, type(vae)) and dict(pipeline.config) == config
        found = generated(name, pipeline, prompt, generator=seeded(1))
        assert "items moved" in str(tiled.last)
        if way == "all" or rank == 0:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        counts.append(len(found))
        pipeline.vae.enable_tiling()
        assert vae.use_tiling
        installed.undo()
        assert pipeline.vae is vae
        before = tiled.last
        torch.testing.assert_close(
            generated(name, pipeline, prompt, generator=seeded(1)), expected, rtol=0.0, atol=0.0
        )
        assert tiled.last is before
    return counts


def test_a_pipeline_that_is_not_edited_decodes_over_ranks() -> None:
    said = run_ranks(pipelines, 2)
    assert said == [[1, 1, 1], [1, 0, 1]]


class Refusing:
    """Fails for a latent of 1000."""

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if float(args[0].max()) > 100.0:
            raise ValueError("this tile cannot be decoded")


@on_ranks(3)
def test_wrong_uses_are_one_sentence_on_all_ranks() -> None:
    """Most calls are wrong on the last rank alone."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    vae, other = tiny_vae("kl"), tiny_vae("wan")
    vae.post_quant_conv = None

    def refuse(words: str, call: Any, *args: Any, **kwargs: Any) -> None:
        said = kinds, text = raised_by(call, *args, **kwargs)
        assert words in text, text
        assert {"CommError", "ConfigError"} & set(kinds)
        assert said == by_one_rank(lambda: said)

    def made(words: str, change: Any, model: Any = vae, **options: Any) -> None:
        if is_last:
            change()
        refuse(words, TiledVAE, model, options=EncoderOptions(**options))

    refuse(
        "a Linear cannot tile (needs use_tiling, ", TiledVAE, nn.Linear(2, 2) if is_last else vae
    )
    made("leave out options.table", lambda: None, table=EncoderTable())
    stride = "tile_sample_stride_width of the AutoencoderKLWan is 24, more than its tile size 16"
    made(stride, lambda: setattr(other, "tile_sample_stride_width", 24), other)
    other.tile_sample_stride_width = 12
    height = "tile_sample_min_height of the AutoencoderKLWan is 0: a tile needs a number above 0"
    made(height, lambda: setattr(other, "tile_sample_min_height", 0), other)
    other.tile_sample_min_height = 16
    made("'dropout': 0.1", lambda: other.register_to_config(dropout=0.1), other)
    made("disagree on weights", lambda: nn.init.ones_(vae.decoder.conv_in.weight))
    vae = tiny_vae("kl")
    vae.decoder.register_forward_pre_hook(Refusing())
    z = sample_of("kl", "decode", (1, 1, 44, 28), 0, FLOAT)
    with torch.no_grad():
        tiled, image = TiledVAE(vae), z[:, :1].expand(1, 3, -1, -1)
        refuse("this tile cannot be decoded", tiled.decode, z * (1e6 if is_last else 1.0))
        refuse("cannot decode a sample of shape", tiled.decode, z[:, :, 0] if is_last else z)
        way = "disagree on call: ranks [0, 1]: encode; ranks [2]: decode"
        refuse(way, tiled.decode if is_last else tiled.encode, z if is_last else image)
        vae.tile_latent_min_size = 6 if is_last else 8
        refuse("'tile_latent_min_size': 6", tiled.decode, z)
        vae.tile_latent_min_size = 8
        assert len(tiled.decode(z).sample) == 1  # all of them can go on
        shared = TiledVAE(vae, options=EncoderOptions(features_for="all"))
        shapes = "disagree on items: ranks [0, 1]: shapes [(1, 2, 22, 14)] of 1 tensors"
        refuse(shapes, shared.decode, z[:, :, :-1] if is_last else z)
        refuse("disagree on items", shared.decode, z + 1 if is_last else z)
        assert len(shared.decode(z).sample) == 1
    refuse("features_for='all' has no gradients: encode under torch.no_grad()", shared.decode, z)
    refuse("a Linear does not have this AutoencoderKL", shared.install, nn.Linear(2, 2))


def peaks(kind: str) -> list[dict[str, int]]:
    """Bytes that a decode holds at most: whole and tiled on one rank, and over ranks."""
    peak_bytes = runpy.run_path(str(ROOT / "benchmarks" / "measuring.py"))["peak_bytes"]
    vae, size = tiny_vae(kind), (1, 3, 80, 80)
    z, found = sample_of(kind, "decode", size, 0, FLOAT), list[dict[str, int]]()
    with torch.no_grad():
        for way in ("owner", "all"):
            tiled = TiledVAE(vae, options=EncoderOptions(features_for=way))  # pyright: ignore
            own = z if way == "all" or dist.get_rank() == 0 else z[:0]
            whole = peak_bytes(lambda: vae.decode(z))
            alone = peak_bytes(lambda: own_tiled(vae, "decode", z))
            over_ranks = peak_bytes(lambda tiled=tiled, own=own: tiled.decode(own))
            found.append({"whole": whole, "alone": alone, "over ranks": over_ranks})
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["wan", "kl", "qwen"])
def test_a_decode_over_ranks_holds_less_than_a_whole_one(kind: str) -> None:
    for rank in run_ranks(peaks, 2, kind):
        for held in rank:
            assert held["over ranks"] <= 0.4 * held["whole"]
            assert held["over ranks"] <= 1.4 * held["alone"]  # 49 tiles weigh as much as 8 channels
