"""The code of the pages that need several ranks, run on them from top to bottom."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.page_worlds import run_page
from tests.helpers.pages import ON_RANKS, SAVED, WHOLE, Block, python_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.nightly

pytest.importorskip("diffusers")
pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("page", ON_RANKS)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    run_ranks(run_page, 2, page, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("block", python_of(WHOLE), ids=str)
def test_a_part_of_the_readme_is_a_whole_program(block: Block, tmp_path: Path) -> None:
    (tmp_path / SAVED).write_text(block.text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, SAVED], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shown = "without balancing 1.", "rank 1: loss of"
    assert any(words in done.stdout for words in shown) or (tmp_path / "boat.png").exists()
