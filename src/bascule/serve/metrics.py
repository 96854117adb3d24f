"""Metrics of a server for Prometheus, and for routers that read llm-d's metric protocol."""

import re
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import prometheus_client as prometheus
from prometheus_client import Counter, Gauge, Histogram

from bascule.serve.scheduling import Scheduler
from bascule.serve.status import Refusal, Status
from bascule.serve.tracing import Trace

_MOST_CLASSES = 32  # labels of sizes, beside "other"
_FAULTS = {  # labels of failures, by words of their reasons
    "nan": "NaN or infinite",
    "memory": r"MemoryError|OutOfMemory|out of memory",
    "output": "its output cannot be written",
    "ranks": "its ranks ended",
    "spool": "its row in the spool",
}


class Metrics:
    """Metrics of a server, in a registry of their own; not thread-safe.

    The class of a request is the size of its output; sizes beyond the first 32 are "other". A
    router reads one series of each gauge: no gauge has a label of classes.
    """

    def __init__(self, num_ranks: int) -> None:
        self._registry = prometheus.CollectorRegistry()
        self._classes = set[str]()
        own: Any = {"registry": self._registry}
        counter, gauge = partial(Counter, **own), partial(Gauge, **own)
        histogram = partial(Histogram, buckets=[2**power for power in range(-6, 13)], **own)
        by_class = "kind", "class"
        self._accepted = counter("bascule_requests_accepted", "Requests accepted", by_class)
        about, labels = "Requests ended, and why they failed", [*by_class, "state", "reason"]
        self._ended = counter("bascule_requests_ended", about, labels)
        self._refused = counter("bascule_calls_refused", "Right calls that were refused", ["code"])
        about = "Seconds from arrival to the end of requests that are done"
        self._seconds = histogram("bascule_request_seconds", about, by_class)
        about = "Seconds of a done request by span, on so many ranks: in the queue on 0"
        self._spans = histogram("bascule_span_seconds", about, ["span", "degree"])
        self._now = gauge("bascule_requests", "Requests by state", ["state"])
        about = "Predicted seconds of accepted work for a rank, on average over ranks"
        self._backlog = gauge("bascule_backlog_seconds", about)
        about = "Predicted seconds until all accepted work is done"
        self._drain = gauge("bascule_drain_seconds", about)
        self._busy = gauge("bascule_busy_ranks", "Ranks that compute")
        gauge("bascule_ranks", "Ranks").set(num_ranks)
        about = "Seconds of a rank's newest step over the prediction"
        self._ratios = gauge("bascule_step_ratio", about, ["rank"])
        about = "Share of a step that others wait for a slow rank"
        self._slow = gauge("bascule_slow_rank", about, ["rank", "cause"])
        # Names that llm-d's endpoint picker reads by default.
        self._queued = gauge("vllm:num_requests_waiting", "Requests without ranks")
        self._running = gauge("vllm:num_requests_running", "Requests on ranks")
        about = "Unix seconds, by the adapters that requests may choose"
        labels = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
        self._loras = gauge("vllm:lora_requests_info", about, labels)
        gauge("vllm:kv_cache_usage_perc", "0: requests keep no keys between steps").set(0)

    def accept(self, statuses: Sequence[Status]) -> None:
        """Count accepted requests."""
        for status in statuses:
            self._accepted.labels(*self._class_of(status)).inc()

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count a refusal that is raised within."""
        try:
            yield
        except Refusal as refusal:
            self._refused.labels(refusal.code).inc()
            raise

    def count(self, status: Status, trace: Trace | None) -> None:
        """Count a request that has ended, and its spans if this server ran it."""
        labels, reason = self._class_of(status), ""
        if status.state == "failed":
            faults = (name for name, words in _FAULTS.items() if re.search(words, status.reason))
            reason = next(faults, "other")
        self._ended.labels(*labels, status.state, reason).inc()
        if status.state == "done" and status.ended_at is not None:
            self._seconds.labels(*labels).observe(status.ended_at - status.created_at)
            for span, spent_s in trace.spent().items() if trace else ():
                self._spans.labels(*span).observe(spent_s)

    def text(self, statuses: Sequence[Status], scheduler: Scheduler, loras: Sequence[str]) -> bytes:
        """Return all metrics in Prometheus's format."""
        slow, (backlog_s, drain_s) = scheduler.pace.culprit, scheduler.backlog_s()
        size = scheduler.orders.size  # ranks of a replica
        for rank, ratio in enumerate(scheduler.step_ratios.repeat(size).tolist()):
            self._ratios.labels(rank).set(ratio)
        self._slow.clear()
        if slow.place >= 0:
            self._slow.labels(slow.place * size, slow.cause).set(slow.share)
        nums = Counts(status.state for status in statuses)
        for state in ("waiting", "running", "paused"):
            self._now.labels(state).set(nums[state])
        self._queued.set(nums["waiting"] + nums["paused"])
        self._running.set(nums["running"])
        self._backlog.set(backlog_s)
        self._drain.set(drain_s)
        self._loras.clear()
        if loras:
            self._loras.labels(len(loras), ",".join(loras), "").set_to_current_time()
        self._busy.set(len({rank for status in statuses for rank in status.ranks}))
        return prometheus.generate_latest(self._registry)

    def _class_of(self, status: Status) -> tuple[str, str]:
        """Return the kind and the class of a request."""
        if len(self._classes) < _MOST_CLASSES:
            self._classes.add(status.size)
        return status.kind, status.size if status.size in self._classes else "other"
