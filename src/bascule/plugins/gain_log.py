"""A callback that writes the gain of balancing to the log of a Trainer."""

from typing import Any

from transformers import TrainerCallback

from bascule.data.gain import Gain
from bascule.plugins.dealt_batches import DealtBatches


class GainLog(TrainerCallback):
    """Callback that adds `Gain.metrics` to each logged loss, while batches are dealt."""

    def __init__(self) -> None:
        self.dealt: DealtBatches | None = None
        self._gain = Gain()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reset the gain."""
        self._gain = Gain()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the step to the gain."""
        if self.dealt is not None:
            place = (state.global_step - 1) % self.dealt.num_steps
            if place < len(self.dealt.steps):
                before, after, mean = self.dealt.steps[place]
                self._gain.add(before, after, mean)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the gain to the logs of the Trainer and of later callbacks."""
        if self.dealt is not None and "loss" in kwargs["logs"]:
            metrics = {f"bascule_{name}": value for name, value in self._gain.metrics().items()}
            kwargs["logs"].update(metrics)
            state.log_history[-1].update(metrics)
