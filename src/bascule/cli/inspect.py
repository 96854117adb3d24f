"""`bascule inspect samples.parquet --bucket 1024:64`: show how a table is understood."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from bascule.errors import ConfigError
from bascule.options import POSITIONAL, Group, Outputs
from bascule.quantities import number, percent, times
from bascule.report.charts import draw_lengths
from bascule.report.page import Fact, Report, Rows
from bascule.workload.options import ManifestOptions

if TYPE_CHECKING:
    from bascule.workload.manifest import Manifest

_NUM_BINS = 12


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Outputs, ManifestOptions):
    """Show how bascule reads the table of a data set, and how long its samples are.

    Other commands accept the same options, and plan, simulate or train with these lengths.

    Attributes:
        table: Table of your samples, which other commands read with --manifest.
    """

    table: Annotated[Path | None, POSITIONAL, Group("Table")] = None


def run(options: InspectOptions, arguments: list[str]) -> None:
    """Read the table, and publish its lengths."""
    from bascule.cli.command import publish, waiting

    tables = [path for path in (options.table, options.manifest) if path is not None]
    if len(tables) != 1:
        raise ConfigError("give one table, such as bascule inspect samples.parquet")
    with waiting("reading the table"):
        manifest = options.read_table(tables[0])
    publish(options, report_of(manifest))


def report_of(manifest: "Manifest") -> Report:
    """Report the lengths of a data set, and how bascule read its table."""
    lens = manifest.lens
    edges = np.geomspace(max(lens.min(), 1), lens.max() + 1, _NUM_BINS + 1).round().astype(int)
    edges = np.unique([lens.min(), *edges[1:]])
    counts = np.histogram(lens, edges)[0].tolist()
    total = int(lens.sum())
    longest_share = np.sort(lens)[-max(len(lens) // 10, 1) :].sum() / max(total, 1)
    bins = zip(edges[:-1].tolist(), (edges[1:] - 1).tolist(), counts, strict=True)
    formats = {"tokens from": number, "to": number, "samples": number}
    return Report(
        title=f"Samples of {manifest.path}",
        answer=f"The longest tenth of the samples has {percent(longest_share)} of the tokens.",
        facts=(
            Fact("samples", "samples", len(manifest), number),
            Fact("tokens", "tokens in all samples", total, number),
            Fact("text_tokens", "text tokens among them", int(manifest.text_tokens.sum()), number),
            Fact("longest", "tokens of the longest sample", int(lens.max()), number),
            Fact("over_mean", "longest over average", lens.max() / max(lens.mean(), 1), times),
        ),
        parts=(draw_lengths(lens), Rows("Lengths", formats, list(bins), bars=counts)),
        data=tuple(manifest.summary()),
    )
