"""The VAE and the text encoders of a pipeline, computed by the ranks of a replica."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from bascule.comm.groups import RankGroup
from bascule.encoders.encoder import BalancedEncoder, EncoderOptions
from bascule.encoders.items import table_of
from bascule.encoders.tiled_vae import TiledVAE
from bascule.errors import ConfigError
from bascule.plan.costs import PolynomialCost
from bascule.stand_in import Override

_TEXT_ENCODERS = "text_encoder", "text_encoder_2", "text_encoder_3"
_TOKENS = PolynomialCost(quadratic=0.0, linear=1.0, constant=0.0)


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part of a pipeline whose work ranks share, until `remove`."""

    phase: str  # that has most of the work: "encode" or "decode"
    encoder: BalancedEncoder | TiledVAE
    overrides: tuple[Override, ...]  # of the part's methods

    def remove(self) -> None:
        """Let each rank do all of the work."""
        for one in self.overrides:
            one.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let each rank do all of the work within."""
        with ExitStack() as stack:
            for one in self.overrides:
                stack.enter_context(one.paused())
            yield


def shared_parts(pipeline: Any, for_vae: str, for_texts: str) -> list[nn.Module]:
    """Return the modules that ranks share besides the transformers."""
    if pipeline is None:
        return []
    vae = _shared_vae(pipeline, for_vae)
    return [*([] if vae is None else [vae]), *_shared_text_encoders(pipeline, for_texts)]


def _shared_vae(pipeline: Any, for_vae: str) -> nn.Module | None:
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
    if for_texts == "own":
        return []
    encoders = [getattr(pipeline, name, None) for name in _TEXT_ENCODERS]
    modules = [one for one in encoders if isinstance(one, nn.Module)]
    for module in modules:
        if table_of(module).length is None:
            raise ConfigError(
                f"parallelize(.., text_encoders='all'): it is not known how a "
                f"{type(module).__name__} holds prompts; use text_encoders='own'"
            )
    return modules


def share_parts(
    pipeline: Any,
    group: RankGroup,
    for_vae: Literal["all", "first", "own"],
    for_texts: Literal["all", "own"],
    device: torch.device,
) -> Iterator[SharedPart]:
    """Share the tiles of the VAE and the prompts of a batch among ranks; yield each part then."""
    ranks = group.process_group
    vae = _shared_vae(pipeline, for_vae)
    if vae is not None and for_vae != "own":
        settings = EncoderOptions(features_for=for_vae, device=device)
        tiled = encoding = TiledVAE(vae, mesh_or_group=ranks, options=settings)
        if for_vae == "first":  # gets the pixels alone; latents of a photo are for all
            for_all = replace(settings, features_for="all")
            encoding = TiledVAE(vae, mesh_or_group=ranks, options=for_all)
        both = _override(vae, "encode", encoding.encode), _override(vae, "decode", tiled.decode)
        yield SharedPart("decode", tiled, both)
    settings = EncoderOptions(features_for="all", device=device)
    for module in _shared_text_encoders(pipeline, for_texts):
        encoder = BalancedEncoder(module, cost=_TOKENS, mesh_or_group=ranks, options=settings)
        yield SharedPart("encode", encoder, (_override(module, "__call__", encoder.call),))


def _override(module: nn.Module, name: str, shared: Callable[..., Any]) -> Override:
    return Override(module, name, lambda _, *args, **kwargs: shared(*args, **kwargs))
