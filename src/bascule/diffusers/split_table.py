"""Split tables: one for each model says where its tokens are cut and put together.

A table names modules as `model.named_modules()` does; `*` stands for one part of a name, and "" is
the model itself. Tensors keep their other dims: only the tokens of a segment (text, image) are cut.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from bascule.diffusers.arguments import parameters_of
from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor, or each tensor of a list or mapping, holds the tokens of a segment.

    Attributes:
        segment: Name of the segment; or of several, where their tokens follow each other in the
            tensor: their lengths must be known from what was cut before. Of none, (), its number of
            tokens alone says how it is cut, as those of a segment of as many are.
        dim: Its dim of tokens.
        ndim: Only a tensor with so many dims holds tokens; None says that all do. 0 is of a whole
            number, which counts the first tokens of the segment: a rank gets how many it has.
    """

    segment: str | tuple[str, ...]
    dim: int = 1
    ndim: int | None = None

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of its segments."""
        return (self.segment,) if isinstance(self.segment, str) else self.segment


@dataclass(frozen=True, slots=True)
class Mask:
    """An argument that says what is seen of a segment: attention sees it whole, the module nothing.

    (B, tokens), where nonzero is seen; or, for attention to this segment alone, (B, tokens, tokens)
    as torch takes it.

    Attributes:
        segment: Name of the segment.
        of_pairs: Whether the module makes a mask of pairs of its tokens, as of the outer product:
            it gets its share of (B, tokens), and tokens that are not seen see nothing either.
    """

    segment: str
    of_pairs: bool = False


@dataclass(frozen=True, slots=True)
class Keys:
    """Attention to another segment, which is cut as well: its keys and values are gathered.

    Attributes:
        segment: Name of the segment.
    """

    segment: str


@dataclass(frozen=True)
class SplitTable:
    """Says which tensors of a model are cut into the ranks' shares, and which are gathered.

    Attributes:
        segments: Their order in the sequence that is attended to, unless `attends` says otherwise.
        inputs: Arguments that are cut, and masks that are taken to attention, on their way into a
            module, by module and argument.
        outputs: Parts of tuples that are cut on their way out of a module, by module and place; a
            tensor that is no part of a tuple is at place 0.
        gathers: Tensors that are made whole on their way out of a module.
        blocks: Modules that attend over the mesh, with the segments of what they return: of each
            tensor one, or several that follow each other in it. Of none, `verify` leaves it out.
        replicated: Other arguments of the model that are or hold tensors: every rank needs all of
            them.
        attends: Modules whose attention is over other segments, in this order; over none, it is
            left as it is: every rank has their keys. `Keys` are of another segment than the
            queries. The innermost module counts.
        nonempty: Segments that the model cannot do without: where there are fewer tokens than
            ranks, every rank has them all.
        unbatched: Arguments of the model without a batch: one for all its samples.
        refused: Arguments of the model, which must then be None, and what to do without them.
    """

    segments: tuple[str, ...]
    inputs: Mapping[str, Mapping[str, Cut | Mask]]
    gathers: Mapping[str, Cut]
    blocks: Mapping[str, tuple[str | tuple[str, ...], ...]]
    replicated: tuple[str, ...] = ()
    outputs: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)
    attends: Mapping[str, tuple[str, ...] | Keys] = field(default_factory=dict)
    nonempty: tuple[str, ...] = ()
    unbatched: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


Link = tuple[nn.Module, str, nn.Module]  # a module, a name in it, and what has this name


def modules_of(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The modules that a pattern of a table names, in the order of the model.

    None for the entries of a list that is there and empty, as of a Flux without single blocks, and
    for what is None in all modules that could have it, as a second attention.

    Raises:
        ConfigError: There are none, and none of these.
    """
    modules = dict(model.named_modules())
    found = _matching(modules, pattern)
    if not found and not _is_left_out(modules, pattern):
        raise ConfigError(
            f"the split table names {pattern!r}, and {type(model).__name__} has no such module"
        )
    return found


def check_table(model: nn.Module, table: SplitTable) -> None:
    """Refuse a table that names an argument or a segment that is not there."""
    of_model = *table.replicated, *table.unbatched, *table.refused
    arguments = [(type(model).__name__, model, name) for name in of_model]
    for pattern, cuts in table.inputs.items():
        for path, module in ({"": model} if not pattern else modules_of(model, pattern)).items():
            arguments += [(path or type(model).__name__, module, name) for name in cuts]
    for path, module, name in arguments:
        kinds = {one.kind for one in inspect.signature(module.forward).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds and name not in parameters_of(module):
            raise ConfigError(
                f"the split table names an argument {name!r} of {path}, and it takes "
                f"{', '.join(parameters_of(module))}: correct the table, or use the version of "
                f"{type(module).__module__.partition('.')[0]} that it was written for"
            )
    inputs = [cut for cuts in table.inputs.values() for cut in cuts.values()]
    cuts = [cut for cut in inputs if isinstance(cut, Cut)]
    cuts += [cut for places in table.outputs.values() for cut in places.values()]
    known = {name for cut in cuts for name in cut.segments}
    used = [*table.segments, *table.nonempty]
    used += [name for cut in table.gathers.values() for name in cut.segments]
    used += [one.segment for one in inputs if isinstance(one, Mask)]
    for parts in table.attends.values():
        used += (parts.segment,) if isinstance(parts, Keys) else parts
    for name in used:
        if name not in known:
            raise ConfigError(
                f"the split table names the segment {name!r}, and cuts "
                f"{', '.join(sorted(known)) or 'none'}: let an input or output hold its tokens"
            )


def links_to(model: nn.Module, names: Iterable[str]) -> tuple[Link, ...]:
    """Each step on the way from a model to modules of these names, once."""
    links: dict[tuple[int, str], Link] = {}
    for name in names:
        parent = model
        for key in name.split("."):
            child = parent._modules[key]
            assert child is not None
            links[id(parent), key] = parent, key, child
            parent = child
    return tuple(links.values())


def _is_left_out(modules: Mapping[str, nn.Module], pattern: str) -> bool:
    parent, _, last = pattern.rpartition(".")
    parents = _matching(modules, parent).values()
    if not parents:
        return bool(parent) and _is_left_out(modules, parent)
    if last == "*":
        return all(isinstance(one, nn.ModuleList) and len(one) == 0 for one in parents)
    return all(getattr(one, last, one) is None for one in parents)


def _matching(modules: Mapping[str, nn.Module], pattern: str) -> dict[str, nn.Module]:
    regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return {name: module for name, module in modules.items() if regex.fullmatch(name)}
