"""The phases of pipelines over ranks: compared with one process, measured, and explained."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bascule.diffusers import Verification, parallelize
from tests.helpers.inference_toy import TABLE, make_toy, toy_inputs
from tests.helpers.pipeline_cases import PIPELINES, TABLES, make_pipeline, prompt_of, seeded
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow


def arguments(name: str) -> dict[str, Any]:
    """Of a call; ranks have generators of their own."""
    sides = {} if name == "dit" else {"height": 48, "width": 32}
    sides |= {"height": 44, "width": 36} if name == "control" else {}
    random = {"generator": seeded(1 + dist.get_rank())}
    return {**prompt_of(name), "num_inference_steps": 2, "output_type": "pt"} | sides | random


def agreeing(kind: str, degrees: dict[str, Any]) -> list[Verification]:
    """Each pipeline as it is; a verification leaves random states and parts as they were."""
    results = list[Verification]()
    for name in PIPELINES[kind]:
        pipeline = make_pipeline(name)
        pipeline.vae.enable_tiling()
        with parallelize(pipeline, table=TABLES.get(name), **degrees) as handle, handle.timed():
            values = arguments(name)
            state = values["generator"].get_state(), torch.get_rng_state()
            kinds = [type(one) for one in (pipeline.vae, pipeline.scheduler, pipeline.transformer)]
            results.append(handle.verify(pipeline, **values))
            assert all(
                map(torch.equal, state, (values["generator"].get_state(), torch.get_rng_state()))
            )
            assert kinds == [
                type(one) for one in (pipeline.vae, pipeline.scheduler, pipeline.transformer)
            ]
    return results


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("degrees", [{"guidance_degree": 2}, {"ring_degree": 2}], ids=str)
def test_a_pipeline_agrees_with_one_process(kind: str, degrees: dict[str, int]) -> None:
    first, second = run_ranks(agreeing, 2, kind, degrees)
    assert first == second
    for result in first:
        assert result.ok and result.tolerance == 1e-5, str(result)
        assert {"step 1", "step 2", "decode"} <= set(result.blocks)


@on_ranks(2)
def test_the_first_phase_and_block_that_differ_are_named() -> None:
    """The names of what differs, where the second rank has other weights in one place."""
    names = dict[str, str | None]()
    pipeline = make_pipeline("flux")
    model = pipeline.transformer
    places = {
        "block": model.single_transformer_blocks[0].proj_mlp.weight,
        "outside": model.norm_out.linear.weight,
        "vae": pipeline.vae.decoder.conv_in.weight,
    }
    with torch.no_grad(), parallelize(pipeline, ulysses_degree=2) as handle:
        for name, weight in places.items():
            weight.add_(0.1 * dist.get_rank())
            result = handle.verify(pipeline, **arguments("flux"))
            weight.sub_(0.1 * dist.get_rank())
            names[name] = first = result.first_difference
            assert first is not None and first in str(result)
        result = handle.verify(pipeline, **arguments("flux"))
        assert result.ok and "noise" in result.blocks
    # A rank's own tokens go through its own weights.
    assert names["block"] == "step 1, transformer: single_transformer_blocks.0 (text)"
    assert names["outside"] in ("step 1, transformer: output 0", "step 1")
    assert names["vae"] == "decode"


@on_ranks(2)
def test_what_cannot_be_compared_or_measured_is_refused() -> None:
    pipeline, model = make_pipeline("flux"), make_toy()
    errors = list[tuple[list[str], str]]()
    with torch.no_grad(), parallelize(pipeline, ulysses_degree=2) as handle:
        values = arguments("flux")
        values["height"] += 16 * dist.get_rank()
        errors.append(raised_by(handle.verify, pipeline, **values))
    errors.append(raised_by(handle.verify, pipeline, **arguments("flux")))
    with torch.no_grad(), parallelize(model, ulysses_degree=2, table=TABLE) as handle:
        errors.append(raised_by(handle.timed().__enter__))
        model(**toy_inputs())
        errors.append(raised_by(handle.verify, pipeline, **arguments("flux")))
    kinds, texts = zip(*errors, strict=True)
    assert [kind[0] for kind in kinds] == ["CommError", *["ConfigError"] * 3]
    assert "height" in texts[0] and "undo() was called" in texts[1]
    assert "give parallelize the pipeline" in texts[2]
    assert "is not one of the models" in texts[3]


@on_ranks(2)
def test_phases_are_measured_and_explained() -> None:
    pipeline = make_pipeline("flux")
    pipeline.vae.enable_tiling()
    with torch.no_grad(), parallelize(pipeline, guidance_degree=2, vae="first") as handle:
        with handle.timed() as times:
            pipeline(**arguments("flux"))
        lines = str(handle.explain()).splitlines()
        assert handle.verify(pipeline, **arguments("flux")).ok
    assert list(times.seconds) == ["encode", "denoise", "decode"]
    assert all(spent > 0 for spent in times.seconds.values())
    # Two branches of guidance in each of two steps.
    assert (times.num_steps, times.num_passes) == (2, 4)
    guidance = "guidance: 2 groups of ranks share branches and samples; this rank sent 0.0"
    assert any(line.startswith(guidance) for line in lines)
    assert any(line.startswith("denoise: ") and " s measured" in line for line in lines)
    assert any(line.startswith("decode: ") and "items" in line for line in lines)
