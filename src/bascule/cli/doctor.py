"""`bascule doctor`: check the ranks before a run, on local ranks or in a job that runs."""

from typing import TYPE_CHECKING, Any

from bascule.bench.options import DoctorOptions

if TYPE_CHECKING:
    import torch


def run(options: DoctorOptions, arguments: list[str]) -> int | None:
    """Check the ranks; return 1 if something was found."""
    from bascule.cli.command import on_ranks, progress, publish
    from bascule.machine.cluster import HardwareProfile
    from bascule.report.measured import of_doctor

    def check(device: "torch.device") -> dict[str, Any]:
        from bascule.bench.doctor import check_up

        with progress("checking the ranks", options.rounds + 1) as advance:
            return check_up(options, device, advance)

    def finish(report: dict[str, Any]) -> int:
        publish(options, of_doctor(report), report)
        return int(bool(report["findings"]))

    def prepare(_: int) -> None:
        if options.profile is not None:
            HardwareProfile.load(options.profile)

    return on_ranks(options, arguments, check, finish, prepare)
