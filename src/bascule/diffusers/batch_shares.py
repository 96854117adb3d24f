"""The samples of a call: arguments of a model for some of them, and what it returns for all.

Shapes: B samples.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bascule.comm.items import mapped
from bascule.diffusers.arguments import changed
from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a call.

    Attributes:
        number: B; 1 if no argument has samples.
        are_listed: Whether they are the entries of lists, as those of Z-Image, which may have
            unlike sizes; else they are rows.
    """

    number: int
    are_listed: bool = False

    def part(self, place: int, num_parts: int) -> slice:
        """Those of a part; parts differ by one at most."""
        return slice(self.number * place // num_parts, self.number * (place + 1) // num_parts)


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What a call returns.

    Attributes:
        nest: Around tensors without values.
        are_lists: Of its tensors, and of its lists with an entry for each sample, which they are.
    """

    nest: Any
    are_lists: tuple[bool, ...]

    @classmethod
    def of(cls, output: Any, samples: Samples, num_own: int) -> "Form":
        """The form for all samples, from what the model gave for some."""
        are_lists = list[bool]()

        def is_column(value: Any) -> bool:
            is_list = samples.are_listed and isinstance(value, list) and len(value) == num_own
            return isinstance(value, Tensor) or is_list

        def widen(column: Any) -> Any:
            are_lists.append(isinstance(column, list))
            if isinstance(column, Tensor):
                return column.new_empty(0)
            return [column[0].new_empty(0)] * samples.number

        return cls(mapped(output, widen, is_column), tuple(are_lists))


def samples_of(
    names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any], unbatched: Collection[str]
) -> Samples:
    """Those of the first argument that has samples.

    Args:
        names: Arguments of the model, in order.
        args: Given by place.
        kwargs: Given by name.
        unbatched: Arguments without a batch.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    for name in names:
        value = given.get(name)
        if name in unbatched or value is None:
            continue
        if isinstance(value, Tensor) and value.dim() > 0:
            return Samples(value.shape[0])
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return Samples(len(value), are_listed=True)
    return Samples(1)


def share_of(
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    unbatched: Collection[str],
    samples: Samples,
    own: slice,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for some samples. Tensors are views.

    Tensors are cut along their first dim, also those in dicts, and in lists, as the residuals of a
    ControlNet; lists with an entry for each sample are cut themselves. Numbers and texts are for
    all.

    Args:
        names: Arguments of the model, in order.
        args: Given by place.
        kwargs: Given by name.
        unbatched: Arguments without a batch.
        samples: All of them.
        own: Those that are wanted.

    Raises:
        ConfigError: A tensor has another number of samples.
    """

    def change(name: str, value: Any) -> Any:
        return value if name in unbatched else _cut(name, value, samples, own)

    return changed(names, args, kwargs, change)


def _cut(name: str, value: Any, samples: Samples, own: slice) -> Any:
    batch = samples.number
    if isinstance(value, Tensor):
        if value.dim() == 0 or value.shape[0] == 1:  # for all samples
            return value
        if value.shape[0] != batch:
            raise ConfigError(
                f"{name} has the shape {tuple(value.shape)} in a call of {batch} samples, and "
                "nothing says which of it is for which sample: give (batch, ..), or name it in the "
                "`unbatched` of a table"
            )
        return value[own]
    if isinstance(value, Mapping):
        return {key: _cut(f"{name}.{key}", one, samples, own) for key, one in value.items()}
    if not isinstance(value, list | tuple) or not value:
        return value
    is_listed = isinstance(value[0], list | tuple | Tensor) and len(value) == batch
    if is_listed and samples.are_listed:
        return value[own]
    if isinstance(value[0], Tensor) and all(x.shape[:1] == (batch,) for x in value):
        return type(value)(x[own] for x in value)
    return value[own] if is_listed else value
