"""`bascule inspect`: show how the table of a data set is understood, and its lengths."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from bascule.options import Outputs
from bascule.workload.options import TokenOptions


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Outputs, TokenOptions):
    """Show how the table of a data set is understood, and how long its samples are.

    Other commands take the same options, and plan, simulate or train with what is shown here.

    Attributes:
        manifest: Table of your samples (.parquet, .csv, .json, .jsonl, .tar, .toml), or a folder.
    """

    manifest: Positional[Path]


def run(options: InspectOptions, arguments: list[str]) -> None:
    """Read the table, and publish its lengths."""
    from bascule.cli.command import publish, waiting
    from bascule.report.reports import of_manifest

    with waiting("reading"):
        manifest = options.read_table(options.manifest)
    publish(options, of_manifest(manifest))
