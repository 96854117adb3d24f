"""Step caches of diffusers for ranks that share a sequence.

A cache leaves out blocks, or their attention, and takes what an earlier step gave. Each rank has
that for its own tokens, which is right; but all must leave out the same, or some wait for others.
Those that count steps do. The first-block cache looks at tokens: its leading hook is replaced, in
diffusers' own registry, by one that adds up over the ranks what it looks at. Others are refused.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bascule.comm.collectives import all_reduce
from bascule.diffusers.forward_pass import Forward
from bascule.diffusers.split_table import SplitTable
from bascule.errors import ConfigError

# Names of hooks that count steps.
_BY_STEP = (
    "pyramid_attention_broadcast",
    "faster_cache_denoiser",
    "faster_cache_block",
    "taylorseer_cache",
    "mag_cache_leader_block_hook",
    "mag_cache_block_hook",
)
_BY_VIDEO = "sea_cache_root"
_LEADER = "fbc_leader_block_hook"
_BY_FIRST_BLOCK = _LEADER, "fbc_block_hook"

Total = Callable[[Tensor], Tensor]
"""From a rank's numbers to their sum over the ranks, by one small all-reduce."""


class Caches:
    """The step caches of a split model, and what its blocks have done since one is on.

    Args:
        model: The model.
        table: How it is cut.
        forward: Gives the forward pass that runs, if any.
    """

    def __init__(
        self, model: nn.Module, table: SplitTable, forward: Callable[[], Forward | None]
    ) -> None:
        self._model, self._table, self._forward = model, table, forward
        self._have_attended: set[str] | None = None  # blocks, since a cache is on
        self._put_back: list[Callable[[], None]] = []

    def are_used(self, blocks: Iterable[nn.Module]) -> bool:
        """Return whether one may leave out blocks in the next forward pass.

        Raises:
            ConfigError: It decides by a rank's own tokens.
        """
        model = self._model
        is_enabled = bool(getattr(model, "is_cache_enabled", False))
        found = _hooks_of(model.modules() if is_enabled else (model, *blocks))
        for name, hook in found.items():
            if not _is_alike(name, hook, self._table):
                raise ConfigError(
                    f"{type(model).__name__} over ranks, with a cache ({type(hook).__name__}) that "
                    "decides by the tokens of a rank what it leaves out, so that ranks may wait "
                    "for each other: call disable_cache(), or take FirstBlockCache, or one that "
                    "counts steps: TaylorSeer, PyramidAttentionBroadcast, FasterCache, MagCache"
                )
        return bool(found)

    @property
    def is_on(self) -> bool:
        """Return whether one was in use at the last `prepare`."""
        return self._have_attended is not None

    def prepare(self, blocks: Sequence[nn.Module], *, is_sparse: bool) -> None:
        """Before a forward pass.

        Raises:
            ConfigError: A cache is on that ranks cannot use, or that attention cannot.
        """
        if not self.are_used(blocks):
            self._have_attended = None
            return
        if is_sparse:
            raise ConfigError(
                f"{type(self._model).__name__} with block-sparse attention and a cache of steps, "
                "which leaves out layers that count: call disable_cache(), or leave out sparse"
            )
        self._have_attended = set() if self._have_attended is None else self._have_attended
        for block in blocks:
            registry = block.__dict__.get("_diffusers_hook")
            hook = None if registry is None else registry.get_hook(_LEADER)
            if hook is not None and not isinstance(hook, _Leader):
                self._put_back.append(_replace(registry, hook, self._total))

    def end_block(self, name: str, has_attended: bool) -> None:
        """A block ran.

        Raises:
            ConfigError: Its attention was not over the mesh, nor is it cached.
        """
        known = self._have_attended
        if has_attended:
            if known is not None:
                known.add(name)
        elif known is None or name not in known:
            fix = "set_attention_backend('native')"
            if known is not None:
                fix = "empty caches that were filled before parallelize"
            raise ConfigError(
                f"{name} did not call F.scaled_dot_product_attention, so its attention was not "
                f"over the mesh: {fix}"
            )

    def leave(self) -> None:
        """Put back what was replaced."""
        while self._put_back:
            self._put_back.pop()()

    def _total(self, numbers: Tensor) -> Tensor:
        forward = self._forward()
        group = None if forward is None else forward.mesh.whole
        what = "all_reduce (first-block cache)"
        return numbers if group is None else all_reduce(group, what, numbers)


def _replace(registry: Any, hook: Any, total: Total) -> Callable[[], None]:
    """Put a leader in the place of a hook."""
    make: Any = type("Leader", (_Leader, type(hook)), {})
    leader = make(hook.state_manager, hook.threshold)
    leader.lead(total)

    def put_back() -> None:
        if registry.get_hook(_LEADER) is leader:
            leader.forget()
            registry.remove_hook(_LEADER, recurse=False)
            registry.register_hook(hook, _LEADER)

    registry.remove_hook(_LEADER, recurse=False)
    registry.register_hook(leader, _LEADER)
    return put_back


class _Leader:
    """What makes a leading hook of diffusers decide as one process does that has all tokens."""

    state_manager: Any
    threshold: float

    def lead(self, total: Total) -> None:
        """From now on; what was cached before is of whole sequences, and counts for nothing."""
        self._total = total
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def forget(self) -> None:
        """What is cached is of a rank's tokens, and counts for nothing any more."""
        for state in self._known:
            state.head_block_residual = None

    @torch.compiler.disable
    def _should_compute_remaining_blocks(self, hidden_states_residual: Tensor) -> bool:
        state, now = self.state_manager.get_state(), hidden_states_residual
        before = state.head_block_residual
        if before is None or state not in self._known:
            self._known.add(state)
            return True
        sums = [x.abs().sum(dtype=torch.float64) for x in (now - before, before)]
        numbers = torch.stack([*sums, sums[0].new_tensor(now.numel())])
        change, size, count = self._total(numbers).unbind()
        # As means of the whole would be rounded.
        ratio = (change / count).to(now.dtype) / (size / count).to(now.dtype)
        return ratio.item() > self.threshold


def _is_alike(name: str, hook: Any, table: SplitTable) -> bool:
    """Return whether a hook decides alike on all ranks."""
    if name == _BY_VIDEO:  # by the video that the model is given, if it looks at one
        is_cut = "hidden_states" in table.inputs.get("", {})
        return not is_cut or hook.raw_vision_callback is None
    calibrates = getattr(getattr(hook, "config", None), "calibrate", False)
    return name in (*_BY_STEP, *_BY_FIRST_BLOCK) and not calibrates


def _hooks_of(modules: Iterable[nn.Module]) -> dict[str, Any]:
    """The hooks of diffusers that keep something from step to step, by name."""
    registries = (module.__dict__.get("_diffusers_hook") for module in modules)
    return {
        name: hook
        for registry in registries
        if registry is not None
        for name, hook in registry.hooks.items()
        if hook._is_stateful
    }
