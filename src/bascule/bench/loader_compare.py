"""Measures balancing in the data loader: the same samples with and without `BalancedLoader`.

One rank a bag, no sequence parallelism. In each step, the first arm trains every rank on what it
loaded, the second on what the loader dealt it. While the second arm computes a step, the loader's
thread makes its next one, and the arm's time ends when it has that in hand: what is not hidden
behind the compute is measured with it. While the first arm computes, the thread has nothing to do.
"""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from bascule.bench.arms import Microbatch, unbalanced
from bascule.bench.compare import Paired, Setting, StepRecord, summarize
from bascule.bench.options import BenchOptions
from bascule.data.loader import BalancedLoader, LoaderOptions
from bascule.data.steps import Batch
from bascule.errors import ConfigError
from bascule.plan import metrics
from bascule.workload.streams import SampleBatch, pack_batch

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExchangeRecord:
    """The exchange behind a step, which makes the next one; seconds of the slowest rank.

    Attributes:
        exchange_s: Seconds in which a loader's thread agreed, planned and exchanged.
        exposed_s: Those of them in which training waited.
        hidden_s: The others.
        sent_bytes: Bytes of samples that changed ranks, of all ranks.
    """

    exchange_s: float
    exposed_s: float
    hidden_s: float
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class LoaderStepRecord(StepRecord):
    """One measured step; its plan has "applied" and "reason" too (see `Verdict`).

    Attributes:
        exchange: What ran behind it.
    """

    exchange: ExchangeRecord


class LoaderComparison(Paired):
    """Trained on what each rank loaded, and on what a balanced loader dealt."""

    def __init__(self, options: BenchOptions, device: torch.device) -> None:
        super().__init__(options, device)
        attend = unbalanced(device, options.kernel)
        self.arms = [self.arm(attend), self.arm(attend)]
        self._feed = _Feed()
        self._loader = BalancedLoader(
            self._feed,
            cost=self.cost,
            length_fn=lambda sample: len(sample["is_image"]),
            mesh_or_group=self.mesh,
            accumulate=options.accumulate,
            options=LoaderOptions(
                weight_fn=lambda sample: len(sample["image"]),  # the loss is a mean over these
                ends="finish",
                prefetch=1,
                collate_fn=join_samples,
                timeout_s=options.timeout_s,
            ),
        )

    def run(self) -> Iterator[LoaderStepRecord]:
        """Train; yields each step after the warm-up."""
        batches = iter(self._loader)
        try:
            loaded = self._load(0)
            self._feed.put(loaded)
            dealt = self._take(batches)
            for step in range(self.options.warmup + self.options.steps):
                record, loaded, dealt = self._step(step, loaded, dealt, batches)
                if step >= self.options.warmup:
                    yield record
        finally:
            self._feed.put(None)
            self._loader.close()

    def _step(
        self,
        step: int,
        loaded: "list[SampleBatch] | Exception",
        dealt: list[Batch],
        batches: Iterator[Batch],
    ) -> tuple[LoaderStepRecord, "list[SampleBatch] | Exception", list[Batch]]:
        """Both arms; with what they are to train on next."""
        assert not isinstance(loaded, Exception)  # or taking the step had raised it
        following = self._load(step + 1)
        arms = self._as_loaded(loaded, step), self._as_dealt(dealt)
        ready: list[Batch] = []
        before = self._loader.metrics()
        losses, seconds = [0.0, 0.0], [0.0, 0.0]
        for arm in self.in_turns(step):
            if arm == 1:
                self._feed.put(following)
                finish = lambda: ready.extend(self._take(batches))  # noqa: E731
            else:
                finish = _nothing
            losses[arm], seconds[arm] = self.arms[arm].accumulate(arms[arm], finish)
        exchange = self._exchange(step, before)
        means = self.reduced(torch.tensor(losses, dtype=torch.float64), "losses", step)
        slowest = self.slowest(step, *seconds)
        record = LoaderStepRecord(
            step=step - self.options.warmup,
            loss_unbalanced=float(means[0]) / self.group.size,
            loss_balanced=float(means[1]) / self.group.size,
            grad_difference=self.grad_difference(step),
            seconds_unbalanced=slowest[0],
            seconds_balanced=slowest[1],
            plan=self._plan(dealt) | {"sent_bytes": exchange.sent_bytes},
            exchange=exchange,
        )
        return record, following, ready

    def _load(self, step: int) -> "list[SampleBatch] | Exception":
        """This rank's microbatches of a step; or an error, of which the loader tells all ranks."""
        accumulate = self.options.accumulate
        try:
            return [self.stream.batch(step * accumulate + micro) for micro in range(accumulate)]
        except (ConfigError, OSError) as error:
            return error

    def _take(self, batches: Iterator[Batch]) -> list[Batch]:
        return [next(batches) for _ in range(self.options.accumulate)]

    def _as_loaded(self, loaded: list[SampleBatch], step: int) -> list[Microbatch]:
        """Every rank its own samples; the factor from their number, counted over all ranks."""
        total = torch.tensor([sum(sum(batch.image_lens) for batch in loaded)])
        total = int(self.reduced(total, "image tokens", step))
        return [Microbatch(self.flow(batch), self.group.size / max(total, 1)) for batch in loaded]

    def _as_dealt(self, dealt: list[Batch]) -> list[Microbatch]:
        """What the loader gave; the factor from its loss_scale, as a user's loop would have it."""
        micros: list[Microbatch] = []
        for batch in dealt:
            data = self._no_samples() if batch.data is None else batch.data
            mean = 1.0 / max(sum(data.image_lens), 1)
            factor = mean * batch.loss_scale / self.options.accumulate
            micros.append(Microbatch(self.flow(data), factor))
        return micros

    def _no_samples(self) -> SampleBatch:
        stream = self.stream
        widths = {"image": stream.in_channels, "text": stream.text_dim, "pooled": stream.vec_dim}
        empty = {name: torch.empty(0, width) for name, width in widths.items()}
        return pack_batch([], **empty, ids=[])

    def _exchange(self, step: int, before: dict[str, Any]) -> ExchangeRecord:
        """What the loader counted since then, on the slowest rank."""
        after = self._loader.metrics()
        names = ("exchange_s", "exposed_s", "hidden_s")
        seconds = self.slowest(step, *(after[name] - before[name] for name in names))
        sent = torch.tensor([after["sent_bytes"] - before["sent_bytes"]])
        return ExchangeRecord(*seconds, sent_bytes=int(self.reduced(sent, "sent bytes", step)))

    def _plan(self, dealt: list[Batch]) -> dict[str, Any]:
        """What the plans of the microbatches predict: sums, and means of ratios."""
        plans = [batch.plan for batch in dealt]
        before = [plan.unbalanced_loads(self.cost) for plan in plans]
        lens = np.concatenate([plan.seq_lens for plan in plans])
        return {
            "makespan": sum(plan.makespan for plan in plans),
            "makespan_unbalanced": sum(float(loads.max()) for loads in before),
            "imbalance": float(np.mean([plan.imbalance for plan in plans])),
            "imbalance_unbalanced": float(np.mean([metrics.imbalance(b) for b in before])),
            "wir": float(np.mean([plan.wir for plan in plans])),
            "wir_unbalanced": float(np.mean([metrics.wir(loads) for loads in before])),
            "tokens": np.sum([plan.tokens for plan in plans], axis=0).tolist(),
            "moved_tokens": sum(plan.moved_tokens for plan in plans),
            "total_tokens": int(lens.sum()),
            "forward_flops": self.forward_flops(lens),
            "single_binds": all(plan.binding is not None for plan in plans),
            "applied": dealt[0].verdict.applied,
            "reason": dealt[0].verdict.reason,
        }


def summarize_loader(
    records: list[LoaderStepRecord], setting: Setting, options: BenchOptions
) -> dict[str, Any]:
    """As `summarize`, with a "loader": seconds are means over steps, of the slowest rank."""
    exchanges = [asdict(record.exchange) for record in records]
    seconds = {
        f"{name}_per_step": float(np.mean([exchange[name] for exchange in exchanges]))
        for name in ("exchange_s", "exposed_s", "hidden_s")
    }
    step_s = float(np.mean([record.seconds_balanced for record in records]))
    reasons = [record.plan["reason"] for record in records]
    loader = {
        "accumulate": options.accumulate,
        "applied_steps": sum(record.plan["applied"] for record in records),
        "reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        **seconds,
        "exposed_share": seconds["exposed_s_per_step"] / step_s,
    }
    return summarize(list(records), setting, options) | {"loader": loader}


def split_samples(batch: SampleBatch) -> list[Sample]:
    """The samples of a batch, one by one, as views of it."""
    text_lens = [n - m for n, m in zip(batch.seq_lens, batch.image_lens, strict=True)]
    parts = {
        "image": batch.image.split(batch.image_lens),
        "text": batch.text.split(text_lens),
        "is_image": batch.is_image.split(batch.seq_lens),
        "pos": batch.pos.split(batch.seq_lens),
        "pooled": batch.pooled.unbind(),
        "sample_id": batch.sample_ids.unbind(),
    }
    return [{name: part[k] for name, part in parts.items()} for k in range(len(batch.seq_lens))]


def join_samples(samples: Sequence[Sample]) -> SampleBatch:
    """The batch of one or more samples."""
    return SampleBatch(
        image=torch.cat([sample["image"] for sample in samples]),
        text=torch.cat([sample["text"] for sample in samples]),
        is_image=torch.cat([sample["is_image"] for sample in samples]),
        pos=torch.cat([sample["pos"] for sample in samples]),
        pooled=torch.stack([sample["pooled"] for sample in samples]),
        sample_ids=torch.stack([sample["sample_id"] for sample in samples]),
        seq_lens=[len(sample["is_image"]) for sample in samples],
        image_lens=[len(sample["image"]) for sample in samples],
    )


class _Feed:
    """An iterable of microbatches that waits for each step to be put, so none is made too soon."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[list[SampleBatch] | Exception | None] = queue.SimpleQueue()

    def put(self, step: "list[SampleBatch] | Exception | None") -> None:
        """The microbatches of a step; an error that is to be raised; or None, the end."""
        self._steps.put(step)

    def __iter__(self) -> Iterator[list[Sample]]:
        while (step := self._steps.get()) is not None:
            if isinstance(step, Exception):
                raise step
            for batch in step:
                yield split_samples(batch)


def _nothing() -> None:
    """What an arm without a loader does at the end of a step."""
