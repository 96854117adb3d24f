"""Attention back ends of diffusers as kernels of attention over ranks."""

import importlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from bascule.attention.kernels.protocol import Attended, Grads, OutLse
from bascule.attention.kernels.registry import FunctionKernel, Kernel, select_kernel
from bascule.attention.mask import AttentionMask
from bascule.errors import ConfigError

_NO_MASK = "flash", "sage", "aiter", "native_flash", "native_npu"  # names begin so


def backend_kernel(name: str) -> FunctionKernel:
    """Return an attention back end of diffusers as a kernel, for `parallelize(kernel=..)`.

    It is called through diffusers' dispatcher. Ulysses takes any; a ring takes those that return
    a log-sum-exp (B, H, S) and were registered with `supports_context_parallel=True`, and computes
    their gradients by a kernel of bascule.

    Args:
        name: As `set_attention_backend` takes it, or of a back end that you registered.

    Raises:
        ConfigError: There is no such back end, or this machine lacks what it needs.
    """
    diffusers: Any = importlib.import_module("diffusers.models.attention_dispatch")
    registry = diffusers._AttentionBackendRegistry
    backend = next((one for one in registry._backends if one == name), None)
    if backend is None:
        raise ConfigError(
            f"diffusers has no attention back end {name!r}: give one of "
            f"{', '.join(sorted(one.value for one in registry._backends))}"
        )
    try:
        diffusers._check_attention_backend_requirements(backend)
        diffusers._maybe_download_kernel_for_backend(backend)
    except (RuntimeError, ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"attention back end {name!r} of diffusers cannot run here: {error}"
        ) from error
    known, plain = registry._supported_arg_names[backend], name.lstrip("_")
    asks = [one for one in ("return_lse", "return_attn_probs") if one in known]
    # Torch's give it to diffusers' own parallelism alone, and those of packed rows in another form.
    is_apart = plain.startswith("native") or "varlen" in plain
    gives_lse = name in registry._supports_context_parallel and bool(asks) and not is_apart
    more = {asks[0]: True} if gives_lse else {}

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool,
        scale: float,
        attn_mask: Tensor | None = None,
    ) -> Tensor | OutLse:
        qkv = [x.transpose(1, 2) for x in (q, k, v)]
        settings = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
        made = diffusers.dispatch_attention_fn(
            *qkv, **settings, attention_kwargs=more, backend=backend
        )
        if not gives_lse:
            return made.transpose(1, 2)
        return made[0].transpose(1, 2), made[1]

    is_exact = gives_lse and not plain.startswith("sage")  # which has no gradients
    return FunctionKernel(
        name,
        attend,
        _gradients if is_exact else None,
        gives_lse=gives_lse,
        takes_mask="attn_mask" in known and not plain.startswith(_NO_MASK),
    )


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
    attn_mask: Tensor | None = None,
) -> Grads:
    """Return exact gradients: flash attention's own leave out that of the log-sum-exp."""
    form: Any = {"dtype": q.dtype, "head_dim": q.shape[-1], "has_bias": attn_mask is not None}
    kernel = select_kernel(None, q.device.type, **form)
    mask = AttentionMask(causal=is_causal, bias=attn_mask)
    return kernel.backward(grad, Attended(q, k, v, out, lse, mask, scale))


def chosen_backend(models: Iterable[nn.Module]) -> FunctionKernel | None:
    """Return the back end that models were set to, or diffusers at large; None for torch's.

    Raises:
        ConfigError: Modules were set to several.
    """
    modules = (module for model in models for module in model.modules())
    processors: list[Any] = [getattr(module, "processor", None) for module in modules]
    names = {
        processor._attention_backend
        for processor in processors
        if hasattr(processor, "_attention_backend")
    }
    if None in names:
        diffusers: Any = importlib.import_module("diffusers.models.attention_dispatch")
        names.add(diffusers._AttentionBackendRegistry.get_active_backend()[0])
    plain = sorted({str(name.value) for name in names if name is not None})
    own = [one for one in plain if "native" not in one]
    if len(plain) > 1 and own:
        raise ConfigError(
            f"parallelize: modules have the attention back ends {', '.join(plain)}, and attention "
            "over ranks has one: call set_attention_backend of the model with one of them"
        )
    return backend_kernel(own[0]) if own else None


def check_merges(kernel: Kernel | None, ring_degree: int, overlap: bool | None) -> None:
    """Refuse a function without a log-sum-exp where parts of attention are merged by it."""
    if isinstance(kernel, FunctionKernel) and not kernel.gives_lse and (ring_degree > 1 or overlap):
        where = f"ring_degree={ring_degree}" if ring_degree > 1 else "overlap=True"
        raise ConfigError(
            f"parallelize: kernel {kernel.name!r} gives no log-sum-exp, by which {where} merges "
            "parts of attention: use ulysses_degree alone, or a kernel that returns one"
        )
