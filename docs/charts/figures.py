#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Prints the figures of runs of the lab: medians over the schedules, a row for each kernel.

Usage: docs/charts/figures.py [--markdown | --scaling] RUN_DIRECTORY...

The CSV has the elapsed time and the work of each phase in virtual milliseconds, and the counts of
all phases. --markdown prints the table of a series' README instead: elapsed time (work). --scaling
prints the times of base and series by number of vCPUs, for plot.py.
"""

import collections
import json
import pathlib
import re
import statistics
import sys

PHASES = ["create", "logging-on", "update", "logging-off", "rebuild", "exec", "unmap"]
SHOWN = ["create", "update", "logging-off", "rebuild", "exec", "unmap"]
COUNTS = {
    "guest_aborts": lambda name: name == "guest_aborts",
    "dc_civac": lambda name: name == "DC CIVAC",
    "ic": lambda name: name.startswith("IC "),
    "tlbi": lambda name: name.startswith("TLBI "),
}
BACKINGS = {
    "anonymous": "4K pages",
    "anonymous_thp": "THP",
    "anonymous_hugetlb_2mb": "hugetlb 2M",
    "anonymous_hugetlb_1gb": "hugetlb 1G",
}


def patches(kernel, names):
    """Names a kernel by the patches applied: 1-3, or series."""
    numbered = re.fullmatch(r"(.*)-(\d+)", kernel)
    if numbered and numbered[1] in names:
        return "1" if numbered[2] == "1" else f"1-{numbered[2]}"
    return "series" if kernel == names[-1] and kernel != "base" else kernel


def order(kernel):
    """Sorts the base first, the series last, and lower series before patches."""
    number = re.search(r"-(\d+)$", kernel)
    return (kernel != "base", kernel == "series", int(number[1]) if number else -1 if kernel != "1" else 1, kernel)


def figures(run):
    """Returns the figures of a run directory by (cpu, backing, vcpus, kernel)."""
    files = {path.parent.name: path for path in sorted(pathlib.Path(run).glob("*/results.jsonl"))}
    series = [name for name in files if not re.search(r"-\d+$", name) and name != "base"]
    applied = {name: json.loads((files[name].parent / "kernel.json").read_text())["series"] for name in series}
    series.sort(key=lambda name: len(applied[name]))
    found = {}
    for kernel, path in files.items():
        times = collections.defaultdict(list)
        counts = collections.defaultdict(collections.Counter)
        for line in path.read_text().splitlines():
            record = json.loads(line)
            config = record["config"]
            key = record["host"]["cpu"], BACKINGS[config["backing"]], config["vcpus"]
            times[key, record["phase"], "elapsed"].append(record["elapsed_ns"])
            times[key, record["phase"], "work"].append(record["ns"])
            for name, belongs in COUNTS.items():
                total = sum(n for counter, n in record["counters"].items() if belongs(counter))
                counts[key, name][config["seed"], config["iteration"]] += total
        for key in {key for key, _ in counts}:
            row = {"schedules": len(counts[key, "tlbi"])}
            for phase in PHASES:
                for kind in ("elapsed", "work"):
                    values = times.get((key, phase, kind))
                    row[phase, kind] = f"{statistics.median(values) / 1e6:.3f}" if values else ""
            for name in COUNTS:
                row[name] = f"{statistics.median(counts[key, name].values()):.0f}"
            found[*key, patches(kernel, series or ["base"])] = row
    return sorted(found.items(), key=lambda item: (item[0][:3], order(item[0][3])))


def scaling(run):
    """Prints a row for each phase, number of vCPUs, kernel and kind of time."""
    version = json.loads(next(pathlib.Path(run).glob("base/results.jsonl")).open().readline())["host"]["kernel"]
    for phase in ("create", "update", "rebuild"):
        for (_, _, vcpus, kernel), row in figures(run):
            for kind in ("elapsed", "work") if kernel in ("base", "series") else ():
                print(f"{'.'.join(version.split('.')[:2])} {phase},{kernel} {kind},{vcpus},{row[phase, kind]}")


def main(arguments):
    markdown = "--markdown" in arguments
    runs = [argument for argument in arguments if not argument.startswith("--")]
    if not runs:
        sys.exit(__doc__)
    if "--scaling" in arguments:
        print("panel,line,x,y")
        for run in runs:
            scaling(run)
        return
    if not markdown:
        times = [f"{phase.replace('-', '_')}_{kind}_ms" for phase in PHASES for kind in ("elapsed", "work")]
        print(",".join(["cpu", "backing", "vcpus", "kernel", "schedules", *times, *COUNTS]))
    for run in runs:
        for (cpu, backing, vcpus, kernel), row in figures(run):
            if markdown:
                times = [f"{row[phase, 'elapsed']} ({row[phase, 'work']})" for phase in SHOWN]
                cells = [kernel, *times, row["guest_aborts"], row["dc_civac"], row["tlbi"]]
                print(f"| {' | '.join(cells)} |")
            else:
                times = [row[phase, kind] for phase in PHASES for kind in ("elapsed", "work")]
                print(",".join(map(str, [cpu, backing, vcpus, kernel, row["schedules"], *times, *[row[n] for n in COUNTS]])))


if __name__ == "__main__":
    main(sys.argv[1:])
