"""The page around the plots: one HTML file that asks nobody for anything."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from tokendance.bench.report.model import Figure, Glance, Table, load

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")

INTRO = (
    "Ours is measured on the machines named at the end, the paper's on an A100 with 80 GB and "
    "models of 7 and 14 billion parameters: compare ratios, not seconds. Bars and points are "
    "medians, whiskers the range over repetitions. Red is the paper, grey is a bound or a target."
)


class Section(NamedTuple):
    """A figure, or a note where there is none."""

    title: str
    figure: Figure | None = None
    note: str = ""
    files: str = ""

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def page(sections: Sequence[Section], runs: Table) -> str:
    """The whole document."""
    glance = [(s, row) for s in sections if s.figure for row in s.figure.glance]
    body = [
        "<header><h1>TokenDance, measured</h1>",
        f"<p>{escape(INTRO)}</p></header>",
        _glance(glance),
        *map(_section, sections),
        '<section id="runs"><h2>Where the figures come from</h2>',
        _table(runs),
        "</section>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>TokenDance, measured</title><style>\n{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def sources(paths: Sequence[Path]) -> Table:
    """Machine, versions, day and command of every result file that can be read."""
    rows = []
    for path in paths:
        try:
            run = load(path)
        except (OSError, ValueError):
            continue
        rows.append(
            (
                path.name,
                str(run.get("date", "not recorded")),
                f"`{run.get('command', '')}`",
                _machine(run.get("machine", {})),
                _versions(run),
            )
        )
    return Table(("file", "day", "command", "machine", "versions"), rows)


def _machine(machine: Mapping[str, Any]) -> str:
    name = machine.get("processor") or machine.get("cpu", "")
    load_ = f", load {machine['load']} at the end" if "load" in machine else ""
    return f"{name}, {machine.get('cores', '?')} cores{load_}"


def _versions(run: Mapping[str, Any]) -> str:
    machine = run.get("machine", {})
    found = run.get("versions") or {k: machine[k] for k in ("python", "vllm") if k in machine}
    model = run.get("model") or Path(str(machine.get("model", ""))).name
    texts = [f"{name} {version}" for name, version in found.items()]
    return ", ".join([*([model] if model else []), *texts])


def _glance(rows: Sequence[tuple[Section, Glance]]) -> str:
    """The overview; what is behind the paper is marked as plainly as what is ahead."""
    words = {True: ("yes", "reached"), False: ("no", "not reached"), None: ("", "")}
    lines = []
    for section, row in rows:
        kind, word = words[row.holds]
        verdict = f'<td class="verdict {kind}">{word}</td>'
        what = f'<a href="#{section.anchor}">{escape(row.what)}</a>'
        cells = "".join(
            f'<td data-name="{name}">{escape(cell)}</td>'
            for name, cell in (("paper", row.paper), ("ours", row.ours), ("bound", row.bound))
        )
        lines.append(f"<tr><th>{what}</th>{cells}{verdict}</tr>")
    if not lines:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("", "paper", "ours", "bound", "paper's value"))
    return (
        '<section id="glance"><h2>At a glance</h2><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def _section(section: Section) -> str:
    head = f'<section id="{section.anchor}"><h2>{escape(section.title)}</h2>'
    figure = section.figure
    if figure is None:
        return f'{head}<p class="note">{_code(section.note)}</p></section>'
    tables = "".join(map(_table, figure.tables))
    return (
        f'{head}<p class="read">{_code(figure.read)}</p>'
        f'<div class="plots">{"".join(figure.plots)}</div>'
        f"<dl><dt>Paper</dt><dd>{_code(figure.paper)}</dd>"
        f"<dt>Where we lose</dt><dd>{_code(figure.lose)}</dd></dl>"
        f"<details><summary>Values ({escape(section.files)})</summary>{tables}</details></section>"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{_code(cell)}</th>" for cell in table.header)
    body = "".join(
        "<tr>" + "".join(f"<td>{_code(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _code(text: str) -> str:
    """Escaped, with `...` as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
