"""Ranks of which the second does something else; and what all of them are told."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bascule.diffusers import parallelize
from tests.helpers.inference_cases import make_inputs
from tests.helpers.inference_toy import TABLE, make_toy, toy_inputs
from tests.helpers.misuse_arguments import Wrong
from tests.helpers.misuse_models import FLUX, SPLIT, flux


def other() -> bool:
    return dist.get_rank() == 1


def differently(**changed: Callable[[], Any]) -> Callable[[], object]:
    """The second rank has other inputs."""

    def call() -> object:
        model = make_toy()
        with parallelize(model, table=TABLE, **SPLIT):
            own = {name: make() for name, make in changed.items()} if other() else {}
            return model(**{**toy_inputs(), **own})

    return call


def differently_later() -> object:
    """From the fourth call on."""
    model = make_toy()
    with parallelize(model, table=TABLE, **SPLIT):
        for step in range(9):
            model(**toy_inputs(seed=9 if other() and step >= 3 else 1))


def differently_over(**degrees: Any) -> Callable[[], object]:
    def call() -> object:
        model = make_toy()
        with torch.no_grad(), parallelize(model, table=TABLE, **degrees):
            for batch in (2, 1, 1):
                out = model(**toy_inputs(batch=batch, seed=2 if other() else 1))
                out = out + 0
            return out

    return call


def differently_compiled() -> object:
    model = make_toy(num_blocks=1)
    with torch.no_grad(), parallelize(model, table=TABLE, **SPLIT) as handle:
        handle.compile()
        return model(**toy_inputs(seed=2 if other() else 1))


def different_model(**sizes: Any) -> Callable[[], object]:
    return lambda: parallelize(make_toy(**(sizes if other() else {})), table=TABLE, **SPLIT)


def different_dtype() -> object:
    model = make_toy()
    return parallelize(model.float() if other() else model, table=TABLE, **SPLIT)


def one_input(name: str) -> Callable[[], Tensor]:
    return lambda: toy_inputs(seed=5)[name]


def scaled_alone() -> object:
    model = flux()
    with torch.no_grad(), parallelize(model, **SPLIT):
        scale = {"scale": 0.5 if other() else 1.0}
        return model(**make_inputs(FLUX), joint_attention_kwargs=scale)


RANKS: dict[str, Wrong] = {
    "weights": (different_model(seed=3), "disagree on weights"),
    "blocks": (different_model(num_blocks=1), "disagree on models"),
    "dtype": (different_dtype, "disagree on"),
    **{
        f"other {name}": (differently(**{name: one_input(name)}), f"values of {name} differ")
        for name in ("text", "image", "context", "time")
    },
    "text length": (differently(text=lambda: toy_inputs(text=4)["text"]), "disagree on"),
    "image length": (differently(image=lambda: toy_inputs(image=8)["image"]), "disagree on"),
    "batch": (
        differently(**{n: lambda n=n: toy_inputs(batch=1)[n] for n in toy_inputs()}),
        "disagree on",
    ),
    "context length": (
        differently(context=lambda: toy_inputs()["context"][:, :2]),
        "disagree on",
    ),
    "a mask": (differently(text_mask=lambda: torch.ones(2, 5)), "disagree on"),
    "dtype of input": (differently(image=lambda: toy_inputs()["image"].float()), "disagree on"),
    "later": (differently_later, "values of"),
    "ring": (differently_over(ring_degree=2), "values of"),
    "guidance": (differently_over(guidance_degree=2), "values of"),
    "compiled": (differently_compiled, "values of"),
    "adapter scale": (scaled_alone, "disagree on"),
}
