"""The device at its best: a copy within its memory, and products of large matrices.

Copies of 2 GiB: bytes read and written over seconds. Products: 2 M N K floating point operations
over seconds; a cube of 8,192, and the shapes of FLUX's linear layers for 16,384 tokens. The fastest
shape is the rate that other topics are compared with.
"""

from collections.abc import Iterator

import torch

from gpu.measuring import Card, Case, Row, Setting, Timed, timed

SHAPES = ((8192, 8192, 8192), (16384, 3072, 12288), (16384, 12288, 3072), (16384, 3072, 9216))
COPIED = 2**30  # bytes read, and as many written
COPY = "copy within the device's memory"


def cases(setting: Setting) -> Iterator[Case]:
    """One: both are the scale of everything else."""
    yield Case("device", lambda: rows(setting))


def rows(setting: Setting) -> list[Row]:
    """Bandwidth, and the rate of each shape."""
    copies, products = _copies(setting), _products(setting)
    written = setting.pick(COPIED, 2**20)
    rates = [2 * written / seconds / 1e9 for seconds in copies.seconds[COPY]]
    found = [Row.of(COPY, "GB/s", rates, bytes=2 * written)]
    for shape in _shapes(setting):
        flops = 2 * shape[0] * shape[1] * shape[2]
        rates = [flops / seconds / 1e12 for seconds in products.seconds[str(shape)]]
        label = "matmul of {} x {} by {}".format(*shape)
        found.append(Row.of(label, "TFLOP/s", rates, flops=flops))
    return found


def card_of(found: list[Row]) -> Card:
    """What the rows of this topic come to."""
    values = [row.value for row in found if row.value is not None]
    return Card(values[0] * 1e9, max(values[1:]) * 1e12)


def measure(setting: Setting) -> Card:
    """The card alone, as when all else was measured."""
    return card_of(rows(setting))


def drift(before: Card, after: Card) -> dict[str, float]:
    """What the second measurement of the same card came to, over the first."""
    return {
        "copy": after.copy_bytes_per_s / before.copy_bytes_per_s,
        "matmul": after.matmul_flops_per_s / before.matmul_flops_per_s,
    }


def _shapes(setting: Setting) -> tuple[tuple[int, int, int], ...]:
    return setting.pick(SHAPES, ((64, 64, 64), (128, 32, 64)))


def _copies(setting: Setting) -> Timed:
    size = setting.pick(COPIED, 2**20)
    source = torch.empty(size, dtype=torch.uint8, device=setting.device).random_()
    target = torch.empty_like(source)
    return timed(setting, {COPY: lambda: target.copy_(source)}, queued=True)


def _products(setting: Setting) -> Timed:
    calls = {}
    for rows_, inner, columns in _shapes(setting):
        kind = {"device": setting.device, "dtype": setting.dtype}
        a, b = torch.randn(rows_, inner, **kind), torch.randn(inner, columns, **kind)
        out = torch.empty(rows_, columns, **kind)
        calls[str((rows_, inner, columns))] = lambda a=a, b=b, out=out: torch.mm(a, b, out=out)
    return timed(setting, calls, queued=True)
