"""`bascule train`: train, save, stop and resume, on local ranks or in a job that runs."""

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bascule.train.options import TrainOptions

if TYPE_CHECKING:
    import torch


def run(options: TrainOptions, arguments: list[str]) -> None:
    """Train on all ranks, until the last step or a signal."""
    from bascule.cli.command import on_ranks, quietly
    from bascule.cli.launch import forwarding_stops, in_a_job

    def prepare(num_ranks: int) -> None:
        from bascule.train.model import check_kernel
        from bascule.train.training_run import prepare

        with quietly():
            check_kernel(options, prepare(options, world_size=num_ranks).config)

    with nullcontext() if in_a_job() else forwarding_stops(signal.SIGTERM):
        on_ranks(options, arguments, lambda device: _work(options, device), _finish, prepare)


def _work(options: TrainOptions, device: "torch.device") -> dict[str, Any]:
    from bascule.cli.command import progress
    from bascule.cli.launch import stop_asked
    from bascule.train.training_run import TrainingRun

    losses: list[float] = []
    with stop_asked(signal.SIGTERM) as is_stopping:
        job = TrainingRun(options, device, is_stopping)
        first, last = job.done, job.num_steps
        if job.rank == 0 and job.data_lines:
            print(*job.data_lines, sep="\n", flush=True)
        with progress("training", last, done=first) as advance:

            def on_step(record: dict[str, Any]) -> None:
                losses.append(record["loss"])
                advance(1, f"training, loss {record['loss']:.4f}")

            job.run(on_step)
    ends = first, job.done, last
    return {"steps": ends, "losses": losses[:1] + losses[-1:], "checkpoint": str(job.checkpoint)}


def _finish(result: dict[str, Any]) -> None:
    from rich.console import Console

    from bascule.cli.command import saved

    (first, done, last), losses = result["steps"], result["losses"]
    lines = [f"resumed after step {first}"] if first else []
    if not losses:
        lines.append(f"nothing is left to train after step {done}")
    else:
        if done < last:
            lines.append(f"stopped after step {done}: go on with --resume")
        loss = "loss {:.6f} to {:.6f}".format(*losses)
        lines.append(f"steps {first + 1} to {done} of {last}, {loss}")
    print(*lines, sep="\n")
    checkpoint = Path(result["checkpoint"])
    saved(Console(), checkpoint, checkpoint.with_name("metrics.jsonl"))
