"""Centres of rows on an 8-bit wire: what they gain, and that none costs anything."""

import math

import pytest
import torch
from torch import Tensor

from bascule.comm.wire import Format, Wire, take_centres
from tests.helpers.rows import FORMATS, normal, there_and_back, with_offsets


def with_outliers(x: Tensor, factor: float) -> Tensor:
    """Two tokens in fifty are so many times as large, as those that attention sinks into."""
    x = x.clone()
    x[:, :, ::25] *= factor
    return x


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("factor", [10.0, 100.0, 1000.0])
def test_outliers_do_not_spoil_a_centre(fmt: Format, factor: float) -> None:
    plain = normal(2, 4, 500, 64)
    for x, gain in ((plain, 1.02), (with_offsets(plain, 1), 0.8)):
        x = with_outliers(x, factor)
        wire = Wire(fmt).centred(x, x, None)
        usual = torch.ones(500, dtype=torch.bool)
        usual[::25] = False
        errors = [
            (there_and_back(Wire(fmt), x, centre) - x)[:, :, usual].norm()
            for centre in (wire.k_centre, None)
        ]
        assert errors[0] < gain * errors[1]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0, 100.0])
def test_a_centre_that_is_wrong_costs_no_codes(fmt: Format, scale: float) -> None:
    x, centre = normal(1, 2, 1000, 64), scale * normal(1, 2, 1, 64, seed=1)
    x[:, :, ::2] += 8.0 * centre
    errors = [(there_and_back(Wire(fmt), x, c) - x).norm(dim=-1) for c in (centre, None)]
    for some in (slice(0, None, 2), slice(1, None, 2)):
        assert errors[0][..., some].norm() < 1.01 * errors[1][..., some].norm()


def test_rows_that_say_nothing_do_not_count_for_a_centre() -> None:
    x = normal(1, 2, 9, 8) + 3.0
    padded = torch.cat((torch.zeros(1, 2, 30, 8), x, torch.full((1, 2, 2, 8), math.inf)), dim=2)
    found = take_centres(padded, padded[:, :, :0], None)
    torch.testing.assert_close(found[0], x.mean(2, keepdim=True))
    assert not found[1].any()
