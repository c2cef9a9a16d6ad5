"""`tokendance bench report` and `quick`: what the page says, and what a bad file costs."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_samples
from hypothesis import given
from hypothesis import strategies as st

from tokendance.bench.commands import quick
from tokendance.bench.report import build
from tokendance.bench.report.figures import SPECS, collective, store
from tokendance.bench.report.page import Section
from tokendance.bench.report.svg import (
    Axis,
    Bar,
    Group,
    Mark,
    Point,
    Scale,
    Series,
    bars,
    lines,
    short,
)
from tokendance.cli import main
from tokendance.cli.bench import COMMANDS

COMMITTED = Path(__file__).parents[2] / "benchmarks/results"


class Page(HTMLParser):
    """Ids, links, and tags left open; whatever would make a browser ask somebody."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.open: list[str] = []
        self.asks: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.ids.add(known.get("id") or "")
        if tag == "a":
            self.links.add(known["href"] or "")
        self.asks += [tag] if {"src", "srcset", "data"} & known.keys() or tag == "link" else []
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def figures(text: str) -> list[ET.Element]:
    """The plots, as XML trees; raises ParseError for anything a strict reader refuses."""
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = report_samples.write(tmp_path / "results")
    for path in COMMITTED.glob("*.json"):
        if not (folder / path.name).exists():
            (folder / path.name).write_text(path.read_text())
    return folder


def test_the_page_is_whole_and_asks_nobody(results: Path) -> None:
    text = build(results)
    page = Page(text)
    assert page.open == [] and page.asks == []
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert page.links and all(link.removeprefix("#") in page.ids for link in page.links)
    assert 'class="note"' not in text
    assert all(Section(spec.title).anchor in page.ids for spec in SPECS)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert len(figures(text)) >= len(SPECS)


def test_every_plot_stays_within_its_frame(results: Path) -> None:
    for svg in figures(build(results)):
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        for text in svg.iter("text"):
            assert 0 <= float(text.attrib["x"]) <= width
            assert 0 <= float(text.attrib["y"]) <= height
        for dot in svg.iter("circle"):
            assert 0 <= float(dot.attrib["cx"]) <= width
            assert 0 <= float(dot.attrib["cy"]) <= height
        for bar in svg.iter("rect"):
            assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
        assert {t.attrib["class"] for t in svg.iter("text")} >= {"axis", "tick"}


def test_a_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    text = build(tmp_path)
    notes = re.findall(r'class="note">(.*?)</p>', text)
    assert len(notes) == len(SPECS)
    named = set(re.findall(r"tokendance bench ([a-z]+)", " ".join(notes)))
    assert named >= {"capacity", "collective", "storage", "restore", "churn", "backends"}
    assert "tokendance demo" in text
    assert {s.command.split()[0] for s in SPECS if s.command} <= {*COMMANDS, "pressure"}


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"rows": []}', '{"rows": [{}]}'])
def test_a_bad_file_costs_its_section_and_no_more(results: Path, content: str) -> None:
    (results / "collective.json").write_text(content)
    text = build(results)
    (note,) = re.findall(r'class="note">(.*?)</p>', text)
    assert "collective.json is not what this version writes" in note
    assert Page(text).open == []


def test_a_prefill_file_may_hold_one_half_of_it(results: Path) -> None:
    whole = report_samples.prefill()
    for kept in (("paper", "paper_command"), ("shape", "cold", "warm", "repetitions")):
        half = {"command": "c", **{name: whole[name] for name in kept}}
        (results / "prefill.json").write_text(json.dumps(half))
        assert 'class="note"' not in build(results)


def test_names_in_files_are_text_and_not_markup(results: Path) -> None:
    run = report_samples.similarity()
    run["rows"][0]["trace"] = "<script>alert(1)</script>&"
    (results / "similarity.json").write_text(json.dumps({"command": "<b>", **run}))
    text = build(results)
    assert "<script>" not in text and "&lt;script&gt;" in text and "<b>" not in text
    assert Page(text).open == []


def test_the_paper_stands_beside_ours_and_losses_are_said(results: Path) -> None:
    text = build(results)
    for paper in ("2.57x", "11.2x / 17.5x", "1.3-2.6x", "3 of 8", "91-97%", "up to 2.7x"):
        assert paper in text
    slow = report_samples.collective()
    for row in slow["rows"]:
        row["over_plain"] = report_samples.spread(0.5)
    assert "slower than plain prefill with 3 agents (0.50x)" in collective.collective([slow]).lose
    restore = json.loads((COMMITTED / "restore.json").read_text())
    restore["rows"][0]["fused_over_dense"] = 0.5
    assert "With 1 mirrors fused restore is slower than dense" in store.restore([restore]).lose


@given(
    st.lists(st.floats(1e-4, 1e6), min_size=1, max_size=6),
    st.booleans(),
)
def test_scales_keep_order_and_their_ticks_lie_inside(values: list[float], log: bool) -> None:
    scale = Scale(values, Axis("", log=log), 10, 300)
    at = [scale(v) for v in sorted(values)]
    assert at == sorted(at) and all(10 <= a <= 300 for a in at)
    ticks = scale.ticks()
    assert len(ticks) >= 1 or log
    assert all(10 - 1e-6 <= scale(t) <= 300 + 1e-6 for t in ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2.0, "2"), (1.508, "1.51"), (12.783, "12.8"), (0.00432, "0.00432"), (128, "128")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_plots_show_ranges_marks_and_values() -> None:
    drawn = lines(
        [Series("a", "ours", [Point(1, 2, 1, 3), Point(2, 4)])],
        Axis("agents"),
        Axis("seconds"),
        [Mark("target", "bound", 5)],
    )
    assert drawn.count('class="whisker"') == 1 and drawn.count('class="mark"') == 1
    assert ">4</text>" in drawn and "agents" in drawn and "target" in drawn
    group = Group("trace", [Bar("x", "ours", 3.0, 2.0, 4.0, "3.00x"), Bar("y", "c1", 1.5)])
    drawn = bars([group], Axis("times"), [Mark("paper", "paper", 1, 2)])
    assert drawn.count('class="bar"') == 2 and drawn.count('class="range"') == 1
    assert ">3.00x</text>" in drawn and ">1.5</text>" in drawn and 'class="band"' in drawn


def test_the_command_writes_beside_the_results(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "report", "--results", str(results)]) == 0
    assert (results / "report.html").read_text() == build(results)
    assert main(["bench", "report", "--results", str(results / "none")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_quick_knows_every_measurement() -> None:
    known = {name for lane in quick.LANES for name in lane}
    assert set(COMMANDS) - {"export", "report", "quick"} <= known
    for name in known & set(COMMANDS):
        words = quick._words(name, Path("m"), Path("o"))
        assert words[0] == name and "--out" in words and ("--quick" in words or "1" in words)


def test_quick_goes_on_after_a_failure_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    (model / "config.json").write_text("{}")
    small = ["restore", "--quick", "--rows", "64", "--shape", "2", "2", "16"]
    monkeypatch.setattr(
        quick,
        "_words",
        lambda name, model, out: (
            [*small, "--out", str(out / "restore.json")]
            if name == "restore"
            else ["storage", str(tmp_path / "none.jsonl"), "--model", str(tmp_path)]
        ),
    )
    words = ["bench", "quick", "--model", str(model), "--out", str(out)]
    assert main([*words, "--only", "storage", "restore"]) == 1
    said = capsys.readouterr().out
    assert "failed: storage" in said and "status 1" in said and "there is no model" in said
    text = (out / "report.html").read_text()
    assert "`" not in re.findall(r'class="note">(.*?)</p>', text)[0]
    assert (
        "<code>tokendance bench storage</code> failed: status 1" in text
        and "times as fast as dense" in text
    )


def test_quick_stops_what_takes_too_long_and_all_of_it(tmp_path: Path) -> None:
    """A command that waits for a child of its own for ever: both end, and the next one runs."""
    child = "import time; time.sleep(600)"
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}])
print(child.pid, flush=True)
child.wait()
"""
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=output, start_new_session=True
        )
    job = quick.Job("x", log, process, time.monotonic(), time.monotonic() + 600)
    while not log.read_text().strip():
        time.sleep(0.05)
    assert job.outcome() is None
    late = dataclasses.replace(job, until=0.0)
    assert late.outcome() == "stopped: the time is up"
    late.end()
    assert process.returncode == -signal.SIGKILL
    state = Path(f"/proc/{int(log.read_text())}/stat")
    for _ in range(200):
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the child is still there")
