"""Local ranks: how many there are, where they meet, and what is said of one that fails."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from bascule.cli import launch
from bascule.errors import CommError, ConfigError
from tests.helpers.sockets import listening


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch sets is undone."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_there_is_a_rank_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10**6, 10**6 + 8)))
    assert launch.num_ranks_here(None) == 8
    assert launch.num_ranks_here(3) == 3


def test_ranks_meet_over_loopback_at_a_port_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = dict[str, Any]()

    def main(arguments: list[str]) -> None:
        options = dict(pairwise(arguments))
        host, port = options["--master-addr"], int(options["--master-port"])
        seen["before"] = listening([os.getpid()])[port]
        agent = TCPStore(host, port, 1, True, multi_tenant=True)  # as torchrun makes it
        agent.set("met", "here")
        seen["after"] = listening([os.getpid()])
        rank = TCPStore(host, port, is_master=False, wait_for_workers=False)
        seen["said"] = rank.get("met")
        seen["names"] = [os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")]
        Path(os.environ["BASCULE_RESULT_TO"]).write_text("made")

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setattr(launch.run, "main", main)
    before = listening([os.getpid()])
    assert launch.result_of_ranks(2, ["doctor"]) == "made"
    opened = {port: one for port, one in seen["after"].items() if port not in before}
    assert seen["before"] is True and list(opened.values()) == [True]
    assert seen["said"] == b"here" and seen["names"] == ["lo", "lo"]
    assert listening([os.getpid()]) == before


@pytest.mark.parametrize(
    ("exit_code", "said", "kind", "text"),
    [
        (-9, "", CommError, "rank 1 failed with exit code -9"),
        (2, "", ConfigError, "rank 1 failed with exit code 2"),
        (1, "no sign of life from rank 0", CommError, "rank 1 ended: no sign of life from rank 0"),
    ],
)
def test_what_a_failed_rank_says_of_another_stands_at_last(
    monkeypatch: pytest.MonkeyPatch, exit_code: int, said: str, kind: type[Exception], text: str
) -> None:
    def main(_: list[str]) -> None:
        if said:
            Path(os.environ["BASCULE_RESULT_TO"]).with_name("1").write_text(said)
        raise ChildFailedError("bascule", {1: ProcessFailure(1, 1, exit_code, "/dev/null")})

    monkeypatch.setattr(launch.run, "main", main)
    with pytest.raises(kind) as raised:
        launch.result_of_ranks(2, ["doctor"])
    assert str(raised.value) == text
