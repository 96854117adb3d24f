"""On one CUDA device: what the loader pins, and costs learned by events.

Run with `pytest -m gpu tests/gpu`; without a device everything here is skipped.
"""

import pytest
import torch

from tests.helpers.device_runs import learned, loaded
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: the loader NOT TESTED"
    ),
]
BOTH = "cpu:gloo,cuda:nccl"


def test_what_is_pinned_is_whole_on_the_device() -> None:
    (found,) = run_ranks(loaded, 1, "cuda", backend=BOTH)
    assert len(found) == 120
    assert all(is_pinned and is_whole for _, is_pinned, is_whole in found)


def sleep(num_tokens: int) -> None:
    """Keep the device busy, for longer with more tokens; the host goes on."""
    torch.cuda._sleep(20_000 * num_tokens)


def test_costs_are_learned_by_events() -> None:
    """The host does nothing that takes time: who times the host learns nothing."""
    ((num_fits, costs),) = run_ranks(learned, 1, "cuda", sleep, backend=BOTH)
    assert num_fits >= 1
    assert 0 < 5 * costs[0] < costs[1] < costs[2] / 5
