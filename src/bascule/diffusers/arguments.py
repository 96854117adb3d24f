"""What modules are called with: names of arguments, tensors among them, and whether ranks agree.

Ranks that share a model take the same inputs. To compare them exactly would refuse what differs by
rounding alone, as of two kinds of GPUs, and takes a pass over all bytes on the host. So each tensor
is told by a few numbers: its norm, and its products with waves of other lengths. Those of rounded
values are nearly the same; those of other values, or of the same in another order, are not.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bascule.comm.agree import agree
from bascule.comm.groups import RankGroup
from bascule.errors import CommError

_WAVES = 0.7390851, 1.4142136, 1.9106332, 2.5029079
"""Radians from one value of a tensor to the next."""
_WIDTH = 1 + len(_WAVES)

_MOST_VALUES = 2**20
"""Of a tensor, spread over it, that are looked at; of a longer one not all."""

_ROW = 1024
"""Of so many values are the rows that products with waves are made of."""

_FEW_VALUES = 64
"""Up to so many are times or scales, which no long sum has rounded."""

_EXACT = 1e-12
_NUM_INPUTS = 32
"""Tensors whose numbers fit into the first all-gather."""


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module, in order; what wraps one passes its arguments on."""
    return tuple(_parameters(module))


def required_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module without which it cannot be called."""
    required = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return tuple(
        name
        for name, one in _parameters(module).items()
        if one.default is one.empty and one.kind in required
    )


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(module.forward).parameters
    within = list(module.children())
    passes_on = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
    return _parameters(within[0]) if passes_on and len(within) == 1 else parameters


def changed(
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[str, Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a module, each as `change` makes it of its name and value."""
    others = [f"argument {place}" for place in range(len(names), len(args))]
    named = [*names[: len(args)], *others]
    return (
        tuple(change(name, value) for name, value in zip(named, args, strict=True)),
        {name: change(name, value) for name, value in kwargs.items()},
    )


def holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or holds one in containers."""
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return any(holds_tensors(one) for one in value)
    return isinstance(value, Tensor)


class Seldom:
    """Says at which calls of each form something is due that need not be done each time."""

    def __init__(self) -> None:
        self._counts = Counter[object]()

    def next(self, form: object) -> bool:
        """Return whether it is at this call: at calls 1, 2, 4, 8, and so on of a form."""
        self._counts[form] += 1
        return self._counts[form].bit_count() == 1


class SameInputs:
    """Refuses calls of a model for which its ranks are given different inputs.

    Of each form of inputs, ranks compare `Seldom`: each comparison is one small all-gather, for
    which the host waits.

    Args:
        model: What is called.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name, self._names = type(model).__name__, parameters_of(model)
        self._due = Seldom()

    def restart(self) -> None:
        """Count from 1 again: what comes is another run."""
        self._due = Seldom()

    def check(
        self, group: RankGroup | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """All ranks of a group are about to call the model.

        Args:
            group: The ranks; None for one.
            args: Given by place.
            kwargs: Given by name.

        Raises:
            CommError: Names what differs.
        """
        compare = self.due(group, args, kwargs)
        if compare is not None:
            compare()

    def due(
        self, group: RankGroup | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[], None] | None:
        """As `check`, but gives what compares, of numbers that are taken now; None if nothing is.

        All ranks call it at the same point, which may be after the model's call.
        """
        if group is None:
            return None
        inputs = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        if not self._due.next((group.key, form_of(inputs))):
            return None
        return partial(compare_inputs, NumbersOf.inputs(inputs), group, f"inputs of {self._name}")


@dataclass(frozen=True, slots=True, eq=False)
class NumbersOf:
    """What of some inputs is compared between ranks.

    Attributes:
        described: Names, shapes, dtypes, numbers and texts: the same on all of them.
        names: Of the tensors with values.
        values: (tensors, 1 + waves) float64, the norm of each and its products with waves.
        limits: (tensors,) float64, how far these may be apart, relative to the norm.
    """

    described: str
    names: Sequence[str]
    values: npt.NDArray[np.float64]
    limits: npt.NDArray[np.float64]

    @classmethod
    def inputs(cls, inputs: Mapping[str, Any], *, is_exact: bool = False) -> "NumbersOf":
        """Those of inputs by name. The host waits once for each device.

        Args:
            inputs: Nested at will.
            is_exact: Whether all values count, and must be the same but for the rounding of
                float64; else `_MOST_VALUES` of a tensor do, up to the rounding of its dtype.
        """
        leaves = _leaves_of(inputs)
        tensors = {name: x for name, x in leaves if _has_values(x)}
        found = _numbers_of(list(tensors.values()), is_exact)
        values = np.concatenate([np.zeros(0), *found]).reshape(-1, _WIDTH)
        limits = [_EXACT if is_exact else _rounding(x) for x in tensors.values()]
        return cls(_described(leaves), list(tensors), values, np.array(limits))


def compare_inputs(own: NumbersOf, group: RankGroup, what: str) -> None:
    """Refuse inputs that are not the same on every rank; one small all-gather.

    Args:
        own: Those of this rank.
        group: The ranks.
        what: What the inputs are of, in errors.

    Raises:
        CommError: Names the first that differs.
    """
    settings = {"names, shapes, dtypes and numbers of inputs": own.described}
    said = agree(
        group.control or group,
        settings,
        what=what,
        values=own.values.ravel().view(np.int64),
        capacity=_WIDTH * _NUM_INPUTS,
    )
    table = np.stack(said).view(np.float64).reshape(len(said), -1, _WIDTH)
    apart = np.abs(table - table[0]) > table[0, :, :1] * own.limits[:, None]
    ranks, places = apart.any(axis=2).nonzero()
    if places.size:
        place = int(places.min())
        raise CommError(
            f"{what}: the values of {own.names[place]} differ between ranks, of ranks "
            f"{sorted(group.ranks[one] for one in ranks[places == place])} from those of rank "
            f"{group.ranks[0]}: give every rank the same, as by seeding its random numbers alike; "
            "replicas (data_degree) may have inputs of their own"
        )


def _leaves_of(inputs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(_leaves("", inputs), key=lambda leaf: leaf[0])


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors, numbers and texts, by path; of anything else only that it is there."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), one)
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from _leaves(f"{name}.{place}", one)
    else:
        is_plain = isinstance(value, Tensor | int | float | str | None)
        yield name, value if is_plain else type(value).__name__


def form_of(inputs: Mapping[str, Any]) -> tuple[object, ...]:
    """Names, shapes and dtypes; not numbers, of which some are others in every step."""
    return tuple((name, *_kind(x)) for name, x in _leaves_of(inputs))


def _kind(x: Any) -> tuple[object, ...]:
    return (x.shape, x.dtype) if isinstance(x, Tensor) else (type(x),)


def _described(leaves: Sequence[tuple[str, Any]]) -> str:
    """What must be the same on all ranks before values are compared."""
    return ", ".join(
        f"{name} {tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else f"{name} {x!r}"
        for name, x in leaves
    )


def _has_values(x: Any) -> bool:
    """Return whether it is a tensor whose values every rank has whole."""
    return isinstance(x, Tensor) and not (isinstance(x, DTensor) or x.is_meta or not x.numel())


def _numbers_of(tensors: Sequence[Tensor], of_all: bool) -> list[npt.NDArray[np.float64]]:
    """Of each tensor its norm, and its products with waves; the host waits once for each device."""
    found = [_numbers(x.detach(), of_all) for x in tensors]
    arrived = {
        device: iter(torch.stack([one for one in found if one.device == device]).cpu().numpy())
        for device in {one.device for one in found}
    }
    return [next(arrived[one.device]) for one in found]


@torch.no_grad()
def _numbers(x: Tensor, of_all: bool) -> Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    stride = 1 if of_all else -(-x.numel() // _MOST_VALUES)
    values = x.flatten()[::stride].double().nan_to_num(3.0, 5.0, -7.0)
    # A wave is that of a row times that of a column, so few cosines are enough.
    rows = nn.functional.pad(values, (0, -values.numel() % _ROW)).view(-1, _ROW)
    radians = torch.tensor(_WAVES, dtype=torch.float64, device=x.device)
    of_column = torch.outer(torch.arange(_ROW, device=x.device), radians)
    of_row = torch.outer(torch.arange(0, rows.numel(), _ROW, device=x.device), radians)
    cosines, sines = rows @ of_column.cos(), rows @ of_column.sin()
    waves = (of_row.cos() * cosines - of_row.sin() * sines).sum(dim=0)
    return torch.cat([values.norm()[None], waves])


def _rounding(x: Tensor) -> float:
    """How far the numbers of a tensor may be apart, relative to its norm."""
    if not x.is_floating_point():
        return _EXACT
    eps = torch.finfo(x.dtype).eps
    return 2 * eps if x.numel() <= _FEW_VALUES else max(1e-2, 8 * eps)
