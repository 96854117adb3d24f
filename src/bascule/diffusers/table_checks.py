"""Whether a split table means something, and fits a model."""

import inspect
from collections.abc import Iterable, Iterator

from torch import nn

from bascule.diffusers.arguments import parameters_of
from bascule.diffusers.split_table import (
    Cut,
    Keys,
    Mask,
    SplitTable,
    modules_of,
)
from bascule.errors import ConfigError
from bascule.plan.checks import is_int


def check_table(model: nn.Module, table: SplitTable) -> None:
    """Refuse a table whose segments, modules or arguments are not there.

    Args:
        model: What is to be split.
        table: How.

    Raises:
        ConfigError: Names what is missing.
    """
    _check_entries(table)
    name = type(model).__name__
    for pattern, arguments in table.inputs.items():
        for path, module in ({"": model} if not pattern else modules_of(model, pattern)).items():
            _check_arguments(path or name, module, arguments)
    _check_arguments(name, model, (*table.whole, *table.unbatched, *table.refused))


def _check_entries(table: SplitTable) -> None:
    if not isinstance(table.segments, tuple) or not all(
        isinstance(one, str)  # pyright: ignore[reportUnnecessaryIsInstance]
        for one in table.segments
    ):
        raise ConfigError(
            f"SplitTable(segments={table.segments!r}): give a tuple of names, as ('text', 'image')"
        )
    cuts = [cut for inputs in table.inputs.values() for cut in inputs.values()]
    known = {name for cut in cuts for name in _segments_of(cut)}
    known |= {
        name for one in table.outputs.values() for cut in one.values() for name in _names(cut)
    }
    for of, names in _used(table):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"the split table names the segment {name!r} in {of}, and cuts "
                    f"{', '.join(sorted(known)) or 'none'}: let an input or output hold its tokens"
                )


def _segments_of(cut: object) -> tuple[str, ...]:
    """Those that an input makes known."""
    if not isinstance(cut, Cut | Mask):
        raise ConfigError(
            f"the split table has {cut!r} for an argument: give a Cut, as Cut('image'), or a Mask"
        )
    return _names(cut) if isinstance(cut, Cut) else ()


def _names(cut: Cut) -> tuple[str, ...]:
    if not is_int(cut.dim):
        raise ConfigError(f"Cut({cut.segment!r}, dim={cut.dim!r}): give the number of a dim")
    return cut.segments


def _used(table: SplitTable) -> Iterator[tuple[str, Iterable[str]]]:
    """By place, the segments that a table takes for known."""
    yield "segments", table.segments
    yield "nonempty", table.nonempty
    for name, cut in table.gathers.items():
        yield f"gathers[{name!r}]", cut.segments
    for name, parts in table.attends.items():
        yield f"attends[{name!r}]", (parts.segment,) if isinstance(parts, Keys) else parts
    for name, inputs in table.inputs.items():
        masks = [one.segment for one in inputs.values() if isinstance(one, Mask)]
        yield f"inputs[{name!r}]", masks


def _check_arguments(name: str, module: nn.Module, arguments: Iterable[str]) -> None:
    takes = parameters_of(module)
    kinds = inspect.signature(module.forward).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in kinds):
        return
    for argument in arguments:
        if argument not in takes:
            raise ConfigError(
                f"the split table names an argument {argument!r} of {name}, and it takes "
                f"{', '.join(takes)}: correct the table, or use the version of "
                f"{type(module).__module__.partition('.')[0]} that it was written for"
            )
