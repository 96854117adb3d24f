"""The Trainer of transformers beside tensor parallelism, with and without balancing.

On CPUs accelerate refuses any mesh, by the name of the device alone; that check is left out.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.helpers.ranks import on_ranks, raised_by
from tests.helpers.trainer_runs import make_model, make_trainer, shared_folder

pytest.importorskip("transformers")
ParallelismConfig = pytest.importorskip("accelerate").ParallelismConfig


@mock.patch.object(ParallelismConfig, "_validate_accelerator", lambda *_: None)
def run(folder: str, balanced: bool, tp_size: int, **given: Any) -> Any:
    """A Trainer whose model is split over pairs of processes, and sharded over the pairs."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    sizes = DistributedConfig(tp_size=tp_size, fsdp_size=dist.get_world_size() // tp_size)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/llama", distributed_config=sizes)
    return make_trainer(folder, "llama", balanced=balanced, model=model, **given)


def trained(trainer: Any) -> tuple[list[float], Tensor]:
    trainer.train()
    parameters = [p.detach() for p in trainer.model.parameters()]
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, torch.cat([p.flatten() for p in whole])


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.stress)])
@on_ranks(4)
def test_trains_like_the_trainer(accumulate: int) -> None:
    given = {"gradient_accumulation_steps": accumulate, "num_train_epochs": 1, "num_samples": 24}
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            make_model("llama").save_pretrained(f"{folder}/llama")
        dist.barrier()
        losses, weights = trained(run(folder, False, 2, **given))
        trainer = run(folder, True, 2, **given)
        ours, our_weights = trained(trainer)
        loader = trainer.balanced_loader
        alone = raised_by(run(folder, True, 4, **given).get_train_dataloader)[1]
    did = loader.metrics()
    assert len(losses) == 4 // accumulate
    assert ours == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(our_weights, weights, rtol=1e-5, atol=1e-6)
    assert did["applied"] > 0.7 * did["steps"] and loader.rules.sync == "microbatch"
    assert "one data axis" in alone
