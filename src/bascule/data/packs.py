"""Packs of samples side by side, which `unpack` restores bit for bit; and padded batches.

Legend: n samples; T tokens of a pack; S segments of a pack: n, and one more if there is padding. In
a padded batch, B samples of L tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bascule.checks import MAX_WHOLE, each, fields, listed, of_type, whole
from bascule.errors import ConfigError

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

_PATCHED_FIELDS = {"pixel_values": 5, "pixel_attention_mask": 4}
"""Number of dims of fields with one row an image, and its patches or tiles in dim 1."""

_MARK = "gaps"  # every pack of `make_pack` has this field, and no other pack
MADE = ("cu_seqlens", "positions", "shift_labels", "first_labels", "cu_items", "num_samples", _MARK)
"""Fields that `make_pack` adds to those of the samples."""

_MAX_TOKENS = 2**31 - 1  # cu_seqlens is int32, as attention kernels take it


@dataclass(frozen=True, slots=True)
class Pack:
    """Size and padding of packs, and their fields with one row per token.

    Attributes:
        tokens: Most tokens of a pack.
        fixed: True pads every pack to exactly `tokens`; the padding is a last segment of its own.
        pad_id: Token in the padding.
        ignore_index: Label that adds nothing to the loss.
        token_fields: Fields with one row per token. The first that a sample has gives its length.
    """

    tokens: int
    fixed: bool = False
    pad_id: int = 0
    ignore_index: int = -100
    token_fields: tuple[str, ...] = TOKEN_FIELDS

    def __post_init__(self) -> None:
        fields(
            self,
            tokens=(whole, 1, _MAX_TOKENS),
            fixed=(of_type, bool, "True or False"),
            pad_id=whole,
            ignore_index=(whole, -MAX_WHOLE),
            token_fields=(each, of_type, str, "names of fields"),
        )
        names = self.token_fields
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"token_fields must be one or more different names, got {names!r}")
        _refuse_made(names)


def make_pack(samples: Iterable[Sample], pack: Pack) -> dict[str, Any]:
    """Put samples side by side in one pack.

    Token fields and other tensors with a dim are concatenated along dim 0, 0-dim tensors are
    stacked to (n,), and plain values become lists of n. A sample without a concatenated field, or
    with None there, adds no rows; in token fields it gets neutral ones: ignored labels, 1 in
    ``attention_mask``, 0 in type ids.

    Models of transformers need ``position_ids`` made of ``positions``, no ``attention_mask``, and
    ``use_cache=False``; else samples attend to each other, without an error. See
    `bascule.transformers.inputs_of_pack` for Qwen-VL, which needs (4, 1, T).

    Args:
        samples: Tensors and plain values by name; any number, of any length, also 0.
        pack: Budget and padding.

    Returns:
        The fields of the samples (``input_ids`` and ``labels`` if there are none), and

        * ``cu_seqlens`` (S + 1,) int32: bounds of the segments.
        * ``positions`` (T,) int64: place of a token in its segment.
        * ``labels``: the first of each sample is ignored, for models that shift by themselves.
        * ``shift_labels``: label t is label t + 1 of the same sample, the last is ignored.
        * ``num_samples``, ``cu_items`` (field to (n + 1,) int64 bounds of the samples' rows),
          ``first_labels`` (which ``labels`` lost) and ``gaps`` (samples without a field): for
          `unpack`.

    Raises:
        ConfigError: More tokens than the budget; token fields of different lengths; a field whose
            dtype, shape or kind differs between samples; a field without a neutral value that some
            samples lack; or a field with one of the names above.
    """
    samples = mappings(samples)
    lens = token_lengths(samples, pack.token_fields)
    total = sum(lens)
    if total > pack.tokens:
        raise ConfigError(
            f"{len(lens)} samples have {total} tokens together, more than a pack of "
            f"{pack.tokens}: raise tokens to {total}, or give fewer samples"
        )
    names = field_names(samples)
    _refuse_made(names)
    if not samples:
        names = [name for name in ("input_ids", "labels") if name in pack.token_fields]
    num_padding = pack.tokens - total if pack.fixed else 0
    cu_samples = _cumulative(lens)
    gaps = {name: gap for name in names if any(gap := _gap(name, samples))}
    made: dict[str, Any] = {}
    cu_items: dict[str, Tensor] = {}
    for name in names:
        is_nowhere = all(sample.get(name) is None for sample in samples)
        if name in pack.token_fields and not (samples and is_nowhere):
            parts = token_rows(name, samples, lens, pack.ignore_index)
            like = parts[0] if parts else torch.empty(0, dtype=torch.int64)
            parts.append(padding(name, like, num_padding, pack.pad_id, pack.ignore_index))
            made[name], cu_items[name] = torch.cat(parts), cu_samples
        else:
            made[name], counts = join(name, samples)
            if counts is not None:
                cu_items[name] = _cumulative(counts)
    if "labels" in cu_items and "labels" in pack.token_fields:
        made |= _separate(made["labels"], cu_samples, pack.ignore_index)
    segments = [*lens, num_padding] if num_padding else lens
    cu_seqlens = _cumulative(segments)
    starts = cu_seqlens[:-1].repeat_interleave(torch.tensor(segments, dtype=torch.int64))
    return made | {
        "cu_seqlens": cu_seqlens.int(),
        "positions": torch.arange(total + num_padding) - starts,
        "num_samples": len(samples),
        "cu_items": cu_items,
        _MARK: gaps,
    }


def unpack(pack: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a pack into its samples, whose tensors are views of the pack's, except labels.

    A pack of `make_pack` is restored bit for bit. A foreign pack, of tensors, arrays or lists by
    name, needs ``cu_seqlens``; each segment is a sample. `TOKEN_FIELDS` and other fields with T
    rows are split like the tokens. A field with n rows has one row per sample: a 1-dim tensor gives
    0-dim values, others keep dim 0. For other fields, ``cu_items`` maps their names to the (n + 1,)
    bounds of the samples' rows. Fields that are None are left out.

    Raises:
        ConfigError: No valid ``cu_seqlens``, or a field whose rows belong to no sample.
    """
    (pack,) = mappings([pack])
    is_ours = _MARK in pack
    bounds = _checked("cu_seqlens", pack.get("cu_seqlens"))
    num_samples = pack["num_samples"] if is_ours else len(bounds) - 1
    cu_rows = pack.get("cu_items") or {}
    fields = {
        name: value
        for name, value in pack.items()
        if value is not None and name not in (MADE if is_ours else ("cu_seqlens", "cu_items"))
    }
    if is_ours and "first_labels" in pack:
        fields["labels"], starts = fields["labels"].clone(), cu_rows["labels"]
        fields["labels"][starts[:-1][starts.diff() > 0]] = pack["first_labels"]
    gaps = pack.get(_MARK, {})
    samples: list[dict[str, Any]] = [{} for _ in range(num_samples)]
    for name, value in fields.items():
        if name in cu_rows:
            parts = _split(name, value, _checked(f"cu_items[{name!r}]", cu_rows[name]), is_ours)
        elif is_ours:
            parts = _one_each(name, value, num_samples)
        else:
            parts = _attribute(name, value, bounds)
        if len(parts) != num_samples:
            raise ConfigError(
                f"cu_items[{name!r}] is for {len(parts)} samples: give {num_samples + 1} bounds"
            )
        lacking, nones = (frozenset(gap) for gap in gaps.get(name, ((), ())))
        for i, part in enumerate(parts):
            if i not in lacking:
                samples[i][name] = None if i in nones else part
    return samples


def _separate(labels: Tensor, cu_samples: Tensor, ignore_index: int) -> dict[str, Tensor]:
    """Ignore the first label of each sample in place; return labels, first and shifted labels."""
    starts = cu_samples[:-1][cu_samples.diff() > 0]
    ignored = padding("labels", labels[:0], max(len(starts), min(len(labels), 1)), 0, ignore_index)
    first_labels = labels[starts]
    labels[starts] = ignored[: len(starts)]
    # After the last label of a sample comes the first of the next, or padding: already ignored.
    shift_labels = torch.cat([labels[1:], ignored[:1]])
    return {"labels": labels, "shift_labels": shift_labels, "first_labels": first_labels}


def _cumulative(counts: Sequence[int]) -> Tensor:
    """Return the cumulative counts, (n + 1,) int64, which begin with 0."""
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)


def _gap(name: str, samples: Sequence[Sample]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the indices of samples without a field, and of samples where it is None."""
    lacking = tuple(i for i, sample in enumerate(samples) if name not in sample)
    nones = tuple(i for i, sample in enumerate(samples) if sample.get(name, 0) is None)
    return lacking, nones


def _refuse_made(names: Sequence[str]) -> None:
    for name in names:
        if name in MADE:
            raise ConfigError(f"{name} is a field that make_pack adds: drop or rename yours")


def _checked(what: str, numbers: Sequence[int] | Tensor | None) -> list[int]:
    """Check cumulative counts, and return them as a list."""
    if numbers is None:
        raise ConfigError(f"the pack has no {what}: add the bounds of its samples under this name")
    try:
        values = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)
    except (TypeError, ValueError, RuntimeError):
        values = torch.empty(0)
    is_whole = not (values.dtype.is_floating_point or values.dtype.is_complex)
    if values.dim() != 1 or not is_whole or not len(values) or values[0] != 0:
        raise ConfigError(f"{what} must be whole numbers that begin with 0, got {numbers}")
    if (values.long().diff() < 0).any():
        raise ConfigError(f"{what} must not decrease, got {numbers}")
    return values.tolist()


def _attribute(name: str, value: Any, bounds: list[int]) -> Sequence[Any]:
    """Split a field of a foreign pack by its number of rows."""
    num_rows, num_samples, num_tokens = _rows(name, value), len(bounds) - 1, bounds[-1]
    if name in TOKEN_FIELDS:
        return _split(name, value, bounds)
    if num_rows == num_samples == num_tokens and num_samples:
        raise ConfigError(
            f"{name} has {num_rows} rows, and the pack has as many samples as tokens: give the "
            "cumulative counts of its rows in cu_items"
        )
    if num_rows == num_tokens:
        return _split(name, value, bounds)
    return _one_each(name, value, num_samples)


def _split(name: str, value: Any, bounds: list[int], may_be_longer: bool = False) -> Sequence[Any]:
    num_rows = _rows(name, value)
    if num_rows != bounds[-1] and not (may_be_longer and num_rows > bounds[-1]):
        raise ConfigError(
            f"{name} has {num_rows} rows, but cu_seqlens or cu_items ends at {bounds[-1]}: its "
            "last number must be the number of rows"
        )
    return [value[start:end] for start, end in pairwise(bounds)]


def _one_each(name: str, value: Any, num_samples: int) -> Sequence[Any]:
    num_rows = _rows(name, value)
    if num_rows != num_samples:
        raise ConfigError(
            f"{name} has {num_rows} rows, neither one per token nor one per sample: give their "
            "cumulative counts in cu_items"
        )
    keeps_dim = not isinstance(value, list | tuple) and value.ndim > 1
    return [value[i : i + 1] if keeps_dim else value[i] for i in range(num_samples)]


def _rows(name: str, value: Any) -> int:
    if isinstance(value, list | tuple) or (isinstance(value, Tensor | np.ndarray) and value.ndim):
        return len(value)
    raise ConfigError(
        f"{name} is one {type(value).__name__} for the whole pack: drop it, or list one per sample"
    )


# --- fields of samples, joined --------------------------------------------------------------------


def collate_padded(
    samples: Iterable[Sample], *, pad_id: int = 0, ignore_index: int = -100, multiple_of: int = 1
) -> dict[str, Any]:
    """Return the right-padded batch that Qwen-VL, InternVL and other models of transformers need.

    Token fields are padded to (B, L), other tensors with a dim are concatenated along dim 0, 0-dim
    tensors are stacked to (B,) and plain values become lists of B. Fields that are None everywhere,
    and visual fields without rows, are left out. A sample without a token field other than
    ``input_ids`` gets neutral values, as in `make_pack`. Images of any resolution, ``pixel_values``
    (images, patches, C, H, W) whose patches ``image_sizes`` or ``pixel_attention_mask`` count, are
    padded with patches of zeros to the most patches of an image, as their processors do.

    Args:
        samples: Tensors and plain values by name; an empty list gives a batch of shape (0, 0).
        pad_id: Token in the padding.
        ignore_index: Label in the padding, which adds nothing to the loss.
        multiple_of: L is rounded up to a multiple of this.

    Returns:
        The fields of the samples, and ``attention_mask`` (1 token, 0 padding) if they have none.

    Raises:
        ConfigError: Token fields of different lengths; a field whose dtype, shape or kind differs
            between samples; a field without a neutral value that some samples lack; a visual field
            that is not a tensor.
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
    samples = _with_even_patches(samples)
    for name in field_names(samples):
        if all(sample.get(name) is None for sample in samples):
            continue
        if name in TOKEN_FIELDS:
            padded = [
                torch.cat([rows, padding(name, rows, length - len(rows), pad_id, ignore_index)])
                for rows in token_rows(name, samples, lens, ignore_index)
            ]
            batch[name] = torch.stack(padded)
            continue
        value = join(name, samples)[0]
        if name in VISUAL_FIELDS and not isinstance(value, Tensor):
            raise ConfigError(f"{name} must be a tensor for the model; use torch.as_tensor")
        if name not in VISUAL_FIELDS or value.shape[:1].numel():
            batch[name] = value
    return batch


def _with_even_patches(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Pad images with zero patches to the most patches of one, where a field counts patches."""
    samples = [dict(sample) for sample in samples]
    for name, num_dims in _PATCHED_FIELDS.items():
        padded = [
            sample
            for sample in samples
            if {"image_sizes", "pixel_attention_mask"} & sample.keys()
            and isinstance(value := sample.get(name), Tensor)
            and value.dim() == num_dims
        ]
        most = max((sample[name].shape[1] for sample in padded), default=0)
        for sample in padded:
            num_missing = most - sample[name].shape[1]
            sample[name] = functional.pad(sample[name], (0, 0) * (num_dims - 2) + (0, num_missing))
    return samples


def mappings(samples: Iterable[object]) -> list[Sample]:
    """Return samples, or packs, as a list; refuse those that are no mapping."""
    samples = listed("samples", samples)
    for i, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise ConfigError(f"sample {i} is a {type(sample).__name__}; give dicts of fields")
    return samples


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
                    f"{name} of sample {i} has {num_rows} rows, {first} has {length}: give one "
                    f"row per token, or take {name} out of the token fields"
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
            raise ConfigError(f"sample {i} lacks {name}, which others have: give it to all or none")
    return [
        tensors[i] if i in tensors else _filled(name, like, num_rows, neutral[name])
        for i, num_rows in enumerate(lens)
    ]


def padding(name: str, like: Tensor, num_rows: int, pad_id: int, ignore_index: int) -> Tensor:
    """Return padding rows of a token field, with dtype and trailing shape of `like`."""
    value = {"input_ids": pad_id, "labels": ignore_index}.get(name, 0)
    return _filled(name, like, num_rows, value)


def join(name: str, samples: Sequence[Sample]) -> tuple[Any, list[int] | None]:
    """Join a field without token rows; return also its rows per sample, None if it has none."""
    if not any(isinstance(sample.get(name), Tensor) for sample in samples):
        return [sample.get(name) for sample in samples], None
    tensors = _tensors(name, samples)
    if next(iter(tensors.values())).dim():
        counts = [len(tensors[i]) if i in tensors else 0 for i in range(len(samples))]
        return torch.cat(list(tensors.values())), counts
    if len(tensors) < len(samples):
        # Stacked without it, the values would belong to the wrong samples.
        i = min(set(range(len(samples))) - tensors.keys())
        raise ConfigError(f"sample {i} lacks the number {name} of others: give it to all or none")
    return torch.stack(list(tensors.values())), None


def _tensors(name: str, samples: Sequence[Sample]) -> dict[int, Tensor]:
    """Return a field's tensors by sample, of one dtype and shape: torch.cat would promote them."""
    tensors: dict[int, Tensor] = {}
    first_with: dict[tuple[Any, ...], int] = {}  # first sample of each dtype and shape
    for i, sample in enumerate(samples):
        if (value := sample.get(name)) is None:
            continue
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ConfigError(
                f"{name} of sample {i} is a {kind}, of others a tensor: use torch.as_tensor"
            )
        tensors[i] = value
        first_with.setdefault((value.dtype, value.dim(), value.shape[1:]), i)
    if len(first_with) > 1:
        unlike = [
            f"{tensors[i].dtype} {tuple(tensors[i].shape)} in sample {i}"
            for i in first_with.values()
        ]
        raise ConfigError(
            f"{name} is {unlike[0]} and {unlike[1]}; give one dtype, and one shape after dim 0"
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
            f"{name} of sample {i} has the shape {tuple(value.shape)}: give (L,), no batch dim"
        )
    return len(value)


def _filled(name: str, like: Tensor, num_rows: int, value: int) -> Tensor:
    if num_rows and not like.dtype.is_floating_point and not like.dtype.is_complex:
        limits = None if like.dtype == torch.bool else torch.iinfo(like.dtype)
        least, most = (limits.min, limits.max) if limits else (0, 1)
        if not least <= value <= most:
            raise ConfigError(f"{name} is {like.dtype}, which cannot hold {value}; use torch.int64")
    return like.new_full((num_rows, *like.shape[1:]), value if num_rows else 0)
