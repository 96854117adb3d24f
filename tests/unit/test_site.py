"""The site builds without a warning, from docs, examples, results and docstrings.

Twenty seconds: with `make stress`. `test_docs` looks at links and names every day.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bascule
from tests.helpers.pages import ROOT


@pytest.mark.stress
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs_api_autonav", reason="NOT TESTED: pip install 'bascule[docs]'")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path))
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, "\n".join(
        line for line in built.stderr.splitlines() if "INFO" not in line
    )
    for page in (
        "index",
        "glossary/index",
        "gallery/train_toy_dit/index",
        "benchmarks/index",
        "proven/index",
    ):
        assert (tmp_path / f"{page}.html").is_file(), page
    reference = (tmp_path / "reference/bascule/plan/plan/index.html").read_text()
    assert "plan_batch" in reference
    names = (tmp_path / "api/index.html").read_text()
    for home in ("bascule", "bascule.plan", "bascule.costs", "bascule.plugins.hf_trainer"):
        assert f'<h2 id="{home.replace(".", "")}">' in names, home
    shown = set(re.findall(r'reference/(?:\w+/)+#bascule\.[\w.]+"><code>(\w+)</code>', names))
    assert {*bascule.__all__} - {"__version__"} <= shown
    assert {"Assignment", "Cluster", "BalanceCallback", "in_place_of"} <= shown
    listed = (tmp_path / "llms.txt").read_text()
    assert "training_step" in listed and "# bascule" in listed
    results = (tmp_path / "benchmarks/index.html").read_text()
    for result in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert result.name in results
