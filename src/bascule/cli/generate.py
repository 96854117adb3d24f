"""`bascule generate --prompt "a boat on a lake" --ranks 2`: images and videos over ranks."""

import logging
from statistics import mean
from typing import TYPE_CHECKING, Any

from bascule.errors import CommError
from bascule.generate.options import GenerateOptions, are_made, read_prompts

if TYPE_CHECKING:
    import torch

    from bascule.report.page import Report


def run(options: GenerateOptions, arguments: list[str]) -> None:
    """Make the missing outputs on all ranks, and publish the seconds of each phase."""
    from bascule.cli.command import on_ranks, progress, publish, saved
    from bascule.cli.launch import in_a_job, stopping_quietly

    def generate(device: "torch.device") -> dict[str, Any]:
        from bascule.generate.generation import Generation

        with stopping_quietly():
            job = Generation(options, device)
            num_steps, num = sum(map(job.num_steps, job.missing)), len(job.prompts)
            with progress("denoising", num_steps) as advance:
                outputs = job.run(lambda index, _: advance(1, f"prompt {index + 1} of {num}"))
        phases = outputs[0]["seconds"] if outputs else ()
        seconds = {name: mean(output["seconds"][name] for output in outputs) for name in phases}
        return {"degrees": options.mesh, "prompts": num, "seconds": seconds, "outputs": outputs}

    def finish(result: dict[str, Any]) -> None:
        console = publish(options, _report(options, result))
        if result["outputs"]:
            saved(console, *(options.out / output["file"] for output in result["outputs"]))

    prompts = read_prompts(options)
    if not in_a_job() and are_made(prompts, options):
        return finish({"degrees": {}, "prompts": len(prompts), "seconds": {}, "outputs": []})
    logger = logging.getLogger("torch.distributed.elastic")  # repeats the ranks' errors
    try:
        on_ranks(options, arguments, generate, finish, lambda _: logger.setLevel(logging.CRITICAL))
    except CommError as error:
        rest = f"finished outputs are in {options.out}, and the same command makes the others"
        raise CommError(f"{error}; {rest}") from error


def _report(options: GenerateOptions, result: dict[str, Any]) -> "Report":
    from bascule.quantities import Scale, count, seconds
    from bascule.report.page import Fact, Report, Rows

    outputs, means, prompts = result["outputs"], result["seconds"], result["prompts"]
    rows = [(output["file"], *output["seconds"].values()) for output in outputs]
    scale = Scale.of((value for row in rows for value in row[1:]), "s")
    columns = {"file": "{}", **dict.fromkeys(means, scale)}
    answer = f"{len(outputs)} of {prompts} outputs were missing and are in {options.out} now."
    if not outputs:
        answer = f"nothing is left to make in {options.out}"
    mesh = "".join(f", {name} {degree}" for name, degree in result["degrees"].items())
    return Report(
        title=f"{count(prompts, 'output')} of {options.model}{mesh}",
        answer=answer,
        facts=tuple(Fact(name, f"{name}, average", mean, seconds) for name, mean in means.items()),
        parts=(Rows(f"time of each phase, {scale.unit}", columns, rows),) if rows else (),
        values=result,
    )
