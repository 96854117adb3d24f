"""The phases of pipelines over ranks: compared with one process, measured, and explained."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bascule.diffusers import parallelize
from tests.helpers.inference_toy import TABLE, make_toy, toy_inputs
from tests.helpers.pipeline_cases import PIPELINES, generated, make_pipeline, prompt_of, seeded
from tests.helpers.ranks import raised_by, run_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow
SIZES = {"height": 48, "width": 32, "num_inference_steps": 2, "output_type": "pt"}


def arguments(name: str, **others: Any) -> dict[str, Any]:
    """Of a call; ranks have generators of their own."""
    generator = seeded(1 + dist.get_rank())
    return {**prompt_of(name), **SIZES, "generator": generator, **others}


def agreeing(kind: str, degrees: dict[str, Any]) -> list[Any]:
    """Each pipeline as it is, and what a verification leaves behind."""
    found = list[Any]()
    for name in PIPELINES[kind]:
        pipeline = make_pipeline(name)
        pipeline.vae.enable_tiling()
        vae = pipeline.vae
        with parallelize(pipeline, **degrees) as handle:
            given = arguments(name)
            state = given["generator"].get_state(), torch.get_rng_state()
            parts = pipeline.scheduler, pipeline.transformer
            said = handle.verify(pipeline, **given)
            after = given["generator"].get_state(), torch.get_rng_state()
            same = parts == (pipeline.scheduler, pipeline.transformer)
            before = generated(name, pipeline, prompt_of(name), generator=seeded(1))
        left = {"encode_prompt", "prepare_latents"} & vars(pipeline).keys()
        alone = generated(name, pipeline, prompt_of(name), generator=seeded(1))
        found.append(
            {
                "said": said,
                "random": all(map(torch.equal, state, after)),
                "same": same and not left and pipeline.vae is vae,
                "error": float((before - alone).abs().max()),
            }
        )
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("degrees", [{"guidance_degree": 2}, {"ring_degree": 2}], ids=str)
def test_a_pipeline_agrees_with_one_process(kind: str, degrees: dict[str, int]) -> None:
    for cases in zip(*run_ranks(agreeing, 2, kind, degrees), strict=True):
        first = cases[0]["said"]
        for case in cases:
            assert case["said"] == first and first.ok, str(first)
            assert case["random"] and case["same"] and case["error"] <= 1e-4
        assert {"noise", "step 1", "step 2", "decode"} <= set(first.blocks)
        assert first.tolerance == 1e-5


def differing() -> dict[str, str | None]:
    """What is named where the second rank has other weights in one place."""
    found = dict[str, str | None]()
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
            said = handle.verify(pipeline, **arguments("flux"))
            weight.sub_(0.1 * dist.get_rank())
            found[name] = said.first_difference
            assert said.first_difference is not None and said.first_difference in str(said)
        assert handle.verify(pipeline, **arguments("flux")).ok
    return found


def test_the_first_phase_and_block_that_differ_are_named() -> None:
    for found in run_ranks(differing, 2):
        # A rank's own tokens go through its own weights.
        assert found["block"] == "step 1, transformer: single_transformer_blocks.0 (text)"
        assert found["outside"] in ("step 1, transformer: output 0", "step 1")
        assert found["vae"] == "decode"


def refused() -> list[tuple[list[str], str]]:
    pipeline, model = make_pipeline("flux"), make_toy()
    found = list[tuple[list[str], str]]()
    with torch.no_grad(), parallelize(pipeline, ulysses_degree=2) as handle:
        given = arguments("flux")
        given["height"] += 16 * dist.get_rank()
        found.append(raised_by(handle.verify, pipeline, **given))
    found.append(raised_by(handle.verify, pipeline, **arguments("flux")))
    with torch.no_grad(), parallelize(model, ulysses_degree=2, table=TABLE) as handle:
        found.append(raised_by(handle.timed().__enter__))
        model(**toy_inputs())
        found.append(raised_by(handle.verify, pipeline, **arguments("flux")))
    return found


def test_what_cannot_be_compared_or_measured_is_refused() -> None:
    for found in run_ranks(refused, 2):
        kinds, texts = zip(*found, strict=True)
        assert [kind[0] for kind in kinds] == ["CommError", *["ConfigError"] * 3]
        assert "height" in texts[0] and "undo() was called" in texts[1]
        assert "give parallelize the pipeline" in texts[2]
        assert "is not one of the models" in texts[3]


def measured() -> tuple[dict[str, float], tuple[int, int], str, bool]:
    pipeline = make_pipeline("flux")
    pipeline.vae.enable_tiling()
    with torch.no_grad(), parallelize(pipeline, guidance_degree=2, vae="first") as handle:
        with handle.timed() as times:
            pipeline(**arguments("flux"))
        said = str(handle.explain())
        ok = handle.verify(pipeline, **arguments("flux")).ok
    return times.seconds, (times.num_steps, times.num_passes), said, ok


def test_phases_are_measured_and_explained() -> None:
    for seconds, counts, said, ok in run_ranks(measured, 2):
        assert list(seconds) == ["encode", "denoise", "decode"]
        assert all(spent > 0 for spent in seconds.values())
        assert counts == (2, 4)  # two branches of guidance in each of two steps
        assert "denoise: " in said and " s measured" in said
        decode = next(line for line in said.splitlines() if line.startswith("decode: "))
        assert "items" in decode and ok
