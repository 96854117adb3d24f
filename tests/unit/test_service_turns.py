"""A service whose ranks are played: which requests get them, and what stays of those that ended."""

import queue
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from opentelemetry.context import Context
from PIL import Image

from bascule.errors import ConfigError
from bascule.generate.options import Lora, Prompt
from bascule.plan.requests import Balanced, Block
from bascule.serve import service as service_module
from bascule.serve.options import ServeOptions
from bascule.serve.orders import Event, Orders
from bascule.serve.post import Ticket
from bascule.serve.service import Service
from bascule.serve.spool import Spool
from bascule.serve.status import Busy, Closing, Key, Refusal, Reused, Status, Unknown
from bascule.serve.times import Times

RANKS = 2


class Ranks(Orders):
    """The ranks of an engine, which do what a test says, and not what they are told."""

    def __init__(self) -> None:
        self.num_ranks, self.events = RANKS, queue.SimpleQueue[Event]()
        self.world_size, self.loaded = RANKS, list[str]()
        self.running, self.is_alive = dict[str, Block](), True
        self.begun = dict[str, dict[str, Any] | torch.Tensor]()  # what requests began with

    def keep(
        self, request_id: str, arguments: dict[str, Any] | torch.Tensor, seed: int, lora: Any = ()
    ) -> Ticket:
        del seed, lora
        self.begun[request_id] = arguments
        return Ticket(0, request_id, 0)

    def run(self, batch: str, block: Block, members: Sequence[tuple[str, Ticket]]) -> None:
        del batch
        self.running |= {request_id: block for request_id, _ in members}

    def adapt(self, number: str, name: str, path: str | None, digest: str | None) -> None:
        """Follow, unless the file is wrong."""
        self.loaded += [] if path is None else [name]
        reason = "it does not fit" if path and Path(path).read_text() == "wrong" else ""
        for rank in range(RANKS):
            self.events.put(Event("adapter", number, 0.0, Block(rank, 1), reason=reason))

    def _send(self, *_: Any, **__: Any) -> None:
        """Go on: a request ends before its next step."""

    def are_alive(self) -> bool:
        return self.is_alive

    def leave(self, name: str, kind: str = "done", **facts: Any) -> None:
        """Let a request end."""
        facts = {"output": [Image.new("RGB", (8, 8))], "reason": "why"} | facts
        self.events.put(Event(kind, name, time.monotonic(), self.running.pop(name), **facts))


class Pipeline:
    """A pipeline by its signature and configuration alone."""

    def __init__(self) -> None:
        self.transformer: Any = torch.nn.Identity()
        self.transformer.config = SimpleNamespace(num_attention_heads=4, num_layers=2)

    def __call__(self, prompt: str, num_inference_steps: int = 4, output_type: str = "pil") -> None:
        """Take a prompt."""


@contextmanager
def serving(
    folder: Path, *, reason: str = "", saved_by: str = "", loras: Any = None, **options: Any
) -> Iterator[tuple[Service, Ranks]]:
    """A service on the spool of a folder, whose ranks end for a reason, or well."""
    ranks, pipeline, spool = Ranks(), Pipeline(), Spool(folder, "one")
    facts: dict[str, Any] = {"policy": Balanced(), "times": Times(pipeline, [1, 2])}
    facts |= {"saved_by": saved_by, "loras": loras}
    service = Service(pipeline, ranks, spool, ServeOptions(batch=1, **options), **facts)
    service.start()
    try:
        yield service, ranks
    finally:
        ranks.end(reason)
        service.close()


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def ask(service: Service, *names: str) -> dict[str, str]:
    """Ids of new requests by prompt."""
    statuses = service.submit([Prompt(prompt=name) for name in names])
    return {name: one.id for name, one in zip(names, statuses, strict=True)}


def made(service: Service) -> list[str]:
    """Ids of requests whose outputs are being written."""
    return [task.id for task in service._scheduler.tasks.values() if task.phase == "made"]


def play(service: Service, ranks: Ranks, deadly: str) -> list[list[str]]:
    """Run requests until all have ended or the deadly one runs; who ran together, in order."""
    ran = list[list[str]]()
    while True:
        until(lambda: ranks.running or all(one.has_ended for one in service.statuses()))
        time.sleep(0.05)  # others may start, too
        if not ranks.running:
            return ran
        names = {one.id: one.prompt.prompt for one in service.statuses()}
        ran.append(sorted(names[one] for one in ranks.running))
        if deadly in ran[-1]:
            return ran
        one = min(ranks.running)
        ranks.leave(one)
        until(lambda one=one: service.status(one).has_ended)


def test_a_request_that_ends_its_ranks_fails_and_all_others_are_done(tmp_path: Path) -> None:
    """At its second death it ran alone, so no other that ran beside it at the first one fails."""
    lives, ids, states, reason = list[list[list[str]]](), dict[str, str](), dict[str, str](), ""
    for life in range(3):
        with serving(tmp_path, reason="rank 0 is gone") as (service, ranks):
            if life == 0:
                ids = ask(service, "deadly", "beside")
                until(lambda: len(ranks.running) == 2)
                ids |= ask(service, "good 1", "good 2")
            lives.append(play(service, ranks, "deadly"))
            states = {name: service.status(one).state for name, one in ids.items()}
            reason = service.status(ids["deadly"]).reason
    assert lives[0] == [["beside", "deadly"]]
    together, (first, *rest) = lives[1], lives[1]
    assert set(first) <= {"good 1", "good 2"} and together[-1] == ["deadly"]
    assert all(len(one) == 1 for one in rest if {"beside", "deadly"} & set(one))
    assert lives[2] == [["beside"]]
    assert states == {"deadly": "failed", "beside": "done", "good 1": "done", "good 2": "done"}
    assert reason.startswith("its ranks ended 2 times while it ran, at last alone: see why")


def test_a_request_goes_on_from_its_saved_state(tmp_path: Path) -> None:
    """The newest one, by the same version; one that ends while its state is written leaves none."""
    states, bits, written = tmp_path / "states", torch.arange(16, dtype=torch.uint8), list[str]()
    with serving(tmp_path, reason="rank 1 is gone", saved_by="us") as (service, ranks):
        ids = ask(service, "long", "short")
        until(lambda: len(ranks.running) == 2)
        write, goes_on = service._spool.save, threading.Event()

        def slow(request_id: str, *state: Any) -> None:
            assert goes_on.wait(60)
            written.append(request_id)
            write(request_id, *state)

        with mock.patch.object(service._spool, "save", slow):
            for name, state in (("short", bits), ("long", bits + 1), ("long", bits)):
                block = ranks.running[ids[name]]
                ranks.events.put(Event("saved", ids[name], 0.0, block, output=state))
            until(lambda: service._states.keys() == {ids["long"]})
            ranks.events.put(Event("asked", "", 0.0, Block(0, RANKS)))
            until(ranks.events.empty)
            service.cancel(ids["short"])
            goes_on.set()
            service._jobs.writer.submit(int).result()
        assert written == [ids["short"], ids["long"]]
        assert [path.stem for path in states.iterdir()] == [ids["long"]]
    for saved_by in ("us", "others"):
        with serving(tmp_path, saved_by=saved_by) as (service, ranks):
            until(lambda ranks=ranks: ranks.running)
            begun = ranks.begun[ids["long"]]
            assert list(ranks.running) == [ids["long"]]
            if saved_by == "us":
                assert isinstance(begun, torch.Tensor) and torch.equal(begun, bits)
            else:
                assert isinstance(begun, dict) and begun["prompt"] == "long"


def test_a_saved_state_of_another_adapter_or_rate_is_not_used(tmp_path: Path) -> None:
    """A file of the same name may be another one at the next start."""
    state, (one,) = torch.arange(16, dtype=torch.uint8), (Lora("style"),)
    first: dict[str, Any] = {"loras": {"style": "digest 1"}, "fps": 16}
    changes: list[dict[str, Any]] = [{}, {"loras": {"style": "digest 2"}}, {"fps": 24}]
    for place, change in enumerate(changes):
        with serving(tmp_path / str(place), reason="rank 1 is gone", **first) as (service, ranks):
            (asked,) = service.submit([Prompt(prompt="a", lora=(one,))])
            until(lambda ranks=ranks: ranks.running)
            block = ranks.running[asked.id]
            ranks.events.put(Event("saved", asked.id, 0.0, block, output=state))
            states = tmp_path / str(place) / "states"
            until(lambda states=states: [*states.glob("*.state")])
        with serving(tmp_path / str(place), **{**first, **change}) as (service, ranks):
            until(lambda ranks=ranks: ranks.running)
            assert isinstance(ranks.begun[asked.id], torch.Tensor) == (place == 0), change


def test_adapters_that_clients_loaded_are_there_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the folder no longer has, or what no longer fits, is told once."""
    (folder := tmp_path / "loras").mkdir()
    options: dict[str, Any] = {"lora_folder": folder, "loras": {"own": "digest"}}
    for name in ("a", "b", "c", "d"):
        (folder / f"{name}.safetensors").write_text(name)
    (folder / "odd.safetensors").write_text("wrong")
    with serving(tmp_path / "spool", reason="rank 1 is gone", **options) as (service, _):
        for name in "dabc":
            service.load_lora(name).result(60)
        service.remove_lora("b").result(60)
        with pytest.raises(ConfigError, match="it does not fit"):
            service.load_lora("odd").result(60)
        assert service.loras() == ["a", "c", "d", "own"]
        for name, status in (("a", 409), ("none", 404)):
            with pytest.raises(Refusal) as refused:
                service.load_lora(name)
            assert (refused.value.status, refused.value.param) == (status, "name")
    (folder / "c.safetensors").unlink()
    (folder / "d.safetensors").write_text("wrong")
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
    for _ in range(2):
        with serving(tmp_path / "spool", **options) as (service, ranks):
            until(lambda service=service: service.loras() == ["a", "own"])
            assert ranks.loaded[-1] == "a"
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert sorted(told) == [
        "LoRA 'c' is gone: there is no LoRA 'c' in this server's folder",
        "it does not fit",
    ]


def test_a_stop_and_a_loss_of_power_count_against_nobody(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, ranks):
        ask(service, "long")
    for _ in range(3):
        with serving(tmp_path) as (service, ranks):
            until(lambda: ranks.running)
    boots = [str(number) for number in range(4)]
    for boot in boots:
        with mock.patch("bascule.serve.spool._BOOT_ID", tmp_path / boot):
            (tmp_path / boot).write_text(boot)
            with serving(tmp_path, reason="no power") as (service, ranks):
                until(lambda: ranks.running)
    with serving(tmp_path, reason="rank 1 is gone") as (service, ranks):
        until(lambda: ranks.running)
        ranks.is_alive = False
        service.stop()  # by the launcher, as a rank has died
        assert [entry.starts for entry in service._spool.waiting()] == [1]
    with serving(tmp_path) as (service, ranks):
        play(service, ranks, "")
        (status,) = service.statuses()
        assert status.state == "done"


def test_a_key_makes_nothing_twice_in_any_life(tmp_path: Path) -> None:
    """Until its requests are removed; and pages go through those that wait and those that ended."""
    prompts, key = [Prompt(prompt="a"), Prompt(prompt="b")], Key("k", "digest")

    def submit(service: Service) -> list[str]:
        return [one.id for one in service.submit(prompts, key=key)]

    with serving(tmp_path) as (service, ranks):
        ids = submit(service)
        assert submit(service) == ids and len(service.statuses()) == 2
        other = ask(service, "c")["c"]
        assert [one.id for one in service.page(9)] == [other, *ids[::-1]]
        with pytest.raises(Reused, match="Idempotency-Key k: came before with another call"):
            service.submit(prompts, key=Key("k", "other"))
        until(lambda: ids[0] in ranks.running)
        ranks.leave(ids[0])
        until(lambda: service.status(ids[0]).has_ended)
        service.stop()
        assert submit(service) == ids  # it is no new request
        with pytest.raises(Closing):
            service.submit(prompts, key=Key("new", "digest"))
    with serving(tmp_path) as (service, _):
        assert submit(service) == ids
        pages = service.page(2, None, True), service.page(2, ids[1], True)
        assert [[one.id for one in page] for page in pages] == [ids, [other]]
        assert [one.state == "done" for one in pages[0]] == [True, False]
        assert [one.id for one in service.page(1, other)] == [ids[1]]
        service.delete(ids[0])
        again = submit(service)
        assert len(again) == 2 and not set(again) & set(ids)
        with pytest.raises(Unknown):
            service.page(9, ids[0])


def test_a_disk_that_takes_no_outputs_ends_what_begins(tmp_path: Path) -> None:
    """Ranks do not go on to fill the memory; health names no file."""
    full = OSError(28, "No space left on device", str(tmp_path / "secret"))
    with serving(tmp_path) as (service, ranks):
        with mock.patch.object(service_module, "write_media", side_effect=full):
            ids = ask(service, *map(str, range(12)))
            for _ in range(RANKS + 1):
                until(lambda: ranks.running)
                ranks.leave(min(ranks.running))
            until(service.health)
            while ranks.running:
                ranks.leave(min(ranks.running))
            time.sleep(0.3)
            assert not ranks.running and len(made(service)) <= 2 * RANKS + 1
            assert service.health() == "the disk cannot store outputs: No space left on device"
        play(service, ranks, "")
        assert {service.status(one).state for one in ids.values()} == {"done"}
        with mock.patch.object(service_module, "write_media", side_effect=TypeError("odd")):
            (odd,) = ask(service, "odd").values()
            play(service, ranks, "")
        assert service.status(odd).reason == "its output cannot be written: TypeError: odd"
        ranks.end(f"RuntimeError: {tmp_path} is gone")
        until(service.health)
        assert service.health() == "the ranks of the server have ended"


def test_what_has_ended_is_removed_when_asked_or_old_or_too_much(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, ranks):
        ids = ask(service, "a", "b", "c", "wrong")
        until(lambda: ids["a"] in ranks.running)
        assert service.delete(ids["wrong"]).state == "cancelled"
        play(service, ranks, "")
        path = service.result(ids["a"])
        assert path.stat().st_mode & 0o777 == 0o600
        assert service.delete(ids["a"]).state == "done" and not path.exists()
        for call in (service.status, service.result, service.delete):
            with pytest.raises(Unknown):
                call(ids["a"])
        assert {one.prompt.prompt for one in service.statuses()} == {"b", "c", "wrong"}
        paths = [service.result(ids[name]) for name in "bc"]
    size = paths[0].stat().st_size
    with serving(tmp_path, keep_gb=1.5e-9 * size) as (service, ranks):
        until(lambda: len(list(paths[0].parent.iterdir())) == 1)
        until(lambda: len(service.statuses()) < 3)
        (kept,) = [one for one in service.statuses() if one.state == "done"]
        assert service.result(kept.id).exists()
    with serving(tmp_path, keep_days=1e-9) as (service, ranks):
        until(lambda: not service.statuses())
        assert not list(paths[0].parent.iterdir())
        ask(service, "d")
        until(lambda: ranks.running)  # what has not ended stays


def test_a_request_that_is_written_counts_no_start_more(tmp_path: Path) -> None:
    """Ranks that end meanwhile end by another; nor does one that runs at a stop count any."""
    is_written = threading.Event()
    with mock.patch.object(service_module, "write_media", lambda *_: is_written.wait(60)):
        with serving(tmp_path, reason="rank 0 is gone") as (service, ranks):
            ids = ask(service, "a", "b", "c")
            until(lambda: len(ranks.running) == RANKS)
            first = min(ranks.running)
            ranks.leave(first)
            until(lambda: first in made(service) and len(ranks.running) == RANKS)
            starts = {one.status.id: one.starts for one in service._spool.waiting()}
            assert starts[first] == 0 and all(starts[one] == 1 for one in ranks.running)
            service.stop()
            assert {one.starts for one in service._spool.waiting()} == {0}
            assert len(ids) == 3
            is_written.set()


def test_a_cancelled_request_that_the_disk_refuses_may_be_cancelled_again(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, ranks):
        ids = ask(service, "a", "b")
        until(lambda: ranks.running)
        end = service._spool.end
        with mock.patch.object(service._spool, "end", side_effect=sqlite3.OperationalError("full")):
            for _ in range(2):
                assert service.delete(ids["a"]).id == ids["a"]
        assert service._spool.end == end
        until(lambda: service.status(ids["a"]).has_ended)
        assert not service.health() and service.status(ids["b"]).state != "cancelled"


def test_a_damaged_spool_fails_its_requests_and_ends_no_thread(tmp_path: Path) -> None:
    with closing(Spool(tmp_path, "one")) as spool:
        spool._base.execute("pragma journal_mode = delete")
    with serving(tmp_path) as (service, ranks):
        ids = ask(service, "a", "b", "c")
        until(lambda: len(ranks.running) == 2)
        status, news = service._spool.status, list[Status]()
        service.on_change = news.append
        with mock.patch.object(service._spool, "status", side_effect=Closing("damaged")):
            ranks.leave(min(ranks.running))
            until(lambda: any(one.has_ended for one in news))
            with pytest.raises(Closing, match="damaged"):
                service.status("none")
        assert service._spool.status == status
        play(service, ranks, "")
        assert {service.status(one).state for one in ids.values()} == {"done"}
        assert not service.health()


def test_the_log_has_a_line_and_the_metrics_a_count_for_each_request_that_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bascule")
    with serving(tmp_path, most_waiting=3) as (service, ranks):
        ids = ask(service, "done", "failed", "cancelled")
        service.cancel(ids["cancelled"])
        until(lambda: {ids["done"], ids["failed"]} <= ranks.running.keys())
        ranks.leave(ids["done"])
        ranks.leave(ids["failed"], "failed")
        until(lambda: all(one.has_ended for one in service.statuses()))
        names, client = ("long", "longer"), Context()
        long = service.submit([Prompt(prompt=name) for name in names], parent=client)
        assert all(service._traces[one.id]._parent is client for one in long)
        until(lambda: len(ranks.running) == 2)
        ask(service, "a", "b", "c")
        with pytest.raises(Busy):
            ask(service, "d")
        service.stop()
        with pytest.raises(Closing):
            ask(service, "d")
        sizes: dict[str, Any] = {"width": 64, "height": 32}  # which the pipeline does not take
        with pytest.raises(ConfigError):
            service.submit([Prompt(prompt="d", **sizes)])
        lines = dict(line.rsplit(" ", 1) for line in service.metrics().decode().splitlines())
    *ended, stopping, stopped = [one.getMessage() for one in caplog.records]
    said = {text.split(": ")[1].split()[0]: text for text in ended}
    for state, request_id in ids.items():
        assert said[state].startswith(f"request {request_id}: {state} after ")
    spans = r"auto, 0 of 4 steps, queue \S+ \S+, encode \S+ \S+ on 1"
    assert re.search(f"s, {spans}, write \\S+ \\S+, ranks [01]$", said["done"]), said["done"]
    assert re.search(f"s, {spans}, ranks [01]: why$", said["failed"]), said["failed"]
    assert re.search(r"s, auto, 0 of 4 steps, queue \S+ \S+$", said["cancelled"])
    assert stopping.startswith("stopping: ") and stopped.startswith("stopped: ")
    of_all = 'class="auto",kind="image"'
    for name, value in {
        f"bascule_requests_accepted_total{{{of_all}}}": 8,
        f'bascule_requests_ended_total{{{of_all},reason="",state="done"}}': 1,
        f'bascule_requests_ended_total{{{of_all},reason="other",state="failed"}}': 1,
        f'bascule_requests_ended_total{{{of_all},reason="",state="cancelled"}}': 1,
        'bascule_calls_refused_total{code="queue_full"}': 1,
        'bascule_calls_refused_total{code="closing"}': 1,
        f"bascule_request_seconds_count{{{of_all}}}": 1,
        'bascule_span_seconds_count{degree="0",span="queue"}': 1,
        'bascule_requests{state="running"}': 2,
        'bascule_requests{state="waiting"}': 3,
        "vllm:num_requests_waiting": 3,
        "bascule_busy_ranks": 2,
        "bascule_ranks": 2,
    }.items():
        assert float(lines[name]) == value, name
    assert 0 < float(lines["bascule_backlog_seconds"]) <= float(lines["bascule_drain_seconds"])
