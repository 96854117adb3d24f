"""The pages of `--report`: what a browser shows is what the library computed, whatever the data."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bascule import options, plan_batch
from bascule.cli.inputs import InputOptions
from bascule.quantities import flops, times
from bascule.report.charts import draw_bars, draw_lengths, draw_loads
from bascule.report.page import Chart, Fact, Report, Rows, render
from tests.helpers.browser import Page, data_of, opened, screenshot
from tests.helpers.cli import Console, run
from tests.helpers.trace_cases import Run as TracedRun

pytest.importorskip("plotly")

MARKUP = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)>&amp;"\''
OWN = ((0.10, 0.30, 0.20), (0.25, 0.15, 0.20), (0.12, 0.36, 0.24))
PHONE, DESK = (500, 1000), (1000, 1180)


def report_with(text: str) -> Report:
    """A report that has the text wherever the user's data may stand."""
    return Report(
        title=text,
        answer=text,
        facts=(Fact("name", text, text), Fact("number", "a number", 1.25, "{:.2f}")),
        parts=(
            Rows(text, {text: "{}", "b": "{}"}, ((text, "1"),)),
            draw_bars(text, text, [text, "other"], {text: [1.0, 2.0]}, text),
        ),
        notes=(text,),
    )


def test_a_rank_without_work_has_a_page(capsys: Console, tmp_path: Path) -> None:
    """Its WIR is infinite, which JSON cannot say."""
    path = tmp_path / "plan.html"
    code, _, _ = run(capsys, "plan", "--lengths", "900//", "--report", str(path))
    assert code == 0 and data_of(path.read_text())["wir"] is None


def test_a_plan_in_the_browser(capsys: Console, tmp_path: Path) -> None:
    shown, saved = tmp_path / "plan.html", tmp_path / "plan.json"
    data = ("--data", "g4b8i256f1s0,g2b3i512f1s0,g2b1i1024f9s1", "--topology", "g1n4+g2n2")
    code, _, _ = run(capsys, "plan", *data, "--report", str(shown), "--json", str(saved))
    assert code == 0
    found, data_saved = opened(shown, tmp_path / "profile"), json.loads(saved.read_text())
    lens, topology = data_saved["seq_lens"], data_saved["topology"]
    plan = plan_batch(lens, topology, InputOptions().cost)
    assert plan.digest == data_saved["digest"]
    before = plan.unbalanced_loads(InputOptions().cost)
    assert found.errors == []
    assert found.num_charts == 2 and "One step on 8 ranks" in found.html
    assert found.numbers["makespan"] == flops(plan.makespan * 1e12)
    assert found.numbers["speedup"] == times(before.max() / plan.makespan)
    assert found.numbers["moved_tokens"] == f"{plan.moved_tokens:,}"
    data_found = data_of(found.html)
    assert data_found["gap"] == plan.gap and data_found["wir"] == plan.wir
    assert data_found["waiting"] == pytest.approx(1e12 * (plan.makespan - plan.loads).sum())
    for name, size in (("phone", PHONE), ("report", DESK)):
        image = Path(os.environ.get("DOCS_PICTURES", tmp_path)) / f"{name}.png"
        screenshot(shown, image, tmp_path / "profile", width=size[0], height=size[1])
        with Image.open(image) as taken:
            assert taken.size == size and len(taken.convert("RGB").getcolors(2**24) or ()) > 50


@pytest.mark.parametrize(
    ("command", "num_charts", "said"),
    [
        ("topology --data g4b4i256f1s0 --num-layers 4 --steps 2", 2, "not measured"),
        ("sparse --model cogvideox1.5 --block 1020 --ranks 2 --steps 2", 1, "who computes what"),
        ("simulate --data g2b4i256f1s0 --steps 2 --topologies none g2n1", 1, "not measured"),
        ("trace .", 2, "What balancing would be worth is not known"),
    ],
)
def test_the_page_has_what_the_console_has(
    capsys: Console, tmp_path: Path, monkeypatch: Any, command: str, num_charts: int, said: str
) -> None:
    monkeypatch.chdir(TracedRun(OWN).write(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = run(capsys, *command.split(), "--report", "a.html")
    assert code == 0, err
    html = (tmp_path / "a.html").read_text()
    numbers = Page(html, "").numbers
    assert said in html and len(numbers) > 3 and all(text in out for text in numbers.values())
    page = opened(tmp_path / "a.html", tmp_path / "profile")
    assert page.errors == [] and page.num_charts == num_charts and page.numbers == numbers


def test_text_of_the_user_is_shown_as_text(tmp_path: Path) -> None:
    shown = tmp_path / "markup.html"
    shown.write_text(render(report_with(MARKUP), f"bascule plan {MARKUP}"))
    found = opened(shown, tmp_path / "profile")
    assert "<title>taken" not in found.html and "<img" not in found.html
    assert found.text.count(MARKUP) >= 7
    assert found.numbers["number"] == "1.25" and data_of(found.html)["name"] == MARKUP
    assert found.errors == []


def test_a_page_can_ask_the_network_for_nothing(tmp_path: Path) -> None:
    shown = tmp_path / "asks.html"
    asking = Chart("asks", "asks", lambda: '<img src="https://example.com/x.png">')
    shown.write_text(render(replace(report_with("x"), parts=(asking,)), "bascule"))
    found = opened(shown, tmp_path / "profile")
    assert any("Content Security Policy" in line for line in found.errors)


@settings(max_examples=75, deadline=None)
@given(st.text(max_size=60))
def test_any_text_leaves_the_page_whole(text: str) -> None:
    html = render(replace(report_with(text), parts=()), text)
    assert data_of(html)["name"] == text
    assert html.count("<script") == html.count("</script>") == 3
    assert html.count("<dd ") == 2


def test_empty_data_has_a_page() -> None:
    report = Report("nothing", "", (), (draw_lengths([]), draw_loads([0.0], [0.0], "s")))
    assert "no sequence with tokens" in render(report, "bascule")


def test_many_ranks_are_lines_not_bars() -> None:
    figure: Any = draw_loads(range(500), [250.0] * 500, "s").draw()
    assert {trace.type for trace in figure.data} == {"scatter"}


def test_what_a_report_needs_is_said_before_any_work(
    capsys: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ("plan", "--lengths", "4,5/6", "--report")
    for path, said in (
        *((place, "must end in .html") for place in ("out.pdf", tmp_path)),
        (tmp_path / "none" / "out.html", "there is no folder"),
    ):
        code, _, err = run(capsys, *plan, str(path))
        assert code == 2 and said in err.replace("\n", " ")
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    code, _, err = run(capsys, *plan, str(tmp_path / "out.html"))
    assert code == 2 and "pip install plotly" in err


def test_the_command_is_on_the_page() -> None:
    html = render(report_with("x"), "bascule plan --lengths '4,5/6'")
    assert "bascule plan --lengths &#x27;4,5/6&#x27;" in html
    versions = re.search(r"<p>(Python .*?)</p>", html)
    assert versions is not None and "torch" in versions[1] and "bascule" in versions[1]
    assert json.loads(json.dumps(data_of(html)))["number"] == 1.25
