// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Statistics of a VM in the text format of Prometheus, version 0.0.4
//! (<https://prometheus.io/docs/instrumenting/exposition_formats>).

use std::{
    collections::BTreeMap,
    fmt::{Display, Write as _},
};

use granule_types::{record::EventCounts, units::Bytes};

use super::stats::Snapshot;
use crate::{
    arch::host::ACCESS_PREFIX,
    stalls::{LOST, LOST_SIZES, MAPPED, buckets, causes},
};

/// Returns the metrics of a VM. Values that the host does not report are absent.
pub fn text(snapshot: &Snapshot) -> String {
    let mut text = String::new();
    let help = "Events of the host kernel and statistics of KVM.";
    add_counts(&mut text, "granule_events_total", help, "event", &snapshot.events);
    // Each abort has a type and an access: the sum of a family is the number of aborts.
    let kinds = snapshot.faults.iter().filter(|(name, _)| !name.starts_with(ACCESS_PREFIX));
    let accesses = snapshot.faults.iter();
    let accesses =
        accesses.filter_map(|(name, count)| Some((name.strip_prefix(ACCESS_PREFIX)?, count)));
    let help = "Stage-2 aborts, by type and level.";
    add_counts(&mut text, "granule_stage2_faults_total", help, "kind", kinds);
    let help = "Stage-2 aborts, by access.";
    add_counts(&mut text, "granule_stage2_fault_accesses_total", help, "access", accesses);
    let help = "Exits of vCPUs to the program.";
    add_counts(&mut text, "granule_exits_total", help, "reason", &snapshot.exits);
    let pages =
        snapshot.gauges.iter().map(|(name, value)| (format!("statistic=\"{name}\""), value));
    add_family(&mut text, "granule_kvm", "gauge", "Statistics of KVM that rise and fall.", pages);
    let resident = zone_samples(&snapshot.resident_bytes, "page_bytes");
    let help = "Guest memory that is resident in the host, by page size.";
    add_family(&mut text, "granule_resident_bytes", "gauge", help, resident);
    let mapped = zone_samples(&snapshot.mapped_bytes, "leaf_bytes");
    let help = "Guest memory that stage 2 maps, by size of the leaf.";
    add_family(&mut text, "granule_mapped_bytes", "gauge", help, mapped);
    let tables = snapshot.stage2_tables.iter().map(|bytes| (String::new(), bytes));
    let help = "Growth of the host's stage-2 tables since the VM was built.";
    add_family(&mut text, "granule_stage2_table_bytes", "gauge", help, tables);
    let overhead = snapshot.overhead.iter().map(|bytes| (String::new(), bytes));
    let help = "Resident memory of the program outside guest memory.";
    add_family(&mut text, "granule_overhead_bytes", "gauge", help, overhead);
    add_stalls(&mut text, &snapshot.stalls);
    let lost = |key| snapshot.stalls.get(key).into_iter().map(|count| (String::new(), count));
    let help =
        "Samples of faults that are lost or stand beside lost ones, whose stalls are not recorded.";
    add_family(&mut text, "granule_stall_samples_lost_total", "counter", help, lost(LOST));
    let help = "Samples of mapped sizes that are lost, of faults and of population.";
    add_family(&mut text, "granule_stall_sizes_lost_total", "counter", help, lost(LOST_SIZES));
    text
}

/// Returns the samples of each zone by size, with their labels.
fn zone_samples<'a>(
    zones: &'a [BTreeMap<u64, u64>],
    size: &'a str,
) -> impl Iterator<Item = (String, &'a u64)> {
    zones.iter().enumerate().flat_map(move |(zone, bytes)| {
        bytes.iter().map(move |(key, bytes)| (format!("zone=\"{zone}\",{size}=\"{key}\""), bytes))
    })
}

/// Adds a family of counters with one label.
fn add_counts<'a, N: Display>(
    text: &mut String,
    name: &str,
    help: &str,
    label: &str,
    counts: impl IntoIterator<Item = (N, &'a u64)>,
) {
    let counts = counts.into_iter();
    let samples = counts.map(|(value, count)| (format!("{label}=\"{value}\""), count));
    add_family(text, name, "counter", help, samples);
}

/// Adds a family of samples, each with its labels, unless there is none.
fn add_family<T: Display>(
    text: &mut String,
    name: &str,
    kind: &str,
    help: &str,
    samples: impl Iterator<Item = (String, T)>,
) {
    let mut samples = samples.peekable();
    if samples.peek().is_none() {
        return;
    }
    // Writing to a string does not fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    for (labels, value) in samples {
        let _ = match labels.is_empty() {
            true => writeln!(text, "{name} {value}"),
            false => writeln!(text, "{name}{{{labels}}} {value}"),
        };
    }
}

/// Adds the histograms of the stalls, in seconds. Those by size are a family of their own, as each of their
/// stalls has a type and level too.
fn add_stalls(text: &mut String, stalls: &EventCounts) {
    let sizes = causes(stalls).filter_map(|cause| {
        let size: Bytes = cause.strip_prefix(MAPPED)?.parse().ok()?;
        Some((cause, format!("leaf_bytes=\"{}\"", size.0)))
    });
    let others = causes(stalls).filter(|cause| !cause.starts_with(MAPPED));
    let others = others.map(|cause| (cause, format!("cause=\"{cause}\"")));
    let help = "Stalls of vCPUs, answers of userfaultfd, and requests of the dirty log.";
    add_histograms(text, "granule_stall_seconds", help, stalls, others);
    let help = "Stalls of vCPUs in faults, by the size that the kernel mapped.";
    add_histograms(text, "granule_mapped_stall_seconds", help, stalls, sizes);
}

/// Adds a family of histograms, each by its cause and with its label, unless there is none.
fn add_histograms<'a>(
    text: &mut String,
    name: &str,
    help: &str,
    stalls: &EventCounts,
    histograms: impl Iterator<Item = (&'a str, String)>,
) {
    let mut histograms = histograms.peekable();
    if histograms.peek().is_none() {
        return;
    }
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} histogram");
    for (cause, label) in histograms {
        let value = |key: &str| stalls.get(&format!("{cause}.{key}")).copied().unwrap_or(0);
        let count = value("count");
        for (bound, count) in buckets(stalls, cause) {
            let _ = writeln!(text, "{name}_bucket{{{label},le=\"{}\"}} {count}", seconds(bound));
        }
        let _ = writeln!(text, "{name}_bucket{{{label},le=\"+Inf\"}} {count}");
        let _ = writeln!(text, "{name}_sum{{{label}}} {}", seconds(value("ns")));
        let _ = writeln!(text, "{name}_count{{{label}}} {count}");
    }
}

/// Returns nanoseconds as decimal seconds, exactly.
fn seconds(nanoseconds: u64) -> String {
    format!("{}.{:09}", nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::stalls::StallHistogram;

    fn counts(name: &str, count: u64) -> EventCounts {
        [(name.to_owned(), count)].into()
    }

    #[test]
    fn each_statistic_is_a_metric_and_an_absent_one_is_not() {
        let stall = StallHistogram::default();
        stall.record(Duration::from_nanos(1_500));
        let mut stalls = EventCounts::new();
        stall.add_to(&mut stalls, "mmio");
        stall.add_to(&mut stalls, "mapped-2M");
        stalls.insert(LOST.to_owned(), 5);
        stalls.insert(LOST_SIZES.to_owned(), 4);
        let mut faults = counts("translation.level2", 3);
        faults.extend(counts("by.write", 3));
        let snapshot = Snapshot {
            events: counts("kvm_exit", 7),
            faults,
            exits: counts("mmio-reads", 2),
            gauges: EventCounts::new(),
            resident_bytes: vec![BTreeMap::new(), [(2 << 20, 4 << 20)].into()],
            mapped_bytes: vec![[(4096, 8192), (2 << 20, 2 << 20)].into()],
            stage2_tables: Some(4096),
            overhead: None,
            stalls,
        };

        let text = text(&snapshot);

        let samples: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        for expected in [
            "granule_events_total{event=\"kvm_exit\"} 7",
            "granule_stage2_faults_total{kind=\"translation.level2\"} 3",
            "granule_stage2_fault_accesses_total{access=\"write\"} 3",
            "granule_exits_total{reason=\"mmio-reads\"} 2",
            "granule_resident_bytes{zone=\"1\",page_bytes=\"2097152\"} 4194304",
            "granule_mapped_bytes{zone=\"0\",leaf_bytes=\"4096\"} 8192",
            "granule_mapped_bytes{zone=\"0\",leaf_bytes=\"2097152\"} 2097152",
            "granule_stage2_table_bytes 4096",
            "granule_stall_seconds_bucket{cause=\"mmio\",le=\"0.000001000\"} 0",
            "granule_stall_seconds_bucket{cause=\"mmio\",le=\"0.000004000\"} 1",
            "granule_stall_seconds_bucket{cause=\"mmio\",le=\"+Inf\"} 1",
            "granule_stall_seconds_sum{cause=\"mmio\"} 0.000001500",
            "granule_stall_seconds_count{cause=\"mmio\"} 1",
            "granule_mapped_stall_seconds_count{leaf_bytes=\"2097152\"} 1",
            "granule_stall_samples_lost_total 5",
            "granule_stall_sizes_lost_total 4",
        ] {
            assert!(samples.contains(&expected), "{expected}: {text}");
        }
        assert_eq!(text.matches("# TYPE").count(), 11, "{text}");
        assert_eq!(samples.len(), 10 + 2 * 13, "{text}");
    }
}
