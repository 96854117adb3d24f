"""Measures what a sequence costs on this device, with the model's own blocks."""

import time
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn

from bascule.attention import PackedSequences, attend_packed
from bascule.comm.groups import device_of, member_of, resolve
from bascule.comm.guard.calls import Call
from bascule.comm.transfers import all_reduce
from bascule.models import LocalExchange, MMDiT, MMDiTConfig
from bascule.plan.costs.cost_models import TransformerCost
from bascule.plan.costs.fit_latency import fit_latency


def measure_cost(
    config: MMDiTConfig,
    seq_lens: tuple[int, ...],
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str | None = None,
    repeats: int = 3,
) -> TransformerCost:
    """Time forward and backward of the model's blocks on single sequences and fit their cost.

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
    num_blocks = config.num_double + config.num_single
    small = replace(
        config, num_double=min(1, config.num_double), num_single=min(1, config.num_single)
    )
    model = MMDiT(small).to(device, dtype)
    model.init_weights(0)
    weights = (config.num_double, config.num_single)
    seconds = torch.tensor(
        [
            _block_seconds(model, weights, length, dtype, kernel, repeats) / num_blocks
            for length in seq_lens
        ],
        dtype=torch.float64,
    )
    group = member_of(resolve(None), "data")
    call = Call("all_reduce (measured seconds)", form=f"lengths {seq_lens}")
    seconds = all_reduce(group, call, seconds.to(device_of(group))).cpu() / group.size
    fitted = fit_latency(seq_lens, seconds.numpy(), config.d_model)
    return replace(fitted, num_layers=num_blocks)


def _block_seconds(
    model: MMDiT,
    weights: tuple[int, int],
    length: int,
    dtype: torch.dtype,
    kernel: str | None,
    repeats: int,
) -> float:
    """Seconds of forward and backward of all blocks, from one block of each kind."""
    device = next(model.parameters()).device
    seqs = PackedSequences.build([length], device)

    def attend(q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        return attend_packed(q, k, v, seqs, kernel=kernel)

    exchange = LocalExchange([length], attend=attend, device=device)
    is_image = torch.arange(length, device=device) >= length // 8
    pos = torch.zeros(length, len(model.config.axes_dim), device=device)
    layout = model.layout(is_image, pos, exchange.token_slot)
    x = torch.randn(length, model.config.d_model, device=device, dtype=dtype)
    vec = torch.randn(1, model.config.d_model, device=device, dtype=dtype)
    text, image = layout.interleaving.split(x)

    def run(blocks: nn.ModuleList, *inputs: Tensor) -> float:
        if not blocks:
            return 0.0
        times = [_timed(blocks[0], inputs, vec, layout, attend) for _ in range(repeats + 1)]
        return median(times[1:])

    return weights[0] * run(model.double_blocks, text, image) + weights[1] * run(
        model.single_blocks, x
    )


def _timed(block: nn.Module, inputs: tuple[Tensor, ...], *args: object) -> float:
    leaves = [x.detach().requires_grad_() for x in inputs]
    _synchronize(leaves[0].device)
    start = time.perf_counter()
    outputs = block(*leaves, *args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward([out.float().sum() for out in outputs])
    _synchronize(leaves[0].device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
