"""`bascule calibrate`: measure this machine on local ranks or in a job, and save a profile."""

from typing import TYPE_CHECKING, Any

from bascule.calibrate.options import CalibrateOptions

if TYPE_CHECKING:
    import torch

_FORMAT = {"bascule": "calibration report", "version": 1}
_ROUNDS_THAT_DO_NOT_COUNT = 2


def run(options: CalibrateOptions, arguments: list[str]) -> int | None:
    """Measure and save; return 1 if the profile was too bad for that."""
    from bascule.cli.command import on_ranks, progress, publish, saved
    from bascule.machine.cluster import HardwareProfile
    from bascule.report.measured import of_calibration

    def measure(device: "torch.device") -> dict[str, Any]:
        from bascule.calibrate.measuring import measure, profile_of, refusals

        with progress("measuring", options.rounds + _ROUNDS_THAT_DO_NOT_COUNT) as advance:
            profile = profile_of(measure(options, device, advance), options)
        refused = refusals(profile, options.limit, attends=options.module is None)
        return {**_FORMAT, "refused": refused, "profile": profile.to_dict()}

    def finish(result: dict[str, Any]) -> int:
        profile = HardwareProfile.of_dict(result["profile"], "the report")
        console = publish(options, of_calibration(profile, result["refused"]), result)
        if result["refused"]:
            console.print(f"nothing was saved to {options.out}", markup=False, soft_wrap=True)
            return 1
        profile.save(options.out)
        saved(console, options.out)
        return 0

    def prepare(num_ranks: int) -> None:
        import torch

        from bascule.calibrate.measuring import check_block
        from bascule.cli.launch import device_type

        options.check()
        check_block(options, torch.device(device_type()))

    return on_ranks(options, arguments, measure, finish, prepare)
