"""`bascule generate`: images and videos from prompts, on local ranks or in a job that runs."""

import logging
import math
from statistics import mean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bascule.cli.writing import STDOUT, check_outputs, tell_written, write_json
from bascule.errors import CommError, ConfigError
from bascule.generate.generate_options import GenerateOptions
from bascule.generate.prompts import read_prompts

if TYPE_CHECKING:
    from bascule.generate.generating import Generation


def run(options: GenerateOptions, arguments: list[str]) -> None:
    """Launch the local ranks, or be one.

    Raises:
        ConfigError: The options do not fit the pipeline, the prompts or each other.
        CommError: A rank failed.
    """
    from bascule.cli.launch import default_num_ranks, in_a_job, launch

    if in_a_job():
        _run_rank(options)
        return
    num_ranks = options.ranks or default_num_ranks()
    read_prompts(options)
    check_outputs(json=options.json, out=options.out)
    if options.degrees and math.prod(options.degrees.values()) != num_ranks:
        said = " x ".join(f"{name} {degree}" for name, degree in options.degrees.items())
        raise ConfigError(
            f"{said} on {num_ranks} ranks: the product must be {num_ranks}: change one of "
            "--replicas, --guidance-ranks, --ring, --ulysses, or --ranks"
        )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # says it again
    try:
        launch(num_ranks, arguments)
    except CommError as error:
        raise CommError(
            f"{error}; what is done is in {options.out}, and the same command makes the rest"
        ) from error


def _run_rank(options: GenerateOptions) -> None:
    from bascule.cli.launch import joined, stopping_quietly
    from bascule.generate.generating import Generation

    with stopping_quietly(), joined(options.timeout_s) as device:
        run = Generation(options, device)
        _follow(run, options, Console(quiet=run.rank > 0, stderr=options.json == STDOUT))


def _follow(run: "Generation", options: GenerateOptions, console: Console) -> None:
    """Run, and show how far it is and what it took."""
    num_there = len(run.prompts) - run.num_left
    if num_there:
        console.print(f"{num_there} of {len(run.prompts)} outputs are there already")
    columns = (
        TextColumn("prompt {task.fields[place]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(),
    )
    total = sum(run.num_steps(place) for place in run.left)
    with Progress(*columns, console=console, disable=not run.left) as progress:
        bar = progress.add_task("", total=total, place="..")

        def on_step(place: int) -> None:
            progress.update(bar, advance=1, place=f"{place + 1} of {len(run.prompts)}")

        made = run.run(on_step)
    if console.quiet:
        return
    write_json(console, options.json, report_of(made, run.degrees))
    if made:
        console.print(_table(made))
        tell_written(console, *(options.out / one["file"] for one in made))
    else:
        console.print(f"nothing is left to make in {options.out}", soft_wrap=True)


def report_of(made: list[dict[str, Any]], degrees: dict[str, int]) -> dict[str, Any]:
    """What was made, and the mean seconds of each phase, as plain values."""
    phases = made[0]["seconds"] if made else {}
    seconds = {name: mean(one["seconds"][name] for one in made) for name in phases}
    return {"degrees": degrees, "seconds": seconds, "outputs": made}


def _table(made: list[dict[str, Any]]) -> Table:
    table = Table("file", *made[0]["seconds"], title="seconds of each phase")
    for one in made[-10:]:
        table.add_row(one["file"], *(f"{spent:.2f}" for spent in one["seconds"].values()))
    return table
