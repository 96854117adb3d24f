"""`bascule calibrate`: measure this machine on local ranks or in a job, and save a profile."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from bascule.calibrate.options import CalibrateOptions
from bascule.cli.writing import (
    STDOUT,
    check_outputs,
    progress_bar,
    tell_written,
    write_json,
    write_report,
)
from bascule.errors import ConfigError
from bascule.plan.calibration import TOKENS, Fit
from bascule.plan.machine import HardwareProfile
from bascule.report.calibration_page import of_calibration

_FORMAT = {"bascule": "calibration report", "version": 1}
_ROUNDS_THAT_DO_NOT_COUNT = 2
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"), (1e-12, "ps"), (1e-15, "fs"))


def run(options: CalibrateOptions, arguments: list[str]) -> int:
    """Launch the local ranks, or be one; whether a profile was saved.

    Raises:
        ConfigError: An option is wrong.
        CommError: A rank failed.
    """
    import torch

    from bascule.calibrate.measuring import check_block
    from bascule.cli.launch import device_type, in_a_job, report_of_ranks

    options.check()
    check_outputs(out=options.out, json=options.json, report=options.report)
    if options.out.is_dir():
        raise ConfigError(f"--out {options.out}: is a folder; give the name of a file in it")
    if not options.out.parent.is_dir():
        raise ConfigError(f"--out {options.out}: there is no folder {options.out.parent}")
    if in_a_job():
        return int(not _run_rank(options))
    check_block(options, torch.device(device_type()))
    return int(not _tell(options, json.loads(report_of_ranks(options.ranks, arguments))))


def _run_rank(options: CalibrateOptions) -> bool:
    """Be a rank; where the launcher is ours, the first one hands it the report."""
    from bascule.calibrate.measuring import measure
    from bascule.calibrate.profiles import profile_of, refusals
    from bascule.cli.launch import hand_over, is_waited_for, joined
    from bascule.comm.agree import agree
    from bascule.comm.groups import member_of, resolve

    is_saved, error = True, None
    with joined(options.timeout_s) as device:
        group = member_of(resolve(None), "calibrate")
        with progress_bar(Console(stderr=True, quiet=group.rank > 0)) as progress:
            bar = progress.add_task("measuring", total=options.rounds + _ROUNDS_THAT_DO_NOT_COUNT)
            measured = measure(options, device, lambda: progress.advance(bar))
        if group.rank == 0:
            try:
                profile = profile_of(measured, options)
                refused = refusals(profile, options.limit, attends=options.module is None)
                report = {**_FORMAT, "refused": refused, "profile": profile.to_dict()}
                if not hand_over(json.dumps(report)):
                    is_saved = _tell(options, report)
            except ConfigError as met:
                error = met
        # A launcher ends all ranks when the first one ends with 1: not before it has told.
        agree(group, {}, error, what="bascule calibrate, the profile")
    return is_saved or is_waited_for()


def _tell(options: CalibrateOptions, report: dict[str, Any]) -> bool:
    """Print, draw and save; whether the profile was good enough for that.

    Raises:
        ConfigError: A file cannot be written.
    """
    profile = HardwareProfile.of_dict(report["profile"], "the report")
    console = Console(stderr=options.json == STDOUT)
    show(console, profile)
    write_json(console, options.json, report)
    if options.report is not None:
        write_report(console, options.report, of_calibration(profile, report["refused"]))
    for line in report["refused"]:
        _print(console, f"refused: {line}")
    if report["refused"]:
        _print(console, f"nothing was saved to {options.out}")
        return False
    profile.save(options.out)
    _print(console, f"{profile}\nthe profile, for --profile of the other commands:")
    tell_written(console, options.out)
    return True


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True, highlight=False, emoji=False)


def show(console: Console, profile: HardwareProfile) -> None:
    """Print the curves of a calibration, what does not grow, and what was left as it was."""
    made = profile.calibration
    assert made is not None
    table = Table(title=f"{profile.device}, {made.num_ranks} ranks")
    table.add_column("")
    for name in ("a call", "a token, byte", "a pair", "missed"):
        table.add_column(name, justify="right", no_wrap=True)
    for fit in made.fits:
        table.add_row(fit.what, *_cells(fit))
    console.print(table)
    for one in made.overheads:
        _print(console, f"{one.what}: {_with_error(one.seconds, one.error)}")
    _print(
        console,
        "seconds a call, a token or byte, and a pair of tokens, with half the widths of 95 % "
        "confidence intervals; every third size was held out of the fits, and is missed by so much "
        f"in the median\nmeasured: {', '.join(made.measured)}; {made.settings}",
    )
    if left := [name for name in profile.numbers if name not in made.measured]:
        _print(console, f"not measured, taken from {made.base}: {', '.join(left)}")


def _cells(fit: Fit) -> list[str]:
    pairs = zip(fit.coefficients, fit.errors, strict=True)
    cells = [_with_error(value, error) for value, error in pairs]
    error = fit.held_out_error
    return [*cells, *([] if fit.unit == TOKENS else [""]), "" if error is None else f"{error:.1%}"]


def _with_error(seconds: float, error: float | None) -> str:
    """Both in one unit."""
    largest = max(seconds, error or 0.0)
    unit, name = next((x for x in _UNITS if largest >= x[0]), _UNITS[-1])
    told = "unknown" if error is None else f"{error / unit:.2g}"
    return f"{seconds / unit:.3g} ± {told} {name}"
