// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the counting plugin counted, read back and given to the phases it belongs to.
//!
//! The plugin writes a line for each segment between two marks, in the order of execution, and a
//! last line once the emulator has ended in an orderly way. Results come in the same order, so the
//! marked segments and the results pair up one to one; anything else is an error, because counts
//! would belong to the wrong phase.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use granule_types::{mark, phase::Phase, record::Record};

/// What was executed between two marks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Its place in the order of execution, from 0.
    pub seq: u64,
    /// The mark that began it.
    pub mark: u8,
    /// Counts of all CPUs together, by name.
    pub counts: BTreeMap<String, u64>,
    /// Counts of each CPU that counted anything.
    #[serde(default)]
    pub per_cpu: BTreeMap<u32, BTreeMap<String, u64>>,
}

/// The last line.
#[derive(Deserialize)]
struct End {
    #[expect(dead_code, reason = "being there tells this line from a segment")]
    end: bool,
    segments: u64,
}

/// Why counts cannot be used.
#[derive(Debug, Error)]
pub enum CountError {
    /// There is no file.
    #[error(
        "the counting plugin left nothing in {path}: does this QEMU load it? See the emulator's log"
    )]
    Missing {
        /// Which file.
        path: PathBuf,
        /// Why it cannot be read.
        #[source]
        source: std::io::Error,
    },
    /// A line is damaged.
    #[error("the counting plugin's line {line} is damaged; run again")]
    Line {
        /// Which, from 1.
        line: usize,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// The end is missing: the emulator was killed.
    #[error("the counts end after {0} segments without the plugin's last line: QEMU was killed")]
    Truncated(usize),
    /// The end says another number.
    #[error("the counts hold {found} segments where {said} were written; the file was damaged")]
    Lost {
        /// What is there.
        found: usize,
        /// What should be.
        said: u64,
    },
    /// Marks and results do not pair up.
    #[error(
        "the counts do not belong to the results: marks say [{marks}], results say [{results}]; \
         was the test killed in the middle?"
    )]
    Mismatch {
        /// The phases marked, in order.
        marks: String,
        /// The phases reported, in order.
        results: String,
    },
}

/// Reads what the plugin wrote.
///
/// # Errors
/// It is damaged or not whole.
pub fn read_segments(text: &str) -> Result<Vec<Segment>, CountError> {
    let mut segments = Vec::new();
    let mut said = None;
    for (index, line) in text.lines().enumerate() {
        let damaged = |source| CountError::Line {
            line: index + 1,
            source,
        };
        if let Ok(end) = serde_json::from_str::<End>(line) {
            said = Some(end.segments);
            continue;
        }
        match serde_json::from_str(line) {
            Ok(segment) => segments.push(segment),
            // A line that breaks off is the last one of an emulator that was killed.
            Err(_) if !text.ends_with('\n') && index + 1 == text.lines().count() => {}
            Err(source) => return Err(damaged(source)),
        }
    }
    match said {
        None => Err(CountError::Truncated(segments.len())),
        Some(said) if said != segments.len() as u64 => Err(CountError::Lost {
            found: segments.len(),
            said,
        }),
        Some(_) => Ok(segments),
    }
}

/// The phase a mark begins, if it begins one.
fn phase_of(mark: u8) -> Option<Phase> {
    Phase::IN_ORDER
        .into_iter()
        .find(|phase| mark::immediate(*phase) == mark)
}

/// Puts the counts of each marked segment into the record of the same phase.
///
/// # Errors
/// The phases marked are not the phases reported, in the same order.
pub fn merge(segments: &[Segment], records: &mut [Record]) -> Result<(), CountError> {
    let marked: Vec<(Phase, &Segment)> = segments
        .iter()
        .filter_map(|segment| Some((phase_of(segment.mark)?, segment)))
        .collect();
    let same = marked.len() == records.len()
        && marked
            .iter()
            .zip(&*records)
            .all(|((phase, _), record)| *phase == record.phase);
    if !same {
        let list = |phases: &mut dyn Iterator<Item = Phase>| {
            phases.map(Phase::name).collect::<Vec<_>>().join(" ")
        };
        return Err(CountError::Mismatch {
            marks: list(&mut marked.iter().map(|(phase, _)| *phase)),
            results: list(&mut records.iter().map(|record| record.phase)),
        });
    }
    for ((_, segment), record) in marked.into_iter().zip(records) {
        record.counters.clone_from(&segment.counts);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = concat!(
        r#"{"seq":0,"mark":96,"counts":{"IC IALLU":1},"per_cpu":{"0":{"IC IALLU":1}}}"#,
        "\n",
        r#"{"seq":1,"mark":97,"counts":{"DC CIVAC":7},"per_cpu":{"3":{"DC CIVAC":7}}}"#,
        "\n",
        r#"{"seq":2,"mark":96,"counts":{},"per_cpu":{}}"#,
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
    fn counts_go_to_the_phase_they_were_marked_with() {
        let segments = read_segments(WHOLE).unwrap();
        let mut records = [record(Phase::Create)];

        merge(&segments, &mut records).unwrap();

        assert_eq!(records[0].counters["DC CIVAC"], 7);
        assert_eq!(records[0].counters.len(), 1);
    }

    #[test]
    fn a_file_cut_anywhere_before_its_last_line_feed_is_noticed() {
        for cut in 0..WHOLE.len() - 2 {
            assert!(read_segments(&WHOLE[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn a_lost_segment_is_noticed() {
        let lost: String = WHOLE.lines().skip(1).map(|l| format!("{l}\n")).collect();

        assert!(matches!(
            read_segments(&lost),
            Err(CountError::Lost { found: 2, said: 3 })
        ));
    }

    #[test]
    fn phases_that_do_not_pair_up_are_an_error() {
        let segments = read_segments(WHOLE).unwrap();
        for mut records in [
            vec![],
            vec![record(Phase::Update)],
            vec![record(Phase::Create), record(Phase::Update)],
        ] {
            assert!(matches!(
                merge(&segments, &mut records),
                Err(CountError::Mismatch { .. })
            ));
        }
    }
}
