// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Figures of one guest boot.
//!
//! `granule run` writes its statistics to the results file and executes
//! [marks](granule_types::mark). *Start* ends at the guest's first instruction; *to init* and *to
//! login* last from there to the guest's PID 1 and to the login prompt. Of a user's VMM there are counts
//! only: *start* ends at the first `KVM_RUN`, *to init* begins with the program, and its memory faults
//! are the lookups of the host's page, on a kernel without series. Faults and CMOs are those
//! of the whole run; counts include host and guest. Of the instructions *to init*, those
//! outside of the guest are the *host's part*, on a CPU with VHE. The columns of
//! `paging_init()` are those of the guest's kernel, if it has a `System.map`.

use std::collections::BTreeMap;

use granule_types::{backing::Backing, mark, units::Bytes};

use crate::{
    host::guest_init,
    jobs::{
        boot::{FAULT_STALLS, FAULT_STALLS_NS, GUEST_ENTRIES, GUEST_ENTRIES_NS},
        counts::SegmentLine,
        matrix::PlannedJob,
        outcome::{JobError, JobOutcome},
    },
    report::{
        boot_statistics::BootStatistics, count_table::TLBI_BROADCAST, table_figures::span_counts,
    },
};

/// Checks the stalls of a guest against the number and the instructions of its faults that the plugin
/// counted, if both were measured: an instruction takes a nanosecond, and the measured times
/// begin and end in the handlers of the traces.
fn check_stall_times(statistics: &BootStatistics, outcome: &JobOutcome) -> Result<(), String> {
    let [faults, instructions] = [
        count(&outcome.segments, |name| name == FAULT_STALLS),
        count(&outcome.segments, |name| name == FAULT_STALLS_NS),
    ];
    statistics.check_stall_times(faults, instructions)
}

/// Returns the sizes that stage 2 may map of a guest: pages, and blocks if the host has them for it.
fn leaf_sizes(backing: Backing, outcome: &JobOutcome) -> Vec<Bytes> {
    let host = outcome.report.host.as_ref();
    let page = host.and_then(|host| host.page_size).unwrap_or(Bytes::kib(4));
    // A table has a page of 8-byte entries.
    let blocks = (1..=2).map(|level| Bytes(page.0 * (page.0 / 8).pow(level)));
    let has_blocks = backing != Backing::Anonymous;
    [page].into_iter().chain(blocks.filter(|_| has_blocks)).collect()
}

/// Returns the count of a function that the host calls once for each stage-2 fault. With a series it may
/// call it for some faults only, or also without a fault.
fn calls_of_plain_kernel(outcome: &JobOutcome, counter: &str) -> Option<u64> {
    let series = outcome.report.host.as_ref()?.series.as_ref()?;
    let calls = count(&outcome.segments, |name| name == counter);
    // A kernel without a `System.map` has no count.
    (series.is_empty() && calls > 0).then_some(calls)
}

/// Value that the guest writes to the boot timer when its login prompt is ready.
const LOGIN_READY: u8 = 2;

/// Figures of one boot; times start with the VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BootFigures {
    values: BTreeMap<BootColumn, u64>,
    /// Nonzero numbers of memory faults by type and level.
    pub faults_by_level: BTreeMap<String, u64>,
}

/// Column of the report. Instructions are counted if a mark ends their segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BootColumn {
    Start,
    ToInit,
    HostPart,
    Whole,
    TimeToInit,
    TimeToLogin,
    Faults,
    DcCivac,
    Stage2Tlbi,
    Stage2Tables,
    Resident,
    Overhead,
    PagingInit,
    PagingTlbi,
    PagingAborts,
}

impl BootColumn {
    /// Columns in the order of the report.
    pub const ALL: [Self; 15] = [
        Self::Start,
        Self::ToInit,
        Self::HostPart,
        Self::Whole,
        Self::TimeToInit,
        Self::TimeToLogin,
        Self::Faults,
        Self::DcCivac,
        Self::Stage2Tlbi,
        Self::Stage2Tables,
        Self::Resident,
        Self::Overhead,
        Self::PagingInit,
        Self::PagingTlbi,
        Self::PagingAborts,
    ];

    pub const fn heading(self) -> &'static str {
        match self {
            Self::Start => "start M instr.",
            Self::ToInit => "to init M instr.",
            Self::HostPart => "host's part",
            Self::Whole => "whole M instr.",
            Self::TimeToInit => "to init ms",
            Self::TimeToLogin => "to login ms",
            Self::Faults => "memory faults",
            Self::DcCivac => "DC CIVAC",
            Self::Stage2Tlbi => "stage-2 TLBI",
            Self::Stage2Tables => "stage-2 tables",
            Self::Resident => "resident",
            Self::Overhead => "beyond guest memory",
            Self::PagingInit => "paging_init M instr.",
            Self::PagingTlbi => "paging_init TLBI broadcast",
            Self::PagingAborts => "paging_init aborts",
        }
    }

    /// Returns whether this is one of the last columns, which a report omits if no guest has them.
    pub fn is_of_paging(self) -> bool {
        self >= Self::PagingInit
    }

    /// Returns whether kernels are compared by a ratio.
    pub fn has_ratio(self) -> bool {
        self <= Self::DcCivac
    }

    fn format(self, value: u64) -> String {
        match self {
            Self::Start
            | Self::ToInit
            | Self::HostPart
            | Self::Whole
            | Self::TimeToInit
            | Self::TimeToLogin
            | Self::PagingInit => format_millions(value),
            Self::Stage2Tables | Self::Resident | Self::Overhead => Bytes(value).to_string(),
            Self::Faults
            | Self::DcCivac
            | Self::Stage2Tlbi
            | Self::PagingTlbi
            | Self::PagingAborts => value.to_string(),
        }
    }
}

impl BootFigures {
    pub fn from_outcome(job: &PlannedJob, outcome: &JobOutcome) -> Result<Self, JobError> {
        outcome.passed_duration()?;
        let failed = |reason: &str| outcome.test_error(reason.to_owned());
        if !outcome.report.stdout.contains(guest_init::CHECKS_PASSED) {
            return Err(failed("printed no report of the guest's PID 1"));
        }
        let Some(vm) = job.work.guest() else { return Err(failed("boots no guest")) };
        let vcpus = format!("vcpus {}", vm.vcpus);
        if !outcome.report.stdout.contains(&format!("{vcpus},")) {
            return Err(failed(&format!("printed no report of a guest with {vcpus}")));
        }
        let lookups = calls_of_plain_kernel(outcome, "page_lookups");
        if job.work.vmm().is_some() {
            return Ok(Self::from_counts(&outcome.segments, lookups));
        }
        let statistics: BootStatistics =
            serde_json::from_str(&outcome.report.results).map_err(JobError::Statistics)?;
        if statistics.outcome != "off" {
            return Err(failed("ended before the guest powered off"));
        }
        statistics
            .check_stalls()
            .and_then(|()| statistics.check_lookups(lookups, vm.vcpus))
            .and_then(|()| match calls_of_plain_kernel(outcome, "stage2_maps") {
                Some(maps) => {
                    statistics.check_maps(maps, vm.vcpus, &leaf_sizes(vm.backing, outcome))
                }
                None => Ok(()),
            })
            .and_then(|()| check_stall_times(&statistics, outcome))
            .map_err(|reason| failed(&reason))?;
        Self::from_statistics(&statistics, &outcome.segments)
            .ok_or_else(|| failed("wrote no statistics of a boot"))
    }

    /// Returns the figures of a boot; `None` if the statistics contain none.
    fn from_statistics(statistics: &BootStatistics, segments: &[SegmentLine]) -> Option<Self> {
        let phases = &statistics.phases;
        let phase = |name: &str| phases.iter().find(|phase| phase.name == name);
        let (start, boot, last) = (phase("start")?, phase("boot")?, phases.last()?);
        // Each memory fault has one access type and one level; an MMIO access has no type.
        let mut faults_by_level = BTreeMap::new();
        let mut faults = None;
        for (name, count) in phases.iter().flat_map(|phase| &phase.faults) {
            if name.starts_with("by.") {
                *faults.get_or_insert(0) += count;
            } else if *count > 0 {
                *faults_by_level.entry(name.clone()).or_default() += count;
            }
        }
        let ready = statistics.marks.iter().find(|(mark, _)| *mark == LOGIN_READY);
        let paging = span_counts(segments, 0).ok();
        let paging = |selected: fn(&str) -> bool| {
            let counts = paging.as_ref()?.iter().filter(|(name, _)| selected(name));
            Some(counts.map(|(_, count)| count).sum())
        };
        let to_guest = segments_until(segments, mark::UNMARKED_PROGRAM, mark::GUEST);
        let to_init = segments_until(segments, mark::GUEST, mark::GUEST_INIT);
        let values = [
            (BootColumn::Start, to_guest.and_then(instructions)),
            (BootColumn::ToInit, to_init.and_then(instructions)),
            (
                BootColumn::HostPart,
                to_init.and_then(|to_init| host_part(instructions(to_init), to_init)),
            ),
            (BootColumn::Whole, Some(count(segments, |name| name == "instructions"))),
            (BootColumn::TimeToInit, Some(boot.ns)),
            (BootColumn::TimeToLogin, ready.map(|(_, ns)| ns.saturating_sub(start.ns))),
            (BootColumn::Faults, faults),
            (BootColumn::DcCivac, Some(count(segments, |name| name == "DC CIVAC"))),
            (BootColumn::Stage2Tlbi, Some(count(segments, is_stage2_tlbi))),
            (BootColumn::Stage2Tables, last.stage2_tables),
            (
                BootColumn::Resident,
                Some(last.resident_bytes.iter().flat_map(BTreeMap::values).sum()),
            ),
            (BootColumn::Overhead, last.overhead),
            (BootColumn::PagingInit, paging(|name| name == "instructions")),
            (BootColumn::PagingTlbi, paging(TLBI_BROADCAST.1)),
            (BootColumn::PagingAborts, paging(|name| name == "guest_aborts")),
        ];
        Some(Self { values: known(values), faults_by_level })
    }

    /// Returns the figures of a boot by a VMM without statistics.
    fn from_counts(segments: &[SegmentLine], lookups: Option<u64>) -> Self {
        // The VMM may have marks of its own.
        let init = segments.iter().position(|segment| segment.mark == mark::GUEST_INIT);
        let first_run = segments.iter().position(|segment| segment.span.is_some());
        let until = |end: usize| count(&segments[..end], |name| name == "instructions");
        let to_init = init.map(until);
        let values = [
            (BootColumn::Start, first_run.map(until)),
            (BootColumn::ToInit, to_init),
            (BootColumn::HostPart, host_part(to_init, &segments[..init.unwrap_or(0)])),
            (BootColumn::Whole, Some(until(segments.len()))),
            (BootColumn::Faults, lookups),
            (BootColumn::DcCivac, Some(count(segments, |name| name == "DC CIVAC"))),
            (BootColumn::Stage2Tlbi, Some(count(segments, is_stage2_tlbi))),
        ];
        Self { values: known(values), faults_by_level: BTreeMap::new() }
    }

    /// Returns a figure, if the boot has it.
    pub fn value(&self, column: BootColumn) -> Option<u64> {
        self.values.get(&column).copied()
    }

    /// Formats a figure.
    pub fn cell(&self, column: BootColumn) -> String {
        self.value(column).map_or_else(|| "–".to_owned(), |value| column.format(value))
    }
}

fn known<const N: usize>(values: [(BootColumn, Option<u64>); N]) -> BTreeMap<BootColumn, u64> {
    values.into_iter().filter_map(|(column, value)| Some((column, value?))).collect()
}

/// Returns the sum of counts of the whole run.
fn count(segments: &[SegmentLine], selected: impl Fn(&str) -> bool) -> u64 {
    let marks = [mark::UNMARKED_PROGRAM, mark::GUEST, mark::GUEST_INIT];
    let segments = segments.iter().filter(|segment| marks.contains(&segment.mark));
    let counts = segments.flat_map(|segment| &segment.counts);
    counts.filter(|(name, _)| selected(name)).map(|(_, count)| count).sum()
}

/// Returns the segments from a mark until the mark `until`, if this is the next one. A span divides the
/// segment of its mark.
fn segments_until(segments: &[SegmentLine], mark: u8, until: u8) -> Option<&[SegmentLine]> {
    let mut parts = segments.chunk_by(|one, next| one.mark == next.mark);
    let part = parts.find(|part| part[0].mark == mark)?;
    parts.next().filter(|next| next[0].mark == until)?;
    Some(part)
}

/// Returns the instructions of segments, if they were counted.
fn instructions(segments: &[SegmentLine]) -> Option<u64> {
    segments.iter().map(|segment| segment.counts.get("instructions").copied()).sum()
}

/// Returns how many of the instructions of segments are outside of the guest, if the entries into it were
/// counted.
fn host_part(instructions: Option<u64>, segments: &[SegmentLine]) -> Option<u64> {
    let count = |name| segments.iter().filter_map(|segment| segment.counts.get(name)).sum::<u64>();
    instructions.filter(|_| count(GUEST_ENTRIES) > 0)?.checked_sub(count(GUEST_ENTRIES_NS))
}

/// Formats instructions in millions, or nanoseconds in milliseconds.
fn format_millions(count: u64) -> String {
    format!("{}.{:03}", count / 1_000_000, count / 1_000 % 1_000)
}

/// Returns whether a TLBI invalidates stage-2 entries or a whole VMID.
fn is_stage2_tlbi(name: &str) -> bool {
    let operation = name.strip_prefix("TLBI ");
    let stage2 = ["IPAS2", "RIPAS2", "VMALLS12"];
    operation.is_some_and(|operation| stage2.iter().any(|kind| operation.starts_with(kind)))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::jobs::counts::read_segments;

    fn cells(figures: &BootFigures) -> String {
        BootColumn::ALL.map(|column| figures.cell(column)).join(" | ")
    }

    #[test]
    fn absent_figures_are_shown_as_dashes() {
        let figures = BootFigures::default();

        assert_eq!(cells(&figures), ["–"; BootColumn::ALL.len()].join(" | "));
    }

    /// Returns the figures of a boot with `faults` read faults.
    pub fn sample(faults: u64) -> BootFigures {
        const TIME: &str = r#""time":{"elapsed":1,"work":1,"starved":0}"#;
        let statistics = format!(
            r#"{{"schema":"granule.run/1","ended":"off","marks":[[1,336209056],[2,900000000]],"phases":[
            {{"name":"start","ns":30106304,"faults":{{"by.read":0,"translation.level3":0}},"resident":[]}},
            {{"name":"boot","ns":306102752,"faults":{{"by.read":{faults},"by.write":7,
              "translation.level2":14,"translation.level3":{faults}}},"resident":[{{"4096":26107904}}]}},
            {{"name":"first-minute","ns":93224384,"faults":{{"by.write":1,"translation.level3":1}},
              "resident":[{{"4096":36966400}}],"stage2_tables":81920,"overhead":3411968}}]}}"#
        );
        let counts = format!(
            "{{\"mark\":{},{TIME},\"counts\":{{\"DC CIVAC\":900000,\"instructions\":30106304}}}}\n\
             {{\"mark\":{},{TIME},\"counts\":{{\"DC CIVAC\":12000,\"guest_entries\":9,\
             \"guest_entries_ns\":250000999,\"instructions\":290000999}}}}\n\
             {{\"mark\":{},{TIME},\"counts\":{{\"DC CIVAC\":156,\"TLBI IPAS2E1IS\":5,\"TLBI VMALLS12E1IS\":300,\
             \"TLBI VAE1\":9}}}}\n\
             {{\"end\":true,\"segments\":3}}\n",
            mark::UNMARKED_PROGRAM,
            mark::GUEST,
            mark::GUEST_INIT
        );
        let statistics: BootStatistics = serde_json::from_str(&statistics).unwrap();
        let segments = read_segments(&counts).unwrap();
        BootFigures::from_statistics(&statistics, &segments).unwrap()
    }

    #[test]
    fn a_span_of_the_guest_is_part_of_its_boot() {
        const TIME: &str = r#""time":{"elapsed":1,"work":1,"starved":0}"#;
        let line = |mark: u8, span: &str, counts: &str| {
            format!("{{\"mark\":{mark},{span}{TIME},\"counts\":{{{counts}}}}}\n")
        };
        let text = [
            line(mark::GUEST, "", r#""instructions":1000000"#),
            line(
                mark::GUEST,
                r#""span":"paging_init","#,
                r#""instructions":34000000,"TLBI VAALE1IS":67,"TLBI VMALLE1":3,"guest_aborts":529"#,
            ),
            line(mark::GUEST, "", r#""instructions":5000000"#),
            line(mark::GUEST_INIT, "", r#""instructions":1"#),
            "{\"end\":true,\"segments\":4}\n".to_owned(),
        ];
        let statistics =
            r#"{"ended":"off","phases":[{"name":"start","ns":1},{"name":"boot","ns":2}]}"#;
        let statistics: BootStatistics = serde_json::from_str(statistics).unwrap();

        let segments = read_segments(&text.concat()).unwrap();

        let figures = BootFigures::from_statistics(&statistics, &segments);

        let figures = figures.unwrap();
        assert_eq!(figures.cell(BootColumn::ToInit), "40.000");
        assert!(cells(&figures).ends_with(" | 34.000 | 67 | 529"));
    }

    #[test]
    fn a_boot_without_statistics_has_its_counts() {
        let line = |mark: u8, span: &str, counts: &str| {
            format!(
                "{{\"mark\":{mark},{span}\"time\":{{\"elapsed\":1,\"work\":1,\"starved\":0}},\
                 \"counts\":{{{counts}}}}}\n"
            )
        };
        const RUN: &str = r#""span":"KVM_RUN","#;
        let text = [
            line(mark::PHASE_END, "", r#""instructions":170000000"#),
            line(mark::UNMARKED_PROGRAM, "", r#""instructions":6400000,"DC CIVAC":7"#),
            line(mark::UNMARKED_PROGRAM, RUN, r#""instructions":5000000"#),
            line(
                mark::GUEST,
                "",
                r#""instructions":20000000,"guest_entries":4,"guest_entries_ns":9000000"#,
            ),
            line(mark::GUEST_INIT, RUN, r#""instructions":80000000,"TLBI VMALLS12E1IS":2"#),
            line(mark::PHASE_END, "", r#""instructions":9"#),
            "{\"end\":true,\"segments\":6}\n".to_owned(),
        ];
        let segments = read_segments(&text.concat()).unwrap();

        let figures = BootFigures::from_counts(&segments, Some(70));

        let expected =
            "6.400 | 31.400 | 22.400 | 111.400 | – | – | 70 | 7 | 2 | – | – | – | – | – | –";
        assert_eq!(cells(&figures), expected);
    }

    #[test]
    fn figures_are_sums_over_the_whole_run() {
        let figures = sample(100);

        assert_eq!(
            cells(&figures),
            "30.106 | 290.000 | 40.000 | 320.107 | 306.102 | 869.893 | 108 | 912156 | 305 | 80K | 36100K | 3332K | – | – | –"
        );
        let levels = [("translation.level2", 14), ("translation.level3", 101)];
        assert_eq!(figures.faults_by_level, levels.map(|(name, n)| (name.to_owned(), n)).into());
    }
}
