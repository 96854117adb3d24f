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

_HARMLESS = frozenset(  # modules of hooks that move or cast weights, or skip what all ranks skip
    "layerwise_casting group_offloading components_manager layer_skip first_block_cache mag_cache "
    "sea_cache".split()
)
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

    def are_used(self, modules: Iterable[nn.Module], is_over: bool) -> bool:
        """Return whether a cache may leave out blocks; refuse hooks that see one rank's tokens."""
        kind, hooks = type(self._model).__name__, hooks_of(self._model, modules)
        for name, module, hook in hooks if is_over else ():
            what = type(hook).__name__
            if hook._is_stateful and not _is_alike(name, hook, self._table):
                raise ConfigError(
                    f"{kind} over ranks, with a cache ({what}) that decides by the tokens of a "
                    "rank what it leaves out, so that ranks may wait for each other: call "
                    "disable_cache(), or take FirstBlockCache, or one that counts steps: "
                    "TaylorSeer, PyramidAttentionBroadcast, FasterCache, MagCache"
                )
            is_random = 0.0 < getattr(hook, "dropout", 0.0) < 1.0
            is_known = hook._is_stateful or type(hook).__module__.rpartition(".")[2] in _HARMLESS
            if module is not self._model and (is_random or not is_known):
                raise ConfigError(
                    f"{kind} over ranks, with the hook {what} on a {type(module).__name__}, which "
                    "would see only one rank's tokens: remove the hook (for example leave its "
                    "guidance out), or call undo() first"
                )
        if is_over and "_is_cached" in vars(self._model):
            raise ConfigError(_of_cache_dit(self._model))
        return any(hook._is_stateful for _, _, hook in hooks)

    def prepare(self, modules: Sequence[nn.Module], is_over: bool, *, is_sparse: bool) -> None:
        """Look at the hooks before a forward pass; refuse those that cannot be used."""
        was_on, self.is_on = self.is_on, self.are_used(modules, is_over)
        if not self.is_on:
            return
        if is_sparse:
            raise ConfigError(
                f"{type(self._model).__name__} with block-sparse attention and a cache of steps, "
                "which leaves out layers that count: call disable_cache(), or leave out sparse"
            )
        if not was_on:
            self._have_attended.clear()
        for block in modules:
            registry = block.__dict__.get("_diffusers_hook")
            hook = None if registry is None else registry.get_hook(_LEADER)
            if hook is not None and hook not in self._leaders:
                # Ignore values cached before the split: they cover whole sequences.
                known = weakref.WeakSet[Any]()
                decide = torch.compiler.disable(partial(self._decide, hook, known))
                stand_in = StandIn(hook, "_should_compute_remaining_blocks", decide)
                self._leaders[hook] = stand_in, known

    def end_block(self, name: str, has_attended: bool, is_sparse: bool) -> None:
        """Note that a block ran; refuse a block left out where its output cannot be right."""
        if has_attended:
            if self.is_on:
                self._have_attended.add(name)
        elif is_sparse:
            raise ConfigError(
                f"{name} did not call F.scaled_dot_product_attention, and block-sparse attention "
                "counts the calls of a pass: let it call that function, by "
                "set_attention_backend('native'), take away hooks that skip it, or leave out sparse"
            )
        elif self.is_on and name not in self._have_attended:
            raise ConfigError(
                f"a cache left out {name}, which has not attended while split: empty caches that "
                "were filled before parallelize"
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
    model: nn.Module,
    forward: Callable[..., Any],
    modules: Iterable[nn.Module],
    num_parts: int,
    num_groups: int,
) -> str | None:
    """Return a cache's name for the branch of a call; None without a cache.

    `forward` is the model's own, below hooks.
    """
    if "_is_cached" in vars(model):
        raise ConfigError(_of_cache_dit(model))
    owner = next(one for one in type(model).__mro__ if "forward" in vars(one))
    module = getattr(forward, "__module__", None)
    if module != owner.__module__:
        raise ConfigError(
            f"{type(model).__name__} with guidance over ranks and a forward of {module} in place "
            f"of that of {owner.__module__}: if it keeps something from call to call, as TeaCache "
            "does, groups that compute some calls each would keep other things: use "
            "guidance_degree=1, or a subclass if it keeps nothing"
        )
    for name, _, hook in hooks_of(model, modules):
        if not hook._is_stateful:
            continue
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


def _of_cache_dit(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} over ranks, with the cache of cache-dit, which decides by the "
        "tokens and calls of one rank what it leaves out: call cache_dit.disable_cache(pipeline) "
        "first, or use a cache of diffusers, as TaylorSeer"
    )


def _is_alike(name: str, hook: Any, table: SplitTable) -> bool:
    if name == _BY_VIDEO:  # by the video that the model is given, if it looks at one
        is_cut = "hidden_states" in table.inputs.get("", {})
        return not is_cut or hook.raw_vision_callback is None
    calibrates = getattr(getattr(hook, "config", None), "calibrate", False)
    return name in (*_BY_STEP, *_BY_FIRST_BLOCK) and not calibrates


def hooks_of(model: nn.Module, modules: Iterable[nn.Module]) -> list[tuple[str, nn.Module, Any]]:
    """Return the hooks of diffusers, with their names and modules."""
    is_enabled = bool(getattr(model, "is_cache_enabled", False))
    return [
        (name, module, hook)
        for module in (model.modules() if is_enabled else modules)
        if "_diffusers_hook" in vars(module)
        for name, hook in vars(module)["_diffusers_hook"].hooks.items()
    ]
