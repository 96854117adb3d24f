"""The settings on which all ranks must agree before a model is split or gradients are averaged.

Each agreement is one all-gather of a fixed size, so ranks that disagree, or of which one met an
error, all raise, and none waits or sends what another cannot take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.tensor import DTensor

from bascule.comm.agree import agree
from bascule.comm.groups import RankGroup
from bascule.comm.wire import Wire
from bascule.diffusers.degrees import Shape
from bascule.diffusers.guidance import check_guided
from bascule.diffusers.inference_options import InferenceOptions
from bascule.diffusers.known import table_of
from bascule.diffusers.phases import TRANSFORMERS
from bascule.diffusers.shared_parts import shared_parts
from bascule.diffusers.sparse_config import SparseConfig, settings_of
from bascule.diffusers.split_model import check_model
from bascule.diffusers.split_table import SplitTable
from bascule.encoders.items import values_digest
from bascule.errors import CommError, ConfigError

_ONE_RANK, _DEFAULT = Shape(), InferenceOptions()


@dataclass(frozen=True, slots=True)
class Asked:
    """What `parallelize` is to do.

    Attributes:
        models: What is split.
        tables: How each of them is.
        shape: Of the mesh.
        wire: How rows travel.
        sparse: Which blocks of attention are computed.
        options: The rest.
        pipeline: What has the models; None where there is one model alone.
    """

    models: Sequence[nn.Module]
    tables: Sequence[SplitTable]
    shape: Shape = _ONE_RANK
    wire: Wire | None = None
    sparse: SparseConfig | None = None
    options: InferenceOptions = _DEFAULT
    pipeline: Any = None


def asked_of(
    model_or_pipeline: Any,
    table: SplitTable | Mapping[str, Any] | None,
    shape: Shape,
    wire: Wire | None,
    sparse: SparseConfig | None,
    options: InferenceOptions,
) -> Asked:
    """What a call of `parallelize` asks for, checked as far as one rank can.

    Raises:
        ConfigError: It cannot be done.
    """
    models = models_of(model_or_pipeline)
    if not isinstance(options, InferenceOptions):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"parallelize: options is {options!r}: give InferenceOptions(..)")
    tables = [table_of(model, table) for model in models]
    pipeline = None if isinstance(model_or_pipeline, nn.Module) else model_or_pipeline
    asked = Asked(models, tables, shape, wire, sparse, options, pipeline)
    _check(asked)
    return asked


def models_of(model_or_pipeline: Any) -> list[nn.Module]:
    """A model, or the transformers of a pipeline.

    Raises:
        ConfigError: It has none.
    """
    name = type(model_or_pipeline).__name__
    if isinstance(model_or_pipeline, type | str):
        raise ConfigError(
            f"parallelize takes a model or a pipeline, not {model_or_pipeline!r}: make one first, "
            "as by from_pretrained(..), and give that"
        )
    if isinstance(model_or_pipeline, nn.Module):
        _check_state(model_or_pipeline)
        return [model_or_pipeline]
    found = [getattr(model_or_pipeline, name, None) for name in TRANSFORMERS]
    models = [model for model in found if isinstance(model, nn.Module)]
    if not models:
        raise ConfigError(
            f"parallelize takes a model, or a pipeline with a `transformer`, and {name} has none: "
            "give the model itself"
        )
    for model in models:
        _check_state(model)
    return models


def _check_state(model: nn.Module) -> None:
    """Refuse what is no transformer to split, or was prepared for something else."""
    name = type(model).__name__
    if isinstance(model, OptimizedModule):
        raise ConfigError(
            "parallelize takes a model, not what torch.compile(model) gave: split the model, and "
            "then call handle.compile()"
        )
    if hasattr(model, "enable_tiling"):
        raise ConfigError(
            f"{name} is a VAE: share its tiles with TiledVAE, or give parallelize the pipeline"
        )
    if getattr(model, "_parallel_config", None) is not None:
        raise ConfigError(
            f"{name} was split by diffusers' enable_parallelism(..): leave that out, or parallelize"
        )
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not is_offloaded and any(one.is_meta for one in model.parameters()):
        raise ConfigError(
            f"{name} has parameters on the meta device, without values: load its weights first"
        )


def _check(asked: Asked) -> None:
    """Refuse what cannot be split, on this rank."""
    wire, sparse, is_guided = asked.wire, asked.sparse, asked.shape.guidance > 1
    if not isinstance(wire, Wire | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"parallelize: wire is {wire!r}: give a Wire")
    if not isinstance(sparse, SparseConfig | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"parallelize: sparse is {sparse!r}: give a SparseConfig")
    if wire is not None and sparse is not None:
        raise ConfigError(
            "parallelize: rows of block-sparse attention travel as they are: leave out wire or "
            "sparse"
        )
    if sparse is not None and is_guided:
        raise ConfigError(
            "parallelize: block-sparse attention counts the forward passes of a step, of which "
            "each guidance group computes some: use guidance_degree=1, or leave out sparse"
        )
    for model, table in zip(asked.models, asked.tables, strict=True):
        _check_heads(model, asked.shape.ulysses)
        check_model(model, table)
        if is_guided:
            check_guided(model)


def _check_heads(model: nn.Module, ulysses: int) -> None:
    num_heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    if num_heads is not None and num_heads < ulysses:
        raise ConfigError(
            f"{type(model).__name__} has {num_heads} heads for {ulysses} Ulysses ranks, "
            f"which take one each at least: use ulysses_degree={num_heads} at most, and a ring"
        )


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
    names = (
        "models",
        "weights",
        "tables",
        "mesh",
        "wire",
        "options",
        "shared parts",
        *settings_of(None),
    )
    settings = dict.fromkeys(names, "")
    if asked is not None and error is None:
        settings = {
            "models": ", ".join(map(_size_of, asked.models)),
            "weights": ", ".join(map(values_digest, asked.models)),
            "tables": str(asked.tables),
            "mesh": str(asked.shape),
            "wire": str(asked.wire),
            "options": str(asked.options),
            "shared parts": ", ".join(map(_size_of, shared_parts(asked.pipeline, asked.options))),
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
            agree(group, settings, error, what=what)
    except CommError:
        if error is None:
            raise
    if error is not None:  # in its own words
        raise error


def _size_of(model: nn.Module) -> str:
    sizes = [parameter.numel() for parameter in model.parameters()]
    return f"{type(model).__name__} with {sum(sizes)} values in {len(sizes)} parameters"
