"""How far data travels: files that a steady call enters, and functions of the library it calls."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bascule
from bascule.attention.api import attention
from tests.helpers.cases import COST
from tests.helpers.mesh_cases import make_mesh
from tests.helpers.ranks import run_ranks

ROOT = str(Path(bascule.__file__).parent)

# By use: files, calls. Upper limits; lower them when a path becomes shorter.
MOST = {
    "attend": (14, 118),
    "attend_grad": (14, 239),
    "plan": (23, 172),
    "route": (10, 69),
    "mesh": (16, 149),
}


def traced(call: Callable[[], object]) -> tuple[int, int]:
    """Files and calls of the fourth time."""
    for _ in range(3):
        call()
    files, num_calls = set[str](), 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_calls
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.add(frame.f_code.co_filename)
            num_calls += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(files), num_calls


def trips() -> dict[str, tuple[int, int]]:
    lens = [[1000, 30, 7], [64]][dist.get_rank()]
    parallel = bascule.SequenceParallel(None, "g2n1", COST)
    step = parallel.plan(lens)
    x = torch.randn(sum(lens), 4, 8)
    rows = step.route(x=x)["x"]
    mesh, q = make_mesh(1, 2), torch.randn(1, 4, 16, 8)

    def attend_grad() -> None:
        step.attend(rows.clone().requires_grad_(), rows, rows).sum().backward()

    return {
        "attend": traced(lambda: step.attend(rows, rows, rows)),
        "attend_grad": traced(attend_grad),
        "plan": traced(lambda: parallel.plan(lens)),
        "route": traced(lambda: step.route(x=x)),
        "mesh": traced(lambda: attention(q, q, q, mesh)),
    }


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger counts too")
def test_steady_calls_pass_through_few_files_and_functions() -> None:
    for found in run_ranks(trips, 2):
        for name, (files, calls) in found.items():
            assert files <= MOST[name][0] and calls <= MOST[name][1], (name, files, calls)
