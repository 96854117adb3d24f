"""Every class of diffusers with a split table, trained in balance: gradients of one process.

Those that people train now also in DDP and FSDP2. Float64 throughout.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bascule.comm.items import leaves_of
from bascule.diffusers import BalancedModel
from bascule.diffusers.tables import TABLES, table_of
from bascule.machine.costs import TransformerCost
from bascule.parallel import SequenceParallel
from bascule.train import train_step
from tests.helpers.inference_cases import (
    CASES,
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
from tests.helpers.ranks import by_one_rank, raised_by, run_ranks
from tests.helpers.split_models import PLAN

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

F64 = torch.float64
# As many tokens in another aspect ratio, and one shape so often that a rank has two of it.
GRIDS = [(3, 5), (5, 3), (3, 5), (3, 5), (3, 3)]
NUM_FORMS = 3
# Options whose inputs or weights are of one grid.
OF_ONE_GRID = {"layers", "learned"}
ONE_AT_A_TIME = {"skyreels", "frame_times", "fps"}  # diffusers 0.42 fails for more samples
REFUSED = {  # options, and what is said of their inputs
    "controlnet": "of tensors whose batch dim is unknown: give tensors (1, ..), or",
    "last image": "'encoder_hidden_states_image' has the shape (2, 3, 16): give the model's shape",
}
TRAINED_NOW = ("minimax", "ltx2", "hunyuan1.5", "flux2", "z_image", "sd3")
OTHER_KINDS = ("hidream", "mochi", "cosmos3", "flux_controlnet")
PLAIN = [("plain", "g1n2"), ("plain", "g2n1")]
IN_WRAPPERS = [("ddp", "g1n2"), ("fsdp2", "g2n1")]
PART = 5  # of cases, which share a world; the daily ones fill parts

ALL = [case for case in CASES if PLAN not in case.options and "by plan" not in case.model]
FIRST = {case.model: case for case in reversed(ALL)}
DAILY = [FIRST[name] for name in (*TRAINED_NOW, *OTHER_KINDS)]
ORDERED = [*DAILY, *(case for case in ALL if case not in DAILY)]


def model_of(case: Case) -> Any:
    torch.manual_seed(0)
    return make_model(case, F64)


def samples_of(case: Case, model: nn.Module) -> list[Inputs]:
    """What the model takes for a batch of one, with its tokens and a number for the loss."""
    grids = [case.grid] * len(GRIDS) if OF_ONE_GRID & set(case.options) else GRIDS
    every: list[Inputs] = []
    for seed, grid in enumerate(grids):
        one = replace(case, batch=1, grid=grid)
        sample, first = make_inputs(one, F64, seed), make_inputs(one, F64, 0)
        if case.model != "cosmos3":  # which has no batch, so that every sample is of its own form
            sample |= {name: first[name] for name in table_of(model).unbatched if name in first}
        if case.model == "hunyuan1.5" and seed == 2:  # a text alone, among those with an image
            sample["image_embeds"].zero_()
        sample["tokens"] = case.text + grid[0] * grid[1]
        sample["factor"] = torch.tensor([1.0 + seed], dtype=F64)
        every.append(sample)
    return every


def losses_of(output: Any, batch: Inputs) -> Tensor:
    """In which no value of any output weighs as another, (samples, values)."""
    factor = batch["factor"]
    if "cap_feats" in batch:  # Z-Image lists its samples
        output = torch.stack(output)
    rows = torch.cat([x.reshape(len(factor), -1) for x in leaves_of(output)], dim=1)
    weights = torch.linspace(-1, 1, rows.shape[1], dtype=F64)
    return rows * weights * factor[:, None] + rows.square()


def alone(case: Case) -> Gradients:
    """Gradients of one process that takes the samples one by one."""
    model = model_of(case)
    samples = samples_of(case, model)
    for sample in samples:
        inputs = {name: x for name, x in sample.items() if name not in ("tokens", "factor")}
        output = model(**inputs, return_dict=False)
        losses = losses_of(output[0] if len(output) == 1 else output, sample)
        (losses.mean() / len(samples)).backward()
    return grads_of(model)


def check_trained(case: Case, topology: str, kind: str, wanted: Gradients) -> None:
    """Compare gradients with those of one process, or what is refused; count forward passes."""
    model = model_of(case)
    samples = samples_of(case, model)
    # The first rank loads one sample, the last all others.
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    mine = samples[:1] if rank == 0 else samples[1:] if rank == last else []
    sp = SequenceParallel(None, topology, TransformerCost(64), timeout_s=100.0)
    outer = wrapped(kind, model)
    most = 1 if ONE_AT_A_TIME <= {case.model, *case.options} else None
    balanced = BalancedModel(outer, sp, length_fn=lambda one: one["tokens"], max_tokens=most)
    words = [text for option, text in REFUSED.items() if option in case.options]
    if words:
        classes, text = raised_by(balanced.microbatches, mine, losses_of)
        assert "ConfigError" in classes and words[0] in text, text
        return
    passes = balanced.microbatches(mine, losses_of)
    train_step(outer, passes)
    if kind == "plain":
        balanced.handle.average_gradients()
    assert (error := worst(model, wanted)) <= 1.0, error
    if case == FIRST["z_image"] and topology == "g2n1":
        assert len(passes) == NUM_FORMS  # its lists of latents share a forward pass


def train_all(cases: Sequence[Case], ways: Sequence[tuple[str, str]] | None = None) -> Any:
    """Return by case what is wrong in each way."""
    found = {case: dict[str, str]() for case in cases}
    with in_float64(F64):
        for case in cases:
            wanted = by_one_rank(alone, case)
            usual = (
                IN_WRAPPERS if case == FIRST[case.model] and case.model in TRAINED_NOW else PLAIN
            )
            for kind, topology in ways or usual:
                try:
                    check_trained(case, topology, kind, wanted)
                except AssertionError as error:
                    found[case][f"{kind} {topology}"] = repr(error)
    return found


@cache
def results(part: int) -> list[dict[Case, dict[str, str]]]:
    """By rank, of a part of the cases; all of it shares a world."""
    return run_ranks(train_all, 2, ORDERED[PART * part : PART * (part + 1)])


@pytest.mark.parametrize(
    ("case", "part"),
    [
        pytest.param(
            case, place // PART, id=str(case), marks=[] if case in DAILY else pytest.mark.stress
        )
        for place, case in enumerate(ORDERED)
    ],
)
def test_gradients_are_those_of_one_process(case: Case, part: int) -> None:
    for found in results(part):
        assert not found[case], found[case]


@pytest.mark.stress
@pytest.mark.parametrize(
    ("num_ranks", "topology"),
    [
        *[(2, "g1n2"), (2, "g2n1")],
        *[(4, "g1n4"), (4, "g1n2+g2n1"), (4, "g1r2n1+g2n1"), (4, "g4n1")],
    ],
)
def test_all_wrappers(num_ranks: int, topology: str) -> None:
    fewer_heads = replace(FIRST["z_image"], heads=3)  # than the ranks of the largest bag
    cases = [*(FIRST[name] for name in TRAINED_NOW), fewer_heads]
    ways = [(kind, topology) for kind in ("plain", "ddp", "fsdp2")]
    for found in run_ranks(train_all, num_ranks, cases, ways):
        assert not any(found.values()), found


def test_every_table_has_a_case() -> None:
    trained_ones = {type(make_model(case)).__name__ for case in FIRST.values()}
    assert trained_ones == set(TABLES)
