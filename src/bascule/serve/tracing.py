"""Spans of requests, from the events of their ranks: for the log, for metrics, for OpenTelemetry.

OpenTelemetry's API exports them if the operator has set up an SDK; else its calls do nothing.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bascule.plan.requests import Block
from bascule.quantities import seconds
from bascule.serve.orders import Event
from bascule.serve.scheduling import Task
from bascule.serve.status import Status


@dataclass(slots=True)
class Span:
    """Part of a request's time: queue (without ranks), encode, denoise, decode or write."""

    name: str
    begin_s: float  # monotonic
    ranks: tuple[int, ...] = ()
    steps: int = 0  # done in it; each stay on a block of ranks is a span
    batch: int = 1  # most requests that took a step together
    end_s: float = 0.0


class Trace:
    """Spans of a request, one after the other, since it arrived or since the server started."""

    def __init__(self, ranks_of: Callable[[Block], range], parent: Context | None = None) -> None:
        self._ranks_of = ranks_of  # a block, which may count replicas
        # With the client's span, if it has one; not that of the call which ends the request.
        self._parent = Context() if parent is None else parent
        self.spans = [Span("queue", time.monotonic())]

    def follow(self, task: Task, event: Event | None) -> None:
        """Note an event of the request; without one, it got ranks."""
        last = self.spans[-1]
        if event is None:
            if task.at is not None and (ranks := tuple(self._ranks_of(task.at))) != last.ranks:
                name = "encode" if task.last is None else "denoise"
                self._begin(name, time.monotonic(), ranks)
            return
        now_s, ranks = event.time, tuple(self._ranks_of(event.block))
        match event.kind:
            case "step" | "boarded" if event.step == 0:
                self._begin("denoise", now_s, ranks)
            case "step":
                last.name, last.steps = "denoise", last.steps + 1  # of another loop, if "decode"
                last.batch = max(last.batch, len(event.members))
                if event.step == event.num_steps:
                    self._begin("decode", now_s, ranks)
            case "moved" if last.name == "decode":
                last.ranks = ranks
            case "moved" if last.ranks != ranks or last.name == "encode":  # beside restored ones
                self._begin("denoise", now_s, ranks)
            case "paused" | "cancelled":
                self._begin("queue", now_s)
            case "done":
                if last.name == "denoise":  # the pipeline does not say how many steps it takes
                    self._begin("decode", now_s - event.seconds, ranks)
                self._begin("write", now_s)
            case _:
                pass

    def end(self, status: Status) -> None:
        """End the last span, and export all as children of a span for the request."""
        self.spans[-1].end_s = time.monotonic()
        tracer, unix_s = trace.get_tracer("bascule.serve"), time.time() - time.monotonic()

        def start(name: str, begin_s: float, within: Context | None, **facts: Any) -> trace.Span:
            named = {f"bascule.{name}": value for name, value in facts.items()}
            begin = int((begin_s + unix_s) * 1e9)
            return tracer.start_span(name, within, attributes=named, start_time=begin)

        facts: dict[str, Any] = {"request": status.id, "size": status.size, "state": status.state}
        root = start(status.kind, self.spans[0].begin_s, self._parent, **facts)
        if status.state == "failed":
            root.set_status(trace.StatusCode.ERROR, status.reason)
        within = trace.set_span_in_context(root, self._parent)
        for span in self.spans if root.is_recording() else ():
            facts = {"ranks": span.ranks, "degree": len(span.ranks)} if span.ranks else {}
            facts |= {"steps": span.steps, "batch": span.batch} if span.name == "denoise" else {}
            made = start(span.name, span.begin_s, within, **facts)
            made.end(int((span.end_s + unix_s) * 1e9))
        root.end(int((self.spans[-1].end_s + unix_s) * 1e9))

    def spent(self) -> dict[tuple[str, int], float]:
        """Return seconds by the name and the number of ranks of spans."""
        sums = defaultdict[tuple[str, int], float](float)
        for span in self.spans:
            sums[span.name, len(span.ranks)] += span.end_s - span.begin_s
        return sums

    def __str__(self) -> str:
        parts = [
            f"{name} {seconds(spent_s)}" + (f" on {degree}" if degree else "")
            for (name, degree), spent_s in self.spent().items()
        ]
        if (most := max(span.batch for span in self.spans)) > 1:
            parts.append(f"batch of {most}")
        if ranks := sorted({rank for span in self.spans for rank in span.ranks}):
            parts.append(f"ranks {' '.join(map(str, ranks))}")
        return ", ".join(parts)

    def _begin(self, name: str, at_s: float, ranks: tuple[int, ...] = ()) -> None:
        self.spans[-1].end_s = at_s
        self.spans.append(Span(name, at_s, ranks))


def parent_of(headers: Mapping[str, str]) -> Context:
    """Return the context of a call: with FastAPI's span, else the one that `traceparent` names."""
    here = context.get_current()
    has_span = trace.get_current_span(here).get_span_context().is_valid
    return here if has_span else TraceContextTextMapPropagator().extract(headers)
