"""Step caches of diffusers, for ranks that share a sequence and for guidance groups.

A cache skips blocks, or their attention. All ranks must skip the same blocks, or some would wait
for others. Caches that count steps do so. The first-block cache compares tokens, so ranks sum its
norms. Caches that look at other values of one rank, or at a guidance group's calls, are refused.
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
    *("pyramid_attention_broadcast", "faster_cache_denoiser", "faster_cache_block"),
    *("taylorseer_cache", "mag_cache_leader_block_hook", "mag_cache_block_hook"),
)
_BY_VIDEO = "sea_cache_root"
_LEADER = "fbc_leader_block_hook"
_BY_FIRST_BLOCK = _LEADER, "fbc_block_hook"

_HARMLESS = frozenset(  # modules whose hooks move or cast weights, or skip alike on all ranks
    "layerwise_casting group_offloading components_manager layer_skip first_block_cache mag_cache "
    "sea_cache hooks".split()  # in `hooks` is the plain one, which does nothing
)
_SEE_ALL = "faster_cache", "fbc_", "sea_cache"  # prefixes of hooks that see all samples together


class Caches:
    """The step caches of a split model, and the blocks that attended since a cache is on."""

    def __init__(
        self, model: nn.Module, table: SplitTable, group: Callable[[], RankGroup | None]
    ) -> None:
        self._model, self._table, self._group = model, table, group
        self.is_on = False  # at the last `prepare`
        self._have_attended = set[str]()  # names of blocks, since a cache is on
        # First-block caches by hook: the stand-in, and states that were filled while split.
        self._leaders: dict[Any, tuple[StandIn, weakref.WeakSet[Any]]] = {}

    def any_used(self, modules: Iterable[nn.Module], is_shared: bool) -> bool:
        """Return whether a cache may skip blocks; refuse hooks that see only one rank's tokens."""
        kind, hooks = type(self._model).__name__, hooks_of(self._model, modules)
        for name, module, hook in hooks if is_shared else ():
            hook_name = type(hook).__name__
            if hook._is_stateful and not _is_alike(name, hook, self._table):
                raise ConfigError(
                    f"{kind} over ranks: its cache ({hook_name}) would decide by one rank's tokens "
                    "which blocks it skips: call disable_cache(), or use TaylorSeer, "
                    "MagCache, FasterCache, PyramidAttentionBroadcast or FirstBlockCache"
                )
            is_random = 0.0 < getattr(hook, "dropout", 0.0) < 1.0
            is_known = hook._is_stateful or type(hook).__module__.rpartition(".")[2] in _HARMLESS
            if module is not self._model and (is_random or not is_known):
                raise ConfigError(
                    f"{kind} over ranks: the hook {hook_name} on a {type(module).__name__} "
                    "would see only one rank's tokens: remove it, or call undo() first"
                )
        if is_shared and "_is_cached" in vars(self._model):
            raise _cache_dit_error(self._model)
        return any(hook._is_stateful for _, _, hook in hooks)

    def prepare(self, modules: Sequence[nn.Module], is_shared: bool, *, is_sparse: bool) -> None:
        """Check the hooks before a forward pass, and replace decisions of first-block caches."""
        was_on, self.is_on = self.is_on, self.any_used(modules, is_shared)
        if not self.is_on:
            return
        if is_sparse:
            raise ConfigError(
                f"{type(self._model).__name__} cannot combine block-sparse attention with a step "
                "cache: call disable_cache(), or leave out sparse"
            )
        if not was_on:
            self._have_attended.clear()
        for block in modules:
            registry = block.__dict__.get("_diffusers_hook")
            hook = None if registry is None else registry.get_hook(_LEADER)
            if hook is not None and hook not in self._leaders:
                # Ignore values cached before the split: they cover whole sequences.
                filled = weakref.WeakSet[Any]()
                decide = torch.compiler.disable(partial(self._decide, hook, filled))
                stand_in = StandIn(hook, "_should_compute_remaining_blocks", decide)
                self._leaders[hook] = stand_in, filled

    def end_block(self, name: str, has_attended: bool, is_sparse: bool) -> None:
        """Note that a block ran; refuse a skipped block if its output cannot be right."""
        if has_attended:
            if self.is_on:
                self._have_attended.add(name)
        elif is_sparse:
            raise ConfigError(
                f"{name} did not call F.scaled_dot_product_attention, which block-sparse attention "
                "needs: set_attention_backend('native'), remove hooks that skip it, or drop sparse"
            )
        elif self.is_on and name not in self._have_attended:
            raise ConfigError(
                f"a cache skipped {name}, by values from before parallelize: empty the cache first"
            )

    def leave(self) -> None:
        """Let caches decide as before; drop cached values, which cover one rank's tokens."""
        for stand_in, filled in self._leaders.values():
            stand_in.remove()
            for state in filled:
                state.head_block_residual = None
        self._leaders.clear()

    def _decide(
        self, hook: Any, filled: weakref.WeakSet[Any], _: object, hidden_states_residual: Tensor
    ) -> bool:
        """Decide as one process that has all tokens; one small all-reduce."""
        state, now = hook.state_manager.get_state(), hidden_states_residual
        before = state.head_block_residual
        if before is None or state not in filled:
            filled.add(state)
            return True
        sums = [x.abs().sum(dtype=torch.float64) for x in (now - before, before)]
        numbers, group = torch.stack([*sums, sums[0].new_tensor(now.numel())]), self._group()
        if group is not None:
            numbers = all_reduce(group, "all_reduce (first-block cache)", numbers)
        change, size, count = numbers.unbind()
        # Rounded as the means of the whole sequence would be.
        ratio = (change / count).to(now.dtype) / (size / count).to(now.dtype)
        return ratio.item() > hook.threshold


def branch_of(
    model: nn.Module,
    forward: Callable[..., Any],
    modules: Iterable[nn.Module],
    num_parts: int,
    num_groups: int,
) -> str | None:
    """Return the name that a cache gives a call's guidance branch; `forward` has no hooks."""
    if "_is_cached" in vars(model):
        raise _cache_dit_error(model)
    owner = next(cls for cls in type(model).__mro__ if "forward" in vars(cls))
    module = getattr(forward, "__module__", None)
    if module != owner.__module__:
        raise ConfigError(
            f"{type(model).__name__} has a forward of {module}, not of {owner.__module__}; for "
            "guidance over ranks it must not cache values between calls, as TeaCache "
            "does: use guidance_degree=1, or a subclass if it caches nothing"
        )
    for name, _, hook in hooks_of(model, modules):
        if not hook._is_stateful:
            continue
        manager = getattr(hook, "state_manager", None)
        reason = None
        if num_parts > 1 and name.startswith(_SEE_ALL):
            reason = "decides by all samples of a batch, which groups share"
        elif num_parts < num_groups and manager is None:
            reason = "keeps one state for all guidance branches"
        if reason is not None:
            raise ConfigError(
                f"{type(model).__name__}, guidance over ranks: its cache "
                f"({type(hook).__name__}) {reason}: use guidance_degree=1, TaylorSeer or "
                "MagCache, or call disable_cache()"
            )
        context = None if manager is None else manager._context
        if context is not None:
            return context.name
    return None


def _cache_dit_error(model: nn.Module) -> ConfigError:
    wrong = f"{type(model).__name__} over ranks: the cache of cache-dit decides by a rank's tokens"
    return ConfigError(f"{wrong}: call cache_dit.disable_cache(pipeline), or use one of diffusers")


def _is_alike(name: str, hook: Any, table: SplitTable) -> bool:
    """Return whether a cache's hook decides alike on all ranks."""
    if name == _BY_VIDEO:  # decides by the model's input, if it looks at one
        is_cut = "hidden_states" in table.inputs.get("", {})
        return not is_cut or hook.raw_vision_callback is None
    calibrates = getattr(getattr(hook, "config", None), "calibrate", False)
    return name in (*_BY_STEP, *_BY_FIRST_BLOCK) and not calibrates


def hooks_of(model: nn.Module, modules: Iterable[nn.Module]) -> list[tuple[str, nn.Module, Any]]:
    """List diffusers' hooks (name, module, hook) on `modules`, or on all if a cache is enabled."""
    is_enabled = bool(getattr(model, "is_cache_enabled", False))
    return [
        (name, module, hook)
        for module in (model.modules() if is_enabled else modules)
        if "_diffusers_hook" in vars(module)
        for name, hook in vars(module)["_diffusers_hook"].hooks.items()
    ]
