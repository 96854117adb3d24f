"""The model that the commands train: an MM-DiT under FSDP2, and the cost of its sequences."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,  # pyright: ignore[reportUnknownVariableType]
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bascule.arrays import Floats
from bascule.attention import select_kernel
from bascule.calibrate.blocks import block_of_each_kind, calls_of_model
from bascule.calibrate.timed import Probe, seconds_of
from bascule.comm.collectives import all_reduce
from bascule.comm.groups import device_of, member_of, resolve
from bascule.errors import ConfigError
from bascule.machine.costs import TransformerCost
from bascule.machine.fits import fit_latency
from bascule.models import MMDiT, MMDiTConfig
from bascule.train.options import RunOptions
from bascule.train.streams import Widths

PROBED_STEPS = 3  # first steps, up to whose longest sequence attention is timed
_NUM_PROBES, _REPEATS = 5, 3  # lengths that are timed, and runs of each length


def model_config(options: RunOptions, data: Widths) -> MMDiTConfig:
    """Return the sizes of the model; rotary axes split a head as in FLUX (1 : 3.5 : 3.5)."""
    head_dim = options.d_model // options.num_heads
    plane = 2 * (head_dim * 7 // 32)
    if head_dim % 2 or plane < 2 or head_dim - 2 * plane < 2:
        what = f"--d-model {options.d_model} over --num-heads {options.num_heads}"
        raise ConfigError(f"{what} gives heads of {head_dim}: use an even width of at least 8")
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


def check_kernel(options: RunOptions, config: MMDiTConfig) -> None:
    """Refuse a kernel that cannot compute the model's attention on this machine."""
    select_kernel(
        options.kernel,
        "cuda" if torch.cuda.is_available() else "cpu",
        dtype=getattr(torch, options.dtype),
        head_dim=config.d_model // config.num_heads,
        is_packed=True,
    )


def build_model(
    config: MMDiTConfig, mesh: DeviceMesh, *, seed: int, checkpoint: bool, dtype: torch.dtype
) -> MMDiT:
    """Build an MM-DiT with FSDP2 over its blocks; master weights are float32 at least."""
    model, at_least = MMDiT(config), torch.promote_types(dtype, torch.float32)
    model.init_weights(seed)
    model.to(mesh.device_type, at_least)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=at_least)
    for blocks in (model.double_blocks, model.single_blocks):
        for place, block in enumerate(blocks):
            blocks[place] = checkpoint_wrapper(block) if checkpoint else block
            fully_shard(blocks[place], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def cost_of(
    options: RunOptions, config: MMDiTConfig, longest: Callable[[], int], device: torch.device
) -> TransformerCost:
    """Return the cost of a sequence: fitted to times of the blocks, unless gamma is given.

    All ranks time packs of equal sequences at once, up to the `longest`. All packs have about as
    many tokens as the longest sequence, so only attention differs.
    """
    num_blocks = config.num_double + config.num_single
    sizes = {"num_layers": num_blocks, "num_heads": config.kv_heads}
    if options.gamma is not None:
        return TransformerCost(config.d_model, gamma=options.gamma, **sizes)
    lens = np.unique(np.geomspace(128, max(longest(), 256), _NUM_PROBES).astype(int)).tolist()
    dtype: torch.dtype = getattr(torch, options.dtype)
    model = block_of_each_kind(config, device, dtype)
    weights = config.num_double / num_blocks, config.num_single / num_blocks, 1 / num_blocks
    packs = [[length] * (lens[-1] // length) for length in lens]
    each = [
        sum(
            call.weight * median_seconds(lambda call=call: call.backward()(), device, _REPEATS)
            for call in calls_of_model(model, weights, pack, dtype, options.kernel)
        )
        / len(pack)
        for pack in packs
    ]
    fitted = fit_latency(lens, mean_over_ranks(None, each), config.d_model)
    return replace(fitted, **sizes)


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of the repeated runs, after one to warm up."""
    probe = Probe("work", "run", device.type, 0, 0.0, run)
    return median([seconds_of(probe, device) for _ in range(repeats + 1)][1:])


def mean_over_ranks(
    mesh_or_group: "DeviceMesh | dist.ProcessGroup | None", seconds: Sequence[float]
) -> Floats:
    """Return the mean over ranks of each number of seconds, by one all-reduce."""
    group = member_of(resolve(mesh_or_group), "data")
    local = torch.tensor(seconds, dtype=torch.float64, device=device_of(group))
    return (all_reduce(group, "all_reduce (measured seconds)", local).cpu() / group.size).numpy()
