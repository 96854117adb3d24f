"""The VAE and the text encoders of a pipeline, computed by the ranks of a replica."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bascule.comm.groups import RankGroup
from bascule.diffusers.inference_options import InferenceOptions
from bascule.encoders.encoder import BalancedEncoder, EncoderOptions
from bascule.encoders.installed import InPlace
from bascule.encoders.items import table_of
from bascule.encoders.tiled_vae import TiledVAE
from bascule.errors import ConfigError
from bascule.plan.costs import PolynomialCost

_TEXT_ENCODERS = "text_encoder", "text_encoder_2", "text_encoder_3"
_TOKENS = PolynomialCost(quadratic=0.0, linear=1.0, constant=0.0)


def shared_parts(pipeline: Any, options: InferenceOptions) -> list[nn.Module]:
    """What ranks are to share of a pipeline besides its transformers; nothing of None.

    Raises:
        ConfigError: An option cannot be honoured.
    """
    if pipeline is None:
        return []
    vae = _shared_vae(pipeline, options)
    return [*([] if vae is None else [vae]), *_shared_text_encoders(pipeline, options)]


def _shared_vae(pipeline: Any, options: InferenceOptions) -> nn.Module | None:
    """The VAE whose tiles ranks are to share; None where each computes its own.

    Raises:
        ConfigError: Only the first rank is to get the pixels, and there are no tiles.
    """
    vae = getattr(pipeline, "vae", None)
    if not isinstance(vae, nn.Module) or options.vae == "own":
        return None
    if options.vae == "first" and hasattr(pipeline, "video_processor"):
        raise ConfigError(
            f"InferenceOptions(vae='first') and a {type(pipeline).__name__}, which cannot put "
            "together a video of no frames on the other ranks: use vae='all'"
        )
    if getattr(vae, "use_tiling", False):
        return vae
    if options.vae == "first":
        raise ConfigError(
            f"InferenceOptions(vae='first') and a {type(vae).__name__} without tiling, so every "
            "rank decodes whole images: call pipeline.vae.enable_tiling() before parallelize"
        )
    return None


def _shared_text_encoders(pipeline: Any, options: InferenceOptions) -> list[nn.Module]:
    """The text encoders whose prompts ranks are to share.

    Raises:
        ConfigError: It is not known what the prompts of one are.
    """
    if options.text_encoders == "own":
        return []
    found = [getattr(pipeline, name, None) for name in _TEXT_ENCODERS]
    encoders = [one for one in found if isinstance(one, nn.Module)]
    for encoder in encoders:
        if table_of(encoder).length is None:
            raise ConfigError(
                f"InferenceOptions(text_encoders='all'): it is not known how a "
                f"{type(encoder).__name__} holds prompts; use text_encoders='own'"
            )
    return encoders


class SharedPart:
    """A part of a pipeline whose work ranks share, until `undo`.

    Attributes:
        phase: In which most of that work is: "encode" or "decode".
        encoder: Shares it, and knows what its last call moved.

    Args:
        pipeline: Of diffusers.
        module: The part; stays as it is.
        methods: What is called in place of the part's own methods, by name.
    """

    def __init__(
        self,
        phase: str,
        encoder: BalancedEncoder | TiledVAE,
        pipeline: Any,
        module: nn.Module,
        methods: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.phase, self.encoder = phase, encoder
        self._is_paused = False
        calls = {
            name: partial(self._call, getattr(module, name), shared)
            for name, shared in methods.items()
        }
        self._in_place = InPlace(pipeline, module, calls)

    def undo(self) -> None:
        """Put the part back; what somebody else kept of this shares nothing more."""
        self._is_paused = True
        self._in_place.undo()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Each rank does all of the work."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _call(
        self, own: Callable[..., Any], shared: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return (own if self._is_paused else shared)(*args, **kwargs)


def share_parts(
    pipeline: Any, group: RankGroup, options: InferenceOptions, device: torch.device
) -> Iterator[SharedPart]:
    """Let the ranks of a replica share the tiles of the VAE, and the prompts of a batch.

    Args:
        pipeline: Of diffusers; the same on all of them.
        group: The replica.
        options: What is shared.
        device: Where the pipeline computes.

    Yields:
        Each of them, as soon as it is shared.
    """
    ranks = group.process_group
    vae = _shared_vae(pipeline, options)
    if vae is not None and options.vae != "own":
        of_vae = EncoderOptions(features_for=options.vae, device=device)
        tiled = TiledVAE(vae, mesh_or_group=ranks, options=of_vae)
        encode = tiled.encode
        if options.vae == "first":  # gets the pixels alone; latents of a photo are for all
            for_all = replace(of_vae, features_for="all")
            encode = TiledVAE(vae, mesh_or_group=ranks, options=for_all).encode
        ways = {"encode": encode, "decode": tiled.decode}
        yield SharedPart("decode", tiled, pipeline, vae, ways)
    of_texts = EncoderOptions(features_for="all", device=device)
    for module in _shared_text_encoders(pipeline, options):
        encoder = BalancedEncoder(module, cost=_TOKENS, mesh_or_group=ranks, options=of_texts)
        yield SharedPart("encode", encoder, pipeline, module, {"__call__": encoder.call})
