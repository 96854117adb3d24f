"""Step caches of diffusers, for ranks that share a sequence and for guidance groups.

A cache leaves out blocks, or their attention. All ranks must leave out the same, or some wait for
others. Caches that count steps do. The first-block cache looks at tokens, so the ranks add up what
it looks at. Others are refused, and those that keep something else in a guidance group.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bascule.comm.collectives import all_reduce
from bascule.comm.groups import RankGroup
from bascule.diffusers.split_table import SplitTable
from bascule.errors import ConfigError
from bascule.stand_in import StandIn

_BY_STEP = (  # names of hooks that count steps
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

_SEE_ALL = "faster_cache", "fbc_", "sea_cache"  # beginnings: hooks that see all samples together


class Caches:
    """The step caches of a split model, and the blocks that have attended since one is on."""

    def __init__(
        self, model: nn.Module, table: SplitTable, group: Callable[[], RankGroup | None]
    ) -> None:
        self._model, self._table, self._group = model, table, group
        self.is_on = False  # at the last `prepare`
        self._have_attended = set[str]()  # blocks, since a cache is on
        self._leaders: dict[Any, tuple[StandIn, weakref.WeakSet[Any]]] = {}

    def are_used(self, blocks: Iterable[nn.Module]) -> bool:
        """Return whether a cache may leave out blocks; refuse one that ranks decide apart."""
        hooks = stateful_hooks(self._model, blocks)
        for name, hook in hooks:
            if not _is_alike(name, hook, self._table):
                raise ConfigError(
                    f"{type(self._model).__name__} over ranks, with a cache "
                    f"({type(hook).__name__}) that decides by the tokens of a rank what it leaves "
                    "out, so that ranks may wait for each other: call disable_cache(), or take "
                    "FirstBlockCache, or one that counts steps: TaylorSeer, "
                    "PyramidAttentionBroadcast, FasterCache, MagCache"
                )
        return bool(hooks)

    def prepare(self, blocks: Sequence[nn.Module], *, is_sparse: bool) -> None:
        """Look at the caches before a forward pass; refuse those that cannot be used."""
        was_on, self.is_on = self.is_on, self.are_used(blocks)
        if not self.is_on:
            return
        if is_sparse:
            raise ConfigError(
                f"{type(self._model).__name__} with block-sparse attention and a cache of steps, "
                "which leaves out layers that count: call disable_cache(), or leave out sparse"
            )
        if not was_on:
            self._have_attended.clear()
        for block in blocks:
            registry = block.__dict__.get("_diffusers_hook")
            hook = None if registry is None else registry.get_hook(_LEADER)
            if hook is not None and hook not in self._leaders:
                # Values cached before are of whole sequences, and count for nothing.
                known = weakref.WeakSet[Any]()
                decide = torch.compiler.disable(partial(self._decide, hook, known))
                stand_in = StandIn(hook, "_should_compute_remaining_blocks", decide)
                self._leaders[hook] = stand_in, known

    def end_block(self, name: str, has_attended: bool) -> None:
        """Note that a block ran; refuse one that neither attended nor is cached."""
        if has_attended:
            if self.is_on:
                self._have_attended.add(name)
        elif name not in self._have_attended:
            fix = "compute it by that function"
            if hasattr(self._model, "set_attention_backend"):
                fix = "set_attention_backend('native')"
            if self.is_on:
                fix = "empty caches that were filled before parallelize"
            raise ConfigError(
                f"{name} did not call F.scaled_dot_product_attention, so its attention was not "
                f"over the mesh: {fix}"
            )

    def leave(self) -> None:
        """Let caches decide as before; what they keep is of a rank's tokens, and is dropped."""
        for stand_in, known in self._leaders.values():
            stand_in.remove()
            for state in known:
                state.head_block_residual = None
        self._leaders.clear()

    def _decide(
        self, hook: Any, known: weakref.WeakSet[Any], method: object, hidden_states_residual: Tensor
    ) -> bool:
        """Decide as one process that has all tokens; one small all-reduce."""
        state, now = hook.state_manager.get_state(), hidden_states_residual
        before = state.head_block_residual
        if before is None or state not in known:
            known.add(state)
            return True
        sums = [x.abs().sum(dtype=torch.float64) for x in (now - before, before)]
        numbers, group = torch.stack([*sums, sums[0].new_tensor(now.numel())]), self._group()
        if group is not None:
            numbers = all_reduce(group, "all_reduce (first-block cache)", numbers)
        change, size, count = numbers.unbind()
        # Rounded like means of the whole.
        ratio = (change / count).to(now.dtype) / (size / count).to(now.dtype)
        return ratio.item() > hook.threshold


def branch_of(
    model: nn.Module, blocks: Iterable[nn.Module], num_parts: int, num_groups: int
) -> str | None:
    """Return the branch of a call, as a cache names it; None without a cache."""
    for name, hook in stateful_hooks(model, blocks):
        manager = getattr(hook, "state_manager", None)
        why = None
        if num_parts > 1 and name.startswith(_SEE_ALL):
            why = "decides by all samples of a batch, which groups share"
        elif num_parts < num_groups and manager is None:
            why = "keeps one state for all guidance branches"
        if why is not None:
            raise ConfigError(
                f"{type(model).__name__} with guidance over ranks and a cache "
                f"({type(hook).__name__}) that {why}: call disable_cache(), use guidance_degree=1, "
                "or take TaylorSeer or MagCache"
            )
        context = None if manager is None else manager._context
        if context is not None:
            return context.name
    return None


def _is_alike(name: str, hook: Any, table: SplitTable) -> bool:
    if name == _BY_VIDEO:  # by the video that the model is given, if it looks at one
        is_cut = "hidden_states" in table.inputs.get("", {})
        return not is_cut or hook.raw_vision_callback is None
    calibrates = getattr(getattr(hook, "config", None), "calibrate", False)
    return name in (*_BY_STEP, *_BY_FIRST_BLOCK) and not calibrates


def stateful_hooks(model: nn.Module, blocks: Iterable[nn.Module]) -> list[tuple[str, Any]]:
    """Return the hooks of diffusers that keep something, with their names."""
    hooks: list[tuple[str, Any]] = []
    is_enabled = bool(getattr(model, "is_cache_enabled", False))
    for module in model.modules() if is_enabled else (model, *blocks):
        registry = module.__dict__.get("_diffusers_hook")
        for name, hook in () if registry is None else registry.hooks.items():
            if hook._is_stateful:
                hooks.append((name, hook))
    return hooks
