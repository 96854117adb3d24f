"""Train a packed diffusion transformer under FSDP2: balanced steps, a schedule, checkpoints.

    torchrun --standalone --nproc-per-node 2 examples/train_resumable.py --out runs/first

A loop to copy: put your data set and your model in place of the two classes below. Run it again to
go on from the newest checkpoint, on any number of ranks: losses are the same, as the samples of a
step, their noise and their timesteps do not depend on the ranks. SIGTERM and SIGUSR1 save and end.
"""

import argparse
import math
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, Sampler

from bascule import SequenceParallel, Step, TransformerCost, train_step
from bascule.train import sync_of

WIDTH, NUM_HEADS, NUM_BLOCKS, CHANNELS = 64, 4, 2, 16
NUM_SAMPLES, STEP_SAMPLES, ACCUMULATE = 64, 8, 2  # of an epoch, of a step over all ranks
LEARNING_RATE, WARMUP, MAX_NORM, EMA_DECAY = 3e-3, 3, 1.0, 0.99


class Sample(NamedTuple):
    """Tensors of a sample, or of a microbatch: its samples one after another."""

    lens: Tensor  # (samples,)
    tokens: Tensor  # (T, channels) noisy: (1 - time) clean + time noise
    pos: Tensor  # (T, 2)
    time: Tensor  # (T, 1)
    velocity: Tensor  # (T, channels) noise - clean, which the model predicts


class Waves(Dataset[Sample]):
    """Sequences of 32 to 512 tokens, each with its own noise and timestep."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> Sample:
        random = torch.Generator().manual_seed(number)  # not the rank's: another rank may load it
        length = int(2 ** (5 + 4 * torch.rand((), generator=random).item()))
        place = torch.arange(length)[:, None] / 50
        clean = (place + torch.arange(CHANNELS)).sin() * math.sqrt(2)
        noise = torch.randn(clean.shape, generator=random)
        time = torch.rand((), generator=random).expand(length, 1)
        pos = torch.cat([place.sin(), place.cos()], dim=1)
        tokens, velocity = (1 - time) * clean + time * noise, noise - clean
        return Sample(torch.tensor([length]), tokens, pos, time, velocity)


def pack(samples: list[Sample]) -> Sample:
    """Join samples without padding; a rank without samples gets tensors without rows."""
    widths = CHANNELS, 2, 1, CHANNELS
    none = Sample(torch.zeros(0, dtype=torch.int64), *(torch.zeros(0, width) for width in widths))
    return Sample(*map(torch.cat, zip(none, *samples, strict=True)))


class Microbatches(Sampler[list[int]]):
    """This rank's samples of each microbatch, from a step on."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def __len__(self) -> int:
        return (self.last - self.first) * ACCUMULATE

    def __iter__(self) -> Iterator[list[int]]:
        size = STEP_SAMPLES // ACCUMULATE
        for number in range(self.first * ACCUMULATE, self.last * ACCUMULATE):
            epoch, place = divmod(number * size, NUM_SAMPLES)
            order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
            whole = order[place : place + size].tolist()  # of all ranks
            yield whole[dist.get_rank() :: dist.get_world_size()]


class Block(nn.Module):
    """Attention and MLP, modulated by the time of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, vec: Tensor, step: Step) -> Tensor:
        scale, shift = self.modulation(vec).chunk(2, dim=-1)
        qkv = self.qkv(self.norm1(x) * (1 + scale) + shift)
        q, k, v = qkv.unflatten(-1, (3, NUM_HEADS, -1)).unbind(1)
        x = x + self.out(step.attend(q, k, v).flatten(1))  # within each sequence
        return x + self.mlp(self.norm2(x))


class DiT(nn.Module):
    """Predicts the velocity of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.token_in, self.pos_in = nn.Linear(CHANNELS, WIDTH), nn.Linear(2, WIDTH)
        self.time_in = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(self, batch: Sample, step: Step) -> Tensor:
        x = self.token_in(batch.tokens) + self.pos_in(batch.pos)
        moved = step.route(x=x, vec=self.time_in(batch.time))  # to the ranks that compute them
        x, vec = moved["x"], moved["vec"]
        for block in self.blocks:
            x = block(x, vec, step)
        return step.restore(self.head(x))  # back to the rank and the order that they came from


class Run:
    """A model with all that a checkpoint holds."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.folder, self.done = args.out, 0  # steps
        self.dtype = getattr(torch, args.dtype)
        self.device, self.mesh = device, init_device_mesh(device.type, (dist.get_world_size(),))
        torch.manual_seed(0)  # the same weights on every rank
        self.model = DiT().to(device, self.dtype)
        for block in self.model.blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.schedule = LambdaLR(self.optimizer, partial(learning_rate, last=args.steps))
        self.ema = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        topology = args.topology or f"g1n{dist.get_world_size()}"
        self.sp = SequenceParallel(
            self.mesh, topology, TransformerCost(WIDTH, num_layers=NUM_BLOCKS)
        )

    def train(self, batches: list[Sample]) -> float:
        """Take an optimizer step on its microbatches; return the mean loss of all tokens."""
        lens = [batch.lens.tolist() for batch in batches]
        batches = [self._on_device(batch) for batch in batches]
        steps = self.sp.plan_step(lens, sync=sync_of(self.model))  # one small gather
        num_tokens = [int(step.plan.seq_lens.sum()) for step in steps]  # of all ranks
        shares = [num / sum(num_tokens) for num in num_tokens]
        losses: list[Callable[[nn.Module], Tensor]] = [
            partial(loss_of, *parts) for parts in zip(batches, steps, shares, strict=True)
        ]
        loss = train_step(self.model, losses, where=f"step {self.done + 1}")
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.ema[name].lerp_(parameter, 1 - EMA_DECAY)
        self.done += 1
        return loss.item()

    def _on_device(self, batch: Sample) -> Sample:
        """Return a microbatch on the device."""
        lens, *tensors = batch
        return Sample(lens, *(x.to(self.device, self.dtype) for x in tensors))

    def state(self) -> dict[str, Any]:
        """Return the state, sharded over the ranks."""
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        both = {"model": weights, "optimizer": optimizer}
        return both | {"ema": self.ema, "schedule": self.schedule.state_dict(), "done": self.done}

    def save(self) -> None:
        """Save a checkpoint; a rename makes it whole, so a kill leaves the one before."""
        whole = self.folder / f"step-{self.done:06d}"
        state_dict_saver.save(self.state(), checkpoint_id=whole.with_suffix(".tmp"))
        if dist.get_rank() == 0:
            whole.with_suffix(".tmp").rename(whole)
        dist.barrier()

    def resume(self) -> None:
        """Load the newest whole checkpoint, if there is one."""
        newest = max(self.folder.glob("step-??????"), default=None)
        if newest is None:
            return
        state = self.state()
        state_dict_loader.load(state, checkpoint_id=newest)
        weights, optimizer = state["model"], state["optimizer"]
        both = {"model_state_dict": weights, "optim_state_dict": optimizer}
        set_state_dict(self.model, self.optimizer, **both)
        self.schedule.load_state_dict(state["schedule"])
        self.done = state["done"]


def learning_rate(step: int, last: int) -> float:
    """Return the factor of the learning rate: a warm-up, then half a cosine."""
    return min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / last))


def loss_of(batch: Sample, step: Step, share: float, model: nn.Module) -> Tensor:
    """Return a microbatch's share of the mean over all tokens of the step."""
    error = model(batch, step) - batch.velocity
    return step.mean(error.square().mean(-1)) * share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/resumable"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--topology", help="bags of ranks, such as g2n1; one rank each by default")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    asked = torch.zeros(1)  # whether this rank got a signal
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: asked.fill_(1))
    try:
        run = Run(args, device)
        run.resume()
        sampler = Microbatches(run.done, args.steps)
        batches = iter(DataLoader(Waves(), batch_sampler=sampler, collate_fn=pack))
        while run.done < args.steps:
            loss = run.train([next(batches) for _ in range(ACCUMULATE)])
            if dist.get_rank() == 0:
                print(f"step {run.done}: loss {loss:.12g}", flush=True)
            dist.all_reduce(is_last := asked.clone())  # all ranks stop after the same step
            if is_last or run.done == args.steps or run.done % args.save_every == 0:
                run.save()
            if is_last:
                break
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # else a second one kills a rank that ends
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
