"""Parts of the batch of a call: arguments of a model for some of its samples.

Shapes: B samples.
"""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from bascule.errors import ConfigError
from bascule.integrations.diffusers.arguments import changed


def batch_of(
    names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any], unbatched: Collection[str]
) -> int:
    """B, of the first argument that has samples; 1 if none has.

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
            return value.shape[0]
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return len(value)
    return 1


def share_of(
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    unbatched: Collection[str],
    samples: tuple[int, slice],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for some samples. Tensors are views.

    Tensors are cut along their first dim, also those in lists, as the residuals of a ControlNet;
    lists with an entry for each sample are cut themselves. Numbers, texts and dicts are for all.

    Args:
        names: Arguments of the model, in order.
        args: Given by place.
        kwargs: Given by name.
        unbatched: Arguments without a batch.
        samples: B, and which of them.

    Raises:
        ConfigError: A tensor has another number of samples.
    """

    def change(name: str, value: Any) -> Any:
        return value if name in unbatched else _cut(name, value, *samples)

    return changed(names, args, kwargs, change)


def _cut(name: str, value: Any, batch: int, own: slice) -> Any:
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
    if not isinstance(value, list | tuple) or not value:
        return value
    if isinstance(value[0], Tensor) and all(x.shape[:1] == (batch,) for x in value):
        return type(value)(x[own] for x in value)
    is_nested = isinstance(value[0], list | tuple | Tensor)
    return value[own] if is_nested and len(value) == batch else value
