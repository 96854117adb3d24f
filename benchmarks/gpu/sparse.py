"""Block-sparse attention over its share of the fastest dense attention.

24 heads of 128 and 32,768 tokens, blocks of 64 and 128 that are seen at random, as in
`sparse_kernel.py`: the worst case, as no two query blocks see the same. Dense attention is
every kernel of the registry that fits, on the same tokens, in the same rounds; the fastest counts.
A ratio is seconds over (density x seconds of that one). Outputs of a head are compared with dense
masked attention in float64.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from measuring import ratio
from sparse import check, mask_rows
from torch import Tensor

from bascule.attention.kernels.protocol import Attended, AttentionKernel
from bascule.attention.kernels.registry import KERNELS, select_kernel
from bascule.attention.mask import EVERYTHING, AttentionMask
from bascule.errors import ConfigError
from gpu.measuring import Case, Row, Setting, Target, Timed, timed, told
from gpu.shapes import config_of

NUM_TOKENS = 32_768
BLOCKS, DENSITIES = (128, 64), (0.4, 0.1)
TARGET = Target(1.25, at_least=False)
TOO_LARGE = ("plain",)
"""Holds all scores: 100 GB of them."""

Found = dict[str, AttentionKernel]


def cases(setting: Setting) -> Iterator[Case]:
    """A case for each block size and density, forward and backward."""
    for block in setting.pick(BLOCKS, (16,)):
        yield Case(f"kernels for blocks of {block}", partial(left_out, setting, block))
        for density in DENSITIES:
            what = f"blocks of {block}, density {density}"
            yield Case(what, partial(measured, setting, block, density))


def measured(setting: Setting, block: int, density: float) -> list[Row]:
    """Forward and backward of one mask, by every kernel that fits."""
    heads, width, tokens = _shape(setting)
    mask = np.random.default_rng(0).random((heads, *(tokens // block,) * 2)) < density
    mask |= np.eye(tokens // block, dtype=np.bool_)  # every query sees something
    seen, share = AttentionMask(blocks=mask_rows(mask, block)), float(mask.mean())
    kind = {"device": setting.device, "dtype": setting.dtype}
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, tokens, width, **kind) for _ in range(4)]
    packed = [x.view(1, 1, -1, width) for x in whole]
    dense, sparse = fitting(setting, None)[0], fitting(setting, block)[0]
    label, rows = f"blocks of {block}, density {share:.3f}", list[Row]()
    for name, kernel in list(sparse.items()):
        try:
            out, _ = kernel.forward(*_three(packed), seen, width**-0.5)
            one, *given = (x[0, -1].cpu() for x in (out.reshape(whole[0].shape), *whole[:3]))
            check(one, given, mask[-1], width**-0.5)
        except Exception as error:  # of whatever kernel: the others are measured
            rows.append(Row(f"{label}, {name}", reason=f"failed: {told(error)}"))
            del sparse[name]
    for direction in ("forward", "backward"):
        make = _forward if direction == "forward" else _backward
        calls = {f"dense {n}": make(k, whole, EVERYTHING) for n, k in dense.items()}
        calls |= {n: make(k, packed, seen) for n, k in sparse.items()}
        found = timed(setting, calls, queued=True)
        best = found.fastest(f"dense {name}" for name in dense)
        rows += _ratios(f"{direction}, {label}", found, best, list(sparse), share)
        rows += found.reasons(f"{direction}, {label}")
        rows.append(_dense_row(setting, direction, found, best))
    return rows


def left_out(setting: Setting, block: int) -> list[Row]:
    """Why kernels for GPUs are not among those that are measured."""
    reasons = fitting(setting, None)[1] | fitting(setting, block)[1]
    return [Row(f"{name}, blocks of {block}", reason=why) for name, why in reasons.items()]


def fitting(setting: Setting, block: int | None) -> tuple[Found, dict[str, str]]:
    """The kernels for such a call, and why others for GPUs do not compute it."""
    found, reasons = Found(), dict[str, str]()
    head_dim = config_of(setting, 1, 1).head_dim
    kind: dict[str, Any] = {"dtype": setting.dtype, "head_dim": head_dim, "block": block}
    for name in KERNELS:
        if name in TOO_LARGE and not setting.is_tiny:
            continue
        try:
            found[name] = select_kernel(name, setting.device.type, **kind)
        except ConfigError as error:
            is_of_kind = (name == "triton") == (block is not None)
            if is_of_kind and not name.startswith("cpu"):
                reasons[name] = told(error)
    return found, reasons


def _ratios(
    label: str, found: Timed, best: str | None, sparse: Sequence[str], share: float
) -> list[Row]:
    """Over density times dense, by kernel; the target is for the fastest."""
    first, rows = found.fastest(sparse), list[Row]()
    if best is None:
        return [Row(label, reason="no dense kernel ran")]
    expected = [share * seconds for seconds in found.seconds[best]]
    for name in sparse:
        if name not in found.seconds:
            continue
        spread = ratio(found.seconds[name], expected)
        quartiles = spread["lower_quartile"], spread["upper_quartile"]
        target = TARGET if name == first else None
        details = {"seconds": found.median(name), "dense": best, "dense_s": found.median(best)}
        row = Row(f"{label}, {name}", "x density x dense", spread["median"], quartiles, target)
        rows.append(Row(row.what, row.unit, row.value, row.quartiles, target, details))
    return rows


def _dense_row(setting: Setting, direction: str, found: Timed, best: str | None) -> Row:
    """What dense attention does, so that its own speed can be judged."""
    what = f"{direction}, dense attention"
    if best is None:
        return Row(what, reason="no dense kernel ran")
    heads, width, tokens = _shape(setting)
    products = 2 if direction == "forward" else 5
    flops = products * 2 * heads * tokens**2 * width
    shares = [flops / each / setting.best.matmul_flops_per_s for each in found.seconds[best]]
    every = {name: found.median(name) for name in found.seconds if name.startswith("dense ")}
    what = f"{direction}, {best} attention"
    return Row.of(what, "of the matmul rate", shares, flops=flops, seconds=every)


def _forward(kernel: AttentionKernel, x: list[Tensor], mask: AttentionMask) -> Callable[[], object]:
    scale = x[0].shape[-1] ** -0.5
    return lambda: kernel.forward(*_three(x), mask, scale)


def _backward(
    kernel: AttentionKernel, x: list[Tensor], mask: AttentionMask
) -> Callable[[], object]:
    """The backward alone, of a forward that is computed at the first call."""
    scale, kept = x[0].shape[-1] ** -0.5, list[Attended]()

    def backward() -> object:
        if not kept:
            out, lse = kernel.forward(*_three(x), mask, scale)
            kept.append(Attended(*_three(x), out, lse, mask, scale))
        return kernel.backward(x[3], kept[0])

    return backward


def _three(x: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return x[0], x[1], x[2]


def _shape(setting: Setting) -> tuple[int, int, int]:
    """Heads, their width, tokens."""
    config = config_of(setting, 1, 1)
    return config.num_heads, config.head_dim, setting.pick(NUM_TOKENS, 256)
