"""Calls of a pipeline: draw the same noise on all ranks, time phases, share VAE and text encoders.

All ranks of a replica run the same program, so random states that are equal when it starts stay
equal.
"""

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bascule.comm import groups
from bascule.comm.agree import agree
from bascule.comm.collectives import broadcast
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup
from bascule.comm.values import contents_of, described, in_memory
from bascule.diffusers.arguments import leaves
from bascule.diffusers.compiling import device_of
from bascule.encoders.encoder import BalancedEncoder, EncoderOptions
from bascule.encoders.items import table_of
from bascule.encoders.tiled_vae import TiledVAE
from bascule.errors import ConfigError
from bascule.machine.costs import PolynomialCost
from bascule.quantities import seconds
from bascule.stand_in import Override

_TEXT_ENCODERS = "text_encoder", "text_encoder_2", "text_encoder_3"
_TOKENS = PolynomialCost(quadratic=0.0, linear=1.0, constant=0.0)


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A module of a pipeline whose work the ranks share, until `remove`."""

    module: nn.Module
    phase: str  # with most of the work: "encode" or "decode"
    encoder: BalancedEncoder | TiledVAE
    overrides: tuple[Override, ...]  # of the module's methods

    def remove(self) -> None:
        """Let each rank do all of the work again."""
        for override in self.overrides:
            override.remove()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let each rank do all of the work within this scope."""
        with ExitStack() as stack:
            for override in self.overrides:
                stack.enter_context(override.suspended())
            yield


def shared_parts(pipeline: Any, for_vae: str, for_texts: str) -> list[nn.Module]:
    """Return the modules that ranks share besides the transformers."""
    vae = _shared_vae(pipeline, for_vae)
    return [*([] if vae is None else [vae]), *_shared_text_encoders(pipeline, for_texts)]


def _shared_vae(pipeline: Any, for_vae: str) -> nn.Module | None:
    vae = getattr(pipeline, "vae", None)
    if not isinstance(vae, nn.Module) or for_vae == "own":
        return None
    if for_vae == "first" and hasattr(pipeline, "video_processor"):
        raise ConfigError(
            f"parallelize(.., vae='first'): a {type(pipeline).__name__} of other ranks would put "
            "together a video of no frames, and fail: use vae='all'"
        )
    if getattr(vae, "use_tiling", False):
        return vae
    if for_vae == "first":
        wrong = f"vae='first': a {type(vae).__name__} without tiling decodes whole images"
        raise ConfigError(f"{wrong}: call pipeline.vae.enable_tiling() before parallelize")
    return None


def _shared_text_encoders(pipeline: Any, for_texts: str) -> list[nn.Module]:
    if for_texts == "own":
        return []
    encoders = [getattr(pipeline, name, None) for name in _TEXT_ENCODERS]
    modules = [encoder for encoder in encoders if isinstance(encoder, nn.Module)]
    for module in modules:
        if table_of(module).length is None:
            wrong = f"text_encoders='all': how a {type(module).__name__} holds prompts is unknown"
            raise ConfigError(f"{wrong}: use text_encoders='own'")
    return modules


def share_parts(
    pipeline: Any,
    group: RankGroup,
    for_vae: Literal["all", "first", "own"],
    for_texts: Literal["all", "own"],
    device: torch.device,
    shared_before: Sequence[nn.Module],
) -> Iterator[SharedPart]:
    """Share a VAE's tiles and a batch's prompts; yield the parts that were not shared before."""
    ranks = group.process_group
    vae = _shared_vae(pipeline, for_vae)
    if vae is not None and for_vae != "own" and vae not in shared_before:
        settings = EncoderOptions(features_for=for_vae, device=device)
        tiled = encoding = TiledVAE(vae, mesh_or_group=ranks, options=settings)
        if for_vae == "first":  # only the first rank gets pixels; all ranks get latents
            for_all = replace(settings, features_for="all")
            encoding = TiledVAE(vae, mesh_or_group=ranks, options=for_all)
        methods = {"encode": encoding.encode, "decode": tiled.decode}
        both = [_override(vae, *method) for method in methods.items()]
        yield SharedPart(vae, "decode", tiled, tuple(both))
    settings = EncoderOptions(features_for="all", device=device)
    for module in _shared_text_encoders(pipeline, for_texts):
        if module not in shared_before:
            encoder = BalancedEncoder(module, cost=_TOKENS, mesh_or_group=ranks, options=settings)
            override = _override(module, "__call__", encoder.call)
            yield SharedPart(module, "encode", encoder, (override,))


def _override(module: nn.Module, name: str, shared: Callable[..., Any]) -> Override:
    def call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_shared = getattr(module, "use_tiling", True)  # text encoders have no tiles
        return (shared if is_shared else method)(*args, **kwargs)

    return Override(module, name, call)


PHASES = "encode", "denoise", "decode"

TRANSFORMERS = "transformer", "transformer_2", "unconditional_transformer"

_METHODS = {
    "encode": ("", "encode_prompt"),
    "noise": ("", "prepare_latents"),
    "step": ("scheduler", "step"),
    "decode": ("vae", "decode"),
} | {name: (name, "__call__") for name in TRANSFORMERS}

Observer = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]  # name, arguments, output


@contextmanager
def watched(pipeline: Any, observe: Observer) -> Iterator[None]:
    """Call `observe` after "encode", "noise", "step", "decode" and after calls of transformers."""

    def around(what: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        observe(what, args, kwargs, output)
        return output

    with ExitStack() as stack:
        for what, (part, name) in _METHODS.items():
            owner = getattr(pipeline, part, None) if part else pipeline
            if getattr(owner, name, None) is not None:
                # Some pipelines take steps with copies of their scheduler.
                override = Override(owner, name, partial(around, what), with_copies=what == "step")
                stack.callback(override.remove)
        yield


def execution_device(pipeline: Any, model: nn.Module) -> torch.device:
    """Return the device on which a pipeline computes, even if its weights are offloaded."""
    device = getattr(pipeline, "_execution_device", None)
    if isinstance(device, torch.device) and device.type != "meta":
        return device
    return device_of(model)


@dataclass(slots=True)
class PhaseTimes:
    """Measured times of the phases in a pipeline's last call, on this rank."""

    begun: float = 0.0  # seconds of `time.perf_counter`, as are the next three
    encoded: float = 0.0  # when the noise was drawn
    denoised: float = 0.0  # when the last step ended
    ended: float = 0.0
    num_steps: int = 0  # calls of the scheduler
    num_passes: int = 0  # calls of the transformers, including calls for guidance

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per phase; complete once the call has ended."""
        times = self.begun, self.encoded, self.denoised, self.ended
        return {
            phase: end - start for phase, (start, end) in zip(PHASES, pairwise(times), strict=True)
        }


def finished_s(device: torch.device) -> float:
    """Return the time in seconds once a device has done its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


@contextmanager
def timed(pipeline: Any, device: torch.device) -> Iterator[PhaseTimes]:
    """Time a pipeline's call within this scope; the host waits after each step."""
    times, now = PhaseTimes(), partial(finished_s, device)

    def observe(what: str, *_: Any) -> None:
        if what == "step":
            times.denoised, times.num_steps = now(), times.num_steps + 1
        elif what in TRANSFORMERS:
            times.num_passes += 1
        elif what != "decode" and not times.num_passes:  # some pipelines draw again between steps
            times.encoded = times.denoised = now()

    with watched(pipeline, observe):
        times.begun = times.encoded = times.denoised = now()
        try:
            yield times
        finally:
            times.ended = now()


def phase_lines(times: PhaseTimes | None, shared: Sequence[SharedPart]) -> tuple[str, ...]:
    """Describe the phases of the last call: measured seconds, and reports of shared work."""
    lines = list[str]()
    for name in PHASES:
        facts = [] if times is None else [f"{seconds(times.seconds[name])} measured"]
        reports = [part.encoder.last for part in shared if part.phase == name]
        facts += [str(report) for report in reports if report is not None]
        if facts:
            lines.append(f"{name}: {'; '.join(facts)}")
    return tuple(lines)


# Prefixes of arguments that may differ between ranks.
_MAY_DIFFER = "output_type", "return_dict", "callback"


class PipelineRun(Override):
    """Lets all ranks of a replica call a pipeline together, each call in a `run` scope."""

    def __init__(
        self,
        pipeline: Any,
        group: RankGroup,
        models: Sequence[nn.Module],
        run: Callable[[], AbstractContextManager[None]],
        shares_vae: bool,
    ) -> None:
        self._pipeline, self._group, self._models, self._run_scope = pipeline, group, models, run
        self._shares_vae = shares_vae
        self._check_models()
        super().__init__(pipeline, "__call__", self._run)

    @shared("a call of a pipeline")
    def _run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compare arguments by a small all-gather, broadcast random states, and call."""
        self._check_models()
        bound = inspect.signature(call).bind(*args, **kwargs)
        bound.apply_defaults()
        device = execution_device(self._pipeline, self._models[0])
        settings = {
            name: described(value)
            for name, value in bound.arguments.items()
            if not name.startswith(_MAY_DIFFER)
        }
        settings |= {"adapters": _adapters_of(self._pipeline), "device": device.type}
        settings |= _configured(self._pipeline)
        if self._shares_vae:
            vae = getattr(self._pipeline, "vae", None)
            settings["vae"] = f"{type(vae).__name__}, tiling {getattr(vae, 'use_tiling', None)}"
        agree(self._group, settings, what=f"a call of a {type(self._pipeline).__name__}")
        generators = generators_of(bound.arguments)
        states = random_states(device, generators)
        sent = torch.cat(states).to(groups.device_of(self._group))  # NCCL sends no host memory
        first = broadcast(self._group, "broadcast (noise)", sent).cpu()
        set_random_states(device, generators, first.split([state.numel() for state in states]))
        with self._run_scope():
            return call(*args, **kwargs)

    def _check_models(self) -> None:
        """Refuse a transformer that neither is nor wraps a split model."""
        for name in TRANSFORMERS:
            model = getattr(self._pipeline, name, None)
            if isinstance(model, nn.Module) and not {*self._models} & {*model.modules()}:
                raise ConfigError(
                    f"the {name} of this {type(self._pipeline).__name__} is not one of the models "
                    "that were split: call undo() of the handle, then parallelize(pipeline, ..)"
                )


def _configured(pipeline: Any) -> dict[str, str]:
    """Describe the configurations of a pipeline and of its parts that are no modules."""
    texts = dict[str, str]()
    for name, part in {**vars(pipeline), "pipeline": pipeline}.items():
        config: Any = getattr(part, "config", None)
        if isinstance(part, nn.Module) or not isinstance(config, Mapping):
            continue
        # Attributes of a scheduler are those of its last run; names with _ are a rank's, as paths.
        others = {} if part is pipeline or hasattr(part, "step") else vars(part)
        settings = {key: value for key, value in others.items() if isinstance(value, int | float)}
        settings |= {"shift of now": getattr(part, "shift", None), **config}
        settings = {key: value for key, value in settings.items() if not key.startswith("_")}
        if part is pipeline:  # its lists name the classes of parts, which a rank may lack
            settings = {key: x for key, x in settings.items() if not isinstance(x, list | tuple)}
        texts[name] = f"{type(part).__name__} {described(settings)}"
    return texts


def _adapters_of(pipeline: Any) -> str:
    """Describe the LoRA layers of peft, which are often loaded or scaled after `parallelize`."""
    parts = [getattr(pipeline, name, None) for name in TRANSFORMERS]
    models = [part for part in parts if isinstance(part, nn.Module)]
    layers = [
        (layer, scales)
        for model in models
        for layer in model.modules()
        if isinstance(scales := getattr(layer, "scaling", None), dict) and hasattr(layer, "lora_A")
    ]
    values = [x for model in models for name, x in in_memory(model).items() if "lora_" in name]
    states = Counter(
        f"{layer.active_adapters} scaled by {scales}{' and off' if layer.disable_adapters else ''}"
        for layer, scales in layers
    )
    return f"{dict(states)}, {contents_of(values)}" if layers else "none"


def generators_of(nest: Any) -> list[torch.Generator]:
    """Return the random generators among arguments, each once."""
    return list(dict.fromkeys(x for _, x in leaves(nest) if isinstance(x, torch.Generator)))


def random_states(device: torch.device, generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Return the random states of the host, of the device (if another), and of `generators`."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states + [generator.get_state() for generator in generators]


def set_random_states(
    device: torch.device, generators: Sequence[torch.Generator], states: Sequence[Tensor]
) -> None:
    """Set the random states that `random_states` returned, on this rank or another."""
    copies = (state.clone() for state in states)
    torch.set_rng_state(next(copies))
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(next(copies), device)
    for generator, state in zip(generators, copies, strict=True):
        generator.set_state(state)
