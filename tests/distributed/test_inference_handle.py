"""parallelize: exact on odd shapes, undone without a trace, gradients right under averaging."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from bascule.diffusers import parallelize, race
from bascule.errors import ConfigError
from tests.helpers.inference_cases import (
    make_mesh,
    num_hooks,
    same,
    same_as_one_process,
    same_gradients,
    shard,
)
from tests.helpers.inference_toy import TABLE, grads_of, make_toy, toy_gradients, toy_inputs
from tests.helpers.ranks import on_ranks

MESHES = [  # ring, Ulysses
    *[(1, 2), (2, 1)],
    *(pytest.param(*mesh, marks=pytest.mark.stress) for mesh in [(2, 2), (1, 4), (4, 1)]),
]
SHAPES: list[dict[str, Any]] = [
    {"text": 5, "image": 9, "masked": True},
    {"text": 1, "image": 1, "batch": 3},
    {"text": 0, "image": 6},
    {"text": 8, "image": 3, "masked": True},
]


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
@on_ranks(lambda ring, ulysses: ring * ulysses)
def test_forward_and_training_step_of_ones_own_model(ring: int, ulysses: int) -> None:
    mesh = make_mesh(ring, ulysses)
    for sizes, shape in product(({"kv_heads": 6}, {"kv_heads": 3}), SHAPES):
        same_as_one_process(make_toy(**sizes), toy_inputs(**shape), mesh=mesh, table=TABLE)


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks(lambda num_ranks: num_ranks)
def test_one_call_of_a_form_is_counted_and_one_rank_attends_as_the_model_does(
    num_ranks: int,
) -> None:
    """Modes within the blocks at six calls of one form, and what is told between two forms."""
    model, modes = make_toy(), list[int]()
    inputs = [toy_inputs(text=5, image=9, masked=True), toy_inputs(text=3, image=10)]
    wanted = [model(**given) for given in inputs]
    with parallelize(model, ring_degree=num_ranks, table=TABLE) as handle, torch.no_grad():
        handle.verify(**toy_inputs(text=2, image=3))  # else the first call is compared
        next(model.blocks[0].children()).register_forward_hook(
            lambda *_: modes.append(len(_get_current_function_mode_stack()))
        )
        for _ in range(6):
            same(model(**inputs[0]), wanted[0])
        first = str(handle.explain())
        assert modes == [1] + 5 * [0 if num_ranks == 1 else 1], modes
        same(model(**inputs[1]), wanted[1])
        second = str(handle.explain())
        model(**inputs[0])  # a seventh call, which is not counted
        assert first == str(handle.explain()) != second


@on_ranks(2)
def test_an_automatic_mesh_computes_alone_what_is_slower_over_it() -> None:
    """Three forms by a clock of the test: too long to try, faster alone, faster over the mesh."""
    model, ways = make_toy(), list[bool]()
    vars(model)["config"] = SimpleNamespace(num_attention_heads=6)
    took = {9: (0.05, 0.2), 4: (0.01, 0.05), 6: (0.05, 0.01)}  # seconds alone, split
    now, num_image = 0.0, 9
    with (
        pytest.MonkeyPatch.context() as patch,
        parallelize(model, "auto", table=TABLE) as handle,
        torch.no_grad(),
    ):
        patch.setattr(race, "finished_s", lambda device: now)
        (split,) = handle.parts
        handle.verify(**toy_inputs(text=2, image=3))  # else the first call is compared

        def tick(*_: Any) -> None:
            nonlocal now
            ways.append(split.forward is not None)
            now += took[num_image][ways[-1]]

        model.blocks[0].register_forward_pre_hook(tick)
        for num_image, wanted in ((9, "ssssssss"), (4, "sssaaaaa"), (6, "sssaasss")):
            inputs = toy_inputs(text=5, image=num_image, masked=True)
            with split.taking(None):
                expected = model.forward(**inputs)
            ways.clear()
            for _ in wanted:
                same(model(**inputs), expected)
            assert "".join("as"[is_split] for is_split in ways) == wanted
        said = "takes 50.0 ms over 2 ranks and 10.0 ms on each rank alone, so each rank computes"
        assert str(handle.explain()).count("alone") == 2 and said in str(handle.explain())
        ways.clear()
        with torch.enable_grad():  # nothing is tried, and nothing is alone
            for num_image in (4, 4, 4, 4, 4, 7, 7, 7, 7, 7):
                took[7] = took[4]
                model(**toy_inputs(text=5, image=num_image, masked=True))
        assert all(ways)


@on_ranks(4)
def test_gradients_are_right_under_the_averaging_of_ddp_and_fsdp() -> None:
    """Two samples on two pairs of ranks: DDP and FSDP average over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ulysses"))
    batches = [toy_inputs(text=5, image=9, seed=seed) for seed in (1, 2)]
    reference = make_toy()
    each = [toy_gradients(reference, batch)[1] for batch in batches]
    wanted = {name: (each[0][name] + each[1][name]) / 2 for name in each[0]}
    mine = batches[mesh.get_local_rank("dp")]
    model = make_toy()
    parallelize(model, mesh=mesh["ulysses"], table=TABLE)
    toy_gradients(DistributedDataParallel(model), mine)
    same_gradients(grads_of(model), wanted)
    wrapped = DistributedDataParallel(make_toy())
    with parallelize(wrapped, mesh=mesh["ulysses"], table=TABLE) as handle:
        toy_gradients(wrapped, mine)
        assert handle.model is wrapped.module and handle.explain(wrapped).model == "Toy"
    same_gradients(grads_of(wrapped.module), wanted)
    model = make_toy()
    shard(model)
    with parallelize(model, mesh=mesh["ulysses"], table=TABLE) as handle:
        toy_gradients(model, mine)
        grads = {name: grad.full_tensor() for name, grad in grads_of(model).items()}  # pyright: ignore
        same_gradients(grads, wanted)
        assert handle.verify(**batches[0]).ok


@on_ranks(2)
def test_recomputation_uses_the_lengths_of_its_own_forward_pass() -> None:
    """Both forward passes, of other lengths, run before the backward of the first."""
    model = make_toy()
    inputs = [toy_inputs(text=5, image=9, masked=True), toy_inputs(text=3, image=10)]

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        first, second = (model(**given) for given in inputs)
        first.square().mean().backward()
        second.square().mean().backward()
        return grads_of(model)

    wanted = step()
    with parallelize(model, ring_degree=2, table=TABLE) as handle:
        model.run = lambda block, *args: checkpoint(block, *args, use_reentrant=False)
        assert "enable_gradient_checkpointing(handle.checkpoint)" in refused(step)
        model.run = handle.checkpoint
        step()
        handle.average_gradients()
    same_gradients(grads_of(model), wanted)


def refused(act: Callable[[], object]) -> str:
    try:
        act()
    except (ConfigError, ValueError) as error:
        assert not _get_current_function_mode_stack()
        return str(error)
    return "nothing was refused"


@on_ranks(4)
def test_models_on_different_meshes_do_not_meet() -> None:
    """Two models on different meshes, in turn and one within the other; a third stays whole."""
    models = [make_toy(seed) for seed in range(3)]
    inputs = toy_inputs(text=5, image=9, masked=True)
    wanted = [model(**inputs) for model in models]
    inner: list[Tensor] = []
    with (
        parallelize(models[0], mesh=make_mesh(2, 2), table=TABLE),
        parallelize(models[1], mesh=make_mesh(1, 4), table=TABLE),
    ):
        for i in (0, 1, 2, 1, 0):
            same(models[i](**inputs), wanted[i])

        def within(module: nn.Module, args: Any) -> None:
            inner.append(models[1](**inputs))

        hook = models[0].blocks[1].register_forward_pre_hook(within)
        same(models[0](**inputs), wanted[0])
        same(inner[0], wanted[1])
        hook.remove()


@on_ranks(2)
def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    model, inputs = make_toy(), toy_inputs()
    wanted = model(**inputs)

    def fail(module: nn.Module, *args: Any) -> None:
        raise ValueError("in the middle")

    with parallelize(model, ulysses_degree=2, table=TABLE):
        for name in ("blocks.1", "blocks.1.cross", "head", ""):
            module = model.get_submodule(name)
            for register in (module.register_forward_pre_hook, module.register_forward_hook):
                hook = register(fail)
                assert refused(lambda: model(**inputs)) == "in the middle"
                hook.remove()
        same(model(**inputs), wanted)
        assert not _get_current_function_mode_stack()
    assert torch.equal(model(**inputs), wanted) and num_hooks(model) == 0
