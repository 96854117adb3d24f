"""A pipeline's call as a scope: same arguments, and one noise, on all ranks of a replica.

All ranks run the same program, so random states that are equal when it starts stay equal.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bascule.comm.agree import agree
from bascule.comm.collectives import broadcast
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup, device_of
from bascule.diffusers.phases import TRANSFORMERS, execution_device
from bascule.encoders.items import contents_of
from bascule.stand_in import Override

_OF_A_RANK = "output_type", "return_dict", "callback"  # beginnings of names; ranks may differ


class PipelineRun(Override):
    """Calls of a pipeline that all ranks of a replica make together, each after `begin_run`."""

    def __init__(
        self, pipeline: Any, group: RankGroup, model: nn.Module, begin_run: Callable[[], None]
    ) -> None:
        self._pipeline, self._group, self._model = pipeline, group, model
        self._begin_run = begin_run
        super().__init__(pipeline, "__call__", self._run)

    @shared("a call of a pipeline")
    def _run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compare the arguments by a small all-gather, and broadcast a few kilobytes of states."""
        bound = inspect.signature(call).bind(*args, **kwargs)
        bound.apply_defaults()
        device = execution_device(self._pipeline, self._model)
        settings = {
            name: _described(value)
            for name, value in bound.arguments.items()
            if not name.startswith(_OF_A_RANK)
        }
        settings |= {"adapters": _adapters_of(self._pipeline), "device": device.type}
        scheduler = getattr(self._pipeline, "scheduler", None)
        config = getattr(scheduler, "config", {}).items()  # names with _ are of a rank, as paths
        kept = {name: value for name, value in config if not name.startswith("_")}
        settings["scheduler"] = f"{type(scheduler).__name__} {kept}"
        agree(self._group, settings, what=f"a call of a {type(self._pipeline).__name__}")
        generators = generators_of(bound.arguments)
        states = random_states(device, generators)
        sent = torch.cat(states).to(device_of(self._group))  # NCCL sends nothing of the host
        first = broadcast(self._group, "broadcast (noise)", sent).cpu()
        set_random_states(device, generators, first.split([one.numel() for one in states]))
        self._begin_run()
        return call(*args, **kwargs)


def _described(value: Any) -> str:
    """Describe numbers, texts and generators; of tensors a digest, of other things their class."""
    if isinstance(value, Mapping):
        return str(sorted((str(key), _described(one)) for key, one in value.items()))
    if isinstance(value, list | tuple):
        return str([_described(one) for one in value])
    if isinstance(value, Tensor):
        return contents_of([value])
    if isinstance(value, torch.Generator):
        return f"a generator on {value.device.type}"
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__


def _adapters_of(pipeline: Any) -> str:
    """Describe the LoRA layers of peft, often loaded or scaled after `parallelize`."""
    models = [getattr(pipeline, name, None) for name in TRANSFORMERS]
    layers = [
        (layer, scales)
        for model in models
        if isinstance(model, nn.Module)
        for layer in model.modules()
        if isinstance(scales := getattr(layer, "scaling", None), dict) and hasattr(layer, "lora_A")
    ]
    states = Counter(
        f"{layer.active_adapters} scaled by {scales}{' and off' if layer.disable_adapters else ''}"
        for layer, scales in layers
    )
    values = [p for layer, _ in layers for name, p in layer.named_parameters() if "lora_" in name]
    return f"{dict(states)}, {contents_of(values)}" if layers else "none"


def generators_of(nest: Any) -> list[torch.Generator]:
    """Return the generators among arguments, each once."""
    if isinstance(nest, torch.Generator):
        return [nest]
    if isinstance(nest, Mapping):
        nest = [nest[name] for name in sorted(nest)]
    parts = nest if isinstance(nest, tuple | list) else ()
    return list(dict.fromkeys(one for part in parts for one in generators_of(part)))


def random_states(device: torch.device, generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Return the states of torch's generators, on the host and the device, and of these."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states + [one.get_state() for one in generators]


def set_random_states(
    device: torch.device, generators: Sequence[torch.Generator], states: Sequence[Tensor]
) -> None:
    """Draw from these states on, which `random_states` returned."""
    rest = (state.clone() for state in states)
    torch.set_rng_state(next(rest))
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(next(rest), device)
    for one, state in zip(generators, rest, strict=True):
        one.set_state(state)
