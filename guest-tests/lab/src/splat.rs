// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Finds a kernel's complaints in its console log.
//!
//! An oops or a panic is always a failure. With `--debug-kernel` every complaint of a checker is:
//! lockdep (`=====` with a title below), sleep in atomic context, list corruption, poison and
//! red-zone reports, RCU stalls, `WARNING:`.

/// What every kernel says when it dies.
const DEATHS: [&str; 4] = [
    "Kernel panic - not syncing",
    "Internal error: Oops",
    "Unable to handle kernel ",
    "kernel BUG at ",
];

/// What a checker says.
const COMPLAINTS: [&str; 14] = [
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

/// The first line on which the kernel died, with what follows it.
pub fn death(console: &str) -> Option<String> {
    find(console, |line| {
        DEATHS.iter().any(|word| line.contains(word))
    })
}

/// The first complaint, with what follows it.
pub fn complaint(console: &str) -> Option<String> {
    find(console, |line| {
        DEATHS
            .iter()
            .chain(&COMPLAINTS)
            .any(|word| line.contains(word))
            || is_rule(line)
    })
}

/// A lockdep report opens with a line of `=`.
fn is_rule(line: &str) -> bool {
    let text = line.rsplit(']').next().unwrap_or(line).trim();
    text.len() >= 20 && text.bytes().all(|byte| byte == b'=')
}

fn find(console: &str, is_it: impl Fn(&str) -> bool) -> Option<String> {
    let mut lines = console.lines().map(|line| line.trim_end_matches('\r'));
    let first = lines.find(|line| is_it(line))?;
    Some(
        std::iter::once(first)
            .chain(lines.take(19))
            .map(|line| format!("    | {line}\n"))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quiet_console_has_no_complaint() {
        let console = "[    0.000000] Booting Linux on physical CPU 0x0\r\n\
                       [    0.000000] Spectre-v4 mitigation disabled by command-line option\r\n\
                       [    0.063046] kvm [1]: Hyp mode initialized successfully\r\n";

        assert_eq!(complaint(console), None);
    }

    #[test]
    fn complaints_are_found_and_shown_with_what_follows() {
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

            let found = complaint(&console).unwrap();

            assert!(found.contains(line) && found.contains("more"), "{line}");
            assert!(!found.contains("fine"));
        }
    }

    #[test]
    fn only_death_is_death() {
        assert_eq!(death("WARNING: x"), None);
        assert!(death("[ 1.0] Kernel panic - not syncing: Attempted to kill init!").is_some());
    }
}
