"""Times of requests by degree and batch: predicted, until they are measured."""

import math
import os
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from bascule.diffusers.request import models_of
from bascule.generate.generating import is_guided
from bascule.generate.options import Prompt
from bascule.machine.cluster import HardwareProfile
from bascule.machine.mesh_choice import DenoisingStep, InferenceMesh, step_seconds
from bascule.serve.blocks import shape_of_block

_MOST_SIZES = 64  # remembered
_MOST_GRAPHS = 4096  # more than torch compiles
_LATEST = 5  # measurements whose median counts
_ONCE = 0  # key of encoding and decoding, in place of a degree
_UNTRIED_SHARE = 0.75  # assumed seconds of an untried degree over those at half the degree
_UNTRIED_SHARED = 0.5  # assumed share of a step that a batch which was not tried shares


class RequestSize(NamedTuple):
    """The facts that the time of a request depends on."""

    num_tokens: int  # without text tokens
    num_passes: int  # forward passes of a step


class Times:
    """Times of a pipeline's requests by size and degree.

    The median of measured over predicted time corrects a prediction: at this size and degree, else
    at the nearest degree of this size, else over all sizes. An untried degree is assumed to be
    faster, so that it gets tried and a wrong prediction gets corrected. Predictions assume an H100
    by its datasheet, and nodes of LOCAL_WORLD_SIZE ranks (set by torchrun), else one node. Blocks
    have one of `degrees` ranks, and `num_groups` guidance groups if they have as many ranks. With
    `compiles`, the first step of a graph is left out: of each size, batch, block, and adapters.

    The requests of a batch share a part of a step, such as its launches. The part is that of the
    nearest batch that was measured: at this degree, else at the nearest one. Before the first
    batch of a size, half of a step is assumed, so that it gets tried, but no more than smaller
    sizes share. Batches have up to `most` requests.
    """

    def __init__(
        self,
        pipeline: Any,
        degrees: Sequence[int],
        num_groups: int = 1,
        most: int = 1,
        *,
        compiles: bool = False,
    ) -> None:
        self._compiles, self._compiled = compiles, set[Hashable]()
        config: Any = getattr(models_of(pipeline)[0], "config", None)
        layers = [getattr(config, f"num_{kind}layers", None) or 0 for kind in ("", "single_")]
        self._model: dict[str, int] = {
            "num_layers": sum(layers) or 32,
            "num_heads": getattr(config, "num_attention_heads", None) or 24,
            "head_dim": getattr(config, "attention_head_dim", None) or 128,
        }
        scales = "vae_scale_factor", "vae_scale_factor_spatial", "vae_scale_factor_temporal"
        factors = [getattr(pipeline, name, None) or 0 for name in scales]
        self._side, self._frames = max(16, *factors[:2]), factors[2] or 4  # pixels, frames a token
        in_node = int(os.environ.get("LOCAL_WORLD_SIZE", max(degrees)))
        self._degrees, self._in_node, self._num_groups = degrees, in_node, num_groups
        self._batches = range(2, most + 1)
        self._profile = HardwareProfile.load("h100-datasheet")
        self._predicted: dict[RequestSize, dict[int, float]] = {}
        self._measured: dict[RequestSize, dict[tuple[int, int], deque[float]]] = {}
        self._tables: dict[RequestSize, dict[int, float]] = {}
        self._curves: dict[RequestSize, dict[int, list[float]]] = {}

    def request_size(self, prompt: Prompt, takes: Mapping[str, Any]) -> RequestSize:
        """Return tokens and passes of a prompt, given the parameters of the pipeline's call."""

        def pick(value: int | None, name: str, default: int) -> int:
            preset = getattr(takes.get(name), "default", None)
            return value or (preset if isinstance(preset, int) else default)

        width, height = pick(prompt.width, "width", 1024), pick(prompt.height, "height", 1024)
        num_frames = (pick(prompt.frames, "num_frames", 1) - 1) // self._frames + 1
        num_tokens = -(-width // self._side) * -(-height // self._side) * num_frames
        return RequestSize(num_tokens, 2 if is_guided(prompt, takes) else 1)

    def step_s(self, size: RequestSize) -> dict[int, float]:
        """Return seconds of a step by degree; measurements update the dict in place."""
        if size not in self._tables:
            if len(self._tables) == _MOST_SIZES:
                oldest = next(iter(self._tables))
                for table in (self._predicted, self._measured, self._tables, self._curves):
                    table.pop(oldest, None)
            self._predicted[size] = {d: self._predict(size, d) for d in self._degrees}
            self._tables[size], self._curves[size] = {}, {}
            self._correct()
        return self._tables[size]

    def batch_s(self, size: RequestSize) -> dict[int, list[float]]:
        """Return seconds of a step of 1, 2, .. requests in a batch by degree, as `step_s`."""
        self.step_s(size)
        return self._curves[size]

    def once_s(self, size: RequestSize) -> float:
        """Return seconds to encode and decode on one rank; until measured, seconds of a step."""
        of_all = [latest[_ONCE, 1] for latest in self._measured.values() if (_ONCE, 1) in latest]
        of_size = self._measured.get(size, {}).get((_ONCE, 1))
        return median(of_size or list(map(median, of_all)) or [min(self.step_s(size).values())])

    def measure(
        self, size: RequestSize, degree: int, seconds: float, batch: int = 1, graph: Hashable = 0
    ) -> None:
        """Record seconds of a step, of a compiled `graph`; degree 0: of encoding and decoding."""
        if degree in (_ONCE, *self.step_s(size)):
            key, is_open = (size, degree, batch, graph), len(self._compiled) < _MOST_GRAPHS
            if self._compiles and degree != _ONCE and is_open and key not in self._compiled:
                self._compiled.add(key)
                return
            latest = self._measured.setdefault(size, {})
            latest.setdefault((degree, batch), deque(maxlen=_LATEST)).append(max(seconds, 1e-6))
            self._correct()

    def _predict(self, size: RequestSize, degree: int) -> float:
        step = DenoisingStep(num_tokens=size.num_tokens, num_passes=size.num_passes, **self._model)
        shape = shape_of_block(degree, self._model["num_heads"], self._num_groups)
        mesh = InferenceMesh(shape.guidance, shape.ring, shape.ulysses)
        return step_seconds(step, mesh, self._in_node, self._profile)

    def _correct(self) -> None:
        ratios = {
            size: {
                d: median(latest[d, b]) / self._predicted[size][d] / (b - _UNTRIED_SHARED * (b - 1))
                for d, b in sorted(latest, reverse=True)  # the smallest batch counts
                if d != _ONCE
            }
            for size, latest in self._measured.items()
        }
        usual = median([x for by_degree in ratios.values() for x in by_degree.values()] or [1.0])
        for size, predicted_s in self._predicted.items():
            tried = ratios.get(size)
            for degree, predicted in predicted_s.items():
                ratio = tried[min(tried, key=lambda d: abs(d - degree))] if tried else usual
                seconds = predicted * ratio
                if tried and degree not in tried and min(tried) < degree:
                    last = max(d for d in tried if d < degree)
                    share = _UNTRIED_SHARE ** math.log2(degree / last)
                    seconds = min(seconds, share * predicted_s[last] * tried[last])
                self._tables[size][degree] = seconds
        shared = {  # the share of a step that measured batches share, by degree and batch
            size: {
                (d, b): min(1.0, (b - median(seconds) / self._tables[size][d]) / (b - 1))
                for (d, b), seconds in latest.items()
                if b > 1
            }
            for size, latest in self._measured.items()
        }
        for size, step_s in self._tables.items():
            of_size = shared.get(size)
            smaller = (of for at, of in shared.items() if of and at.num_tokens <= size.num_tokens)
            most = min([_UNTRIED_SHARED, *(max(of.values()) for of in smaller)])
            for degree, alone_s in step_s.items():
                curve = self._curves[size][degree] = [alone_s]
                for num in self._batches:
                    share = most
                    if of_size:
                        near = min(of_size, key=lambda at: (abs(at[0] - degree), abs(at[1] - num)))
                        share = of_size[near]
                    curve.append(alone_s * (num - share * (num - 1)))
