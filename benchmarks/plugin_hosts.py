"""One rank of a trainer: `python -m plugin_hosts HOST plain|balanced EPOCHS`, under torchrun.

The same 64 texts of 16 to 1,024 tokens, or images of as many, in steps of two ranks with four each.
The first of the epochs is not measured.
"""

# pyright: reportMissingImports=false

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import bascule
from bascule import BalancedSampler, TransformerCost
from bascule.data import SamplerOptions, collate_padded

NUM, BATCH_SIZE, VOCAB, WIDTH, LAYERS = 64, 4, 64, 128, 2
LENGTHS = np.random.default_rng(0).lognormal(5.0, 1.1, NUM).clip(16, 1024).astype(int).tolist()
COST = TransformerCost(WIDTH, num_layers=LAYERS)
PADDED = SamplerOptions(padded=True, even_counts=False)
Batch = dict[str, Tensor]


def texts(times: int = 1) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, VOCAB, (times * length,), generator=draw) for length in LENGTHS]
    return [{"input_ids": one, "labels": one} for one in ids]


def lists() -> list[dict[str, list[int]]]:
    """As NeMo takes them."""
    made = [{name: value.tolist() for name, value in one.items()} for one in texts()]
    return [one | {"attention_mask": [1] * len(one["labels"])} for one in made]


def qwen2(attention: str = "sdpa") -> Any:
    from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

    AttentionInterface.register("by_document", by_document)

    torch.manual_seed(0)
    how: Any = {"attn_implementation": attention}
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        **how,
    )
    return Qwen2ForCausalLM(config)


def by_document(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, position_ids: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention within each document of a row, as flex and varlen attention on a GPU."""
    cuts = (position_ids[0].diff() != 1).nonzero().flatten() + 1
    parts = zip(*(x.tensor_split(cuts.tolist(), dim=2) for x in (q, k, v)), strict=True)
    attended = [scaled_dot_product_attention(*part, is_causal=True) for part in parts]
    return torch.cat(attended, dim=2).transpose(1, 2), None


def timed(
    epochs: int, batches_of: Callable[[int], Iterable[Any]], model: Any = None, sync: int = 1
) -> float:
    """Train a model with DDP on what a loader gives; seconds of all epochs but the first."""
    model = DistributedDataParallel(qwen2() if model is None else model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = 0.0
    for epoch in range(epochs + 1):
        if epoch == 1:
            dist.barrier()
            start = time.perf_counter()
        for batch in batches_of(epoch):
            batch = {k: v for k, v in batch.items() if isinstance(v, Tensor)}
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    return time.perf_counter() - start


def transformers(epochs: int, balanced: bool) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from bascule.plugins.hf_trainer import BalanceCallback

    class Clock(TrainerCallback):
        times: tuple[float, ...] = ()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.times = (*self.times, time.perf_counter())

    args = TrainingArguments(
        ".",
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=epochs + 1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    clock: Any = Clock()
    callbacks = [clock, *([BalanceCallback()] if balanced else [])]
    data: Any = texts()
    Trainer(
        qwen2(), args, train_dataset=data, data_collator=collate_padded, callbacks=callbacks
    ).train()
    return clock.times[-1] - clock.times[0]


def lightning(epochs: int, balanced: bool) -> float:
    import lightning as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.times = qwen2(), list[float]()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.net(**batch).loss

        def on_train_epoch_end(self) -> None:
            self.times.append(time.perf_counter())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        use_distributed_sampler=not balanced,
        max_epochs=epochs + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data, how = texts(), dict[str, Any](batch_size=BATCH_SIZE, shuffle=True)
    if balanced:
        place: Any = {"num_ranks": 2, "rank": trainer.global_rank}
        sampler = BalancedSampler(LENGTHS, COST, batch_size=BATCH_SIZE, options=PADDED, **place)
        how = {"batch_sampler": sampler}
    model = Model()
    loader: Any = torch.utils.data.DataLoader(data, collate_fn=collate_padded, **how)  # pyright: ignore
    trainer.fit(model, loader)
    return model.times[-1] - model.times[0]


def nemo(epochs: int, balanced: bool) -> float:
    from nemo_automodel.components.datasets.loader import DataloaderConfig, make_dataset_config

    from bascule.plugins.nemo_recipe import BalancedDataloaderConfig

    made: Any = {"dataset_config": make_dataset_config(lists), "batch_size": BATCH_SIZE}
    config = DataloaderConfig(**made)
    if balanced:
        size = 2 * BATCH_SIZE
        config = BalancedDataloaderConfig(**made, cost=COST, global_batch_size=size)
    loader: Any = config.build(dp_rank=dist.get_rank(), dp_world_size=2)
    return timed(epochs, lambda _: loader)


def torchtitan(epochs: int, balanced: bool, times: int = 1) -> float:
    """Rows of 1,024 tokens, or with texts so many times as long."""
    from dataclasses import dataclass

    from torchtitan.components.dataloader import BaseDataLoader

    from bascule.plugins.titan_loader import BalancedDataLoader

    class Rows(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config): ...

        def __init__(self, config: Any, *, dp_rank: int, **_: Any) -> None:
            self.rows = rows_of(times)[dp_rank::2] * (epochs + 1)  # as torchtitan's: one iteration

        def __iter__(self) -> Any:
            return iter(self.rows)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    runtime = {"dp_rank": dist.get_rank(), "dp_world_size": 2}
    runtime |= {"seq_len": 1024 * times, "local_batch_size": 1}
    config: Any = Rows.Config()
    if balanced:
        config = BalancedDataLoader.Config(inner=config, d_model=WIDTH, num_layers=LAYERS, room=1.5)
    loader: Any = config.build(**runtime)
    batches, num_steps = map(packed, loader), len(rows_of(times)) // 2
    return timed(epochs, lambda _: islice(batches, num_steps), qwen2("by_document"))


def torchtitan_long(epochs: int, balanced: bool) -> float:
    """Rows of 4,096 tokens."""
    return torchtitan(epochs, balanced, 4)


def rows_of(times: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Rows of documents in their order, as torchtitan packs them."""
    tokens, data = 1024 * times, texts(times)
    fields = [(one["input_ids"], torch.arange(len(one["labels"]))) for one in data]
    ids, places = (torch.cat(parts) for parts in zip(*fields, strict=True))
    num = len(ids) // (2 * tokens) * 2
    cuts = zip(ids.split(tokens)[:num], places.split(tokens)[:num], strict=True)
    return [({"input": row, "positions": place}, row) for row, place in cuts]


def packed(item: tuple[dict[str, Tensor], Tensor]) -> Batch:
    """Attention over documents, by their positions."""
    fields = {name: value.reshape(1, -1) for name, value in item[0].items()}
    labels = item[1].reshape(1, -1)
    return {"input_ids": fields["input"], "position_ids": fields["positions"], "labels": labels}


def megatron(epochs: int, balanced: bool) -> float:
    from bascule.plugins.megatron_packing import BalancedPackingScheduler

    pairs, data = list(enumerate(LENGTHS)), texts()
    order: list[list[int]] = [[]]
    for number, length in pairs:  # as Megatron's "dp_balanced" fills packs
        if sum(LENGTHS[one] for one in order[-1]) + length > 2048:
            order.append([])
        order[-1].append(number)
    if len(order) % 2:
        order.append([order[-1].pop()])
    packs = [order[first : first + 2] for first in range(0, len(order), 2)]
    if balanced:
        packs = BalancedPackingScheduler(2048, 1, 2, None, COST).get_groups_and_subsamples(pairs)

    def batches(_: int) -> Any:
        for group in packs:
            own = [data[one] for one in group[dist.get_rank()]]
            ids = torch.cat([one["input_ids"] for one in own])
            places = torch.cat([torch.arange(len(one["input_ids"])) for one in own])
            yield packed(({"input": ids, "positions": places}, ids))

    return timed(epochs, batches, qwen2("by_document"))


def buckets(epochs: int, balanced: bool) -> float:
    from accelerate import Accelerator
    from torch.utils.data import BatchSampler

    from bascule.plugins.buckets import BalancedBuckets

    shapes = [(8, 8), (16, 16), (16, 32), (32, 32)]
    counts = [NUM // 4] * 4
    indices = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    tokens = [h * w for (h, w), count in zip(shapes, counts, strict=True) for _ in range(count)]
    data: Any = [torch.full((size,), size % VOCAB) for size in tokens]
    random = np.random.default_rng(0)

    class Theirs(BatchSampler):
        batch_size, drop_last = BATCH_SIZE, True
        dataset = SimpleNamespace(buckets=shapes)

        def __init__(self) -> None:
            self.bucket_indices = [one.tolist() for one in indices]

        def __len__(self) -> int:
            return sum(len(one) // BATCH_SIZE for one in self.bucket_indices)

        def __iter__(self) -> Any:
            cut = [random.permutation(one).reshape(-1, BATCH_SIZE) for one in self.bucket_indices]
            return iter(random.permutation(np.concatenate(cut)).tolist())

    accelerator = Accelerator(cpu=True)
    sampler: Any = Theirs()
    if balanced:
        sampler = BalancedBuckets(sampler, 2, dist.get_rank())
    loader: Any = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    if not balanced:
        loader = accelerator.prepare(loader)
    return timed(epochs, lambda _: ({"input_ids": one, "labels": one} for one in loader))


def swift(epochs: int, balanced: bool) -> float:
    from swift import sft_main

    from tests.plugins.hosts import chats, tiny_qwen2

    folder, ready = Path("swift"), Path("ready")
    if os.environ["RANK"] == "0":
        folder.mkdir()
        tiny_qwen2(folder, WIDTH, LAYERS)
        chats(folder / "chats.jsonl", LENGTHS)
        ready.touch()
    while not ready.exists():
        time.sleep(0.1)
    words = (
        "--tuner_type full --torch_dtype float32 --attn_impl sdpa --template qwen2_5 "
        "--model_type qwen2 --logging_steps 1 --save_strategy no --split_dataset_ratio 0 "
        "--report_to none --use_hf true --gradient_checkpointing false --dataset_num_proc 1 "
        "--dataloader_num_workers 0 --output_dir out --add_version false --eval_strategy no"
    ).split()
    words += ["--model", str(folder), "--dataset", str(folder / "chats.jsonl")]
    words += ["--num_train_epochs", str(epochs), "--per_device_train_batch_size", str(BATCH_SIZE)]
    if balanced:
        plugin = Path(bascule.__file__ or "").parent / "plugins/ms_swift.py"
        words += ["--external_plugins", str(plugin)]
    start = time.perf_counter()
    sft_main(words)
    logs = [json.loads(one) for one in Path("out/logging.jsonl").read_text().splitlines()]
    found = [one["train_runtime"] for one in logs if "train_runtime" in one]
    return found[-1] if found else time.perf_counter() - start


def main() -> None:
    host, way, epochs = sys.argv[1:]
    if host != "swift":  # which makes its own: a second one would meet the keys of the first
        dist.init_process_group("gloo")
    seconds = globals()[host](int(epochs), way == "balanced")
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path("seconds.json").write_text(json.dumps(seconds))
    if dist.is_initialized():  # by a trainer that leaves the group: gloo aborts a rank that ends so
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
