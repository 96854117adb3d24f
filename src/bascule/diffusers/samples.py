"""A sample of a diffusers model, the form that samples of one batch share, and that batch.

A sample is what the model takes for a batch of one, by keyword, with what the loss needs besides.
Keywords in `unbatched` have no batch: all samples have them whole.
"""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bascule.comm.items import parcel
from bascule.diffusers.arguments import holds_tensors
from bascule.errors import ConfigError

Sample = dict[str, Any]


def check_sample(sample: Sample, required: Collection[str], unbatched: Collection[str]) -> None:
    """Refuse a sample that lacks a keyword of the model, or that is no batch of one."""
    missing = [name for name in required if name not in sample]
    if missing:
        raise ConfigError(f"has no {missing[0]!r}, which the model's forward needs: add it")
    for name in (one for one in sample if one not in unbatched):
        value = sample[name]
        _refuse_array(name, value)
        if isinstance(value, Tensor):
            if value.dim() == 0 or value.shape[0] != 1:
                raise ConfigError(
                    f"{name!r} has the shape {tuple(value.shape)}: give what the model takes for a "
                    "batch of one, (1, ..)"
                )
        elif holds_tensors(value):
            raise ConfigError(
                f"{name!r} is a {type(value).__name__} that holds tensors, of which the batch is "
                "not known: give tensors (1, ..), or name it in the `unbatched` of a table"
            )
        elif isinstance(value, list) and len(value) != 1:
            raise ConfigError(
                f"{name!r} is a list of {len(value)}: give a list of one entry, for a batch of one"
            )


def form_of(sample: Sample, unbatched: Collection[str], device: torch.device) -> int:
    """Return a number that samples share if they fit into one batch."""
    batched = {name: x for name, x in sample.items() if _is_batched(name, x, unbatched)}
    shapes = sorted((name, str(x.dtype), *x.shape) for name, x in batched.items())
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=8)
    # Equal values: positions of another aspect ratio are others, though there are as many.
    rest = {name: sample[name] for name in sorted(sample.keys() - batched.keys())}
    for part in parcel(rest, device).parts:
        digest.update(part.numpy(force=True).tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def batch_of(samples: Sequence[Sample], unbatched: Collection[str]) -> Sample:
    """Return one batch of samples of the same form."""
    batch = dict(samples[0])
    for name, value in batch.items():
        if _is_batched(name, value, unbatched):
            batch[name] = torch.cat([sample[name] for sample in samples])
        elif isinstance(value, list) and name not in unbatched:
            batch[name] = value * len(samples)
    return batch


def samples_in(batch: Sample, unbatched: Collection[str]) -> list[Sample]:
    """Return the samples of a batch, the inverse of `batch_of`; tensors are views."""
    sizes: dict[str, int] = {}
    for name in (one for one in batch if one not in unbatched):
        value = batch[name]
        _refuse_array(name, value)
        if isinstance(value, Tensor) and value.dim() == 0:
            raise ConfigError(
                f"{name!r} of a batch is a tensor of one number: give one for each sample, "
                "(batch, ..), or a plain number"
            )
        if isinstance(value, Tensor | list):
            sizes[name] = len(value)
    if len(set(sizes.values())) != 1:
        raise ConfigError(
            f"the samples of a batch, by keyword, are {dict(sorted(sizes.items()))}: give tensors "
            "(batch, ..) of as many, and name what has no batch in the `unbatched` of a table"
        )
    (num_samples,) = set(sizes.values())
    return [
        {name: x[i : i + 1] if name in sizes else x for name, x in batch.items()}
        for i in range(num_samples)
    ]


def _refuse_array(name: str, value: Any) -> None:
    """Refuse an array, which every sample would have whole, as it has plain values."""
    if isinstance(value, np.ndarray):
        raise ConfigError(
            f"{name!r} is an array of numpy of the shape {value.shape}: give "
            f"torch.from_numpy({name}), which is cut into samples, or name what has no batch in "
            "the `unbatched` of a table"
        )


def _is_batched(name: str, value: Any, unbatched: Collection[str]) -> bool:
    return isinstance(value, Tensor) and name not in unbatched
