"""torchtitan's loader and its sum of losses: gradients with and without balancing."""

# pyright: reportMissingImports=false

import logging
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from tests.plugins.hosts import torchrun

pytest.importorskip("torchtitan", reason="torchtitan is not installed; see `make plugins`")

SEQ_LEN, ROWS, STEPS, VOCAB = 768, 2, 6, 32


# Documents of each rank's row, and those of both after dealing, None where they stay. By hand: a
# document of L tokens costs 6,144 L + 32 L^2 with width 16, one layer and causal attention.
DEALT: tuple[tuple[tuple[list[int], list[int]], list[int] | None], ...] = (
    # 2 x 146.8 M and 32 x 1.3 M: each gets 167.8 M
    (([2048] * 2, [128] * 32), [*[128] * 16, 2048]),
    # 29.4 M and 21.0 M: each gets 25.2 M, which are 14.3 % less, above 0.02 + 127 / 2048
    (([256] * 8, [128] * 16), [*[128] * 8, *[256] * 4]),
    # the same, of half as many documents: below 0.02 + 127 / 1024
    (([256] * 4, [128] * 8), None),
    # alike: nothing to gain, and no padding
    (([500, 500], [500, 500]), None),
)


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


class OneRow(IterableDataset[Any]):
    def __init__(self, rank: int, lengths: list[int]) -> None:
        ids = torch.randperm(sum(lengths)) + 10_000 * rank
        positions = torch.cat([torch.arange(length) for length in lengths])
        self.row = {"input": ids, "positions": positions}, ids + 1

    def __iter__(self) -> Any:
        return iter([self.row])


def check_deals(rank: int, config_of: Any) -> None:
    """Check which documents move, that nothing is lost, and that the log says what stays."""
    log = StringIO()
    logging.basicConfig(level=logging.INFO, stream=log, force=True)
    for lengths, expected in DEALT:
        data, num_tokens = OneRow(rank, lengths[rank]), sum(lengths[0])
        runtime = {"dp_rank": rank, "dp_world_size": 2, "local_batch_size": 1}
        ((fields, labels),) = config_of(data).build(**runtime, seq_len=num_tokens)
        starts = torch.nonzero(fields["positions"][0] == 0).flatten()
        sizes = torch.diff(starts, append=torch.tensor([num_tokens])).tolist()
        assert labels.shape == (1, num_tokens) and torch.equal(labels, fields["input"] + 1)
        if expected is None:
            assert all(torch.equal(fields[name][0], one) for name, one in data.row[0].items())
        assert sorted(sizes) == (sorted(lengths[rank]) if expected is None else expected), sizes
        parts = [torch.empty_like(labels) for _ in range(2)]
        dist.all_gather(parts, labels)
        every = torch.cat(parts).flatten().sort().values
        one = torch.arange(num_tokens) + 1
        assert torch.equal(every, torch.cat([one, one + 10_000]))
    said = [line for line in log.getvalue().splitlines() if "leaves the rows" in line]
    assert len(said) == (rank == 0) * sum(expected is None for _, expected in DEALT), said


def main() -> None:
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss

    from bascule.machine.costs import TransformerCost
    from bascule.plugins.titan_loader import BalancedDataLoader

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    class Own(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config): ...

        def __init__(self, config: Any, *, dp_rank: int, dp_world_size: int, **how: Any) -> None:
            super().__init__(Rows(dp_rank), dp_rank, dp_world_size, batch_size=ROWS)

    class Given(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):
            data: Any = None

        def __init__(self, config: Any, *, dp_rank: int, dp_world_size: int, **how: Any) -> None:
            super().__init__(config.data, dp_rank, dp_world_size, batch_size=1)

    def config_of(data: Any) -> Any:
        return BalancedDataLoader.Config(inner=Given.Config(data=data), d_model=16, num_layers=1)

    check_deals(rank, config_of)
    ranks = {"dp_rank": rank, "dp_world_size": world}
    runtime: Any = ranks | {"seq_len": SEQ_LEN, "local_batch_size": ROWS, "tokenizer": None}
    torch.manual_seed(0)
    embed = torch.nn.Embedding(VOCAB, 16, dtype=torch.float64)
    head = torch.nn.Linear(16, VOCAB, dtype=torch.float64)
    weights: Any = [*embed.parameters(), *head.parameters()]
    loss_fn: Any = CrossEntropyLoss.Config().build()
    cost = TransformerCost(16, gamma=0.5, num_layers=1)

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


def test_a_document_cut_at_the_start_of_a_row() -> None:
    from bascule.plugins.titan_loader import documents, row

    ids, positions = torch.arange(5), torch.tensor([7, 8, 0, 1, 2])
    cut = documents(({"input": ids, "positions": positions}, ids + 1))
    assert [one["input"].tolist() for one in cut] == [[0, 1], [2, 3, 4]]
    fields, labels = row(4, cut[::-1])  # 5 tokens, where 4 were loaded: padded to 128
    assert fields["input"].tolist() == [[2, 3, 4, 0, 1, *[0] * 123]]
    assert fields["positions"].tolist() == [[0, 1, 2, 0, 1, *range(123)]]
    assert labels.tolist() == [[3, 4, 5, 1, 2, *[-100] * 123]]


def test_the_loader_balances(tmp_path: Path) -> None:
    torchrun("-m", "tests.plugins.test_torchtitan", folder=tmp_path)


if __name__ == "__main__":
    main()
