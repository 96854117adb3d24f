"""Split tables: the places in a model where tokens are cut, attended to and gathered.

A table names modules as `model.named_modules()` does; `*` stands for one part of a name, a `-1` at
its end for the last of a list, and "" is the model itself. Only the tokens of a segment (text,
image) are cut, and no other dims.
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
    """The tokens of a segment in a tensor, or in each tensor of a list or mapping."""

    # The segment; or several that follow each other, with lengths known from earlier cuts, but for
    # one, which is the rest. () is a tensor cut by its number of tokens alone.
    segment: str | tuple[str, ...]
    dim: int = 1  # of tokens
    # Dims of tensors that hold tokens. Default: any. 0: a whole number, which counts the first
    # tokens of the segment; a rank gets its share of them. All of them, if this comes first.
    ndim: int | None = None

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of its segments."""
        return (self.segment,) if isinstance(self.segment, str) else self.segment


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of a segment, which attention sees whole, and the module not at all.

    (B, tokens), where nonzero is seen; or, for attention to this segment alone, (B, tokens, tokens)
    as torch takes it.
    """

    segment: str
    # The module makes a mask of pairs of its tokens, as of the outer product: it gets its share of
    # (B, tokens), and tokens that are not seen see nothing either.
    of_pairs: bool = False


@dataclass(frozen=True, slots=True)
class Keys:
    """Attention to another segment that is cut: its keys and values are gathered.

    Of several segments too, where the queries are those of one of them; tokens of copied ones may
    also attend to themselves.
    """

    segment: str | tuple[str, ...]

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of its segments."""
        return (self.segment,) if isinstance(self.segment, str) else self.segment


Input = Cut | Mask | Mapping[int, Cut]
"""An argument: cut, or given to attention, or a tuple of which some places are cut."""
Output = str | tuple[str, ...] | Cut


@dataclass(frozen=True)
class SplitTable:
    """Tensors of a model that are cut into the ranks' shares, and tensors that are gathered."""

    # in the order of the sequence that is attended to, unless `attends` has another
    segments: tuple[str, ...]
    # arguments that are cut, in this order, and masks that go to attention, by module and argument
    inputs: Mapping[str, Mapping[str, Input]]
    gathers: Mapping[str, Cut]  # outputs of modules that are made whole; of a tuple, the first
    # Modules that attend over the mesh, with the segments of each tensor that they return: one, or
    # several that follow each other, of dim 1 or in a `Cut`. `verify` leaves out a module of none.
    blocks: Mapping[str, tuple[Output, ...]]
    replicated: tuple[str, ...] = ()  # other arguments with tensors: every rank has all of them
    # outputs that are cut, by module and place in its tuple; a single tensor is at place 0
    outputs: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)
    # Modules whose attention is over other segments, in this order; over none, every rank has all
    # keys, and attention is left as it is. The innermost module counts.
    attends: Mapping[str, tuple[str, ...] | Keys] = field(default_factory=dict)
    nonempty: tuple[str, ...] = ()  # segments that every rank has whole if ranks outnumber tokens
    # segments that every rank has whole, of which a call may attend to some tokens only
    copied: tuple[str, ...] = ()
    unbatched: tuple[str, ...] = ()  # arguments that all samples of a batch share
    # For training: lists with an entry for each sample, which holds tensors; arguments of which the
    # model takes the first sample's for all, or asks something of all; dims of batches, else 0.
    listed: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    batch_dims: Mapping[str, int] = field(default_factory=dict)
    # arguments that must be None, and advice
    refused: Mapping[str, str] = field(default_factory=dict)


Link = tuple[nn.Module, str, nn.Module]  # a module, a name in it, and what has this name


def modules_of(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return the modules of a pattern, in order; only empty lists and None may match none."""
    modules = dict(model.named_modules())
    matching = _matching(modules, pattern)
    if not matching and not _is_left_out(modules, pattern):
        raise ConfigError(
            f"the split table names {pattern!r}, and {type(model).__name__} has no such module"
        )
    return matching


def check_table(model: nn.Module, table: SplitTable) -> None:
    """Refuse a table that names an argument or a segment that is not there."""
    of_model = *table.replicated, *table.unbatched, *table.refused, *table.listed, *table.alike
    of_model += tuple(table.batch_dims)
    arguments = [(type(model).__name__, model, name) for name in of_model]
    for pattern, cuts in table.inputs.items():
        for path, module in ({"": model} if not pattern else modules_of(model, pattern)).items():
            arguments += [(path or type(model).__name__, module, name) for name in cuts]
    for path, module, name in arguments:
        kinds = {
            parameter.kind for parameter in inspect.signature(module.forward).parameters.values()
        }
        if inspect.Parameter.VAR_KEYWORD not in kinds and name not in parameters_of(module):
            raise ConfigError(
                f"the split table names an argument {name!r} of {path}, and it takes "
                f"{', '.join(parameters_of(module))}: correct the table, or use the version of "
                f"{type(module).__module__.partition('.')[0]} that it was written for"
            )
    inputs = [cut for cuts in table.inputs.values() for cut in cuts.values()]
    cuts = [cut for cut in inputs if isinstance(cut, Cut)]
    by_place = [*table.outputs.values(), *(one for one in inputs if isinstance(one, Mapping))]
    cuts += [cut for places in by_place for cut in places.values()]
    known = {name for cut in cuts for name in cut.segments}
    used = [*table.segments, *table.nonempty, *table.copied]
    used += [name for cut in table.gathers.values() for name in cut.segments]
    used += [one.segment for one in inputs if isinstance(one, Mask)]
    for parts in table.attends.values():
        used += parts.segments if isinstance(parts, Keys) else parts
    for name in used:
        if name not in known:
            raise ConfigError(
                f"the split table names the segment {name!r}, and cuts "
                f"{', '.join(sorted(known)) or 'none'}: let an input or output hold its tokens"
            )


def links_to(model: nn.Module, names: Iterable[str]) -> tuple[Link, ...]:
    """Return each step on the way from a model to modules of these names, once."""
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
    if pattern.endswith(".-1"):
        lists = _matching(modules, pattern.removesuffix(".-1"))
        numbered = {f"{name}.{len([*one.children()]) - 1}" for name, one in lists.items()}
        return {name: module for name, module in modules.items() if name in numbered}
    regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return {name: module for name, module in modules.items() if regex.fullmatch(name)}
