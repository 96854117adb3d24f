"""Resume a training loop of Ray Train's `TorchTrainer`, on any number of workers."""

# pyright: reportMissingImports=false

import pickle
import tempfile
from typing import Any

import ray.train
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


class Resumable:
    """A loader, a model and its optimizer, which go on from the newest checkpoint of their run.

    Make it on all workers before they iterate; all call `report` at the same steps. A checkpoint
    has the shards of all workers, so that the run may go on with more or fewer of them.

    Args:
        loader: A `BalancedLoader` of a `ResumableSampler`, or another loader with a state that is
            the same on all workers.
        model: The model: bare, under DDP (as of `prepare_model`) or FSDP2.
        optimizer: The model's optimizer.
        others: Other parts with `state_dict` and `load_state_dict`, such as ``schedule=``.
    """

    def __init__(self, loader: Any, model: nn.Module, optimizer: Optimizer, **others: Any) -> None:
        self._model, self._optimizer, self._others = model, optimizer, {"loader": loader, **others}
        if (checkpoint := ray.train.get_checkpoint()) is None:
            return
        state = self._state()
        with checkpoint.as_directory() as folder:
            state_dict_loader.load(state, checkpoint_id=folder)
        both = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **both)
        for name, part in self._others.items():
            part.load_state_dict(pickle.loads(state["others"][name]))

    def report(self, metrics: dict[str, Any], *, saves: bool = True) -> None:
        """Report metrics after a step; with `saves`, also a checkpoint."""
        if not saves:
            return ray.train.report(metrics)
        with tempfile.TemporaryDirectory() as folder:
            state_dict_saver.save(self._state(), checkpoint_id=folder)
            # Ray Train joins the files of all workers.
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

    def _state(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(self._model, self._optimizer)
        # As bytes, since a loader's state has other fields on another number of workers.
        others = {name: pickle.dumps(part.state_dict()) for name, part in self._others.items()}
        return {"model": weights, "optimizer": optimizer, "others": others}
