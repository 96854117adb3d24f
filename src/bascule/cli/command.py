"""The skeleton of all commands: checked options in, one report out.

A module `bascule.cli.NAME` has `run(options, arguments)`, which returns the exit status. `main`
parses the options, and checks them by their types. `publish` writes the report; `on_ranks` runs
work on ranks. `progress` shows a bar, `waiting` a spinner; `saved` prints names of written files.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status

from bascule.cli.inputs import InputOptions
from bascule.errors import ConfigError
from bascule.options import STDOUT, Outputs, RankOptions
from bascule.report.page import Report, render

if TYPE_CHECKING:
    import torch

_MOST_NAMED = 2  # written files


def publish(options: Outputs, report: Report) -> Console:
    """Show a report, and write it to --json and --report."""
    console = Console(stderr=options.json == STDOUT)
    if isinstance(options, InputOptions):
        report = replace(report, data=tuple(options.data_lines))
    report.show(console)
    text = json.dumps(report.to_dict(), indent=2) + "\n"
    if options.json == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    elif options.json is not None:
        write(console, "--json", options.json, text)
    if options.report is not None:
        write(console, "--report", options.report, render(report))
    return console


def write(console: Console, option: str, path: Path, text: str) -> None:
    """Write the file of an option, and print its name."""
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} {path}: cannot be written: {reason}") from None
    saved(console, path)


def saved(console: Console, *paths: Path) -> None:
    """Print the names of written files, or their folder if there are many."""
    folder = f"{paths[0].parent} ({len(paths)} files)" if len(paths) > _MOST_NAMED else ""
    text = f"written: {folder or ', '.join(map(str, paths))}"
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def on_ranks(
    options: RankOptions,
    arguments: list[str],
    work: "Callable[[torch.device], Any]",
    finish: Callable[[Any], int | None],
    prepare: Callable[[int], None] | None = None,
    max_restarts: int = 0,
) -> int | None:
    """Run `work` on all ranks of this job, or on ranks launched here; return `finish`'s status.

    `prepare` gets the number of ranks before they start. `finish` gets rank 0's result, which must
    be JSON. It runs in the process of the user's command: the launcher, or rank 0 of a job. Ranks
    launched here start again if one dies, `max_restarts` times at most.
    """
    from bascule.cli import launch

    if not launch.in_a_job():
        num_ranks = launch.num_ranks_here(options.ranks)
        if prepare is not None:
            prepare(num_ranks)
        return finish(json.loads(launch.result_of_ranks(num_ranks, arguments, max_restarts)))
    from bascule.comm.agree import agree
    from bascule.comm.groups import member_of, resolve

    if options.ranks is not None and options.ranks != (size := int(os.environ["WORLD_SIZE"])):
        what = f"--ranks {options.ranks}: the launcher of this job started {size} ranks"
        raise ConfigError(f"{what}; leave it out")
    status, error = None, None
    with launch.joined(options.timeout_s) as device:
        result, group = work(device), member_of(resolve(None), "the command")
        if group.rank == 0 and not launch.hand_over(text := json.dumps(result)):
            try:
                status = finish(json.loads(text))
            except ConfigError as refusal:
                error = refusal
        # Waits for rank 0: a launcher ends all ranks when one ends with an error.
        agree(group, {}, error, what=f"bascule {arguments[0]}, its report")
    return status


def waiting(task: str) -> Status:
    """Show a spinner on standard error while the `with` block runs."""
    return Console(stderr=True).status(task)


@contextmanager
def quietly() -> Iterator[None]:
    """Mute bascule's log in the launcher, because rank 0 logs the same messages."""
    logger = logging.getLogger("bascule")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def progress(task: str, total: int, *, done: int = 0) -> Iterator[Callable[..., None]]:
    """Show a bar on standard error, on rank 0; yield `advance(steps=1, task=None)`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining()
    console = Console(stderr=True)
    is_hidden = os.environ.get("RANK", "0") != "0" or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as bar:
        row = bar.add_task(task, total=total, completed=done)

        def advance(steps: int = 1, task: str | None = None) -> None:
            bar.update(row, advance=steps, description=task)

        yield advance
