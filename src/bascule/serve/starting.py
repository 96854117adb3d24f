"""Start the engine of `bascule generate` and of `bascule serve` as their options say."""

import importlib
from typing import Any

import torch

from bascule.diffusers.degrees import Shape
from bascule.diffusers.request import models_of
from bascule.diffusers.sparse_layers import SparseConfig
from bascule.errors import ConfigError
from bascule.generate.generating import load_pipeline
from bascule.generate.options import EngineOptions
from bascule.serve.engine import Engine


def dtype_of(options: EngineOptions, device: torch.device) -> str:
    """Return the name of the weights' dtype."""
    return options.dtype or ("float32" if device.type == "cpu" else "bfloat16")


def start_pipeline(options: EngineOptions, device: torch.device) -> Any:
    """Load a pipeline with its tiles, cache and offload; ConfigError if it lacks one of them."""
    dtype: torch.dtype = getattr(torch, dtype_of(options, device))
    home = torch.device("cpu") if options.offload else device
    pipeline = load_pipeline(options.model, dtype, home, options.variant)
    if options.tiles:
        try:
            pipeline.vae.enable_tiling()
        except (AttributeError, NotImplementedError):  # diffusers has both
            what = "--tiles: this pipeline has no VAE that can tile"
            raise ConfigError(f"{what}: leave it out") from None
    if options.cache is not None:
        diffusers: Any = importlib.import_module("diffusers")
        name, number = options.cache_of_steps()
        if name == "first-block":
            config = diffusers.FirstBlockCacheConfig(threshold=number)
        else:
            settings = {"cache_interval": number, "taylor_factors_dtype": dtype}
            config = diffusers.TaylorSeerCacheConfig(**settings)
        for model in models_of(pipeline):
            try:
                model.enable_cache(config)  # pyright: ignore[reportCallIssue]
            except Exception as error:  # of a model without caches, or of blocks that it lacks
                what = f"--cache {options.cache}: diffusers does not cache a {type(model).__name__}"
                raise ConfigError(f"{what} ({error}): leave it out") from error
    if options.offload:
        # Streams copy the weights of the next layer meanwhile, and keep their originals.
        streams = {"use_stream": device.type == "cuda"}
        pipeline.enable_group_offload(device, offload_type="leaf_level", **streams)
    return pipeline


def start_engine(
    options: EngineOptions, pipeline: Any, num_groups: int, *, save_every: int = 0
) -> Engine:
    """Start the engine of a pipeline of `start_pipeline`, on all ranks; errors as `Engine`'s."""
    return Engine(
        pipeline,
        timeout_s=options.timeout_s,
        shape=Shape(**options.mesh) if options.mesh else None,
        num_groups=num_groups,
        longest_ring=options.longest_ring,
        sparse=None if options.sparse is None else SparseConfig(keep=options.sparse),
        comm_dtype=options.wire,
        compiles=options.compile,
        shares_tiles=options.tiles,
        save_every=save_every,
    )
