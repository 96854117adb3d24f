"""Local ranks: how many there are, where they meet, and what is said of one that fails."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.elastic.multiprocessing.api import SignalException
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
    ("exit_code", "note", "said", "kind", "text"),
    [
        (-9, "1", "", CommError, "rank 1 failed with exit code -9"),
        (2, "1", "", ConfigError, "rank 1 failed with exit code 2"),
        (1, "1", "no sign of rank 0", CommError, "rank 1 ended: no sign of rank 0"),
        (0, "refused", "--spool a: full", ConfigError, "--spool a: full"),  # in vain again
    ],
)
def test_what_a_failed_rank_says_stands_at_last(
    monkeypatch: pytest.MonkeyPatch, exit_code: int, note: str, said: str, kind: Any, text: str
) -> None:
    def main(arguments: list[str]) -> None:
        assert dict(pairwise(arguments))["--max-restarts"] == "3"
        if said:
            Path(os.environ["BASCULE_RESULT_TO"]).with_name(note).write_text(said)
        if exit_code:
            raise ChildFailedError("bascule", {1: ProcessFailure(1, 1, exit_code, "/dev/null")})

    monkeypatch.setattr(launch.run, "main", main)
    with pytest.raises(kind) as raised:
        launch.result_of_ranks(2, ["serve"], 3)
    assert str(raised.value) == text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_ranks_are_ready_ends_them_at_once(number: signal.Signals) -> None:
    with launch.forwarding_stops():
        Path(os.environ["BASCULE_PIDS_IN"], "0.99999999").touch()  # of one that is gone
        with pytest.raises(SignalException) as raised:
            signal.raise_signal(number)
    assert raised.value.sigval == number


def test_each_start_of_the_ranks_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store that has the keys of an earlier start."""
    shared, timeout = HashStore(), timedelta(seconds=30)
    place = threading.local()
    monkeypatch.setattr(launch.dist, "rendezvous", lambda *_, **__: iter([(shared, place.rank, 3)]))

    def meet(rank: int) -> Any:
        place.rank = rank
        found = launch._meeting(timeout)
        assert not found["store"].check([f"{rank}"])
        found["store"].set(f"{rank}", "here")
        return found

    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            ranks = list(pool.map(meet, range(3)))
        assert [(found["rank"], found["world_size"]) for found in ranks] == [(0, 3), (1, 3), (2, 3)]
        assert all(found["store"].check(["0", "1", "2"]) for found in ranks)
