"""Split tables: the places in a model where tokens are sharded, attended to and gathered.

A table names modules as `model.named_modules()` does; `*` stands for one part of a name, a final
`-1` for the last module of a list, and "" for the model itself. Only dims of tokens are sharded.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from bascule.diffusers.arguments import parameters_of
from bascule.errors import ConfigError


@dataclass(frozen=True)
class Cut:
    """Shards the tokens of a segment in a tensor, or in each tensor of a list or mapping."""

    # A segment, or consecutive segments; earlier cuts must give the lengths of all but one. ():
    # shard the tensor evenly.
    segment: str | tuple[str, ...]
    dim: int = 1  # of tokens
    # Shard only tensors with so many dims; None: all. 0: an integer, which counts first tokens of
    # the segment (all of them if no cut gave its length); a rank gets its share of the count.
    ndim: int | None = None

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """Names of the segments."""
        return (self.segment,) if isinstance(self.segment, str) else self.segment


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of a segment's keys: attention gets the whole mask, and the module gets None.

    Its shape is (B, tokens), nonzero where seen; or, for attention within this segment alone, (B,
    tokens, tokens) as in torch.
    """

    segment: str
    # The module makes a mask of pairs itself, as by an outer product: it gets this rank's share of
    # (B, tokens), and hidden tokens see nothing.
    of_pairs: bool = False


@dataclass(frozen=True, slots=True)
class Keys:
    """Attention to another sharded segment, whose keys and values every rank gathers.

    If there are several segments, the queries are tokens of one of them. Queries of a copied
    segment may also attend to that segment alone.
    """

    segment: str | tuple[str, ...]

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of the segments."""
        return (self.segment,) if isinstance(self.segment, str) else self.segment


Input = Cut | Mask | Mapping[int, Cut]
"""An argument to shard, a mask for attention, or a tuple of which some places are sharded."""
Output = str | tuple[str, ...] | Cut


@dataclass(frozen=True)
class SplitTable:
    """The tensors of a model to shard over ranks, and the tensors to gather."""

    # segments of the sequence, in its order, that modules attend to unless `attends` names them
    segments: tuple[str, ...]
    # arguments to shard, in this order, and masks for attention, by module and argument
    inputs: Mapping[str, Mapping[str, Input]]
    gathers: Mapping[str, Cut]  # outputs of modules to gather; of a tuple, the first
    # Modules that attend over the mesh, with the segments of each tensor that they return: one, or
    # consecutive ones, of dim 1 or in a `Cut`. `verify` leaves out modules with ().
    blocks: Mapping[str, tuple[Output, ...]]
    replicated: tuple[str, ...] = ()  # other arguments with tensors: every rank has all of them
    # outputs to shard, by module and place in its tuple; a single tensor is at place 0
    outputs: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)
    # Modules that attend to other segments, in this order; (): every rank has all keys, and
    # attention is left local. The innermost matching module wins.
    attends: Mapping[str, tuple[str, ...] | Keys] = field(default_factory=dict)
    nonempty: tuple[str, ...] = ()  # segments that every rank has whole if ranks outnumber tokens
    # segments that every rank has whole, and of which a call may attend to only some tokens
    copied: tuple[str, ...] = ()
    unbatched: tuple[str, ...] = ()  # arguments that all samples of a batch share
    # For training:
    listed: tuple[str, ...] = ()  # lists with an entry for each sample, which holds tensors
    alike: tuple[str, ...] = ()  # arguments that must be equal in all samples of a batch
    batch_dims: Mapping[str, int] = field(default_factory=dict)  # dim of the batch, if not 0
    # arguments that must be None, and advice
    refused: Mapping[str, str] = field(default_factory=dict)


Link = tuple[nn.Module, str, nn.Module]  # a module, a name in it, and the child of this name


def modules_of(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return the modules that match a pattern; refuse no match, unless a list is empty or None."""
    modules = dict(model.named_modules())
    matching = _matching(modules, pattern)
    if not matching and not _is_absent(modules, pattern):
        raise ConfigError(
            f"the split table names {pattern!r}, and {type(model).__name__} has no such module"
        )
    return matching


def check_table(model: nn.Module, table: SplitTable) -> None:
    """Refuse a table with an argument that its module lacks, or a segment that it never cuts."""
    of_model = *table.replicated, *table.unbatched, *table.refused, *table.listed, *table.alike
    of_model += tuple(table.batch_dims)
    arguments = [(type(model).__name__, model, name) for name in of_model]
    for pattern, cuts in table.inputs.items():
        for path, module in ({"": model} if not pattern else modules_of(model, pattern)).items():
            arguments += [(path or type(model).__name__, module, name) for name in cuts]
    for path, module, name in arguments:
        parameters = inspect.signature(module.forward).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        if not takes_any and name not in parameters_of(module):
            raise ConfigError(
                f"the split table names an argument {name!r} of {path}, which accepts only "
                f"{', '.join(parameters_of(module))}: correct the table, or use the version of "
                f"{type(module).__module__.partition('.')[0]} for which it was written"
            )
    inputs = [cut for cuts in table.inputs.values() for cut in cuts.values()]
    cuts = [cut for cut in inputs if isinstance(cut, Cut)]
    by_place = [*table.outputs.values(), *(cut for cut in inputs if isinstance(cut, Mapping))]
    cuts += [cut for places in by_place for cut in places.values()]
    cut_segments = {name for cut in cuts for name in cut.segments}
    used = [*table.segments, *table.nonempty, *table.copied]
    used += [name for cut in table.gathers.values() for name in cut.segments]
    used += [mask.segment for mask in inputs if isinstance(mask, Mask)]
    for scope in table.attends.values():
        used += scope.segments if isinstance(scope, Keys) else scope
    for name in used:
        if name not in cut_segments:
            names = ", ".join(sorted(cut_segments)) or "none"
            raise ConfigError(
                f"the split table names the segment {name!r}, but cuts only {names}: cut it, too"
            )


def links_to(model: nn.Module, names: Iterable[str]) -> tuple[Link, ...]:
    """Return each link from parent to child on the paths from a model to the named modules."""
    links: dict[tuple[int, str], Link] = {}
    for name in names:
        parent = model
        for key in name.split("."):
            child = parent._modules[key]
            assert child is not None
            links[id(parent), key] = parent, key, child
            parent = child
    return tuple(links.values())


def _is_absent(modules: Mapping[str, nn.Module], pattern: str) -> bool:
    """Return whether a pattern matches nothing because its module is None, or its list is empty."""
    parent, _, last = pattern.rpartition(".")
    parents = _matching(modules, parent).values()
    if not parents:
        return bool(parent) and _is_absent(modules, parent)
    if last == "*":
        return all(isinstance(parent, nn.ModuleList) and len(parent) == 0 for parent in parents)
    return all(getattr(parent, last, parent) is None for parent in parents)


def _matching(modules: Mapping[str, nn.Module], pattern: str) -> dict[str, nn.Module]:
    if pattern.endswith(".-1"):
        lists = _matching(modules, pattern.removesuffix(".-1"))
        numbered = {f"{name}.{len([*items.children()]) - 1}" for name, items in lists.items()}
        return {name: module for name, module in modules.items() if name in numbered}
    regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return {name: module for name, module in modules.items() if regex.fullmatch(name)}
