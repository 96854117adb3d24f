"""Copies of a split model, as averages of weights make them: whole models, with nothing split."""

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn

from bascule.diffusers import parallelize
from tests.helpers.inference_cases import difference, make_mesh
from tests.helpers.inference_toy import (
    TABLE,
    direct,
    make_toy,
    toy_gradients,
    toy_inputs,
    worst,
)
from tests.helpers.ranks import run_ranks


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    data = io.BytesIO()
    torch.save(model, data)
    data.seek(0)
    return torch.load(data, weights_only=False)


def copies() -> dict[str, float]:
    inputs, model, found = toy_inputs(masked=True), make_toy(), dict[str, Any]()
    wanted, wanted_grads = toy_gradients(model, inputs)
    mesh = make_mesh(1, 2)
    averaged = torch.optim.swa_utils.AveragedModel
    with parallelize(model, mesh=mesh, table=TABLE) as handle:
        model(**inputs)
        for run in (direct, handle.checkpoint):
            model.run = run
            for make in (copy.deepcopy, pickled, saved, averaged):
                made = make(model)
                name = f"{run.__name__}, {make.__name__}"
                output, grads = toy_gradients(made, inputs)
                grads = {n.removeprefix("module."): grad for n, grad in grads.items()}
                found[name] = difference(output, wanted) + worst(grads, wanted_grads)
            made = copy.deepcopy(model)
            with parallelize(made, mesh=mesh, table=TABLE) as other:
                made.run = direct
                found[f"{name}, split"] = difference(made(**inputs), wanted)
                found[f"{name}, verified"] = 0.0 if other.verify(**inputs).ok else 1.0
        copied = copy.deepcopy(handle)
        found["the model after a copy"] = difference(model(**inputs), wanted)
        copied.undo()
        found["the model after another undo"] = difference(model(**inputs), wanted)
        shallow = copy.copy(model)
        found["shallow"] = difference(shallow(**inputs), wanted)
    return found | {"undone": difference(model(**inputs), wanted)}


def test_copies_of_a_split_model_are_whole() -> None:
    for found in run_ranks(copies, 2):
        assert max(found.values()) < 1e-12, found
