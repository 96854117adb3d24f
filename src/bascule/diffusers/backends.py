"""Attention back ends of diffusers as kernels of attention over ranks."""

import importlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from bascule.attention.kernels.protocol import Attended, Grads, OutLse
from bascule.attention.kernels.registry import FunctionKernel, Kernel, select_kernel
from bascule.attention.mask import AttentionMask
from bascule.errors import ConfigError

_NO_MASK = "flash", "sage", "aiter", "native_flash", "native_npu"  # prefixes of names


def backend_kernel(name: str) -> FunctionKernel:
    """Return an attention back end of diffusers as a kernel, for `parallelize(kernel=..)`.

    The kernel calls diffusers' dispatcher. Ulysses accepts any back end. A ring needs one that
    returns an LSE (B, H, S) and was registered with `supports_context_parallel=True`; a kernel of
    bascule then computes the gradients.

    Args:
        name: A name for `set_attention_backend`, or of a back end that you registered.

    Raises:
        ConfigError: diffusers has no such back end, or it cannot run on this machine.
    """
    diffusers: Any = importlib.import_module("diffusers.models.attention_dispatch")
    registry = diffusers._AttentionBackendRegistry
    backend = next((known for known in registry._backends if known == name), None)
    if backend is None:
        names = ", ".join(sorted(known.value for known in registry._backends))
        raise ConfigError(f"diffusers has no attention back end {name!r}: give one of {names}")
    try:
        diffusers._check_attention_backend_requirements(backend)
        diffusers._maybe_download_kernel_for_backend(backend)
    except (RuntimeError, ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"attention back end {name!r} of diffusers cannot run here: {error}"
        ) from None
    arguments, plain = registry._supported_arg_names[backend], name.lstrip("_")
    switches = [key for key in ("return_lse", "return_attn_probs") if key in arguments]
    # torch's back ends give an LSE only within diffusers' parallelism, varlen ones in other shapes.
    has_other_lse = plain.startswith("native") or "varlen" in plain
    gives_lse = name in registry._supports_context_parallel and bool(switches) and not has_other_lse
    lse_switch = {switches[0]: True} if gives_lse else {}

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
        output = diffusers.dispatch_attention_fn(
            *qkv, **settings, attention_kwargs=lse_switch, backend=backend
        )
        if not gives_lse:
            return output.transpose(1, 2)
        return output[0].transpose(1, 2), output[1]

    has_gradients = gives_lse and not plain.startswith("sage")
    return FunctionKernel(
        name,
        attend,
        _gradients if has_gradients else None,
        gives_lse=gives_lse,
        takes_mask="attn_mask" in arguments and not plain.startswith(_NO_MASK),
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
    """Return gradients, including the LSE's, which flash attention's backward pass leaves out."""
    query: Any = {"dtype": q.dtype, "head_dim": q.shape[-1], "has_bias": attn_mask is not None}
    kernel = select_kernel(None, q.device.type, **query)
    mask = AttentionMask(causal=is_causal, bias=attn_mask)
    return kernel.backward(grad, Attended(q, k, v, out, lse, mask, scale))


def chosen_backend(models: Iterable[nn.Module]) -> FunctionKernel | None:
    """Return the back end that models or all of diffusers use, None for torch's; refuse several."""
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
    others = [name for name in plain if "native" not in name]  # than torch's
    if len(plain) > 1 and others:
        wrong = f"parallelize: modules have the attention back ends {', '.join(plain)}"
        raise ConfigError(f"{wrong}: choose one for all by model.set_attention_backend(..)")
    return backend_kernel(others[0]) if others else None


def check_merges(kernel: Kernel | None, ring_degree: int, overlap: bool) -> None:
    """Refuse a kernel that returns no LSE if a ring or `overlap` needs it to merge parts."""
    if isinstance(kernel, FunctionKernel) and not kernel.gives_lse and (ring_degree > 1 or overlap):
        where = f"ring_degree={ring_degree}" if ring_degree > 1 else "overlap=True"
        wrong = f"kernel {kernel.name!r} gives no log-sum-exp, but {where} needs it to merge parts"
        raise ConfigError(f"{wrong}: use ulysses_degree alone, or a kernel that returns it")
