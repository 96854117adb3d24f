"""Arguments of modules: find their names and tensors, and compare them over ranks.

Ranks compare float64 fingerprints of tensors: the norm, and products with waves of a few lengths.
Other values or another order change a fingerprint; another kind of GPU only changes its rounding.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bascule.arrays import Floats
from bascule.comm.agree import agree
from bascule.comm.groups import RankGroup
from bascule.comm.values import described
from bascule.errors import CommError

_WAVES = 0.7390851, 1.4142136, 1.9106332, 2.5029079  # radians from one value to the next
_WIDTH = 1 + len(_WAVES)
_ROW_SIZE = 1024  # values of a row: waves of tensors are products of waves of rows and of columns
_EXACT = 1e-12  # of the norm, for sums in another order
_NUM_INPUTS = 32  # fingerprints that fit into the first all-gather


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's arguments in order; a wrapper with `*args` has its child's."""
    return tuple(_parameters(module))


def required_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's required arguments."""
    required = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return tuple(
        name
        for name, parameter in _parameters(module).items()
        if parameter.default is parameter.empty and parameter.kind in required
    )


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(module.forward).parameters
    children = list(module.children())
    passes_on = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return _parameters(children[0]) if passes_on and len(children) == 1 else parameters


def holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or a container with tensors."""
    return any(isinstance(leaf, Tensor) for _, leaf in leaves(value))


class SameInputs:
    """Compares a model's inputs over ranks, at the first call of each signature in a run.

    A split pipeline announces its runs. If another pipeline calls the same model, `Steps` detects
    where a run begins. All steps of a training count as one run.
    """

    def __init__(self, model: nn.Module, tolerance: float) -> None:
        self._model, self.tolerance = model, tolerance
        self.seen = set[object]()  # keys of groups, with signatures
        self._steps: Steps | None = Steps()

    def restart(self) -> None:
        """Begin a run, which lasts until `end`: compare its first calls again."""
        self.seen.clear()
        self._steps = None

    def end(self) -> None:
        """End the announced run: `Steps` detects later runs."""
        self._steps = Steps()

    def comparison(
        self, group: RankGroup, inputs: Mapping[str, Any], signature: object
    ) -> Callable[[], None] | None:
        """Return a function that compares these inputs; None if this run compared such inputs."""
        is_training = self._model.training and torch.is_grad_enabled()
        if self._steps is not None and not is_training and self._steps.may_begin_run(inputs):
            self.seen.clear()
        if (group.key, signature) in self.seen:
            return None
        self.seen.add((group.key, signature))
        title = f"inputs of {type(self._model).__name__}"
        return partial(compare_inputs, Fingerprint.of(inputs, self.tolerance), group, title)


_TIMES = "timestep", "timesteps", "t", "sigma", "time"  # names of arguments


class Steps:
    """Detects where a run of denoising steps begins, from calls that nothing announced.

    In a run, timesteps only rise or only fall, and tensors that steps share are the same objects.
    """

    def __init__(self) -> None:
        self._number, self._time, self._direction = 0, 0.0, 0.0
        # By argument: its tensors in this run, with versions.
        self._last: dict[str, list[tuple[weakref.ref[Tensor], int]]] = {}
        self._varying = set[str]()  # names of tensors that differ between steps

    def may_begin_run(self, inputs: Mapping[str, Any]) -> bool:
        """Record a call; return False if no tensor is new, or from the third step of a run on.

        The second step may begin another run, because a run may have only one step.
        """
        tensors, new = dict[str, Tensor](), set[str]()
        for argument, value in inputs.items():
            if isinstance(value, Tensor):
                tensors[argument] = value
            elif not isinstance(value, int | float | str | None):
                tensors |= {name: x for name, x in leaves(value, argument) if isinstance(x, Tensor)}
        for name, x in tensors.items():
            for earlier, version in self._last.get(name, ()):
                if earlier() is x and _version(x) == version:
                    break
            else:
                new.add(name)
        times = [name for name in _TIMES if isinstance(inputs.get(name), Tensor | int | float)]
        time = float(torch.as_tensor(inputs[times[0]]).float().mean()) if times else 0.0
        moved = time - self._time
        if self._number > 1 and not (moved * self._direction >= 0.0 and new <= self._varying):
            self._number, new = 0, set(tensors)
            self._last.clear()
        elif self._number == 1 and moved:
            self._direction, self._varying = moved, new
        self._number += not self._number or moved != 0.0
        self._time = time
        for name in new:
            others = [last for last in self._last.get(name, ()) if last[0]() is not None]
            self._last[name] = [*others, (weakref.ref(tensors[name]), _version(tensors[name]))]
        return bool(new) and self._number < 3


def _version(x: Tensor) -> int:
    """Return how often a tensor was written to; inference tensors do not count that."""
    return 0 if x.is_inference() else x._version


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """A digest of inputs that ranks compare."""

    described: str  # names, shapes, dtypes, numbers and texts, which must be the same
    names: Sequence[str]  # of the tensors with values
    values: Floats  # (tensors, 1 + waves) norm of each tensor, and its products with waves
    limits: Floats  # (tensors,) allowed difference of these, relative to the norm

    @classmethod
    def of(cls, inputs: Mapping[str, Any], tolerance: float = 0.0) -> "Fingerprint":
        """Return the fingerprint of inputs; floats may differ by a tolerance times the norm."""
        texts, tensors = list[str](), dict[str, Tensor]()
        for name, x in sorted(leaves(inputs), key=lambda leaf: leaf[0]):
            is_tensor = isinstance(x, Tensor)
            texts.append(f"{name} {f'{tuple(x.shape)} {x.dtype}' if is_tensor else described(x)}")
            # A rank has neither all values of a DTensor, nor any of a tensor on the meta device.
            if is_tensor and not isinstance(x, DTensor) and not x.is_meta and x.numel():
                tensors[name] = x.detach()
        numbers = [_norm_and_waves(x).cpu().numpy() for x in tensors.values()]
        limits = [max(_EXACT, tolerance * x.is_floating_point()) for x in tensors.values()]
        values = np.reshape(numbers, (-1, _WIDTH))
        return cls(", ".join(texts), list(tensors), values, np.array(limits))


def compare_inputs(local: Fingerprint, group: RankGroup, what: str) -> None:
    """Refuse inputs that differ between ranks; costs one small all-gather."""
    gathered = agree(
        group.control or group,
        {"names, shapes, dtypes and numbers of inputs": local.described},
        what=what,
        values=local.values.ravel().view(np.int64),
        capacity=_WIDTH * _NUM_INPUTS,
    )
    table = np.stack(gathered).view(np.float64).reshape(len(gathered), -1, _WIDTH)
    apart = np.abs(table - table[0]) > table[0, :, :1] * local.limits[:, None]
    ranks, places = apart.any(axis=2).nonzero()
    if places.size:
        place = int(places.min())
        raise CommError(
            f"{what}: the values of {local.names[place]} differ between ranks: ranks "
            f"{sorted(group.ranks[rank] for rank in ranks[places == place])} differ from rank "
            f"{group.ranks[0]}: use one seed on all ranks; if another pipeline has this model, "
            "call handle.add(pipeline), or give it a seeded generator; for unlike GPUs, set "
            "input_tolerance; if ranks need different inputs, set data_degree"
        )


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each tensor or plain value in nested containers."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key in sorted(value, key=str):
        yield from leaves(value[key], f"{name}.{key}" if name else str(key))


@torch.no_grad()
def _norm_and_waves(x: Tensor) -> Tensor:
    """Return (1 + waves,): the norm of a tensor, and its products with waves."""
    x = torch.view_as_real(x) if x.is_complex() else x
    values = x.flatten().double().nan_to_num(3.0, 5.0, -7.0)
    rows = nn.functional.pad(values, (0, -values.numel() % _ROW_SIZE)).view(-1, _ROW_SIZE)
    radians = torch.tensor(_WAVES, dtype=torch.float64, device=x.device)
    of_column = torch.outer(torch.arange(_ROW_SIZE, device=x.device), radians)
    of_row = torch.outer(torch.arange(0, rows.numel(), _ROW_SIZE, device=x.device), radians)
    cosines, sines = rows @ of_column.cos(), rows @ of_column.sin()
    waves = (of_row.cos() * cosines - of_row.sin() * sines).sum(dim=0)
    return torch.cat([values.norm()[None], waves])
