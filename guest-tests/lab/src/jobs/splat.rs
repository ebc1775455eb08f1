// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds kernel splats in a console log.
//!
//! An oops or a panic is always a failure. With `--debug-kernel` every splat of a debug checker is:
//! lockdep (`=====` with a title below), sleep in atomic context, list corruption, poison and
//! red-zone reports, RCU stalls, `WARNING:`.

use crate::command::indented;

/// Messages of an oops or a panic.
const OOPSES: [&str; 4] = [
    "Kernel panic - not syncing",
    "Internal error: Oops",
    "Unable to handle kernel ",
    "kernel BUG at ",
];

/// Messages of debug checkers.
const SPLATS: [&str; 14] = [
    "BUG: ",
    "WARNING: ",
    "INFO: possible ",
    "INFO: task ",
    "INFO: rcu",
    "rcu: INFO: ",
    "detected stalls on CPUs",
    "detected stall on CPU",
    "suspicious RCU usage",
    "Call trace:",
    "corruption",
    "Poison overwritten",
    "Redzone overwritten",
    "inconsistent lock state",
];

/// Returns the first oops or panic with the lines after it.
pub fn oops(console: &str) -> Option<String> {
    find(console, |line| OOPSES.iter().any(|word| line.contains(word)))
}

/// Returns the first splat of any kind with the lines after it.
pub fn any(console: &str) -> Option<String> {
    find(console, |line| {
        OOPSES.iter().chain(&SPLATS).any(|word| line.contains(word)) || is_separator(line)
    })
}

/// A lockdep report opens with a line of `=`.
fn is_separator(line: &str) -> bool {
    let text = line.rsplit(']').next().unwrap_or(line).trim();
    text.len() >= 20 && text.bytes().all(|byte| byte == b'=')
}

fn find(console: &str, matches: impl Fn(&str) -> bool) -> Option<String> {
    let mut lines = console.lines().map(|line| line.trim_end_matches('\r'));
    let first = lines.find(|line| matches(line))?;
    let shown: Vec<&str> = std::iter::once(first).chain(lines.take(19)).collect();
    Some(indented(&shown))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_normal_boot_has_no_splat() {
        let console = "[    0.000000] Booting Linux on physical CPU 0x0\r\n\
                       [    0.000000] Spectre-v4 mitigation disabled by command-line option\r\n\
                       [    0.063046] kvm [1]: Hyp mode initialized successfully\r\n";

        assert_eq!(any(console), None);
    }

    #[test]
    fn a_splat_is_found_with_the_lines_after_it() {
        for line in [
            "[ 1.0] BUG: sleeping function called from invalid context at mm/slab.h:1",
            "[ 1.0] WARNING: CPU: 0 PID: 1 at arch/arm64/kvm/mmu.c:1",
            "[ 1.0] WARNING: possible circular locking dependency detected",
            "[ 1.0] list_add corruption. next->prev should be prev",
            "[ 1.0] rcu: INFO: rcu_sched self-detected stall on CPU",
            "[ 1.0] ======================================================",
            "[ 1.0] INFO: task granule:5 blocked for more than 120 seconds.",
        ] {
            let console = format!("[ 0.5] fine\n{line}\nmore\n");

            let found = any(&console).unwrap();

            assert!(found.contains(line) && found.contains("more"), "{line}");
            assert!(!found.contains("fine"));
        }
    }

    #[test]
    fn a_warning_is_not_an_oops() {
        assert_eq!(oops("WARNING: x"), None);
        assert!(oops("[ 1.0] Kernel panic - not syncing: Attempted to kill init!").is_some());
    }
}
