"""The model that the commands train: an MM-DiT for some data, sharded by FSDP2."""

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,  # pyright: ignore[reportUnknownVariableType]
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bascule.errors import ConfigError
from bascule.models import MMDiT, MMDiTConfig
from bascule.train.run_options import RunOptions
from bascule.workload.streams import Widths


def model_config(options: RunOptions, data: Widths) -> MMDiTConfig:
    """The model for some data; rotary axes share the head width as FLUX's do (1 : 3.5 : 3.5).

    Raises:
        ConfigError: Sizes do not fit each other.
    """
    if options.num_heads < 1 or options.d_model % options.num_heads:
        raise ConfigError(
            f"--num-heads {options.num_heads} does not divide --d-model {options.d_model}"
        )
    head_dim = options.d_model // options.num_heads
    plane = 2 * (head_dim * 7 // 32)
    if head_dim % 2 or plane < 2 or head_dim - 2 * plane < 2:
        raise ConfigError(
            f"--d-model {options.d_model} over --num-heads {options.num_heads} gives heads of "
            f"{head_dim}: use an even width of at least 8"
        )
    return MMDiTConfig(
        in_channels=data.in_channels,
        text_dim=data.text_dim,
        vec_dim=data.vec_dim,
        d_model=options.d_model,
        num_heads=options.num_heads,
        num_double=options.num_double,
        num_single=options.num_single,
        axes_dim=(head_dim - 2 * plane, plane, plane),
    )


def build_model(
    config: MMDiTConfig,
    mesh: DeviceMesh,
    *,
    seed: int,
    checkpoint: bool,
    dtype: torch.dtype,
) -> MMDiT:
    """An MM-DiT with FSDP2 over its blocks; master weights in float32 at least."""
    model = MMDiT(config)
    model.init_weights(seed)
    model.to(mesh.device_type, torch.promote_types(dtype, torch.float32))
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32)
    )
    for blocks in (model.double_blocks, model.single_blocks):
        for place, block in enumerate(blocks):
            blocks[place] = checkpoint_wrapper(block) if checkpoint else block
            fully_shard(blocks[place], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
