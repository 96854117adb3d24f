"""The code of the pages that need several ranks, run on them from top to bottom."""

from pathlib import Path

import pytest

from tests.helpers.page_worlds import run_page
from tests.helpers.pages import ON_RANKS
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.nightly

pytest.importorskip("diffusers")
pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("page", ON_RANKS)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    run_ranks(run_page, 2, page, str(tmp_path))
