"""Line charts as SVG text, for pages that need no network and no plotting library. Colours come from the page's CSS."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import accumulate

Point = tuple[float, float]

_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 24  # room around the plot for the axes, in SVG units
_MARK_ROOM = 22  # more room on top where events are named
_MARK_APART = 3  # between the lines of events at one step
_LOG_RANGE = 30  # a wider spread of positive values is drawn on a logarithmic axis
_CHARACTER = 6.2  # about the width of one character of a label


@dataclass(frozen=True)
class Line:
    """One curve. ``style`` names a CSS class: ``raw`` is faint, ``main`` strong, ``held`` another colour, ``s0`` a run's."""

    points: Sequence[Point]
    style: str = "main"
    dots: bool = False  # a circle at each point


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step: a vertical line with a label."""

    step: float
    label: str
    style: str = "stop"
    detail: str = ""


@dataclass(frozen=True)
class Chart:
    """Curves over steps, drawn ``width`` by ``height`` units large."""

    lines: Sequence[Line]
    marks: Sequence[Mark] = field(default=())
    width: int = 506
    height: int = 170
    from_zero: bool = False

    def svg(self) -> str:
        """The chart, or a sentence where no curve has a finite point."""
        lines = [replace(line, points=finite(line.points)) for line in self.lines]
        points = [point for line in lines for point in line.points]
        if not points:
            return '<p class="sub">No values yet.</p>'
        top = _TOP + (_MARK_ROOM if any(m.label for m in self.marks) else 0)
        steps = [x for x, _ in points] + [m.step for m in self.marks]
        x_axis = Axis(min(0.0, *steps), max(1.0, *steps), _LEFT, self.width - _RIGHT, log=False)
        values = [y for _, y in points]
        low, high = min(values), max(values)
        log = not self.from_zero and low > 0 and high / low > _LOG_RANGE
        if self.from_zero:
            low = min(low, 0.0)
        y_axis = Axis.around(low, high, self.height - _BOTTOM, top, log)
        body = [self._grid(x_axis, y_axis), *(self._mark(*placed, top) for placed in self._placed(x_axis))]
        drawn = [(line, *_places(line, x_axis, y_axis)) for line in lines if line.points]
        for i, (line, points, places) in enumerate(drawn):
            later = drawn[i + 1 :] if line.style != "raw" else []  # which is faint and lies under its smoothed one
            covers = sum(_coincide(places, others) for _, _, others in later)
            body.append(_curve(line, points, places, covers))
        return f'<svg viewBox="0 0 {self.width} {self.height}" role="img">{"".join(body)}</svg>'

    def _grid(self, x_axis: "Axis", y_axis: "Axis") -> str:
        parts = []
        for value in y_axis.ticks(4):
            y = y_axis.place(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{short(value)}</text>')
        for value in x_axis.ticks(8 if self.width > 800 else 4):
            x = x_axis.place(value)
            parts.append(f'<text x="{x:.1f}" y="{self.height - 6}" text-anchor="middle">{short(value)}</text>')
        return "".join(parts)

    def _placed(self, x_axis: "Axis") -> list[tuple[Mark, float, float | None]]:
        """Each mark with the place of its line, beside one at the same step, and where its label begins, None where that
        would cover the one before.
        """
        placed: list[tuple[Mark, float, float | None]] = []
        free_from, last_x = float(_LEFT), -math.inf
        for mark in sorted(self.marks, key=lambda m: m.step):
            x = last_x = max(x_axis.place(mark.step), last_x + _MARK_APART)
            length = _CHARACTER * len(mark.label)
            start = min(x, self.width - _RIGHT - length)
            if start >= free_from:
                placed.append((mark, x, start))
                free_from = start + length + 10
            else:
                placed.append((mark, x, None))
        return placed

    def _mark(self, mark: Mark, x: float, start: float | None, top: float) -> str:
        title = f"<title>{escape(mark.detail or mark.label)}</title>"
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6:.1f}" y2="{self.height - _BOTTOM}"/>'
        label = "" if start is None else f'<text x="{start:.1f}" y="{top - 12:.1f}">{escape(mark.label)}</text>'
        return f'<g class="mark {mark.style}">{title}{line}{label}</g>'


@dataclass(frozen=True)
class Axis:
    """A range of values on a range of SVG units."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def around(cls, low: float, high: float, start: float, end: float, log: bool) -> "Axis":
        """An axis with a little air around the values."""
        if log:
            return cls(low / 1.2, high * 1.2, start, end, log)
        air = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
        return cls(low if low == 0 else low - air, high + air, start, end, log)

    def place(self, value: float) -> float:
        """Where a value lies."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, number: int) -> list[float]:
        """About ``number`` round values."""
        if self.log:
            exponents = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            factors = (1,) if len(exponents) > 2 else (1, 2, 5)
            every = range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            values = [f * 10.0**e for e in every for f in factors]
            return [v for v in values if self.low <= v <= self.high]
        rough = (self.high - self.low) / number
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]


def wide(chart: Chart) -> str:
    """A chart as wide as the page, and another for narrow screens, on which its text could not be read."""
    return (
        f'<div class="wide">{replace(chart, width=1038, height=320).svg()}</div><div class="narrow">{chart.svg()}</div>'
    )


def _places(line: Line, x_axis: Axis, y_axis: Axis) -> tuple[list[Point], list[Point]]:
    points = thin(line.points, int(x_axis.end - x_axis.start))
    return points, [(x_axis.place(x), y_axis.place(y)) for x, y in points]


def _coincide(one: Sequence[Point], other: Sequence[Point]) -> bool:
    """Whether most of the shorter curve lies on the other one."""
    first, second = ({(round(x), round(y)) for x, y in places} for places in (one, other))
    return 2 * len(first & second) > min(len(first), len(second))


def _curve(line: Line, points: Sequence[Point], places: Sequence[Point], covers: int) -> str:
    """A curve; wider where ``covers`` later ones lie on it, so that it shows beside them."""
    wider = f' style="stroke-width:{1.8 + 4 * covers:g}px"' if covers else ""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dots, radius = "", 3.5 + 2 * covers
    if line.dots or len(places) == 1:
        dots = "".join(
            f'<circle class="{line.style}" cx="{px:.1f}" cy="{py:.1f}" r="{radius:g}"><title>step {x:g}: {y:.4g}</title></circle>'
            for (px, py), (x, y) in zip(places, points, strict=True)
        )
    return f'<path class="curve {line.style}" d="{path}"{wider}/>{dots}'


def finite(points: Sequence[Point]) -> list[Point]:
    """The points that can be drawn."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thin(points: Sequence[Point], columns: int) -> list[Point]:
    """At most two points a column, its lowest and its highest, in their order: no spike is lost."""
    if len(points) <= 2 * columns:
        return list(points)
    kept: list[Point] = []
    for column in range(columns):
        part = points[column * len(points) // columns : (column + 1) * len(points) // columns]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def smooth(points: Sequence[Point], span: int) -> list[Point]:
    """The mean of about ``span`` points around each one, so that the curve does not lag behind; fewer at the ends."""
    drawn = finite(points)
    sums = [0.0, *accumulate(y for _, y in drawn)]
    half = max(1, span // 2)
    smoothed = []
    for i, (x, _) in enumerate(drawn):
        first, last = max(0, i - half), min(len(drawn), i + half + 1)
        smoothed.append((x, (sums[last] - sums[first]) / (last - first)))
    return smoothed


def short(value: float) -> str:
    """A tick's label: 1200 as 1.2k, 0.00005 as 5e-5."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    if value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.4g}"
