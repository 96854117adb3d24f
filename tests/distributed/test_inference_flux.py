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
from bascule.errors import ConfigError
from tests.helpers.inference_cases import Case, difference, make_inputs, make_mesh, make_model
from tests.helpers.inference_toy import TABLE, make_toy, toy_inputs
from tests.helpers.jobs import run_example
from tests.helpers.ranks import on_ranks, run_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "generate_flux.py"
FLUX = Case("flux", 5, 2, 7, (3, 5))
QWEN = Case("qwen", 5, 2, 7, (3, 5), ("mask",))
WAN = Case("wan", 5, 2, 7, (3, 5))


def perturbed(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> Any:
    return output[0], output[1] * 1.01


def gradients(model: Any, inputs: Any) -> Tensor:
    model.zero_grad()
    model(**inputs).sample.square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@on_ranks(2)
def test_verify_and_checkpointing_of_each_model() -> None:
    """Everything that a handle does, for each model on one mesh."""
    mesh, found = make_mesh(2, 1), dict[str, Any]()
    for case in (FLUX, QWEN, WAN):
        model, inputs = make_model(case), make_inputs(case)
        wanted = gradients(model, inputs)
        with parallelize(model, mesh=mesh) as handle:
            verdict = handle.verify(**inputs)
            model.enable_gradient_checkpointing()
            try:
                gradients(model, inputs)
                said = "nothing was refused"
            except ConfigError as error:
                said = str(error)
            model.enable_gradient_checkpointing(handle.checkpoint)
            gradients(model, inputs)
            handle.average_gradients()
            grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found[case.model] = verdict.ok, len(verdict.blocks), said, difference(grads, wanted)
    model, inputs = make_model(FLUX), make_inputs(FLUX)
    with parallelize(model, mesh=mesh) as handle:
        block = model.single_transformer_blocks[1]
        hook = block.register_forward_hook(perturbed) if dist.get_rank() == 1 else None
        found["broken"] = handle.verify(**inputs).first_difference
        if hook is not None:
            hook.remove()
        found["mended"] = handle.verify(**inputs).first_difference
        kwargs = {"ip_hidden_states": [torch.zeros(1, 4, 80)]}
        try:
            model(**inputs, joint_attention_kwargs=kwargs)
        except ConfigError as error:
            found["adapter"] = str(error)
        model(**inputs, joint_attention_kwargs={"scale": 1.0})
    for model, blocks in (("flux", 8), ("qwen", 4), ("wan", 2)):
        ok, num_blocks, said, grads = found[model]
        assert ok and num_blocks == blocks
        assert "enable_gradient_checkpointing(handle.checkpoint)" in said
        assert grads <= 1e-6
    assert found["broken"] == "single_transformer_blocks.1 (image)"
    assert found["mended"] is None
    assert "the tensors of joint_attention_kwargs" in found["adapter"]


RESOLUTIONS = [(16, 16), (7, 15), (13, 30), (9, 49), (20, 24), (11, 25), (8, 8), (5, 100)]


@pytest.mark.stress  # daily: lengths of images in test_compile_modes
@pytest.mark.parametrize(("in_place", "most"), [(False, 2), (True, 4)])
@on_ranks(2)
def test_resolutions_share_graphs(in_place: bool, most: int) -> None:
    """One graph for the first resolution and one for all others; in place, two graphs each.

    Graphs for all resolutions, and the largest error.
    """
    torch.set_num_threads(1)
    model, errors = make_toy(num_blocks=1), list[float]()
    inputs = [toy_inputs(text=text, image=image) for text, image in RESOLUTIONS]
    with torch.no_grad():
        wanted = [model(**one) for one in inputs]
        with parallelize(model, mesh=make_mesh(2, 1), table=TABLE) as handle:
            counter = CompileCounterWithBackend("aot_eager")
            call: Any = model
            if in_place:
                model.compile(backend=counter, fullgraph=True)
            else:
                call = torch.compile(lambda **one: model(**one), backend=counter, fullgraph=True)
            errors = [difference(call(**one), y) for one, y in zip(inputs, wanted, strict=True)]
            assert handle.verify(**inputs[0]).ok  # not traced
    graphs, error = counter.frame_count, max(errors)
    assert graphs <= most and error < 1e-12


def compiled_without_tokens() -> float:
    torch.set_num_threads(1)
    model, inputs = make_toy(num_blocks=1), [toy_inputs(text=t, image=1) for t in (1, 0)]
    with torch.no_grad():
        wanted = [model(**one) for one in inputs]
        with parallelize(model, mesh=make_mesh(2, 1), table=TABLE):
            call = torch.compile(lambda **one: model(**one), backend="aot_eager", fullgraph=True)
            return max(difference(call(**x), y) for x, y in zip(inputs, wanted, strict=True))


@pytest.mark.stress
def test_a_rank_without_tokens_compiles() -> None:
    assert max(run_ranks(compiled_without_tokens, 2)) < 1e-12


def test_the_example_generates_the_same_latents() -> None:
    done = run_example(EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert "tokens: 165 of image, 7 of text; 85 to 87 a rank" in done.stdout
    assert "the mesh agrees with one process" in done.stdout
    found = re.search(r"latents \(1, 165, 16\), relative difference (\S+)", done.stdout)
    assert found is not None and 0 < float(found.group(1)) < 1e-5
