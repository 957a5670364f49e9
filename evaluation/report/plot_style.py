"""The look of the report's plots: inline SVG whose colours follow the page's light and dark themes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

# Colours that occur nowhere else; each becomes a CSS variable of the page.
INK, FAINT, GRID = "#010a01", "#010a02", "#010a03"
SERIES = ("#010a11", "#010a12", "#010a13", "#010a14", "#010a15", "#010a16")
_VARIABLES = {
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    GRID: "var(--grid)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, 1)},
}
_LONGEST_IN_COLUMNS = 32
"""Letters of a name; a longer one, such as an address, has a row of the legend for itself."""
_LEGEND_COLUMNS = 3
_LEGEND_ROW, _LEGEND_ROW_PT = 0.065, 18.7
"""Height of a row of a legend, as a part of the figure's and in points."""
_SIZE_IN = 7.2, 4.0
_FONT_PT, _TICK_PAD_PT = 11, 6
_WIDER = 1.1  # so much wider a page's own font may be
_EDGE = 0.002
"""Part of the figure's width that is left free beside the labels of the heights."""
_LABEL_GAP_PT = 13.0
_LABEL_WIDTH_PT = 85.0
_ROOM_PX, _DIGIT_PX, _SMALL_PT = 14.0, 7.0, 9
"""Height of the text at a point, width of each of its letters, and size of its font."""
_ABOVE_LEFT, _BELOW_RIGHT, _BELOW_LEFT, _ABOVE_RIGHT = (-6, 4), (6, -12), (-6, -12), (6, 4)
"""Where such a text begins or ends, in points."""
_LOG_ABOVE = 8.0
"""Largest over smallest value from which an axis is logarithmic."""
_LOGARITHMIC = " (logarithmic)"
_FULL_DECADES, _MANY_DECADES = 2.6, 4.5
"""Decades from which an axis has ticks at 1 and 3, and at 1 only, in place of 1, 2 and 5."""

Point = tuple[float, float]


def draw_svg(name: str, draw: Callable[[Figure, Axes], None]) -> str:
    """Draw into a frame of the report's look."""
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": name,
            "font.size": _FONT_PT,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": GRID,
            "xtick.color": FAINT,
            "ytick.color": FAINT,
        }
    ):
        figure = Figure(figsize=_SIZE_IN)
        axes = figure.add_axes((0.075, 0.13, 0.76, 0.785))
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(True, color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, pad=_TICK_PAD_PT)
        draw(figure, axes)
        _mark_logarithms(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    return _inline(buffer.getvalue(), name)


def _mark_logarithms(axes: Axes) -> None:
    """Mark each axis that is logarithmic as such."""
    if axes.get_xscale() == "log" and axes.get_xlabel():
        axes.set_xlabel(f"{axes.get_xlabel()}{_LOGARITHMIC}")
    title = axes.get_title(loc="left")
    if axes.get_yscale() == "log" and title:
        next(each for each in axes.findobj(Text) if each.get_text() == title).set_text(f"{title}{_LOGARITHMIC}")


def title_height(axes: Axes, text: str) -> None:
    """Name the vertical axis above it, where it reads without turning one's head."""
    axes.set_title(text, loc="left", x=_make_room_for_ticks(axes), pad=11, fontsize=_FONT_PT, color=INK)


def _make_room_for_ticks(axes: Axes) -> float:
    """Move the plot's left end so far that the figure holds the labels of its heights; gives where its title begins."""
    box, width_pt = axes.get_position(), 72 * _SIZE_IN[0]
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.yaxis.get_majorticklocs() if low <= tick <= high]
    labels = axes.yaxis.get_major_formatter().format_ticks(ticks)
    longest_pt = max((TextPath((0, 0), each, size=_FONT_PT).get_extents().width for each in labels if each), default=0)
    left = max(box.x0, _EDGE + (_WIDER * longest_pt + _TICK_PAD_PT) / width_pt)
    axes.set_position((left, box.y0, box.x1 - left, box.height))
    return float((_EDGE - left) / (box.x1 - left))


def legend_above(axes: Axes, title: str, names: Sequence[str]) -> None:
    """Name the lines between the title of the vertical axis and the plot, where no line runs."""
    columns = 1 if max(map(len, names), default=0) > _LONGEST_IN_COLUMNS else min(len(names), _LEGEND_COLUMNS)
    rows = math.ceil(len(names) / max(1, columns))
    axes.set_position((0.095, 0.13, 0.865, 0.785 - _LEGEND_ROW * rows))
    handles = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")] or axes.get_lines()
    axes.legend(
        handles=handles[: len(names)],
        labels=list(names),
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncol=columns,
        frameon=False,
        fontsize=10,
        columnspacing=1.4,
        handlelength=2.4,
    )
    x, pad = _make_room_for_ticks(axes), 11 + _LEGEND_ROW_PT * rows
    axes.set_title(title, loc="left", x=x, pad=pad, fontsize=_FONT_PT, color=INK)


def scale(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Scale an axis of milliseconds: logarithmic where the values span much, with as many ticks as have room."""
    low, high = min(values), max(values)
    set_scale = axes.set_xscale if which == "x" else axes.set_yscale
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    axis = axes.xaxis if which == "x" else axes.yaxis
    if low > 0 and high / low >= _LOG_ABOVE:
        set_scale("log")
        set_limits(low / 1.25, high * 1.35)
        decades = math.log10(high / low)
        subs = (1.0, 2.0, 5.0) if decades < _FULL_DECADES else (1.0, 3.0) if decades < _MANY_DECADES else (1.0,)
        axis.set_major_locator(LogLocator(base=10, subs=subs))
        axis.set_minor_locator(NullLocator())
    else:
        set_limits(0, high * 1.15 or 1.0)
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def label_lines(figure: Figure, axes: Axes, ends: Sequence[tuple[str, Point]]) -> None:
    """Name each line right of its last point; labels that would overlap move up.

    A line that ends before the others is named above its last point.

    Args:
        figure: with everything drawn.
        axes: of it.
        ends: name and last point of each line, in the order of SERIES.
    """
    figure.canvas.draw()
    to_points = 72 / figure.dpi
    ordered = sorted(
        (*(axes.transData.transform(end) * to_points), number, name) for number, (name, end) in enumerate(ends)
    )
    placed: list[tuple[float, float]] = []
    for x, y, number, name in sorted(ordered, key=lambda item: item[1]):
        height = y
        gap = _LABEL_GAP_PT * len(name.splitlines())
        for other_x, other_height in placed:
            if abs(x - other_x) < _LABEL_WIDTH_PT and height < other_height + gap:
                height = other_height + gap
        placed.append((x, height))
        is_rightmost = x >= max(item[0] for item in ordered) - 1
        axes.annotate(
            name,
            ends[number][1],
            xytext=(9, height - y) if is_rightmost else (0, 12),
            textcoords="offset points",
            color=SERIES[number % len(SERIES)],
            ha="left" if is_rightmost else "center",
            va="center",
            fontsize=9 if "\n" in name else 10.5,
            annotation_clip=False,
        )


def label_points(figure: Figure, axes: Axes, labels: Sequence[tuple[str, Point]], is_falling: bool = False) -> None:
    """Write a text above and left of each point, or below and right of it where a line is in the way.

    Along a falling line the texts stand above it at the left, and below it at the right. A label without room is left
    out.
    """
    figure.canvas.draw()
    lines = [line.get_path().transformed(axes.transData) for line in axes.get_lines()]
    placed: list[Bbox] = []
    for text, point in labels:
        x, y = axes.transData.transform(point)
        is_left = axes.transAxes.inverted().transform((x, y))[0] > 0.5
        corners = ((_BELOW_LEFT if is_left else _ABOVE_RIGHT),) if is_falling else (_ABOVE_LEFT, _BELOW_RIGHT)
        free = list[tuple[bool, Point, Bbox]]()  # whether a line crosses it, where it begins or ends, and the place
        for corner in corners:
            box = _box_at(figure, (x, y), corner, len(text))
            if box.y0 > axes.bbox.y0 and not any(map(box.overlaps, placed)):  # not on the axis, nor on another text
                free.append((any(line.intersects_bbox(box, filled=False) for line in lines), corner, box))
        if not free:
            continue
        _, offset, box = min(free, key=lambda each: each[0])
        placed.append(box)
        side = "right" if offset[0] < 0 else "left"
        axes.annotate(text, point, xytext=offset, textcoords="offset points", ha=side, color=FAINT, fontsize=_SMALL_PT)


def _box_at(figure: Figure, place: Point, corner: Point, letters: int) -> Bbox:
    """Return where a text lies that stands at a corner of a place, with a letter's room beside it, in pixels."""
    to_px, width = figure.dpi / 72, _DIGIT_PX * (letters + 1)
    left, bottom = place[0] + corner[0] * to_px, place[1] + corner[1] * to_px
    return Bbox.from_bounds(left - width if corner[0] < 0 else left, bottom, width, _ROOM_PX)


def levels_axis(axes: Axes, levels: Sequence[float], title: str) -> None:
    """Scale the horizontal axis by powers of two, with a tick for each of the levels."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(levels))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(title)


def _inline(svg: str, name: str) -> str:
    """Strip what only a file of its own needs, make ids unique in the page, and take the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", svg, count=1)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg
