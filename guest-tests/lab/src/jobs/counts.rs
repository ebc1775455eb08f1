// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Parses the counts of the plugin and assigns them to phases.
//!
//! The plugin writes a line for each segment between two marks, in execution order, and an end line
//! when the emulator exits normally. Records have the same order, so marked segments and records
//! correspond one to one. Another order is an error.

use std::{collections::BTreeMap, path::PathBuf};

use serde::Deserialize;
use thiserror::Error;

use granule_types::{mark, phase::Phase, record::Record, units::Nanoseconds};

/// Counts between two marks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct SegmentLine {
    /// Mark that started the segment.
    pub mark: u8,
    /// Name of the function whose call the segment is.
    #[serde(default)]
    pub span: Option<String>,
    /// Sums over all CPUs, by name.
    pub counts: BTreeMap<String, u64>,
    /// Times measured by the plugin's clock, if it runs.
    #[serde(default)]
    pub time: Option<VirtualTime>,
    /// Counts of blocks of code by hexadecimal address, if they are counted.
    #[serde(default)]
    pub blocks: BTreeMap<String, BlockCounts>,
}

/// Counts of a block of code; the plugin's output has them as a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct BlockCounts {
    pub executions: u64,
    pub instructions: u64,
}

/// Times of a segment. Other fields of the plugin's output are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct VirtualTime {
    /// Sum of the times of all emulated CPUs in picoseconds.
    pub work: u64,
    /// Elapsed time of the emulated CPUs in picoseconds.
    pub elapsed: u64,
    /// Largest number of turns that a runnable CPU waited.
    #[serde(rename = "starved")]
    pub longest_wait: u64,
}

#[derive(Deserialize)]
struct EndLine {
    #[expect(dead_code, reason = "its presence distinguishes this line from a segment")]
    end: bool,
    segments: u64,
}

#[derive(Debug, Error)]
pub enum CountError {
    #[error(
        "the counting plugin did not write {path}: use a QEMU that supports plugins, and see the \
         emulator's log"
    )]
    Missing {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("line {line} of the counting plugin's output is malformed; run again")]
    MalformedLine {
        line: usize,
        #[source]
        source: serde_json::Error,
    },
    #[error("the counts have {0} segments and no end line: QEMU was killed")]
    Truncated(usize),
    #[error("the counts have {found} segments instead of {expected}: the file is damaged")]
    Incomplete { found: usize, expected: u64 },
    #[error(
        "a CPU of the emulated host waited for {wait} turns of other CPUs, more than {limit}: \
         elapsed time would be wrong; set another quantum with --quantum, or --smp"
    )]
    WaitTooLong { wait: u64, limit: u64 },
    #[error(
        "the counts have no marks of a program: it was not started, or its end was not reached"
    )]
    NoProgram,
    #[error("the counts have {0} marked steps instead of one: the removal has not reached its end")]
    NoStep(usize),
    #[error(
        "the counts have {found} calls of the measured function that ended instead of {expected}: \
         the machine did not boot to its end, or the function is not called by BL"
    )]
    NoSpan { found: usize, expected: usize },
    #[error(
        "the counts do not match the results: marks are [{marks}], results are [{results}]; the \
         test may have been killed"
    )]
    Mismatch { marks: String, results: String },
}

/// Parses the output of the plugin.
pub fn read_segments(text: &str) -> Result<Vec<SegmentLine>, CountError> {
    let mut segments = Vec::new();
    let mut expected = None;
    for (index, line) in text.lines().enumerate() {
        let malformed = |source| CountError::MalformedLine { line: index + 1, source };
        if let Ok(end) = serde_json::from_str::<EndLine>(line) {
            expected = Some(end.segments);
            continue;
        }
        match serde_json::from_str(line) {
            Ok(segment) => segments.push(segment),
            // The last line is incomplete if the emulator was killed while writing it.
            Err(_) if !text.ends_with('\n') && index + 1 == text.lines().count() => {}
            Err(source) => return Err(malformed(source)),
        }
    }
    match expected {
        None => Err(CountError::Truncated(segments.len())),
        Some(expected) if expected != segments.len() as u64 => {
            Err(CountError::Incomplete { found: segments.len(), expected })
        }
        Some(_) => Ok(segments),
    }
}

/// Checks that no runnable CPU waited more than `limit` turns in a phase.
pub fn check_waits(segments: &[SegmentLine], limit: u64) -> Result<(), CountError> {
    let phases = segments.iter().filter(|segment| phase_of(segment.mark).is_some());
    let wait = phases.filter_map(|segment| Some(segment.time?.longest_wait)).max().unwrap_or(0);
    if wait > limit {
        return Err(CountError::WaitTooLong { wait, limit });
    }
    Ok(())
}

/// Returns the phase that a mark starts.
pub fn phase_of(mark: u8) -> Option<Phase> {
    if mark::step_number(mark).is_some() {
        return Some(Phase::Step);
    }
    if is_end_of_round(mark) {
        return Some(Phase::Round);
    }
    Phase::TABLE_ORDER.into_iter().find(|phase| mark::immediate(*phase) == mark)
}

/// Reports whether a mark begins another segment of the same migration round.
fn is_end_of_round(mark: u8) -> bool {
    [mark::COLLECTION, mark::COLLECTED].contains(&mark)
}

/// Copies the counts of each marked segment into the record of the same phase. A migration round has
/// three segments: until the collection of its dirty bitmap, the collection, and what follows it, while
/// the vCPUs keep running. The counts are those of all three, the elapsed time is that of the collection,
/// as `ns` of the record.
pub fn merge_counts(segments: &[SegmentLine], records: &mut [Record]) -> Result<(), CountError> {
    let mut marked: Vec<(Phase, Vec<&SegmentLine>)> = Vec::new();
    for segment in segments {
        let Some(phase) = phase_of(segment.mark) else { continue };
        match marked.last_mut() {
            Some((Phase::Round, round)) if is_end_of_round(segment.mark) => round.push(segment),
            _ => marked.push((phase, vec![segment])),
        }
    }
    let same = marked.len() == records.len()
        && marked.iter().zip(&*records).all(|((phase, _), record)| *phase == record.phase);
    if !same {
        let list = |phases: &mut dyn Iterator<Item = Phase>| {
            phases.map(Phase::name).collect::<Vec<_>>().join(" ")
        };
        return Err(CountError::Mismatch {
            marks: list(&mut marked.iter().map(|(phase, _)| *phase)),
            results: list(&mut records.iter().map(|record| record.phase)),
        });
    }
    for ((phase, segments), record) in marked.into_iter().zip(records) {
        record.counters = sum_counts(segments.iter().copied());
        let is_timed =
            |segment: &&SegmentLine| phase != Phase::Round || segment.mark == mark::COLLECTION;
        let timed = segments.into_iter().find(is_timed).and_then(|segment| segment.time);
        record.elapsed_ns = timed.map(|time| Nanoseconds(time.elapsed.div_ceil(1000)));
    }
    Ok(())
}

/// Returns the sums of the counts of segments, by name.
fn sum_counts<'a>(segments: impl Iterator<Item = &'a SegmentLine>) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for (name, count) in segments.flat_map(|segment| &segment.counts) {
        *sums.entry(name.clone()).or_default() += count;
    }
    sums
}

/// Returns the segments of the run of a program that need not be marked; empty without one.
pub fn program_segments(segments: &[SegmentLine]) -> &[SegmentLine] {
    let start = segments.iter().position(|segment| segment.mark == mark::UNMARKED_PROGRAM);
    // After the mark at the end of the program, only the power-off follows.
    start.map_or(&[], |start| &segments[start..segments.len() - 1])
}

/// Returns the records of a program: each step that it marks, and the whole run. `head` has the
/// fields that all records share.
pub fn program_records(segments: &[SegmentLine], head: &Record) -> Result<Vec<Record>, CountError> {
    let run = program_segments(segments);
    if run.is_empty() {
        return Err(CountError::NoProgram);
    }
    let mut records = Vec::new();
    let mut repetitions = BTreeMap::<u32, u32>::new();
    for segment in run {
        let Some(number) = mark::step_number(segment.mark) else { continue };
        let repetition = repetitions.entry(number).or_default();
        let mut record = head.clone();
        (record.phase, record.round) = (Phase::Step, Some(number));
        record.config.iteration = *repetition;
        *repetition += 1;
        records.push(with_counts(record, std::slice::from_ref(segment)));
    }
    let whole = Record { phase: Phase::WholeRun, ..head.clone() };
    records.push(with_counts(whole, run));
    Ok(records)
}

/// Returns a record with the sum of the counts and times of segments.
fn with_counts(mut record: Record, segments: &[SegmentLine]) -> Record {
    record.counters = sum_counts(segments.iter());
    let sum = |time: fn(&VirtualTime) -> u64| {
        let picoseconds: u64 =
            segments.iter().filter_map(|segment| Some(time(&segment.time?))).sum();
        Nanoseconds(picoseconds.div_ceil(1000))
    };
    record.ns = sum(|time| time.work);
    record.elapsed_ns = Some(sum(|time| time.elapsed));
    record
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPLETE_FILE: &str = concat!(
        r#"{"mark":96,"counts":{"IC IALLU":1},"time":{"elapsed":1,"work":1,"starved":0}}"#,
        "\n",
        r#"{"mark":97,"counts":{"DC CIVAC":7},"time":{"elapsed":2500,"work":4000,"starved":7}}"#,
        "\n",
        r#"{"mark":96,"counts":{},"time":{"elapsed":1,"work":1,"starved":0}}"#,
        "\n",
        r#"{"end":true,"segments":3}"#,
        "\n",
    );

    fn record(phase: Phase) -> Record {
        let config = r#"{"mode":"","backing":"anonymous","memory":1,"vcpus":1,"seed":0,
                         "iteration":0}"#;
        serde_json::from_str(&format!(
            r#"{{"schema":"","config":{config},"phase":"{phase}","ns":1}}"#
        ))
        .unwrap()
    }

    #[test]
    fn counts_and_elapsed_time_are_assigned_to_the_marked_phase() {
        let segments = read_segments(COMPLETE_FILE).unwrap();
        let mut records = [record(Phase::Create)];

        merge_counts(&segments, &mut records).unwrap();

        assert_eq!(records[0].counters, [("DC CIVAC".to_owned(), 7)].into());
        assert_eq!(records[0].elapsed_ns, Some(Nanoseconds(3)));
    }

    #[test]
    fn a_round_has_the_counts_of_its_segments_and_the_elapsed_time_of_its_collection() {
        let segment = |mark: u8, count: u64, elapsed: u64| SegmentLine {
            mark,
            counts: [("guest_aborts".to_owned(), count)].into(),
            time: Some(VirtualTime { work: elapsed, elapsed, longest_wait: 0 }),
            ..SegmentLine::default()
        };
        let round = mark::immediate(Phase::Round);
        let segments = [
            segment(round, 40, 10_000_000),
            segment(mark::COLLECTION, 2, 3_000),
            segment(mark::COLLECTED, 1, 1_000),
            segment(round, 50, 20_000_000),
            segment(mark::COLLECTION, 3, 4_000),
            segment(mark::COLLECTED, 1, 1_000),
            segment(mark::immediate(Phase::Stop), 5, 6_000),
        ];
        let mut records = [Phase::Round, Phase::Round, Phase::Stop].map(record);

        merge_counts(&segments, &mut records).unwrap();

        let figures = records.each_ref().map(|record| {
            (record.counters["guest_aborts"], record.elapsed_ns.map(|elapsed| elapsed.0))
        });
        assert_eq!(figures, [(43, Some(3)), (54, Some(4)), (5, Some(6))]);
    }

    #[test]
    fn a_wait_beyond_the_limit_is_an_error() {
        let segments = read_segments(COMPLETE_FILE).unwrap();

        assert!(check_waits(&segments, 7).is_ok());
        let refused = check_waits(&segments, 6);
        assert!(matches!(refused, Err(CountError::WaitTooLong { wait: 7, limit: 6 })));
    }

    #[test]
    fn a_truncated_file_is_an_error() {
        for cut in 0..COMPLETE_FILE.len() - 2 {
            assert!(read_segments(&COMPLETE_FILE[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn a_missing_segment_is_an_error() {
        let lost: String = COMPLETE_FILE.lines().skip(1).map(|l| format!("{l}\n")).collect();

        let read = read_segments(&lost);
        assert!(matches!(read, Err(CountError::Incomplete { found: 2, expected: 3 })));
    }

    #[test]
    fn phases_that_do_not_match_are_an_error() {
        let segments = read_segments(COMPLETE_FILE).unwrap();
        for mut records in [
            vec![],
            vec![record(Phase::Update)],
            vec![record(Phase::Create), record(Phase::Update)],
        ] {
            let merged = merge_counts(&segments, &mut records);
            assert!(matches!(merged, Err(CountError::Mismatch { .. })));
        }
    }

    #[test]
    fn a_program_has_a_record_for_each_step_and_one_for_the_whole_run() {
        let segment = |mark: u8, civac: u64| SegmentLine {
            mark,
            counts: [("DC CIVAC".to_owned(), civac)].into(),
            time: Some(VirtualTime { work: 2000, elapsed: 1000, longest_wait: 0 }),
            ..SegmentLine::default()
        };
        let marks =
            [(0x60, 9), (0x70, 1), (0x78, 10), (0x60, 2), (0x79, 20), (0x78, 30), (0x60, 9)];
        let segments = marks.map(|(mark, civac)| segment(mark, civac));

        let records = program_records(&segments, &record(Phase::Create)).unwrap();

        let figures: Vec<_> = records
            .iter()
            .map(|record| {
                let civac = record.counters["DC CIVAC"];
                (record.phase, record.round, record.config.iteration, civac, record.ns.0)
            })
            .collect();
        let (step, whole) = (Phase::Step, Phase::WholeRun);
        let expected = [
            (step, Some(1), 0, 10, 2),
            (step, Some(2), 0, 20, 2),
            (step, Some(1), 1, 30, 2),
            (whole, None, 0, 63, 10),
        ];
        assert_eq!(figures, expected);
        assert_eq!(records[3].elapsed_ns, Some(Nanoseconds(5)));
        let unfinished = program_records(&segments[..2], &records[0]);
        assert!(matches!(unfinished, Err(CountError::NoProgram)));
    }
}
