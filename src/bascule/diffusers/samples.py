"""A sample of a diffusers model, which samples fit into one batch, and that batch.

A sample is what the model takes for a batch of one, by keyword, and what the loss needs besides.
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


def check_sample(sample: Any, required: Collection[str], unbatched: Collection[str]) -> None:
    """Refuse what is no batch of one.

    Args:
        sample: As given.
        required: Keywords that the model needs.
        unbatched: Keywords of what has no batch.

    Raises:
        ConfigError: Names the keyword, its value and what to give.
    """
    if not isinstance(sample, dict):
        raise ConfigError(
            f"is a {type(sample).__name__}: give a dict of the model's keywords, and of what the "
            "loss needs"
        )
    missing = [name for name in required if name not in sample]
    if missing:
        raise ConfigError(f"has no {missing[0]!r}, which the model's forward needs: add it")
    for name, value in sample.items():
        if name in unbatched:
            continue
        if isinstance(value, Tensor):
            if value.dim() == 0 or value.shape[0] != 1:
                raise ConfigError(
                    f"{name!r} has the shape {tuple(value.shape)}: give what the model takes for a "
                    "batch of one, (1, ..)"
                )
        elif isinstance(value, np.ndarray):
            raise _is_array(name, value)
        elif holds_tensors(value):
            raise ConfigError(
                f"{name!r} is a {type(value).__name__} that holds tensors, and nothing says how "
                "these make a batch: give tensors (1, ..), or name it in the `unbatched` of a table"
            )
        elif isinstance(value, list) and len(value) != 1:
            raise ConfigError(
                f"{name!r} is a list of {len(value)}: give a list of one entry, for a batch of one"
            )


def check_keywords(samples: Sequence[Sample]) -> None:
    """Refuse samples of unlike keywords.

    Raises:
        ConfigError: Names the first one that differs.
    """
    for place, sample in enumerate(samples):
        if sample.keys() != samples[0].keys():
            raise ConfigError(
                f"sample {place} has the keywords {sorted(sample)}, and sample 0 has "
                f"{sorted(samples[0])}: give all samples the same"
            )


def form_of(sample: Sample, unbatched: Collection[str], device: torch.device) -> int:
    """A number that is the same for samples that fit into one batch.

    These have the same keywords, dtypes and shapes, and the same values of all that is no tensor,
    or has no batch: positions of another aspect ratio are others, though there are as many.
    """
    batched = {name: x for name, x in sample.items() if _is_batched(name, x, unbatched)}
    shapes = sorted((name, str(x.dtype), *x.shape) for name, x in batched.items())
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=8)
    rest = {name: sample[name] for name in sorted(sample.keys() - batched.keys())}
    for part in parcel(rest, device).parts:
        digest.update(part.numpy(force=True).tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def batch_of(samples: Sequence[Sample], unbatched: Collection[str]) -> Sample:
    """One batch of samples of the same form."""
    batch = dict(samples[0])
    for name, value in batch.items():
        if _is_batched(name, value, unbatched):
            batch[name] = torch.cat([sample[name] for sample in samples])
        elif isinstance(value, list) and name not in unbatched:
            batch[name] = value * len(samples)
    return batch


def samples_in(batch: Sample, unbatched: Collection[str]) -> list[Sample]:
    """The samples of a batch: what `batch_of` joins. Tensors are views; nothing is copied.

    Args:
        batch: What the model takes, and what the loss needs besides, by keyword.
        unbatched: Keywords of what has no batch: all samples have it whole.

    Raises:
        ConfigError: Keywords have unlike numbers of samples, one is an array of numpy, or none has
            a batch.
    """
    sizes: dict[str, int] = {}
    for name, value in batch.items():
        if _is_batched(name, value, unbatched):
            if value.dim() == 0:
                raise ConfigError(
                    f"{name!r} of a batch is a tensor of one number: give one for each sample, "
                    "(batch, ..), or a plain number"
                )
            sizes[name] = value.shape[0]
        elif isinstance(value, np.ndarray) and name not in unbatched:
            raise _is_array(name, value)
        elif isinstance(value, list) and name not in unbatched:
            sizes[name] = len(value)
    if not sizes:
        raise ConfigError("a batch without tensors (batch, ..): give what the model is called with")
    first, num_samples = next(iter(sizes.items()))
    for name, size in sizes.items():
        if size != num_samples:
            raise ConfigError(
                f"{name!r} of a batch has {size} samples, and {first!r} has {num_samples}: give as "
                "many, or name what has no batch in the `unbatched` of a table"
            )
    places = range(num_samples)
    return [{n: x[i : i + 1] if n in sizes else x for n, x in batch.items()} for i in places]


def _is_array(name: str, value: Any) -> ConfigError:
    """Every sample would have it whole, as it has plain values."""
    return ConfigError(
        f"{name!r} is an array of numpy of the shape {value.shape}: give "
        f"torch.from_numpy({name}), which is cut into samples, or name what has no batch in the "
        "`unbatched` of a table"
    )


def _is_batched(name: str, value: Any, unbatched: Collection[str]) -> bool:
    return isinstance(value, Tensor) and name not in unbatched
