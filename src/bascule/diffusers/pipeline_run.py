"""One noise for all ranks of a replica, however their generators are seeded; and the same prompts.

Pipelines draw in a few methods, and stochastic schedulers go on with the same generators. So before
one of these runs, every generator that could be used gets the state of the replica's first rank.
Texts and embeddings go through `encode_prompt`: before it runs, ranks compare what they were given.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bascule.comm.agree import agree
from bascule.comm.collectives import broadcast
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup, device_of
from bascule.comm.items import leaves_of
from bascule.diffusers.phases import (
    TRANSFORMERS,
    execution_device,
    put,
    standing_in,
)
from bascule.encoders.items import contents_of

DRAWING = (
    "prepare_latents",
    "upsample_prompt",  # Flux 2, Ideogram 4: texts are drawn, too
    "enhance_prompt",  # LTX-2
    "expand_prompts",  # Kandinsky 6
    "generate_prior_tokens",  # GLM-Image
)
"""Methods of pipelines that draw, and are given the generators.

Before `prepare_latents`, control pipelines (of Flux, Stable Diffusion 3, Qwen-Image, CogView 4,
Z-Image) and others (Wan VACE, Helios) sample what their VAE encoded, many of them in their own
call, whose generators no method was given. So the VAE's samples count, too.
"""


_OF_A_RANK = "output_type", "return_dict", "callback"
"""Beginnings of arguments of a pipeline that a rank may have for itself, as a progress bar."""


class OneNoise:
    """Makes a pipeline draw the same on all ranks of a replica, and refuses unlike prompts.

    Args:
        pipeline: Of diffusers; gets attributes of its own in place of methods of its class.
        group: The ranks of the replica.
        model: Of the pipeline; is where it computes, if it does not say where that is.
        begin_run: Called before it draws its noise, once in each run.
    """

    def __init__(
        self, pipeline: Any, group: RankGroup, model: nn.Module, begin_run: Callable[[], None]
    ) -> None:
        self._pipeline, self._group, self._model = pipeline, group, model
        self._begin_run = begin_run
        self._is_paused = False
        self._is_begun = False  # a run, which has not drawn its noise
        befores = {name: self._before_drawing for name in DRAWING}
        befores |= {"encode_prompt": self._before_prompts, "prepare_latents": self._before_noise}
        self._undo = ExitStack()
        for name, before in befores.items():
            if getattr(pipeline, name, None) is not None:
                self._undo.callback(_InPlaceOf(pipeline, name, before).undo)
        vae = getattr(pipeline, "vae", None)
        if isinstance(vae, nn.Module) and getattr(vae, "encode", None) is not None:
            stand_in = standing_in(vae, "encode", self._encoding, has_copies=False)
            self._undo.callback(put(pipeline, "vae", stand_in))

    def undo(self) -> None:
        """Let the pipeline draw as before; what somebody else kept of this does nothing more."""
        self._is_paused = True
        self._undo.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Each rank draws by itself."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _before_prompts(self, given: Mapping[str, Any]) -> None:
        """A small all-gather."""
        if self._is_paused:
            return
        self._is_begun = True
        settings = _call_of(self._pipeline) | {
            "prompts": repr(sorted((name, x) for name, x in given.items() if _is_text(x))),
            "embeddings": contents_of(leaves_of(list(given.values()))),
        }
        agree(self._group, settings, what="a call of a pipeline")

    def _before_noise(self, given: Mapping[str, Any]) -> None:
        """As `_before_drawing`; what is drawn later is the same on all ranks."""
        if self._is_paused:
            return
        self._is_begun = False
        self._begin_run()
        if not hasattr(self._pipeline, "encode_prompt"):
            agree(self._group, _call_of(self._pipeline), what="a call of a pipeline")
        self._before_drawing(given)

    def _before_drawing(self, given: Mapping[str, Any]) -> None:
        """A small all-gather and a broadcast of a few kilobytes."""
        if self._is_paused:
            return
        generators, latents = generators_of(given), given.get("latents")
        device = execution_device(self._pipeline, self._model)
        settings = {
            "generators": str([one.type for one in (device, *(x.device for x in generators))]),
            "latents": contents_of([latents] if isinstance(latents, Tensor) else []),
            "adapters": _adapters_of(self._pipeline),
        }
        agree(self._group, settings, what="noise")
        states = random_states(device, generators)
        carried = torch.cat(states).to(device_of(self._group))  # NCCL carries nothing of the host
        first = broadcast(self._group, "broadcast (noise)", carried).cpu()
        set_random_states(device, generators, first.split([one.numel() for one in states]))

    def _encoding(self, encode: Callable[..., Any]) -> Callable[..., Any]:
        """The VAE's `encode`, whose distribution is sampled alike."""

        def call(*args: Any, **kwargs: Any) -> Any:
            output = encode(*args, **kwargs)
            first = output[0] if isinstance(output, tuple) else output
            distribution = getattr(output, "latent_dist", first)
            sample = getattr(distribution, "sample", None)
            if callable(sample):
                distribution.sample = partial(self._sample, sample)
            return output

        return call

    def _sample(self, sample: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_begun:
            with shared("drawing the noise of a pipeline"):
                self._before_drawing({"": args, **kwargs})
        return sample(*args, **kwargs)


class _InPlaceOf:
    """Called by a pipeline in place of one of its methods; `undo` takes it back.

    Args:
        pipeline: Has the method.
        name: Of the method.
        before: Called first, with the method's arguments by name.
    """

    def __init__(
        self, pipeline: Any, name: str, before: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._pipeline, self._name, self._before = pipeline, name, before
        self._method: Callable[..., Any] = getattr(pipeline, name)
        self._had = vars(pipeline).get(name)
        setattr(pipeline, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the pipeline calls."""
        with shared(f"{self._name} of a pipeline"):
            self._before(inspect.signature(self._method).bind(*args, **kwargs).arguments)
            return self._method(*args, **kwargs)

    def undo(self) -> None:
        """Call the method as before."""
        if self._had is not None:
            setattr(self._pipeline, self._name, self._had)
        elif vars(self._pipeline).get(self._name) is self:
            delattr(self._pipeline, self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Alone":
        """Copies of the pipeline work by themselves."""
        return _Alone(copy.deepcopy(self._pipeline, memo), self._name)


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


def _call_of(pipeline: Any) -> dict[str, str]:
    """The numbers and texts that a pipeline was called with, by argument.

    Nothing hands them on: the scale of guidance, for one, is used by the call itself. So they are
    read where the call stands, of which this is a part.
    """
    frame = inspect.currentframe()
    while frame is not None:
        code, values = frame.f_code, frame.f_locals
        if code.co_name == "__call__" and values.get("self") is pipeline:
            names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
            wanted = [name for name in names if not name.startswith(_OF_A_RANK)]
            return {name: _shown(values.get(name)) for name in wanted}
        frame = frame.f_back
    return {}


def _shown(value: Any) -> str:
    """A number, a text, or a list of them; nothing of what is compared elsewhere, or not at all."""
    values = value if isinstance(value, list | tuple) else [value]
    is_plain = all(isinstance(one, int | float | str) for one in values)
    return repr(value) if is_plain else ""


def _is_text(value: Any) -> bool:
    """Return whether it is a prompt, or several."""
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
