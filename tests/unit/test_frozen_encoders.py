"""VAEs and text encoders of a run: from folders, tiny, and what is refused."""

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bascule.bench.options import BenchOptions
from bascule.errors import ConfigError
from bascule.train.encoders import FrozenEncoders, load_encoders
from bascule.train.options import RunOptions
from bascule.train.photos import PhotoStream
from bascule.train.streams import patches

diffusers: Any = pytest.importorskip("diffusers")
transformers: Any = pytest.importorskip("transformers")
ALBUM = Path("album")


def loaded(**settings: Any) -> FrozenEncoders:
    return load_encoders(RunOptions(photos=ALBUM, **settings))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline's folders, as `save_pretrained` writes them."""
    home = tmp_path_factory.mktemp("pipeline")
    tiny = loaded(vae="tiny", text_encoder="tiny")
    assert tiny.vae is not None and tiny.text is not None
    wan = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1}
    wan |= {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4, "temperal_downsample": [True]}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
    clip = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 400}
    clip = transformers.CLIPTextConfig(**clip, num_attention_heads=2, max_position_embeddings=9)
    small = transformers.T5EncoderModel(transformers.T5Config(vocab_size=50, **t5))
    for name, model in {
        "vae": tiny.vae.vae,
        "text_encoder_2": tiny.text.encoder,
        "grey": diffusers.AutoencoderKL(1, norm_num_groups=8, block_out_channels=(8,)),
        "fast": diffusers.AutoencoderKLWan(**wan),
        "small": small,
        "alone": small,
        "clip": transformers.CLIPTextModel(clip),
        "wan/text_encoder": transformers.UMT5EncoderModel(
            transformers.UMT5Config(vocab_size=400, **t5)
        ),
    }.items():
        model.save_pretrained(home / name)
    transformers.ByT5Tokenizer(model_max_length=12).save_pretrained(home / "tokenizer_2")
    for name in ("small", "clip", "wan/tokenizer"):
        transformers.ByT5Tokenizer().save_pretrained(home / name)
    (home / "empty").mkdir()
    (home / "broken").mkdir()
    (home / "broken" / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    return home


def test_a_folder_holds_what_was_saved(folders: Path) -> None:
    torch.manual_seed(5)
    tiny = loaded(vae="tiny", text_encoder="tiny").settings
    first = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3))  # random weights leave the seed alone
    found = loaded(vae=str(folders / "vae"), text_encoder=str(folders / "text_encoder_2"))
    assert found.settings == tiny and found.vae is not None and found.text is not None
    assert not any(p.requires_grad for p in found.vae.parameters())
    assert not found.vae.vae.training and not found.text.encoder.training
    assert found.text.tokenize("a cat") == (transformers.ByT5Tokenizer()("a cat").input_ids, False)
    assert found.text.tokenize("a very long cat")[0][-1] == 1  # the end of a text stays
    assert found.text.tokenize("a very long cat")[1] and len(found.text.tokenize("x" * 99)[0]) == 12
    with torch.no_grad():  # the digest is of weights, and of constants
        next(found.vae.parameters()).view(-1)[3].add_(1e-3)
    assert found.settings != tiny
    scaled = diffusers.AutoencoderKL.from_pretrained(folders / "vae")
    scaled.register_to_config(scaling_factor=0.5)
    scaled.save_pretrained(folders / "scaled")
    assert loaded(vae=str(folders / "scaled")).settings != loaded(vae="tiny").settings


@pytest.mark.parametrize(("kind", "most"), [("clip", 9), ("wan/text_encoder", 99)])
def test_other_text_encoders(folders: Path, kind: str, most: int) -> None:
    text = loaded(text_encoder=str(folders / kind), dtype="bfloat16").text
    assert text is not None and text.width == 16
    ids, is_cut = text.tokenize("x" * 98)
    assert len(ids) == most and is_cut is (most < 99)
    found = text(input_ids=torch.tensor([ids]))
    assert found.shape == (1, most, 16) and found.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"vae": "grey"}, "--vae .*grey: needs images of 1 channel: give a VAE for RGB images"),
        ({"vae": "fast"}, "--vae .*fast: makes one latent frame of 2: give .* one of 4"),
        ({"vae": "empty"}, "--vae .*config.json cannot be read: give the folder of a VAE"),
        ({"vae": "nowhere"}, "--vae .*config.json cannot be read: give the folder of a VAE"),
        ({"vae": "broken"}, "--vae .*broken: cannot be loaded: "),
        ({"vae": "small"}, "--vae .*small: holds no model of diffusers: give AutoencoderKL, "),
        ({"text_encoder": "vae"}, "--text-encoder .*vae: holds a model of type None: give T5Enc"),
        ({"text_encoder": "empty"}, "--text-encoder .*empty: .* give the folder of a text encoder"),
        ({"text_encoder": "small"}, "--text-encoder .*: has 50 embeddings, and its tokenizer 384"),
        ({"text_encoder": "alone"}, "--text-encoder .*alone: has no tokenizer: put its files"),
    ],
)
def test_wrong_encoders_are_refused(folders: Path, settings: dict[str, str], said: str) -> None:
    places = {name: str(folders / folder) for name, folder in settings.items()}
    with pytest.raises(ConfigError, match=said) as raised:
        loaded(**places)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "library"),
    [({"vae": "tiny"}, "diffusers"), ({"text_encoder": "tiny"}, "transformers")],
)
def test_a_missing_library_is_named(
    settings: dict[str, str], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=f"{library} is not installed: pip install 'bascule"):
        loaded(**settings)


def test_options_of_bench_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="--loader moves samples before they are encoded"):
        BenchOptions(photos=ALBUM, vae="tiny", loader=True).check(2)


@pytest.fixture
def album(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    (tmp_path / "0.txt").write_text("a caption of many words")
    (tmp_path / "clip").mkdir()
    sizes = {"0": (50, 40), "1": (16, 33)} | {f"clip/{frame}": (16, 32) for frame in range(7)}
    for name, (width, height) in sizes.items():
        pixels = draw.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    return tmp_path


@pytest.mark.parametrize(("vae", "frames", "taken"), [("tiny", 7, 7), ("tiny-wan", 2, 5)])
def test_shapes_are_known_before_and_are_those_of_latents(
    album: Path, folders: Path, vae: str, frames: int, taken: int, caplog: Any
) -> None:
    options = RunOptions(photos=album, vae=vae, text_encoder=str(folders / "text_encoder_2"))
    encoders = load_encoders(options)
    assert encoders.vae is not None and encoders.text is not None
    with caplog.at_level(logging.WARNING, "bascule"):
        data = PhotoStream(album, 1, options=encoders.photo_options(options))
    assert "cut 1 captions to the limit of the text encoder" in caplog.text
    assert (data.in_channels, data.text_dim, data.vec_dim) == (16, 64, 64)
    raw = data.raw(range(3))
    assert sorted(map(len, raw.texts)) == [0, 0, 12]
    assert sorted(shape.image_tokens for shape in raw.shapes) == sorted([2, 6, 2 * frames])
    for shape, pixels in zip(raw.shapes, raw.pixels, strict=True):
        parts = [encoders.vae(**item) for item in encoders.vae.items(pixels)]
        num = sum(part.numel() for part in parts) // 2
        latents = encoders.vae.latents(parts, torch.zeros(num))
        assert latents.shape[0] == 4 and latents.shape[1] == shape.frames
        assert len(patches(latents, 2)) == shape.image_tokens
        assert shape.frames == 1 or pixels.shape[1] == taken


def test_raw_pixels_are_those_of_the_photo(album: Path) -> None:
    data = PhotoStream(album, 1)
    place = data.files.index("0.png")
    raw, samples = data.raw(range(2)), data.samples(range(2))
    assert raw.ids == samples.sample_ids.tolist()
    assert [shape.seq_len for shape in raw.shapes] == list(samples.seq_lens)
    found = next(p for p in raw.pixels if tuple(p.shape) == (3, 1, 32, 48))
    with Image.open(album / data.files[place]) as photo:
        wanted = np.asarray(photo)[4:36, 1:49]
    assert np.array_equal(found[:, 0].permute(1, 2, 0).numpy(), wanted)
    tokens = torch.cat([patches(p.float() / 127.5 - 1.0, 16) for p in raw.pixels])
    assert torch.equal(tokens, samples.image)
    assert torch.equal(torch.cat(raw.texts), samples.text)
