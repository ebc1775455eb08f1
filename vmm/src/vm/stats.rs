// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Statistics of a VM at one point in time: kernel events, stage-2 aborts, exits, KVM's statistics,
//! resident memory and stage-2 tables. Values that the host does not report are absent, never zero.

use std::{
    collections::BTreeMap,
    fs,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use granule_types::record::EventCounts;
use serde::Serialize;

use super::{fault_stalls::FaultStalls, outcome::VmError, vcpu::ExitCounters};
use crate::{
    arch::host,
    kvm::{
        stage2_tables::stage2_table_bytes,
        stats::{StatisticKind, Statistics},
        tracepoints::PerfCounters,
    },
    memory::{GuestRam, MemoryError, Smaps},
    stalls::StallHistogram,
};

/// Counters of the host kernel, for threads that start after the counters are opened.
#[derive(Debug, Default)]
pub struct HostCounters {
    events: PerfCounters,
    aborts: PerfCounters,
}

impl HostCounters {
    /// Opens all counters that the host supports.
    pub fn open() -> Self {
        let aborts =
            PerfCounters::default().and_filtered(host::FAULT_TRACEPOINT, host::FAULT_FILTERS);
        Self { events: PerfCounters::open(host::TRACEPOINTS), aborts }
    }

    pub const fn is_empty(&self) -> bool {
        self.events.is_empty() && self.aborts.is_empty()
    }
}

/// Statistics at one point in time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Kernel events and KVM's cumulative statistics, since the start.
    pub events: EventCounts,
    /// Stage-2 aborts by type and level, and by access.
    pub faults: EventCounts,
    pub exits: EventCounts,
    /// [Stalls](crate::stalls) of vCPUs, and durations of answers to faults and of requests of the dirty
    /// log.
    pub stalls: EventCounts,
    /// KVM's instant statistics: mapped pages by size.
    pub gauges: EventCounts,
    /// Bytes resident in the host by page size, for each zone.
    #[serde(rename = "resident")]
    pub resident_bytes: Vec<BTreeMap<u64, u64>>,
    /// Bytes that stage 2 maps by leaves of each size, for each zone; only at the ends of phases, because
    /// faults of the guest wait while the host's kernel reads its tables.
    #[serde(rename = "mapped", skip_serializing_if = "Vec::is_empty")]
    pub mapped_bytes: Vec<BTreeMap<u64, u64>>,
    /// Growth of the host's stage-2 tables since the VM was built, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage2_tables: Option<u64>,
    /// Resident bytes of this process outside guest memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overhead: Option<u64>,
}

/// Reads the statistics of a VM.
#[derive(Debug)]
pub struct StatsReader {
    pub counters: HostCounters,
    pub statistics: Statistics,
    pub exits: Arc<ExitCounters>,
    pub zones: Vec<Arc<GuestRam>>,
    pub fault_stalls: Option<FaultStalls>,
    /// Times in which pages of a snapshot were filled for faults, of a VM that is restored on demand.
    pub fill_times: Option<Arc<StallHistogram>>,
    /// Result of [`refreshed_stage2_table_bytes`] before the VM was built.
    pub table_bytes_before: Option<u64>,
}

impl StatsReader {
    pub fn read(&mut self) -> Result<Snapshot, VmError> {
        let mut events = self.counters.events.read()?;
        events.extend(self.statistics.read(StatisticKind::Cumulative)?);
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let exits = [
            ("mmio-reads", load(&self.exits.mmio_reads)),
            ("mmio-writes", load(&self.exits.mmio_writes)),
            ("interrupted", load(&self.exits.interruptions)),
            ("other", load(&self.exits.other_exits)),
        ];
        // The faults and their stalls are read one after the other, as the guest may run.
        let faults = self.counters.aborts.read()?;
        let mut stalls = EventCounts::new();
        self.exits.mmio_stalls.add_to(&mut stalls, "mmio");
        if let Some(fill_times) = &self.fill_times {
            fill_times.add_to(&mut stalls, "userfaultfd");
        }
        if let Some(faults) = &self.fault_stalls {
            faults.add_to(&mut stalls);
        }
        let smaps = Smaps::read()?;
        let zones = self.zones.iter();
        let resident = zones
            .map(|ram| Ok(ram.resident_pages_in(&smaps)?.resident_bytes))
            .collect::<Result<Vec<_>, MemoryError>>()?;
        let ranges: Vec<_> = self.zones.iter().map(|ram| ram.host_range()).collect();
        Ok(Snapshot {
            events,
            faults,
            exits: exits.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
            stalls,
            gauges: self.statistics.read(StatisticKind::Instant)?,
            resident_bytes: resident,
            mapped_bytes: Vec::new(),
            stage2_tables: refreshed_stage2_table_bytes()
                .zip(self.table_bytes_before)
                .map(|(after, before)| after.saturating_sub(before)),
            overhead: Some(smaps.outside_of(&ranges).0),
        })
    }
}

/// Returns [`stage2_table_bytes`] after the kernel has summed its per-CPU counters, because the
/// tables of a small guest are below the per-CPU threshold. Without permission to
/// [refresh](STAT_REFRESH), the sum may be out of date.
pub fn refreshed_stage2_table_bytes() -> Option<u64> {
    let before = stage2_table_bytes()?;
    match fs::write(STAT_REFRESH, "1") {
        Ok(()) => stage2_table_bytes(),
        Err(_) => Some(before),
    }
}

/// File that makes the kernel sum its per-CPU counters when it is written
/// (`Documentation/admin-guide/sysctl/vm.rst`).
pub const STAT_REFRESH: &str = "/proc/sys/vm/stat_refresh";
