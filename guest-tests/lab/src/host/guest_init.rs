// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! PID 1 of a guest that `granule run` boots in the emulated host.
//!
//! It prints [`INIT_STARTED`], touches memory as a booting system does, and prints
//! [`CHECKS_PASSED`] with vCPU count and memory size. The lab matches both lines on the console.

use std::fs;

use rustix::mount::{MountFlags, mount};

use crate::host::kernel_tables::KernelTables;

/// Path of the file that identifies the initramfs of a guest. It is empty, or contains
/// [`KERNEL_TABLES`], [`MARKED_INIT`] or the arguments of the program to run instead of the checks,
/// as a JSON array.
pub const MARKER_PATH: &str = "/guest";
/// Line printed when PID 1 starts.
pub const INIT_STARTED: &str = "granule-guest: init";
/// Start of the line printed after all checks passed.
pub const CHECKS_PASSED: &str = "granule-guest: works";

/// Content of the file at [`MARKER_PATH`] of a guest that reports its page tables.
pub const KERNEL_TABLES: &str = "kernel-tables";
/// Content of the file at [`MARKER_PATH`] of a guest that marks its start, because its VMM does not.
pub const MARKED_INIT: &str = "marked-init";
/// Start of the line with the report of a guest's page tables.
const TABLES_PREFIX: &str = "granule-guest: kernel tables ";

/// Number of bytes written and read back; smaller guests use a quarter of their memory.
const TOUCHED_BYTES: usize = 16 << 20;

/// Returns the line that reports the end of the guest's program.
pub fn ending_line(exit_code: Option<i32>) -> String {
    let code =
        exit_code.map_or_else(|| "no exit code".to_owned(), |code| format!("exit code {code}"));
    format!("granule-guest: the program ended with {code}")
}

/// Reports whether the console of a guest ends with the success of its program.
pub fn ended_with_success(console: &str) -> bool {
    console.lines().rev().any(|line| line.trim_end() == ending_line(Some(0)))
}

pub fn check_guest() {
    println!("{INIT_STARTED}");
    match try_check_guest() {
        Ok(summary) => println!("{CHECKS_PASSED}, {summary}"),
        Err(error) => println!("granule-guest: {error}"),
    }
    if let Err(error) = rustix::termios::tcdrain(std::io::stdout()) {
        println!("granule-guest: tcdrain: {error}");
    }
}

/// Prints the page tables of this kernel as JSON, after its file systems are mounted.
pub fn report_tables(mounted: Result<(), String>) {
    println!("{INIT_STARTED}");
    let report = || {
        mounted?;
        let tables = KernelTables::read().map_err(|error| error.to_string())?;
        serde_json::to_string(&tables).map_err(|error| error.to_string())
    };
    match report() {
        Ok(json) => println!("{TABLES_PREFIX}{json}"),
        Err(error) => println!("granule-guest: {error}"),
    }
    if let Err(error) = rustix::termios::tcdrain(std::io::stdout()) {
        println!("granule-guest: tcdrain: {error}");
    }
}

/// Returns the report of a guest's page tables on its console.
pub fn reported_tables(console: &str) -> Option<KernelTables> {
    let line = console.lines().find_map(|line| line.strip_prefix(TABLES_PREFIX))?;
    serde_json::from_str(line).ok()
}

fn try_check_guest() -> std::io::Result<String> {
    mount("proc", "/proc", "proc", MountFlags::empty(), None)?;
    let cpus = std::thread::available_parallelism()?;
    let text = fs::read_to_string("/proc/meminfo")?;
    let kib: usize = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"))
        .and_then(|number| number.trim().parse().ok())
        .unwrap_or(0);
    // One thread for each vCPU writes a part, so that all vCPUs fault.
    let part = TOUCHED_BYTES.min((kib << 10) / 4) / cpus.get();
    let threads: Vec<_> =
        (0..cpus.get()).map(|cpu| std::thread::spawn(move || touch_memory(cpu, part))).collect();
    let wrong = threads
        .into_iter()
        .map(|thread| thread.join().unwrap_or(usize::MAX))
        .fold(0usize, usize::saturating_add);
    if wrong > 0 {
        return Err(std::io::Error::other(format!(
            "{wrong} words of memory differ from those written"
        )));
    }
    Ok(format!("vcpus {cpus}, memory {} MiB", kib >> 10))
}

/// Writes and reads back every word; returns the number of words that differ.
fn touch_memory(seed: usize, bytes: usize) -> usize {
    let value = |index: usize| (index ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words: Vec<usize> = (0..bytes / size_of::<usize>()).map(value).collect();
    let words = std::hint::black_box(words);
    let wrong = |(index, word): &(usize, &usize)| **word != value(*index);
    words.iter().enumerate().filter(wrong).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_received_as_printed() {
        let tables = KernelTables { dump: Some("a\nb\n".to_owned()), ..KernelTables::default() };
        let json = serde_json::to_string(&tables).unwrap();

        let console = format!("[ 0.1] Run /init\r\n{TABLES_PREFIX}{json}\r\n");

        assert_eq!(reported_tables(&console), Some(tables));
        assert_eq!(reported_tables(INIT_STARTED), None);
    }

    #[test]
    fn memory_holds_the_written_words() {
        assert_eq!(touch_memory(3, 1 << 16), 0);
    }
}
