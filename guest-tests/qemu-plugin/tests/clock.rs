// SPDX-License-Identifier: GPL-2.0-or-later
//! Tests of the clock in QEMU with a program of known elapsed time, `clock.S` beside this file.
//!
//! The tests need QEMU, the plugin's release build and a compiler for arm64, so they are ignored by
//! default. `GRANULE_QEMU` names the emulator, by default `qemu-system-aarch64`:
//!
//! ```text
//! cargo build --release --package granule-qemu-plugin
//! cargo test --package granule-qemu-plugin --test clock -- --ignored
//! ```

#![allow(clippy::unwrap_used, reason = "a panic names the line of a failed test")]

mod bare_metal;

use std::fs;

use bare_metal::{build, emulator, run_successfully};

/// Instructions of a CPU's turn in the program.
const WORK: u64 = 400_000;

/// Elapsed time and work, in picoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MeasuredTime {
    elapsed: u64,
    work: u64,
}

/// Values of the program's `SCENARIO`: the relation between the turns of its CPUs.
const ALL_AT_ONCE: u32 = 0;
const SPIN_BY_WFE: u32 = 1;
const SPIN_BY_YIELD: u32 = 2;
const SPIN_BY_LOADS: u32 = 3;
const SLEEP_BY_WFI: u32 = 4;
const SHORT_SECTIONS: u32 = 5;

/// Builds the program and runs it with a quantum in nanoseconds and additional plugin arguments.
fn run(scenario: u32, cpus: u64, quantum: u32, arguments: &str) -> MeasuredTime {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let defines = [("SCENARIO", u64::from(scenario)), ("CPUS", cpus), ("WORK", WORK)]
        .map(|(name, value)| format!("-D{name}={value}"));
    let program = build("clock.S", &defines, directory.path());
    let counts = path("counts");
    let arguments = format!("out={},quantum={quantum}{arguments}", counts.display());
    run_successfully(&mut emulator(&program, cpus, &arguments));
    let counts = fs::read_to_string(counts).unwrap();
    let segments = counts.lines().map(|line| serde_json::from_str(line).unwrap());
    let phase = segments.into_iter().find(|s: &serde_json::Value| s["mark"] == 0x61).unwrap();
    let time = |name: &str| phase["time"][name].as_u64().unwrap();
    // A CPU waits for one turn of each other CPU, which counts twice, and the mark that begins the
    // phase ends a turn. QEMU 10 identifies a CPU by a register that the CPU sets when it starts, so
    // the last CPU's start counts as a turn of one CPU more.
    let limit = 2 * (cpus - 1) + 1 + 2;
    assert!(time("starved") <= limit, "{} turns of others", time("starved"));
    MeasuredTime { elapsed: time("elapsed"), work: time("work") }
}

/// Asserts that a time differs from the known one by at most 0.1% plus `quanta` quanta of 1 µs.
fn assert_near(found: u64, known: u64, quanta: u64) {
    let known = known * 1000;
    let margin = known / 1000 + quanta * 1_000_000;
    assert!(found.abs_diff(known) <= margin, "{found} is not near {known}");
}

#[test]
#[ignore = "runs QEMU"]
fn work_in_parallel_takes_the_time_of_one_cpu() {
    for cpus in [1, 2, 8] {
        let times = run(ALL_AT_ONCE, cpus, 1000, "");

        assert_near(times.elapsed, WORK, 1);
        assert_near(times.work, WORK * cpus, 1);
    }
}

#[test]
#[ignore = "runs QEMU"]
fn serialized_work_takes_the_time_of_all_cpus() {
    for scenario in [SPIN_BY_WFE, SPIN_BY_YIELD, SPIN_BY_LOADS, SLEEP_BY_WFI] {
        let times = run(scenario, 4, 1000, "");

        assert_near(times.elapsed, WORK * 4, 8);
    }
}

#[test]
#[ignore = "runs QEMU"]
fn only_spinning_by_loads_is_work() {
    let work = |scenario| run(scenario, 4, 1000, "").work;

    for scenario in [SPIN_BY_WFE, SPIN_BY_YIELD, SLEEP_BY_WFI] {
        // A waiter reads the lock once per round.
        assert!(work(scenario) < WORK * 4 * 1020, "{scenario}");
    }
    // Three CPUs wait, for one, two and three turns.
    assert_near(work(SPIN_BY_LOADS), WORK * (4 + 1 + 2 + 3), 8);
}

#[test]
#[ignore = "runs QEMU"]
fn elapsed_time_does_not_depend_on_the_quantum() {
    for quantum in [500, 2000, 10_000] {
        for (scenario, known) in [(ALL_AT_ONCE, WORK), (SPIN_BY_LOADS, WORK * 4)] {
            let times = run(scenario, 4, quantum, "");

            assert_near(times.elapsed, known, 2 * u64::from(quantum) / 1000 + 2);
        }
    }
}

#[test]
#[ignore = "runs QEMU"]
fn short_sections_under_a_lock_take_the_time_of_all_if_turns_are_shorter() {
    for (quantum, cpus) in [(20, 8), (50, 4), (100, 4), (100, 8)] {
        let known = WORK / 2 * cpus * 1000;

        let elapsed = run(SHORT_SECTIONS, cpus, quantum, "").elapsed;

        assert!(elapsed.abs_diff(known) <= known * 3 / 100, "{elapsed} is not near {known}");
    }
}

#[test]
#[ignore = "runs QEMU"]
fn short_sections_under_a_lock_count_as_parallel_if_turns_are_longer() {
    let elapsed = run(SHORT_SECTIONS, 4, 10_000, "").elapsed;

    assert_near(elapsed, WORK, 15);
}

#[test]
#[ignore = "runs QEMU"]
fn a_run_repeats_exactly() {
    assert_eq!(run(SPIN_BY_LOADS, 4, 1000, ""), run(SPIN_BY_LOADS, 4, 1000, ""));
}

#[test]
#[ignore = "runs QEMU"]
fn instructions_cost_as_set_by_arguments() {
    let times = run(ALL_AT_ONCE, 4, 1000, ",cost=instruction:500");

    assert_near(times.elapsed, WORK / 2, 1);
}
