"""Unmodified models of diffusers, trained in balance: gradients are those of one process.

Every rank draws the samples of all ranks, and one process takes them one by one.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bascule.diffusers import BalancedModel
from bascule.errors import CommError
from bascule.machine.costs import TransformerCost
from bascule.parallel import SequenceParallel
from bascule.plan.limits import Limits
from bascule.train import train_step
from tests.helpers.calls_made import calls_made
from tests.helpers.inference_cases import (
    Case,
    Gradients,
    Inputs,
    in_float64,
    make_inputs,
    make_model,
    worst,
    wrapped,
)
from tests.helpers.inference_toy import grads_of
from tests.helpers.jobs import join_trainer_world
from tests.helpers.pages import blocks_of
from tests.helpers.ranks import by_one_rank, on_ranks, raised_by, run_ranks

pytest.importorskip("diffusers")

F64 = torch.float64
COST = TransformerCost(64)
# As many tokens in another aspect ratio, one shape twice, one too long for a rank, one token.
GRIDS = [(3, 5), (5, 3), (3, 5), (9, 11), (1, 1), (3, 5)]
OPTIONS = {"qwen": ("mask",)}
HEADS = {"wan": 3}  # fewer than the ranks of the largest bag, which then has a ring
LEAVES_TEXT = "qwen", "cogvideox"
"""Models of which nobody uses the text of the last block."""


def cases_of(model: str) -> list[Case]:
    heads, options = HEADS.get(model, 4), OPTIONS.get(model, ())
    pairs = zip([7, 7, 7, 3, 1, 7], GRIDS, strict=True)
    return [Case(model, heads, 1, text, grid, options) for text, grid in pairs]


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return make_model(cases_of(name)[0], F64)


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


def alone(
    model: nn.Module, samples: Sequence[Inputs], weights: Sequence[int]
) -> tuple[Gradients, float]:
    """Gradients and loss of one process, for the weighted mean over the samples."""
    total = 0.0
    for sample, weight in zip(samples, weights, strict=True):
        loss = loss_of(model(**inputs_of(sample))[0], sample).sum() * weight / sum(weights)
        loss.backward()
        total += float(loss.detach())
    grads = grads_of(model)
    model.zero_grad()
    return grads, total


@cache
def one_process(name: str, weights: tuple[int, ...]) -> tuple[Gradients, float]:
    """`alone` for the first samples; once for all that a world tries."""
    return by_one_rank(alone, model_of(name), samples_of(name)[: len(weights)], weights)


def check_trained(
    name: str,
    topology: str,
    kind: str,
    most: int = len(GRIDS),
    *,
    rounds: bool = False,
    **settings: Any,
) -> None:
    """Compare gradients and the loss of a step with those of one process, and count its samples.

    In float64 throughout: Wan rounds norms and residuals. Others round rotations and norms of
    inputs, which is the same in one process, unless gradients are scaled by a number of ranks that
    is no power of two. A model may also round as it always does: 1e-6 in place of 1e-10.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    is_wide = not rounds and (name == "wan" or num_ranks == 3)
    with in_float64(F64) if is_wide else nullcontext():
        samples, model = samples_of(name)[:most], model_of(name)
        # The first rank loads nothing, the others take turns.
        mine = [] if rank == 0 else samples[rank - 1 :: num_ranks - 1]
        weight_fn = settings.get("weight_fn", lambda _: 1)
        wanted, mean = one_process(name, tuple(weight_fn(one) for one in samples))
        outer = wrapped(kind, model, name in LEAVES_TEXT)
        balanced = BalancedModel(outer, parallel(topology), length_fn=num_tokens, **settings)
        loss = train_step(outer, balanced.microbatches(mine, loss_of))
        if kind == "plain":
            balanced.handle.average_gradients()
        dist.all_reduce(loss)
    error, loss_error = worst(model, wanted), abs(float(loss) / num_ranks - mean) / mean
    case = name, topology, kind, error, loss_error
    assert error < 1e4 if rounds else error <= 1.0, case
    assert loss_error < (1e-6 if rounds else 1e-12), case
    assert len(balanced.step.plan.bag_of) == most, case


def parallel(topology: str, **settings: Any) -> SequenceParallel:
    return SequenceParallel(None, topology, COST, timeout_s=100.0, **settings)


KINDS = ("plain", "ddp", "fsdp2")
WORLDS = [
    (2, "g1n2"),
    (4, "g4n1"),
    (3, "g1n1+g2n1"),
    (4, "g1n2+g2n1"),
    (4, "g1r2n1+g2n1"),
    (2, "g2n1"),
]


@pytest.mark.some(4)
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "topology"), WORLDS)
@pytest.mark.parametrize("name", ["flux", "wan", "qwen", "cogvideox"])
@on_ranks(lambda num_ranks, **_: num_ranks)
def test_gradients_are_those_of_one_process(name: str, num_ranks: int, topology: str) -> None:
    for kind in KINDS:
        check_trained(name, topology, kind)


def by_weight(sample: Inputs) -> int:
    return sample["target"].numel()


@on_ranks(2)
def test_settings() -> None:
    """Weights by the tokens of the target, few tokens at once, gradients that are summed."""
    check_trained("flux", "g2n1", "plain", weight_fn=by_weight)
    check_trained("flux", "g1n2", "ddp", max_tokens=20)
    check_trained("flux", "g1n2", "fsdp2", max_tokens=1)
    check_trained("wan", "g2n1", "plain", rounds=True)


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["g1n4", "g1n2+g2n1"])
@on_ranks(4)
def test_fewer_samples_than_ranks(topology: str) -> None:
    """Ranks without a sample compute another's once more."""
    for kind in KINDS:
        check_trained("flux", topology, kind, 2)


@on_ranks(2)
def test_a_step_without_samples_has_no_passes() -> None:
    """As that of one of two models, among which noise levels deal the samples.

    Of each wrapper: a step without samples on all ranks, then one with a sample on the last.
    """
    wanted, mean = one_process("flux", (1,))
    for kind in KINDS:
        model = model_of("flux")
        outer = wrapped(kind, model, finds_unused=False)
        balanced = BalancedModel(outer, parallel("g1n2"), length_fn=num_tokens)
        for own in ([], samples_of("flux")[: dist.get_rank()], []):
            parts = balanced.microbatches(own, loss_of)
            loss = train_step(outer, parts)
            if kind == "plain":
                balanced.handle.average_gradients()
            dist.all_reduce(loss)
            if parts:
                assert len(parts) == 1 and abs(float(loss) / 2 - mean) < 1e-12, kind
                assert worst(model, wanted) <= 1.0, kind
            else:
                grads = [one.grad for one in model.parameters() if one.grad is not None]
                assert len(parts) == float(loss) == float(sum(g.abs().sum() for g in grads)) == 0
            model.zero_grad()


@on_ranks(2)
def test_a_model_of_ones_own_gives_outputs_of_any_kind() -> None:
    """Errors of the guide's model of one's own, whose outputs are of each kind."""
    from diffusers.models.modeling_outputs import Transformer2DModelOutput
    from diffusers.utils.outputs import BaseOutput

    (block,) = (b for b in blocks_of("docs/sequence_parallel.md") if "class Mine" in b.text)
    attention = torch.nn.functional.scaled_dot_product_attention
    guide: dict[str, Any] = {"torch": torch, "scaled_dot_product_attention": attention}
    exec(block.text.partition("torch.manual_seed")[0], guide)

    class Two(BaseOutput):
        image: Any
        more: Any = None

    kinds: dict[str, Callable[[Tensor], Any]] = {
        "tensor": lambda x: x,
        "tuple": lambda x: (x,),
        "output": Transformer2DModelOutput,
        "two outputs": lambda x: Two(image=x, more=x),
        "dict": lambda x: {"image": x},
        "list": lambda x: [x],
    }
    for name, kind in kinds.items():

        class Mine(guide["Mine"]):
            def forward(self, text: Tensor, image: Tensor, time: Tensor) -> Any:
                return kind(super().forward(text, image, time))  # noqa: B023 - called here

        def loss_fn(output: Any, batch: Inputs) -> Tensor:
            if not isinstance(output, Tensor):
                output = output["image"] if isinstance(output, dict) else output[0]
            return (output - batch["target"]).square()

        torch.manual_seed(0)
        model = Mine().double()
        sizes = [(3, 11), (2, 5), (3, 11)]
        samples = [
            {
                "text": torch.randn(1, text, 8, dtype=F64),
                "image": torch.randn(1, image, 8, dtype=F64),
                "time": torch.randn(1, dtype=F64),
                "target": torch.randn(1, image, 8, dtype=F64),
            }
            for text, image in sizes
        ]
        for sample in samples:
            output = guide["Mine"].forward(model, *(sample[k] for k in ("text", "image", "time")))
            (loss_fn(output, sample).mean() / len(samples)).backward()
        wanted = grads_of(model)
        model.zero_grad()
        settings: dict[str, Any] = {"length_fn": lambda one: one["image"].shape[1]}
        balanced = BalancedModel(model, parallel("g1r2n1"), table=guide["table"], **settings)
        train_step(model, balanced.microbatches(samples[dist.get_rank() :: 2], loss_fn))
        balanced.handle.average_gradients()
        assert worst(model, wanted) <= 1.0, name


def encode(model: Any, args: Any, inputs: Inputs) -> tuple[Any, Inputs]:
    """A hook of the guide: the text encoder is a part of the model, and trains with it."""
    return args, inputs | {
        "encoder_hidden_states": model.text_encoder(inputs["encoder_hidden_states"])
    }


@on_ranks(2)
def test_a_text_encoder_trains_within_the_model() -> None:
    def make() -> Any:
        model = model_of("flux")
        model.text_encoder = nn.Embedding(32, width).double()
        model.register_forward_pre_hook(encode, with_kwargs=True)
        return model

    samples = samples_of("flux")[:3]
    width = samples[0]["encoder_hidden_states"].shape[2]
    for seed, sample in enumerate(samples):
        text, draw = sample["encoder_hidden_states"], torch.Generator().manual_seed(seed)
        sample["encoder_hidden_states"] = torch.randint(32, text.shape[:2], generator=draw)
    wanted, _ = by_one_rank(alone, make(), samples, [1] * 3)
    for topology in ("g1n2", "g2n1"):
        model = make()
        ddp = DistributedDataParallel(model)
        balanced = BalancedModel(ddp, parallel(topology), length_fn=num_tokens)
        train_step(ddp, balanced.microbatches(samples[dist.get_rank() :: 2], loss_of))
        assert worst(model, wanted) <= 1.0, topology
        assert model.text_encoder.weight.grad.any(), topology


def one_sample_each(
    topology: str, length_fn: Callable[[Inputs], int] = num_tokens, **settings: Any
) -> tuple[Any, BalancedModel, list[Inputs], Gradients]:
    """Flux, the sample of each rank, and the gradients of one process."""
    num_ranks = dist.get_world_size()
    samples, model = samples_of("flux")[:num_ranks], model_of("flux")
    wanted, _ = by_one_rank(alone, model, samples, [1] * num_ranks)
    balanced = BalancedModel(model, parallel(topology, **settings), length_fn=length_fn)
    return model, balanced, samples, wanted


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "topology"), [(1, "g1n1"), (4, "g1n2+g2n1"), (2, "g2n1")])
@on_ranks(lambda num_ranks, topology: num_ranks)
def test_checkpoints_validation_and_frozen_weights(num_ranks: int, topology: str) -> None:
    """Checkpoints, two steps at once, calls between steps, frozen weights, undo."""
    model, balanced, samples, wanted = one_sample_each(topology)
    rank = dist.get_rank()
    own, inputs = [samples[rank]], inputs_of(samples[rank])
    with torch.no_grad():
        before = model_of("flux")(**inputs)[0]

    def step(*lists: list[Inputs]) -> float:
        model.zero_grad()
        train_step(model, [one for own in lists for one in balanced.microbatches(own, loss_of)])
        balanced.handle.average_gradients()
        return worst(model, wanted)

    model.enable_gradient_checkpointing(balanced.handle.checkpoint)
    assert step(own) <= 1.0
    if rank == 0:  # a call of one rank alone, as for a validation
        assert torch.equal(model(**inputs)[0], before)
    model.enable_gradient_checkpointing()
    assert "enable_gradient_checkpointing(handle.checkpoint)" in raised_by(step, own)[1]
    dist.barrier()
    model.disable_gradient_checkpointing()
    wanted = {name: 2 * grad for name, grad in wanted.items()}
    assert step(own, own) <= 1.0
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".to_q." in name)
    wanted = {name: grad for name, grad in wanted.items() if ".to_q." in name}
    assert step(own, own) <= 1.0, "frozen"
    assert balanced.handle.verify(**inputs_of(samples[0])).ok
    balanced.handle.undo()
    assert torch.equal(model(**inputs)[0], before)
    undone = raised_by(balanced.microbatches, own, loss_of)[1]
    assert "undo() was called: make another BalancedModel" in undone


@on_ranks(2)
def test_a_step_takes_two_gathers_and_one_exchange() -> None:
    """The calls of two steps, those of training left out."""
    _, balanced, samples, _ = one_sample_each("g1n2")
    counts: list[dict[str, int]] = []
    for _ in range(2):
        with calls_made() as made:
            balanced.microbatches(samples if dist.get_rank() else [], loss_of)
        counts.append(dict(made.counts))
    first, second = counts[0], counts[1]
    assert first == second == {"all_gather": 2, "all_to_all": 1}


@on_ranks(2)
def test_plans_know_the_heads_of_the_model() -> None:
    """The cost of a model with three heads on two ranks, and the loads of a sample."""
    sp = SequenceParallel(None, "g2n1", COST)
    balanced = BalancedModel(model_of("wan"), sp, length_fn=lambda _: 1000)
    balanced.microbatches(samples_of("wan")[: 1 - dist.get_rank()], loss_of)
    assert sp.cost == TransformerCost(64, num_heads=3)
    wanted = (24 * 1000 * 64**2 + 4 / 3 * 4 * 1000**2 * 64) / 2 / 1e12
    assert balanced.step.plan.loads.tolist() == pytest.approx([wanted] * 2)


def in_accelerate() -> None:
    """The wrapper of an Accelerator, and the loss as its scripts gather it."""
    from accelerate import Accelerator

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    join_trainer_world()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plain, samples = make_model(cases_of("flux")[0]), samples_of("flux")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        losses = [loss_of(plain(**inputs_of(one))[0], one) for one in map(in_float, samples)]
    model = accelerator.prepare(plain)
    assert type(model).__name__ == "DistributedDataParallel"
    balanced = BalancedModel(model, parallel("g2n1"), length_fn=num_tokens)
    own = [in_float(one) for one in samples[rank::num_ranks]]
    loss = train_step(model, balanced.microbatches(own, loss_of))
    gathered = float(torch.as_tensor(accelerator.gather(loss)).mean())
    assert gathered == pytest.approx(float(torch.stack(losses).mean()), rel=1e-2)


def in_float(sample: Inputs) -> Inputs:
    return {name: x.float() if isinstance(x, Tensor) else x for name, x in sample.items()}


@pytest.mark.slow
def test_accelerate() -> None:
    pytest.importorskip("accelerate")
    run_ranks(in_accelerate, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_kinds", "num_blocks", "backend"),
    [(1, 1, "eager"), pytest.param(2, None, "aot_eager", marks=pytest.mark.stress)],
)
@on_ranks(2)
def test_compiled_blocks(num_kinds: int, num_blocks: int | None, backend: str) -> None:
    """So many blocks of so many kinds; of both, all: as `compile_repeated_blocks` does."""
    model, balanced, samples, wanted = one_sample_each("g2n1")
    for blocks in (model.single_transformer_blocks, model.transformer_blocks)[:num_kinds]:
        for block in blocks[:num_blocks]:
            block.compile(backend=backend)
    train_step(model, balanced.microbatches([samples[dist.get_rank()]], loss_of))
    balanced.handle.average_gradients()
    assert worst(model, wanted) <= 1.0


WRONG: dict[str, Callable[[Inputs], Any]] = {
    "sample 0: has no 'hidden_states', which the model's forward needs: add it": lambda s: {
        name: x for name, x in s.items() if name != "hidden_states"
    },
    "sample 0: 'timestep' has the shape ():": lambda s: s | {"timestep": s["timestep"][0]},
    "sample 0: 'target' has the shape (2, 15, 8):": lambda s: (
        s | {"target": torch.cat([s["target"]] * 2)}
    ),
    "sample['target'] requires a gradient": lambda s: (
        s | {"target": s["target"].clone().requires_grad_()}
    ),
    "sample 0: length_fn is 0; it must be an integer, at least 1": lambda s: s | {"length": 0},
    "1001": lambda s: s | {"length": 1001},  # more than the limits
    "sample 0: 'ids' is a list of 2": lambda s: s | {"ids": [1, 2]},
    "sample 0: 'noise' is a numpy array": lambda s: s | {"noise": np.ones((1, 4))},
    "sample 0: 'residuals' is a list of tensors": lambda s: s | {"residuals": [s["target"]]},
}


@pytest.mark.slow
@on_ranks(2)
def test_wrong_samples_are_refused_alike_on_all_ranks() -> None:
    """Errors of each wrong sample of the last rank; then a step that is right."""
    model, balanced, samples, wanted = one_sample_each(
        "g1n2", lambda s: s.get("length", num_tokens(s)), limits=Limits(tokens=200)
    )
    rank, own = dist.get_rank(), samples[dist.get_rank()]

    def refuse(words: str, call: Callable[..., object], *args: Any) -> None:
        said = classes, text = raised_by(call, *args)
        assert words in text, (words, text)
        assert {"ConfigError", "PlanError"} & set(classes)
        assert said == by_one_rank(lambda: said)

    for words, spoil in WRONG.items():
        refuse(words, balanced.microbatches, [spoil(own) if rank else own], loss_of)
    two = own | ({"target": torch.cat([own["target"]] * 2)} if rank else {})
    refuse("'target': 2", lambda: balanced.microbatches(balanced.samples_of(**two), loss_of))
    model.zero_grad()
    scalar = balanced.microbatches([own], lambda out, batch: loss_of(out, batch).sum())
    refuse("loss_fn gave the shape () for 1 samples", train_step, model, scalar)
    train_step(model, balanced.microbatches([own], loss_of))
    balanced.handle.average_gradients()
    assert worst(model, wanted) <= 1.0


@pytest.mark.slow
@on_ranks(2)
def test_wrong_models_are_refused_on_all_ranks() -> None:
    """Errors of each wrong construction on the last rank, and of a second one."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    model = model_of("flux")
    sp, wide = parallel("g1n2"), parallel("g1n2", data_group=dist.group.WORLD)

    def expect(words: str, model: nn.Module, sp: SequenceParallel, **settings: Any) -> None:
        text = raised_by(BalancedModel, model, sp, length_fn=num_tokens, **settings)[1]
        assert words in text, text

    expect("no split table for Linear: write one", nn.Linear(2, 2) if is_last else model, sp)
    expect("max_tokens is 0; it must be", model, sp, max_tokens=0 if is_last else None)
    expect("give SequenceParallel all ranks", model, wide)
    BalancedModel(model, sp, length_fn=num_tokens)
    expect("is split over ranks already", model, sp)


def failing() -> str:
    """A model that fails on one rank alone ends the others."""
    model, balanced, samples, _ = one_sample_each("g2n1")
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
