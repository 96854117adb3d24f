"""A peer that dies or sleeps ends a call: within the timeout, saying where, who and what shapes."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bascule.attention.api import (
    AttentionMesh,
    AttentionOptions,
    SequenceLayout,
    attention,
    gather,
    split,
)
from bascule.comm.guard.failures import ROLL_CALL_S
from tests.helpers.ranks import raised_by, run_to_the_end

TIMEOUT_S = 4.0
VICTIM = 1
Said = tuple[list[str], str, float]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(TIMEOUT_S + ROLL_CALL_S + 2.0)
    die()


def second_call(ring: int, ulysses: int, place: str, on_victim: Callable[[], None]) -> Said:
    """The victim does something else in place of one part of a call; an earlier call went well."""
    device_mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    mesh = AttentionMesh.of(device_mesh, timeout_s=TIMEOUT_S)
    layout = SequenceLayout((5, 18), ring, ulysses)
    local = split(torch.randn(2, 7, 23, 4), mesh, layout, 2).requires_grad_()
    out = attention(local, local, local, mesh, options=AttentionOptions(layout=layout))
    out.sum().backward()
    gather(out.detach(), mesh, layout, 2)
    if place == "backward":
        out = attention(local, local, local, mesh, options=AttentionOptions(layout=layout))
    if dist.get_rank() == VICTIM:
        on_victim()
    start = time.monotonic()
    if place == "gather":
        said = raised_by(gather, out, mesh, layout, 2)
    elif place == "forward":
        said = raised_by(
            attention, local, local, local, mesh, options=AttentionOptions(layout=layout)
        )
    else:
        said = raised_by(out.sum().backward)
    return *said, time.monotonic() - start


NAMES = {
    (3, 1, "forward"): ("ring (keys and values, round", "[ring_attention of (2, 7, "),
    (3, 1, "backward"): ("ring (", "[ring_attention_backward of (2, 7, "),
    (1, 3, "forward"): ("all_to_all (tokens to heads)", "[overlapped_attention of (2, 7, "),
    (1, 3, "backward"): ("all_to_all (tokens to heads)", "[tokens_to_heads of (2, "),
    (1, 3, "gather"): ("all_gather (tokens)", "[gather_tokens of ("),
}


@pytest.mark.some(2)
@pytest.mark.parametrize(("ring", "ulysses", "place"), NAMES)
def test_a_killed_peer_ends_the_others(ring: int, ulysses: int, place: str) -> None:
    outcomes = run_to_the_end(second_call, 3, ring, ulysses, place, die)
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        classes, text, seconds = outcomes[rank].value
        assert "CommError" in classes
        assert all(part in text for part in NAMES[ring, ulysses, place]), text
        assert f"missing: no report from ranks [{VICTIM}]" in text, text
        assert "ranks [0, 1, 2]" in text and "float32]" in text
        assert seconds < TIMEOUT_S + ROLL_CALL_S + 2.0


@pytest.mark.some(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_a_sleeping_peer_ends_the_other(ring: int, ulysses: int) -> None:
    outcomes = run_to_the_end(second_call, 2, ring, ulysses, "forward", sleep)
    assert outcomes[0].error is None, outcomes[0].error
    classes, text, seconds = outcomes[0].value
    assert "CommError" in classes
    assert "ring (" in text if ring > 1 else "all_to_all (tokens to heads)" in text
    assert f"missing: no report from ranks [{VICTIM}]" in text, text
    assert TIMEOUT_S - 1.0 < seconds < TIMEOUT_S + ROLL_CALL_S + 10.0


def late_but_in_time() -> float:
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring",))
    mesh = AttentionMesh.of(device_mesh, timeout_s=TIMEOUT_S)
    q = torch.ones(1, 2, 3, 4)
    attention(q, q, q, mesh)
    time.sleep(1.0 * dist.get_rank())
    return float((attention(q, q, q, mesh) - 1.0).abs().max())


def test_a_late_peer_is_waited_for() -> None:
    assert all(o.error is None and o.value < 1e-6 for o in run_to_the_end(late_but_in_time, 2))
