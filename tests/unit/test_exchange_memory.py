"""The rows of bytes in which tensors travel: aligned, compact, and the same bits on both sides."""

import random

import pytest
import torch
from torch import Tensor

from bascule.comm.exchange import _as_integers, _pack, _part, _row_format
from bascule.comm.groups import Staging

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn),
)
SHAPES = ((), (1,), (3,), (2, 5), (0,), (2, 0))


def random_tensors(draw: random.Random, num_rows: int) -> list[Tensor]:
    tensors: list[Tensor] = []
    for _ in range(draw.randint(1, 6)):
        dtype, shape = draw.choice(DTYPES), draw.choice(SHAPES)
        values = torch.randint(0, 2 if dtype == torch.bool else 256, (num_rows, *shape))
        tensors.append(values.to(dtype))
    return tensors


def pack(tensors: list[Tensor], index: Tensor | None) -> tuple[Tensor, list[Tensor], list[int]]:
    rows = [_as_integers(tensor) for tensor in tensors]
    places, row_bytes = _row_format(rows)
    buffer = _pack(rows, places, row_bytes, index, Staging())
    assert buffer.dtype == torch.uint8 and buffer.shape[1] == row_bytes
    return buffer, rows, places


@pytest.mark.parametrize("seed", range(40))
def test_what_is_packed_can_be_read_back(seed: int) -> None:
    draw = random.Random(seed)
    num_rows = draw.choice((0, 1, 7))
    tensors = random_tensors(draw, num_rows)
    index = None if draw.random() < 0.3 else torch.randperm(num_rows)
    buffer, rows, places = pack(tensors, index)
    for tensor, row, place in zip(tensors, rows, places, strict=True):
        assert place % row.element_size() == 0
        part = _part(buffer, row, place)
        assert torch.equal(part, row if index is None else row[index])
        again = part.contiguous().view(tensor.dtype).view(tensor.shape)
        want = tensor if index is None else tensor[index]
        assert again.dtype == tensor.dtype
        assert torch.equal(_as_integers(again), _as_integers(want))


@pytest.mark.parametrize("seed", range(40))
def test_parts_do_not_overlap_and_waste_less_than_an_element(seed: int) -> None:
    draw = random.Random(100 + seed)
    rows = [_as_integers(tensor) for tensor in random_tensors(draw, 2)]
    places, row_bytes = _row_format(rows)
    used: set[int] = set()
    for row, place in zip(rows, places, strict=True):
        columns = set(range(place, place + row.shape[1] * row.element_size()))
        assert not used & columns
        used |= columns
    assert max(used, default=-1) < row_bytes or not used
    assert row_bytes - len(used) < max(row.element_size() for row in rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nan_payloads_survive(dtype: torch.dtype) -> None:
    carrier = {2: torch.int16, 4: torch.int32, 8: torch.int64}[torch.empty(0, dtype=dtype).itemsize]
    bits = torch.tensor([[-1], [-2], [torch.iinfo(carrier).max]], dtype=carrier)
    tensor = bits.view(dtype)
    assert bool(tensor.isnan().all())
    buffer, rows, places = pack([tensor, torch.zeros(3, dtype=torch.bool)], torch.tensor([2, 0, 1]))
    part = _part(buffer, rows[0], places[0])
    assert torch.equal(part, bits[[2, 0, 1]])


def test_views_with_pending_operations() -> None:
    z = torch.randn(4, 3, dtype=torch.complex64)
    for view, plain in (
        (z.conj(), z.conj_physical()),
        (z.conj().imag, -z.imag),
        (z.T.conj(), z.T.conj_physical()),
    ):
        assert torch.equal(_as_integers(view), _as_integers(plain.contiguous()))
