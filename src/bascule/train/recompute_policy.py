"""What activation checkpointing keeps, so that no exchange between ranks is made twice."""

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy


def keep_exchanges(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what came from other ranks, with the attention between; compute all else again.

    A policy of selective activation checkpointing:

        context_fn = partial(create_selective_checkpoint_contexts, keep_exchanges)
        checkpoint(block, x, step, use_reentrant=False, context_fn=context_fn)

    What is kept is as large as q, k, v and the output of attention together.
    """
    is_exchange = getattr(operator, "namespace", "") == "bascule"
    return CheckpointPolicy.MUST_SAVE if is_exchange else CheckpointPolicy.PREFER_RECOMPUTE
