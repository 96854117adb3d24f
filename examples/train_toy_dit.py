"""Train a small packed diffusion transformer on random samples of very different lengths.

    torchrun --standalone --nproc-per-node 2 examples/train_toy_dit.py [TOPOLOGY]

On GPUs, or on CPU cores over gloo where there are none. Even ranks load long samples and odd ones
short samples, so without balancing the odd ones would wait.
"""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bascule import SequenceParallel, Step, TransformerCost

WIDTH, NUM_HEADS, NUM_BLOCKS, CHANNELS = 64, 4, 2, 16
NUM_STEPS, NUM_SAMPLES = 20, 4


class Block(nn.Module):
    """Attention and MLP, modulated by a vector a token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, vec: Tensor, step: Step) -> Tensor:
        scale, shift = self.modulation(vec).chunk(2, dim=-1)
        qkv = self.qkv(self.norm1(x) * (1 + scale) + shift)
        q, k, v = qkv.unflatten(-1, (3, NUM_HEADS, -1)).unbind(1)
        out = step.attend(q, k, v)  # within whole sequences, on however many ranks they are
        x = x + self.out(out.flatten(1))
        return x + self.mlp(self.norm2(x))


class ToyDiT(nn.Module):
    """Predicts the velocity of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.token_in, self.pos_in = nn.Linear(CHANNELS, WIDTH), nn.Linear(2, WIDTH)
        self.time_in = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(self, tokens: Tensor, pos: Tensor, time: Tensor, step: Step) -> Tensor:
        x, vec = self.token_in(tokens), self.time_in(time[:, None])
        moved = step.route(x=x, pos=pos)  # tokens go to the ranks that compute them
        vec = step.gather_samples(vec)[step.local_seq_ids]  # vectors of this rank's sequences
        x, vec = moved["x"] + self.pos_in(moved["pos"]), vec[step.token_slot]
        for block in self.blocks:
            x = block(x, vec, step)  # inside: out = step.attend(q, k, v)
        return step.restore(self.head(x))  # back to the source rank and order


def load_batch(rank: int, number: int) -> tuple[list[int], Tensor, Tensor, Tensor, Tensor]:
    """Lengths, noisy tokens (T, channels), positions (T, 2), times (n,) and velocities to predict.

    Rectified flow: tokens = (1 - time) clean + time noise, velocity = noise - clean.
    """
    random = torch.Generator().manual_seed(1000 * number + rank)
    shortest = 32 if rank % 2 else 128
    lens = torch.randint(shortest, 4 * shortest, (NUM_SAMPLES,), generator=random)
    time = torch.rand(NUM_SAMPLES, generator=random)
    place = torch.cat([torch.arange(length) for length in lens.tolist()]) / 50
    pos = torch.stack([place.sin(), place.cos()], dim=-1)
    clean = (place[:, None] + torch.arange(CHANNELS)).sin() * math.sqrt(2)
    noise = torch.randn(clean.shape, generator=random)
    t = time.repeat_interleave(lens)[:, None]
    return lens.tolist(), (1 - t) * clean + t * noise, pos, time, noise - clean


def train(device: torch.device, topology: str) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)  # the same weights on every rank
    model = ToyDiT().to(device)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sp = SequenceParallel(mesh, topology, TransformerCost(WIDTH, num_layers=NUM_BLOCKS))  # once
    for number in range(NUM_STEPS):
        lens, *tensors = load_batch(dist.get_rank(), number)
        tokens, pos, time, velocity = (x.to(device) for x in tensors)
        step = sp.plan(lens)  # every step; one small gather, then pure planning
        with step:  # an error of this rank soon ends all, with its text
            out = model(tokens, pos, time, step)
            loss = step.mean((out - velocity).square().mean(-1))  # global mean, right under FSDP
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plan = step.metrics()
        if dist.get_rank() == 0:
            print(
                f"step {number + 1}: loss {loss.item():.6f}, imbalance (max/mean load) "
                f"{plan['imbalance']:.3f} instead of {plan['imbalance_unbalanced']:.3f}"
            )


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        train(device, sys.argv[1] if len(sys.argv) > 1 else f"g1n{dist.get_world_size()}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
