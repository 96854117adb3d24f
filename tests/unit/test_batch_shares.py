"""Parts of the samples of a call, and what it returns for all of them."""

from typing import Any

import pytest
import torch

from bascule.comm.items import leaves_of, rebuilt
from bascule.diffusers.batch_shares import (
    Form,
    Samples,
    samples_of,
    share_of,
)
from bascule.diffusers.pending import Branch
from bascule.errors import ConfigError

NAMES = ("x", "text", "ids", "residuals", "shapes", "layers", "scale")


def given(batch: int) -> dict[str, Any]:
    return {
        "text": torch.arange(batch * 2).view(batch, 2),
        "ids": torch.zeros(batch, 3),  # without a batch
        "residuals": [torch.arange(batch), torch.arange(batch) * 10],
        "shapes": [[(1, place, 2)] for place in range(batch)],
        "layers": list(range(batch)),
        "scale": torch.tensor(2.0),
    }


def test_samples_are_cut_and_the_rest_is_for_all() -> None:
    x, kwargs = torch.arange(3), given(3)
    samples = samples_of(NAMES, (x,), kwargs, ("ids",))
    assert samples == Samples(3)
    (own,), cut = share_of(NAMES, (x,), kwargs, ("ids",), samples, slice(1, 3))
    assert own.tolist() == [1, 2] and cut["text"].tolist() == [[2, 3], [4, 5]]
    assert [one.tolist() for one in cut["residuals"]] == [[1, 2], [10, 20]]
    assert cut["shapes"] == [[(1, 1, 2)], [(1, 2, 2)]]
    assert cut["layers"] == [0, 1, 2]  # numbers of layers, not of samples
    assert cut["ids"] is kwargs["ids"] and cut["scale"] is kwargs["scale"]


def test_lists_with_a_tensor_for_each_sample() -> None:
    images = [torch.zeros(4, 8, side) for side in (2, 3, 5)]
    samples = samples_of(NAMES, (images,), {}, ())
    assert samples == Samples(3, are_listed=True)
    (own,), _ = share_of(NAMES, (images,), {}, (), samples, slice(0, 2))
    assert [one.shape[-1] for one in own] == [2, 3]
    square = [torch.zeros(3, 3) for _ in range(3)]  # as many channels as samples
    (own,), _ = share_of(NAMES, (square,), {}, (), samples, slice(2, 3))
    assert [one.shape for one in own] == [(3, 3)]


def test_what_is_for_all_samples_is_not_cut() -> None:
    text = {"text": torch.ones(1, 3)}
    cut = share_of(NAMES, (torch.zeros(2, 3),), text, (), Samples(2), slice(0, 1))[1]
    assert cut["text"].shape == (1, 3)
    assert samples_of(NAMES, (), {"scale": 2.0, "layers": [1, 2]}, ()) == Samples(1)


def test_tensors_in_dicts_are_cut() -> None:
    conditions = {"size": torch.arange(4).view(2, 2), "weight": 0.5, "all": torch.tensor([3.0])}
    cut = share_of(NAMES, (), {"text": conditions}, (), Samples(2), slice(1, 2))[1]["text"]
    assert cut["size"].tolist() == [[2, 3]] and cut["weight"] == 0.5
    assert cut["all"] is conditions["all"]
    with pytest.raises(ConfigError, match=r"text.size has the shape \(2, 2\) in a call of 3"):
        share_of(NAMES, (), {"text": conditions}, (), Samples(3), slice(1, 2))


def test_other_numbers_of_samples_are_refused() -> None:
    text = {"text": torch.zeros(3, 2)}
    with pytest.raises(ConfigError, match=r"text has the shape \(3, 2\) in a call of 2 samples"):
        share_of(NAMES, (torch.zeros(2),), text, (), Samples(2), slice(0, 1))


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("are_listed", [False, True])
def test_parts_become_the_whole(num_parts: int, are_listed: bool) -> None:
    samples = Samples(5, are_listed)

    def output(own: slice) -> Any:
        rows = torch.arange(10).view(5, 2)[own]
        entries = [torch.full((place,), place) for place in range(1, 6)][own]
        return {"rows": rows, "more": (entries if are_listed else rows + 1, "text")}

    slices = [samples.part(place, num_parts) for place in range(num_parts)]
    counts = [one.stop - one.start for one in slices]
    assert sum(counts) == 5 and max(counts) - min(counts) <= 1
    wanted = output(slice(0, 5))
    for own, count in zip(slices, counts, strict=True):  # whichever rank learns the form
        form = Form.of(output(own), samples, count)
        branch = Branch([(0, count) for count in counts], {}, form)
        last = branch.defer(lambda whole: whole[0] * 2)
        branch.finish([leaves_of(output(one)) for one in slices])
        assert last == branch.num_values - 1
        assert torch.equal(branch.whole[last], wanted["rows"] * 2)
        found = rebuilt(form.nest, iter(branch.whole))
        assert found["more"][1] == "text"
        pairs = zip(leaves_of(found), leaves_of(wanted), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
