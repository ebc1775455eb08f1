// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Executes requests of the [control socket](super::api) on the main thread.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use granule_types::{error_text, units::Bytes};
use serde_json::{Value, json};

use super::{
    api_request::{ApiRequest, Body, Response, error_response},
    boot_stats::BootStats,
    builder::Vm,
    change_log::{self, ChangeLog},
    config::VmConfig,
    dirty_logs::DirtyLogs,
    metrics,
    outcome::VmError,
    save::{self, ChangeLogs, SavedSizes},
    signals,
    snapshot::SnapshotDirectory,
    stats::{Snapshot, StatsReader},
    vcpu::RunState,
};
use crate::{
    kvm::{
        KvmError,
        stage2_tables::{self, leaf_size},
    },
    memory::{GuestRam, Smaps, on_demand::OnDemand},
};

/// Executes the requests of a running VM on the main thread and records its phases.
pub struct VmController<'a> {
    pub config: &'a VmConfig,
    pub vm: &'a Vm,
    pub reader: StatsReader,
    pub boot_stats: BootStats,
    /// Writes the phases to a file, which takes more from the host.
    writes_statistics: bool,
    /// Number of this boot, counted from 1.
    boot_count: u32,
    dirty_logs: DirtyLogs,
    /// Log for incremental snapshots, if the run takes such.
    changes: Option<ChangeLog>,
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
        writes_statistics: bool,
        boot_count: u32,
        snapshots: Option<&'a SnapshotDirectory>,
        changes: Option<ChangeLog>,
    ) -> Self {
        Self {
            config,
            vm,
            reader,
            boot_stats: BootStats::default(),
            writes_statistics,
            boot_count,
            dirty_logs: DirtyLogs::default(),
            changes,
            snapshots,
            is_stop_requested: false,
        }
    }

    /// Ends the current phase of the boot. The phase is not recorded if the statistics cannot be
    /// read.
    pub fn end_phase(&mut self, next: &'static str, at: Duration) {
        match self.read_statistics(self.writes_statistics) {
            Ok(snapshot) => self.boot_stats.end_phase(next, at, snapshot),
            Err(error) => {
                let (phase, error) = (self.boot_stats.phase, error_text(&error));
                log::warn!("phase '{phase}' is not recorded: {error}");
                // A phase that goes on would be ended again at once.
                self.boot_stats.skip_phase(next, at);
            }
        }
    }

    /// Reads the statistics, with the durations of operations on the dirty logs, and with what stage 2
    /// maps if `mapped` is set.
    fn read_statistics(&mut self, mapped: bool) -> Result<Snapshot, VmError> {
        let mut snapshot = self.reader.read()?;
        if mapped {
            snapshot.mapped_bytes = self.mapped_bytes();
        }
        for (name, durations) in self.dirty_logs.durations() {
            durations.add_to(&mut snapshot.stalls, name);
        }
        Ok(snapshot)
    }

    /// Returns the bytes that stage 2 maps by leaves of each size, for each zone, if the host exports the
    /// tables. Faults of the guest wait meanwhile.
    fn mapped_bytes(&self) -> Vec<BTreeMap<u64, u64>> {
        let zones = self.vm.memory.regions();
        let ranges: Vec<_> = zones.iter().map(|ram| ram.guest_range()).collect();
        let mapped = stage2_tables::mapped_bytes(&self.vm.fd, &ranges).unwrap_or_default();
        let by_size = |(ram, mapped): (&Arc<GuestRam>, BTreeMap<u8, u64>)| {
            let base = ram.plan().base_page_size();
            mapped.into_iter().map(|(level, bytes)| (leaf_size(base, level).0, bytes)).collect()
        };
        zones.iter().zip(mapped).map(by_size).collect()
    }

    pub fn execute(&mut self, request: ApiRequest) -> Response {
        match request {
            ApiRequest::State => {}
            ApiRequest::Pause => return self.changed(self.vm.pause()),
            ApiRequest::Resume => return self.changed(self.vm.resume()),
            ApiRequest::Stop => self.is_stop_requested = true,
            ApiRequest::Snapshot => return self.save_snapshot(false),
            ApiRequest::LiveSnapshot => return self.save_snapshot(true),
            ApiRequest::Memory => return self.memory(),
            ApiRequest::Collapse => return self.collapse(),
            ApiRequest::Counters { mapped } => {
                return self.counters(mapped, |snapshot| json!(snapshot).into());
            }
            ApiRequest::Metrics { mapped } => {
                return self.counters(mapped, |snapshot| Body::Metrics(metrics::text(snapshot)));
            }
            ApiRequest::DirtyLogging(_) | ApiRequest::ClearDirtyLog if self.changes_own_logs() => {
                let reason = "dirty logging belongs to incremental snapshots: start the VM without \
                              incremental=on to control it";
                return error_response(409, reason);
            }
            ApiRequest::DirtyLogging(true) => return to_response(self.start_logging()),
            ApiRequest::DirtyLogging(false) => return to_response(self.stop_logging()),
            ApiRequest::DirtyPages => return to_response(self.dirty_pages()),
            ApiRequest::ClearDirtyLog => return to_response(self.clear_dirty_logs()),
            ApiRequest::ResizeBalloon(size) => return self.set_balloon(size),
        }
        (200, self.state().into())
    }

    /// Returns the response to a change of the run state.
    fn changed(&self, result: Result<(), VmError>) -> Response {
        match result {
            Ok(()) => (200, self.state().into()),
            Err(error) => error_response(500, &error_text(&error)),
        }
    }

    fn state(&self) -> Value {
        let state = match self.vm.vcpus.requested_state() {
            _ if self.is_stop_requested => "stopping",
            RunState::Running => "running",
            RunState::Paused => "paused",
            RunState::Stopped => "stopping",
        };
        json!({
            "state": state,
            "phase": self.boot_stats.phase,
            "vcpus": self.config.vcpus,
            "memory_bytes": self.vm.memory.size().0,
            "ipa_bits": self.vm.ipa_bits,
            "boot_count": self.boot_count,
            "dirty_logging": self.dirty_logs.are_on(),
        })
    }

    fn memory(&self) -> Response {
        let mapped = self.mapped_bytes();
        let smaps = Smaps::read();
        let zones: Vec<Value> = self
            .vm
            .memory
            .regions()
            .iter()
            .enumerate()
            .map(|(index, ram)| {
                let mut zone = json!({
                    "start": ram.start().0,
                    "bytes": ram.size().0,
                    "backing": ram.plan().backing(),
                    "page": ram.plan().page_size(),
                });
                if let Some(mapped) = mapped.get(index) {
                    zone["mapped"] = json!(mapped);
                }
                let smaps = match &smaps {
                    Ok(smaps) => smaps,
                    Err(error) => {
                        zone["error"] = json!(error_text(error));
                        return zone;
                    }
                };
                match ram.resident_pages_in(smaps) {
                    Ok(obtained) => zone["resident"] = json!(obtained.resident_bytes),
                    Err(error) => zone["error"] = json!(error_text(&error)),
                }
                if let Err(error) = ram.checked_resident_pages_in(smaps) {
                    zone["unexpected_pages"] = json!(error_text(&error));
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
        let may_continue = || signals::none_is_pending().is_ok();
        let zones = zones.map(|ram| match ram.collapse(&may_continue) {
            Ok(obtained) => json!({ "start": ram.start().0, "resident": obtained.resident_bytes }),
            Err(error) => json!({ "start": ram.start().0, "error": error_text(&error) }),
        });
        (200, json!({ "zones": zones.collect::<Vec<_>>() }).into())
    }

    /// Returns whether incremental snapshots have started dirty logging.
    fn changes_own_logs(&self) -> bool {
        self.changes.as_ref().is_some_and(ChangeLog::is_logging)
    }

    fn save_snapshot(&mut self, is_live: bool) -> Response {
        let Some(directory) = self.snapshots else {
            return error_response(409, "the run has no directory: start it with --snapshot DIR");
        };
        let complete = self.vm.on_demand.as_ref().map_or(Ok(()), OnDemand::check_complete);
        if let Err(reason) = complete {
            return error_response(409, &reason);
        }
        // A paused VM has nothing to wait for.
        let is_live = is_live && self.vm.vcpus.requested_state() == RunState::Running;
        let needs_logs = is_live || self.changes.is_some();
        if needs_logs && self.dirty_logs.are_on() && !self.changes_own_logs() {
            let reason =
                "a live or incremental snapshot needs the dirty log: POST /v1/dirty/stop first";
            return error_response(409, reason);
        }
        if is_live && let Err(reason) = change_log::check_writers(self.config) {
            let text = format!("a live snapshot {reason}: POST /v1/snapshot");
            return error_response(409, &text);
        }
        let saved = match is_live {
            true => self.save_live(directory),
            false => {
                let changes = self.changes.as_mut();
                let logs =
                    changes.map(|changes| ChangeLogs { changes, dirty: &mut self.dirty_logs });
                save::save(self.vm, self.config, directory, logs)
            }
        };
        match saved {
            Ok((saved, paused)) => {
                let sizes = json!({
                    "memory_bytes": saved.memory.0,
                    "data_bytes": saved.data.0,
                    "written_bytes": saved.written.0,
                    "durable": saved.is_durable,
                    "paused_us": u64::try_from(paused.as_micros()).unwrap_or(u64::MAX),
                });
                (200, sizes.into())
            }
            Err(error) => error_response(500, &error_text(&error)),
        }
    }

    fn save_live(
        &mut self,
        directory: &SnapshotDirectory,
    ) -> Result<(SavedSizes, Duration), VmError> {
        let mut own = ChangeLog::default();
        let stops = self.changes.is_none();
        let changes = self.changes.as_mut().unwrap_or(&mut own);
        let logs = ChangeLogs { changes, dirty: &mut self.dirty_logs };
        let saved = save::save_live(self.vm, self.config, directory, logs);
        if stops && let Err(error) = self.dirty_logs.stop(self.vm) {
            log::warn!("dirty logging goes on after a live snapshot: {}", error_text(&error));
        }
        saved
    }

    fn set_balloon(&self, size: Bytes) -> Response {
        let Some(balloon) = &self.vm.balloon else {
            return error_response(409, "the VM has no balloon: start it with --balloon on");
        };
        let memory = self.vm.memory.size();
        if size > memory {
            let text = format!("a balloon of {size} exceeds the guest's memory, {memory}");
            return error_response(400, &text);
        }
        let wanted = balloon.set_target(size);
        let sizes = json!({ "wanted_bytes": wanted.0, "actual_bytes": balloon.actual_size().0 });
        (200, sizes.into())
    }

    fn counters(&mut self, mapped: bool, body: impl FnOnce(&Snapshot) -> Body) -> Response {
        match self.read_statistics(mapped) {
            Ok(snapshot) => (200, body(&snapshot)),
            Err(error) => error_response(500, &error_text(&error)),
        }
    }

    fn start_logging(&mut self) -> Result<Value, KvmError> {
        self.dirty_logs.start(self.vm, self.config.dirty_log)?;
        Ok(self.state())
    }

    fn stop_logging(&mut self) -> Result<Value, KvmError> {
        self.dirty_logs.stop(self.vm)?;
        Ok(self.state())
    }

    fn dirty_pages(&mut self) -> Result<Value, KvmError> {
        let (mut zones, mut all_pages, mut all_bytes) = (Vec::new(), 0, 0);
        self.dirty_logs.read(self.vm, |slot, words| {
            let pages: u64 = words.iter().map(|word| u64::from(word.count_ones())).sum();
            let page = slot.ram().plan().base_page_size().0;
            all_pages += pages;
            all_bytes += pages * page;
            zones.push(json!({
                "start": slot.ram().start().0,
                "page": page,
                "dirty_pages": pages,
            }));
        })?;
        Ok(json!({ "dirty_pages": all_pages, "dirty_bytes": all_bytes, "zones": zones }))
    }

    fn clear_dirty_logs(&mut self) -> Result<Value, KvmError> {
        self.dirty_logs.clear(self.vm, |_, _| {})?;
        Ok(json!({ "dirty_pages": 0 }))
    }
}

fn to_response(result: Result<Value, KvmError>) -> Response {
    match result {
        Ok(value) => (200, value.into()),
        Err(error @ KvmError::NotLogging) => {
            error_response(409, &format!("{error}: POST /v1/dirty/start first"))
        }
        Err(error) => error_response(500, &error_text(&error)),
    }
}
