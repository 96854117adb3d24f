"""Tables as users have them: their tokens by hand, or a refusal that says what helps."""

import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from bascule.errors import ConfigError
from bascule.train.streams import ManifestStream
from bascule.workload.manifest import read_manifest
from bascule.workload.options import ManifestOptions, TokenOptions
from bascule.workload.tokens import MODELS, TokenRule
from tests.helpers.inference_cases import CHANNELS, Case, make_inputs, make_model
from tests.helpers.split_models import built
from tests.helpers.tables import LAKE, TABLES, Table


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_tables(table: Table, tmp_path: Path) -> None:
    path = tmp_path / table.name
    table.write(path)
    path = path / table.inner
    rule = TokenRule.of_model(table.model, **table.rule)
    options: dict[str, Any] = {"columns": table.columns, "skip_bad": table.skip_bad}
    if isinstance(table.tokens, list):
        manifest = read_manifest(path, rule, **options)
        assert manifest.lens.tolist() == table.tokens
        shapes = [manifest.shape(k) for k in range(len(manifest))]
        assert [shape.seq_len for shape in shapes] == table.tokens
    else:
        with pytest.raises(ConfigError) as raised:
            read_manifest(path, rule, **options)
        message = str(raised.value)
        assert table.tokens in f"{message};"
        assert message.startswith(str(path)) and "\n" not in message


def test_what_was_understood_is_said(tmp_path: Path) -> None:
    path = tmp_path / "clips.csv"
    path.write_text("clip,W,height,num_frames\n/a.mp4,1280,720,81\n/b.mp4,0,720,81\n")
    rule = TokenRule.of_model("wan2.1")
    said = read_manifest(path, rule, columns={"width": "W"}, skip_bad=True).summary()
    assert said == [
        f"{path}: 1 samples; tokens follow from width (W), height, frames (num_frames).",
        "Tokens of a sample: 75,600 to 75,600, quartiles 75,600, 75,600, 75,600.",
        "For example row 1: width 1280, height 720, frames 81: 21 x 45 x 80 = 75,600 visual "
        "tokens.",
        "Ignored columns: clip.",
        "Skipped rows: 1, first clips.csv, row 2: W is 0.",
    ]


def test_rows_of_later_batches_count(tmp_path: Path) -> None:
    """Row 70,001 of JSON is the first with frames; row 200,000 of a table cannot be read."""
    path = tmp_path / "late.jsonl"
    image, clip = '{"width": 64, "height": 64}\n', '{"width": 64, "height": 64, "num_frames": 9}\n'
    path.write_text(image * 70_000 + clip)
    manifest = read_manifest(path, TokenRule.of_model("wan2.1"))
    assert manifest.grids[[0, -1]].tolist() == [[1, 4, 4], [3, 4, 4]]
    width = np.full(200_000, 64.0)
    width[-1] = np.nan
    columns = {"width": pa.array(width, from_pandas=True), "height": pa.array(np.full(200_000, 64))}
    parquet.write_table(pa.table(columns), tmp_path / "late.parquet")
    with pytest.raises(ConfigError, match=r"1 row cannot .* row 200000: width is missing"):
        read_manifest(tmp_path / "late.parquet")


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_memory_does_not_grow_with_rows(suffix: str, tmp_path: Path) -> None:
    table = pa.table({"width": np.full(500_000, 64), "height": np.full(500_000, 64)})
    table = table.append_column("caption", pa.array([LAKE * 10] * 500_000))
    write = {"parquet": parquet.write_table, "csv": csv.write_csv}[suffix]
    write(table, path := tmp_path / f"rows.{suffix}")
    pool, counted = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(counted)
    try:
        assert len(read_manifest(path)) == 500_000
    finally:
        pa.set_memory_pool(pool)
    assert counted.max_memory() < table.nbytes / 2


def test_all_files_of_a_folder_count(tmp_path: Path) -> None:
    for number in range(3):
        table = pa.table({"tokens": [number, 10 + number]})
        (tmp_path / "data").mkdir(exist_ok=True)
        parquet.write_table(table, tmp_path / "data" / f"train-{number}.parquet")
    assert read_manifest(tmp_path).lens.tolist() == [0, 10, 1, 11, 2, 12]


def test_a_tokenizer_counts(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text("caption\na red boat\n\nx y\n")
    rule = TokenRule(tokenize=lambda texts: [len(text.split()) for text in texts])
    assert read_manifest(path, rule).lens.tolist() == [3, 2]


def test_a_tokenizer_of_transformers_counts(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0, "boat": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    path = tmp_path / "texts.jsonl"
    path.write_text('{"caption": "a red boat"}\n{"caption": ["a", "one boat"]}\n')
    options = TokenOptions(tokenizer=str(tmp_path / "words"))
    assert options.read_table(path).lens.tolist() == [3, 2]
    with pytest.raises(ConfigError, match="--tokenizer /nonexistent: cannot be read"):
        TokenOptions(tokenizer="/nonexistent").read_table(path)


def test_a_column_of_numbers_is_no_text(tmp_path: Path) -> None:
    for name, rows in (("a.csv", "w,h\n64,32\n32,16\n"), ("a.jsonl", '{"w": 64, "h": "32"}\n')):
        path = tmp_path / name
        path.write_text(rows)
        for column in ("w", "h"):
            options = ManifestOptions(manifest=path, columns=f"text={column}")
            fix = f"numbers in '{column}', not text: .* text_tokens={column}$"
            with pytest.raises(ConfigError, match=fix):
                options.read_manifest()
            options = ManifestOptions(manifest=path, columns=f"text_tokens={column}")
            assert options.read_manifest().text_tokens[0] in (64, 32)


def test_samples_with_the_lengths_of_a_table(tmp_path: Path) -> None:
    """Each once an epoch, whatever the ranks; another order in the next."""
    path = tmp_path / "sizes.csv"
    path.write_text("width,height,text_tokens\n" + "".join(f"64,{16 * n},{n}\n" for n in (1, 2, 3)))
    options = ManifestOptions(manifest=path)
    manifest = options.read_manifest(max_tokens=15)
    alone = ManifestStream(manifest, 6, rank=0, world_size=1, seed=4)
    two = [ManifestStream(manifest, 3, rank=rank, world_size=2, seed=4) for rank in range(2)]
    whole, parts = alone.batch(0), [stream.batch(0) for stream in two]
    assert torch.equal(whole.image, torch.cat([part.image for part in parts]))
    assert torch.equal(whole.text, torch.cat([part.text for part in parts]))
    assert sorted(whole.seq_lens[:3]) == sorted(whole.seq_lens[3:]) == [5, 10, 15]
    with pytest.raises(ConfigError, match=r"has 15 tokens: raise it, or scale .* --bucket 256:16"):
        options.read_manifest(max_tokens=14)


def test_text_that_is_attended_to_crosswise_is_no_part_of_a_sequence(tmp_path: Path) -> None:
    path = tmp_path / "clips.csv"
    path.write_text(f"width,height,num_frames,caption\n1280,720,81,{LAKE}\n")
    manifest = read_manifest(path, TokenRule.of_model("wan2.1"))
    assert (manifest.text_tokens[0], manifest.cross_tokens[0], manifest.lens[0]) == (0, 7, 75_600)
    assert manifest.shape(0).seq_len == 75_600 and manifest.shape(0).cross_tokens == 7
    said = "21 x 45 x 80 = 75,600 visual tokens; 7 text tokens, used by cross-attention only "
    assert manifest.example.endswith(f": {said}(estimated: 4 bytes per token)")


def most_tokens(name: str, num_text: int) -> int:
    """Of the sequence that attends to itself in a tiny model, of so many tokens of text."""
    case = Case(name, 4, 1, num_text, (3, 3))
    if name == "mochi":
        sizes = dict.fromkeys(("text_embed_dim", "pooled_projection_dim"), 16)
        model = built(case, **sizes, time_embed_dim=4)
        inputs = {"encoder_hidden_states": torch.ones(1, num_text, 16), "timestep": torch.ones(1)}
        inputs |= {"hidden_states": torch.ones(1, CHANNELS, 2, 6, 6)}
        inputs |= {"encoder_attention_mask": torch.ones(1, num_text)}
    else:
        model, inputs = make_model(case), make_inputs(case)
    plain, numbers = torch.nn.functional.scaled_dot_product_attention, [0]

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        query, key = [*args, *kwargs.values()][:2]
        numbers.append(query.shape[-2] if query.shape == key.shape else 0)
        return plain(*args, **kwargs)

    where = mock.patch("torch.nn.functional.scaled_dot_product_attention", watched)
    with where, torch.no_grad():
        model(**inputs)
    return max(numbers)


TINY = {
    **{"flux.1": "flux", "flux.2": "flux2", "qwen-image": "qwen", "sd3.5-large": "sd3"},
    **{"z-image": "z_image", "hunyuanvideo": "hunyuan", "hunyuanvideo1.5": "hunyuan1.5"},
    **{"cogvideox-2b": "cogvideox", "cogvideox-5b": "cogvideox", "mochi": "mochi", "ltx": "ltx"},
    **{"ltx2": "ltx2", "wan2.1-1.3b": "wan", "wan2.1": "wan", "wan2.2-5b": "wan"},
}


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"qwen2.5-vl", "qwen3-vl"}))
def test_models_of_diffusers_have_text_in_their_sequence_or_not(name: str) -> None:
    few, many = (most_tokens(TINY[name], num_text) for num_text in (5, 45))
    assert (few == many) == MODELS[name].is_crosswise


CLASSES = {
    "flux.1": "FluxTransformer2DModel",
    "flux.2": "Flux2Transformer2DModel",
    "qwen-image": "QwenImageTransformer2DModel",
    "wan2.1": "WanTransformer3DModel",
    "hunyuanvideo": "HunyuanVideoTransformer3DModel",
    "hunyuanvideo1.5": "HunyuanVideo15Transformer3DModel",
    "cogvideox-2b": "CogVideoXTransformer3DModel",
    "mochi": "MochiTransformer3DModel",
    "ltx": "LTXVideoTransformer3DModel",
    "ltx2": "LTX2VideoTransformer3DModel",
}


@pytest.mark.parametrize("name", CLASSES)
def test_models_have_the_sizes_of_their_classes(name: str) -> None:
    """The defaults of diffusers are those of the published models, of these ten."""
    parameters = inspect.signature(getattr(diffusers, CLASSES[name]).__init__).parameters
    config = {key: parameter.default for key, parameter in parameters.items()}
    width = config["num_attention_heads"] * config["attention_head_dim"]
    blocks = config["num_layers"] + config.get("num_single_layers", 0)
    assert (MODELS[name].width, MODELS[name].num_blocks) == (width, blocks)
