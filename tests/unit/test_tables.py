"""Split tables: they fit the installed models, and adding one is short."""

import inspect
import re
from pathlib import Path

import pytest
from torch import nn

from bascule.errors import ConfigError
from bascule.integrations.diffusers import SplitTable, tables
from bascule.integrations.diffusers.tables import TABLES, modules_of, table_of

NAMES = [name.rpartition(".")[2] for name in TABLES]


def make(name: str) -> nn.Module:
    """A model without storage."""
    import torch

    pytest.importorskip("diffusers")
    module, _, cls = name.rpartition(".")
    with torch.device("meta"):
        return getattr(__import__(module, fromlist=[cls]), cls)(num_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES, ids=NAMES)
def test_a_table_names_arguments_and_modules_that_exist(name: str) -> None:
    model, table = make(name), TABLES[name]
    assert table_of(model) is table
    arguments = set(inspect.signature(model.forward).parameters)
    for pattern, cuts in table.inputs.items():
        for module in modules_of(model, pattern).values():
            assert set(cuts) <= set(inspect.signature(module.forward).parameters)
    assert {*table.whole, *table.masks} <= arguments
    for pattern in (*table.outputs, *table.gathers, *table.blocks, *table.local):
        assert modules_of(model, pattern)
    cuts = [*table.gathers.values(), *(c for one in table.inputs.values() for c in one.values())]
    cuts += [c for one in table.outputs.values() for c in one.values()]
    segments = {*(cut.segment for cut in cuts), *table.masks.values()}
    assert segments == set(table.segments)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES, ids=NAMES)
def test_a_table_says_what_to_do_with_every_argument_that_may_hold_tensors(name: str) -> None:
    """Diffusers may add arguments: a new one must be put into the table."""
    model, table = make(name), TABLES[name]
    told = {*table.inputs[""], *table.whole, *table.masks}
    plain = {
        "return_dict",
        "joint_attention_kwargs",
        "attention_kwargs",
        "img_shapes",
        "controlnet_blocks_repeat",
    }
    assert set(inspect.signature(model.forward).parameters) <= told | plain


def test_tables_are_short() -> None:
    source = Path(inspect.getfile(tables)).read_text()
    found = re.findall(r"^[A-Z_]+ = SplitTable\(\n(.*?)^\)", source, re.DOTALL | re.MULTILINE)
    assert len(found) == len(TABLES)
    for text in found:
        assert len(text.splitlines()) <= 15


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1, 1)) for _ in range(11))


def test_a_star_is_one_part_of_a_name() -> None:
    names = list(modules_of(Mine(), "blocks.*"))
    assert names == [f"blocks.{i}" for i in range(11)]
    assert list(modules_of(Mine(), "blocks.1")) == ["blocks.1"]
    assert len(modules_of(Mine(), "blocks.*.0")) == 11
    assert list(modules_of(Mine(), "")) == [""]
    with pytest.raises(ConfigError, match=r"names 'block\.\*', and Mine has no such module"):
        modules_of(Mine(), "block.*")


def test_subclasses_use_the_table_of_their_base_and_others_are_told_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Derived(Mine):
        pass

    with pytest.raises(ConfigError, match=r"no split table for Derived .*table=SplitTable"):
        table_of(Derived())
    table = SplitTable(("text",), {}, {}, {})
    monkeypatch.setattr(tables, "TABLES", {f"{__name__}.Mine": table})
    assert table_of(Derived()) is table
