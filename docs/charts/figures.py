#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Prints the figures of runs of the lab: medians over the schedules, a row for each kernel.

Usage: docs/charts/figures.py [--scaling] RUN_DIRECTORY...

The rows have elapsed time and work of each phase in virtual milliseconds, and counts of all phases,
as in the READMEs of the series. --scaling prints the times of base and series by number of vCPUs as
CSV, for plot.py.
"""

import collections
import json
import pathlib
import statistics
import sys

PHASES = ["create", "logging-on", "update", "logging-off", "rebuild", "exec", "unmap"]
TIMES = [(phase, kind) for phase in PHASES for kind in ("elapsed", "work")]
COUNTS = {
    "guest_aborts": lambda name: name == "guest_aborts",
    "dc_civac": lambda name: name == "DC CIVAC",
    "tlbi": lambda name: name.startswith("TLBI "),
}
BACKINGS = {
    "anonymous": "4K pages",
    "anonymous_thp": "THP",
    "anonymous_hugetlb_2mb": "hugetlb 2M",
    "anonymous_hugetlb_1gb": "hugetlb 1G",
}


def label(name, applied, top):
    """Names a kernel by its patches: base, 1, 1-3, series, or the name of a lower series."""
    if not applied:
        return "base"
    if name != applied[-1]["name"]:
        number = applied[-1]["patches"]
        return "1" if number == 1 else f"1-{number}"
    return "series" if len(applied) == top else name


def figures(run):
    """Returns the figures of a run directory by CPU, backing, vCPUs and kernel, in this order."""
    directories = [path.parent for path in pathlib.Path(run).glob("*/results.jsonl")]
    series = {path: json.loads((path / "kernel.json").read_text())["series"] for path in directories}
    top = max(len(applied) for applied in series.values())
    directories.sort(key=lambda path: sum(applied["patches"] for applied in series[path]))
    found = []
    for place, directory in enumerate(directories):
        times = collections.defaultdict(list)
        counts = collections.defaultdict(collections.Counter)
        for line in (directory / "results.jsonl").read_text().splitlines():
            record = json.loads(line)
            config = record["config"]
            key = record["host"]["cpu"], BACKINGS[config["backing"]], config["vcpus"]
            times[key, record["phase"], "elapsed"].append(record["elapsed_ns"])
            times[key, record["phase"], "work"].append(record["ns"])
            for name, belongs in COUNTS.items():
                total = sum(n for counter, n in record["counters"].items() if belongs(counter))
                counts[key, name][config["seed"], config["iteration"]] += total
        for key in {key for key, _ in counts}:
            row = {"kernel": label(directory.name, series[directory], top)}
            row["version"] = ".".join(record["host"]["kernel"].split(".")[:2])
            for phase, kind in TIMES:
                values = times.get((key, phase, kind))
                row[phase, kind] = f"{statistics.median(values) / 1e6:.3f}" if values else ""
            for name in COUNTS:
                row[name] = f"{statistics.median(counts[key, name].values()):.0f}"
            found.append(((*key, place), row))
    return sorted(found, key=lambda item: item[0])


def table(runs):
    """Prints the figures as rows of a README: elapsed time and work of each phase, and counts."""
    phases = [phase for phase in PHASES if phase != "logging-on"]
    for run in runs:
        for (_, backing, vcpus, _), row in figures(run):
            times = [f"{row[phase, 'elapsed']} ({row[phase, 'work']})" for phase in phases]
            cells = [f"{backing}, {vcpus} vCPUs, {row['kernel']}", *times, *(row[name] for name in COUNTS)]
            print(f"| {' | '.join(cells)} |")


def scaling(runs):
    """Prints a row for each phase and number of vCPUs."""
    lines = [(kernel, kind) for kernel in ("base", "series") for kind in ("elapsed", "work")]
    print(",".join(["panel", "vcpus", *map(" ".join, lines)]))
    for run in runs:
        rows = {(vcpus, row["kernel"]): row for (_, _, vcpus, _), row in figures(run)}
        for phase in ("create", "update", "rebuild"):
            for vcpus in dict.fromkeys(vcpus for vcpus, _ in rows):
                cells = [rows[vcpus, kernel][phase, kind] for kernel, kind in lines]
                panel = f"{rows[vcpus, 'base']['version']} {phase}"
                print(",".join(map(str, [panel, vcpus, *cells])))


def main(arguments):
    runs = [argument for argument in arguments if argument != "--scaling"]
    if not runs:
        sys.exit(__doc__)
    (scaling if "--scaling" in arguments else table)(runs)


if __name__ == "__main__":
    main(sys.argv[1:])
