"""Fields of samples joined to one batch, and the padded batch that VLMs of transformers take.

Legend of shapes: B samples; l tokens of one sample, L of the longest.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bascule.errors import ConfigError
from bascule.plan.checks import MAX_WHOLE, listed, whole

TOKEN_FIELDS = ("input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Fields with one row a token."""

VISUAL_FIELDS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
)
"""Fields with rows for patches, tiles, images or videos, none for a sample of text only."""

Sample = Mapping[str, Any]


def collate_padded(
    samples: Iterable[Sample], *, pad_id: int = 0, ignore_index: int = -100, multiple_of: int = 1
) -> dict[str, Any]:
    """Return the right-padded batch that Qwen-VL, InternVL and other models of transformers take.

    Token fields are padded to (B, L), other tensors with a dim are concatenated along dim 0, 0-dim
    tensors are stacked to (B,) and plain values become lists of B. Fields that are None everywhere,
    or visual without rows, are left out. A sample without a token field other than ``input_ids``
    gets neutral values, as in `make_pack`.

    Args:
        samples: Tensors and plain values by name; an empty list gives a batch of shape (0, 0).
        pad_id: Token in the padding.
        ignore_index: Label in the padding, which adds nothing to the loss.
        multiple_of: L is the next multiple of it.

    Returns:
        The fields of the samples, and ``attention_mask`` (1 token, 0 padding) if they have none.

    Raises:
        ConfigError: A token field has another length, a field's dtype, shape or kind differs
            between samples, some lack one that has no neutral value, or a visual field is not a
            tensor.
    """
    whole("pad_id", pad_id)
    whole("ignore_index", ignore_index, -MAX_WHOLE)
    whole("multiple_of", multiple_of, 1)
    samples = mappings(samples)
    if not samples:
        nothing = torch.empty(0, 0, dtype=torch.int64)
        return {name: nothing.clone() for name in ("input_ids", "labels", "attention_mask")}
    lens = token_lengths(samples, TOKEN_FIELDS)
    length = -(-max(lens) // multiple_of) * multiple_of
    if all(sample.get("attention_mask") is None for sample in samples):
        ones = torch.ones(length, dtype=torch.int64)
        with_masks = zip(samples, lens, strict=True)
        samples = [{**sample, "attention_mask": ones[:n]} for sample, n in with_masks]
    batch: dict[str, Any] = {}
    for name in field_names(samples):
        if all(sample.get(name) is None for sample in samples):
            continue
        if name in TOKEN_FIELDS:
            parts = token_rows(name, samples, lens, ignore_index)
            num_padding = [length - num_tokens for num_tokens in lens]
            pads = [padding(name, parts[0], n, pad_id, ignore_index) for n in num_padding]
            rows = zip(parts, pads, strict=True)
            batch[name] = torch.stack([torch.cat(row) for row in rows])
            continue
        value = join(name, samples)[0]
        if name not in VISUAL_FIELDS:
            batch[name] = value
        elif not isinstance(value, Tensor):
            raise ConfigError(f"{name} must be a tensor for the model; use torch.as_tensor")
        elif value.shape[:1].numel():
            batch[name] = value
    return batch


def mappings(samples: Iterable[object]) -> list[Sample]:
    """Return samples, or packs, as a list of mappings."""
    every = listed("samples", samples)
    for i, sample in enumerate(every):
        if not isinstance(sample, Mapping):
            raise ConfigError(f"sample {i} is a {type(sample).__name__}; give dicts of fields")
    return every


def field_names(samples: Sequence[Sample]) -> list[str]:
    """Return the names of all fields, in the order in which they first appear."""
    return list(dict.fromkeys(name for sample in samples for name in sample))


def token_lengths(samples: Sequence[Sample], token_fields: Sequence[str]) -> list[int]:
    """Return the tokens of each sample: rows of the first of `token_fields` that it has."""
    lens: list[int] = []
    for i, sample in enumerate(samples):
        rows = {
            name: _num_rows(i, name, sample[name])
            for name in token_fields
            if sample.get(name) is not None
        }
        if not rows:
            raise ConfigError(f"sample {i} has none of the token fields {', '.join(token_fields)}")
        first, length = next(iter(rows.items()))
        for name, num_rows in rows.items():
            if num_rows != length:
                raise ConfigError(
                    f"{name} of sample {i} has {num_rows} rows, {first} has {length}; give one row "
                    f"a token, or take {name} out of the token fields"
                )
        lens.append(length)
    return lens


def token_rows(
    name: str, samples: Sequence[Sample], lens: Sequence[int], ignore_index: int
) -> list[Tensor]:
    """Return a token field of each sample, (L, ...); neutral values where a sample lacks it."""
    tensors = _tensors(name, samples)
    like = next(iter(tensors.values()), torch.empty(0, dtype=torch.int64))
    neutral = {"labels": ignore_index, "attention_mask": 1, "token_type_ids": 0}
    neutral["mm_token_type_ids"] = 0  # text
    for i in range(len(samples)):
        if i not in tensors and name not in neutral:
            raise ConfigError(f"sample {i} lacks {name}, which others have; give all or none")
    return [
        tensors[i] if i in tensors else _filled(name, like, num_rows, neutral[name])
        for i, num_rows in enumerate(lens)
    ]


def padding(name: str, like: Tensor, num_rows: int, pad_id: int, ignore_index: int) -> Tensor:
    """Return rows of a token field for no token, with dtype and trailing shape of `like`."""
    values = {"input_ids": pad_id, "labels": ignore_index}
    return _filled(name, like, num_rows, values.get(name, 0))


def join(name: str, samples: Sequence[Sample]) -> tuple[Any, list[int] | None]:
    """Join a field without a row a token: tensors with a dim, and their rows; others, and None."""
    if not any(isinstance(sample.get(name), Tensor) for sample in samples):
        return [sample.get(name) for sample in samples], None
    tensors = _tensors(name, samples)
    if next(iter(tensors.values())).dim():
        counts = [len(tensors[i]) if i in tensors else 0 for i in range(len(samples))]
        return torch.cat(list(tensors.values())), counts
    if len(tensors) < len(samples):
        # The rows of the others would move up, to samples that are not theirs.
        i = min(set(range(len(samples))) - tensors.keys())
        raise ConfigError(f"sample {i} lacks {name}, one number in others; give it to all or none")
    return torch.stack(list(tensors.values())), None


def _tensors(name: str, samples: Sequence[Sample]) -> dict[int, Tensor]:
    """Return a field's tensors by sample, of one dtype and shape: torch.cat would promote them."""
    tensors: dict[int, Tensor] = {}
    forms: dict[tuple[Any, ...], int] = {}
    for i, sample in enumerate(samples):
        if (value := sample.get(name)) is None:
            continue
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{name} of sample {i} is a {type(value).__name__}, of others a tensor; use "
                "torch.as_tensor"
            )
        tensors[i] = value
        forms.setdefault((value.dtype, value.dim(), value.shape[1:]), i)
    if len(forms) > 1:
        one, other = [
            f"{tensors[i].dtype} {tuple(tensors[i].shape)} in sample {i}" for i in forms.values()
        ][:2]
        raise ConfigError(
            f"{name} is {one} and {other}; all samples need the same dtype and the same shape "
            "behind dim 0"
        )
    return tensors


def _num_rows(i: int, name: str, value: object) -> int:
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{name} of sample {i} is a {type(value).__name__}; use torch.as_tensor, or take "
            f"{name} out of the token fields"
        )
    if value.dim() == 0 or (name == "input_ids" and value.dim() > 1):
        raise ConfigError(
            f"{name} of sample {i} has the shape {tuple(value.shape)}, needed is (L,), one row a "
            "token and no dim for the batch"
        )
    return len(value)


def _filled(name: str, like: Tensor, num_rows: int, value: int) -> Tensor:
    if num_rows and not like.dtype.is_floating_point and not like.dtype.is_complex:
        limits = None if like.dtype == torch.bool else torch.iinfo(like.dtype)
        least, most = (limits.min, limits.max) if limits else (0, 1)
        if not least <= value <= most:
            raise ConfigError(f"{name} is {like.dtype}, which cannot hold {value}; use torch.int64")
    return like.new_full((num_rows, *like.shape[1:]), value if num_rows else 0)
