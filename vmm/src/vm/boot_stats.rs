// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Statistics of a guest boot by phase, written by `granule run --stats FILE`.
//!
//! The phases are `start` (before the vCPUs run), `boot` (until the guest's init writes the [boot
//! timer](crate::devices::BootTimer)), `first-minute` (60 s) and `run` (until the guest exits). A
//! [`Snapshot`] is taken at each boundary; a phase holds the differences of counters and the last
//! value of gauges. The time for taking a snapshot counts toward the next phase.
//!
//! The file has one line for each boot, a JSON object that is written when the guest exits. A guest may
//! reset itself without end, so the file has the first boots and the last one, whose line replaces that of
//! the boot before it. A pipe receives all lines.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use granule_types::record::{EventCounts, HostInfo};
use serde::Serialize;

use super::{config::VmConfig, stats::Snapshot};
use crate::kvm::tracepoints::{self, counted_since};

/// Schema name of the objects in the file.
const SCHEMA: &str = "granule.run/1";

pub const FIRST_MINUTE: Duration = Duration::from_secs(60);

/// Maximum number of boot timer marks that are recorded, or wait to be. The guest can write any number.
pub const MAX_MARKS: usize = 64;

/// Maximum number of boots in a file.
const MAX_RECORDS: u32 = 100;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BootPhase {
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
    pub(super) phase: &'static str,
    pub(super) phase_start: Duration,
    last_snapshot: Option<Snapshot>,
    marks: Vec<(u8, u64)>,
}

impl Default for BootStats {
    fn default() -> Self {
        Self {
            phases: Vec::new(),
            phase: "start",
            phase_start: Duration::ZERO,
            last_snapshot: None,
            marks: Vec::new(),
        }
    }
}

impl BootStats {
    /// Records a value that the guest wrote to the boot timer, unless there are too many.
    pub fn record_mark(&mut self, mark: u8, at: Duration) {
        if self.marks.len() < MAX_MARKS {
            log::info!("boot timer mark {mark} after {} ms", at.as_millis());
            self.marks.push((mark, nanoseconds(at)));
        }
    }

    /// Ends the current phase and starts phase `next`.
    pub fn end_phase(&mut self, next: &'static str, at: Duration, snapshot: Snapshot) {
        let before = self.last_snapshot.as_ref();
        let difference = |after: &EventCounts, part: fn(&Snapshot) -> &EventCounts| match before {
            Some(before) => tracepoints::difference(part(before), after),
            None => after.clone(),
        };
        self.phases.push(BootPhase {
            name: self.phase,
            ns: nanoseconds(at.saturating_sub(self.phase_start)),
            statistics: Snapshot {
                events: difference(&snapshot.events, |s| &s.events),
                faults: difference(&snapshot.faults, |s| &s.faults),
                exits: difference(&snapshot.exits, |s| &s.exits),
                stalls: match before {
                    // A histogram of a size begins with the first mapping.
                    Some(before) => counted_since(&before.stalls, &snapshot.stalls),
                    None => snapshot.stalls.clone(),
                },
                ..snapshot.clone()
            },
        });
        (self.phase, self.phase_start, self.last_snapshot) = (next, at, Some(snapshot));
    }

    /// Starts phase `next` without a record of the current one, whose counts are then part of the next
    /// record.
    pub fn skip_phase(&mut self, next: &'static str, at: Duration) {
        (self.phase, self.phase_start) = (next, at);
    }
}

/// Record of a boot in the file.
#[derive(Serialize)]
struct BootRecord<'a> {
    schema: &'static str,
    host: &'a HostInfo,
    config: &'a VmConfig,
    /// Number of the boot, counted from 1.
    boot: u32,
    #[serde(rename = "ended")]
    outcome: &'static str,
    /// Values that the guest wrote to the boot timer, with their times in nanoseconds.
    marks: &'a [(u8, u64)],
    phases: &'a [BootPhase],
}

/// The open statistics file and the description of the host.
pub(super) struct StatsFile {
    pub(super) path: PathBuf,
    file: File,
    /// Number of boots of this run that were written.
    written: u32,
    /// Size of the records of the first boots, which are kept.
    kept: u64,
    host: HostInfo,
}

impl StatsFile {
    /// Opens the file. Records of an earlier run are kept until the first write.
    pub(super) fn open(path: &Path, host: HostInfo) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            file: File::options().create(true).append(true).open(path)?,
            written: 0,
            kept: 0,
            host,
        })
    }

    pub(super) fn write(
        &mut self,
        config: &VmConfig,
        boot: u32,
        outcome: &'static str,
        stats: &BootStats,
    ) -> io::Result<()> {
        let record = BootRecord {
            schema: SCHEMA,
            host: &self.host,
            config,
            boot,
            outcome,
            marks: &stats.marks,
            phases: &stats.phases,
        };
        let mut line = serde_json::to_vec(&record)?;
        line.push(b'\n');
        match self.written {
            0 => self.truncate(0)?,
            1..MAX_RECORDS => self.kept = self.file.metadata()?.len(),
            // Another process may have shortened the file meanwhile.
            MAX_RECORDS.. => self.truncate(self.kept.min(self.file.metadata()?.len()))?,
        }
        self.written = self.written.saturating_add(1);
        (&self.file).write_all(&line)
    }

    fn truncate(&self, size: u64) -> io::Result<()> {
        self.file.set_len(size).or_else(|error| match error.kind() {
            // A pipe or terminal cannot be truncated.
            io::ErrorKind::InvalidInput => Ok(()),
            _ => Err(error),
        })
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::fd::AsRawFd as _, thread};

    use super::*;

    fn snapshot(faults: u64, small: u64) -> Snapshot {
        Snapshot {
            events: EventCounts::new(),
            faults: [("translation.level3".to_owned(), faults)].into(),
            stalls: EventCounts::new(),
            exits: EventCounts::new(),
            gauges: EventCounts::new(),
            resident_bytes: vec![[(4096, small)].into()],
            mapped_bytes: Vec::new(),
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

        let phases = boot.phases.iter().map(|phase| {
            let Snapshot { faults, resident_bytes, .. } = &phase.statistics;
            let faults = faults["translation.level3"];
            (phase.name, phase.ns, faults, resident_bytes[0][&4096])
        });
        assert!(phases.eq([
            ("start", 5_000_000, 0, 0),
            ("boot", 295_000_000, 700, 1 << 20),
            ("first-minute", 100_000_000, 200, 2 << 20),
        ]));
    }

    #[test]
    fn a_phase_has_all_stalls_of_a_size_that_was_not_mapped_before() {
        let mut boot = BootStats::default();
        let with_stalls = |pairs: &[(&str, u64)]| Snapshot {
            stalls: pairs.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
            ..snapshot(0, 0)
        };

        boot.end_phase("boot", Duration::ZERO, with_stalls(&[("mmio.count", 2)]));
        let stalls = [("mmio.count", 5), ("mapped-4K.count", 7)];
        boot.end_phase("first-minute", Duration::ZERO, with_stalls(&stalls));

        let stalls = &boot.phases[1].statistics.stalls;
        assert_eq!((stalls["mmio.count"], stalls["mapped-4K.count"]), (3, 7));
    }

    #[test]
    fn a_skipped_phase_has_its_counts_in_the_next_record() {
        let mut boot = BootStats::default();
        let at = Duration::from_millis;

        boot.end_phase("boot", at(5), snapshot(100, 0));
        boot.skip_phase("first-minute", at(300));
        boot.end_phase("run", at(400), snapshot(900, 0));

        let phases = boot.phases.iter().map(|phase| {
            let faults = phase.statistics.faults["translation.level3"];
            (phase.name, phase.ns, faults)
        });
        assert!(phases.eq([("start", 5_000_000, 100), ("first-minute", 100_000_000, 800)]));
    }

    fn write_boots(path: &Path, boots: u32) {
        let mut file = StatsFile::open(path, HostInfo::of_this_host().unwrap()).unwrap();
        for boot in 1..=boots {
            file.write(&VmConfig::default(), boot, "reset", &BootStats::default()).unwrap();
        }
    }

    fn boots(lines: &str) -> Vec<u64> {
        let boot = |line| serde_json::from_str::<serde_json::Value>(line).unwrap()["boot"].as_u64();
        lines.lines().map(|line| boot(line).unwrap()).collect()
    }

    #[test]
    fn a_file_has_the_first_boots_and_the_last_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stats");
        let maximum = u64::from(MAX_RECORDS);

        for (count, expected) in [
            (250, (1..maximum).chain([250]).collect::<Vec<_>>()),
            (MAX_RECORDS, (1..=maximum).collect()),
            (2, vec![1, 2]),
        ] {
            write_boots(&path, count);

            assert_eq!(boots(&fs::read_to_string(&path).unwrap()), expected, "of an earlier run");
        }
    }

    #[test]
    fn a_pipe_receives_all_boots() {
        let (reader, writer) = io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
        let reader = thread::spawn(move || io::read_to_string(reader).unwrap());

        write_boots(Path::new(&path), 2 * MAX_RECORDS);
        drop(writer);

        let expected = 1..=2 * u64::from(MAX_RECORDS);
        assert_eq!(boots(&reader.join().unwrap()), expected.collect::<Vec<_>>());
    }

    #[test]
    fn a_missing_value_is_absent_from_the_record() {
        let text = serde_json::to_string(&snapshot(1, 1)).unwrap();

        assert!(!text.contains("stage2_tables"), "{text}");
    }
}
