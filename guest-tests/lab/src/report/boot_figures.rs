// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Figures of one guest boot.
//!
//! `granule run` writes its statistics to the results file and executes
//! [marks](granule_types::mark). *Start* ends at the guest's first instruction; *to init* and *to
//! login* last from there to the guest's PID 1 and to the login prompt. Of a user's VMM there are counts
//! only: *start* ends at the first `KVM_RUN`, *to init* begins with the program, and its memory faults
//! are the lookups of the host's page, on a kernel without series. Faults and CMOs are those
//! of the whole run; counts include host and guest. Of the instructions *to init* of a guest with one
//! vCPU, those outside of the guest are the *host's part*, on a CPU with VHE. The columns of
//! `paging_init()` are those of the guest's kernel, if it has a `System.map`.

use std::collections::BTreeMap;

use granule_types::{mark, units::Bytes};
use serde::Deserialize;

use crate::{
    host::guest_init,
    jobs::{
        boot::{FAULT_STALLS, FAULT_STALLS_NS, GUEST_ENTRIES, GUEST_ENTRIES_NS},
        counts::SegmentLine,
        matrix::PlannedJob,
        outcome::{JobError, JobOutcome},
    },
    report::{count_table::TLBI_BROADCAST, table_figures::span_counts},
};

/// Statistics of `granule run --stats`; fields that the report does not use are ignored.
#[derive(Debug, Deserialize)]
pub struct BootStatistics {
    #[serde(rename = "ended")]
    outcome: String,
    #[serde(default)]
    marks: Vec<(u8, u64)>,
    phases: Vec<BootPhaseStatistics>,
}

#[derive(Debug, Deserialize)]
struct BootPhaseStatistics {
    name: String,
    ns: u64,
    #[serde(default)]
    faults: BTreeMap<String, u64>,
    #[serde(default)]
    stalls: BTreeMap<String, u64>,
    #[serde(default, rename = "resident")]
    resident_bytes: Vec<BTreeMap<u64, u64>>,
    stage2_tables: Option<u64>,
    overhead: Option<u64>,
}

impl BootStatistics {
    /// Returns the number (`.count`) or the time (`.ns`) of stalls in faults, by the type and level of the
    /// fault; empty if no stalls were measured.
    fn fault_stalls(&self, suffix: &str) -> BTreeMap<&str, u64> {
        let mut sums = BTreeMap::new();
        for (name, count) in self.phases.iter().flat_map(|phase| &phase.stalls) {
            // Names of other stalls have no level.
            if let Some(name) = name.strip_suffix(suffix).filter(|name| name.contains('.')) {
                *sums.entry(name).or_default() += count;
            }
        }
        sums
    }

    /// Checks that each fault that the host's kernel counted has a stall, if stalls were measured.
    fn check_stalls(&self) -> Result<(), String> {
        for (name, stalls) in self.fault_stalls(".count") {
            let faults: u64 = self.phases.iter().filter_map(|phase| phase.faults.get(name)).sum();
            if faults != stalls {
                return Err(format!("measured {stalls} stalls of {faults} faults {name}"));
            }
        }
        Ok(())
    }

    /// Checks that the plugin counted as many faults as there are stalls, if it counted any, and that their
    /// instructions and the time of the stalls differ by at most a percent.
    fn check_stall_times(&self, faults: u64, instructions: u64) -> Result<(), String> {
        let sum = |suffix| self.fault_stalls(suffix).values().sum::<u64>();
        let (stalls, nanoseconds) = (sum(".count"), sum(".ns"));
        if faults > 0 && faults != stalls {
            return Err(format!("measured {stalls} stalls of {faults} faults"));
        }
        if faults > 0 && nanoseconds.abs_diff(instructions) * 100 > instructions {
            let text = format!("measured {nanoseconds} ns of stalls that last {instructions} ns");
            return Err(text);
        }
        Ok(())
    }

    /// Checks that each lookup of the host's page, which the plugin counted, has a stall, if stalls were
    /// measured. The last fault of a vCPU may have none, and one of the access flag has no lookup.
    fn check_lookups(&self, lookups: Option<u64>, vcpus: u32) -> Result<(), String> {
        let stalls = self.fault_stalls(".count");
        let with_lookup = stalls.iter().filter(|(name, _)| !name.starts_with("access-flag"));
        let sum: u64 = with_lookup.map(|(_, count)| count).sum();
        match lookups {
            Some(lookups) if !stalls.is_empty() && sum + u64::from(vcpus) < lookups => {
                Err(format!("measured {sum} stalls of {lookups} lookups of a page"))
            }
            _ => Ok(()),
        }
    }
}

/// Checks the stalls of a guest with one vCPU against the number and the instructions of its faults that
/// the plugin counted, if both were measured: an instruction takes a nanosecond, and the measured times
/// begin and end in the handlers of the traces.
fn check_stall_times(statistics: &BootStatistics, outcome: &JobOutcome) -> Result<(), String> {
    let [faults, instructions] = [
        count(&outcome.segments, |name| name == FAULT_STALLS),
        count(&outcome.segments, |name| name == FAULT_STALLS_NS),
    ];
    statistics.check_stall_times(faults, instructions)
}

/// Returns how often the host looked up a page for a stage-2 fault, if that is once for each. Series omit
/// lookups, or look up pages without a fault.
fn lookups_of_plain_kernel(outcome: &JobOutcome) -> Option<u64> {
    let series = outcome.report.host.as_ref()?.series.as_ref()?;
    let lookups = count(&outcome.segments, |name| name == "page_lookups");
    // A kernel without a `System.map` has no count.
    (series.is_empty() && lookups > 0).then_some(lookups)
}

/// Value that the guest writes to the boot timer when its login prompt is ready.
const LOGIN_READY: u8 = 2;

/// Figures of one boot, in the order of [`BOOT_COLUMNS`]; times start with the VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootFigures {
    pub values: [Option<u64>; BOOT_COLUMNS.len()],
    /// Nonzero numbers of memory faults by type and level.
    pub faults_by_level: BTreeMap<String, u64>,
}

/// Heading of a column, and the function that formats its figures.
type BootColumn = (&'static str, fn(u64) -> String);

/// Columns of the report. Instructions are counted if a mark ends their segment.
pub const BOOT_COLUMNS: [BootColumn; 15] = [
    ("start M instr.", format_millions),
    ("to init M instr.", format_millions),
    ("host's part", format_millions),
    ("whole M instr.", format_millions),
    ("to init ms", format_millions),
    ("to login ms", format_millions),
    ("memory faults", |count| count.to_string()),
    ("DC CIVAC", |count| count.to_string()),
    ("stage-2 TLBI", |count| count.to_string()),
    ("stage-2 tables", |bytes| Bytes(bytes).to_string()),
    ("resident", |bytes| Bytes(bytes).to_string()),
    ("beyond guest memory", |bytes| Bytes(bytes).to_string()),
    ("paging_init M instr.", format_millions),
    ("paging_init TLBI broadcast", |count| count.to_string()),
    ("paging_init aborts", |count| count.to_string()),
];

/// Indices in [`BOOT_COLUMNS`] of the columns with charts.
pub const TO_INIT_COLUMN: usize = 4;
pub const TO_LOGIN_COLUMN: usize = 5;
pub const FAULTS_COLUMN: usize = 6;
pub const DC_CIVAC_COLUMN: usize = 7;
/// Index of the first of the last columns, which a report omits if no guest has them.
pub const PAGING_COLUMN: usize = 12;

impl BootFigures {
    pub fn from_outcome(job: &PlannedJob, outcome: &JobOutcome) -> Result<Self, JobError> {
        outcome.passed_duration()?;
        let failed = |reason: &str| outcome.test_error(reason.to_owned());
        if !outcome.report.stdout.contains(guest_init::CHECKS_PASSED) {
            return Err(failed("printed no report of the guest's PID 1"));
        }
        let vcpus = format!("vcpus {}", job.guest_vcpus);
        if !outcome.report.stdout.contains(&format!("{vcpus},")) {
            return Err(failed(&format!("printed no report of a guest with {vcpus}")));
        }
        let lookups = lookups_of_plain_kernel(outcome);
        if job.vmm.is_some() {
            return Ok(Self::from_counts(&outcome.segments, lookups));
        }
        let statistics: BootStatistics =
            serde_json::from_str(&outcome.report.results).map_err(JobError::Statistics)?;
        if statistics.outcome != "off" {
            return Err(failed("ended before the guest powered off"));
        }
        statistics
            .check_stalls()
            .and_then(|()| statistics.check_lookups(lookups, job.guest_vcpus))
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
        Some(Self {
            values: [
                to_guest.and_then(instructions),
                to_init.and_then(instructions),
                to_init.and_then(|to_init| host_part(instructions(to_init), to_init)),
                Some(count(segments, |name| name == "instructions")),
                Some(boot.ns),
                ready.map(|(_, ns)| ns.saturating_sub(start.ns)),
                faults,
                Some(count(segments, |name| name == "DC CIVAC")),
                Some(count(segments, is_stage2_tlbi)),
                last.stage2_tables,
                Some(last.resident_bytes.iter().flat_map(BTreeMap::values).sum()),
                last.overhead,
                paging(|name| name == "instructions"),
                paging(TLBI_BROADCAST.1),
                paging(|name| name == "guest_aborts"),
            ],
            faults_by_level,
        })
    }

    /// Returns the figures of a boot by a VMM without statistics.
    fn from_counts(segments: &[SegmentLine], lookups: Option<u64>) -> Self {
        // The VMM may have marks of its own.
        let init = segments.iter().position(|segment| segment.mark == mark::GUEST_INIT);
        let first_run = segments.iter().position(|segment| segment.span.is_some());
        let until = |end: usize| count(&segments[..end], |name| name == "instructions");
        let mut values = [None; BOOT_COLUMNS.len()];
        values[0] = first_run.map(until);
        values[1] = init.map(until);
        values[2] = host_part(values[1], &segments[..init.unwrap_or(0)]);
        values[3] = Some(until(segments.len()));
        values[FAULTS_COLUMN] = lookups;
        values[DC_CIVAC_COLUMN] = Some(count(segments, |name| name == "DC CIVAC"));
        values[DC_CIVAC_COLUMN + 1] = Some(count(segments, is_stage2_tlbi));
        Self { values, faults_by_level: BTreeMap::new() }
    }

    pub fn cells(&self) -> [String; BOOT_COLUMNS.len()] {
        let mut values = self.values.iter();
        BOOT_COLUMNS.map(|(_, format)| {
            let value = values.next().copied().flatten();
            value.map_or_else(|| "–".to_owned(), format)
        })
    }
}

/// Returns the sum of counts of the whole run.
fn count(segments: &[SegmentLine], selected: fn(&str) -> bool) -> u64 {
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

    #[test]
    fn absent_figures_are_shown_as_dashes() {
        let figures = BootFigures { values: Default::default(), faults_by_level: BTreeMap::new() };

        assert_eq!(figures.cells(), ["–"; BOOT_COLUMNS.len()]);
    }

    #[test]
    fn each_counted_fault_needs_a_stall_if_stalls_are_measured() {
        let read = |stalls: &str| {
            let text = format!(
                r#"{{"ended":"off","phases":[{{"name":"boot","ns":1,"faults":{{"permission.level3":5}},
                "stalls":{{"mmio.count":9{stalls}}}}},{{"name":"run","ns":1,"faults":{{
                "permission.level3":2}},"stalls":{{"mmio.count":9{stalls}}}}}]}}"#
            );
            serde_json::from_str::<BootStatistics>(&text).unwrap().check_stalls()
        };

        assert_eq!(read(""), Ok(()));
        assert_eq!(read(r#","lock-wait.count":3"#), Ok(()));
        let error = read(r#","permission.level3.count":3"#).unwrap_err();
        assert_eq!(error, "measured 6 stalls of 7 faults permission.level3");
    }

    #[test]
    fn each_lookup_of_a_page_needs_a_stall_if_stalls_are_measured() {
        let check = |stalls: &str, lookups| {
            let phase = |name: &str| {
                format!(
                    r#"{{"name":"{name}","ns":1,"stalls":{{"mmio.count":9,"lost":0{stalls}}}}}"#
                )
            };
            let text =
                format!(r#"{{"ended":"off","phases":[{},{}]}}"#, phase("boot"), phase("run"));
            serde_json::from_str::<BootStatistics>(&text).unwrap().check_lookups(lookups, 2)
        };
        let stalls = r#","access-flag.level3.count":9,"permission.level3.count":3,
            "translation.level3.count":4"#;

        assert_eq!(check("", Some(5)), Ok(()));
        assert_eq!(check(stalls, None), Ok(()));
        assert_eq!(check(stalls, Some(14)), Ok(()));
        assert_eq!(check(stalls, Some(16)), Ok(()), "the last fault of each vCPU");
        let error = check(stalls, Some(17)).unwrap_err();
        assert_eq!(error, "measured 14 stalls of 17 lookups of a page");
    }

    #[test]
    fn stalls_have_the_number_and_time_of_the_counted_faults() {
        let text = r#"{"ended":"off","phases":[{"name":"boot","ns":1,"stalls":{"mmio.count":9,
            "mmio.ns":800,"lock-wait.count":1,"lock-wait.ns":90,"permission.level3.count":2,
            "permission.level3.ns":400,"translation.level3.count":1,"translation.level3.ns":600}}]}"#;
        let statistics: BootStatistics = serde_json::from_str(text).unwrap();
        let check = |faults, instructions| statistics.check_stall_times(faults, instructions);

        assert_eq!(check(0, 0), Ok(()), "not counted");
        assert_eq!(check(3, 1010), Ok(()));
        assert_eq!(check(3, 991), Ok(()));
        assert_eq!(check(4, 1000).unwrap_err(), "measured 3 stalls of 4 faults");
        let error = "measured 1000 ns of stalls that last 1020 ns";
        assert_eq!(check(3, 1020).unwrap_err(), error);
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

        let cells = figures.unwrap().cells();
        assert_eq!(cells[1], "40.000");
        assert_eq!(cells[PAGING_COLUMN..], ["34.000", "67", "529"]);
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
        assert_eq!(figures.cells().join(" | "), expected);
    }

    #[test]
    fn figures_are_sums_over_the_whole_run() {
        let figures = sample(100);

        assert_eq!(
            figures.cells().join(" | "),
            "30.106 | 290.000 | 40.000 | 320.107 | 306.102 | 869.893 | 108 | 912156 | 305 | 80K | 36100K | 3332K | – | – | –"
        );
        let levels = [("translation.level2", 14), ("translation.level3", 101)];
        assert_eq!(figures.faults_by_level, levels.map(|(name, n)| (name.to_owned(), n)).into());
    }
}
