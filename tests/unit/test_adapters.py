"""LoRA adapters by name: pixels of diffusers' `set_adapters`, and what does not fit is named."""

import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import Tensor

from bascule.errors import ConfigError
from bascule.generate.options import Lora
from bascule.generate.tiny import TINY, TINY_WAN
from bascule.serve import adapters as module
from bascule.serve.adapters import Adapters
from tests.helpers.loras import choose, reference, save_lora
from tests.helpers.serving import pipeline_of, values_of

for _needed in ("diffusers", "transformers", "peft"):
    pytest.importorskip(_needed)

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of the transformer and the first text encoder."""
    path = tmp_path_factory.mktemp("loras")
    save_lora(path / "a", 1, text=True)
    save_lora(path / "b", 2, ("to_k", "proj_out", "ff.net.2"), text=True)
    return path


def pixels(pipeline: Any) -> Tensor:
    generator, sizes = torch.Generator().manual_seed(0), {"height": 32, "width": 48}
    settings: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np", "return_dict": False}
    return values_of(pipeline("a boat", generator=generator, **sizes, **settings)[0])


def apart(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max())


def test_pixels_are_those_of_set_adapters(folder: Path) -> None:
    pipeline, wanted = pipeline_of(TINY), reference({name: folder / name for name in "ab"})
    base, adapters = pixels(pipeline), Adapters(pipeline)
    random = torch.get_rng_state()
    for name in "ab":
        adapters.load(name, folder / name)
    assert torch.equal(torch.get_rng_state(), random)
    assert apart(pixels(pipeline), base) == 0.0  # what is loaded is off
    choices = [(Lora("a"),), (Lora("b", 0.5),), (Lora("a", 0.7), Lora("b", -0.5))]
    for choice in [*choices, (Lora("b", 2.0), Lora("a", 1.0)), choices[0]]:
        adapters.use(choice)
        found = pixels(pipeline)
        assert apart(found, pixels(choose(wanted, choice))) <= 1e-6 and apart(found, base) > 0.01, (
            choice
        )
    adapters.use(())
    assert apart(pixels(pipeline), base) == 0.0
    with pytest.raises(ConfigError, match="lora: 'c' is not loaded; loaded: 'a', 'b'"):
        adapters.use((Lora("a"), Lora("c")))
    adapters.load("a", folder / "b")  # in place of the older one
    adapters.use((Lora("a", 0.5),))
    assert apart(pixels(pipeline), pixels(choose(wanted, (Lora("b", 0.5),)))) <= 1e-6


def test_a_removed_adapter_frees_its_weights(folder: Path) -> None:
    pipeline = pipeline_of(TINY)
    adapters, base = Adapters(pipeline), pixels(pipeline)

    def num_elements() -> int:
        gc.collect()
        return sum(one.numel() for one in gc.get_objects() if issubclass(type(one), Tensor))

    def turn() -> int:
        for number in range(4):
            name = f"{number}"
            adapters.load(name, folder / "ab"[number % 2])
            adapters.use((Lora(name),))
            assert apart(pixels(pipeline), base) > 0.01
            adapters.remove(name)
            adapters.remove(name)  # it is gone: nothing happens
        assert adapters._keys == {}
        return num_elements()

    first = turn()
    assert turn() == first and apart(pixels(pipeline), base) == 0.0


def test_changes_of_adapters_leave_no_free_pages_and_no_warning(folder: Path) -> None:
    """Also free pages that lie between others; and the second adapter has its own weights."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("needs glibc")
    adapters = Adapters(pipeline_of(TINY))
    orders = [{"name": f"{k}", "path": str(folder / "a"), "digest": None} for k in range(12)]
    with mock.patch("diffusers.utils.peft_utils.logger.warning") as warn:
        for order in [*orders, {"name": "1", "path": None}, orders[1]]:
            assert adapters.follow(order) == ""
    warn.assert_not_called()
    blocks = [torch.ones(25_000) for _ in range(1000)]
    blocks = blocks[::10]  # 90 MB between them are free
    before = resident()
    adapters.follow({"name": "1", "path": None})
    assert before - resident() > 60e6 and len(blocks) == 100


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


_FIRST = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"


def _wide(tensors: Tensors, side: str, dim: int) -> Tensors:
    return {key: torch.cat([x, x], dim) if side in key else x for key, x in tensors.items()}


def _renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {key.replace(old, new): x for key, x in tensors.items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [  # wider ones would make diffusers widen the weights of the model itself
        (lambda x: _wide(x, "lora_A", 1), "lora_A.weight is for 128 features, the layer has 64: "),
        (lambda x: _wide(x, "lora_B", 0), "lora_B.weight is for 128 features, the layer has 64: "),
        (lambda x: _wide(x, "lora_A", 0), "x.safetensors does not fit a FluxPipeline: "),
        (
            lambda x: _renamed(x, "blocks.0.", "blocks.7."),
            "a FluxTransformer2DModel has no such lay",
        ),
        (lambda x: _renamed(x, "transformer.", "unet."), "its unet.* in none of transformer, text"),
        (
            lambda x: x | {"text_encoder_2.q.lora_A.weight": x[_FIRST]},
            "its text_encoder_2.q.* none",
        ),
        (lambda x: x | {_FIRST.replace("lora_A", "norm"): x[_FIRST]}, "is no matrix of a LoRA"),
        (lambda x: x | {_FIRST.replace("lora_A.weight", "dora_scale"): x[_FIRST]}, "is a DoRA"),
        (
            lambda x: {f"base_model.model.{key}": x[key] for key in x},
            "is of peft's save_pretrained",
        ),
        (lambda x: {key: x[key] for key in x if key != _FIRST}, "lora_B.weight has no counterpart"),
        (lambda _: {}, "it has no tensor of transformer, text_encoder of a FluxPipeline: save it"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Callable[[Tensors], Tensors], said: str, folder: Path, tmp_path: Path
) -> None:
    pipeline = pipeline_of(TINY)
    adapters, before = Adapters(pipeline), {key: x.clone() for key, x in _weights(pipeline)}
    tensors = safetensors.torch.load_file(folder / "a" / "pytorch_lora_weights.safetensors")
    changed = {key: x.clone().contiguous() for key, x in change(tensors).items()}
    safetensors.torch.save_file(changed, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match=f"^LoRA 'mine': .*{said}"):
        adapters.load("mine", tmp_path)
    assert adapters._keys == {}
    after = {key.replace("base_layer.", ""): x for key, x in _weights(pipeline)}
    assert after.keys() == before.keys()
    assert all(torch.equal(x, after[key]) for key, x in before.items())
    adapters.load("mine", folder / "a")  # nothing is left of the other one


def _weights(pipeline: Any) -> list[tuple[str, Tensor]]:
    parts = pipeline.transformer, pipeline.text_encoder
    return [pair for part in parts for pair in part.state_dict().items()]


def test_files_that_are_not_loaded(folder: Path, tmp_path: Path) -> None:
    good = (folder / "a" / "pytorch_lora_weights.safetensors").read_bytes()
    for name, files, said in (
        ("pickle", {"x.bin": b""}, "only .safetensors is loaded|there is no such file"),
        ("fake", {"x.safetensors": b"PK\3\4" * 9}, "x.safetensors does not fit a FluxPipeline: "),
        ("cut", {"x.safetensors": good[:-9]}, "x.safetensors does not fit a FluxPipeline: "),
        ("two", {"x.safetensors": good, "y.safetensors": good}, "has x.safetensors, y.safetensors"),
    ):
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
        with pytest.raises(ConfigError, match=f"LoRA 'mine': .*({said})"):
            Adapters(pipeline_of(TINY)).load("mine", tmp_path / name)
    for path, said in (
        (tmp_path / "pickle" / "x.bin", "x.bin: only .safetensors is loaded, as other formats may"),
        (tmp_path / "none.safetensors", "none.safetensors: there is no such file"),
    ):
        with pytest.raises(ConfigError, match=said):
            Adapters(pipeline_of(TINY)).load("mine", path)
    with pytest.raises(ConfigError, match="this rank's file is not rank 0's"):
        Adapters(pipeline_of(TINY)).load("mine", folder / "a", digest="0")
    with pytest.raises(ConfigError, match=r"to_q.* a WanTransformer3DModel has no such layer"):
        Adapters(pipeline_of(TINY_WAN)).load("mine", folder / "a")
    with mock.patch.object(module, "find_spec", return_value=None):
        with pytest.raises(ConfigError, match=r"peft is not installed: pip install 'bascule\[lora"):
            Adapters(pipeline_of(TINY)).load("mine", folder / "a")
