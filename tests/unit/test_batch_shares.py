"""Parts of the samples of a call, and its output for all of them."""

from collections import defaultdict
from typing import Any

import pytest
import torch

from bascule.comm.items import leaves_of, mapped, rebuilt
from bascule.diffusers.pending import Branch, Form, Samples, samples_of, share_of
from bascule.errors import ConfigError


def test_samples_are_cut_and_the_rest_is_for_all() -> None:
    inputs: dict[str, Any] = {
        "ids": torch.zeros(1, 3),  # without a batch
        "scale": torch.tensor(2.0),
        "x": torch.arange(3),
        "text": torch.arange(6).view(3, 2),
        "residuals": [torch.arange(3), torch.arange(3) * 10],
        "shapes": [[(1, place, 2)] for place in range(3)],
        "layers": [0, 1, 2],  # numbers of layers, not of samples
        "conditions": {"size": torch.arange(3), "weight": 0.5, "all": torch.tensor([3.0])},
        "for all": torch.ones(1, 3),
    }
    samples = samples_of(inputs, ("ids",))
    assert samples == Samples(3) and samples_of({"scale": 2.0, "layers": [1]}, ()) == Samples(1)
    cut = share_of(inputs, ("ids",), samples, slice(1, 3))
    assert cut["x"].tolist() == [1, 2] and cut["text"].tolist() == [[2, 3], [4, 5]]
    assert [one.tolist() for one in cut["residuals"]] == [[1, 2], [10, 20]]
    assert cut["shapes"] == [[(1, 1, 2)], [(1, 2, 2)]]
    assert cut["conditions"]["size"].tolist() == [1, 2] and cut["conditions"]["weight"] == 0.5
    assert cut["conditions"]["all"] is inputs["conditions"]["all"]
    assert all(cut[name] is inputs[name] for name in ("ids", "scale", "for all"))
    assert cut["layers"] == [0, 1, 2]


def test_a_nest_is_rebuilt_as_what_it_is() -> None:
    """Also one whose type takes more than its entries."""
    nest = defaultdict(list, {"a": [torch.ones(2)], "b": (1, torch.zeros(1))})
    changed = mapped(nest, lambda x: x + 1)
    assert type(changed) is defaultdict and changed["new"] == []
    assert changed["a"][0].tolist() == [2.0, 2.0] and changed["b"][1].tolist() == [1.0]


@pytest.mark.parametrize("sides", [(2, 3, 5), (3, 3, 3)])  # also as many channels as samples
def test_lists_with_a_tensor_for_each_sample(sides: tuple[int, ...]) -> None:
    images = {"x": [torch.zeros(3, side) for side in sides]}
    samples = samples_of(images, ())
    assert samples == Samples(3, are_listed=True)
    cut = share_of(images, (), samples, slice(1, 3))
    assert [one.shape for one in cut["x"]] == [(3, side) for side in sides[1:]]


@pytest.mark.parametrize("nested", [False, True])
def test_other_numbers_of_samples_are_refused(nested: bool) -> None:
    text = torch.zeros(3, 2)
    inputs = {"text": {"size": text} if nested else text}
    with pytest.raises(ConfigError, match=r"has the shape \(3, 2\) in a call of 2 samples"):
        share_of(inputs, (), Samples(2), slice(0, 1))


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("are_listed", [False, True])
def test_parts_become_the_whole(num_parts: int, are_listed: bool) -> None:
    samples = Samples(5, are_listed)

    def output(part: slice) -> Any:
        rows = torch.arange(10).view(5, 2)[part]
        entries = [torch.full((place,), place) for place in range(1, 6)][part]
        return {"rows": rows, "more": (entries if are_listed else rows + 1, "text")}

    parts = [samples.part(place, num_parts) for place in range(num_parts)]
    counts = [part.stop - part.start for part in parts]
    assert sum(counts) == 5 and max(counts) - min(counts) <= 1
    expected = output(slice(0, 5))
    for part, count in zip(parts, counts, strict=True):  # whichever rank learns the form
        form = Form.of(output(part), samples, count)
        branch = Branch([0] * num_parts, counts, {}, form)
        last = branch.defer(lambda values: values[0] * 2)
        branch.finish([leaves_of(output(one)) for one in parts])
        assert branch.values is not None
        assert torch.equal(branch.values[last], expected["rows"] * 2)
        whole = rebuilt(form.nest, iter(branch.values))
        assert whole["more"][1] == "text"
        pairs = zip(leaves_of(whole), leaves_of(expected), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
