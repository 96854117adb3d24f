"""Trainers of tiny models on random texts, and what they did."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from bascule import TransformerCost
from bascule.data.packs import collate_padded
from tests.helpers.jobs import join_trainer_world

BATCH_SIZE, VOCAB = 3, 32
COST = TransformerCost(32, num_layers=2)


class Texts(Dataset[dict[str, Any]]):
    """Random tokens, some of them prompts; with a column that no model takes."""

    def __init__(self, num_samples: int) -> None:
        self.random = np.random.default_rng(3)
        # Process 0 reads the long ones, also where accelerate deals out whole batches.
        long = [r % 2 == 0 and r // BATCH_SIZE % 2 == 0 for r in range(num_samples)]
        self.samples = [self.make(60 if is_long else 2) for is_long in long]

    def make(self, shortest: int, longest: int = 90) -> dict[str, Any]:
        length = self.random.integers(shortest, longest)
        ids = torch.from_numpy(self.random.integers(0, VOCAB, length))
        labels = ids.clone()
        labels[: len(ids) // 3] = -100
        return {"input_ids": ids, "labels": labels, "comment": {"not", "on", "the", "wire"}}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def num_asked(sample: dict[str, Any]) -> int:
    """Tokens that the loss of a sample is the mean over."""
    return int((sample["labels"][1:] != -100).sum())


@contextmanager
def shared_folder() -> Iterator[str]:
    """A folder of all processes of a Trainer's world, which they join here."""
    join_trainer_world()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    yield folder[0]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


class Scorer(nn.Module):
    """Knows no num_items_in_batch: its loss is the mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 1)

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor
    ) -> dict[str, Tensor]:
        scores = self.head(self.embed(input_ids)).squeeze(-1)
        mean = (scores * attention_mask).sum(-1) / attention_mask.sum(-1)
        return {"loss": (mean - labels.clamp(min=0).sum(-1) / 1000).square().mean()}


def make_model(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if kind == "scorer":
        return Scorer()
    name = {"qwen2": "Qwen2", "llama": "Llama", "qwen3_next": "Qwen3Next"}[kind]
    more: dict[str, Any] = {}
    if kind == "qwen3_next":
        more = dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8)
        more |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "mlp_only_layers": [0, 1]}
        more["layer_types"] = ["linear_attention", "full_attention"]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        **more,
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


def make_trainer(folder: str, kind: str, *, balanced: bool, base: Any = None, **given: Any) -> Any:
    """A Trainer, quiet, on the CPU.

    What is `given` goes to its TrainingArguments, but for `balance`, `model`, and `dataset` or
    `num_samples`.
    """
    from transformers import Trainer, TrainingArguments

    from bascule.transformers import BalanceConfig, BalancedTrainerMixin

    base = Trainer if base is None else base

    class MyTrainer(BalancedTrainerMixin, base): ...

    dataset = given.pop("dataset", None) or Texts(given.pop("num_samples", 48))
    balance = given.pop("balance", {"cost": COST})
    settings = {
        "per_device_train_batch_size": BATCH_SIZE,
        "num_train_epochs": 2,
        "train_sampling_strategy": "sequential",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "data_seed": 5,
    }
    model = given.pop("model", None) or make_model(kind)
    args = TrainingArguments(folder, **(settings | given))
    make: Any = MyTrainer if balanced else base
    extra: dict[str, Any] = {"balance": BalanceConfig(**balance)} if balanced else {}
    return make(
        model=model,
        args=args,
        train_dataset=dataset,
        eval_dataset=Texts(7),
        data_collator=collate_padded,
        **extra,
    )


def train(trainer: Any, **how: Any) -> tuple[list[float], list[float], Tensor]:
    """Loss and epoch of each step, and the weights after them."""
    trainer.train(**how)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return [entry["loss"] for entry in logged], [entry["epoch"] for entry in logged], weights
