"""torchtitan's loader and its sum of losses: gradients with and without balancing."""

# pyright: reportMissingImports=false

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from tests.plugins.hosts import torchrun

pytest.importorskip("torchtitan", reason="torchtitan is not installed; see `make plugins`")

SEQ_LEN, ROWS, STEPS, VOCAB = 768, 2, 6, 32


class Rows(IterableDataset[Any]):
    """Rows of documents, as torchtitan packs them; those of rank 0 are long."""

    def __init__(self, rank: int) -> None:
        self.rank, self.done = rank, 0

    def __iter__(self) -> Any:
        for number in range(self.done, STEPS * ROWS):
            draw = torch.Generator().manual_seed(1000 * self.rank + number)
            ids = torch.randint(0, VOCAB, (SEQ_LEN + 1,), generator=draw)
            short = int(torch.randint(5, 40, (), generator=draw))
            size = SEQ_LEN if self.rank == 0 and number % 3 else short
            self.done = number + 1
            yield {"input": ids[:-1], "positions": torch.arange(SEQ_LEN) % size}, ids[1:]

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def main() -> None:
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss

    from bascule.plan.costs import TransformerCost
    from bascule.plugins.titan_loader import BalancedDataLoader

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    class Own(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config): ...

        def __init__(self, config: Any, *, dp_rank: int, dp_world_size: int, **how: Any) -> None:
            super().__init__(Rows(dp_rank), dp_rank, dp_world_size, batch_size=ROWS)

    ranks = {"dp_rank": rank, "dp_world_size": world}
    runtime: Any = ranks | {"seq_len": SEQ_LEN, "local_batch_size": ROWS, "tokenizer": None}
    torch.manual_seed(0)
    embed = torch.nn.Embedding(VOCAB, 16, dtype=torch.float64)
    head = torch.nn.Linear(16, VOCAB, dtype=torch.float64)
    weights: Any = [*embed.parameters(), *head.parameters()]
    loss_fn: Any = CrossEntropyLoss.Config().build()
    cost = TransformerCost(16, num_layers=1)

    def run(loader: Any) -> tuple[list[torch.Tensor], float, list[int]]:
        grads, seconds, tokens = list[torch.Tensor](), 0.0, list[int]()
        for inputs, labels in loader:
            positions = inputs["positions"]
            document = (positions == 0).cumsum(1)
            mask = (document[:, :, None] == document[:, None]).tril()
            x = embed(inputs["input"]) + torch.sin(positions.double() / 50)[..., None]
            x = torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)
            valid = (labels != -100).sum()
            dist.all_reduce(valid)
            # Sums of losses: fp32 in torchtitan, float64 here for a sharper comparison.
            loss, _ = loss_fn(head(x), labels, valid)
            for weight in weights:
                weight.grad = None
            loss.backward()
            grad = torch.cat([weight.grad.flatten() for weight in weights])
            dist.all_reduce(grad)
            grads.append(grad)
            lengths = torch.cat([torch.bincount(one)[1:] for one in document])
            work = torch.tensor(float(cost(lengths.numpy()).sum()))
            dist.all_reduce(work, dist.ReduceOp.MAX)
            seconds += float(work)
            tokens.append(labels.numel())
        return grads, seconds, tokens

    config: Any = BalancedDataLoader.Config(inner=Own.Config(), d_model=16, num_layers=1, room=1.5)
    expected, plain, _ = run(Own.Config().build(**runtime))
    ours, balanced, tokens = run(config.build(**runtime))
    assert len(ours) == len(expected) == STEPS
    for one, other in zip(ours, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert balanced < 0.85 * plain, (balanced, plain)
    assert max(tokens) <= 1.5 * SEQ_LEN * ROWS + 127 and all(n % 128 == 0 for n in tokens)
    first: Any = config.build(**runtime)
    batches = iter(first)
    for _ in range(2):
        next(batches)
    state = first.state_dict()
    rest = [labels for _, labels in batches]
    again: Any = config.build(**runtime)
    again.load_state_dict(state)
    more = [labels for _, labels in again]
    assert len(rest) == len(more) == STEPS - 2
    assert all(torch.equal(a, b) for a, b in zip(rest, more, strict=True))


def test_the_loader_balances(tmp_path: Path) -> None:
    torchrun("-m", "tests.plugins.test_torchtitan", folder=tmp_path)


if __name__ == "__main__":
    main()
