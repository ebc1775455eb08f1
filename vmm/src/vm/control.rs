// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Executes requests of the [control socket](super::api) on the main thread.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use granule_types::{error_text, units::Bytes};
use serde_json::{Value, json};

use super::{
    api_request::{ApiRequest, Body, Response, error_response},
    boot_stats::BootStats,
    builder::Vm,
    config::VmConfig,
    metrics, save,
    snapshot::SnapshotDirectory,
    stalls::StallHistogram,
    stats::{Snapshot, StatsReader},
    vcpu::RunState,
};
use crate::kvm::{
    KvmError,
    memslot::DirtyLog,
    stage2_tables::{Stage2Leaves, leaf_size},
};

/// Histograms of durations by operation.
type DirtyCosts = BTreeMap<&'static str, StallHistogram>;

/// Executes the requests of a running VM on the main thread and records its phases.
pub struct VmController<'a> {
    pub config: &'a VmConfig,
    pub vm: &'a Vm,
    pub reader: StatsReader,
    pub boot_stats: BootStats,
    /// Number of this boot, counted from 1.
    boot_count: u32,
    /// Durations of the control socket's operations on the dirty logs.
    dirty_costs: DirtyCosts,
    /// Dirty logs, one for each memslot; empty while logging is off.
    dirty_logs: Vec<DirtyLog>,
    /// Directory for snapshots, if the run has one.
    snapshots: Option<&'a SnapshotDirectory>,
    pub is_stop_requested: bool,
}

impl<'a> VmController<'a> {
    /// Returns the controller of a VM before its first run.
    pub fn new(
        config: &'a VmConfig,
        vm: &'a Vm,
        reader: StatsReader,
        boot_count: u32,
        snapshots: Option<&'a SnapshotDirectory>,
    ) -> Self {
        Self {
            config,
            vm,
            reader,
            boot_stats: BootStats::default(),
            boot_count,
            dirty_costs: DirtyCosts::default(),
            dirty_logs: Vec::new(),
            snapshots,
            is_stop_requested: false,
        }
    }

    /// Ends the current phase of the boot. The phase is not recorded if the statistics cannot be
    /// read.
    pub fn end_phase(&mut self, next: &'static str, at: Duration) {
        match self.reader.read() {
            Ok(snapshot) => self.boot_stats.end_phase(next, at, snapshot),
            Err(error) => {
                log::warn!("phase '{}' is not recorded: {error}", self.boot_stats.phase);
            }
        }
    }

    pub fn execute(&mut self, request: ApiRequest) -> Response {
        match request {
            ApiRequest::State => {}
            ApiRequest::Pause => self.vm.vcpus.pause(),
            ApiRequest::Resume => self.vm.vcpus.request(RunState::Running),
            ApiRequest::Stop => self.is_stop_requested = true,
            ApiRequest::Snapshot => return self.save_snapshot(),
            ApiRequest::Memory => return self.memory(),
            ApiRequest::Collapse => return self.collapse(),
            ApiRequest::Counters => return self.counters(|snapshot| json!(snapshot).into()),
            ApiRequest::Metrics => {
                return self.counters(|snapshot| Body::Metrics(metrics::text(snapshot)));
            }
            ApiRequest::DirtyLogging(true) => {
                return self.timed("dirty-start", Self::start_logging);
            }
            ApiRequest::DirtyLogging(false) => return self.timed("dirty-stop", Self::stop_logging),
            ApiRequest::DirtyPages => return self.timed("dirty-read", Self::dirty_pages),
            ApiRequest::ClearDirtyLog => return self.timed("dirty-clear", Self::clear_dirty_logs),
            ApiRequest::ResizeBalloon(size) => return self.set_balloon(size),
        }
        (200, self.state().into())
    }

    fn state(&self) -> Value {
        let state = match self.vm.vcpus.requested_state() {
            _ if self.is_stop_requested => "stopping",
            RunState::Running => "running",
            RunState::Paused => "paused",
            RunState::Stopped => "stopping",
        };
        let size: u64 = self.vm.memory.regions().iter().map(|ram| ram.size().0).sum();
        json!({
            "state": state,
            "phase": self.boot_stats.phase,
            "vcpus": self.config.vcpus,
            "memory_bytes": size,
            "ipa_bits": self.vm.ipa_bits,
            "boot_count": self.boot_count,
            "dirty_logging": !self.dirty_logs.is_empty(),
        })
    }

    fn memory(&self) -> Response {
        let leaves = Stage2Leaves::read(&self.vm.fd);
        let zones: Vec<Value> = self
            .vm
            .memory
            .regions()
            .iter()
            .map(|ram| {
                let mut zone = json!({
                    "start": ram.start().0,
                    "bytes": ram.size().0,
                    "backing": ram.plan().backing(),
                    "page": ram.plan().page_size(),
                });
                match ram.resident_pages() {
                    Ok(obtained) => zone["resident"] = json!(obtained.resident_bytes),
                    Err(error) => zone["error"] = json!(error.to_string()),
                }
                let base = ram.plan().base_page_size();
                let mapped = leaves.bytes_by_level(&ram.guest_range()).into_iter();
                let mapped = mapped.map(|(level, bytes)| (leaf_size(base, level).0, bytes));
                let mapped: BTreeMap<u64, u64> = mapped.collect();
                if !mapped.is_empty() {
                    zone["mapped"] = json!(mapped);
                }
                if let Err(error) = ram.checked_resident_pages() {
                    zone["unexpected_pages"] = json!(error.to_string());
                }
                zone
            })
            .collect();
        let balloon = self.vm.balloon.as_ref().map(|balloon| {
            json!({
                "actual_bytes": balloon.actual_size().0,
                "inflated_bytes": balloon.inflated_size().0,
                "reported_bytes": balloon.reported_size().0,
            })
        });
        (200, json!({ "zones": zones, "balloon": balloon }).into())
    }

    /// Collapses the memory of each zone and reports the results.
    fn collapse(&self) -> Response {
        let zones = self.vm.memory.regions().iter();
        let zones = zones.map(|ram| match ram.collapse() {
            Ok(obtained) => json!({ "start": ram.start().0, "resident": obtained.resident_bytes }),
            Err(error) => json!({ "start": ram.start().0, "error": error.to_string() }),
        });
        (200, json!({ "zones": zones.collect::<Vec<_>>() }).into())
    }

    fn save_snapshot(&self) -> Response {
        let Some(directory) = self.snapshots else {
            return error_response(409, "the run has no directory: start it with --snapshot DIR");
        };
        if self.vm.on_demand.as_ref().is_some_and(|memory| !memory.is_complete()) {
            let reason = "memory is still in the snapshot that this VM was restored from: try again, \
                          or restore it without a new order=FILE";
            return error_response(409, reason);
        }
        match save::save(self.vm, self.config, directory) {
            Ok(saved) => {
                let sizes = json!({ "memory_bytes": saved.memory.0, "data_bytes": saved.data.0 });
                (200, sizes.into())
            }
            Err(error) => error_response(500, &error_text(&error)),
        }
    }

    fn set_balloon(&self, size: Bytes) -> Response {
        let Some(balloon) = &self.vm.balloon else {
            return error_response(409, "the VM has no balloon: start it with --balloon on");
        };
        balloon.set_target(size);
        let sizes = json!({ "wanted_bytes": size.0, "actual_bytes": balloon.actual_size().0 });
        (200, sizes.into())
    }

    /// Executes an operation on the dirty logs and records its duration.
    fn timed(
        &mut self,
        name: &'static str,
        operation: impl FnOnce(&mut Self) -> Result<Value, KvmError>,
    ) -> Response {
        let start = Instant::now();
        let result = operation(self);
        self.dirty_costs.entry(name).or_default().record(start.elapsed());
        to_response(result)
    }

    fn counters(&mut self, body: impl FnOnce(&Snapshot) -> Body) -> Response {
        match self.reader.read() {
            Ok(mut snapshot) => {
                for (name, durations) in &self.dirty_costs {
                    durations.add_to(&mut snapshot.stalls, name);
                }
                (200, body(&snapshot))
            }
            Err(error) => error_response(500, &error.to_string()),
        }
    }

    fn start_logging(&mut self) -> Result<Value, KvmError> {
        if self.dirty_logs.is_empty() {
            self.start_dirty_logging().inspect_err(|_| {
                // Logging covers all memslots or none; the first error is returned.
                let _ = self.stop_dirty_logging();
            })?;
        }
        Ok(self.state())
    }

    fn stop_logging(&mut self) -> Result<Value, KvmError> {
        self.stop_dirty_logging()?;
        Ok(self.state())
    }

    fn start_dirty_logging(&mut self) -> Result<(), KvmError> {
        let vm = &self.vm.fd;
        for slot in &self.vm.slots {
            let mut log = DirtyLog::new(vm, self.config.dirty_log, self.vm.rings.clone())?;
            let switched = log.set_enabled(vm, slot, true);
            // The log is kept even after an error, so that `stop_dirty_logging` stops it.
            self.dirty_logs.push(log);
            switched?;
        }
        Ok(())
    }

    /// Stops all logs, even if one of them fails.
    fn stop_dirty_logging(&mut self) -> Result<(), KvmError> {
        let vm = &self.vm.fd;
        let logs = self.vm.slots.iter().zip(self.dirty_logs.drain(..));
        logs.map(|(slot, mut log)| log.set_enabled(vm, slot, false)).fold(Ok(()), Result::and)
    }

    fn dirty_pages(&mut self) -> Result<Value, KvmError> {
        self.require_dirty_logging()?;
        let (mut zones, mut all_pages, mut all_bytes) = (Vec::new(), 0, 0);
        for (slot, log) in self.vm.slots.iter().zip(&mut self.dirty_logs) {
            let words = log.read(&self.vm.fd, slot)?;
            let pages: u64 = words.iter().map(|word| u64::from(word.count_ones())).sum();
            let page = slot.ram().plan().base_page_size().0;
            all_pages += pages;
            all_bytes += pages * page;
            zones.push(json!({
                "start": slot.ram().start().0,
                "page": page,
                "dirty_pages": pages,
            }));
        }
        Ok(json!({ "dirty_pages": all_pages, "dirty_bytes": all_bytes, "zones": zones }))
    }

    fn clear_dirty_logs(&mut self) -> Result<Value, KvmError> {
        self.require_dirty_logging()?;
        for (slot, log) in self.vm.slots.iter().zip(&mut self.dirty_logs) {
            log.read_and_clear(&self.vm.fd, slot)?;
        }
        Ok(json!({ "dirty_pages": 0 }))
    }

    const fn require_dirty_logging(&self) -> Result<(), KvmError> {
        if self.dirty_logs.is_empty() {
            return Err(KvmError::NotLogging);
        }
        Ok(())
    }
}

fn to_response(result: Result<Value, KvmError>) -> Response {
    match result {
        Ok(value) => (200, value.into()),
        Err(error @ KvmError::NotLogging) => {
            error_response(409, &format!("{error}: POST /v1/dirty/start first"))
        }
        Err(error) => error_response(500, &format!("{error}")),
    }
}
