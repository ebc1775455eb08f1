#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Draws the charts of the documents from the CSV files beside this script.

Usage: docs/charts/plot.py

`NAME.csv` becomes `NAME.svg`. A file with the columns `what,base,series,unit` becomes bars of the
share that is left after a change; a file with `group,what,value,unit` becomes bars by group; a
file with `panel,vcpus` and a column for each line becomes panels of lines, with logarithmic axes, in
rows of three. Equal inputs produce equal bytes.
"""

import csv
import html
import math
import pathlib

WIDTH, LABEL, ROW, MARGIN = 760, 190, 26, 20
BASE, SERIES, TEXT, QUIET = "#b9c2cc", "#0b6e99", "#1c2329", "#5b6670"


def number(text, unit):
    """Formats a figure: counts with separators, others unchanged."""
    value = float(text)
    shown = f"{int(value):,}" if value.is_integer() and not unit else f"{value:g}"
    return f"{shown} {unit}".strip()


def text(x, y, words, anchor="start", colour=TEXT, size=13):
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}">{html.escape(words)}</text>'
    )


def bar(x, y, width, height, colour):
    return f'<rect x="{x:g}" y="{y:g}" width="{max(width, 1.5):g}" height="{height}" fill="{colour}"/>'


def page(height, parts, title):
    # One line: the file is generated, and a changed figure changes it as a whole.
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'font-family="system-ui, sans-serif" role="img" aria-label="{html.escape(title)}">',
            f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def effect(rows, title):
    """Draws two bars for each figure: the base as 100%, and the remaining share."""
    parts, y, room = [], MARGIN, WIDTH - LABEL - 2 * MARGIN - 130
    for row in rows:
        left = float(row["series"]) / float(row["base"])
        parts.append(text(LABEL, y + 17, row["what"], "end"))
        parts.append(bar(LABEL + 10, y + 2, room, 8, BASE))
        parts.append(text(LABEL + 18 + room, y + 10, number(row["base"], row["unit"]), size=11, colour=QUIET))
        parts.append(bar(LABEL + 10, y + 12, room * left, 8, SERIES))
        after = f'{number(row["series"], row["unit"])}, {100 * left:.3g}%'
        parts.append(text(LABEL + 18 + room * left, y + 21, after, size=11))
        y += ROW + 8
    parts.append(bar(LABEL + 10, y + 4, 10, 10, BASE))
    parts.append(text(LABEL + 26, y + 13, "base", size=11))
    parts.append(bar(LABEL + 80, y + 4, 10, 10, SERIES))
    parts.append(text(LABEL + 96, y + 13, "with the series", size=11))
    return page(y + 30, parts, title)


def groups(rows, title):
    """Draws one bar for each figure, scaled within its group."""
    parts, y, room = [], MARGIN, WIDTH - LABEL - 2 * MARGIN - 110
    for name in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == name]
        largest = max(float(row["value"]) for row in members)
        parts.append(text(MARGIN, y + 14, name, colour=QUIET))
        y += 22
        for row in members:
            width = room * float(row["value"]) / largest if largest else 0
            parts.append(text(LABEL, y + 13, row["what"], "end", size=12))
            parts.append(bar(LABEL + 10, y + 3, width, 12, SERIES))
            parts.append(text(LABEL + 18 + width, y + 13, number(row["value"], row["unit"]), size=11))
            y += 20
        y += 10
    return page(y + 8, parts, title)


def lines(rows, title):
    """Draws panels of lines over powers of two; a line named `… work` is dashed."""
    wide, high, gap = 220, 130, 60
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    names = list(rows[0])[2:]
    xs = sorted({int(row["vcpus"]) for row in rows})
    parts = []
    for index, panel in enumerate(panels):
        left = LABEL - 140 + index % 3 * (wide + 20)
        top = MARGIN + 24 + index // 3 * (high + gap)
        members = [row for row in rows if row["panel"] == panel]
        decades = [math.log10(float(row[name])) for row in members for name in names]
        low, most = math.floor(min(decades)), math.ceil(max(decades))
        across = lambda x: left + wide * 0.86 * math.log2(x) / math.log2(xs[-1])
        down = lambda decade: top + high * (1 - (decade - low) / max(most - low, 1))
        parts.append(text(left, top - 8, panel, size=12))
        for decade in range(low, most + 1):
            y = down(decade)
            parts.append(bar(left, y, wide * 0.86, 0.5, "#dfe4e8"))
            parts.append(text(left - 4, y + 4, f"{10.0**decade:g}", "end", QUIET, 10))
        for x in xs:
            parts.append(text(across(x), top + high + 14, str(x), "middle", QUIET, 10))
        for name in names:
            points = " ".join(
                f'{across(int(row["vcpus"])):.1f},{down(math.log10(float(row[name]))):.1f}'
                for row in members
            )
            dash = ' stroke-dasharray="4 3"' if name.endswith("work") else ""
            colour = SERIES if name.startswith("series") else "#7d8894"
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
    bottom = MARGIN + 24 + (len(panels) + 2) // 3 * (high + gap) - 16
    legend = "virtual ms by number of vCPUs; grey: base, blue: series; solid: elapsed, dashed: work"
    parts.append(text(WIDTH / 2, bottom, legend, "middle", size=11))
    return page(bottom + 16, parts, title)


def main():
    folder = pathlib.Path(__file__).parent
    for source in sorted(folder.glob("*.csv")):
        with source.open(newline="") as file:
            rows = list(csv.DictReader(file))
        draw = {"what": effect, "group": groups, "panel": lines}[next(iter(rows[0]))]
        source.with_suffix(".svg").write_text(draw(rows, source.stem))


if __name__ == "__main__":
    main()
