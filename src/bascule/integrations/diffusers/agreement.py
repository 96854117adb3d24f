"""The settings on which all ranks must agree before a model is split or gradients are averaged.

Each agreement is one all-gather of a fixed size, so ranks that disagree, or of which one met an
error, all raise, and none waits or sends what another cannot take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from bascule.comm.agree import agree_on
from bascule.comm.groups import RankGroup
from bascule.comm.quantize import Wire
from bascule.errors import CommError, ConfigError
from bascule.integrations.diffusers.sparse.sparse_config import SparseConfig, settings_of
from bascule.integrations.diffusers.tables import SplitTable


@dataclass(frozen=True, slots=True)
class Asked:
    """What `parallelize` is to do.

    Attributes:
        models: What is split.
        tables: How each of them is.
        degrees: (ring, Ulysses).
        wire: How rows travel.
        sparse: Which blocks of attention are computed.
    """

    models: Sequence[nn.Module]
    tables: Sequence[SplitTable]
    degrees: tuple[int, int]
    wire: Wire | None
    sparse: SparseConfig | None


def agree_on_split(group: RankGroup | None, asked: Asked | None, error: Exception | None) -> None:
    """Make sure that all ranks split alike.

    Args:
        group: The ranks; None for one.
        asked: What this rank was given; None where that is not known, for an error.
        error: What is wrong with it.

    Raises:
        ConfigError: Something is wrong on this rank, or on another.
        CommError: They were given different things.
    """
    settings = dict.fromkeys(("models", "tables", "mesh", "wire", *settings_of(None)), "")
    if asked is not None and error is None:
        settings = {
            "models": ", ".join(map(_size_of, asked.models)),
            "tables": str(asked.tables),
            "mesh": "ring {} x Ulysses {}".format(*asked.degrees),
            "wire": str(asked.wire),
            **settings_of(asked.sparse),
        }
    _agree(group, settings, error, "parallelize")


def agree_on_gradients(group: RankGroup, models: Sequence[nn.Module]) -> None:
    """Make sure that gradients of all ranks are of the same parameters, and whole.

    Raises:
        ConfigError: They are sharded.
        CommError: They are of others.
    """
    named = [pair for model in models for pair in model.named_parameters()]
    sharded = [name for name, one in named if isinstance(one.grad, DTensor)]
    error = None
    if sharded:
        error = ConfigError(
            f"average_gradients: the gradient of {sharded[0]} is sharded, as by FSDP, which "
            "averages gradients itself: leave out this call"
        )
    shapes = [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in named]
    lacking = [name for name, one in named if one.grad is None]
    settings = {
        "parameters": f"{len(shapes)}: {', '.join(shapes)}",
        "parameters without gradients": f"{len(lacking)}: {', '.join(lacking)}",
    }
    _agree(group, settings, error, "average_gradients")


def _agree(
    group: RankGroup | None, settings: Mapping[str, str], error: Exception | None, what: str
) -> None:
    try:
        if group is not None:
            agree_on(group, settings, error, what=what)
    except CommError:
        if error is None:
            raise
    if error is not None:  # in its own words
        raise error


def _size_of(model: nn.Module) -> str:
    sizes = [parameter.numel() for parameter in model.parameters()]
    return f"{type(model).__name__} with {sum(sizes)} values in {len(sizes)} parameters"
