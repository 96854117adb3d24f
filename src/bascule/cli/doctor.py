"""`bascule doctor --ranks 2 --rounds 3`: check the ranks before a run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bascule.bench.options import DoctorOptions
from bascule.quantities import Scale, count, num_bytes, percent, times
from bascule.report.page import Format, Report, Rows

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
    """Report the checks of ranks and links, the slow ones first."""
    first, findings = report["ranks"][0], report["findings"]
    ranks = sorted(
        report["ranks"], key=lambda row: -max(x["times_median"] for x in row["work"].values())
    )
    memory, store = _column(ranks, "memory_bytes", "B"), _column(ranks, "store_s", "s")
    fields = "rank", "host", "device", "memory_bytes", "num_threads", "store_s"
    formats = {"rank": str, "host": str, "device": str, f"memory, {memory.unit}": memory}
    formats |= {"threads": str, f"store, {store.unit}": store}
    speeds: dict[str, Format] = {"rank": str}
    for name in first["work"]:
        rate = _column([row["work"][name] for row in ranks], "flops_per_s", "FLOP/s")
        speeds |= {f"{name}, {rate.unit}": rate, f"{name}, time over median": times}
    per_work = "flops_per_s", "times_median"
    work = [
        (row["rank"], *(work[name] for work in row["work"].values() for name in per_work))
        for row in ranks
    ]
    call_columns = {"": str, "on": str, "size on a rank": num_bytes}
    call_columns |= _time_and_rate(report["collectives"]) | {"slowest rank": str}
    of_call = "name", "on", "size_bytes", "seconds", "bytes_per_s", "slowest_rank"
    calls = [[row[field] for field in of_call] for row in report["collectives"]]
    order = [row[0] for row in calls]
    calls.sort(key=lambda row: (row[1], order.index(row[0])))
    latency, rate = _time_and_rate(report["links"]).items()
    link_columns = {"ranks": str, "on": str, "where": str, "message": num_bytes}
    link_columns |= dict([latency]) | {"large message": num_bytes} | dict([rate])
    links: dict[tuple[str, tuple[int, int]], list[dict[str, Any]]] = {}
    for row in report["links"]:
        links.setdefault((row["on"], tuple(row["ranks"])), []).append(row)
    neighbours = list[tuple[Any, ...]]()
    for small, *_, large in links.values():
        where = "one host" if large["same_host"] else "two hosts"
        sizes = small["num_bytes"], small["seconds"], large["num_bytes"], large["bytes_per_s"]
        neighbours.append(("{} and {}".format(*large["ranks"]), large["on"], where, *sizes))
    neighbours.sort(key=lambda row: row[-1])
    shared = ("Python", "torch", "bascule", "numpy", "CUDA", "NCCL")
    versions = ", ".join(f"{name} {first[name.lower()]}" for name in shared)
    num_ranks, rounds = count(report["num_ranks"], "rank"), count(report["rounds"], "round")
    passed = (
        f"All checks passed: no rank is steadily over {percent(report['tolerance'])} slower than "
        f"the median rank, no link over {percent(report['link_tolerance'])} slower than the median."
    )
    return Report(
        title=f"{num_ranks}, medians of {rounds}",
        answer=f"{count(len(findings), 'finding')}." if findings else passed,
        facts=(),
        parts=(
            Rows("Ranks", formats, [[row[field] for field in fields] for row in ranks]),
            Rows("Speeds", speeds, work),
            Rows("Collectives", call_columns, calls),
            Rows("Neighbours", link_columns, neighbours),
        ),
        notes=(
            *(f"found ({finding['kind']}): {finding['text']}" for finding in findings),
            f"rank 0: {versions}, back end {first['backend']}, timeout {first['timeout_s']} s",
            "bytes per second: what the slowest rank has to send at least, over its time",
        ),
        values=report,
    )


def _column(rows: Sequence[Mapping[str, Any]], name: str, unit: str) -> Scale:
    return Scale.of((row[name] for row in rows), unit)


def _time_and_rate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Scale]:
    time, rate = _column(rows, "seconds", "s"), _column(rows, "bytes_per_s", "B/s")
    return {f"time, {time.unit}": time, rate.unit: rate}
