"""Two nodes on one machine: training across a link that is cut, and the same training resumed.

Each node is a network namespace, and the link a pair of virtual interfaces: needs root, iproute2.
"""

import ctypes
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from bascule import SequenceParallel, TransformerCost
from bascule.train import train_step
from tests.helpers.faults import Fault, Striker, write_down
from tests.helpers.ranks import run_ranks, run_to_the_end

NODES = ("bascule-a", "bascule-b")
PER_NODE, NUM_RANKS = 2, 4
ADDRESS, PORT, TIMEOUT_S = "10.77.0.{}", 29511, 6.0
WIDTH, HEADS, NUM_STEPS, DONE = 8, 4, 5, 3


def cut(place: str, rank: int, nth: int = 1) -> Fault:
    """In the step after those that are done; ranks 0 and 1 are on the node of the store."""
    return Fault("cut", place, rank, NUM_RANKS, step=DONE + 1, nth=nth)


NO_CUT = cut("nowhere", 0)
CUTS = [
    cut("all_gather (plan)", 2),
    cut("all_to_all (route)", 3),
    cut("all_to_all (tokens to heads) posted", 1),
    cut("all_to_all (route back)", 0),
    cut("all_to_all (heads to tokens)", 2, nth=2),  # in the backward
    cut("all-reduce", 1),
    cut("save", 0),
]
_CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


@pytest.fixture
def nodes() -> Iterator[None]:
    """Two namespaces, joined by a link."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("NOT RUN: two nodes need root and iproute2")
    try:
        for node in NODES:
            ip("netns", "add", node)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"NOT RUN: no network namespaces here: {error.stderr.strip()}")
    try:
        first, second = ("-n", NODES[0]), ("-n", NODES[1])
        ip(*first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", NODES[1])
        for number, node in enumerate((first, second), 1):
            ip(*node, "addr", "add", f"{ADDRESS.format(number)}/24", "dev", "eth0")
            for name in ("lo", "eth0"):
                ip(*node, "link", "set", name, "up")
        yield
    finally:
        for node in NODES:
            ip("netns", "del", node)


def join_node() -> None:
    """Leave the world of the test; go to this rank's node, and join the world across both."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    node = Path("/run/netns", NODES[rank // PER_NODE])
    with node.open() as file:  # of this thread, and of all that it starts
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot join {node}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    where = f"tcp://{ADDRESS.format(1)}:{PORT}"
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", where, timeout=limit, rank=rank, world_size=NUM_RANKS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, parallel: SequenceParallel, lens: list[int]) -> Tensor:
        step = parallel.plan(lens)
        x = step.route(x=x)["x"]
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(1)
        x = self.out(step.attend(q, k, v).flatten(1)).tanh()
        return step.mean(step.restore(x).square())


def trained(folder: str, fault: Fault) -> list[Tensor]:
    """Train to the end, from the last step that was saved."""
    join_node()
    rank, saved, now = dist.get_rank(), Path(folder, "state.pt"), [0]
    striker = Striker(fault, Path(folder), rank)
    bare = Model()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.05)
    first = 0
    if saved.exists():
        state = torch.load(saved)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    model = DistributedDataParallel(bare)
    hook = striker.hits(allreduce_hook, "all-reduce", lambda: now[0])
    model.register_comm_hook(None, hook)
    parallel = SequenceParallel(None, "g4n1", TransformerCost(WIDTH), timeout_s=TIMEOUT_S)
    with striker.in_calls():
        for number in range(first, NUM_STEPS):
            now[0] = number + 1
            draw = torch.Generator().manual_seed(10 * number + rank)
            lens = torch.randint(1, 9, (2,), generator=draw).tolist()
            x = torch.randn(sum(lens), WIDTH, generator=draw, dtype=torch.float64)
            striker.at("a step", now[0])
            train_step(model, [lambda model, x=x, lens=lens: model(x, parallel, lens)])
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                striker.at("save", now[0])
                state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": number + 1}, saved.with_suffix(".new"))
                saved.with_suffix(".new").replace(saved)
    return [parameter.detach() for parameter in bare.parameters()]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(cut("a step", 0), id="a step"),
        *(pytest.param(one, id=str(one), marks=pytest.mark.stress) for one in CUTS),
    ],
)
def test_a_link_is_cut_and_training_goes_on_from_the_last_step(
    fault: Fault, nodes: None, tmp_path: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        folder.mkdir()
    wanted = run_ranks(trained, NUM_RANKS, str(whole), NO_CUT)
    ended = run_to_the_end(trained, NUM_RANKS, str(stopped), fault)
    seconds = time.monotonic() - float((stopped / "struck").read_text())
    write_down(fault, seconds)
    for outcome in ended:
        assert outcome.error is not None
        assert "did not end" not in outcome.error
        assert outcome.exit_code is None, "a rank did not say why it ended"
        told = outcome.error[outcome.error.rindex("Error: ") :]
        assert re.search("no report from ranks|the store is gone with its host", told), told
    assert seconds < 60
    done = DONE + (fault.place == "save")
    assert torch.load(stopped / "state.pt")["step"] == done
    for node in NODES:
        ip("-n", node, "link", "set", "eth0", "up")
    again = run_ranks(trained, NUM_RANKS, str(stopped), NO_CUT)
    for one, other in zip(again, wanted, strict=True):
        for got, want in zip(one, other, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
