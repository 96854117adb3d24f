"""Models and packs of FLUX's width, and how many operations they take.

FLOPs of a forward pass are those of KnapFormer, equation 1: a block takes 24 L d^2 for the linear
layers of L tokens, and 4 L^2 d for attention, 2 a multiplication with its addition. A step with
checkpointing is counted as four forward passes: forward, recomputed forward, and a backward of two.
What is left out (modulations, norms, the first and last projections) makes the shares lower.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from measuring import MIXES
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,  # pyright: ignore[reportUnknownVariableType]
)

from bascule import TransformerCost, plan_batch
from bascule.machine.costs import FLOPS_PER_UNIT
from bascule.models import MMDiT, MMDiTConfig, PackedBatch
from bascule.parallel import SequenceParallel, Step
from bascule.train.streams import pack_batch
from bascule.workload.codes import (
    SampleShape,
    parse_data_codes,
    rank_lengths,
    sample_lengths,
    seq_lens,
)
from gpu.measuring import Setting

TRAINED = 2, 4
"""Double and single blocks; all 19 + 38 do not fit a card of 80 GB with their gradients."""

FORWARDS_OF_A_STEP = 4
MOST_TEXT = 512


@dataclass(frozen=True)
class Pack:
    """Samples that a rank computes in one step.

    Attributes:
        name: For tables.
        samples: Their tokens.
    """

    name: str
    samples: tuple[SampleShape, ...]

    @cached_property
    def seq_lens(self) -> list[int]:
        """Tokens of each sample."""
        return [sample.seq_len for sample in self.samples]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(self.seq_lens)

    def __str__(self) -> str:
        return f"{self.name}: {len(self.samples)} sequences, {self.num_tokens} tokens"

    def forward_flops(self, config: MMDiTConfig) -> float:
        """Of all blocks, without padding."""
        num_layers = config.num_double + config.num_single
        cost = TransformerCost(config.d_model, gamma=1.0, num_layers=num_layers)
        return float(cost(np.array(self.seq_lens)).sum()) * FLOPS_PER_UNIT

    def step_flops(self, config: MMDiTConfig) -> float:
        """Of forward, recomputed forward and backward."""
        return FORWARDS_OF_A_STEP * self.forward_flops(config)


def config_of(setting: Setting, num_double: int, num_single: int) -> MMDiTConfig:
    """FLUX with fewer blocks; tiny: narrow, too."""
    config = replace(MMDiTConfig.flux(guidance=False), num_double=num_double, num_single=num_single)
    if setting.is_tiny:
        narrow = {"text_dim": 16, "vec_dim": 16, "d_model": 64, "num_heads": 2}
        config = replace(config, in_channels=8, axes_dim=(8, 12, 12), **narrow)
    return config


def trained_config(setting: Setting) -> MMDiTConfig:
    """The blocks that are trained."""
    return config_of(setting, *setting.pick(TRAINED, (1, 1)))


def sample_of(num_tokens: int) -> SampleShape:
    """A sample of so many tokens, an eighth of them text."""
    text = min(num_tokens // 8, MOST_TEXT)
    image = num_tokens - text
    return SampleShape(text, image, 1, max(1, math.isqrt(image)))


def equal_pack(length: int, num_samples: int) -> Pack:
    """Samples of one length."""
    return Pack(f"length {length}", (sample_of(length),) * num_samples)


def mixes(setting: Setting, *, heaviest: bool = False) -> list[Pack]:
    """The mixes of KnapFormer's Table 1, as one of 32 ranks computes them under g1n32.

    Tiny: lengths are divided by 64.

    Args:
        setting: Says whether it is tiny.
        heaviest: Whether it is the rank that the others wait for, and not that of the median load.
    """
    cost, found = TransformerCost(3072), list[Pack]()
    which = "heaviest" if heaviest else "median"
    for name, codes in MIXES.items():
        shapes = sample_lengths(parse_data_codes(codes), seed=0, step=0)
        plan = plan_batch(seq_lens(shapes), "g1n32", cost)
        place = plan.loads.size - 1 if heaviest else plan.loads.size // 2
        rank = int(np.argsort(plan.loads, kind="stable")[place])
        every = list(itertools.chain.from_iterable(shapes))
        samples = [every[i] for i in np.flatnonzero(plan.bag_of == rank)]
        if setting.is_tiny:
            samples = [sample_of(max(8, sample.seq_len // 64)) for sample in samples[:4]]
        found.append(Pack(f"{name}, {which} rank", tuple(samples)))
    return found


def loaded_low_res(setting: Setting) -> Pack:
    """A low-res batch of 32 samples as its rank loads it."""
    samples = rank_lengths(parse_data_codes(MIXES["low-res"]), 0, seed=0, step=0)
    if setting.is_tiny:
        samples = [sample_of(16) for _ in samples[:4]]
    return Pack("low-res", tuple(samples))


@contextmanager
def made_on(setting: Setting) -> Iterator[None]:
    """Parameters that are made within are on the device and of its dtype from the start."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(setting.dtype)
    try:
        with setting.device:
            yield
    finally:
        torch.set_default_dtype(before)


def make_model(config: MMDiTConfig, setting: Setting) -> MMDiT:
    """Random weights, as torch's layers draw them."""
    torch.manual_seed(0)
    with made_on(setting):
        return MMDiT(config)


def checkpointed(model: MMDiT, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> MMDiT:
    """A copy with every block wrapped and then checkpointed, so that all of it is recomputed."""
    found = copy.deepcopy(model)
    for blocks in (found.double_blocks, found.single_blocks):
        for place, block in enumerate(blocks):
            blocks[place] = checkpoint_wrapper(wrap(block))
    return found


def batch_of(pack: Pack, config: MMDiTConfig, setting: Setting) -> PackedBatch:
    """Random tokens of a pack on the device."""
    torch.manual_seed(0)
    num_image = sum(sample.image_tokens for sample in pack.samples)
    num_text, num_samples = pack.num_tokens - num_image, len(pack.samples)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=setting.device, dtype=setting.dtype)

    made = pack_batch(
        pack.samples,
        image=draw(num_image, config.in_channels),
        text=draw(num_text, config.text_dim),
        pooled=draw(num_samples, config.vec_dim),
        ids=range(num_samples),
    )
    return PackedBatch(
        image_tokens=made.image,
        text_tokens=made.text,
        is_image=made.is_image,  # of the host, so that no step waits for the device
        pos=made.pos.to(setting.device),
        timestep=torch.rand(num_samples, device=setting.device),
        pooled=made.pooled,
    )


def parallel_of(setting: Setting) -> SequenceParallel:
    """The library as a user has it, in a world of one rank."""
    assert setting.device.type in ("cpu", "cuda")
    return SequenceParallel(None, "g1n1", TransformerCost(3072))


def train(model: MMDiT, batch: PackedBatch, step: Step) -> Tensor:
    """Forward and backward; the loss."""
    model.zero_grad(set_to_none=True)
    loss = step.mean(model(batch, step).float().square().mean(dim=-1))
    loss.backward()
    return loss.detach()
