"""`bascule bench`: measure what balancing is worth, on local ranks or in a job that runs."""

import json
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bascule.bench.options import BenchOptions

if TYPE_CHECKING:
    import torch


def run(options: BenchOptions, arguments: list[str]) -> int | None:
    """Train all ways, compare, and write the numbers of the run and of its steps."""
    from bascule.cli.command import on_ranks, progress, publish, quietly, saved
    from bascule.report.measured import of_bench

    def compare(device: "torch.device") -> dict[str, Any]:
        from bascule.bench.comparison import Comparison, summarize

        comparison, records = Comparison(options, device), []
        with progress("training all ways", options.steps) as advance:
            for of_step in comparison.run():
                records.extend(of_step)
                advance()
        summary = summarize(records, comparison.setting, options)
        return {"summary": summary, "steps": records}

    def finish(result: dict[str, Any]) -> None:
        summary, steps = result["summary"], result["steps"]
        console = publish(options, of_bench(summary, steps), summary)
        options.out.mkdir(parents=True, exist_ok=True)
        files = options.out / "summary.json", options.out / "steps.jsonl"
        for path, place in zip(files, _free_places(*files), strict=True):
            if path.exists():
                path.replace(place)
                console.print(f"kept: {place}", markup=False, highlight=False, soft_wrap=True)
        files[0].write_text(json.dumps(summary, indent=2) + "\n")
        files[1].write_text("".join(json.dumps(step) + "\n" for step in steps))
        saved(console, *files)

    def prepare(num_ranks: int) -> None:
        from bascule.bench.comparison import open_stream
        from bascule.train.encoders import load_encoders
        from bascule.train.model import check_kernel, model_config

        options.check(num_ranks)
        with quietly():  # the first rank warns of the same photos
            stream = open_stream(options, load_encoders(options), 0, num_ranks)
        check_kernel(options, model_config(options, stream))

    return on_ranks(options, arguments, compare, finish, prepare)


def _free_places(*paths: Path) -> list[Path]:
    """Return where files of an earlier run are kept: in summary.1.json, or with the next number."""
    numbered = ([path.with_suffix(f".{n}{path.suffix}") for path in paths] for n in count(1))
    return next(places for places in numbered if not any(place.exists() for place in places))
