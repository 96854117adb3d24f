"""What all ranks must mean alike in the exchanges of a step; agreed on when it is first used."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bascule.attention import packed
from bascule.attention.call_spec import check_settings, check_tensors
from bascule.comm import mean
from bascule.comm.exchange import misfit
from bascule.comm.guard.ranges import mark_lengths
from bascule.comm.transforms import refuse_transforms
from bascule.errors import ConfigError
from bascule.plan.batch import Plan

if TYPE_CHECKING:
    from bascule.parallel import SequenceParallel

Qkv = tuple[Tensor, Tensor, Tensor]


class Forms:
    """The forms of a step's exchanges.

    Each method returns where all ranks mean the same, and raises on all of them where one gave what
    is wrong (RemoteConfigError) or they differ (CommError).
    """

    def __init__(self, parallel: "SequenceParallel", plan: Plan, number: int) -> None:
        self._parallel, self._plan, self._number = parallel, plan, number
        self._is_marked = False
        # The most ranks that share heads; of "auto", others every step.
        self._degree = int(plan.topology.ulysses_groups.bag_sizes.max())

    def check_settings(self, causal: bool, scale: float | None) -> None:
        """Refuse settings of `Step.attend` that the plan cannot keep."""
        check_settings("attend", causal, scale)
        if causal and self._plan.masks is not None:
            raise ConfigError(
                "attend: causal=True, and the sequences were planned with masks, which hold for "
                'every attention: leave it out, or plan with Sequences(.., masks="causal")'
            )

    def of_attention(
        self,
        bag: packed.Bag,
        qkv: Qkv,
        needs_grad: Sequence[bool],
        causal: bool,
        scale: float | None,
    ) -> None:
        """Heads, dtype and gradients decide the exchanges."""
        parallel, (q, k, v) = self._parallel, qkv
        refuse_transforms("attend", *qkv)
        self.check_settings(causal, scale)
        try:
            check_tensors("attend", *qkv)
        except ConfigError as error:
            parallel.agree_once("attend", f"attend: {error}", error, self._number)
        factor = None if scale is None else float(scale)
        alike = q.dtype, k.dtype, v.dtype, tuple(needs_grad), causal, factor
        form = (self._degree, q.shape[1:], k.shape[1:], v.shape[1:], *alike)
        if not parallel.group.calls.has_agreed(("attend", form)):
            error = None
            try:
                packed.check(self._plan.topology, bag, parallel.options.kernel, q, k, v)
            except ConfigError as met:
                error = met
            parallel.agree_once("attend", form, error, self._number)

    def of_rows(
        self, what: str, tensors: dict[str, Tensor], needs_grad: Sequence[bool], num_rows: int
    ) -> None:
        """Names, dtypes, widths and gradients decide the sizes.

        The first route of a step says in a running profile which lengths it is for.
        """
        if what == "route" and not self._is_marked:
            self._is_marked = True
            mark_lengths("step", self._plan, self._parallel.rank)
        error = None if tensors else ConfigError(f"{what}: give at least one tensor")
        for name, x in tensors.items():
            error = error or misfit(what, name, x, num_rows, self._parallel.device)
        if error is not None:
            self._parallel.agree_once(what, f"{what}: {error}", error, self._number)
        form = ", ".join(
            f"{name} {str(x.dtype).removeprefix('torch.')}{list(x.shape[1:])}"
            f"{' with gradient' if needed else ''}"
            for (name, x), needed in zip(tensors.items(), needs_grad, strict=True)
        )
        self._parallel.agree_once(what, f"{what}({form})", error, self._number)

    def of_samples(self, tensor: Tensor, needs_grad: bool) -> None:
        """As `of_rows`, of this rank's samples."""
        own = int(self._plan.source_counts[self._parallel.rank])
        self.of_rows("gather_samples", {"tensor": tensor}, [needs_grad], own)

    def of_mean(self, values: Tensor, weights: Tensor | None) -> None:
        """Widths and dtypes are the same."""
        error, form = None, None
        try:
            mean.check(values, weights)
            form = (values.shape[1:], values.dtype, weights is not None)
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        self._parallel.agree_once("mean", form, error, self._number)


def needs_gradient(x: object) -> bool:
    """Whether a call with this tensor takes part in a backward."""
    return torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad
