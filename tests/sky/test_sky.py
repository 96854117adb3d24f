"""The tasks of SkyPilot, read by its own parser; `make sky` runs this file. No cloud is there."""

from pathlib import Path
from typing import Any

import pytest

sky: Any = pytest.importorskip("sky", reason="SkyPilot is not installed; see `make sky`")

FOLDER = Path(__file__).parents[2] / "examples" / "sky"


@pytest.mark.parametrize("name", ["train.yaml", "serve.yaml"])
def test_sky_reads_a_task_and_refuses_a_misspelt_field(name: str) -> None:
    text = (FOLDER / name).read_text()
    task = sky.Task.from_yaml(str(FOLDER / name))
    assert task.num_nodes == (2 if name == "train.yaml" else 1)
    (resources,) = task.resources
    assert resources.accelerators == {"H100": 8}
    assert resources.use_spot == (name == "train.yaml")
    assert task.run and "torchrun" in task.run
    if name == "serve.yaml":
        assert resources.ports == ["8000"]
        assert task.service is not None and task.service.readiness_path == "/health"
    fields = ["num_nodes:", "accelerators:", "    mode:", "setup:"]
    fields += ["    path:"] if name == "serve.yaml" else ["use_spot:"]
    for field in fields:
        assert text.count(field) == 1
        with pytest.raises(
            Exception, match=r"(?i)invalid|unsupported|additional|unexpected|unknown"
        ):
            sky.Task.from_yaml_str(text.replace(field, field.replace(":", "x:")))
