"""NeMo AutoModel's own loader, built by its own configuration, trains alike with balancing."""

# pyright: reportMissingImports=false

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.plugins.hosts import torchrun

pytest.importorskip("nemo_automodel", reason="NeMo AutoModel is not installed; see `make plugins`")

NUM, BATCH_SIZE, ACCUMULATE = 48, 3, 2


def samples() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(0)
    lengths = [90 + 7 * n if n % 8 < 3 else 4 + n % 5 for n in range(NUM)]
    ids = [torch.randint(0, 32, (length,), generator=draw).tolist() for length in lengths]
    return [{"input_ids": one, "labels": one, "attention_mask": [1] * len(one)} for one in ids]


def gradients(model: Any, loader: Any) -> list[torch.Tensor]:
    """Of each step, as the recipe trains: sums of losses over all labels of all ranks."""
    grads, batches = list[torch.Tensor](), list(loader)
    for first in range(0, len(batches), ACCUMULATE):
        step = batches[first : first + ACCUMULATE]
        labels = torch.tensor(sum(int((batch["labels"] != -100).sum()) for batch in step))
        dist.all_reduce(labels)
        model.zero_grad()
        for batch in step:
            logits = model(batch["input_ids"])
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / labels * dist.get_world_size()).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return grads


def main() -> None:
    from nemo_automodel.cli.utils import resolve_recipe_name
    from nemo_automodel.components.config.loader import ConfigNode, _resolve_target
    from nemo_automodel.recipes.llm.train_ft import (
        TrainFinetuneRecipeForNextTokenPrediction as Theirs,
    )

    from bascule import BalancedSampler
    from bascule.machine.costs import TransformerCost

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    yaml = {
        "recipe": "bascule.plugins.nemo_recipe.BalancedFinetuneRecipe",
        "bascule": {"d_model": 16, "num_layers": 2},
        "dataset": {"_target_": "tests.plugins.test_nemo.samples"},
        "dataloader": {"shuffle": False},
        "step_scheduler": {"local_batch_size": BATCH_SIZE, "global_batch_size": 12},
    }
    recipe: Any = _resolve_target(resolve_recipe_name(yaml.pop("recipe")))(ConfigNode(yaml))
    Theirs.setup = lambda self: None  # the rest of it needs a GPU
    plain: Any = recipe.cfg.dataloader.build(dp_rank=rank, dp_world_size=world)
    recipe.setup()
    loader: Any = recipe.cfg.dataloader.build(dp_rank=rank, dp_world_size=world)
    assert isinstance(loader.batch_sampler, BalancedSampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)).double()
    )
    ours, theirs = gradients(model, loader), gradients(model, plain)
    assert len(ours) == len(theirs) == NUM // (BATCH_SIZE * ACCUMULATE * world)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-14)
    costs = TransformerCost(16, num_layers=2)

    def works(batches: Any) -> torch.Tensor:
        work = torch.tensor(
            [b["input_ids"].shape[0] * float(costs(b["input_ids"].shape[1])) for b in batches]
        )
        all_works = [torch.zeros_like(work) for _ in range(world)]
        dist.all_gather(all_works, work)
        return torch.stack(all_works).max(dim=0).values.sum()

    loader.batch_sampler.set_epoch(0)
    assert works(loader) < 0.85 * works(plain)
    later = iter(loader)
    state = (next(later), next(later), loader.state_dict())[-1]
    rest = [batch["input_ids"].shape for batch in later]
    again: Any = recipe.cfg.dataloader.build(dp_rank=rank, dp_world_size=world)
    again.load_state_dict(state)
    assert [batch["input_ids"].shape for batch in again] == rest


def test_the_recipe_balances(tmp_path: Path) -> None:
    torchrun("-m", "tests.plugins.test_nemo", folder=tmp_path)


if __name__ == "__main__":
    main()
