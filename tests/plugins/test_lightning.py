"""Lightning trains alike on balanced batches: its sampler is switched off, ours deals to ranks."""

# pyright: reportMissingImports=false

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plugins.hosts import torchrun

pytest.importorskip("lightning", reason="Lightning is not installed; see `make plugins`")

NUM, BATCH_SIZE = 48, 3


def main(folder: Path) -> None:
    import lightning

    from bascule import BalancedLoader, BalancedSampler, LoaderOptions, TransformerCost
    from bascule.data import Batch, ResumableSampler, SamplerOptions, collate_padded

    draw = torch.Generator().manual_seed(0)
    lengths = [90 + 7 * n if n % 8 < 3 else 4 + n % 5 for n in range(NUM)]
    samples: Any = [{"input_ids": torch.randint(0, 32, (n,), generator=draw)} for n in lengths]
    cost = TransformerCost(16)

    class Model(lightning.LightningModule):
        def __init__(self, loader: Any) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.loader, self.grads = loader, list[torch.Tensor]()
            self.net = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 1))
            self.double()

        def train_dataloader(self) -> Any:
            return self.loader

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            data = batch.data if isinstance(batch, Batch) else batch
            data = super().transfer_batch_to_device(data, device, dataloader_idx)
            return replace(batch, data=data) if isinstance(batch, Batch) else data

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            scale = 1.0
            if isinstance(batch, Batch):
                batch, scale = batch.data, batch.loss_scale
            elif isinstance(self.loader.batch_sampler, BalancedSampler):
                scale = self.loader.batch_sampler.loss_scale(number)
            scores, mask = self.net(batch["input_ids"]).squeeze(-1), batch["attention_mask"]
            return ((scores * mask).sum(1) / mask.sum(1)).square().mean() * scale

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.grads.append(torch.cat([p.grad.flatten() for p in self.parameters()]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def run(make_loader: Any) -> torch.Tensor:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            use_distributed_sampler=False,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        model = Model(make_loader(trainer.global_rank))
        trainer.fit(model)
        return torch.stack(model.grads)

    def loader(**how: Any) -> Any:
        return torch.utils.data.DataLoader(samples, collate_fn=collate_padded, **how)

    def dealt(rank: int) -> Any:
        options = SamplerOptions(padded=True, even_counts=False, shuffle=False)
        place: Any = {"num_ranks": 2, "rank": rank}
        sampler = BalancedSampler(lengths, cost, batch_size=BATCH_SIZE, options=options, **place)
        return loader(batch_sampler=sampler)

    def moved(rank: int) -> Any:
        sampler = ResumableSampler(NUM, rank=rank, num_ranks=2, shuffle=False)
        local = loader(batch_size=BATCH_SIZE, sampler=sampler)
        return BalancedLoader(local, cost=cost, options=LoaderOptions())

    def plain(rank: int) -> Any:
        own = [i for i in range(NUM) if i // BATCH_SIZE % 2 == rank]
        return loader(batch_size=BATCH_SIZE, sampler=own)

    expected, by_index = run(plain), run(dealt)
    torch.distributed.barrier()
    by_moves = run(moved)
    assert len(expected) == len(by_index) == len(by_moves) == 2 * NUM // (2 * BATCH_SIZE)
    error = max(float((one - expected).abs().max()) for one in (by_index, by_moves))
    if torch.distributed.get_rank() == 0:
        (folder / "error.json").write_text(json.dumps([error, float(expected.abs().max())]))


def test_lightning_trains_alike(tmp_path: Path) -> None:
    torchrun("-m", "tests.plugins.test_lightning", folder=tmp_path)
    error, largest = json.loads((tmp_path / "error.json").read_text())
    assert error < 1e-10 * largest


if __name__ == "__main__":
    main(Path.cwd())
