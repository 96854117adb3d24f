"""What `make dist` built: its files, and the demo from where pip installed it."""

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import bascule

ROOT = Path(__file__).parents[2]
VERSION = importlib.metadata.version("bascule")
PHOTOS = "from pathlib import Path; import skimage; print(Path(skimage.__file__).parent / 'data')"


def tracked(*paths: str) -> set[str]:
    listed = subprocess.check_output(("git", "ls-files", "-z", *paths), cwd=ROOT, text=True)
    return set(listed.split("\0")) - {""}


def test_the_wheel_holds_the_package_alone() -> None:
    with zipfile.ZipFile(ROOT / f"dist/bascule-{VERSION}-py3-none-any.whl") as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in tracked("src")}
    assert {"bascule/py.typed", "bascule/report/page.html", "bascule/serve/page.html"} <= names


def test_the_sdist_holds_package_tests_examples_and_licence() -> None:
    with tarfile.open(ROOT / f"dist/bascule-{VERSION}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    files = (".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml")
    assert names == {"PKG-INFO", *files, *tracked("src", "tests", "examples")}


def test_changelog_and_citation_have_this_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert newest and cited and newest[1] == cited[1] == VERSION


def test_the_plug_ins_of_the_wheel_have_names() -> None:
    plugins = importlib.metadata.entry_points(group="bascule.plugins")
    assert plugins.names >= {"megatron", "transformers"}


def test_the_demo_runs_from_the_wheel(tmp_path: Path) -> None:
    assert Path(bascule.__file__).is_relative_to(sys.prefix)
    photos = subprocess.check_output((sys.executable, "-c", PHOTOS), text=True).strip()
    small = "--d-model 48 --num-heads 2 --num-single 1 --max-tokens 256 --steps 4 --ranks 2"
    program = str(Path(sys.executable).with_name("bascule"))
    command = (program, "bench", "--photos", photos, *small.split(), "--report", "page.html")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "same maths" in done.stdout
    assert "</html>" in (tmp_path / "page.html").read_text()
