"""The two ways of training that the benchmark compares: unbalanced and balanced."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bascule.attention import PackedSequences, attend_packed
from bascule.comm.groups import RankGroup, device_of
from bascule.comm.mean import MeanOver, mean_and_scale
from bascule.models import Exchange, LocalExchange
from bascule.parallel import SequenceParallel
from bascule.train import train_step
from bascule.train.flow import FlowBatch

MakeExchange = Callable[[list[int]], Exchange]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one training step.

    Attributes:
        loss: Mean over the image tokens of all ranks.
        seconds: Forward and backward on this rank, planning and exchanges included.
        exchange: What the step used.
    """

    loss: float
    seconds: float
    exchange: Exchange


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """This rank's part of a microbatch.

    Attributes:
        flow: What it trains on.
        factor: Of the sum of its token losses, so that gradients averaged over ranks and summed
            over microbatches are those of the global mean.
    """

    flow: FlowBatch
    factor: float


class Arm:
    """A sharded model with its optimiser, and the exchange that its steps use."""

    def __init__(
        self, model: nn.Module, make_exchange: MakeExchange, group: RankGroup, lr: float
    ) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self._make_exchange = make_exchange
        self._group = group
        self._device = device_of(group)
        self._num_steps = 0

    def step(self, make_batch: Callable[[], FlowBatch]) -> StepResult:
        """Forward, backward and optimiser; gradients stay until the next step, for comparison.

        Args:
            make_batch: Gives what to train on; its seconds count.
        """
        self._num_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        device = self._device
        start = _now(device)
        batch = make_batch()
        exchange = self._make_exchange(batch.seq_lens)

        def loss_of(model: nn.Module) -> Tensor:
            losses = batch.per_token_loss(model(batch.inputs, exchange))
            over = MeanOver(self._group, self._group.size, self._num_steps)
            mean, scale = mean_and_scale(losses.detach(), None, over)
            own = (losses * scale).sum()
            return own + (mean - own).detach()

        loss = train_step(self.model, [loss_of])
        seconds = _now(device) - start
        self.optimizer.step()
        return StepResult(float(loss), seconds, exchange)

    def accumulate(
        self, microbatches: Sequence[Microbatch], finish: Callable[[], None]
    ) -> tuple[float, float]:
        """Forward and backward of all microbatches, then `finish`, then the optimiser.

        No collective but the model's own. Gradients stay until the next step.

        Returns:
            This rank's part of the loss, whose mean over ranks is the global mean; and the seconds
            of forward, backward and `finish`.
        """
        self.optimizer.zero_grad(set_to_none=True)
        device = microbatches[0].flow.target_iC.device
        start = _now(device)
        total = train_step(self.model, [partial(self._loss_of, micro) for micro in microbatches])
        _now(device)  # what `finish` waits for shall not be the device
        finish()
        seconds = _now(device) - start
        self.optimizer.step()
        return float(total), seconds

    def _loss_of(self, micro: Microbatch, model: nn.Module) -> Tensor:
        predicted = model(micro.flow.inputs, self._make_exchange(micro.flow.seq_lens))
        return micro.flow.per_token_loss(predicted).double().sum() * micro.factor


def unbalanced(device: torch.device, kernel: str | None = None) -> MakeExchange:
    """Every rank attends to its own samples; nothing moves."""

    def make(seq_lens: list[int]) -> Exchange:
        seqs = PackedSequences.build(seq_lens, device)

        def attend(q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
            return attend_packed(q, k, v, seqs, kernel=kernel)

        return LocalExchange(seq_lens, attend=attend, device=device)

    return make


def balanced(parallel: SequenceParallel) -> MakeExchange:
    """Plan each batch over all ranks."""
    return parallel.plan


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
