"""Blocks as users name them to `bascule calibrate --module`, right and wrong."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
BLOCK = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, batch_first=True)
NUMBER = 5


def make(length: int) -> tuple[nn.Module, Tensor]:
    return BLOCK, torch.randn(1, length, WIDTH)


def several(length: int) -> tuple[Any, tuple[Any, ...]]:
    """A function of several inputs, not all of them tensors, with several outputs."""

    def run(x: Tensor, ids: Tensor, scale: float) -> tuple[Tensor, None, Tensor]:
        return x * scale, None, x[ids]

    return run, (torch.randn(length, 4), torch.arange(length), 2.0)


def raises(length: int) -> None:
    raise ValueError(f"no block\nfor {length}")


def one_thing(length: int) -> Tensor:
    return torch.randn(length)


def no_call(length: int) -> tuple[int, Tensor]:
    return 5, torch.randn(length)


def wrong_input(length: int) -> tuple[nn.Module, Tensor]:
    return BLOCK, torch.randn(1, length, WIDTH + 1)


def no_gradient(length: int) -> tuple[Any, Tensor]:
    return torch.argmax, torch.randn(length)
