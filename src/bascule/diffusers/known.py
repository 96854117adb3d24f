"""Which split table a model has."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from bascule.diffusers import controlnets, image_models, video_models
from bascule.diffusers.cp_plan import table_from_plan
from bascule.diffusers.split_table import SplitTable
from bascule.errors import ConfigError

_TRANSFORMERS = {**image_models.TABLES, **video_models.TABLES}
TABLES: Mapping[str, SplitTable] = {
    **{f"diffusers.models.transformers.{name}": one for name, one in _TRANSFORMERS.items()},
    **{f"diffusers.models.controlnets.{name}": one for name, one in controlnets.TABLES.items()},
}


def table_of(model: nn.Module, given: SplitTable | Mapping[str, Any] | None = None) -> SplitTable:
    """The table of a model.

    Args:
        model: What is split.
        given: A table, or a plan of diffusers. Default: the table of the model's class, or of the
            nearest class that it is made from; else from the plan of its class.

    Raises:
        ConfigError: There is none, or a plan that does not suffice.
    """
    if isinstance(given, SplitTable):
        return given
    if isinstance(given, Mapping):
        return table_from_plan(model, given)
    if given is not None:  # pyright: ignore[reportUnnecessaryComparison]
        raise ConfigError(
            f"parallelize: table is {given!r}: give a SplitTable, or a plan of diffusers"
        )
    for cls in type(model).__mro__:
        table = TABLES.get(f"{cls.__module__}.{cls.__qualname__}")
        if table is not None:
            return table
    plan = getattr(model, "_cp_plan", None)
    if plan is not None:
        return table_from_plan(model, plan)
    raise ConfigError(
        f"no split table for {type(model).__name__}: write one for "
        "parallelize(.., table=SplitTable(..)), as docs/sequence_parallel.md shows (Adding a "
        "table; Models lists those that have one), or use context_parallel(mesh) around its calls"
    )
