"""Copies of a split model, as averages of weights make them: whole models, with nothing split."""

import copy
import io
import pickle

import torch
from torch import nn

from bascule.diffusers import parallelize
from tests.helpers.inference_cases import make_mesh, same, same_gradients
from tests.helpers.inference_toy import TABLE, direct, make_toy, toy_gradients, toy_inputs
from tests.helpers.ranks import on_ranks


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    data = io.BytesIO()
    torch.save(model, data)
    data.seek(0)
    return torch.load(data, weights_only=False)


@on_ranks(2)
def test_copies_of_a_split_model_are_whole() -> None:
    inputs, model = toy_inputs(masked=True), make_toy()
    wanted, wanted_grads = toy_gradients(model, inputs)
    mesh = make_mesh(1, 2)
    averaged = torch.optim.swa_utils.AveragedModel
    with parallelize(model, mesh=mesh, table=TABLE) as handle:
        model(**inputs)
        for run in (direct, handle.checkpoint):
            model.run = run
            for make in (copy.deepcopy, pickled, saved, averaged):
                output, grads = toy_gradients(make(model), inputs)
                same(output, wanted, what=(run, make))
                same_gradients(
                    {n.removeprefix("module."): grad for n, grad in grads.items()}, wanted_grads
                )
            made = copy.deepcopy(model)
            with parallelize(made, mesh=mesh, table=TABLE) as other:
                made.run = direct
                same(made(**inputs), wanted)
                assert other.verify(**inputs).ok
        copied = copy.deepcopy(handle)
        same(model(**inputs), wanted, what="the model after a copy")
        copied.undo()
        same(model(**inputs), wanted, what="the model after another undo")
        same(copy.copy(model)(**inputs), wanted, what="shallow")
    same(model(**inputs), wanted)
