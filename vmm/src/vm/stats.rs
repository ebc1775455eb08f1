// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest's life costs, phase by phase: `granule run --stats FILE`.
//!
//! A life has the phases `start` (before the vCPUs run), `boot` (until the guest's init writes the
//! [boot timer](crate::devices::BootTimer)), `first-minute` (from there) and `run` (until its end).
//! At each boundary everything is read once; a phase holds the differences of what only grows and
//! the last reading of what rises and falls. What the host does not tell is absent, never zero. Our
//! own readings fall between phases.
//!
//! The file holds one JSON object for each life, a line each; it is written when the guest ends.

use std::{
    collections::BTreeMap,
    fs,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use crate::kvm::{
    tracepoints as events,
    tracepoints::{EventCounters, ReadEventsError},
};
use granule_types::record::{EventCounts, Host};
use serde::Serialize;

use super::vcpu::Exits;
use crate::{
    arch::faults,
    kvm::{
        stage2_tables::stage2_table_bytes,
        stats::{StatisticKind, Statistics, StatisticsError},
    },
    memory::{GuestRam, MemoryError, Residency},
};

/// What the file's objects call themselves.
pub const SCHEMA: &str = "granule.run/1";

/// Counts of the kernel's, opened before any thread that is to be counted.
#[derive(Debug)]
pub struct Counters {
    events: EventCounters,
    faults: EventCounters,
}

impl Counters {
    /// All that the host counts.
    pub fn open() -> Self {
        let mut by_kind = EventCounters::none();
        by_kind.add_filtered(faults::TRACEPOINT, faults::FILTERS);
        Self {
            events: EventCounters::open(),
            faults: by_kind,
        }
    }

    /// Whether the host lets nothing be counted.
    pub const fn is_empty(&self) -> bool {
        self.events.is_empty() && self.faults.is_empty()
    }

    /// None: every count is absent.
    pub fn none() -> Self {
        Self {
            events: EventCounters::none(),
            faults: EventCounters::none(),
        }
    }
}

/// Everything at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reading {
    /// The kernel's events since the start, and KVM's statistics.
    pub events: EventCounts,
    /// Guest faults on memory by kind and level, and by access.
    pub faults: EventCounts,
    /// How often vCPUs left the guest for us.
    pub exits: EventCounts,
    /// KVM's gauges: pages mapped by size, where it tells.
    pub gauges: EventCounts,
    /// Bytes resident in the host by page size, of each zone.
    pub resident: Vec<BTreeMap<u64, u64>>,
    /// Bytes of stage-2 tables that this machine has added to the host's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage2_tables: Option<u64>,
    /// Bytes of this process that are not guest memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overhead: Option<u64>,
}

/// Why something cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StatsError {
    /// An event counter.
    #[error(transparent)]
    Events(#[from] ReadEventsError),
    /// KVM's statistics.
    #[error(transparent)]
    Statistics(#[from] StatisticsError),
    /// What is resident.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Reads everything.
#[derive(Debug)]
pub struct Meter {
    counters: Counters,
    statistics: Statistics,
    exits: Arc<Exits>,
    zones: Vec<Arc<GuestRam>>,
    tables_before: Option<u64>,
}

impl Meter {
    /// A meter; `tables_before` is [`fresh_tables_of_guests`] before the machine was made.
    pub fn new(
        counters: Counters,
        statistics: Statistics,
        exits: Arc<Exits>,
        zones: Vec<Arc<GuestRam>>,
        tables_before: Option<u64>,
    ) -> Self {
        Self {
            counters,
            statistics,
            exits,
            zones,
            tables_before,
        }
    }

    /// Everything as it stands now.
    ///
    /// # Errors
    /// What was told before is told no more.
    pub fn read(&mut self) -> Result<Reading, StatsError> {
        let mut counted = self.counters.events.read()?;
        counted.extend(self.statistics.read(StatisticKind::Cumulative)?);
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let exits = [
            ("mmio-reads", load(&self.exits.mmio_reads)),
            ("mmio-writes", load(&self.exits.mmio_writes)),
            ("interrupted", load(&self.exits.interrupted)),
            ("other", load(&self.exits.other)),
        ];
        let zones = self.zones.iter();
        let resident = zones
            .map(|ram| Ok(ram.resident()?.resident))
            .collect::<Result<Vec<_>, MemoryError>>()?;
        let ranges: Vec<_> = self.zones.iter().map(|ram| ram.host_range()).collect();
        Ok(Reading {
            events: counted,
            faults: self.counters.faults.read()?,
            exits: exits
                .into_iter()
                .map(|(name, count)| (name.to_owned(), count))
                .collect(),
            gauges: self.statistics.read(StatisticKind::Instant)?,
            resident,
            stage2_tables: fresh_tables_of_guests()
                .zip(self.tables_before)
                .map(|(now, before)| now.saturating_sub(before)),
            overhead: Residency::outside(&ranges).map(|bytes| bytes.0),
        })
    }
}

/// [`stage2_table_bytes`], the CPUs' own parts of that count added up first: a small guest's tables
/// are less than what a CPU keeps to itself. Without the right to have that done, it is not.
pub fn fresh_tables_of_guests() -> Option<u64> {
    let before = stage2_table_bytes()?;
    match fs::write(REFRESH, "1") {
        Ok(()) => stage2_table_bytes(),
        Err(_) => Some(before),
    }
}

/// What has the kernel add its counts up (`Documentation/admin-guide/sysctl/vm.rst`).
pub const REFRESH: &str = "/proc/sys/vm/stat_refresh";

/// A phase of the guest's life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Phase {
    /// Its name.
    pub name: &'static str,
    /// How long it took.
    pub ns: u64,
    /// What was counted in it, and what stood at its end.
    #[serde(flatten)]
    pub reading: Reading,
}

/// A guest's life so far.
#[derive(Debug)]
pub struct Life {
    phases: Vec<Phase>,
    name: &'static str,
    since: Duration,
    last: Option<Reading>,
    marks: Vec<(u8, u64)>,
}

/// What is written of a life.
#[derive(Debug, Serialize)]
pub struct Record<'a, C: Serialize> {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Where it ran.
    pub host: &'a Host,
    /// What was asked for.
    pub config: &'a C,
    /// How it ended.
    pub ended: &'a str,
    /// What the guest wrote to the boot timer, and after how many nanoseconds.
    pub marks: &'a [(u8, u64)],
    /// The phases.
    pub phases: &'a [Phase],
}

/// How long after the guest's init the first minute ends.
pub const FIRST_MINUTE: Duration = Duration::from_secs(60);

impl Default for Life {
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

impl Life {
    /// The phase that is running now.
    pub const fn phase(&self) -> &'static str {
        self.name
    }

    /// When the running phase began.
    pub const fn since(&self) -> Duration {
        self.since
    }

    /// The guest wrote to the boot timer.
    pub fn mark(&mut self, mark: u8, at: Duration) {
        // A guest may write as often as it likes; the first few are told.
        if self.marks.len() < 64 {
            self.marks.push((mark, nanoseconds(at)));
        }
    }

    /// The running phase ends and another begins.
    pub fn end_phase(&mut self, next: &'static str, at: Duration, reading: Reading) {
        let before = self.last.as_ref();
        let difference = |now: &EventCounts, part: fn(&Reading) -> &EventCounts| match before {
            Some(before) => events::difference(part(before), now),
            None => now.clone(),
        };
        self.phases.push(Phase {
            name: self.name,
            ns: nanoseconds(at.saturating_sub(self.since)),
            reading: Reading {
                events: difference(&reading.events, |r| &r.events),
                faults: difference(&reading.faults, |r| &r.faults),
                exits: difference(&reading.exits, |r| &r.exits),
                ..reading.clone()
            },
        });
        (self.name, self.since, self.last) = (next, at, Some(reading));
    }

    /// The phases that have ended.
    pub fn phases(&self) -> &[Phase] {
        &self.phases
    }

    /// The guest's own marks.
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

    fn reading(faults: u64, small: u64) -> Reading {
        Reading {
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
    fn a_phase_holds_what_was_counted_in_it_and_what_stood_at_its_end() {
        let mut life = Life::default();

        life.end_phase("boot", Duration::from_millis(5), reading(0, 0));
        life.end_phase(
            "first-minute",
            Duration::from_millis(300),
            reading(700, 1 << 20),
        );
        life.end_phase("run", Duration::from_millis(400), reading(900, 2 << 20));

        let seen: Vec<_> = life
            .phases()
            .iter()
            .map(|phase| {
                let faults = phase.reading.faults["translation.level3"];
                (
                    phase.name,
                    phase.ns,
                    faults,
                    phase.reading.resident[0][&4096],
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("start", 5_000_000, 0, 0),
                ("boot", 295_000_000, 700, 1 << 20),
                ("first-minute", 100_000_000, 200, 2 << 20),
            ]
        );
    }

    #[test]
    fn what_the_host_does_not_tell_is_absent() {
        let text = serde_json::to_string(&reading(1, 1)).unwrap();

        assert!(!text.contains("stage2_tables"), "{text}");
    }
}
