"""What is fixed of a call of attention, as operators of torch can take it: one string."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from bascule.attention.layout import SequenceLayout
from bascule.comm.mesh import AttentionMesh, mesh_named
from bascule.errors import CommError, ConfigError
from bascule.plan.traffic import HeadShares

_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class CallSpec:
    """What all ranks must mean alike, and no operator computes with.

    Attributes:
        mesh: Name of the mesh.
        num_heads: Query heads of all ranks.
        num_kv_heads: Key-value heads of all Ulysses ranks, repeated where ranks are more.
        zigzag: As in `SequenceLayout`.
        stripe: As in `SequenceLayout`.
        causal: Whether a token sees none that comes later.
        scale: Factor of the scores.
        kernel: Name of the kernel; "" is the fastest.
        wire: Format in which rows travel; "" is as they are.
        rows: What rows and masks are, as text: width, dtype, what is replicated.
        is_blocking: Whether a ring waits before it attends.
    """

    mesh: str
    num_heads: int = 0
    num_kv_heads: int = 0
    zigzag: bool = False
    stripe: int = 0
    causal: bool = False
    scale: float = 1.0
    kernel: str = ""
    wire: str = ""
    rows: str = ""
    is_blocking: bool = False

    @property
    def text(self) -> str:
        """As one string; `spec_of` reads it."""
        fields = (  # int: for compilers, numbers of heads may be symbols
            self.mesh,
            f"{int(self.num_heads)}",
            f"{int(self.num_kv_heads)}",
            f"{self.zigzag}",
            f"{int(self.stripe)}",
            f"{self.causal}",
            f"{self.scale}",
            self.kernel,
            self.wire,
            self.rows,
            f"{self.is_blocking}",
        )
        return _SEPARATOR.join(fields)

    @property
    def ranks(self) -> AttentionMesh:
        """The mesh."""
        return mesh_named(self.mesh)

    @property
    def meaning(self) -> str:
        """All but the mesh and the layout, for people."""
        heads = f"{self.num_heads} heads for {self.num_kv_heads}"
        kernel = f", kernel {self.kernel}" if self.kernel else ""
        return f"{heads}, causal={self.causal}, scale={self.scale}{kernel}, {self.rows}"

    @property
    def own_kv_heads(self) -> int:
        """Key-value heads of this rank."""
        ranks = self.ranks
        return HeadShares.split(self.num_kv_heads, ranks.degrees[1]).of(ranks.place[1])

    def layout(self, segments: Sequence[int]) -> SequenceLayout:
        """Which tokens each rank has."""
        return SequenceLayout(tuple(segments), *self.ranks.degrees, self.zigzag, stripe=self.stripe)


@lru_cache(maxsize=1024)
def spec_of(text: str) -> CallSpec:
    """The inverse of `CallSpec.text`."""
    *numbers, kernel, wire, rows, blocking = text.split(_SEPARATOR)
    mesh, heads, kv_heads, zigzag, stripe, causal, scale = numbers
    return CallSpec(
        mesh,
        int(heads),
        int(kv_heads),
        zigzag == "True",
        int(stripe),
        causal == "True",
        float(scale),
        kernel,
        wire,
        rows,
        blocking == "True",
    )


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensors(what: str, q: Any, k: Any, v: Any, mask: Any = None) -> None:
    """Refuse what attention computes nothing with, whatever its shapes.

    Raises:
        ConfigError: Something is no dense tensor, the dtypes differ or are none that attention
            takes, the devices differ or hold no data, or there are no heads or no head width.
    """
    for x in (q, k, v) if mask is None else (q, k, v, mask):
        if not isinstance(x, Tensor):
            raise ConfigError(f"{what}: q, k, v or the mask is a {type(x).__name__}: give tensors")
        if x.layout != torch.strided or x.is_nested:
            raise ConfigError(
                f"{what}: q, k, v or the mask is nested, or has the layout {x.layout}: give dense "
                "tensors"
            )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise ConfigError(
            f"{what}: q is {q.dtype}, k {k.dtype}, v {v.dtype}: give one floating-point dtype of "
            "16, 32 or 64 bits, under autocast too, as by k.to(q.dtype)"
        )
    devices = {x.device for x in (q, k, v, mask) if x is not None}
    if len(devices) > 1 or q.is_meta:
        raise ConfigError(
            f"{what}: q, k, v and the mask are on {sorted(map(str, devices))}: give all of them "
            "on one device with data"
        )
    if min(q.dim(), k.dim()) > 2 and 0 in (q.shape[-1], q.shape[-2 if q.dim() == 3 else 1]):
        raise ConfigError(
            f"{what}: q {tuple(q.shape)} has no heads, or heads of no width: give one at least"
        )


def check_settings(what: str, causal: Any, scale: Any, kernel: Any = None) -> None:
    """Refuse settings that attention cannot be called with.

    Raises:
        ConfigError: Causal is no bool, the scale no finite number, or the kernel no name.
    """
    if not isinstance(kernel, str | None):
        raise ConfigError(f"{what}: kernel={kernel!r}: give a kernel's name, or None")
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    # For compilers a number may be a symbol; what runs checks it again.
    is_finite = is_number and (torch.compiler.is_compiling() or math.isfinite(scale))
    if not isinstance(causal, bool) or not (scale is None or is_finite):
        raise ConfigError(
            f"{what}: causal={causal!r} and scale={scale!r}: give True or False, and a finite "
            "number or None"
        )


def with_positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Queries and the factor of their scores, above 0: the same scores.

    Torch's flash attention for CPUs (2.13) takes the factor of what a causal mask hides, too, and
    gives nan where it is not above 0.
    """
    factor = positive_scale(q.shape[-1], scale)
    return (q, factor) if scale is None or scale > 0 else (q * scale, factor)


def positive_scale(head_dim: int, scale: float | None) -> float:
    """The factor of the scores that `with_positive_scale` leaves."""
    if scale is None:
        return head_dim**-0.5
    return scale if scale > 0 else 1.0


class naming:  # noqa: N801 - it is called as a function is
    """Add to a failed collective's error which operator it belongs to, and the shapes."""

    __slots__ = ("_tensors", "_what")

    def __init__(self, what: str, tensors: Sequence[Tensor]) -> None:
        self._what, self._tensors = what, tensors

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, CommError):
            xs = self._tensors
            shapes = ", ".join(str(tuple(x.shape)) for x in xs)
            raise type(error)(f"{error} [{self._what} of {shapes}, {xs[0].dtype}]") from error
