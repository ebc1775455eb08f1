// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Figures of one boot whose page tables were measured.

use std::collections::BTreeMap;

use granule_types::{
    backing::Backing,
    record::HostInfo,
    units::{Bytes, Nanoseconds},
};
use serde::Serialize;

use crate::{
    host::{costs::CostTable, guest_init, kernel_tables::KernelTables},
    jobs::{
        counts::{CountError, SegmentLine},
        matrix::PlannedJob,
        outcome::{JobError, JobOutcome},
        work::MeasuredBoot,
    },
    kernel::image::PAGING_FUNCTION,
    options::Rodata,
    report::{
        count_table::{CountColumn, TLBI_BROADCAST, TLBI_LOCAL, column_sums},
        tlb_figures::LoadWalks,
    },
};

/// Identifier of the format of a record.
const SCHEMA: &str = "granule.boot/1";

/// Record of one boot, a line of `results.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BootRecord {
    schema: &'static str,
    host: HostInfo,
    pub memory: Bytes,
    pub rodata: Rodata,
    /// Backing of the measured guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    guest: Option<Backing>,
    /// Measured function.
    span: &'static str,
    /// Counts of the function, in a guest with those of the host.
    pub counters: BTreeMap<String, u64>,
    /// Time of the function by a cost table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_ns: Option<Nanoseconds>,
    #[serde(flatten)]
    pub tables: KernelTables,
    /// Walks of the model of TLBs in each load.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub loads: Vec<LoadWalks>,
}

/// Columns of counts in the report.
pub const COUNT_COLUMNS: [CountColumn; 9] = [
    ("instructions", |name| name == "instructions"),
    ("stores", |name| name == "stores"),
    TLBI_LOCAL,
    TLBI_BROADCAST,
    ("DSB ISH", |name| name == "DSB ISH"),
    ("DSB ISHST", |name| name == "DSB ISHST"),
    ("ISB", |name| name == "ISB"),
    ("DC ZVA", |name| name == "DC ZVA"),
    ("aborts", |name| name == "guest_aborts"),
];

impl BootRecord {
    /// Returns the record of a boot that ended well.
    pub fn from_outcome(
        job: &PlannedJob,
        outcome: &JobOutcome,
        costs: Option<&CostTable>,
    ) -> Result<Self, JobError> {
        outcome.passed_duration()?;
        let Some(MeasuredBoot { memory, rodata }) = job.work.measured_boot() else {
            return Err(outcome.test_error("measures no boot".to_owned()));
        };
        let guest = job.work.guest().map(|vm| vm.backing);
        let tables = match guest {
            None => serde_json::from_str(&outcome.report.results).map_err(JobError::Statistics)?,
            Some(_) => guest_init::reported_tables(&outcome.report.stdout).ok_or_else(|| {
                outcome.test_error("printed no report of the guest's page tables".to_owned())
            })?,
        };
        // The host boots before its guest.
        let counters = span_counts(&outcome.segments, usize::from(guest.is_some()))?;
        Ok(Self {
            schema: SCHEMA,
            host: outcome.report.host.clone().unwrap_or_default(),
            memory,
            rodata,
            guest,
            span: PAGING_FUNCTION,
            model_ns: costs.map(|costs| costs.model(&counters)),
            counters,
            tables,
            loads: job
                .machine
                .tlb
                .as_ref()
                .map_or_else(Vec::new, |model| LoadWalks::of_segments(&outcome.segments, model)),
        })
    }

    /// Returns the count of each column; a count that did not occur is 0.
    pub fn counts(&self) -> [u64; COUNT_COLUMNS.len()] {
        column_sums(&COUNT_COLUMNS, &self.counters)
    }
}

/// Returns the counts of a call of the measured function, by the number of the call.
pub fn span_counts(
    segments: &[SegmentLine],
    call: usize,
) -> Result<BTreeMap<String, u64>, CountError> {
    let mut calls: Vec<BTreeMap<String, u64>> = Vec::new();
    let mut was_in_span = false;
    for segment in segments {
        let is_in_span = segment.span.is_some();
        if is_in_span && !was_in_span {
            calls.push(BTreeMap::new());
        }
        if let (true, Some(counts)) = (is_in_span, calls.last_mut()) {
            for (name, count) in &segment.counts {
                *counts.entry(name.clone()).or_default() += count;
            }
        }
        was_in_span = is_in_span;
    }
    // A call without an end lasts until the power-off.
    if was_in_span || calls.len() != call + 1 {
        return Err(CountError::NoSpan { found: calls.len(), expected: call + 1 });
    }
    Ok(calls.swap_remove(call))
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Returns the record of a boot with this memory, count of broadcast TLBIs and dump.
    pub fn record(memory: Bytes, tlbis: u64, dump: &str) -> BootRecord {
        let counters = [
            ("instructions", 8 * tlbis),
            ("TLBI VAALE1IS", tlbis),
            ("TLBI VAE1ISnXS", 1),
            ("TLBI VMALLE1", 3),
        ];
        BootRecord {
            schema: SCHEMA,
            host: HostInfo::default(),
            memory,
            rodata: Rodata::Full,
            guest: None,
            span: PAGING_FUNCTION,
            counters: counters.map(|(name, count)| (name.to_owned(), count)).into(),
            model_ns: None,
            tables: KernelTables {
                mem_total: memory,
                mem_free: memory,
                page_tables: Bytes::kib(16),
                linear_tables: Some(Bytes::kib(8)),
                dump_sha256: Some(dump.to_owned()),
                dump: Some(dump.to_owned()),
            },
            loads: Vec::new(),
        }
    }

    fn segment(span: bool, instructions: u64) -> SegmentLine {
        SegmentLine {
            mark: 0x60,
            span: span.then(|| PAGING_FUNCTION.to_owned()),
            counts: [("instructions".to_owned(), instructions)].into(),
            ..SegmentLine::default()
        }
    }

    #[test]
    fn invalidations_are_local_or_broadcast() {
        let counts = record(Bytes::gib(4), 40, "").counts();

        assert_eq!(counts[..4], [320, 0, 3, 41]);
    }

    #[test]
    fn the_second_call_is_that_of_the_guest() {
        let segments = [(false, 1), (true, 2), (false, 4), (true, 8), (true, 16), (false, 32)]
            .map(|(span, instructions)| segment(span, instructions));

        assert_eq!(span_counts(&segments, 1).unwrap()["instructions"], 24);
        assert_eq!(span_counts(&segments[..3], 0).unwrap()["instructions"], 2);
        for (segments, call) in [(&segments[..], 0), (&segments[..3], 1), (&segments[..2], 0)] {
            assert!(matches!(span_counts(segments, call), Err(CountError::NoSpan { .. })));
        }
    }
}
