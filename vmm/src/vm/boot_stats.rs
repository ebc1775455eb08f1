// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Statistics of one boot of a guest by phase: `granule run --stats FILE`.
//!
//! The phases are `start` (before the vCPUs run), `boot` (until the guest's init writes the
//! [boot timer](crate::devices::BootTimer)), `first-minute` (from there) and `run` (until the guest
//! exits). A [`Snapshot`] is taken at each boundary; a phase holds the differences of counters and the
//! last value of gauges. Taking a snapshot is not part of a phase.
//!
//! The file holds one JSON object a line for each boot, written when the guest exits.

use std::time::Duration;

use granule_types::record::{EventCounts, Host};
use serde::Serialize;

use super::stats::Snapshot;
use crate::kvm::tracepoints;

/// Schema name of the objects in the file.
pub const SCHEMA: &str = "granule.run/1";

/// Duration of the phase `first-minute`.
pub const FIRST_MINUTE: Duration = Duration::from_secs(60);

/// Maximum number of marks of the boot timer that are recorded.
const MAX_MARKS: usize = 64;

/// A completed phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BootPhase {
    /// Name of the phase.
    pub name: &'static str,
    /// Duration in nanoseconds.
    pub ns: u64,
    /// Counts of the phase, and gauges at its end.
    #[serde(flatten)]
    pub statistics: Snapshot,
}

/// Statistics of a boot so far.
#[derive(Debug)]
pub struct BootStats {
    phases: Vec<BootPhase>,
    name: &'static str,
    since: Duration,
    last: Option<Snapshot>,
    marks: Vec<(u8, u64)>,
}

/// The record of a boot in the file.
#[derive(Debug, Serialize)]
pub struct BootRecord<'a, C: Serialize> {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Host.
    pub host: &'a Host,
    /// Configuration of the VM.
    pub config: &'a C,
    /// Reason of the end.
    pub ended: &'a str,
    /// Values that the guest wrote to the boot timer, with their times in nanoseconds.
    pub marks: &'a [(u8, u64)],
    /// Phases.
    pub phases: &'a [BootPhase],
}

impl Default for BootStats {
    fn default() -> Self {
        Self {
            phases: Vec::new(),
            name: "start",
            since: Duration::ZERO,
            last: None,
            marks: Vec::new(),
        }
    }
}

impl BootStats {
    /// Returns the name of the current phase.
    pub const fn phase(&self) -> &'static str {
        self.name
    }

    /// Returns the start of the current phase.
    pub const fn since(&self) -> Duration {
        self.since
    }

    /// Records a value that the guest wrote to the boot timer.
    pub fn mark(&mut self, mark: u8, at: Duration) {
        // The guest can write any number of values.
        if self.marks.len() < MAX_MARKS {
            self.marks.push((mark, nanoseconds(at)));
        }
    }

    /// Ends the current phase and starts phase `next`.
    pub fn end_phase(&mut self, next: &'static str, at: Duration, snapshot: Snapshot) {
        let before = self.last.as_ref();
        let difference = |after: &EventCounts, part: fn(&Snapshot) -> &EventCounts| match before {
            Some(before) => tracepoints::difference(part(before), after),
            None => after.clone(),
        };
        self.phases.push(BootPhase {
            name: self.name,
            ns: nanoseconds(at.saturating_sub(self.since)),
            statistics: Snapshot {
                events: difference(&snapshot.events, |s| &s.events),
                faults: difference(&snapshot.faults, |s| &s.faults),
                exits: difference(&snapshot.exits, |s| &s.exits),
                ..snapshot.clone()
            },
        });
        (self.name, self.since, self.last) = (next, at, Some(snapshot));
    }

    /// Returns the completed phases.
    pub fn phases(&self) -> &[BootPhase] {
        &self.phases
    }

    /// Returns the recorded marks.
    pub fn marks(&self) -> &[(u8, u64)] {
        &self.marks
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(faults: u64, small: u64) -> Snapshot {
        Snapshot {
            events: EventCounts::new(),
            faults: [("translation.level3".to_owned(), faults)].into(),
            exits: EventCounts::new(),
            gauges: EventCounts::new(),
            resident: vec![[(4096, small)].into()],
            stage2_tables: None,
            overhead: None,
        }
    }

    #[test]
    fn a_phase_has_differences_of_counters_and_final_gauges() {
        let mut boot = BootStats::default();
        let at = Duration::from_millis;

        boot.end_phase("boot", at(5), snapshot(0, 0));
        boot.end_phase("first-minute", at(300), snapshot(700, 1 << 20));
        boot.end_phase("run", at(400), snapshot(900, 2 << 20));

        let phases = boot.phases().iter().map(|phase| {
            let Snapshot { faults, resident, .. } = &phase.statistics;
            let faults = faults["translation.level3"];
            (phase.name, phase.ns, faults, resident[0][&4096])
        });
        assert!(phases.eq([
            ("start", 5_000_000, 0, 0),
            ("boot", 295_000_000, 700, 1 << 20),
            ("first-minute", 100_000_000, 200, 2 << 20),
        ]));
    }

    #[test]
    fn a_missing_value_is_absent_from_the_record() {
        let text = serde_json::to_string(&snapshot(1, 1)).unwrap();

        assert!(!text.contains("stage2_tables"), "{text}");
    }
}
