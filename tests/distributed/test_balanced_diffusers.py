"""Unmodified models of diffusers, trained in balance: gradients are those of one process.

Every rank draws the samples of all ranks, and one process takes them one by one.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from bascule.diffusers import BalancedModel
from bascule.errors import CommError, ConfigError
from bascule.parallel import SequenceParallel
from bascule.plan.costs import TransformerCost
from bascule.plan.limits import Limits
from bascule.train import train_step
from tests.helpers.calls_made import calls_made
from tests.helpers.inference_cases import Case, Inputs, make_inputs, make_model
from tests.helpers.jobs import join_trainer_world
from tests.helpers.ranks import raised_by, run_ranks

pytest.importorskip("diffusers")

F64 = torch.float64
COST = TransformerCost(64)
# As many tokens in another aspect ratio, one shape twice, one too long for a rank, one token.
GRIDS = [(3, 5), (5, 3), (3, 5), (9, 11), (1, 1), (3, 5)]
OPTIONS = {"qwen": ("mask",)}
HEADS = {"wan": 3}  # fewer than the ranks of the largest bag, which then has a ring
BLOCKS = {"flux": ("transformer_blocks", "single_transformer_blocks"), "wan": ("blocks",)}
Gradients = dict[str, Tensor]


def cases_of(model: str) -> list[Case]:
    texts = [7, 7, 7, 3, 1, 7]
    args = [(text, grid) for text, grid in zip(texts, GRIDS, strict=True)]
    return [
        Case(model, HEADS.get(model, 4), 1, text, grid, OPTIONS.get(model, ()))
        for text, grid in args
    ]


def samples_of(model: str) -> list[Inputs]:
    """What the model takes for a batch of one, with a target and the square of its weight."""
    found: list[Inputs] = []
    for seed, case in enumerate(cases_of(model)):
        sample = make_inputs(case, F64, seed)
        if "image_rotary_emb" in sample:  # angles are of the grid
            sample["image_rotary_emb"] = make_inputs(case, F64, 0)["image_rotary_emb"]
        draw = torch.Generator().manual_seed(seed)
        sample["target"] = torch.randn(sample["hidden_states"].shape, generator=draw, dtype=F64)
        found.append(sample)
    return found


def inputs_of(sample: Inputs) -> Inputs:
    return {name: x for name, x in sample.items() if name != "target"}


def loss_of(output: Tensor, batch: Inputs) -> Tensor:
    return (output - batch["target"]).square().flatten(1).mean(1)


def num_tokens(sample: Inputs) -> int:
    hidden, text = sample["hidden_states"], sample["encoder_hidden_states"]
    return hidden.numel() // hidden.shape[-1] + text.shape[1]


def share_of(samples: Sequence[Inputs], rank: int, num_ranks: int) -> list[Inputs]:
    """The first rank loads nothing, the others take turns."""
    return [] if rank == 0 else list(samples[rank - 1 :: num_ranks - 1])


def alone(model: nn.Module, samples: Sequence[Inputs], weights: Sequence[int]) -> Gradients:
    """Of one process, for the weighted mean over the samples."""
    model.zero_grad()
    for sample, weight in zip(samples, weights, strict=True):
        (loss_of(model(**inputs_of(sample))[0], sample).sum() * weight / sum(weights)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@cache
def one_process(name: str, weights: tuple[int, ...]) -> tuple[Gradients, float]:
    """Gradients and loss of the first samples, by weight; once for all that a world tries."""
    torch.manual_seed(0)
    samples, model = samples_of(name)[: len(weights)], make_model(cases_of(name)[0], F64)
    wanted = alone(model, samples, weights)
    inputs = [inputs_of(one) for one in samples]
    with torch.no_grad():
        losses = [loss_of(model(**x)[0], s) for x, s in zip(inputs, samples, strict=True)]
    return wanted, sum(float(a) * w for a, w in zip(losses, weights, strict=True)) / sum(weights)


def worst(model: nn.Module, wanted: Gradients) -> float:
    """The largest error of a parameter's gradient over what is allowed."""
    every = float(torch.cat([grad.flatten() for grad in wanted.values()]).norm())
    errors = [0.0]
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is None:
            assert name not in wanted or not parameter.requires_grad, name
            continue
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        reference = wanted.get(name, torch.zeros_like(grad))
        allowed = 1e-10 * float(reference.norm()) + 1e-13 * every
        errors.append(float((grad - reference).norm()) / allowed)
    return max(errors)


def wrapped(kind: str, name: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":  # of Qwen-Image and CogVideoX, the last block's text is used by nobody
        return DistributedDataParallel(model, find_unused_parameters=name not in BLOCKS)
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for blocks in BLOCKS.get(name, ("transformer_blocks",)):
            for block in getattr(model, blocks):
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


class InDouble(TorchFunctionMode):
    """Float64 stays float64, where models round to float32, which hides errors.

    Wan rounds norms and residuals. Others round rotations and norms of inputs, which is the same in
    one process, unless gradients are scaled by a number of ranks that is no power of two.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rounds = func is Tensor.float or (func is Tensor.to and torch.float32 in args[1:])
        is_kept = rounds and args[0].dtype == F64
        return args[0] if is_kept else func(*args, **(kwargs or {}))


def trained(
    name: str, topology: str, kind: str, most: int = 6, **settings: Any
) -> tuple[float, float, list[int]]:
    """The worst error of a gradient, that of the loss, and the bag of each sample."""
    with InDouble() if name == "wan" or dist.get_world_size() == 3 else nullcontext():
        return as_it_is(name, topology, kind, most, **settings)


def as_it_is(
    name: str, topology: str, kind: str, most: int, **settings: Any
) -> tuple[float, float, list[int]]:
    """The same, of a model that rounds as it always does."""
    torch.manual_seed(0)
    samples, model = samples_of(name)[:most], make_model(cases_of(name)[0], F64)
    weights = [settings["weight_fn"](one) if "weight_fn" in settings else 1 for one in samples]
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mine = [share_of(samples, one, num_ranks) for one in range(num_ranks)]
    in_order = [one for own in mine for one in own]
    assert len(in_order) == len(samples)
    wanted, mean = one_process(name, tuple(weights))
    sp = SequenceParallel(None, topology, COST, timeout_s=15.0)
    model = wrapped(kind, name, model)
    balanced = BalancedModel(model, sp, length_fn=num_tokens, **settings)
    loss = train_step(model, balanced.microbatches(mine[rank], loss_of))
    if kind == "plain":
        balanced.handle.average_gradients()
    dist.all_reduce(loss)
    error = abs(float(loss) / num_ranks - mean) / mean
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return worst(inner, wanted), error, balanced.step.plan.bag_of.tolist()


def all_trained(name: str, topology: str, kinds: Sequence[str]) -> dict[str, Any]:
    return {kind: trained(name, topology, kind) for kind in kinds}


WORLDS = [
    (2, "g1n2"),
    (2, "g2n1"),
    (3, "g1n1+g2n1"),
    (4, "g1n2+g2n1"),
    (4, "g1r2n1+g2n1"),
    (4, "g4n1"),
]


@pytest.mark.some(6)
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "topology"), WORLDS)
@pytest.mark.parametrize("name", ["flux", "wan", "qwen", "cogvideox"])
def test_gradients_are_those_of_one_process(name: str, num_ranks: int, topology: str) -> None:
    kinds = ("plain", "ddp", "fsdp2")
    for found in run_ranks(all_trained, num_ranks, name, topology, kinds):
        for kind in kinds:
            error, loss_error, bags = found[kind]
            assert error <= 1.0 and loss_error < 1e-12, (kind, error, loss_error)
            assert len(bags) == len(GRIDS)


def test_flux_on_two_ranks() -> None:
    """The fast one of the above."""
    for error, loss_error, bags in run_ranks(trained, 2, "flux", "g1n2", "plain"):
        assert error <= 1.0 and loss_error < 1e-12
        assert set(bags) == {0, 1}


def by_weight(sample: Inputs) -> int:
    return sample["target"].numel()


def with_settings() -> dict[str, Any]:
    """Weights by the tokens of the target, few tokens at once, gradients that are summed."""
    found = {"weights": trained("flux", "g2n1", "plain", weight_fn=by_weight)}
    found["few at once"] = trained("flux", "g1n2", "ddp", max_tokens=20)
    found["one at a time"] = trained("flux", "g1n2", "fsdp2", max_tokens=1)
    found["rounding"] = as_it_is("wan", "g2n1", "plain", 6)
    return found


def test_settings() -> None:
    for found in run_ranks(with_settings, 2):
        rounded, loss_error, _ = found.pop("rounding")
        assert rounded < 1e4 and loss_error < 1e-6  # 1e-6 in place of 1e-10
        for error, loss_error, _ in found.values():
            assert error <= 1.0 and loss_error < 1e-12


def with_few(topology: str) -> list[tuple[float, float, list[int]]]:
    """Fewer samples than ranks: who has none computes another's once more."""
    return [trained("flux", topology, kind, most=2) for kind in ("plain", "ddp", "fsdp2")]


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["g1n4", "g1n2+g2n1"])
def test_fewer_samples_than_ranks(topology: str) -> None:
    for found in run_ranks(with_few, 4, topology):
        for error, loss_error, bags in found:
            assert error <= 1.0 and loss_error < 1e-12
            assert len(bags) == 2


def one_shape_each(num_ranks: int) -> tuple[Any, list[Inputs], Gradients]:
    """Flux, and the sample of each rank."""
    samples, model = samples_of("flux")[:num_ranks], make_model(cases_of("flux")[0], F64)
    return model, samples, alone(model, samples, [1] * num_ranks)


def in_use(topology: str) -> dict[str, Any]:
    """Checkpoints, two steps at once, calls between steps, frozen weights, undo."""
    num_ranks, rank, found = dist.get_world_size(), dist.get_rank(), dict[str, Any]()
    model, samples, wanted = one_shape_each(num_ranks)
    inputs = inputs_of(samples[rank])
    before = model(**inputs)[0].detach()
    model.zero_grad()
    sp = SequenceParallel(None, topology, COST, timeout_s=15.0)
    balanced = BalancedModel(model, sp, length_fn=num_tokens)

    def step(*lists: list[Inputs]) -> float:
        model.zero_grad()
        train_step(model, [one for own in lists for one in balanced.microbatches(own, loss_of)])
        balanced.handle.average_gradients()
        return worst(model, wanted)

    own = [samples[rank]]
    model.enable_gradient_checkpointing(balanced.handle.checkpoint)
    found["checkpoints"] = step(own)
    if rank == 0:  # a call of one rank alone, as for a validation
        assert torch.equal(model(**inputs)[0], before)
    model.enable_gradient_checkpointing()
    try:
        step(own)
    except ConfigError as error:
        found["torch's own checkpoints"] = str(error)
    dist.barrier()
    model.disable_gradient_checkpointing()
    wanted = {name: 2 * grad for name, grad in wanted.items()}
    found["two at once"] = step(own, own)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".to_q." in name)
    wanted = {name: grad for name, grad in wanted.items() if ".to_q." in name}
    found["frozen"] = step(own, own)
    found["verified"] = 0.0 if balanced.handle.verify(**inputs_of(samples[0])).ok else math.inf
    balanced.handle.undo()
    assert torch.equal(model(**inputs)[0], before)
    found["undone"] = raised_by(balanced.microbatches, own, loss_of)[1]
    return found


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "topology"), [(1, "g1n1"), (2, "g2n1"), (4, "g1n2+g2n1")])
def test_checkpoints_validation_and_frozen_weights(num_ranks: int, topology: str) -> None:
    for found in run_ranks(in_use, num_ranks, topology):
        assert "undo() was called: make another BalancedModel" in found.pop("undone")
        said = found.pop("torch's own checkpoints")
        assert "enable_gradient_checkpointing(handle.checkpoint)" in said
        assert all(error <= 1.0 for error in found.values()), found


def messages() -> tuple[dict[str, int], dict[str, int]]:
    """The calls of two steps, those of training left out."""
    model, samples, _ = one_shape_each(2)
    sp = SequenceParallel(None, "g1n2", COST, timeout_s=15.0)
    balanced = BalancedModel(model, sp, length_fn=num_tokens)
    counts: list[dict[str, int]] = []
    for _ in range(2):
        with calls_made() as made:
            balanced.microbatches(samples if dist.get_rank() else [], loss_of)
        counts.append(dict(made.counts))
    return counts[0], counts[1]


def test_a_step_takes_two_gathers_and_one_exchange() -> None:
    for first, second in run_ranks(messages, 2):
        assert first == second == {"all_gather": 2, "all_to_all": 1}


def in_accelerate() -> tuple[str, float, float]:
    """The wrapper of an Accelerator, and the loss as its scripts gather it, and as it should be."""
    from accelerate import Accelerator

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    join_trainer_world()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plain, samples = make_model(cases_of("flux")[0]), samples_of("flux")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        losses = [loss_of(plain(**inputs_of(one))[0], one) for one in map(in_float, samples)]
    model = accelerator.prepare(plain)
    sp = SequenceParallel(None, "g2n1", COST, timeout_s=15.0)
    balanced = BalancedModel(model, sp, length_fn=num_tokens)
    own = [in_float(one) for one in samples[rank::num_ranks]]
    loss = train_step(model, balanced.microbatches(own, loss_of))
    gathered = float(torch.as_tensor(accelerator.gather(loss)).mean())
    return type(model).__name__, gathered, float(torch.stack(losses).mean())


def in_float(sample: Inputs) -> Inputs:
    return {name: x.float() if isinstance(x, Tensor) else x for name, x in sample.items()}


@pytest.mark.slow
def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    for wrapper, loss, wanted in run_ranks(in_accelerate, 2):
        assert wrapper == "DistributedDataParallel"
        assert abs(loss - wanted) < 1e-2 * wanted


def compiled() -> float:
    """Its blocks are compiled, as `compile_repeated_blocks` does."""
    torch.set_num_threads(1)
    model, samples, wanted = one_shape_each(2)
    model.zero_grad()
    sp = SequenceParallel(None, "g2n1", COST, timeout_s=60.0)
    balanced = BalancedModel(model, sp, length_fn=num_tokens)
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.compile(backend="aot_eager")
    train_step(model, balanced.microbatches([samples[dist.get_rank()]], loss_of))
    balanced.handle.average_gradients()
    return worst(model, wanted)


@pytest.mark.slow
def test_compiled_blocks() -> None:
    assert max(run_ranks(compiled, 2)) <= 1.0


def without(sample: Inputs, name: str) -> Inputs:
    return {key: x for key, x in sample.items() if key != name}


WRONG: dict[str, tuple[Callable[[Inputs], Any], str]] = {
    "no dict": (lambda s: list(s), "sample 0: is a list: give a dict"),
    "required": (
        lambda s: without(s, "hidden_states"),
        "sample 0: has no 'hidden_states', which the model's forward needs: add it",
    ),
    "other keywords": (
        lambda s: without(s, "timestep"),
        "disagree on keywords of samples: ranks [0]: encoder_hidden_states, hidden_states, img_ids",
    ),
    "no batch": (
        lambda s: s | {"timestep": s["timestep"][0]},
        "sample 0: 'timestep' has the shape (): give what the model takes for a batch of one",
    ),
    "batch of two": (
        lambda s: s | {"target": torch.cat([s["target"]] * 2)},
        "sample 0: 'target' has the shape (2, 15, 8): give what the model takes for a batch of one",
    ),
    "gradient": (
        lambda s: s | {"target": s["target"].clone().requires_grad_()},
        "sample['target'] requires a gradient",
    ),
    "no tokens": (
        lambda s: s | {"length": 0},
        "sample 0: length_fn is 0; it must be an integer, at least 1",
    ),
    "length function": (lambda s: s | {"length": None}, "sample 0: length_fn is None; it must"),
    "too long": (lambda s: s | {"length": 1001}, "1001"),
    "list": (lambda s: s | {"ids": [1, 2]}, "sample 0: 'ids' is a list of 2"),
    "tensors in a list": (
        lambda s: s | {"controlnet_block_samples": [s["target"]]},
        "sample 0: 'controlnet_block_samples' is a list that holds tensors",
    ),
}


def told_length(sample: Inputs) -> int:
    return sample.get("length", num_tokens(sample))


def misused() -> dict[str, Any]:
    """What is said of each wrong sample of the last rank; then a step that is right."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    model, samples, wanted = one_shape_each(num_ranks)
    sp = SequenceParallel(None, "g1n2", COST, limits=Limits(tokens=200), timeout_s=15.0)
    balanced = BalancedModel(model, sp, length_fn=told_length)
    found: dict[str, Any] = {}
    for name, (spoil, _) in WRONG.items():
        own = [spoil(samples[rank]) if rank == num_ranks - 1 else samples[rank]]
        found[name] = raised_by(balanced.microbatches, own, loss_of)
    mixed = [samples[rank], without(samples[rank], "timestep")]
    found["mixed"] = raised_by(balanced.microbatches, mixed, loss_of)
    found["nobody"] = raised_by(balanced.microbatches, [], loss_of)
    two = samples[rank] | ({"target": torch.cat([samples[rank]["target"]] * 2)} if rank else {})
    found["uneven batch"] = raised_by(
        lambda: balanced.microbatches(balanced.samples_of(**two), loss_of)
    )
    model.zero_grad()
    scalar = balanced.microbatches([samples[rank]], lambda out, batch: loss_of(out, batch).sum())
    found["scalar"] = raised_by(train_step, model, scalar)
    train_step(model, balanced.microbatches([samples[rank]], loss_of))
    balanced.handle.average_gradients()
    found["right"] = worst(model, wanted)
    return found


@pytest.mark.slow
def test_wrong_samples_are_refused_alike_on_all_ranks() -> None:
    first, second = run_ranks(misused, 2)
    assert first.pop("right") <= 1.0 and second.pop("right") <= 1.0
    assert first == second
    for name, (_, sentence) in WRONG.items():
        kinds, text = first[name]
        assert sentence in text, (name, text)
        assert {"ConfigError", "CommError", "PlanError"} & set(kinds)
        assert name == "other keywords" or "rank" in text
    assert "sample 1 has the keywords" in first["mixed"][1]
    assert "no rank has a sample: give one on one rank at least" in first["nobody"][1]
    assert (
        "'target' of a batch has 2 samples, and 'hidden_states' has 1" in first["uneven batch"][1]
    )
    assert "loss_fn gave the shape () for 1 samples" in first["scalar"][1]


def misbuilt() -> dict[str, Any]:
    """What is said of each wrong construction on the last rank, and of a second one."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    model = make_model(cases_of("flux")[0], F64)
    sp = SequenceParallel(None, "g1n2", COST, timeout_s=15.0)
    other = nn.Linear(2, 2) if is_last else model
    found = {"table": raised_by(BalancedModel, other, sp, length_fn=num_tokens)}
    most = 0 if is_last else None
    found["most"] = raised_by(BalancedModel, model, sp, length_fn=num_tokens, max_tokens=most)
    BalancedModel(model, sp, length_fn=num_tokens)
    found["twice"] = raised_by(BalancedModel, model, sp, length_fn=num_tokens)
    wide = SequenceParallel(None, "g1n2", COST, timeout_s=15.0, data_group=dist.group.WORLD)
    other = make_model(cases_of("flux")[0], F64)
    found["data_group"] = raised_by(BalancedModel, other, wide, length_fn=num_tokens)
    return found


@pytest.mark.slow
def test_wrong_models_are_refused_on_all_ranks() -> None:
    for found in run_ranks(misbuilt, 2):
        assert "no split table for Linear: write one" in found["table"][1]
        assert "max_tokens is 0; it must be an integer, at least 1" in found["most"][1]
        assert "is split over ranks already" in found["twice"][1]
        assert "give SequenceParallel all ranks" in found["data_group"][1]


def failing() -> str:
    """A model that fails on one rank alone ends the others."""
    model, samples, _ = one_shape_each(2)
    sp = SequenceParallel(None, "g2n1", COST, timeout_s=15.0)
    balanced = BalancedModel(model, sp, length_fn=num_tokens)
    if dist.get_rank() == 1:
        model.norm_out.register_forward_pre_hook(lambda *_: 1 / 0)
    parts = balanced.microbatches([samples[dist.get_rank()]], loss_of)
    try:
        train_step(model, parts)
    except (CommError, ZeroDivisionError) as error:
        return repr(error)
    return "nothing was raised"


def test_a_rank_that_fails_ends_the_others() -> None:
    first, second = run_ranks(failing, 2)
    assert "division by zero" in first and "CommError" in first
    assert "ZeroDivisionError" in second
