"""One GPU, topic by topic, beside what the same card was measured to do in the same run.

    python benchmarks/bench_gpu.py                                # all topics, on a CUDA device
    python benchmarks/bench_gpu.py --topics blocks kernels        # some of them
    python benchmarks/bench_gpu.py --device cpu --tiny            # whether the code runs: seconds

Writes gpu.json into `--out` (results/) after every part of a topic, so a run that is cut off leaves
what it measured; topics of an earlier run of the same card that are not measured again stay. A
topic that has used its `--minutes` leaves its other parts out, and says so. What fails is a row
with its reason, and the rest goes on. Each module of `gpu/` says what it counts, and how.
"""

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu import against_diffusers, blocks, device, host, inference, kernels, latency, sparse
from gpu.measuring import Card, Case, Row, Setting, told
from measuring import RESULTS, environment, write_results
from rich.console import Console
from rich.table import Table

TOPICS: dict[str, Callable[[Setting], Iterator[Case]]] = {
    "device": device.cases,
    "blocks": blocks.cases,
    "kernels": kernels.cases,
    "sparse": sparse.cases,
    "host": host.cases,
    "latency": latency.cases,
    "against_diffusers": against_diffusers.cases,
    "inference": inference.cases,
}
NAME = "gpu"
MOST_GRAPHS = 64
"""Of a function: so that no candidate is measured plain because others were measured before."""


def main() -> None:
    """Measure the device, then each topic; print a table and write the results after each."""
    options = parse()
    setting = Setting(torch.device(options.device, 0), options.tiny)
    if setting.on_cuda:
        torch.cuda.set_device(0)
    console = Console(width=150)
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    with world_of_one(setting):
        results = Results(options.out, is_tiny=options.tiny)
        for name in ("device", *(topic for topic in options.topics if topic != "device")):
            rows = measure(name, setting, options.minutes * 60.0, results)
            console.print(table_of(name, rows, is_tiny=setting.is_tiny))
            if name == "device":
                setting = replace(setting, card=device.card_of(rows))
                results.card = setting.card
        after = device.measure(replace(setting, card=None))
        results.after(after)
        console.print(f"the card afterwards, over before: {results.drift}")
    console.print("written to", results.write())


def parse() -> argparse.Namespace:
    """The options; those that cannot be are refused."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--topics", nargs="+", choices=TOPICS, default=list(TOPICS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="only whether the code runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="budget of each topic")
    parser.add_argument("--out", type=Path, help="folder of gpu.json; default: results/")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device: give --device cpu --tiny to try the code")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu measures nothing of a GPU: give --tiny, too, to try the code")
    if options.out is None:
        if options.tiny:
            parser.error("--tiny measures nothing: say with --out where its results go")
        options.out = RESULTS
    return options


@contextmanager
def world_of_one(setting: Setting) -> Iterator[None]:
    """A process group of one rank, as the library needs."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if setting.on_cuda else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class Results:
    """What was measured so far, and what an earlier run of the same card left.

    Attributes:
        card: What the device does at best.
        drift: What a second measurement of the card came to, over the first.
    """

    def __init__(self, folder: Path, *, is_tiny: bool) -> None:
        self._folder, self._is_tiny = folder, is_tiny
        self.card: Card | None = None
        self.drift: dict[str, float] | None = None
        self._environment = environment()
        self._topics: dict[str, Any] = {} if is_tiny else self._earlier()
        self._measured: list[str] = []

    def put(self, topic: str, rows: Iterable[Row], seconds: float) -> None:
        """Take what is known of a topic, and write."""
        self._topics[topic] = {
            "commit": self._environment["commit"],
            "date": self._environment["date"],
            "card": None if self.card is None else asdict(self.card),
            "seconds": seconds,
            "rows": [row.to_json() for row in rows],
        }
        if topic not in self._measured:
            self._measured.append(topic)
        self.write()

    def after(self, card: Card) -> None:
        """Note how the card did at the end of the run, for the topics of this run."""
        assert self.card is not None
        self.drift = device.drift(self.card, card)
        for topic in self._measured:
            self._topics[topic]["card_afterwards"] = self.drift

    def write(self) -> Path:
        """Write all."""
        found = {"is_tiny": self._is_tiny, "topics": self._topics}
        return write_results(NAME, found, self._folder)

    def _earlier(self) -> dict[str, Any]:
        path = self._folder / f"{NAME}.json"
        if not path.is_file():
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
        is_same = found["environment"]["device"] == self._environment["device"]
        is_same &= not found["is_tiny"]
        return found["topics"] if is_same else {}


def measure(name: str, setting: Setting, budget_s: float, results: Results) -> list[Row]:
    """The rows of a topic; written after each of its cases."""
    start, rows = time.monotonic(), list[Row]()
    torch.compiler.reset()
    for case in TOPICS[name](setting):
        if time.monotonic() - start > budget_s:
            rows.append(Row(case.what, reason="left out: the topic has used its minutes"))
            continue
        try:
            rows += case.measure()
        except Exception as error:  # of whatever case: the others are measured
            rows.append(Row(case.what, reason=f"failed: {told(error)}"))
        gc.collect()
        if name == "inference":  # whose compiled code may hold a model of 24 GB
            torch.compiler.reset()
        if setting.on_cuda:
            torch.cuda.empty_cache()
        results.put(name, rows, time.monotonic() - start)
    results.put(name, rows, time.monotonic() - start)
    return rows


def table_of(name: str, rows: list[Row], *, is_tiny: bool) -> Table:
    """A topic for the terminal."""
    table = Table(title=f"{name}{' (tiny: its numbers say nothing)' if is_tiny else ''}")
    for column in ("", "measured", "quartiles", "", "target", ""):
        table.add_column(column, justify="left" if column == "" else "right")
    for row in rows:
        if row.value is None:
            table.add_row(row.what, "", "", row.reason, "", "")
            continue
        quartiles = "" if row.quartiles is None else "{:.3g} to {:.3g}".format(*row.quartiles)
        target = "" if row.target is None else str(row.target)
        said = {None: "", True: "met", False: "MISSED"}[row.is_met]
        table.add_row(row.what, f"{row.value:.3g}", quartiles, row.unit, target, said)
    return table


if __name__ == "__main__":
    main()
