"""The pages of `--report`: what a browser shows is what the library computed, whatever the data."""

import json
import os
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console as RichConsole

from bascule import plan_batch
from bascule.bench.doctor import plain_values
from bascule.bench.options import DoctorOptions
from bascule.cli import calibrate, doctor, main
from bascule.cli.inputs import InputOptions
from bascule.quantities import flops, times
from bascule.report.charts import draw_bars, draw_lengths, draw_lines
from bascule.report.page import Chart, Fact, Report, Rows, render
from tests.helpers.browser import Page, data_of, faults_of_layout, opened, screenshot
from tests.helpers.calibrations import calibrated
from tests.helpers.cli import Console, run
from tests.helpers.report_cases import found, measured, reported
from tests.helpers.trace_cases import Run as TracedRun

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
        ("sparse --model cogvideox1.5 --block 1020 --ranks 2 --steps 2", 3, "Who computes what"),
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
    assert html.count("<script") == html.count("</script>") == 1
    assert html.count("<dd ") == 2


def test_empty_data_has_a_page() -> None:
    nothing = draw_lengths([]), draw_lines("none", "", ("rank", "s"), {"loads": [0.0]})
    report = Report("nothing", "", (), nothing)
    assert "no sequence with tokens" in render(report, "bascule")


def test_lines_begin_at_the_first_rank_and_have_a_unit_that_fits() -> None:
    loads = {"as loaded": range(1, 501), "balanced": [250.0] * 500}
    html = draw_lines("Work of each rank", "", ("rank", "s"), loads).draw()
    assert html.count('<path d="M0.0000 ') == 2 and ">min<" in html  # seconds, in minutes


def test_what_a_report_needs_is_said_before_any_work(capsys: Console, tmp_path: Path) -> None:
    plan = ("plan", "--lengths", "4,5/6", "--report")
    for path, said in (
        *((place, "must end in .html") for place in ("out.pdf", tmp_path)),
        (tmp_path / "none" / "out.html", "there is no folder"),
    ):
        code, _, err = run(capsys, *plan, str(path))
        assert code == 2 and said in err.replace("\n", " ")


def test_the_command_is_on_the_page() -> None:
    html = render(report_with("x"), "bascule plan --lengths '4,5/6'")
    assert "bascule plan --lengths &#x27;4,5/6&#x27;" in html
    versions = re.search(r"<p>(Python .*?)</p>", html)
    assert versions is not None and "torch" in versions[1] and "bascule" in versions[1]
    assert json.loads(json.dumps(data_of(html)))["number"] == 1.25


KINDS = {
    "plan": "--data g64b16i256f1s0,g2b1i1024f9s1 --topology g2n33",
    "topology": "--data g4b8i256f1s0,g4b1i1024f1s0 --steps 1",
    "simulate": "--data g16b4i256f1s0,g8b1i2048f1s0 --topologies none loader auto --steps 2 "
    "--gpu-hour-price 2.5 --vae-us 60 --text-encoder-us 20",
    "simulate-requests": "--mix 512x512@20=0.8 1024x1024@28=0.2 --requests 40 --seeds 1",
    "sparse": "--model wan2.1 --block 1280 --ranks 8 --steps 2 --layers 2",
    "trace": ".",
}


def test_every_report_fits_a_phone_a_desk_and_a_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of 390 and 1,280 pixels, and 80 columns."""
    shown, checked = list[Report](), measured()
    monkeypatch.chdir(TracedRun(OWN).write(tmp_path))
    monkeypatch.setattr("bascule.cli.command.publish", lambda _, report: shown.append(report))
    for command, words in KINDS.items():
        main([command, *words.split()])
    reports = dict(zip(KINDS, shown, strict=True)) | {
        "bench": reported(),
        "calibrate": calibrate.report_of(calibrated("mine", noise=0.02), []),
        "doctor": doctor.report_of(plain_values(DoctorOptions(), checked, found(checked))),
    }
    pages: dict[str, str] = {}
    for kind, report in reports.items():
        pages[kind] = render(report, f"bascule {kind}").replace("<details>", "<details open>")
        assert len(pages[kind].encode()) < 10**6, kind
        text = StringIO()
        report.show(RichConsole(file=text, width=80))
        assert "…" not in text.getvalue(), text.getvalue()
        lines = text.getvalue().splitlines()
        assert all(len(line) <= 80 for line in lines if line[:1] in "┃│"), text.getvalue()
    assert not (faults := faults_of_layout(pages, (390, 1280), tmp_path / "profile")), "\n".join(
        faults
    )
