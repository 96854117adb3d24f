"""The encoders of a step, in balance: text encoder, then VAE, and packed samples out of both.

Legend of shapes: C channels, f frames of h x w latents or pixels, p side of a patch.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bascule.calibrate.timed import Probe, seconds_of
from bascule.comm.collectives import all_reduce
from bascule.comm.groups import device_of, member_of, resolve
from bascule.encoders import BalancedEncoder, EncoderOptions
from bascule.encoders.plan import Encoding
from bascule.plan.costs import Cost
from bascule.plan.fits import fit_item_latency
from bascule.train.frozen_encoders import (
    LATENT_PATCH,
    FrozenEncoders,
    LatentEncoder,
    TextEncoder,
)
from bascule.train.stopwatch import Stopwatch
from bascule.workload.codes import PATCH_PIXELS
from bascule.workload.photos import mean_text
from bascule.workload.streams import RawBatch, SampleBatch, Widths, pack_batch, sample_normals

TEXT_ENCODER, VAE, TRANSFORMER = "text_encoder", "vae", "transformer"
"""The stages of a step, by the names that all that tells of them uses."""

_LONGEST, _REPEATS = 512, 3  # tokens of a caption that is timed, and how often


class EncoderStages:
    """Encodes the samples of a step, each where there is time; latents and texts come home.

    All ranks make it and call it together. A sample's latents are drawn with numbers of its own,
    so they are the same wherever it is encoded.

    Args:
        encoders: Frozen, the same on all ranks; they are brought to the device.
        mesh_or_group: The ranks that share the work; one of this rank alone encodes what it has.
        widths: Of the tokens that come out.
        seed: Of the run.
        watch: Told the seconds of each stage, by its name.
        options: Of every stage; with a device.
    """

    def __init__(
        self,
        encoders: FrozenEncoders,
        mesh_or_group: "DeviceMesh | dist.ProcessGroup",
        *,
        widths: Widths,
        seed: int,
        watch: Stopwatch,
        options: EncoderOptions,
    ) -> None:
        self._widths, self._seed, self._watch = widths, seed, watch
        self._vae, self._device = encoders.vae, torch.device(options.device or "cpu")
        self._balanced = {
            name: BalancedEncoder(
                module.to(options.device),
                length_fn=module.length,
                cost=_cost_of(module, self._device, mesh_or_group),
                mesh_or_group=mesh_or_group,
                options=options,
            )
            for name, module in stages_of(encoders).items()
        }

    @property
    def last(self) -> dict[str, Encoding | None]:
        """What each stage moved in the last step, by its name; None if no rank had an item."""
        return {name: encoder.last for name, encoder in self._balanced.items()}

    def report(self) -> dict[str, Any]:
        """What each stage moved in the last step, as plain values, by name."""
        return {
            name: {
                "items": encoding.num_items,
                "moved": encoding.num_moved,
                "imbalance": {"loaded": encoding.loaded, "balanced": encoding.balanced},
            }
            for name, encoding in self.last.items()
            if encoding is not None
        }

    @torch.no_grad()
    def encode(self, batches: Sequence[RawBatch]) -> list[SampleBatch]:
        """Encode all microbatches of this rank's step at once.

        Raises:
            As a `BalancedEncoder`, on all ranks.
        """
        ids = [one for batch in batches for one in batch.ids]
        texts = self._embedded([text for batch in batches for text in batch.texts])
        images = self._images([one for batch in batches for one in batch.pixels], ids)
        made, first = list[SampleBatch](), 0
        for batch in batches:
            own = slice(first, first + len(batch.ids))
            made.append(self._packed(batch, images[own], texts[own]))
            first = own.stop
        return made

    def _embedded(self, texts: list[Tensor]) -> list[Tensor]:
        """(tokens, text_dim) of each; a text without tokens is not encoded."""
        texts = [text.to(self._device) for text in texts]
        if TEXT_ENCODER not in self._balanced:
            return texts
        found = iter(self._run(TEXT_ENCODER, [{"input_ids": x[None]} for x in texts if len(x)]))
        none = torch.empty(0, self._widths.text_dim, device=self._device)
        return [_widened(next(found)[0]) if len(text) else none for text in texts]

    def _images(self, pixels: list[Tensor], ids: list[int]) -> list[Tensor]:
        """(tokens, in_channels) of each."""
        pixels = [one.to(self._device) for one in pixels]
        if self._vae is None:
            return [patches(one.float() / 127.5 - 1.0, PATCH_PIXELS) for one in pixels]
        items = [self._vae.items(one) for one in pixels]
        found = iter(self._run(VAE, [item for own in items for item in own]))
        images = list[Tensor]()
        for sample_id, own in zip(ids, items, strict=True):
            features = [_widened(next(found)) for _ in own]
            num = sum(one.numel() for one in features) // 2
            normals = sample_normals([sample_id], [num], 1, seed=self._seed, stream="latent")
            images.append(patches(self._vae.latents(features, normals), LATENT_PATCH))
        return images

    def _run(self, stage: str, items: list[dict[str, Any]]) -> list[Tensor]:
        with self._watch.timed(stage):
            return self._balanced[stage](items)

    def _packed(self, batch: RawBatch, images: list[Tensor], texts: list[Tensor]) -> SampleBatch:
        widths = self._widths
        none = {
            name: torch.empty(0, width, device=self._device)
            for name, width in (("image", widths.in_channels), ("text", widths.text_dim))
        }
        pooled = [mean_text(text)[None] for text in texts]
        return pack_batch(
            batch.shapes,
            image=torch.cat(images or [none["image"]]),
            text=torch.cat(texts or [none["text"]]),
            pooled=torch.cat(pooled or [none["text"]]),
            ids=batch.ids,
        )


def _cost_of(
    module: LatentEncoder | TextEncoder,
    device: torch.device,
    mesh_or_group: "DeviceMesh | dist.ProcessGroup",
) -> Cost:
    """What an item takes: of a VAE as its pixels, of a text encoder as measured by all ranks.

    Captions are short, and each is a call: what a call takes besides its tokens decides.
    """
    if isinstance(module, LatentEncoder):
        return module.cost
    lengths = np.unique(np.geomspace(4, min(module.most_tokens, _LONGEST), 6).round().astype(int))
    seconds = list[float]()
    for length in lengths:
        ids = torch.zeros(1, length, dtype=torch.int64, device=device)
        probe = Probe("work", "caption", device.type, int(length), 0.0, partial(module, ids))
        with torch.no_grad():
            seconds.append(median([seconds_of(probe, device) for _ in range(_REPEATS + 1)][1:]))
    group = member_of(resolve(mesh_or_group), "stages")
    own = torch.tensor(seconds, dtype=torch.float64, device=device_of(group))
    mean = all_reduce(group, "all_reduce (measured seconds)", own).cpu() / group.size
    return fit_item_latency(lengths, mean.numpy())


def stages_of(encoders: FrozenEncoders) -> dict[str, Any]:
    """The encoders that there are, by the names of their stages, in the order in which they run."""
    both = {TEXT_ENCODER: encoders.text, VAE: encoders.vae}
    return {name: module for name, module in both.items() if module is not None}


def watch_encoders(encoders: FrozenEncoders, watch: Stopwatch) -> None:
    """Time what this rank encodes, as "vae work"; the rest of a stage is moves and waiting."""
    for name, module in stages_of(encoders).items():
        begun: list[Any] = []

        def begins(_: nn.Module, args: object, begun: list[Any] = begun) -> None:
            begun[:] = [watch.now()]

        def ends(
            _: nn.Module, args: object, out: object, begun: list[Any] = begun, name: str = name
        ) -> None:
            watch.lap(f"{name} work", begun[0])

        module.register_forward_pre_hook(begins)
        module.register_forward_hook(ends)


def patches(image: Tensor, side: int) -> Tensor:
    """(f h w / p^2, C p^2) tokens of (C, f, h, w): frame by frame, channels first in a token."""
    channels, frames, height, width = image.shape
    cut = image.view(channels, frames, height // side, side, width // side, side)
    return cut.permute(1, 2, 4, 0, 3, 5).reshape(-1, channels * side**2)


def _widened(x: Tensor) -> Tensor:
    """Float32 at least, as all that noise is added to."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
