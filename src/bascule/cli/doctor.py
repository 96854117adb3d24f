"""`bascule doctor`: check the ranks before a run, on local ranks or in a job that runs."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bascule.bench.doctor_options import DoctorOptions
from bascule.cli.writing import STDOUT, check_outputs, progress_bar, write_json
from bascule.errors import ConfigError
from bascule.plan.machine import HardwareProfile

_MAX_ROWS = 64


def run(options: DoctorOptions, arguments: list[str]) -> int:
    """Launch the local ranks, or be one; whether something was found.

    Raises:
        ConfigError: An option is wrong.
        CommError: A rank failed.
    """
    from bascule.cli.launch import in_a_job, report_of_ranks

    options.check()
    check_outputs(json=options.json)
    if in_a_job():
        return int(_run_rank(options))
    if options.profile is not None:
        HardwareProfile.load(options.profile)
    report = json.loads(report_of_ranks(options.ranks, arguments))
    _tell(options, report)
    return int(bool(report["findings"]))


def _run_rank(options: DoctorOptions) -> bool:
    """Be a rank; where the launcher is ours, the first one hands it the report."""
    from bascule.bench.checkup import check_up
    from bascule.cli.launch import hand_over, is_waited_for, joined
    from bascule.comm.agree import agree
    from bascule.comm.groups import member_of, resolve

    with joined(options.timeout_s) as device:
        group, error = member_of(resolve(None), "doctor"), None
        with progress_bar(Console(stderr=True, quiet=group.rank > 0)) as progress:
            bar = progress.add_task("checking the ranks", total=options.rounds + 1)
            report = check_up(options, device, lambda: progress.advance(bar))
        if group.rank == 0 and not hand_over(json.dumps(report.to_dict())):
            try:
                _tell(options, report.to_dict())
            except ConfigError as met:
                error = met
        # A launcher ends all ranks when the first one ends with findings: not before it has told.
        agree(group, {}, error, what="bascule doctor, the report")
    return bool(report.findings) and not is_waited_for()


def _tell(options: DoctorOptions, report: dict[str, Any]) -> None:
    """Print the tables, write the JSON.

    Raises:
        ConfigError: The file cannot be written.
    """
    console = Console(stderr=options.json == STDOUT)
    show(console, report)
    write_json(console, options.json, report)


def show(console: Console, report: dict[str, Any]) -> None:
    """Print a report."""
    for table in (_ranks(report), _collectives(report), _links(report)):
        if table.row_count:
            console.print(table)
    ranks = report["ranks"]
    first = ranks[0]
    console.print(
        f"rank 0: Python {first['python']}, torch {first['torch']}, bascule {first['bascule']}, "
        f"numpy {first['numpy']}, CUDA {first['cuda']}, NCCL {first['nccl']}, "
        f"back end {first['backend']}, timeout {_or_unknown(first['timeout_s'], '{:g} s')}\n"
        f"medians of {report['rounds']} rounds; GB/s count what a rank has to send at least, "
        "on the slowest rank; of work, GFLOP/s, and how many times as long as on the median rank",
        markup=False,
        soft_wrap=True,
    )
    for finding in report["findings"]:
        line = f"found ({finding['kind']}): {finding['text']}"
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    if not report["findings"]:
        console.print("nothing was found")


def _table(title: str, columns: Sequence[str], num_left: int) -> Table:
    table = Table(title=title)
    for place, name in enumerate(columns):
        is_left = place < num_left
        table.add_column(name, justify="left" if is_left else "right", no_wrap=not is_left)
    return table


def _ranks(report: dict[str, Any]) -> Table:
    """A row a rank; of many ranks those that compute slowest."""
    names = list(report["ranks"][0]["work"])
    columns = ["rank", "host", "device", "memory", "threads", "store"]
    rows = sorted(report["ranks"], key=lambda row: -_slowness(row))[:_MAX_ROWS]
    left = len(report["ranks"]) - len(rows)
    title = f"{report['num_ranks']} ranks" + (f", {left} fast ones left out" if left else "")
    table = _table(title, [*columns, *names], 3)
    for row in sorted(rows, key=lambda row: row["rank"]):
        work = [row["work"][name] for name in names]
        size = row["memory_bytes"]
        table.add_row(
            str(row["rank"]),
            row["host"],
            row["device"],
            _or_unknown(None if size is None else size / 1e9, "{:.1f} GB"),
            str(row["num_threads"]),
            f"{row['store_s'] * 1e3:.2f} ms",
            *(f"{x['flops_per_s'] / 1e9:,.1f}, {x['times_median']:.2f}x" for x in work),
        )
    return table


def _slowness(row: dict[str, Any]) -> float:
    return max(work["times_median"] for work in row["work"].values())


def _collectives(report: dict[str, Any]) -> Table:
    """A row a collective, place of its tensors and size."""
    table = _table("collectives", ["", "on", "a rank holds", "time", "GB/s", "slowest rank"], 2)
    order = {name: n for n, name in enumerate(row["name"] for row in report["collectives"])}
    rows = sorted(report["collectives"], key=lambda row: (row["on"], order[row["name"]]))
    for row in rows:
        table.add_row(
            row["name"],
            row["on"],
            _size(row["size_bytes"]),
            _time(row["seconds"]),
            f"{row['bytes_per_s'] / 1e9:.3g}",
            str(row["slowest_rank"]),
        )
    return table


def _links(report: dict[str, Any]) -> Table:
    """A row a link, by its smallest and its largest message; of many, those that are slowest."""
    links: dict[tuple[str, tuple[int, int]], list[dict[str, Any]]] = {}
    for row in report["links"]:
        links.setdefault((row["on"], tuple(row["ranks"])), []).append(row)
    rows = sorted(links.values(), key=lambda sizes: sizes[-1]["bytes_per_s"])[:_MAX_ROWS]
    left = len(links) - len(rows)
    title = "neighbours" + (f", {left} fast ones left out" if left else "")
    table = _table(title, ["ranks", "on", "where", "smallest message", "largest, GB/s"], 3)
    for sizes in sorted(rows, key=lambda sizes: (sizes[0]["on"], sizes[0]["ranks"])):
        first, last = sizes[0], sizes[-1]
        table.add_row(
            "{} and {}".format(*first["ranks"]),
            first["on"],
            "one host" if first["same_host"] else "two hosts",
            f"{_time(first['seconds'])}, {_size(first['num_bytes'])}",
            f"{last['bytes_per_s'] / 1e9:.3g}, {_size(last['num_bytes'])}",
        )
    return table


def _size(num_bytes: float) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:g} B"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def _or_unknown(value: float | None, form: str) -> str:
    return "unknown" if value is None else form.format(value)
