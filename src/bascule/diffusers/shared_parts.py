"""The VAE and the text encoders of a pipeline, computed by the ranks of a replica."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from bascule.comm.groups import RankGroup
from bascule.encoders.encoder import BalancedEncoder, EncoderOptions
from bascule.encoders.installed import InPlace
from bascule.encoders.items import table_of
from bascule.encoders.tiled_vae import TiledVAE
from bascule.errors import ConfigError
from bascule.plan.costs import PolynomialCost

_TEXT_ENCODERS = "text_encoder", "text_encoder_2", "text_encoder_3"
_TOKENS = PolynomialCost(quadratic=0.0, linear=1.0, constant=0.0)


def shared_parts(pipeline: Any, for_vae: str, for_texts: str) -> list[nn.Module]:
    """Return the modules that ranks share of a pipeline besides its transformers; none of None.

    Raises:
        ConfigError: An option cannot be honoured.
    """
    if pipeline is None:
        return []
    vae = _shared_vae(pipeline, for_vae)
    return [*([] if vae is None else [vae]), *_shared_text_encoders(pipeline, for_texts)]


def _shared_vae(pipeline: Any, for_vae: str) -> nn.Module | None:
    """The VAE whose tiles ranks are to share; None where each computes its own.

    Raises:
        ConfigError: Only the first rank is to get the pixels, and there are no tiles.
    """
    vae = getattr(pipeline, "vae", None)
    if not isinstance(vae, nn.Module) or for_vae == "own":
        return None
    if for_vae == "first" and hasattr(pipeline, "video_processor"):
        raise ConfigError(
            f"parallelize(.., vae='first') and a {type(pipeline).__name__}, which cannot put "
            "together a video of no frames on the other ranks: use vae='all'"
        )
    if getattr(vae, "use_tiling", False):
        return vae
    if for_vae == "first":
        raise ConfigError(
            f"parallelize(.., vae='first') and a {type(vae).__name__} without tiling, so every "
            "rank decodes whole images: call pipeline.vae.enable_tiling() before parallelize"
        )
    return None


def _shared_text_encoders(pipeline: Any, for_texts: str) -> list[nn.Module]:
    """The text encoders whose prompts ranks are to share.

    Raises:
        ConfigError: It is not known what the prompts of one are.
    """
    if for_texts == "own":
        return []
    found = [getattr(pipeline, name, None) for name in _TEXT_ENCODERS]
    encoders = [one for one in found if isinstance(one, nn.Module)]
    for encoder in encoders:
        if table_of(encoder).length is None:
            raise ConfigError(
                f"parallelize(.., text_encoders='all'): it is not known how a "
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
    pipeline: Any,
    group: RankGroup,
    for_vae: Literal["all", "first", "own"],
    for_texts: Literal["all", "own"],
    device: torch.device,
) -> Iterator[SharedPart]:
    """Let the ranks of a replica share the tiles of the VAE, and the prompts of a batch.

    Args:
        pipeline: Of diffusers; the same on all of them.
        group: The replica.
        for_vae: As `vae` of `parallelize`.
        for_texts: As `text_encoders` of `parallelize`.
        device: Where the pipeline computes.

    Yields:
        Each of them, as soon as it is shared.
    """
    ranks = group.process_group
    vae = _shared_vae(pipeline, for_vae)
    if vae is not None and for_vae != "own":
        of_vae = EncoderOptions(features_for=for_vae, device=device)
        tiled = TiledVAE(vae, mesh_or_group=ranks, options=of_vae)
        encode = tiled.encode
        if for_vae == "first":  # gets the pixels alone; latents of a photo are for all
            for_all = replace(of_vae, features_for="all")
            encode = TiledVAE(vae, mesh_or_group=ranks, options=for_all).encode
        ways = {"encode": encode, "decode": tiled.decode}
        yield SharedPart("decode", tiled, pipeline, vae, ways)
    of_texts = EncoderOptions(features_for="all", device=device)
    for module in _shared_text_encoders(pipeline, for_texts):
        encoder = BalancedEncoder(module, cost=_TOKENS, mesh_or_group=ranks, options=of_texts)
        yield SharedPart("encode", encoder, pipeline, module, {"__call__": encoder.call})
