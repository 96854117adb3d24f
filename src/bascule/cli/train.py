"""`bascule train`: train, save, stop and resume, on local ranks or in a job that runs."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bascule.cli.bench import check_kernel, without_warnings
from bascule.train.train_options import TrainOptions

if TYPE_CHECKING:
    from bascule.train.training_run import TrainingRun


def run(options: TrainOptions, arguments: list[str]) -> None:
    """Launch the local ranks, or be one.

    Raises:
        ConfigError: The options do not fit the data or each other.
        CommError: A rank failed.
    """
    from bascule.cli.launch import default_num_ranks, forwarding_stops, in_a_job, launch
    from bascule.train.training_run import prepare

    if in_a_job():
        _run_rank(options)
        return
    num_ranks = options.ranks or default_num_ranks()
    with without_warnings():  # rank 0 will warn of the same photos
        check_kernel(options, prepare(options, world_size=num_ranks).config)
    with forwarding_stops():
        launch(num_ranks, arguments)


def _run_rank(options: TrainOptions) -> None:
    from bascule.cli.launch import joined, stop_asked
    from bascule.train.training_run import TrainingRun

    with stop_asked() as is_asked, joined(options.timeout_s) as device:
        run = TrainingRun(options, device, is_asked)
        _follow(run, Console(quiet=run.rank > 0))


def _follow(run: "TrainingRun", console: Console) -> None:
    """Run, and show how far it is and how it ended."""
    first, last = run.done, run.num_steps
    if first:
        console.print(f"resumed after step {first}: {run.checkpoint}", soft_wrap=True)
    losses: list[float] = []

    def told(record: dict[str, Any]) -> None:
        losses.append(record["loss"])
        progress.update(bar, completed=record["step"], loss=f"{record['loss']:.4f}")

    columns = (
        TextColumn("training, loss {task.fields[loss]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=last, completed=first, loss="..")
        run.run(told)
    if not losses:
        console.print(f"nothing is left to train: {run.checkpoint}", soft_wrap=True)
        return
    if run.done < last:
        console.print(f"stopped after step {run.done}: go on with --resume")
    console.print(
        f"steps {first + 1} to {run.done} of {last}, loss {losses[0]:.6f} to "
        f"{losses[-1]:.6f}\nwritten: {run.checkpoint}, {run.folder / 'metrics.jsonl'}",
        soft_wrap=True,
        highlight=False,
    )
