"""What pipelines draw, and when: the same on all ranks of a replica, however they are seeded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.comm.groups import RankGroup, member_of, resolve
from bascule.diffusers import parallelize, pipeline_run, verify
from tests.helpers.inference_toy import TABLE, make_toy
from tests.helpers.other_image_cases import CASES, MODELS
from tests.helpers.pipeline_cases import generated, make_pipeline, prompt_of, seeded
from tests.helpers.ranks import run_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow
HOST, ELSEWHERE = torch.device("cpu"), torch.device("meta")
SIZES: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2}
SIZES |= {"output_type": "latent"}


class Drawing:
    """Draws as a pipeline does."""

    _execution_device = HOST

    def __init__(self) -> None:
        self.transformer = make_toy()

    def __call__(self, generator: Any = None) -> Tensor:
        return torch.randn(3, generator=generator)


def replica() -> RankGroup:
    return member_of(resolve(None), "world")


def carried() -> list[str]:
    """Where tensors are that are broadcast by a group that carries none of the host, as NCCL's."""
    found = list[str]()
    sent: Any = pipeline_run.broadcast

    def broadcast(group: RankGroup, what: Any, x: Tensor) -> Tensor:
        found.append(x.device.type)
        return sent(group, what, torch.zeros(x.shape, dtype=x.dtype))

    def all_reduce(group: RankGroup, what: Any, x: Tensor) -> Tensor:
        found.append(x.device.type)
        return torch.ones(x.shape, dtype=x.dtype)

    modules: list[Any] = [pipeline_run, verify]
    for module in modules:  # of this rank's process alone
        module.device_of, module.broadcast = lambda _: ELSEWHERE, broadcast
        module.set_random_states, module.all_reduce = lambda *_: None, all_reduce
    pipeline = Drawing()
    with parallelize(pipeline, ulysses_degree=2, table=TABLE):
        pipeline(seeded(dist.get_rank()))
    found.append(verify.of_first_rank(torch.ones(2), replica()).device.type + " again")
    verify.errors_of({"x": torch.ones(2)}, replica())
    return found


def test_what_is_of_the_host_travels_where_the_group_carries_it() -> None:
    for found in run_ranks(carried, 2):
        assert found == ["meta", "meta", "cpu again", "meta"]


class Device:
    """A module of torch for one device, which has a generator of its own."""

    def __init__(self) -> None:
        self.generator = seeded(10 + dist.get_rank())

    def get_rng_state(self, _: torch.device) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, _: torch.device) -> None:
        self.generator.set_state(state)


def offloaded() -> list[float]:
    """Weights are on the host, and noise is drawn elsewhere, as is known later."""
    device: Any = Device()
    torch.get_device_module = lambda *_: device
    pipeline = Drawing()
    before = device.generator.initial_seed()
    with parallelize(pipeline, ulysses_degree=2, table=TABLE):
        pipeline._execution_device = torch.device("xpu")
        pipeline()
    return [before, float(torch.rand(1, generator=device.generator))]


def test_the_device_that_a_pipeline_draws_on_has_one_noise() -> None:
    (before, drawn), (others_before, others) = run_ranks(offloaded, 2)
    assert before != others_before and drawn == others


def control_pipeline() -> Any:
    """Samples the latents of its control image before it draws noise."""
    import diffusers as host

    diffusers: Any = host
    parts: dict[str, Any] = dict(make_pipeline("flux").components)
    for name in ("image_encoder", "feature_extractor"):
        parts.pop(name)
    config = parts["transformer"].config
    sizes: dict[str, Any] = {name: x for name, x in config.items() if not name.startswith("_")}
    sizes |= {"in_channels": 32, "out_channels": 16}  # latents, and those of the control image
    torch.manual_seed(0)
    parts["transformer"] = diffusers.FluxTransformer2DModel(**sizes).eval()
    pipeline = diffusers.FluxControlPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def controlled(is_tiled: bool) -> tuple[float, bool, float]:
    """Generators are seeded differently, or none is given."""
    pipeline, rank = control_pipeline(), dist.get_rank()
    if is_tiled:
        pipeline.vae.enable_tiling()
    vae = pipeline.vae
    image = torch.rand(1, 3, 32, 32, generator=seeded(2))
    prompt = prompt_of("flux", is_guided=False)
    del prompt["true_cfg_scale"]

    def run(which: Any, generator: torch.Generator | None) -> Tensor:
        return which(**prompt, **SIZES, control_image=image, generator=generator)[0]

    wanted = run(pipeline, seeded(1))
    torch.manual_seed(5 + rank)
    with parallelize(pipeline, ring_degree=2):
        found = run(pipeline, seeded(1 + rank))
        run(pipeline, None)
    return float((found - wanted).abs().max()), pipeline.vae is vae, wanted.norm().item()


@pytest.mark.parametrize("is_tiled", [False, True])
def test_control_images_are_sampled_alike(is_tiled: bool) -> None:
    for error, is_same, norm in run_ranks(controlled, 2, is_tiled):
        assert error <= 1e-5 < norm and is_same


def interrupted() -> tuple[bool, set[str]]:
    """Verified while it is measured, and undone; then one rank runs alone."""
    pipeline = make_pipeline("flux")
    pipeline.vae.enable_tiling()
    call = type(pipeline).__call__
    parts = pipeline.vae, pipeline.scheduler, pipeline.transformer
    handle = parallelize(pipeline, guidance_degree=2)
    arguments = {**prompt_of("flux"), **SIZES, "output_type": "pt"}
    with handle.timed():
        said = handle.verify(pipeline, **arguments, generator=seeded(1))
    handle.undo()
    is_same = parts == (pipeline.vae, pipeline.scheduler, pipeline.transformer)
    left = set[str]() if type(pipeline).__call__ is call else {"a call"}
    if dist.get_rank() == 0:
        generated("flux", pipeline, prompt_of("flux"), generator=seeded(1))
    return said.ok and is_same, left


def test_nothing_is_left_of_a_verification_that_was_measured() -> None:
    for ok, left in run_ranks(interrupted, 2):
        assert ok and not left


def undone_within() -> None:
    """Undone while it is measured, which puts back what it found; then one rank runs alone."""
    pipeline = make_pipeline("flux")
    pipeline.vae.enable_tiling()
    handle = parallelize(pipeline, guidance_degree=2)
    with handle.timed():
        handle.undo()
    if dist.get_rank() == 0:
        generated("flux", pipeline, prompt_of("flux"), generator=seeded(1))


def test_what_is_undone_while_it_is_measured_shares_nothing() -> None:
    run_ranks(undone_within, 2)


def ideogram() -> Any:
    """Guides with a second model; its prompts are encoded already."""
    import diffusers as host

    diffusers: Any = host
    case = next(one for one in CASES if one.model == "ideogram4")
    torch.manual_seed(0)
    models: list[Any] = [MODELS["ideogram4"](case).eval() for _ in range(2)]
    width = models[0].config.llm_features_dim

    class Encoded(diffusers.Ideogram4Pipeline):
        def encode_prompt(
            self, prompt: str, grid_h: int, grid_w: int, max_sequence_length: int, device: Any
        ) -> Any:
            ids = self._prepare_ids([4], grid_h, grid_w, max_sequence_length, device)
            features = torch.randn(
                1, max_sequence_length + grid_h * grid_w, width, generator=seeded(3)
            )
            return features, *ids

    pipeline: Any = Encoded(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=make_pipeline("flux").vae,
        text_encoder=None,
        tokenizer=None,
        transformer=models[0],
        unconditional_transformer=models[1],
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def guided_by_two() -> SimpleNamespace:
    pipeline = ideogram()
    given: dict[str, Any] = {"prompt": "w1", **SIZES, "guidance_schedule": None}
    given |= {"guidance_scale": 3.0, "max_sequence_length": 5, "return_dict": False}
    calls = list[str]()
    for name in ("transformer", "unconditional_transformer"):
        layer = getattr(pipeline, name).layers[0]
        layer.register_forward_hook(lambda *_, name=name: calls.append(name))
    wanted = pipeline(**given, generator=seeded(1))[0]
    alone = len(calls)
    found = SimpleNamespace(errors=[], calls=[], first="")
    each: list[dict[str, Any]] = [{"guidance_degree": 2}, {"ulysses_degree": 2}]
    for degrees in each:
        with parallelize(pipeline, **degrees) as handle:
            pipeline(**given, generator=seeded(1))
            calls.clear()
            images = pipeline(**given, generator=seeded(1 + dist.get_rank()))[0]
            found.calls.append(len(calls) / alone)
            found.errors.append(float((images - wanted).abs().max()))
            assert handle.verify(pipeline, **given, generator=seeded(1)).ok
    with torch.no_grad(), parallelize(pipeline, ulysses_degree=2) as handle:
        weight = pipeline.unconditional_transformer.layers[0].feed_forward.w2.weight
        weight.add_(0.1 * dist.get_rank())
        said = handle.verify(pipeline, **given, generator=seeded(1))
        found.first = said.first_difference
    return found


def test_a_model_that_guides_is_shared_and_compared_too() -> None:
    for found in run_ranks(guided_by_two, 2):
        assert max(found.errors) <= 1e-4
        assert found.calls == [0.5, 1.0]
        assert found.first.startswith("step 1, unconditional_transformer: layers.0")
