"""Seconds of requests by degree: predicted, until they are measured."""

import math
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from bascule.diffusers.request import models_of
from bascule.generate.generating import is_guided
from bascule.generate.options import Prompt
from bascule.machine.cluster import HardwareProfile
from bascule.machine.mesh_choice import DenoisingStep, InferenceMesh, step_seconds
from bascule.serve.blocks import shape_of_block

_MOST_FORMS = 64  # that are remembered
_LATEST = 5  # of which the median counts
_ONCE = 0  # in place of a degree: encoding and decoding
_UNTRIED_SHARE = 0.75  # of the seconds at half the degree, where a degree was not tried


class Form(NamedTuple):
    """The facts that the seconds of a request depend on."""

    num_tokens: int  # without those of the text
    num_passes: int  # of a step


class Times:
    """Seconds of a pipeline's requests by form and degree.

    What is predicted for a machine is corrected by the median of what was measured last: at this
    form and degree, or else at other degrees of the form, or else of all. Degrees that were
    not tried are assumed to pay, so that they are: else a prediction of another machine would stay.

    Args:
        pipeline: Its configuration.
        degrees: Those that are allowed.
        ranks_per_node: Within which wires are fast. Default: as torchrun says, or all.
        profile: Speeds of the machine. Default: a data sheet, which measuring corrects.
        num_groups: Guidance groups of a block that has as many ranks.
    """

    def __init__(
        self,
        pipeline: Any,
        degrees: Sequence[int],
        ranks_per_node: int | None = None,
        profile: HardwareProfile | None = None,
        num_groups: int = 1,
    ) -> None:
        config: Any = getattr(models_of(pipeline)[0], "config", None)
        layers = [getattr(config, f"num_{kind}layers", None) or 0 for kind in ("", "single_")]
        self._model: dict[str, int] = {
            "num_layers": sum(layers) or 32,
            "num_heads": getattr(config, "num_attention_heads", None) or 24,
            "head_dim": getattr(config, "attention_head_dim", None) or 128,
        }
        scales = "vae_scale_factor", "vae_scale_factor_spatial", "vae_scale_factor_temporal"
        factors = [getattr(pipeline, name, None) or 0 for name in scales]
        self._side, self._frames = max(16, *factors[:2]), factors[2] or 4  # of a token, in pixels
        in_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", max(degrees)))
        self._degrees, self._in_node, self._num_groups = degrees, in_node, num_groups
        self._profile = profile or HardwareProfile.load("h100-datasheet")
        self._predicted: dict[Form, dict[int, float]] = {}
        self._measured: dict[Form, dict[int, deque[float]]] = {}
        self._tables: dict[Form, dict[int, float]] = {}

    def form(self, prompt: Prompt, takes: Mapping[str, Any]) -> Form:
        """Return the form of a prompt, for a pipeline that takes these arguments."""

        def size(asked: int | None, name: str, default: int) -> int:
            own = getattr(takes.get(name), "default", None)
            return asked or (own if isinstance(own, int) else default)

        width, height = size(prompt.width, "width", 1024), size(prompt.height, "height", 1024)
        num_frames = (size(prompt.frames, "num_frames", 1) - 1) // self._frames + 1
        num_tokens = -(-width // self._side) * -(-height // self._side) * num_frames
        return Form(num_tokens, 2 if is_guided(prompt, takes) else 1)

    def step_s(self, form: Form) -> dict[int, float]:
        """Return seconds of a step by degree; they change in place as more is measured."""
        if form not in self._tables:
            if len(self._tables) == _MOST_FORMS:
                oldest = next(iter(self._tables))
                for kept in (self._predicted, self._measured, self._tables):
                    kept.pop(oldest, None)
            self._predicted[form] = {
                degree: self._predict(form, degree) for degree in self._degrees
            }
            self._tables[form] = {}
            self._correct([form])
        return self._tables[form]

    def once_s(self, form: Form) -> float:
        """Return seconds of what is done once, on one rank; as one step if none was measured."""
        of_all = [by[_ONCE] for by in self._measured.values() if _ONCE in by]
        of_form = self._measured.get(form, {}).get(_ONCE)
        return median(of_form or list(map(median, of_all)) or [min(self.step_s(form).values())])

    def measure(self, form: Form, degree: int, seconds: float) -> None:
        """Take the measured seconds of a step; of degree 0, those of what is done once."""
        if degree in (_ONCE, *self.step_s(form)):
            latest = self._measured.setdefault(form, {})
            latest.setdefault(degree, deque(maxlen=_LATEST)).append(max(seconds, 1e-6))
            self._correct(self._tables)

    def _predict(self, form: Form, degree: int) -> float:
        step = DenoisingStep(num_tokens=form.num_tokens, num_passes=form.num_passes, **self._model)
        shape = shape_of_block(degree, self._model["num_heads"], self._num_groups)
        mesh = InferenceMesh(shape.guidance, shape.ring, shape.ulysses)
        return step_seconds(step, mesh, self._in_node, self._profile)

    def _correct(self, forms: Iterable[Form]) -> None:
        ratios = {
            form: {d: median(x) / self._predicted[form][d] for d, x in by.items() if d != _ONCE}
            for form, by in self._measured.items()
        }
        usual = median([x for by in ratios.values() for x in by.values()] or [1.0])
        for form in forms:
            tried = ratios.get(form)
            for degree, predicted in self._predicted[form].items():
                ratio = tried[min(tried, key=lambda d: abs(d - degree))] if tried else usual
                seconds = predicted * ratio
                if tried and degree not in tried and min(tried) < degree:
                    last = max(d for d in tried if d < degree)
                    share = _UNTRIED_SHARE ** math.log2(degree / last)
                    seconds = min(seconds, share * self._predicted[form][last] * tried[last])
                self._tables[form][degree] = seconds
