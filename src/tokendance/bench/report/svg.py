"""Plots as SVG text: lines and points over numbers, and horizontal bars.

Colours are names of the page's CSS variables, so that a plot follows the page into the dark. Plots
are 400 units wide, about what a phone shows, so that their text stays readable there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

WIDTH = 400
_RIGHT = 46
_TEXT = 12.0
_LETTER = 6.6  # width of a letter, about
_KEYS = {True: "line", False: "dots"}  # of a series with and without a line


class Point(NamedTuple):
    """low, high: the range over repetitions, drawn as a whisker. text: stands beside the point."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    text: str = ""


class Series(NamedTuple):
    """dashed: for lines that nobody measured here."""

    name: str
    colour: str
    points: Sequence[Point]
    line: bool = True
    marks: bool = True
    dashed: bool = False


class Mark(NamedTuple):
    """A value to compare with: a line across the plot, or a band up to `until`."""

    name: str
    colour: str
    value: float
    until: float | None = None


class Axis(NamedTuple):
    """zero: begin at nought, unless `log`."""

    label: str
    log: bool = False
    zero: bool = True


class Bar(NamedTuple):
    """One bar. text: shown at its end, by default the value."""

    name: str
    colour: str
    value: float
    low: float | None = None
    high: float | None = None
    text: str = ""


class Group(NamedTuple):
    """Bars under one heading."""

    label: str
    bars: Sequence[Bar]


def short(value: float) -> str:
    """Three digits that count, or all of a whole number."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    digits = max(0, 2 - floor(log10(abs(value)))) if value else 0
    text = f"{value:.{min(digits, 9)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class Scale:
    """Values onto a stretch of the plot."""

    def __init__(self, values: Sequence[float], axis: Axis, start: float, end: float) -> None:
        low, high = min(values), max(values)
        self._log = axis.log and low > 0
        if self._log:
            low, high = log10(low), log10(high)
            pad = max(0.08, (high - low) * 0.08)
            low, high = low - pad, high + pad
        else:
            low = min(0.0, low) if axis.zero else low - (high - low or 1) * 0.06
            high += (high - low or 1) * 0.06
        self._low, self._high, self._start, self._end = low, high, start, end

    def __call__(self, value: float) -> float:
        value = log10(value) if self._log else value
        share = (value - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        if self._log:
            powers = range(floor(self._low), ceil(self._high) + 1)
            steps = (1, 2, 5) if self._high - self._low < 2.2 else (1,)
            marks = [step * 10.0**power for power in powers for step in steps]
            return [m for m in marks if self._low <= log10(m) <= self._high]
        raw = (self._high - self._low) / 4
        power = 10.0 ** floor(log10(raw))
        step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw)
        first = ceil(self._low / step)
        return [round(i * step, 12) for i in range(first, floor(self._high / step) + 1)]


def lines(
    series: Sequence[Series], x: Axis, y: Axis, marks: Sequence[Mark] = (), height: int = 250
) -> str:
    """Points over a number, with whiskers, the last value of each line, and a legend."""
    points = [point for one in series for point in one.points]
    values = [v for p in points for v in (p.y, p.low, p.high) if v is not None]
    values += [v for m in marks for v in (m.value, m.until) if v is not None]
    bottom = height - 42
    rise = Scale(values, y, bottom, 24)
    left = 12 + _LETTER * max(len(short(t)) for t in rise.ticks())
    run = Scale([p.x for p in points], x, left, WIDTH - _RIGHT)
    parts = [*_across(marks, rise, left), *_ticks_y(rise, left), *_ticks_x(run, series, bottom)]
    for one in series:
        parts += _drawn(one, run, rise)
    parts += [*_ends(series, run, rise), *_beside(series, run, rise)]
    parts.append(_text(left, 13, y.label, "start", "axis"))
    parts.append(_text((left + WIDTH - _RIGHT) / 2, height - 4, x.label, "middle", "axis"))
    names = [(s.name, s.colour, "dashed" if s.dashed else _KEYS[s.line]) for s in series]
    return _figure(parts, height, names, marks, f"{y.label} over {x.label}")


def bars(groups: Sequence[Group], x: Axis, marks: Sequence[Mark] = ()) -> str:
    """Horizontal bars; every group has its heading above it."""
    every = [bar for group in groups for bar in group.bars]
    values = [v for b in every for v in (b.value, b.high) if v is not None]
    values += [v for m in marks for v in (m.value, m.until) if v is not None]
    room = _LETTER * max(len(bar.text or short(bar.value)) for bar in every) + 8
    run = Scale(values, x, 5, WIDTH - room)
    parts, top = [], 6.0
    for group in groups:
        if group.label:
            top += 14
            parts.append(_text(5, top, group.label, "start"))
        top += 5
        for bar in group.bars:
            parts += _bar(bar, run, top)
            top += 17
        top += 5
    parts = [*_upright(marks, run, top), *parts]
    for tick in run.ticks():
        parts.append(_text(run(tick), top + 14, short(tick), "middle", "tick"))
    parts.append(_text(WIDTH / 2, top + 32, x.label, "middle", "axis"))
    names = [(name, colour, "bar") for name, colour in dict.fromkeys((b[0], b[1]) for b in every)]
    return _figure(parts, round(top + 38), names, marks, x.label)


def _bar(bar: Bar, run: Scale, top: float) -> Iterable[str]:
    start, end = run(0), run(bar.value)
    title = f"<title>{escape(bar.name)}: {short(bar.value)}</title>"
    yield (
        f'<rect class="bar" style="--c:var(--{bar.colour})" x="{start:.1f}" y="{top:.1f}" '
        f'width="{max(1, end - start):.1f}" height="13" rx="2">{title}</rect>'
    )
    if bar.low is not None and bar.high is not None:
        middle, low, high = top + 6.5, run(bar.low), run(bar.high)
        yield f'<path class="range" d="M{low:.1f} {middle}H{high:.1f}"/>'
        end = max(end, high)
    yield _text(end + 4, top + 11, bar.text or short(bar.value), "start")


def _drawn(one: Series, run: Scale, rise: Scale) -> Iterable[str]:
    style = f'style="--c:var(--{one.colour})"'
    if one.line and one.points:
        path = "M" + "L".join(f"{run(p.x):.1f} {rise(p.y):.1f}" for p in one.points)
        yield f'<path class="{"dashed" if one.dashed else "line"}" {style} d="{path}"/>'
    for p in one.points if one.marks else ():
        at, height = run(p.x), rise(p.y)
        if p.low is not None and p.high is not None:
            path = f"M{at:.1f} {rise(p.low):.1f}V{rise(p.high):.1f}"
            yield f'<path class="whisker" {style} d="{path}"/>'
        title = f"<title>{escape(one.name)}: {short(p.y)} at {short(p.x)}</title>"
        yield f'<circle class="dot" {style} cx="{at:.1f}" cy="{height:.1f}" r="4">{title}</circle>'


def _beside(series: Sequence[Series], run: Scale, rise: Scale) -> Iterable[str]:
    """Texts of points, except where one would cover another."""
    taken: list[tuple[float, float]] = []
    for p in (p for one in series for p in one.points if p.text):
        x, y = run(p.x) + 6, rise(p.y) + 4
        if all(abs(x - a) > _LETTER * (len(p.text) + 1) or abs(y - b) > _TEXT for a, b in taken):
            taken.append((x, y))
            yield _text(x, y, p.text, "start", "tick")


def _ends(series: Sequence[Series], run: Scale, rise: Scale) -> Iterable[str]:
    """The last value of each measured line, moved apart where they would overlap."""
    ends = sorted(
        ((rise(s.points[-1].y), s) for s in series if s.line and not s.dashed and s.points),
        key=lambda pair: pair[0],
    )
    free = 0.0
    for height, one in ends:
        free = max(height + 4, free)
        last = one.points[-1]
        yield _text(run(last.x) + 7, free, short(last.y), "start", "value", one.colour)
        free += _TEXT


def _across(marks: Sequence[Mark], rise: Scale, left: float) -> Iterable[str]:
    width = WIDTH - _RIGHT - left
    for mark in marks:
        style, at = f'style="--c:var(--{mark.colour})"', rise(mark.value)
        if mark.until is None:
            yield f'<path class="mark" {style} d="M{left:.1f} {at:.1f}h{width:.1f}"/>'
        else:
            top = rise(mark.until)
            yield (
                f'<rect class="band" {style} x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{at - top:.1f}"/>'
            )


def _upright(marks: Sequence[Mark], run: Scale, bottom: float) -> Iterable[str]:
    for tick in run.ticks():
        yield f'<path class="grid" d="M{run(tick):.1f} 8V{bottom:.1f}"/>'
    for mark in marks:
        style, at = f'style="--c:var(--{mark.colour})"', run(mark.value)
        if mark.until is None:
            yield f'<path class="mark" {style} d="M{at:.1f} 8V{bottom:.1f}"/>'
        else:
            yield (
                f'<rect class="band" {style} x="{at:.1f}" y="8" '
                f'width="{run(mark.until) - at:.1f}" height="{bottom - 8:.1f}"/>'
            )


def _ticks_y(rise: Scale, left: float) -> Iterable[str]:
    for tick in rise.ticks():
        at = rise(tick)
        yield f'<path class="grid" d="M{left:.1f} {at:.1f}H{WIDTH - _RIGHT}"/>'
        yield _text(left - 5, at + 4, short(tick), "end", "tick")


def _ticks_x(run: Scale, series: Sequence[Series], bottom: float) -> Iterable[str]:
    """At the values themselves where lines have few of them."""
    found = sorted({p.x for one in series if one.line for p in one.points})
    last = -1000.0
    for tick in found if 0 < len(found) <= 8 else run.ticks():
        text = short(tick)
        if run(tick) - last > _LETTER * (len(text) + 1):
            last = run(tick)
            yield _text(last, bottom + 16, text, "middle", "tick")


def _text(x: float, y: float, text: str, anchor: str, kind: str = "label", colour: str = "") -> str:
    style = f' style="--c:var(--{colour})"' if colour else ""
    return (
        f'<text class="{kind}"{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _figure(
    parts: Iterable[str],
    height: int,
    names: Sequence[tuple[str, str, str]],
    marks: Sequence[Mark],
    alt: str,
) -> str:
    keys = [*names, *((m.name, m.colour, "mark" if m.until is None else "band") for m in marks)]
    legend = "".join(
        f'<li style="--c:var(--{colour})"><i class="key {kind}"></i>{escape(name)}</li>'
        for name, colour, kind in keys
        if name
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(alt)}">'
        + "".join(parts)
        + f'</svg><ul class="legend">{legend}</ul></figure>'
    )
