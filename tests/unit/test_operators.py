"""What operators see of requests: spans, log lines and metrics."""

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from prometheus_client.parser import text_string_to_metric_families

from bascule.data.slow_rank import Culprit
from bascule.generate.options import Prompt
from bascule.plan.requests import Block
from bascule.serve.metrics import Metrics
from bascule.serve.orders import Event
from bascule.serve.status import Busy, Status
from bascule.serve.tracing import Trace, parent_of

GOLDENS = Path(__file__).parents[1] / "goldens"
CLIENT = {"traceparent": f"00-{'a' * 32}-00f067aa0ba902b7-01"}

# Seconds, kind, first rank, degree, steps done, seconds of the event; None: ranks are given.
MOVED: list[tuple[float, str | None, int, int, int, float]] = [
    (103, None, 0, 2, 0, 0),
    (104, "step", 0, 2, 0, 1),
    (106, "step", 0, 2, 1, 2),
    (106, "halted", 0, 2, 1, 0),
    (107, "moved", 0, 4, 1, 0.5),
    (108, "step", 0, 4, 2, 1),
    (109, "paused", 0, 4, 2, 0),
    (112, None, 2, 2, 2, 0),
    (112.5, "moved", 2, 2, 2, 0.25),
    (115, "step", 2, 2, 3, 2),
    (115.5, "moved", 2, 1, 3, 0.5),
    (117, "done", 2, 1, 3, 1.5),
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds of the clocks, which begin at 100."""
    now = [100.0]
    clocks = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])
    monkeypatch.setattr("bascule.serve.tracing.time", clocks)
    yield now


def followed(
    clock: list[float],
    events: list[tuple[float, str | None, int, int, int, float]],
    num_steps: int | None,
    headers: dict[str, str],
) -> Trace:
    """The trace of a request to which these events happened."""
    made = Trace(lambda block: block.ranks, parent_of(headers))
    task = SimpleNamespace(at=None, last=None)
    for at_s, kind, first, degree, step, seconds in events:
        clock[0], event = float(at_s), None
        if kind is None:
            task.at = Block(first, degree)
        else:
            facts: dict[str, Any] = {"step": step, "num_steps": num_steps, "seconds": seconds}
            task.last = event = Event(kind, "r1", clock[0], Block(first, degree), **facts)
        made.follow(task, event)  # pyright: ignore
    clock[0] += 1
    return made


def status_of(state: str, size: int = 64, reason: str = "") -> Status:
    prompt = Prompt(prompt="a secret", width=size, height=32)
    facts: dict[str, Any] = {"created_at": 100.0, "ended_at": 118.0, "num_steps": 3}
    return Status(id="r1", kind="image", state=state, prompt=prompt, reason=reason, **facts)


class Recorded(trace.NonRecordingSpan):
    """A span that an SDK would export."""

    def __init__(self, context: trace.SpanContext, line: list[str], parent: str) -> None:
        super().__init__(context)
        self.line, self.parent = line, parent

    def is_recording(self) -> bool:
        return self.get_span_context().trace_flags.sampled

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.line.append(f"{status.name}: {description}")

    def end(self, end_time: int | None = None) -> None:
        assert end_time is not None
        self.line.insert(1, f"to {end_time / 1e9:g}")


class Recorder(trace.TracerProvider, trace.Tracer):
    """An SDK that writes a line for each span, and samples as the parent was."""

    def __init__(self) -> None:
        self.lines, self.names = list[list[str]](), {"00f067aa0ba902b7": "client"}

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        assert args[0] == "bascule.serve"
        return self

    def start_span(self, name: str, context: Any = None, *_: Any, **more: Any) -> trace.Span:
        above = trace.get_current_span(context).get_span_context()
        parent = trace.format_span_id(above.span_id) if above.is_valid else ""
        number, flags = len(self.lines) + 1, above.trace_flags if above.is_valid else 1
        place = trace.SpanContext(above.trace_id or 7, number, False, trace.TraceFlags(flags))
        self.names[trace.format_span_id(number)] = name
        line = [f"{self.names.get(parent, 'nobody')} > {name}, {more['start_time'] / 1e9:g}"]
        line += [f"{key}={value!r}" for key, value in more["attributes"].items()]
        self.lines.append(line)
        return Recorded(place, line, parent)

    start_as_current_span: Any = None

    def __str__(self) -> str:
        return "".join("; ".join(line) + "\n" for line in self.lines).replace("; to", " to")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: made)
    return made


def test_spans_of_a_request_that_moves_and_pauses(clock: list[float], recorder: Recorder) -> None:
    made = followed(clock, MOVED, 3, CLIENT)
    made.end(status_of("done"))
    assert str(recorder) == (GOLDENS / "spans.txt").read_text()
    assert str(made) == (
        "queue 6.00 s, encode 1.00 s on 2, denoise 6.00 s on 2, denoise 2.00 s on 4, "
        "decode 2.00 s on 1, write 1.00 s, ranks 0 1 2 3"
    )
    assert made.spent() == {
        ("queue", 0): 6,
        ("encode", 2): 1,
        ("denoise", 2): 3 + 3,
        ("denoise", 4): 2,
        ("decode", 1): 2,
        ("write", 0): 1,
    }


def test_the_batch_of_a_span_is_the_largest(clock: list[float], recorder: Recorder) -> None:
    made, members = followed(clock, MOVED[:2], 3, {}), {"r1": (1, 3), "r2": (0, 3)}
    for step, num in ((1, 2), (2, 1)):
        facts: Any = {"members": dict([*members.items()][:num])}
        event = Event("step", "r1", clock[0], Block(0, 2), step=step, num_steps=3, **facts)
        made.follow(SimpleNamespace(at=None, last=event), event)  # pyright: ignore
    made.end(status_of("cancelled"))
    assert "bascule.steps=2; bascule.batch=2" in str(recorder)
    assert str(made).endswith("denoise 1.00 s on 2, batch of 2, ranks 0 1"), made


@pytest.mark.parametrize(("num_steps", "begins"), [(None, "step"), (2, "boarded")])
def test_pipelines_that_do_not_say_or_take_more_steps(
    clock: list[float], num_steps: int | None, begins: str
) -> None:
    """Decoding begins as long before the end as the ranks say."""
    steps = [(114.0 + k / 4, "step", 0, 2, k, 0.25) for k in range(1, 5)]  # two loops of two
    events = [MOVED[0], (104.0, begins, 0, 2, 0, 1.0), *steps, (117.0, "done", 0, 2, 4, 1.5)]
    made = followed(clock, events, num_steps, {})
    (name, end_s, _), *stays, last = [(x.name, x.end_s, x.steps) for x in made.spans[1:-1]]
    assert (name, end_s, last) == ("encode", 104, ("decode", 117, 0))
    whole, loops = [("denoise", 115.5, 4)], [("denoise", 114.5, 2), ("denoise", 115.5, 2)]
    assert stays == (whole if num_steps is None else loops)


def test_a_request_that_begins_beside_one_that_goes_on(clock: list[float]) -> None:
    """Ranks say that all are there, and then of the first step."""
    events: list[Any] = [(103, None, 0, 1, 0, 0), (105, "moved", 0, 1, 0, 1)]
    made = followed(clock, [*events, (107, "step", 0, 1, 1, 2)], 3, {})
    spans = [(span.name, span.begin_s, span.steps) for span in made.spans]
    assert spans == [("queue", 100, 0), ("encode", 103, 0), ("denoise", 105, 1)]


def test_the_span_of_the_call_is_between_the_clients_and_the_requests(recorder: Recorder) -> None:
    """If FastAPI has made one."""
    with trace.use_span(recorder.start_span("call", start_time=0, attributes={})):
        parent = parent_of(CLIENT)
    Trace(lambda block: block.ranks, parent).end(status_of("done"))
    Trace(lambda block: block.ranks, parent_of(CLIENT)).end(status_of("done"))
    with trace.use_span(recorder.start_span("cancel", start_time=0, attributes={})):
        Trace(lambda block: block.ranks).end(status_of("done"))  # of an earlier server
    begins = [line[0].split(",")[0] for line in recorder.lines]
    assert [line for line in begins if line.endswith("image")] == [
        "call > image",
        "client > image",
        "nobody > image",
    ]


def test_a_failed_request_is_an_error_and_an_unsampled_one_costs_nothing(
    clock: list[float], recorder: Recorder
) -> None:
    followed(clock, MOVED[:1], 3, {}).end(status_of("failed", reason="no memory"))
    assert [line[0] for line in recorder.lines] == [
        "nobody > image, 100",
        "image > queue, 100",
        "image > encode, 103",
    ]
    assert "ERROR: no memory" in recorder.lines[0]
    unsampled = {"traceparent": CLIENT["traceparent"][:-1] + "0"}
    followed(clock, MOVED[:1], 3, unsampled).end(status_of("done"))
    assert len(recorder.lines) == 4


def test_without_an_sdk_nothing_happens(clock: list[float]) -> None:
    provider: Any = trace.get_tracer_provider()
    assert type(provider.get_tracer("x").start_span("x")) is trace.NonRecordingSpan
    followed(clock, MOVED, 3, CLIENT).end(status_of("done"))


def text_of(metrics: Metrics, statuses: list[Status]) -> str:
    pace = SimpleNamespace(culprit=Culprit(1, "slow rank", 1.5, 0.25))
    ranks: Any = {"step_ratios": np.array([1.0, 1.5]), "pace": pace}
    orders = SimpleNamespace(size=1)
    scheduler: Any = SimpleNamespace(**ranks, orders=orders, backlog_s=lambda: (7.5, 30))
    return metrics.text(statuses, scheduler, ["a", "b"]).decode()


def test_metrics_are_those_that_operators_know(clock: list[float]) -> None:
    """Names, labels and meanings: dashboards and routers depend on them."""
    metrics, made = Metrics(2), followed(clock, MOVED, 3, {})
    made.end(done := status_of("done"))
    failed = status_of("failed", reason="the latents of step 1 are NaN or infinite, as where ..")
    metrics.accept([done, failed])
    metrics.count(done, made)
    metrics.count(failed, None)
    with pytest.raises(Busy), metrics.counting_refusals():
        raise Busy(3.0)
    text = text_of(metrics, [status_of(state) for state in ("waiting", "paused", "running")])
    lines = [
        line for line in text.splitlines() if "_bucket{" not in line and "_created" not in line
    ]
    lines = [re.sub(r"(lora_requests_info.*\}) .*", r"\1 now", line) for line in lines]
    assert lines == (GOLDENS / "metrics.txt").read_text().splitlines()


# https://github.com/llm-d/llm-d-router/blob/main/docs/plugin-metric-protocol.md, names of vLLM
PROTOCOL = {
    "TotalQueuedRequests": ("vllm:num_requests_waiting", 2),
    "TotalRunningRequests": ("vllm:num_requests_running", 1),
    "KVCacheUtilization": ("vllm:kv_cache_usage_perc", 0),
    "for a scorer by cost": ("bascule_backlog_seconds", 7.5),
}


def test_a_router_by_llm_ds_protocol_finds_its_metrics() -> None:
    """It takes the first series of a gauge, whatever its labels are."""
    statuses = [status_of(state) for state in ("waiting", "paused", "running", "done")]
    families = {
        family.name: family
        for family in text_string_to_metric_families(text_of(Metrics(2), statuses))
    }
    for name, value in PROTOCOL.values():
        assert families[name].type == "gauge"
        ((labels, number),) = [(one.labels, one.value) for one in families[name].samples]
        assert (labels, number) == ({}, value), name
    (info,) = families["vllm:lora_requests_info"].samples
    assert info.labels == {
        "max_lora": "2",
        "running_lora_adapters": "a,b",
        "waiting_lora_adapters": "",
    }
    assert 0 <= time.time() - info.value < 60


def test_labels_are_bounded() -> None:
    metrics = Metrics(2)
    for size in range(8, 800, 8):
        metrics.accept([status_of("waiting", size)])
        metrics.count(status_of("failed", size, f"ValueError: {size} is odd"), None)
    families = text_string_to_metric_families(text_of(metrics, []))
    samples = [sample for family in families for sample in family.samples]
    classes = [sample.labels["class"] for sample in samples if "class" in sample.labels]
    assert len(set(classes)) == 33 and "other" in classes
    sums = [sample.value for sample in samples if sample.name == "bascule_requests_accepted_total"]
    assert len(sums) == 33 and sum(sums) == 99
    reasons = {sample.labels["reason"] for sample in samples if "reason" in sample.labels}
    assert reasons == {"other"}


def test_sizes_of_requests() -> None:
    video = Status(id="", kind="video", state="done", created_at=0, prompt=Prompt(prompt="a"))
    assert video.size == "auto"
    prompt = Prompt(prompt="a", width=832, height=480, frames=81)
    assert replace(video, prompt=prompt).size == "832x480x81"
