"""Steps of a training run: values that have no mean."""

from collections.abc import Callable
from typing import Any

import torch

from bascule.step import check_mean


def averaged(values: Any, weights: Any = None) -> Callable[[], object]:
    return lambda: check_mean(values, weights)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


CASES = [
    ("mean of a number", averaged(ones()), ("scalar",)),
    ("mean of integers", averaged(ones(3, dtype=torch.int64)), ("torch.int64",)),
    ("mean of truths", averaged(ones(3, dtype=torch.bool)), ("torch.bool",)),
    ("mean of complex", averaged(ones(3, dtype=torch.complex64)), ("torch.complex64",)),
    ("complex weights", averaged(ones(3), ones(3, dtype=torch.complex64)), ("torch.complex64",)),
    ("weights of others", averaged(ones(3), ones(4)), ("(4,)",)),
    ("weights of rows", averaged(ones(3, 2), ones(3)), ("(3,)",)),
    ("weights of more dims", averaged(ones(3), ones(2, 3)), ("(2, 3)",)),
    ("weights with gradient", averaged(ones(3), ones(3).requires_grad_()), ("detach",)),
    ("weights elsewhere", averaged(ones(3), torch.ones(3, device="meta")), ("meta",)),
]
