"""The samples of a model's call, cut into parts, and the form of its output for all of them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bascule.comm.items import mapped
from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a call: rows of tensors, or entries of lists, which may have unlike sizes."""

    number: int
    are_listed: bool = False  # as those of Z-Image

    def part(self, place: int, num_parts: int) -> slice:
        """Return the samples of a part; parts differ by one at most."""
        return slice(self.number * place // num_parts, self.number * (place + 1) // num_parts)


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """The output of a call without its values."""

    nest: Any  # around empty tensors
    are_lists: tuple[bool, ...]  # of each tensor or list of samples in it, whether it is a list

    @classmethod
    def of(cls, output: Any, samples: Samples, num_local: int) -> "Form":
        """Return the form for all samples, from the output for some."""
        are_lists = list[bool]()

        def is_column(value: Any) -> bool:
            is_list = samples.are_listed and isinstance(value, list) and len(value) == num_local
            return isinstance(value, Tensor) or is_list

        def widen(column: Any) -> Any:
            are_lists.append(isinstance(column, list))
            if isinstance(column, Tensor):
                return column.new_empty(0)
            return [column[0].new_empty(0)] * samples.number

        return cls(mapped(output, widen, is_column), tuple(are_lists))


def samples_of(inputs: Mapping[str, Any], unbatched: Collection[str]) -> Samples:
    """Return the samples of the first argument that has some; one sample if none has."""
    for name, value in inputs.items():
        if name in unbatched:
            continue
        if isinstance(value, Tensor) and value.dim() > 0:
            return Samples(value.shape[0])
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return Samples(len(value), are_listed=True)
    return Samples(1)


def share_of(
    inputs: Mapping[str, Any], unbatched: Collection[str], samples: Samples, part: slice
) -> dict[str, Any]:
    """Return the arguments for a part of the samples; tensors are views."""
    return {
        name: value if name in unbatched else _cut(name, value, samples, part)
        for name, value in inputs.items()
    }


def _cut(name: str, value: Any, samples: Samples, part: slice) -> Any:
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
        return value[part]
    if isinstance(value, Mapping):
        return {key: _cut(f"{name}.{key}", one, samples, part) for key, one in value.items()}
    if not isinstance(value, list | tuple) or not value:
        return value
    is_listed = isinstance(value[0], list | tuple | Tensor) and len(value) == batch
    if is_listed and samples.are_listed:
        return value[part]
    if isinstance(value[0], Tensor) and all(x.shape[:1] == (batch,) for x in value):
        return type(value)(x[part] for x in value)
    return value[part] if is_listed else value
