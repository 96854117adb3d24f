"""Encoders over ranks within models and pipelines that are not edited."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from bascule.comm.failures import shared
from bascule.encoders.items import Features, attach
from bascule.errors import ConfigError

if TYPE_CHECKING:
    from bascule.encoders.encoder import BalancedEncoder
    from bascule.encoders.plan import Encoding


class Installed:
    """A balanced encoder in its place within a model; made by `BalancedEncoder.install`.

    The model calls its encoder once for each kind of items in its batch. Every rank takes part for
    every kind, in the same order, also for those that it does not have.
    """

    def __init__(self, encoder: "BalancedEncoder", model: nn.Module) -> None:
        self._encoder = encoder
        self._parent, self._name = _holder(model, encoder.module)
        self._kinds = encoder.table.sources
        self._left: list[bool] = []  # of the kinds that are left: True if the model calls for it
        self._tokens: list[Tensor | None] = []
        self.encodings: list[Encoding | None] = []  # of the last forward pass, by kind
        self._stand_in = _StandIn(encoder.module, self)
        self._hooks = [
            self._parent.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._parent.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    def undo(self) -> None:
        """Take the encoder out: the model calls its own again."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, parent: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        parameters = inspect.signature(parent.forward).parameters
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        self._left = [arguments.get(kind) is not None for kind in self._kinds]
        self._tokens, self.encodings = [], []
        parent._modules[self._name] = self._stand_in
        self._take_part()

    @shared("the end of a forward pass with a balanced encoder")
    def _end(
        self, parent: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], output: Any
    ) -> Any:
        del args, kwargs
        parent._modules[self._name] = self._encoder.module
        tokens, self._tokens = self._tokens, []
        if output is not None and self._left:
            raise ConfigError(
                f"the model did not call its encoder for all of {self._kinds} that it was given: "
                "name the arguments with items in EncoderTable(sources=..)"
            )
        # The last one comes first in the backward pass, and the others after it.
        return None if output is None else attach(output, tokens[-1:])

    def _take_part(self) -> None:
        """Join calls of other ranks before this rank's next one, or after its last."""
        while self._left and not self._left[0]:
            self._left.pop(0)
            self._keep(self._encoder.encode([], self._token))

    def _keep(self, features: Features) -> None:
        self._tokens.append(features.token)
        self.encodings.append(self._encoder.last)

    @property
    def _token(self) -> Tensor | None:
        return self._tokens[-1] if self._tokens else None

    @shared("a call of a balanced encoder")
    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the output that the model gets when it calls its encoder."""
        if not self._left:
            raise ConfigError(
                f"the model calls its encoder more often than it was given {self._kinds}: name "
                "the arguments with items in EncoderTable(sources=..)"
            )
        self._left.pop(0)
        features: Features = self._encoder.call_after(self._token, args, kwargs)
        self._keep(features)
        self._take_part()
        return features.together


class _StandIn(nn.Module):
    """Stands in for the encoder: is called in its place, and has all else from it."""

    def __init__(self, module: nn.Module, installed: Installed) -> None:
        super().__init__()
        object.__setattr__(self, "_encoder", module)
        object.__setattr__(self, "_installed", installed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._installed.call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_encoder"], name)


class InPlace:
    """Puts `methods`, which take no `self`, in place of a module's, by a stand-in of its class."""

    def __init__(
        self, pipeline: Any, module: nn.Module, methods: Mapping[str, Callable[..., Any]]
    ) -> None:
        names = [name for name, value in vars(pipeline).items() if value is module]
        if isinstance(pipeline, nn.Module):
            names += [name for name, child in pipeline.named_children() if child is module]
        if not names:
            raise ConfigError(
                f"a {type(pipeline).__name__} does not have this {type(module).__name__}: "
                "install in the pipeline whose module it was made with"
            )
        self._pipeline, self._name, self._module = pipeline, names[0], module
        cls = type(module)
        members = {name: staticmethod(method) for name, method in methods.items()}
        members = {"__module__": cls.__module__, **members}
        stand_in = object.__new__(type(cls.__name__, (cls,), members))
        stand_in.__dict__ = vars(module)
        setattr(pipeline, names[0], stand_in)

    def undo(self) -> None:
        """Put the module back into its place."""
        setattr(self._pipeline, self._name, self._module)


def _holder(model: nn.Module, module: nn.Module) -> tuple[nn.Module, str]:
    """Find the part of the model that has the module, and the module's name there."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is module:
                return parent, name
    raise ConfigError(
        f"a {type(model).__name__} does not contain this {type(module).__name__}: install the "
        "encoder in the model whose encoder it was made with"
    )
