"""`bascule doctor --ranks 2 --rounds 3`: check the ranks before a run."""

from itertools import chain
from typing import TYPE_CHECKING, Any

from bascule.bench.options import DoctorOptions
from bascule.report.page import Report, Rows, columns

if TYPE_CHECKING:
    import torch


def run(options: DoctorOptions, arguments: list[str]) -> int | None:
    """Check the ranks; return 1 if there are findings."""
    from bascule.cli.command import on_ranks, progress, publish
    from bascule.machine.cluster import HardwareProfile

    def check(device: "torch.device") -> dict[str, Any]:
        from bascule.bench.doctor import check_up

        with progress("checking the ranks", options.rounds + 1) as advance:
            return check_up(options, device, advance)

    def finish(report: dict[str, Any]) -> int:
        publish(options, report_of(report))
        return int(bool(report["findings"]))

    def prepare(_: int) -> None:
        if options.profile is not None:
            HardwareProfile.load(options.profile)

    return on_ranks(options, arguments, check, finish, prepare)


def report_of(report: dict[str, Any]) -> Report:
    """Report a check-up of ranks; the slow ranks and links stand first."""
    first, findings = report["ranks"][0], report["findings"]
    formats = columns("rank", "host", "device", "GB: {:.1f}", "threads", "store, ms: {:.2f}")
    for work in first["work"]:
        formats |= columns(f"{work}, GFLOP/s: {{:,.1f}}", f"{work}, over median: {{:.2f}}x")
    ranks = [
        (
            *(row[name] for name in ("rank", "host", "device")),
            row["memory_bytes"] and row["memory_bytes"] / 1e9,
            row["num_threads"],
            row["store_s"] * 1e3,
            *chain.from_iterable(
                (work["flops_per_s"] / 1e9, work["times_median"]) for work in row["work"].values()
            ),
        )
        for row in report["ranks"]
    ]
    ranks.sort(key=lambda row: -max(row[7::2]))
    sizes = {"a rank holds": _size, "time": _time}
    call_columns = columns("", "on") | sizes | {"GB/s": _giga} | columns("slowest rank")
    order = [row["name"] for row in report["collectives"]]
    fields = "name", "on", "size_bytes", "seconds", "bytes_per_s", "slowest_rank"
    calls = [[row[field] for field in fields] for row in report["collectives"]]
    calls.sort(key=lambda row: (row[1], order.index(row[0])))
    sizes = {"message": _size, "time": _time, "large message": _size}
    link_columns = columns("ranks", "on", "where") | sizes | {"GB/s": _giga}
    links: dict[tuple[str, tuple[int, int]], list[dict[str, Any]]] = {}
    for row in report["links"]:
        links.setdefault((row["on"], tuple(row["ranks"])), []).append(row)
    neighbours = [
        (
            "{} and {}".format(*last["ranks"]),
            last["on"],
            "one host" if last["same_host"] else "two hosts",
            small["num_bytes"],
            small["seconds"],
            last["num_bytes"],
            last["bytes_per_s"],
        )
        for small, *_, last in links.values()
    ]
    neighbours.sort(key=lambda row: row[-1])
    shared = ("Python", "torch", "bascule", "numpy", "CUDA", "NCCL")
    versions = ", ".join(f"{name} {first[name.lower()]}" for name in shared)
    return Report(
        title=f"{report['num_ranks']} ranks, medians of {report['rounds']} rounds",
        answer=f"{len(findings)} findings." if findings else "nothing was found",
        facts=(),
        parts=(
            Rows("Ranks", formats, ranks),
            Rows("Collectives", call_columns, calls),
            Rows("Neighbours", link_columns, neighbours),
        ),
        notes=(
            *(f"found ({finding['kind']}): {finding['text']}" for finding in findings),
            f"rank 0: {versions}, back end {first['backend']}, timeout {first['timeout_s']} s",
            "GB/s count what a rank has to send at least, on the slowest rank",
        ),
        values=report,
    )


def _size(num_bytes: float) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:g} B"


def _giga(amount: float) -> str:
    return f"{amount / 1e9:.3g}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"
