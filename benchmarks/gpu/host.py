"""The host beside the device: what a step waits for, reads, and leaves idle.

- Plan and upload: while a low-res step of the blocks runs, the host plans the next batch of 32 x 32
  sequences and copies all tables of a rank to the device on another stream. Seconds from the
  step's beginning until they are there, over the step's, both by events: at most 1 is hidden.
- Reads: operations of a step, its plan included, for which torch's sync debug mode warns that the
  host waits for the device.
- Idle: the share of some low-res steps, one after the other, in which the device runs no kernel, by
  the kernels of torch.profiler as `bascule trace` reads them; from the first kernel to the last.
"""

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from measuring import MIXES
from torch.profiler import ProfilerActivity, profile, schedule

from bascule import Plan, TransformerCost, plan_batch
from bascule.attention import PackedSequences
from bascule.comm.collectives import table_on
from bascule.models import MMDiT
from bascule.parallel import SequenceParallel
from bascule.workload.codes import parse_data_codes, sample_lengths, seq_lens
from bascule.workload.traces import read_traces
from bascule.workload.traces.spans import union
from gpu.blocks import models_of
from gpu.measuring import Case, Row, Setting, Target
from gpu.shapes import batch_of, loaded_low_res, parallel_of, train

RANK, STEPS, WARMUP = 13, 5, 2
HIDDEN, NO_READS = Target(1.0, at_least=False), Target(0.0, at_least=False)
IDLE = Target(0.02, at_least=False)
WAITED = "synchronizing CUDA operation"

Made = Callable[[], tuple[dict[str, MMDiT], SequenceParallel]]


def cases(setting: Setting) -> Iterator[Case]:
    """What each way of running the blocks waits for; and planning behind a step."""
    make: Made = cache(lambda: (models_of(setting), parallel_of(setting)))
    for way in ("eager", "compiled blocks"):
        yield Case(f"idle, {way}", partial(idle, setting, make, way))
        yield Case(f"plan and upload, {way}", partial(behind, setting, make, way))
        yield Case(f"reads, {way}", partial(reads, setting, make, way))


def stepping(setting: Setting, make: Made, way: str) -> Callable[[], object]:
    """A low-res training step, with its plan, as a function; it has run twice."""
    models, parallel = make()
    model, pack = models[way], loaded_low_res(setting)
    batch = batch_of(pack, model.config, setting)

    def step() -> object:
        return train(model, batch, parallel.plan(pack.seq_lens))

    step()
    step()
    return step


def idle(setting: Setting, make: Made, way: str) -> list[Row]:
    """The share of the time in which no kernel runs."""
    step = stepping(setting, make, way)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_cuda else [])]
    when = schedule(wait=0, warmup=WARMUP, active=STEPS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank0.json"
        with profile(
            activities=activities,
            schedule=when,
            on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
        ) as profiler:
            for _ in range(WARMUP + STEPS):
                step()
                profiler.step()
        ((trace,), _) = read_traces(path)
    busy = union(np.concatenate([trace.compute, trace.calls]))
    lasting = float(busy[-1, 1] - busy[0, 0])
    share = 1.0 - float((busy[:, 1] - busy[:, 0]).sum()) / lasting
    is_device = trace.on_device
    return [
        Row(
            f"idle in {STEPS} low-res steps, {way}{'' if is_device else ', of the host'}",
            "of the time",
            share,
            target=IDLE if is_device else None,
            details={"seconds": lasting, "num_gaps": len(busy) - 1},
        )
    ]


def behind(setting: Setting, make: Made, way: str) -> list[Row]:
    """The plan and the tables of the next batch, made while a step runs."""
    step, lens = stepping(setting, make, way), _lengths()
    moment, seconds = _Moment(setting), list[dict[str, float]]()
    for _ in range(3 if setting.is_tiny else 11):
        start = moment.now()
        began = time.perf_counter()
        step()
        launched, end = time.perf_counter(), moment.now()
        plan = plan_batch(lens, "g1n32", TransformerCost(3072, gamma=0.426))
        planned = time.perf_counter()
        there = moment.beside(lambda plan=plan: upload(plan, setting))
        uploaded = time.perf_counter()
        step_s, there_s = moment.between(start, end), moment.between(start, there)
        seconds.append(
            {
                "step_s": step_s,
                "there_s": there_s,
                "launch_s": launched - began,
                "plan_s": planned - launched,
                "upload_s": uploaded - planned,
            }
        )
    medians = {name: float(np.median([one[name] for one in seconds])) for name in seconds[0]}
    shares = [one["there_s"] / one["step_s"] for one in seconds]
    host = [(one["plan_s"] + one["upload_s"]) / one["step_s"] for one in seconds]
    # The host of a CPU is the device: nothing can be behind anything.
    target = HIDDEN if setting.on_cuda else None
    return [
        Row.of(f"tables there, {way}", "of the step before", shares, target, **medians),
        Row.of(f"plan and upload alone, {way}", "of the step", host),
    ]


def upload(plan: Plan, setting: Setting) -> list[torch.Tensor]:
    """All that a rank of the plan looks up on its device."""
    local, route = plan.local(RANK), plan.route(RANK)
    back = route.inverse()
    tables = [local.seq_ids, local.slots, local.positions, route.send_index, back.recv_index]
    found = [table_on(table, setting.device) for table in tables if table is not None]
    lens = plan.bag_lens(RANK).sum(axis=0).tolist()
    return [*found, PackedSequences.build(lens, setting.device).cu_seqlens]


def reads(setting: Setting, make: Made, way: str) -> list[Row]:
    """How often the host waits for the device in a step."""
    what = f"waits of the host for the device in a step, {way}"
    if not setting.on_cuda:
        return [Row(what, reason="sync debug mode is CUDA's: left out on a CPU")]
    step = stepping(setting, make, way)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught, _watched():
        warnings.simplefilter("always")
        step()
    found = [one for one in caught if WAITED in str(one.message)]
    places = sorted({f"{Path(one.filename).name}:{one.lineno}" for one in found})
    return [Row(what, "waits", float(len(found)), target=NO_READS, details={"places": places})]


@contextmanager
def _watched() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _Moment:
    """Moments on the device: events on CUDA, else the clock."""

    def __init__(self, setting: Setting) -> None:
        self._on_cuda = setting.on_cuda
        self._stream = torch.cuda.Stream() if self._on_cuda else None

    def now(self) -> float | torch.cuda.Event:
        """This moment, where the device has done what it was given before."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def beside(self, call: Callable[[], object]) -> float | torch.cuda.Event:
        """When something is done that another stream does."""
        if self._stream is None:
            call()
            return self.now()
        with torch.cuda.stream(self._stream):
            call()
            return self.now()

    def between(self, start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
        """Seconds from one moment to another; waits for both."""
        if isinstance(start, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            torch.cuda.synchronize()
            return start.elapsed_time(end) * 1e-3
        assert not isinstance(end, torch.cuda.Event)
        return end - start


def _lengths() -> list[list[int]]:
    """Of a low-res batch: 32 samples on each of 32 ranks."""
    return seq_lens(sample_lengths(parse_data_codes(MIXES["low-res"]), seed=0, step=1))
