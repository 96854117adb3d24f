"""Ranks whose CUDA tensors are fake: shapes and devices are followed, and nothing is computed.

A CPU build of torch has no guard for CUDA devices, which methods of tensors and gradients set: they
need the ranks of `guarded_ranks`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from bascule import parallel
from bascule.comm import agree
from bascule.models import PackedBatch
from bascule.parallel import SequenceParallel
from bascule.step import Step
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
    dist.init_process_group("cpu:gloo,cuda:fake", timeout=timedelta(seconds=300))
    changed: Any = SimpleNamespace(cuda=torch.cuda, parallel=parallel, agree=agree, step=Step)
    changed.cuda.current_device = lambda: 0
    changed.parallel.device_for = lambda *_: CUDA
    gather = changed.agree._gather

    def on_the_host(*args: Any) -> Any:  # what ranks say to each other is real
        with unset_fake_temporarily():
            return gather(*args)

    changed.agree._gather = on_the_host
    count = Step.num_marked

    def count_on_the_host(step: Step, is_marked: Tensor) -> int:
        with unset_fake_temporarily():
            return count(step, is_marked)

    changed.step.num_marked = count_on_the_host


@contextmanager
def fake_cuda(*, gradients: bool = False) -> Iterator[None]:
    """Within it, new tensors are fake; to read a value of one, or to mix it with the host's, fails.

    Tensors of the host from before stay real, and so does what is computed from them alone.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.set_grad_enabled(gradients), fake, _OnHost():
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


class _OnHost(TorchFunctionMode):
    """Keeps what is computed from tensors of the host alone real."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        values = [*args, *named.values()]
        tensors = [x for x in values if isinstance(x, Tensor)]
        is_of_host = all(x.is_cpu and not isinstance(x, FakeTensor) for x in tensors)
        if tensors and is_of_host and not any(isinstance(x, torch.device) for x in values):
            with unset_fake_temporarily():
                return func(*args, **named)
        return func(*args, **named)


def packed_model(topology: str, batch: Batch, dtype: torch.dtype) -> list[Any]:
    """Train the packed MM-DiT one step; return devices, the output's shape, calls of attention."""
    config, rank = config_of(4, 4, head_dim=64), dist.get_rank()
    sp = SequenceParallel(None, topology, COST)
    samples, model = own_samples(batch, config, rank), make_model(config)
    num_image = sum(image for _, image in batch[rank])
    with fake_cuda(gradients=True):
        move(model, dtype)
        inputs = on_fake_cuda(samples.inputs, dtype)
        step = sp.plan(samples.seq_lens)
        predicted = model(inputs, step)
        rows = torch.empty(num_image, dtype=torch.int64, device=CUDA)
        loss = step.mean(predicted.index_select(0, rows).square().mean(-1))
        loss.backward()
    tensors = [predicted, loss, *(p.grad for p in model.parameters())]
    devices = sorted({"none" if x is None else str(x.device) for x in tensors})
    is_whole = predicted.shape == (sum(samples.seq_lens), config.in_channels)
    return [devices, is_whole, step.num_attended]


def on_fake_cuda(batch: PackedBatch, dtype: torch.dtype) -> PackedBatch:
    """All but the mask."""
    given = dict(vars(batch))
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and name != "is_image":
            is_cast = name in ("image_tokens", "text_tokens", "pooled")
            given[name] = moved(x, dtype if is_cast else torch.float32)
    return PackedBatch(**given)
