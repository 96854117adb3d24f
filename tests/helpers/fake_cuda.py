"""Ranks whose CUDA tensors are fake: shapes and devices are followed, and nothing is computed.

A CPU build of torch has no guard for CUDA devices, which methods of tensors set before anything can
take their place; the operators behind them set none. Gradients set one, too: they need the ranks of
`guarded_ranks`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from bascule.comm import agree, groups
from bascule.models import PackedBatch
from bascule.parallel import SequenceParallel
from tests.helpers.cases import COST, Batch, config_of, make_model, own_samples
from tests.helpers.jobs import set_variables

CUDA = torch.device("cuda", 0)
BATCHES: dict[str, Batch] = {  # text and image tokens of each rank's samples
    "both": [[(5, 27), (1, 0), (0, 12)], [(2, 2)]],
    "a rank without samples": [[], [(3, 20)]],
    "text on one rank, images on the other": [[(9, 0)], [(0, 9)]],
}


def join_with_cuda() -> None:
    """Anew, with gloo for the host and a back end that moves nothing for CUDA."""
    import torch.testing._internal.distributed.fake_pg

    set_variables()
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:fake", timeout=timedelta(seconds=15))
    changed: Any = SimpleNamespace(cuda=torch.cuda, groups=groups, agree=agree)
    changed.cuda.current_device = lambda: 0
    changed.groups.device_for = lambda *_: CUDA
    gather = changed.agree._gather

    def on_the_host(*args: Any) -> Any:  # what ranks say to each other is real
        with unset_fake_temporarily():
            return gather(*args)

    changed.agree._gather = on_the_host


@contextmanager
def fake_cuda(*, gradients: bool = False) -> Iterator[None]:
    """Within it, new tensors are fake; to read a value of one, or to mix it with the host's, fails.

    Tensors of the host from before stay real, and so does what is computed from them alone.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # Where no mode sees a call, as within a mode of the library.

    def unguarded(name: str) -> Callable[..., Any]:
        method, operator = getattr(Tensor, name), getattr(torch.ops.aten, name)

        def call(x: Tensor, *args: Any, **named: Any) -> Any:
            return (operator if x.device == CUDA else method)(x, *args, **named)

        return call

    put = Tensor.__setitem__

    def put_unguarded(x: Tensor, index: Any, value: Any) -> None:
        if x.device != CUDA:
            return put(x, index, value)
        torch.ops.aten.copy_(_part(x, index), torch.as_tensor(value))

    take = Tensor.__getitem__

    def take_unguarded(x: Tensor, index: Any) -> Tensor:
        return _part(x, index) if x.device == CUDA else take(x, index)

    methods: dict[str, Any] = {name: unguarded(name) for name in ("copy_", "index_select")}
    methods |= {"__setitem__": put_unguarded, "__getitem__": take_unguarded}
    patched = mock.patch.multiple(Tensor, **methods)
    with torch.set_grad_enabled(gradients), fake, _Unguarded(), patched:
        yield


def move(module: nn.Module, dtype: torch.dtype) -> None:
    """Its parameters and buffers to the device, without values; within `fake_cuda`."""
    for part in module.modules():
        both: list[Any] = [part._parameters, part._buffers]
        for values in both:
            for name, x in values.items():
                if x is not None:
                    one = moved(x, dtype)
                    is_parameter = isinstance(x, nn.Parameter)
                    needs_grad = torch.is_grad_enabled()
                    values[name] = nn.Parameter(one, needs_grad) if is_parameter else one


def moved(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One like it on the device, without values; within `fake_cuda`."""
    wanted = dtype if x.is_floating_point() else x.dtype
    return torch.empty(x.shape, dtype=wanted, device=CUDA)


class _Unguarded(TorchFunctionMode):
    """Calls operators in place of the methods that set a guard."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        given = [*args, *named.values()]
        tensors = [x for x in given if isinstance(x, Tensor)]
        is_of_host = all(x.is_cpu and not isinstance(x, FakeTensor) for x in tensors)
        if tensors and is_of_host and not any(isinstance(x, torch.device) for x in given):
            with unset_fake_temporarily():
                return func(*args, **named)
        if not (args and isinstance(args[0], Tensor) and args[0].device == CUDA):
            return func(*args, **named)
        if func is Tensor.__getitem__:
            return _part(*args)
        if func is Tensor.__setitem__:
            part, value = _part(args[0], args[1]), torch.as_tensor(args[2])
            return torch.ops.aten.copy_(part, value)
        try:
            return func(*args, **named)
        except RuntimeError as error:
            operator = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
            if "not linked with support for cuda" not in str(error) or operator is None:
                raise
            return operator(*args, **named)


def _part(x: Tensor, index: Any) -> Tensor:
    """`x[index]`."""
    given = list(index) if isinstance(index, tuple) else [index]
    num_dims = sum(one is not None and one is not ... for one in given)
    places = [place for place, one in enumerate(given) if one is ...]
    if places:
        given[places[0] : places[0] + 1] = [slice(None)] * (x.dim() - num_dims)
    tensors, dim = list[Tensor | None](), 0
    for one in given:
        if isinstance(one, int):
            x = torch.ops.aten.select(x, dim, one)
            continue
        if one is None:
            x = torch.ops.aten.unsqueeze(x, dim)
        elif isinstance(one, slice):
            x = torch.ops.aten.slice(x, dim, one.start, one.stop, one.step or 1)
        tensors.append(one if isinstance(one, Tensor) else None)
        dim += 1
    return torch.ops.aten.index(x, tensors) if any(one is not None for one in tensors) else x


def packed_model(topologies: list[str], name_of_dtype: str, gradients: bool) -> list[Any]:
    """A training step of the packed MM-DiT, and its backward, planned for each of these bags."""
    join_with_cuda()
    config, rank = config_of(4, 4, head_dim=64), dist.get_rank()
    dtype: torch.dtype = getattr(torch, name_of_dtype)
    found = list[Any]()
    for topology in topologies:
        sp = SequenceParallel(None, topology, COST)
        for name, batch in BATCHES.items():
            samples, model = own_samples(batch, config, rank), make_model(config)
            num_image = sum(image for _, image in batch[rank])
            with fake_cuda(gradients=gradients):
                move(model, dtype)
                given = on_fake_cuda(samples.inputs, dtype)
                step = sp.plan(samples.seq_lens)
                predicted = model(given, step)
                rows = torch.empty(num_image, dtype=torch.int64, device=CUDA)
                loss = step.mean(predicted.index_select(0, rows).square().mean(-1))
                if gradients:
                    loss.backward()
            tensors = [predicted, loss, *(p.grad for p in model.parameters() if gradients)]
            devices = sorted({"none" if x is None else str(x.device) for x in tensors})
            is_whole = predicted.shape == (sum(samples.seq_lens), config.in_channels)
            found.append([topology, name, devices, is_whole, step.num_attended])
    return found


def on_fake_cuda(batch: PackedBatch, dtype: torch.dtype) -> PackedBatch:
    """All but the mask."""
    given = dict(vars(batch))
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and name != "is_image":
            is_cast = name in ("image_tokens", "text_tokens", "pooled")
            given[name] = moved(x, dtype if is_cast else torch.float32)
    return PackedBatch(**given)
