// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Metrics: the figures by which `granule compare`, the lab and its bisection judge.

use std::{collections::BTreeMap, convert::Infallible, str::FromStr};

use granule_types::record::Record;
use serde::{Deserialize, Serialize};

/// Name of the time, the default metric.
pub(crate) const TIME_METRIC: &str = "time";

/// Metric: the time, a count, or the sum over a class of instructions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Metric(String);

/// Other name of the time. The time of a record with an elapsed time is that one.
const ELAPSED: &str = "elapsed";

/// Names of the kernel functions whose calls the lab counts.
pub const FUNCTION_COUNTS: [&str; 7] = [
    "guest_aborts",
    "page_lookups",
    "notifier_unmaps",
    "stage2_maps",
    "memcache_topups",
    "permission_relaxations",
    "timer_ticks",
];

/// Events that `granule bench` counts under these names.
const EVENTS: [&str; 6] = [
    "translation_faults",
    "access_flag_faults",
    "permission_faults",
    "guest_writes",
    "pages_logged",
    "clean_pages_logged",
];

/// Starts of the names of tracepoints and statistics, which a kernel defines, of gauges, and of
/// instructions without a name.
const OPEN_PREFIXES: [&str; 5] = ["kvm_", "vcpu.", "vm.", "host.", UNNAMED_INSTRUCTION];
/// Start of the names of instructions without a name.
const UNNAMED_INSTRUCTION: &str = "sys_";
/// First words of the names of barriers.
const BARRIERS: [&str; 2] = ["DSB", "ISB"];

/// Classes of instructions.
const CLASSES: [&str; 3] = ["DC", "IC", "TLBI"];
/// Operations of `DC` and `IC` (Arm ARM, C5.3).
const CACHE_OPERATIONS: [&str; 35] = [
    "CGDSW", "CGDVAC", "CGDVADP", "CGDVAP", "CGSW", "CGVAC", "CGVADP", "CGVAP", "CIGDPAE",
    "CIGDPAPA", "CIGDSW", "CIGDVAC", "CIGSW", "CIGVAC", "CIPAE", "CIPAPA", "CISW", "CIVAC", "CSW",
    "CVAC", "CVADP", "CVAP", "CVAU", "GVA", "GZVA", "IALLU", "IALLUIS", "IGDSW", "IGDVAC", "IGSW",
    "IGVAC", "ISW", "IVAC", "IVAU", "ZVA",
];
/// Operations of `TLBI` without exception level, shareability and `nXS` (Arm ARM, C5.5).
const TLB_OPERATIONS: [&str; 16] = [
    "ALL", "ASID", "IPAS2", "IPAS2L", "RIPAS2", "RIPAS2L", "RVA", "RVAA", "RVAAL", "RVAL", "VA",
    "VAA", "VAAL", "VAL", "VMALL", "VMALLS12",
];

impl Metric {
    /// Parses a metric of the lab, whose names are known before a boot.
    ///
    /// # Errors
    /// The lab counts nothing of this name.
    pub fn parse_of_lab(text: &str) -> Result<Self, String> {
        let Ok(metric) = text.parse::<Self>();
        let name = metric.name();
        let is_known = metric.is_time()
            || FUNCTION_COUNTS.contains(&name)
            || EVENTS.contains(&name)
            || OPEN_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            || metric.is_of_instructions();
        if is_known {
            return Ok(metric);
        }
        Err(format!(
            "unknown count; expected {TIME_METRIC}, an instruction such as 'DC CIVAC', a class of \
             instructions ({}), an event of KVM (kvm_exit), or one of: {}",
            CLASSES.join(", "),
            [FUNCTION_COUNTS.as_slice(), &EVENTS].concat().join(", ")
        ))
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Reports whether the metric is the time.
    pub fn is_time(&self) -> bool {
        self.0 == TIME_METRIC
    }

    /// Reports whether the metric is an instruction or a class, which a kernel may not execute.
    pub fn is_of_instructions(&self) -> bool {
        match self.0.split_once(' ') {
            None => CLASSES.contains(&self.name()),
            Some(("DC" | "IC", operation)) => CACHE_OPERATIONS.contains(&operation),
            Some(("TLBI", operation)) => is_tlb_operation(operation),
            Some(_) => false,
        }
    }

    /// Reports whether a run with counters that lacks the metric has not executed it: it is an instruction,
    /// with or without a name, a class or a barrier. Any other absent count was not counted.
    pub fn is_zero_if_absent(&self) -> bool {
        let barrier = self.0.split(' ').next().is_some_and(|word| BARRIERS.contains(&word));
        self.is_of_instructions() || barrier || self.0.starts_with(UNNAMED_INSTRUCTION)
    }

    /// Returns the figure of a record: the elapsed time in nanoseconds, if it was measured, or the
    /// count. Returns `None` if the record lacks it.
    pub fn figure(&self, record: &Record) -> Option<u64> {
        if self.is_time() {
            return Some(record.elapsed_ns.unwrap_or(record.ns).0);
        }
        count(&record.counters, [&record.events, &record.gauges], &self.0)
    }
}

/// Returns a count, or the sum over a class of instructions, such as `TLBI`. In a run with counters,
/// an instruction that was not executed has the count 0; any other absent count was not counted.
pub(crate) fn count(
    counters: &BTreeMap<String, u64>,
    others: [&BTreeMap<String, u64>; 2],
    name: &str,
) -> Option<u64> {
    let found = [counters].into_iter().chain(others).find_map(|counts| counts.get(name));
    let is_in_class = |other: &str| other.split_once(' ').is_some_and(|(class, _)| class == name);
    let class = counters.iter().filter(|(other, _)| is_in_class(other));
    found.copied().or_else(|| {
        let is_counted = !counters.is_empty() && Metric::from(name).is_zero_if_absent();
        is_counted.then(|| class.map(|(_, count)| count).sum())
    })
}

impl From<&str> for Metric {
    fn from(name: &str) -> Self {
        Self(if name == ELAPSED { TIME_METRIC } else { name }.to_owned())
    }
}

impl FromStr for Metric {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text.into())
    }
}

/// Reports whether a TLBI operation exists: `IPAS2E1IS`, `RVALE1OSnXS`.
fn is_tlb_operation(text: &str) -> bool {
    let text = text.strip_suffix("nXS").unwrap_or(text);
    let text = text.strip_suffix("IS").or_else(|| text.strip_suffix("OS")).unwrap_or(text);
    let operation = ["E1", "E2", "E3"].into_iter().find_map(|level| text.strip_suffix(level));
    operation.is_some_and(|operation| TLB_OPERATIONS.contains(&operation))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::record;

    #[test]
    fn the_names_of_the_lab_are_known_and_a_misspelled_one_is_refused() {
        for name in [
            "time",
            "elapsed",
            "guest_aborts",
            "DC CIVAC",
            "IC IALLUIS",
            "TLBI IPAS2E1IS",
            "TLBI VMALLS12E1IS",
            "TLBI RVALE1OSnXS",
            "TLBI ASIDE1IS",
            "TLBI",
            "kvm_exit",
            "permission_faults",
            "vcpu.exits",
        ] {
            assert!(Metric::parse_of_lab(name).is_ok(), "{name}");
        }
        for name in ["nope", "DC CIVCA", "dc civac", "TLBI IPAS2", "AT S1E1R", "guest_abort", ""] {
            let error = Metric::parse_of_lab(name).unwrap_err();
            assert!(error.contains("guest_aborts, page_lookups"), "{name}: {error}");
        }
    }

    #[test]
    fn elapsed_is_a_name_of_the_time() {
        let mut record = record();
        let metric = Metric::from("elapsed");
        let of_work = metric.figure(&record);
        record.elapsed_ns = Some(granule_types::units::Nanoseconds(9));

        assert_eq!(metric.name(), "time");
        assert_eq!([of_work, metric.figure(&record)], [Some(record.ns.0), Some(9)]);
    }

    #[test]
    fn a_class_is_the_sum_of_its_instructions() {
        let mut record = record();
        record.counters = [("TLBI VALE1IS", 2), ("TLBI IPAS2E1IS", 3)]
            .map(|(name, n)| (name.to_owned(), n))
            .into();
        record.events = [("kvm_exit".to_owned(), 7)].into();

        let figures =
            ["TLBI", "kvm_exit", "DC CVAC"].map(|name| Metric::from(name).figure(&record));

        assert_eq!(figures, [Some(5), Some(7), Some(0)]);
    }
}
