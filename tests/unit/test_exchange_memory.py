"""The rows of bytes in which tensors travel are compact; memory of exchanges is used again."""

import random
import threading

import pytest
import torch
from torch import Tensor

from bascule.comm.exchange import _as_integers, _row_format
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


@pytest.mark.parametrize("seed", range(40))
def test_parts_do_not_overlap_and_waste_less_than_an_element(seed: int) -> None:
    draw = random.Random(100 + seed)
    rows = [_as_integers(tensor) for tensor in random_tensors(draw, 2)]
    places, row_bytes = _row_format(rows)
    used: set[int] = set()
    for row, place in zip(rows, places, strict=True):
        columns = set(range(place, place + row.shape[1] * row.element_size()))
        assert place % row.element_size() == 0 and not used & columns
        used |= columns
    assert max(used, default=-1) < row_bytes or not used
    assert row_bytes - len(used) < max(row.element_size() for row in rows)


def test_memory_is_used_again_and_grows() -> None:
    staging = Staging()
    first = staging.take("sent", (8,), torch.empty(0, dtype=torch.float32))
    assert first.shape == (8,) and first.dtype == torch.float32
    again = staging.take("sent", (4,), torch.empty(0, dtype=torch.float64))
    assert again.shape == (4,) and again.data_ptr() == first.data_ptr()
    # As many elements of a wider dtype need more room.
    wider = staging.take("sent", (8,), torch.empty(0, dtype=torch.float64))
    wider.fill_(1.0)
    assert wider.shape == (8,) and bool((wider == 1.0).all())
    # What is kept of a role is never of the memory that it had before it grew.
    same = staging.take("sent", (8,), torch.empty(0, dtype=torch.float32))
    assert same.shape == (8,) and same.data_ptr() == wider.data_ptr()
    other = staging.take("received", (8,), wider)
    assert other.data_ptr() != wider.data_ptr()


def test_memory_taken_in_inference_mode_can_be_written_outside() -> None:
    staging = Staging()
    with torch.inference_mode():
        staging.take("sent", (8,), torch.empty(0, dtype=torch.uint8)).fill_(0)
    kept = staging.take("sent", (8,), torch.empty(0, dtype=torch.uint8))
    assert not kept.is_inference()
    assert bool((kept.copy_(torch.ones(8)) == 1).all())


def test_each_thread_has_memory_of_its_own() -> None:
    staging, found = Staging(), list[int]()

    def take() -> None:
        found.append(staging.take("sent", (8,), torch.empty(0)).data_ptr())

    take()
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert found[0] != found[1]
