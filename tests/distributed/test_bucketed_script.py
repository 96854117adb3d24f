"""A script of bucketed batches, as it is and as the guide changes it: gradients of one process."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.inference_cases import CHANNELS, TEXT_DIM, Case, make_model
from tests.helpers.pages import blocks_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.nightly

pytest.importorskip("diffusers")

F64 = torch.float64
GRIDS = [[(6, 7), (2, 3)], [(2, 3), (5, 5)]]  # of each rank's batches
BATCH_SIZE, NUM_TEXT = 3, 7
MOST_LINES = 13
Batch = tuple[Tensor, ...]


def changes() -> list[str]:
    """The lines of the guide's change, each with what becomes of it: " ", "+" or "-"."""
    (block,) = (
        block
        for block in blocks_of("docs/training_step.md")
        if "+" in block.text and "samples_of(" in block.text
    )
    return block.text.splitlines()


def scripts() -> tuple[str, str]:
    """As it is, and as it is changed."""
    before, after = (
        "\n".join(line[1:] for line in changes() if line[:1] in kinds) for kinds in (" -", " +")
    )
    return before, after


def test_the_change_is_of_few_lines() -> None:
    kinds = [line[:1] for line in changes()]
    assert set(kinds) == {" ", "+", "-"}
    assert kinds.count("+") + kinds.count("-") <= MOST_LINES


def batches_of(rank: int) -> list[Batch]:
    """What a bucketed loader gives: batches of one shape each."""
    draw = torch.Generator().manual_seed(rank)
    found: list[Batch] = []
    for rows, columns in GRIDS[rank]:
        shape = (BATCH_SIZE, rows * columns, CHANNELS)
        latents, noise = (torch.randn(shape, generator=draw, dtype=F64) for _ in range(2))
        times = torch.rand(BATCH_SIZE, 1, 1, generator=draw, dtype=F64)
        prompt = torch.randn(BATCH_SIZE, NUM_TEXT, TEXT_DIM, generator=draw, dtype=F64)
        pooled = torch.randn(BATCH_SIZE, TEXT_DIM, generator=draw, dtype=F64)
        img_ids = torch.zeros(rows, columns, 3, dtype=F64)
        img_ids[..., 1], img_ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
        text_ids = torch.zeros(NUM_TEXT, 3, dtype=F64)
        found.append((latents, noise, times, prompt, pooled, img_ids.flatten(0, 1), text_ids))
    return found


def flux() -> Any:
    torch.manual_seed(0)
    return make_model(Case("flux", 4, 1, NUM_TEXT, (2, 3)), F64)


class Gradients:
    """An optimizer that keeps the gradients of each step, and changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.kept = model, list[Tensor]()

    def step(self) -> None:
        self.kept.append(torch.cat([_grad(p).flatten() for p in self.model.parameters()]))

    def zero_grad(self) -> None:
        self.model.zero_grad()


def _grad(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def gradients_of(script: str) -> list[Tensor]:
    """Of each step of a script."""
    transformer = flux()
    optimizer = Gradients(transformer)
    names: dict[str, Any] = {
        "DistributedDataParallel": DistributedDataParallel,
        "transformer": transformer,
        "loader": batches_of(dist.get_rank()),
        "optimizer": optimizer,
    }
    exec(compile(script, "script", "exec"), names)
    return optimizer.kept


def alone() -> Iterator[Tensor]:
    """Of one process: the mean over the samples of both ranks."""
    model = flux()
    for batches in zip(*map(batches_of, range(2)), strict=True):
        model.zero_grad()
        for latents, noise, times, prompt, pooled, img_ids, txt_ids in batches:
            for i in range(BATCH_SIZE):
                one = slice(i, i + 1)
                noisy = (1 - times[one]) * latents[one] + times[one] * noise[one]
                pred = model(
                    hidden_states=noisy,
                    timestep=times[one].flatten(),
                    encoder_hidden_states=prompt[one],
                    pooled_projections=pooled[one],
                    img_ids=img_ids,
                    txt_ids=txt_ids,
                )[0]
                loss = (pred - noise[one] + latents[one]).square().mean()
                (loss / (2 * BATCH_SIZE)).backward()
        yield torch.cat([_grad(p).flatten() for p in model.parameters()])


def compared() -> dict[str, Sequence[float]]:
    """Of each step of both scripts, the error of the gradient over its norm."""
    wanted = list(alone())
    found: dict[str, Sequence[float]] = {}
    for name, script in zip(("before", "after"), scripts(), strict=True):
        pairs = zip(gradients_of(script), wanted, strict=True)
        found[name] = [float((ours - one).norm() / one.norm()) for ours, one in pairs]
    return found


def test_both_scripts_have_the_gradients_of_one_process() -> None:
    for found in run_ranks(compared, 2):
        assert max(*found["before"], *found["after"]) < 1e-10
        assert len(found["before"]) == len(found["after"]) == 2
