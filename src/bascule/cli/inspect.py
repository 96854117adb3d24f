"""`bascule inspect samples.parquet --bucket 1024:64`: show how a table is understood."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from bascule.options import POSITIONAL, Group, Outputs
from bascule.report.charts import draw_lengths
from bascule.report.page import Fact, Report, Rows, columns
from bascule.workload.options import TokenOptions

if TYPE_CHECKING:
    from bascule.workload.manifest import Manifest

_NUM_BINS = 12


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Outputs, TokenOptions):
    """Show how the table of a data set is understood, and how long its samples are.

    Other commands take the same options, and plan, simulate or train with what is shown here.

    Attributes:
        manifest: Table of your samples (.parquet, .csv, .json, .jsonl, .tar, .toml), or a folder.
    """

    manifest: Annotated[Path, POSITIONAL, Group("Table")]


def run(options: InspectOptions, arguments: list[str]) -> None:
    """Read the table, and publish its lengths."""
    from bascule.cli.command import publish, waiting

    with waiting("reading"):
        manifest = options.read_table(options.manifest)
    publish(options, report_of(manifest))


def report_of(manifest: "Manifest") -> Report:
    """Report the lengths of a data set, and how its table was understood."""
    lens = manifest.lens
    edges = np.geomspace(max(lens.min(), 1), lens.max() + 1, _NUM_BINS + 1).round().astype(int)
    edges = np.unique([lens.min(), *edges[1:]])
    counts = np.histogram(lens, edges)[0].tolist()
    total = int(lens.sum())
    longest_share = np.sort(lens)[-max(len(lens) // 10, 1) :].sum() / max(total, 1)
    bins = zip(edges[:-1].tolist(), (edges[1:] - 1).tolist(), counts, strict=True)
    formats = columns("tokens from: {:,}", "to: {:,}", "samples: {:,}")
    return Report(
        title=f"Samples of {manifest.path}",
        answer=f"The longest tenth of the samples has {longest_share:.0%} of the tokens.",
        facts=(
            Fact("samples", "samples", len(manifest), "{:,}"),
            Fact("tokens", "tokens", total, "{:,}"),
            Fact("text_tokens", "of text", int(manifest.text_tokens.sum()), "{:,}"),
            Fact("longest", "longest sample", int(lens.max()), "{:,}"),
            Fact(
                "over_mean", "longest over mean", float(lens.max() / max(lens.mean(), 1)), "{:.1f}x"
            ),
        ),
        parts=(draw_lengths(lens), Rows("Lengths", formats, list(bins), bars=counts)),
        data=tuple(manifest.summary()),
    )
