"""Measures what a sequence costs on this device, with the model's own blocks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from bascule.calibrate.blocks import BlockCall, block_of_each_kind, calls_of_model
from bascule.calibrate.timed import Probe, seconds_of
from bascule.comm.collectives import all_reduce
from bascule.comm.groups import device_of, member_of, resolve
from bascule.models import MMDiT, MMDiTConfig
from bascule.plan.costs import TransformerCost
from bascule.plan.fits import fit_latency


def measure_cost(
    config: MMDiTConfig,
    seq_lens: tuple[int, ...],
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str | None = None,
    repeats: int = 3,
) -> TransformerCost:
    """Time forward and backward of the model's blocks on packs of equal sequences; fit their cost.

    All packs hold about as many tokens as the longest sequence. So what a call costs besides, and
    what the size of its tensors does to caches, is alike in all, and not taken for attention. The
    projection after the blocks counts, too: it runs where the blocks do.

    All ranks measure at once, so that what they share (memory, power) is in the result, and use the
    mean of their medians: the same cost everywhere. One all-reduce.

    Args:
        config: The model; one block of each kind that it has is timed.
        seq_lens: Lengths to time, from short to as long as the data.
        device: Where.
        dtype: Of parameters and activations.
        kernel: Attention kernel.
        repeats: Timed runs a length; their median counts.

    Returns:
        Forward cost with `seconds_per_unit` scaled to forward plus backward of the whole model.
    """
    model = block_of_each_kind(config, device, dtype)
    num_blocks = config.num_double + config.num_single
    weights = config.num_double / num_blocks, config.num_single / num_blocks, 1 / num_blocks
    packs = [[length] * (max(seq_lens) // length) for length in seq_lens]
    each = [
        pack_seconds(model, weights, pack, dtype, kernel, repeats) / len(pack) for pack in packs
    ]
    group = member_of(resolve(None), "data")
    call = "all_reduce (measured seconds)"
    own = torch.tensor(each, dtype=torch.float64, device=device_of(group))
    seconds = all_reduce(group, call, own).cpu() / group.size
    fitted = fit_latency(seq_lens, seconds.numpy(), config.d_model)
    return replace(fitted, num_layers=num_blocks)


def pack_seconds(
    model: MMDiT,
    weights: tuple[float, float, float],
    seq_lens: Sequence[int],
    dtype: torch.dtype,
    kernel: str | None,
    repeats: int,
) -> float:
    """Seconds of forward and backward of a pack, by weight: medians of repeats."""
    device = next(model.parameters()).device
    total = 0.0
    for call in calls_of_model(model, weights, seq_lens, dtype, kernel):
        run, size = partial(_forward_backward, call), sum(seq_lens)
        probe = Probe("work", "block", device.type, size, 0.0, run)
        times = [seconds_of(probe, device) for _ in range(repeats + 1)]
        total += call.weight * median(times[1:])
    return total


def _forward_backward(call: BlockCall) -> None:
    call.backward()()
