"""Batches of packed samples for a diffusion transformer, and a synthetic stream of them.

Legend of shapes: N samples on this rank; Ti image tokens, Tt text tokens, T = Ti + Tt packed tokens
(text 1, image 1, text 2, ...); C channels of an image token. Noise and timestep depend on the seed
and the sample's id, not on the rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bascule.arrays import Ints
from bascule.checks import whole
from bascule.errors import ConfigError
from bascule.workload.codes import (
    DataCode,
    SampleShape,
    check_world,
    keyed_generator,
    parse_data_codes,
    rank_lengths,
)
from bascule.workload.manifest import Manifest

_NUM_WAVES = 8
_TEXT_NOISE = 0.5
_IMAGE_NOISE = 0.1
_MAX_STEPS = 2**31
_MAX_RANKS = 2**16
_MAX_SAMPLES = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class SampleBatch:
    """The samples of one rank and step, packed without padding. Zero samples are legal."""

    image: Tensor  # (Ti, C) float32 at least, clean image tokens (x0), samples one after the other
    text: Tensor  # (Tt, text_dim) float32 at least, text embeddings, samples one after the other
    is_image: Tensor  # (T,) bool, True for an image token
    pos: Tensor  # (T, 3) float32, (frame, row, column) of an image token; zeros for text
    pooled: Tensor  # (N, vec_dim) float32 at least, one text vector per sample
    sample_ids: Tensor  # (N,) int64, unique over ranks and steps of a run
    seq_lens: list[int]  # text and image tokens of each sample
    image_lens: list[int]  # image tokens of each sample


@dataclass(frozen=True, slots=True, eq=False)
class RawBatch:
    """The samples of one rank and step as pixels and captions, which encoders turn into tokens."""

    shapes: list[SampleShape]  # of each sample, once it is encoded
    ids: list[int]  # of each sample, unique over ranks and steps of a run
    pixels: list[Tensor]  # of each sample, (3, frames, height, width) uint8
    texts: list[Tensor]  # of each, (L,) int64 tokens to be encoded, or (L, text_dim) embeddings


class Widths(Protocol):
    """The widths of data that a model is built for."""

    in_channels: int  # channels C of an image token
    text_dim: int  # width of a text embedding
    vec_dim: int  # width of a sample's pooled text vector


class SampleStream(Widths, Protocol):
    """Batches of one rank; each is a pure function of its step."""

    def batch(self, step: int) -> SampleBatch:
        """Return this rank's batch of a step (0 or more)."""
        ...


def pack_batch(
    shapes: Sequence[SampleShape],
    *,
    image: Tensor,
    text: Tensor,
    pooled: Tensor,
    ids: Sequence[int],
) -> SampleBatch:
    """Make a `SampleBatch` of packed tensors; the shapes give token order and positions."""
    text_lens = [shape.text_tokens for shape in shapes]
    image_lens = [shape.image_tokens for shape in shapes]
    runs = torch.tensor([text_lens, image_lens], dtype=torch.int64).T.flatten()
    is_image = torch.tensor([False, True]).repeat(len(shapes)).repeat_interleave(runs)
    pos = torch.zeros(len(is_image), 3)
    pos[is_image] = image_positions(shapes)
    return SampleBatch(
        image=image,
        text=text,
        is_image=is_image,
        pos=pos,
        pooled=pooled,
        sample_ids=torch.tensor(ids, dtype=torch.int64),
        seq_lens=[shape.seq_len for shape in shapes],
        image_lens=image_lens,
    )


def pack_encoded(
    raw: RawBatch, images: list[Tensor], texts: list[Tensor], widths: Widths
) -> SampleBatch:
    """Join image tokens and text embeddings of each sample; its pooled vector is their mean."""
    means = [text.sum(dim=0, keepdim=True) / max(len(text), 1) for text in texts]
    parts = (images, widths.in_channels), (texts, widths.text_dim), (means, widths.vec_dim)
    image, text, pooled = (torch.cat(rows) if rows else torch.empty(0, dim) for rows, dim in parts)
    return pack_batch(raw.shapes, image=image, text=text, pooled=pooled, ids=raw.ids)


def patches(image: Tensor, side: int) -> Tensor:
    """Cut (C, f, h, w) into (f h w / p^2, C p^2) tokens: frame by frame, channels first."""
    channels, frames, height, width = image.shape
    cut = image.view(channels, frames, height // side, side, width // side, side)
    return cut.permute(1, 2, 4, 0, 3, 5).reshape(-1, channels * side**2)


def image_positions(shapes: Sequence[SampleShape]) -> Tensor:
    """Return raster positions (frame, row, column) of all image tokens, (Ti, 3) float32."""
    lens = np.array([shape.image_tokens for shape in shapes], dtype=np.int64)
    frame_lens = np.array([shape.image_tokens // shape.frames for shape in shapes], dtype=np.int64)
    widths = np.array([shape.grid_width for shape in shapes], dtype=np.int64)
    index = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
    frame, in_frame = np.divmod(index, np.repeat(frame_lens, lens))
    row, column = np.divmod(in_frame, np.repeat(widths, lens))
    return torch.from_numpy(np.stack([frame, row, column], axis=1).astype(np.float32))


def sample_normals(
    sample_ids: Sequence[int], lens: Sequence[int], channels: int, *, seed: int, stream: str
) -> Tensor:
    """Draw normal rows (sum(lens), channels) float32, which depend on seed, stream and id alone."""
    rows = np.empty((sum(lens), channels), dtype=np.float32)
    start = 0
    for sample_id, num_rows in zip(sample_ids, lens, strict=True):
        generator = keyed_generator(seed, stream, sample_id)
        generator.standard_normal(out=rows[start : start + num_rows], dtype=np.float32)
        start += num_rows
    return torch.from_numpy(rows)


def flow_noise(batch: SampleBatch, *, seed: int) -> Tensor:
    """Draw rectified-flow noise of a batch's image tokens, (Ti, C) float32 on the CPU."""
    ids, channels = batch.sample_ids.tolist(), batch.image.shape[1]
    return sample_normals(ids, batch.image_lens, channels, seed=seed, stream="noise")


def flow_timesteps(batch: SampleBatch, *, seed: int) -> Tensor:
    """Draw each sample's timestep, (N,) float32 in (0, 1) on the CPU, logit-normal (0, 1).

    Source: Stable Diffusion 3 (Esser et al. 2024), section 3.1.
    """
    ids = batch.sample_ids.tolist()
    return sample_normals(ids, [1] * len(ids), 1, seed=seed, stream="timestep")[:, 0].sigmoid()


class _Waves:
    """Makes learnable samples of any shapes.

    A sample has a hidden prompt of eight numbers. Its image tokens are eight fixed waves over the
    positions, weighted by the prompt; its text tokens are the prompt in another basis; both with
    noise.
    """

    in_channels = text_dim = vec_dim = 64

    def __init__(self, rank: int, seed: int) -> None:
        self.rank, self.seed = rank, seed
        self._frequencies = _table("freq", 3, _NUM_WAVES) * 0.3
        self._to_image, self._to_text, self._to_pooled = (
            _table(name, _NUM_WAVES, 64) * _NUM_WAVES**-0.5 for name in ("image", "text", "pooled")
        )

    def _made(self, shapes: Sequence[SampleShape], ids: Sequence[int]) -> SampleBatch:
        normals = partial(sample_normals, ids, seed=self.seed)
        prompt = normals([1] * len(shapes), _NUM_WAVES, stream="prompt")
        text_lens = [shape.text_tokens for shape in shapes]
        image_lens = [shape.image_tokens for shape in shapes]
        text_prompt, image_prompt = (
            prompt.repeat_interleave(torch.tensor(lens, dtype=torch.int64), dim=0)
            for lens in (text_lens, image_lens)
        )
        waves = _product(image_positions(shapes), self._frequencies).cos() * 2**0.5
        text_noise = normals(text_lens, self.text_dim, stream="text")
        image_noise = normals(image_lens, self.in_channels, stream="image")
        return pack_batch(
            shapes,
            image=_product(image_prompt * waves, self._to_image) + _IMAGE_NOISE * image_noise,
            text=_product(text_prompt, self._to_text) + _TEXT_NOISE * text_noise,
            pooled=_product(prompt, self._to_pooled),
            ids=ids,
        )


class SyntheticStream(_Waves):
    """Learnable samples with the lengths of data codes.

    If there are more ranks than in the mix, the others are replicas with other samples.
    """

    def __init__(
        self,
        codes: str | Sequence[DataCode],
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        self.codes = parse_data_codes(codes) if isinstance(codes, str) else tuple(codes)
        check_world(self.codes, world_size)
        whole("rank", rank, 0, world_size - 1)
        if any(code.batch_size >= _MAX_SAMPLES for code in self.codes) or world_size > _MAX_RANKS:
            most = f"at most {_MAX_RANKS}, of less than {_MAX_SAMPLES} samples"
            raise ConfigError(f"{world_size} ranks: use {most}")
        super().__init__(rank, seed)

    def batch(self, step: int) -> SampleBatch:
        """Return this rank's batch of a step, a pure function of (codes, seed, step, rank)."""
        whole("step", step, 0, _MAX_STEPS - 1)
        shapes = rank_lengths(self.codes, self.rank, seed=self.seed, step=step)
        first = (step * _MAX_RANKS + self.rank) * _MAX_SAMPLES
        return self._made(shapes, range(first, first + len(shapes)))


class ManifestStream(_Waves):
    """Learnable samples with the lengths of a data set, in an order drawn anew each epoch."""

    def __init__(
        self, manifest: Manifest, batch_size: int, *, rank: int, world_size: int, seed: int = 0
    ) -> None:
        super().__init__(rank, seed)
        self._manifest, self._batch_size, self._world_size = manifest, batch_size, world_size
        self.data_lines = manifest.summary()
        self._order = EpochOrder(len(manifest), seed)

    def batch(self, step: int) -> SampleBatch:
        """Return this rank's share of the ``world_size * batch_size`` samples of a step."""
        first = (step * self._world_size + self.rank) * self._batch_size
        numbers = range(first, first + self._batch_size)
        shapes = [self._manifest.shape(sample) for sample in self._order.samples(numbers)]
        return self._made(shapes, numbers)


class EpochOrder:
    """The order of samples over all epochs; each epoch draws its own order."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples, self._seed = num_samples, seed
        self._orders: dict[int, Ints] = {}  # by epoch, of the epochs of the last call

    def samples(self, numbers: Sequence[int]) -> list[int]:
        """Return the sample at each place of the order."""
        size, before = self._num_samples, self._orders
        self._orders = {
            epoch: before[epoch]
            if epoch in before
            else keyed_generator(self._seed, "epoch", epoch).permutation(size)
            for epoch in {number // size for number in numbers}
        }
        return [int(self._orders[number // size][number % size]) for number in numbers]


def _product(rows: Tensor, table: Tensor) -> Tensor:
    """Multiply rows by a small matrix; rounding does not depend on the number of rows (as BLAS)."""
    product = rows[:, :1] * table[0]
    for column in range(1, len(table)):
        product = torch.addcmul(product, rows[:, column : column + 1], table[column])
    return product


def _table(name: str, rows: int, columns: int) -> Tensor:
    """Return a fixed table of normals, the same in every run."""
    return sample_normals([0], [rows], columns, seed=0, stream=f"t_{name}")
