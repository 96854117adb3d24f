"""On one CUDA device: steps of the packed model, its streams and its memory, in a world of one.

Run with `pytest -m gpu tests/gpu`; without a device everything here is skipped.
"""

import pytest
import torch

from tests.helpers.device_runs import packed_errors, quiet_steps, routed_on_streams, wire_bytes
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="NO CUDA DEVICE: the packed model and streams NOT TESTED",
    ),
]
BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("dtype", "kernel", "allowed"),
    [
        (torch.float64, "plain", 1e-10),
        (torch.float32, "plain", 1e-4),
        (torch.float32, None, 2e-2),
        (torch.bfloat16, None, 0.1),
        (torch.bfloat16, "aten_flash", 0.1),
    ],
)
@pytest.mark.parametrize(
    ("mask", "backend"),
    [(False, BOTH), (True, BOTH), (True, "nccl")],
    ids=["mask on the host", "mask on the device", "NCCL alone"],
)
def test_the_packed_model_and_its_gradients(
    dtype: torch.dtype, kernel: str | None, allowed: float, mask: bool, backend: str
) -> None:
    """With the mask on the host, and on the device, where it is read."""
    args = "cuda", dtype, kernel, mask
    (found,) = run_ranks(packed_errors, 1, *args, backend=backend, timeout_s=300.0)
    assert all(max(errors) < allowed for _, *errors in found), found


def test_rows_come_back_where_streams_use_their_memory_again() -> None:
    assert run_ranks(routed_on_streams, 1, "cuda", 200, backend=BOTH) == [0]


def test_a_training_step_never_makes_the_host_wait() -> None:
    (losses,) = run_ranks(quiet_steps, 1, "cuda", backend=BOTH)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


@pytest.mark.parametrize(("fmt", "allowed"), [("int8", 1 / 254), ("e4m3", 1 / 16)])
def test_the_wire_has_the_bytes_of_the_host(fmt: str, allowed: float) -> None:
    """Where two codes are as near, devices may choose unlike ones."""
    ((alike, error),) = run_ranks(wire_bytes, 1, "cuda", fmt, backend=BOTH)
    assert alike > 0.999 and error < 1.01 * allowed
