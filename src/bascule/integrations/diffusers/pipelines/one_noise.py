"""One noise for all ranks of a replica, however their generators are seeded; and the same prompts.

Pipelines draw in `prepare_latents`, and stochastic schedulers go on with the same generators. So
before it runs, every generator that could be used gets the state of the replica's first rank. Texts
and embeddings go through `encode_prompt`: before it runs, ranks compare what they were given.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bascule.comm.agree import agree_on
from bascule.comm.groups import RankGroup
from bascule.comm.guard.calls import Call
from bascule.comm.guard.failures import told
from bascule.comm.samples.nests import leaves_of
from bascule.comm.transfers import broadcast
from bascule.encoders.weights import contents_of
from bascule.integrations.diffusers.pipelines.phases import TRANSFORMERS


class _InPlaceOf:
    """Called by a pipeline in place of one of its methods; `undo` takes it back.

    A pipeline without the method is left alone.

    Args:
        pipeline: Of diffusers; gets an attribute of its own in place of the method of its class.
        name: Of the method.
        group: The ranks of the replica.
    """

    def __init__(self, pipeline: Any, name: str, group: RankGroup) -> None:
        self._pipeline, self._name, self._group = pipeline, name, group
        self._method = getattr(pipeline, name, None)
        self._had = vars(pipeline).get(name)
        if self._method is not None:
            setattr(pipeline, name, self)

    def undo(self) -> None:
        """Call the method as before."""
        if self._had is not None:
            setattr(self._pipeline, self._name, self._had)
        elif vars(self._pipeline).get(self._name) is self:
            delattr(self._pipeline, self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Alone":
        """Copies of the pipeline work by themselves."""
        return _Alone(copy.deepcopy(self._pipeline, memo), self._name)

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the method, by name."""
        assert self._method is not None
        return inspect.signature(self._method).bind(*args, **kwargs).arguments


class OneNoise(_InPlaceOf):
    """Makes a pipeline draw the same noise on all ranks of a replica.

    Args:
        pipeline: Of diffusers.
        group: The ranks of the replica.
        device: Where it computes.
        begin_run: Called before it draws, once in each run.
    """

    def __init__(
        self, pipeline: Any, group: RankGroup, device: torch.device, begin_run: Callable[[], None]
    ) -> None:
        super().__init__(pipeline, "prepare_latents", group)
        self._device, self._begin_run = device, begin_run

    @told("drawing the noise of a pipeline")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the pipeline calls: a small all-gather and a broadcast of a few kilobytes."""
        self._begin_run()
        given = generators_of((args, kwargs))
        latents = self._given(args, kwargs).get("latents")
        settings = {
            "generators": str([one.device.type for one in given]),
            "latents": contents_of([latents] if isinstance(latents, Tensor) else []),
            "adapters": _adapters_of(self._pipeline),
        }
        agree_on(self._group, settings, what="noise")
        states = random_states(self._device, given)
        first = broadcast(self._group, Call("broadcast (noise)"), torch.cat(states))
        set_random_states(self._device, given, first.split([one.numel() for one in states]))
        assert self._method is not None
        return self._method(*args, **kwargs)


class SamePrompts(_InPlaceOf):
    """Refuses texts and embeddings that differ between the ranks of a replica.

    Args:
        pipeline: Of diffusers.
        group: The ranks of the replica.
    """

    def __init__(self, pipeline: Any, group: RankGroup) -> None:
        super().__init__(pipeline, "encode_prompt", group)

    @told("the prompts of a pipeline")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the pipeline calls: a small all-gather."""
        given = self._given(args, kwargs)
        settings = {
            "prompts": repr(sorted((name, x) for name, x in given.items() if _is_text(x))),
            "embeddings": contents_of(leaves_of(list(given.values()))),
        }
        agree_on(self._group, settings, what="prompts")
        assert self._method is not None
        return self._method(*args, **kwargs)


class _Alone:
    """What the copy of a pipeline has in place of this."""

    def __init__(self, pipeline: Any, name: str) -> None:
        self._pipeline, self._name = pipeline, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self._pipeline), self._name)(self._pipeline, *args, **kwargs)


def _adapters_of(pipeline: Any) -> str:
    """Which LoRA layers the transformers have, their scales, and a digest of their weights.

    They are often loaded or scaled when the weights of all ranks were compared already. Layers are
    those of peft.
    """
    models = [getattr(pipeline, name, None) for name in TRANSFORMERS]
    layers = [
        (layer, given)
        for model in models
        if isinstance(model, nn.Module)
        for layer in model.modules()
        if isinstance(given := getattr(layer, "scaling", None), dict) and hasattr(layer, "lora_A")
    ]
    states = Counter(
        f"{layer.active_adapters} scaled by {given}{' and off' if layer.disable_adapters else ''}"
        for layer, given in layers
    )
    values = [p for layer, _ in layers for name, p in layer.named_parameters() if "lora_" in name]
    return f"{dict(states)}, {contents_of(values)}" if layers else "none"


def _is_text(value: Any) -> bool:
    """Whether it is a prompt, or several."""
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(one, str) for one in values)


def random_states(device: torch.device, given: Sequence[torch.Generator]) -> list[Tensor]:
    """Of all that a pipeline may draw from: the host's default, the device's, and those given."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states + [one.get_state() for one in given]


def set_random_states(
    device: torch.device, given: Sequence[torch.Generator], states: Iterable[Tensor]
) -> None:
    """Draw from these on, which `random_states` gave."""
    left = (state.clone() for state in states)
    torch.set_rng_state(next(left))
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(next(left), device)
    for one, state in zip(given, left, strict=True):
        one.set_state(state)


def generators_of(nest: Any) -> list[torch.Generator]:
    """Those among arguments, each once, in their order."""
    found = dict[int, torch.Generator]()
    left = [nest]
    while left:
        one = left.pop(0)
        if isinstance(one, torch.Generator):
            found.setdefault(id(one), one)
        elif isinstance(one, Mapping):
            left[:0] = [one[name] for name in sorted(one)]
        elif isinstance(one, tuple | list):
            left[:0] = one
    return list(found.values())
