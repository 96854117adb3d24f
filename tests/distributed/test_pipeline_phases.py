"""The phases of pipelines over ranks: compared with one process, measured, and explained."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bascule.diffusers import Verification, parallelize
from tests.helpers.inference_toy import TABLE, make_toy, toy_inputs
from tests.helpers.pipeline_cases import (
    PIPELINES,
    TABLES,
    make_pipeline,
    prompt_of,
    seeded,
    sizes_of,
)
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow


def arguments(name: str) -> dict[str, Any]:
    """Of a call; ranks have generators of their own."""
    return {**sizes_of(name), **prompt_of(name), "generator": seeded(1 + dist.get_rank())}


def agreeing(kind: str, degrees: dict[str, Any]) -> list[Verification]:
    """Each pipeline as it is; a verification leaves random states and parts as they were."""
    results = list[Verification]()
    for name in PIPELINES[kind]:
        pipeline = make_pipeline(name)
        pipeline.vae.enable_tiling()
        with parallelize(pipeline, table=TABLES.get(name), **degrees) as handle, handle.timed():
            values = arguments(name)
            state = values["generator"].get_state(), torch.get_rng_state()
            parts = pipeline.vae, pipeline.scheduler, pipeline.transformer
            kinds = [type(one) for one in parts]
            results.append(handle.verify(pipeline, **values))
            after = values["generator"].get_state(), torch.get_rng_state()
            assert all(map(torch.equal, state, after))
            assert kinds == [type(one) for one in parts]
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
    pipeline = make_pipeline("flux")
    model, block = pipeline.transformer, "step 1, transformer: single_transformer_blocks.0 (text)"
    places = [  # a rank's own tokens go through its own weights
        (model.single_transformer_blocks[0].proj_mlp.weight, {block}),
        (model.norm_out.linear.weight, {"step 1, transformer: output 0", "step 1"}),
        (pipeline.vae.decoder.conv_in.weight, {"decode"}),
    ]
    with torch.no_grad(), parallelize(pipeline, ulysses_degree=2) as handle:
        for weight, names in places:
            weight.add_(0.1 * dist.get_rank())
            result = handle.verify(pipeline, **arguments("flux"))
            weight.sub_(0.1 * dist.get_rank())
            first = result.first_difference
            assert first in names and str(first) in str(result), result
        result = handle.verify(pipeline, **arguments("flux"))
        assert result.ok and "noise" in result.blocks


@on_ranks(2)
def test_what_cannot_be_compared_or_measured_is_refused() -> None:
    pipeline, model = make_pipeline("flux"), make_toy()

    def refuse(kind: str, words: str, call: Any, *args: Any, **values: Any) -> None:
        kinds, text = raised_by(call, *args, **values)
        assert kinds[0] == kind and words in text, (kinds, text)

    with torch.no_grad(), parallelize(pipeline, ulysses_degree=2) as handle:
        unlike = arguments("flux") | {"height": 48 + 16 * dist.get_rank()}
        refuse("CommError", "height", handle.verify, pipeline, **unlike)
    refuse("ConfigError", "undo() was called", handle.verify, pipeline, **arguments("flux"))
    with torch.no_grad(), parallelize(model, ulysses_degree=2, table=TABLE) as handle:
        refuse("ConfigError", "give parallelize the pipeline", handle.timed().__enter__)
        model(**toy_inputs())
        other = "is not one of the models"
        refuse("ConfigError", other, handle.verify, pipeline, **arguments("flux"))


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
    guidance = "guidance: 2 groups of ranks share branches and samples; this rank sent "
    assert any(line.startswith(guidance) for line in lines)
    assert any(line.startswith("denoise: ") and "s measured" in line for line in lines)
    assert any(line.startswith("decode: ") and "items" in line for line in lines)
