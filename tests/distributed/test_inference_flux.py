"""Pipelines, checkpointing, verification and compilation of diffusers' models; the example."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from bascule.diffusers import parallelize
from tests.helpers.inference_cases import (
    Case,
    make_inputs,
    make_mesh,
    make_model,
    same,
    same_gradients,
    step_of,
)
from tests.helpers.inference_toy import TABLE, grads_of, make_toy, toy_inputs
from tests.helpers.jobs import run_example
from tests.helpers.ranks import on_ranks, raised_by

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "generate_flux.py"
FLUX = Case("flux", 5, 2, 7, (3, 5))
QWEN = Case("qwen", 5, 2, 7, (3, 5), ("mask",))
WAN = Case("wan", 5, 2, 7, (3, 5))


def perturbed(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> Any:
    return output[0], output[1] * 1.01


@on_ranks(2)
def test_verify_and_checkpointing_of_each_model() -> None:
    """Everything that a handle does, for each model on one mesh."""
    mesh = make_mesh(2, 1)
    for case, num_blocks in ((FLUX, 8), (QWEN, 4), (WAN, 2)):
        model, inputs = make_model(case), make_inputs(case)
        _, wanted = step_of(model, inputs)
        with parallelize(model, mesh=mesh) as handle:
            verdict = handle.verify(**inputs)
            assert verdict.ok and len(verdict.blocks) == num_blocks, case
            model.enable_gradient_checkpointing()
            said = raised_by(step_of, model, inputs)
            assert said[0][0] == "ConfigError"
            assert "enable_gradient_checkpointing(handle.checkpoint)" in said[1]
            model.enable_gradient_checkpointing(handle.checkpoint)
            step_of(model, inputs)
            handle.average_gradients()
            same_gradients(grads_of(model), wanted, 1e-6)
    model, inputs = make_model(FLUX), make_inputs(FLUX)
    with parallelize(model, mesh=mesh) as handle:
        block = model.single_transformer_blocks[1]
        hook = block.register_forward_hook(perturbed) if dist.get_rank() == 1 else None
        assert handle.verify(**inputs).first_difference == "single_transformer_blocks.1 (image)"
        if hook is not None:
            hook.remove()
        assert handle.verify(**inputs).first_difference is None
        adapter = {"ip_hidden_states": [torch.zeros(1, 4, 80)]}
        said = raised_by(model, **inputs, joint_attention_kwargs=adapter)
        assert said[0][0] == "ConfigError"
        assert "the tensors of joint_attention_kwargs" in said[1]
        model(**inputs, joint_attention_kwargs={"scale": 1.0})


RESOLUTIONS = [(16, 16), (7, 15), (13, 30), (9, 49), (20, 24), (11, 25), (8, 8), (5, 100)]


@pytest.mark.stress  # daily: lengths of images in test_compile_modes
@pytest.mark.parametrize(("in_place", "most"), [(False, 2), (True, 4)])
@on_ranks(2)
def test_resolutions_share_graphs(in_place: bool, most: int) -> None:
    """One graph for the first resolution and one for all others; in place, two graphs each."""
    model, counter = make_toy(num_blocks=1), CompileCounterWithBackend("aot_eager")
    inputs = [toy_inputs(text=text, image=image) for text, image in RESOLUTIONS]
    with torch.no_grad():
        wanted = [model(**one) for one in inputs]
        with parallelize(model, mesh=make_mesh(2, 1), table=TABLE) as handle:
            call: Any = model
            if in_place:
                model.compile(backend=counter, fullgraph=True)
            else:
                call = torch.compile(lambda **one: model(**one), backend=counter, fullgraph=True)
            for given, whole in zip(inputs, wanted, strict=True):
                same(call(**given), whole)
            assert handle.verify(**inputs[0]).ok  # not traced
    assert counter.frame_count <= most


@pytest.mark.stress
@on_ranks(2)
def test_a_rank_without_tokens_compiles() -> None:
    model, inputs = make_toy(num_blocks=1), [toy_inputs(text=t, image=1) for t in (1, 0)]
    with torch.no_grad():
        wanted = [model(**one) for one in inputs]
        with parallelize(model, mesh=make_mesh(2, 1), table=TABLE):
            call = torch.compile(lambda **one: model(**one), backend="aot_eager", fullgraph=True)
            for given, whole in zip(inputs, wanted, strict=True):
                same(call(**given), whole)


def test_the_example_generates_the_same_latents() -> None:
    done = run_example(EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert "tokens: 165 of image, 7 of text; 85 to 87 per rank" in done.stdout
    assert "the mesh agrees with one process" in done.stdout
    found = re.search(r"latents \(1, 165, 16\), relative difference (\S+)", done.stdout)
    assert found is not None and 0 < float(found.group(1)) < 1e-5
