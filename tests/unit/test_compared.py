"""What ranks compare: values as texts, and the calls that begin a run."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bascule.comm.values import contents_of, described, values_digest
from bascule.diffusers.arguments import Fingerprint, Steps
from bascule.diffusers.tables import unwrapped

Image = pytest.importorskip("PIL.Image")


class Kind(Enum):
    PHOTO = "photo"
    MASK = "mask"


@dataclass
class Condition:
    """As those of video pipelines."""

    frames: list[Any]
    strength: float = 1.0
    more: dict[str, Any] = field(default_factory=dict[str, Any])


class Regions:
    """An object of a user's."""

    def __init__(self, *boxes: tuple[int, ...]) -> None:
        self.boxes, self.around = boxes, self


class Slotted:
    __slots__ = ("weights",)

    def __init__(self, weights: Any) -> None:
        self.weights = weights


MASK = np.zeros((6, 8), np.uint8)
MASK[1:4, :3] = 255


def photo(seed: int = 0, mode: str = "RGB") -> Any:
    pixels = np.random.default_rng(seed).integers(0, 255, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def coloured(shift: int) -> Any:
    """Indices of one picture, with other colours."""
    image = Image.fromarray(MASK).convert("P")
    image.putpalette([(value + shift) % 256 for value in range(768)])
    return image


MAKES: dict[str, tuple[Callable[[], Any], ...]] = {
    "mask": tuple(
        partial(Image.fromarray, np.ascontiguousarray(mask))
        for mask in (MASK, MASK[:, ::-1], MASK[::-1], MASK.T, MASK // 2)
    ),
    "photo": (photo, partial(photo, 1), partial(photo, mode="L"), partial(photo, mode="YCbCr")),
    "palette": (partial(coloured, 0), partial(coloured, 1)),
    "video": tuple(lambda k=k: [photo(seed) for seed in k] for k in ((1, 2), (2, 1), (1,), (1, 3))),
    "sigmas": (
        *(partial(np.array, values, "f8") for values in ([1, 0.5], [0.5, 1], [[1, 0.5]])),
        partial(np.array, [1, 0.5], "f4"),
    ),
    "objects": (lambda: np.array([None, "a"]), lambda: np.array([None, "b"])),
    "scalar": (lambda: np.float32(0.5), lambda: np.float32(0.25), lambda: np.int64(1)),
    "dtype": (lambda: torch.float16, lambda: torch.bfloat16),
    "enum": (lambda: Kind.PHOTO, lambda: Kind.MASK),
    "bytes": (lambda: b"ab", lambda: b"ba", lambda: bytearray(b"abc")),
    "path": (lambda: Path("a/b.png"), lambda: Path("a/c.png")),
    "set": (lambda: {"b", "a"}, lambda: {"b", "c"}),
    "dataclass": (
        lambda: Condition([photo()]),
        lambda: Condition([photo(1)]),
        lambda: Condition([photo()], 0.5),
        lambda: Condition([photo()], more={"latents": torch.ones(2)}),
    ),
    "object": (lambda: Regions((0, 1)), lambda: Regions((0, 2)), lambda: Regions((0, 1), (2, 3))),
    "slots": (lambda: Slotted([1, 2]), lambda: Slotted([2, 1])),
    "partial": (lambda: partial(max, 1), lambda: partial(max, 2), lambda: partial(min, 1)),
    "iterator": (lambda: iter([1, 2]), lambda: iter([2, 1])),
    "layer": (lambda: ones(nn.Linear(2, 1)), lambda: ones(nn.Linear(2, 1, bias=False))),
    "tensor": (
        lambda: torch.arange(6.0).view(2, 3),
        lambda: torch.arange(6.0).view(2, 3).flip(1),
        lambda: torch.arange(6.0).view(3, 2),
        lambda: torch.arange(6).view(2, 3),
    ),
    "zeros": (lambda: torch.zeros(2), lambda: torch.zeros(2).double(), lambda: torch.zeros(3)),
    "sparse": (lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3)[[1, 0, 2]].to_sparse()),
    "complex": (lambda: torch.ones(2) * 1j, lambda: (torch.ones(2) * 1j).conj()),
    "signs": tuple(lambda n=n: torch.ones(4).double() * n for n in (1, -1)),
    "halves": tuple(lambda n=n: torch.tensor([1.0, n, 1.0, n]).half() for n in (1, -1)),
    "nest": tuple(
        lambda k=k, v=v: {"a": (1, {k: [v]})} for k, v in (("b", MASK), ("b", MASK.T), ("c", MASK))
    ),
}


def ones(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    return layer


@pytest.mark.parametrize("kind", MAKES)
def test_equal_values_have_one_text_and_others_have_others(kind: str) -> None:
    texts = [described(make()) for make in MAKES[kind]]
    assert texts == [described(make()) for make in MAKES[kind]]
    assert len(set(texts)) == len(texts), texts


def test_what_cannot_be_read_is_described_by_its_name() -> None:
    def one() -> Iterator[int]:
        yield 1

    with Path(__file__).open() as file:
        texts = [described(value) for value in (one, one(), file, torch.Generator(), len)]
    assert texts == [
        "function test_what_cannot_be_read_is_described_by_its_name.<locals>.one",
        "generator test_what_cannot_be_read_is_described_by_its_name.<locals>.one",
        "TextIOWrapper",
        "a generator on cpu",
        "builtin_function_or_method len",
    ]
    jpeg = photo()
    jpeg.info["exif"] = b"of one camera"
    assert described(jpeg) == described(photo())  # its pixels are the same


def test_a_model_s_arguments_are_described_too() -> None:
    def text(**kwargs: Any) -> str:
        return Fingerprint.of({"kwargs": kwargs}).described

    assert text(mask=MASK) != text(mask=MASK.T) and text(kind=Kind.MASK) != text(kind=Kind.PHOTO)
    print_of = Fingerprint.of({"x": Condition([], more={"latents": torch.ones(2)})})
    assert print_of.names == ["x.more.latents"]  # by value, within a tolerance


# Weights


class Wrapped(nn.Parameter):
    """Wraps whatever is computed of it, as a weight of a GGUF file does."""

    scales: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        assert not isinstance(result, Tensor) or result.dim() == 2, "only matrices are wrapped"
        return result


class Outer(Tensor):
    """Holds its values in an attribute, and says nothing of it."""

    @staticmethod
    def __new__(cls, codes: Tensor) -> "Outer":
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # pyright: ignore
        made.codes = codes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(func)


def weights(kind: str, values: Tensor, scales: Tensor) -> nn.Module:
    """A layer with weights as a library has them: codes, and scales beside them."""
    layer = nn.Module()
    if kind == "plain":
        layer.weight = nn.Parameter(values * scales[0])
    elif kind == "gguf":
        layer.weight = Wrapped(values.clone(), requires_grad=False)
        layer.weight.scales = scales
    elif kind == "outer":
        layer.register_buffer("weight", Outer(values * scales[0]))
    return layer


@pytest.mark.parametrize("kind", ["plain", "gguf", "outer"])
def test_weights_of_any_class_are_read(kind: str) -> None:
    values, scales = torch.arange(6.0).view(2, 3), torch.ones(2)
    digests = [
        values_digest(weights(kind, *one))
        for one in [(values, scales), (values.flip(0), scales), (values, scales * 2)]
    ]
    assert digests[0] == values_digest(weights(kind, values.clone(), scales.clone()))
    assert len(set(digests)) == 3


def test_where_values_lie_makes_no_difference() -> None:
    storage = torch.randint(0, 255, (100,), dtype=torch.uint8)
    views = [storage[start : start + 24].view(torch.uint8) for start in (0, 3, 8)]
    for view in views[1:]:
        view.copy_(views[0].clone())
        assert contents_of([view]) == contents_of([view.clone()])
    image = torch.randn(2, 3, 4, 5)
    last = image.to(memory_format=torch.channels_last)
    assert contents_of([last]) == contents_of([image])


@pytest.mark.filterwarnings("ignore:.*")
def test_weights_on_a_disk_are_not_in_memory(tmp_path: Path) -> None:
    """diffusers leaves memory that nobody wrote in their place."""
    diffusers = pytest.importorskip("diffusers")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other = copy.deepcopy(model)
    for place, offloaded in enumerate((model, other)):
        to = {"onload_device": torch.device("cpu"), "offload_type": "leaf_level"}
        path = str(tmp_path / str(place))
        diffusers.hooks.apply_group_offloading(offloaded, offload_to_disk_path=path, **to)
    for parameter in other.parameters():
        parameter.data.fill_(7.0)  # as in memory that was freed
    assert values_digest(model) == values_digest(other)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_wrappers_that_pass_calls_on_are_looked_through() -> None:
    peft: Any = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(2, 2))
    wrapper: Any = object.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = torch.compile(model)
    assert unwrapped(wrapper) is model and unwrapped(model) is model
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
    assert unwrapped(adapted) is model


# Calls that begin a run

TEXT, OTHER_TEXT, IDS = torch.ones(1, 3, 4), torch.ones(1, 3, 4), torch.ones(3)


def call(time: float | None, latents: Tensor | None = None, **more: Tensor) -> dict[str, Any]:
    """Arguments of a step, of new latents and times."""
    named = {} if time is None else {"timestep": torch.tensor([time])}
    return {"hidden_states": torch.ones(2) if latents is None else latents, **named, **more}


def run_of(*times: float, **more: Tensor) -> list[dict[str, Any]]:
    return [call(time, **more) for time in times]


def guided(*times: float) -> list[dict[str, Any]]:
    """Two calls a step, of the same latents and times."""
    calls = list[dict[str, Any]]()
    for step in run_of(*times):
        calls += [{**step, "text": text} for text in (TEXT, OTHER_TEXT)]
    return calls


DOWN, UP = (900.0, 600.0, 300.0, 100.0), (0.0, 0.3, 0.6, 0.9)
LATENTS = torch.ones(2)
RUNS: dict[str, tuple[list[dict[str, Any]], str]] = {  # + is compared
    "one image after the other": (run_of(*DOWN, *DOWN, text=TEXT), "++--" * 2),
    "ascending times": (run_of(*UP, *UP, text=TEXT), "++--" * 2),
    "guidance": (guided(*DOWN, *DOWN), "+++-----" * 2),
    "one step": (run_of(999.0, 999.0, text=TEXT), "++"),
    "one guided step": (guided(999.0, 999.0), "+++-"),
    "two steps": (run_of(999.0, 500.0, 999.0, 500.0), "++++"),
    "an edit": ([*run_of(*DOWN, ids=IDS), *run_of(600.0, 300.0, 100.0, ids=IDS)], "++--++-"),
    # A run that was broken off, and one that begins later on the way, with positions of its own.
    "an edit after a break": (
        [*run_of(900.0, 800.0, 700.0, ids=IDS), *run_of(300.0, 200.0, 100.0, ids=torch.ones(3))],
        "++-++-",
    ),
    "a control that sets in": (
        [*run_of(900.0, 800.0, 700.0), *run_of(600.0, 500.0, 400.0, control=TEXT)],
        "++-++-",
    ),
    "positions of each step": ([call(time, ids=IDS.clone()) for time in DOWN * 2], "++--" * 2),
    "no times": ([*[call(None, text=TEXT)] * 2, call(None, text=TEXT)], "+-+"),
    "the same arguments": ([call(5.0, LATENTS, text=TEXT)] * 3, "+--"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_begins_where_times_turn_or_tensors_are_others(name: str) -> None:
    calls, expected = RUNS[name]
    steps = Steps()
    assert "".join("-+"[steps.may_begin_run(one)] for one in calls) == expected


def test_latents_that_were_written_again_are_others() -> None:
    steps, latents = Steps(), torch.ones(2)
    with torch.inference_mode():
        assert steps.may_begin_run({"x": latents, "scale": 2}) is True
        assert steps.may_begin_run({"x": latents, "scale": 2}) is False
    latents.mul_(2)
    assert steps.may_begin_run({"x": latents, "scale": 2}) is True
