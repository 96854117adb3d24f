"""Kernels, and tensors and settings of attention: one wrong value of each."""

from collections.abc import Callable
from typing import Any, cast

import torch

from bascule.attention.kernels.registry import select_kernel
from bascule.attention.usp import check_settings, check_tensors
from bascule.comm.quantized import Quantized

ONES = torch.ones(2, 3, 4)
NESTED = torch.nested.nested_tensor([ONES[0], ONES[1, :2]], layout=torch.jagged)
BF16, PACKED = {"dtype": torch.bfloat16}, {"is_packed": True}
ROWS, SINGLE, DOUBLE = {"block": 128}, {"dtype": torch.float32}, {"dtype": torch.float64}

# Name, device, what is asked for besides bfloat16 and a head width of 64, words.
KERNELS: list[tuple[str | None, str, dict[str, Any], tuple[str, ...]]] = [
    ("flash4", "cpu", {}, ("kernel 'flash4': choose one of cpu_flash,",)),
    ("plain", "cpu", ROWS, ("'plain' computes all scores", "use one of cpu_loop")),
    ("cpu_flash", "cuda", SINGLE, ("runs on CPUs, not on cuda",)),
    ("cpu_flash", "cuda", PACKED, ("runs on CPUs, not on cuda: use one of aten_flash",)),
    ("cpu_loop", "cpu", {}, ("computes the scores of given blocks", "use one of cpu_flash")),
    ("aten_flash", "cpu", PACKED, ("runs on CUDA devices, not on cpu: use one of cpu_",)),
    ("aten_flash", "cpu", {}, ("runs on CUDA devices, not on cpu",)),
    ("aten_flash", "cuda", SINGLE, ("takes bfloat16 or float16, not torch.float32",)),
    ("aten_flash", "cuda", {"has_bias": True}, ("takes no mask",)),
    ("aten_flash", "cuda", {"head_dim": 60}, ("multiples of 8, not 60",)),
    ("aten_flash", "cuda", {"head_dim": 264}, ("up to 256, not 264",)),
    ("flash_attn", "cpu", PACKED, ("needs the module flash_attn",)),
    ("flash_attn_3", "cpu", {}, ("needs the module flash_attn_interface",)),
    ("efficient", "cuda", {**SINGLE, **PACKED}, ("takes no packed sequences",)),
    ("efficient", "cuda", DOUBLE, ("not torch.float64",)),
    ("efficient", "cuda", {**SINGLE, "head_dim": 6}, ("multiples of 4, not 6",)),
    (None, "cuda", {**ROWS, "head_dim": 256}, ("no kernel fits", "16, 32, 64 and 128, not 256")),
    ("triton", "cuda", {**ROWS, "head_dim": 96}, ("head widths 16, 32, 64 and 128, not 96",)),
    ("triton", "cuda", {**ROWS, **DOUBLE}, ("not torch.float64",)),
    ("triton", "cpu", ROWS, ("runs on CUDA devices, not on cpu", "use one of cpu_loop")),
    (None, "cuda", {**ROWS, **DOUBLE}, ("no kernel fits", "triton takes bfloat16")),
]


def kernel(name: str | None, device: str, form: dict[str, Any]) -> Callable[[], object]:
    return lambda: select_kernel(name, device, **{"head_dim": 64, **BF16, **form})


def settings(causal: Any = False, scale: Any = None) -> Callable[[], object]:
    return lambda: check_settings("attention", causal, scale)


def tensors(*qkv: Any) -> Callable[[], object]:
    return lambda: check_tensors("attention", *qkv)


INT8 = Quantized("int8")


def packed(x: torch.Tensor) -> Callable[[], object]:
    return lambda: INT8.pack(x)


def unpacked(x: torch.Tensor) -> Callable[[], object]:
    return lambda: INT8.unpack(x, torch.float32)


ONE_OF_ITS_KIND = {
    "list": ([1.0], "is a list: give tensors"),
    "sparse": (ONES.to_sparse(), "give dense tensors"),
    "nested": (NESTED, "is nested"),
    "float64": (ONES.double(), "one floating-point dtype"),
    "on meta": (ONES.to("meta"), "on one device with data"),
}
CASES = [
    *(
        (f"{name}, {device}, {form}", kernel(name, device, form), words)
        for name, device, form, words in KERNELS
    ),
    *((f"causal={x}", settings(causal=x), (f"causal={x!r}",)) for x in (1, None)),
    *(
        (f"scale={x!r}", settings(scale=x), (f"scale={x!r}: give True or False, and a finite",))
        for x in ("1", True, float("inf"), float("nan"))
    ),
    *(
        (f"{name} as {'qkv'[i]}", tensors(*(x if i == j else ONES for j in range(3))), (words,))
        for name, (x, words) in ONE_OF_ITS_KIND.items()
        for i in range(3)
    ),
    *(
        (f"shape {shape}", tensors(*[torch.ones(shape)] * 3), ("no heads, or heads of no width",))
        for shape in ((2, 0, 4), (2, 3, 0))
    ),
    ("no format", lambda: Quantized(cast(Any, "fp8")), ("'fp8'", "int8, e4m3")),
    ("rows of integers", packed(ONES.long()), ("int64", "floating-point")),
    ("complex rows", packed(ONES.to(torch.complex64)), ("complex64",)),
    ("rows of nothing", packed(ONES[..., :0]), ("(2, 3, 0)", "not empty")),
    ("no row", packed(torch.tensor(1.0)), ("()", "not empty")),
    ("rows that are no bytes", unpacked(ONES), ("float32", "uint8")),
    ("too few bytes", unpacked(ONES.to(torch.uint8)), ("(2, 3, 4)", "5 bytes")),
]
