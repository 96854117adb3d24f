"""A tiny model of diffusers and the awkward shapes of its inputs."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

TEXT_DIM, CHANNELS = 32, 8
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model and the shapes of its inputs; `grid` is height and width in tokens."""

    model: str
    heads: int
    batch: int
    text: int
    grid: tuple[int, int]
    options: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        rows, columns = self.grid
        shape = f"heads{self.heads}-batch{self.batch}-text{self.text}-{rows}x{columns}"
        return "-".join((self.model, shape, *self.options))


class Draw:
    """Random tensors of a shape, the same on every rank."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)


def built(name: str, case: Case, **sizes: Any) -> nn.Module:
    """A model of diffusers with two layers of heads of width 16, unless other sizes are given."""
    cls = getattr(importlib.import_module("diffusers"), name)
    usual = {"in_channels": CHANNELS, "out_channels": CHANNELS, "num_layers": 2}
    usual |= {"num_attention_heads": case.heads, "attention_head_dim": 16}
    takes = inspect.signature(cls).parameters
    return cls(**{key: size for key, size in usual.items() if key in takes} | sizes)


def grid_ids(grid: tuple[int, int]) -> Tensor:
    """(rows x columns, 3) positions of the tokens of an image."""
    ids = torch.zeros(grid[0] * grid[1], 3)
    ids[:, 1:] = torch.cartesian_prod(*(torch.arange(size) for size in grid))
    return ids


def key_mask(case: Case, draw: Draw) -> Tensor:
    """(batch, text) bool, of which the first is seen."""
    mask = draw(case.batch, case.text) < 0.3
    mask[:, 0] = True
    return mask


Makes = dict[str, tuple[Callable[[Case], nn.Module], Callable[[Case, Draw], Inputs]]]
"""Functions that make a model, and its inputs, by the model's name."""
