// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Does what the [control socket](super::api) asks for, on the main thread.

use std::{collections::BTreeMap, time::Duration};

use granule_types::units::Bytes;
use serde_json::{Value, json};

use super::{
    api::{Answer, Request, refusal},
    build::Machine,
    config::VmConfig,
    stats::{Life, Meter},
    vcpu::Wanted,
};
use crate::kvm::{KvmError, dirty::DirtyLog};

/// What the main thread knows of a running machine.
#[derive(Debug)]
pub struct Controls<'a> {
    /// What was asked for.
    pub config: &'a VmConfig,
    /// The machine.
    pub machine: &'a Machine,
    /// Reads counts.
    pub meter: Meter,
    /// The guest's life so far.
    pub life: Life,
    /// Which of its lives that is: 1 until it resets itself.
    lives: u32,
    /// The dirty logs, one for each slot; empty while logging is off.
    dirty: Vec<DirtyLog>,
    /// Whether a client asked the machine to end.
    pub stopped: bool,
}

impl<'a> Controls<'a> {
    /// Controls of a machine whose life begins.
    pub fn new(config: &'a VmConfig, machine: &'a Machine, meter: Meter, lives: u32) -> Self {
        Self {
            config,
            machine,
            meter,
            life: Life::default(),
            lives,
            dirty: Vec::new(),
            stopped: false,
        }
    }

    /// Ends a phase of the guest's life; what cannot be read is told, and the machine goes on.
    pub fn end_phase(&mut self, next: &'static str, at: Duration) {
        match self.meter.read() {
            Ok(reading) => self.life.end_phase(next, at, reading),
            Err(error) => log::warn!("the phase '{}' is not counted: {error}", self.life.phase()),
        }
    }

    /// Does what is asked.
    pub fn handle(&mut self, request: Request) -> Answer {
        match request {
            Request::State => {}
            Request::Pause => self.machine.crew.pause(),
            Request::Resume => self.machine.crew.want(Wanted::Run),
            Request::Stop => self.stopped = true,
            Request::Memory => return self.memory(),
            Request::Collapse => return self.collapse(),
            Request::Counters => return self.counters(),
            Request::DirtyLogging(on) => return or_error(self.switch_logging(on)),
            Request::Dirty => return or_error(self.dirty_pages()),
            Request::DirtyClear => return or_error(self.clear()),
            Request::Balloon(bytes) => return self.fill_balloon(Bytes(bytes)),
        }
        (200, self.state())
    }

    fn state(&self) -> Value {
        let state = match self.machine.crew.wanted() {
            _ if self.stopped => "stopping",
            Wanted::Run => "running",
            Wanted::Pause => "paused",
            Wanted::End => "stopping",
        };
        let size: u64 = self
            .machine
            .memory
            .zones
            .iter()
            .map(|ram| ram.size().0)
            .sum();
        json!({
            "state": state,
            "phase": self.life.phase(),
            "vcpus": self.config.vcpus,
            "memory_bytes": size,
            "ipa_bits": self.machine.ipa_bits,
            "life": self.lives,
            "dirty_logging": !self.dirty.is_empty(),
        })
    }

    fn memory(&self) -> Answer {
        let zones: Vec<Value> = self
            .machine
            .memory
            .zones
            .iter()
            .map(|ram| {
                let mut zone = json!({
                    "start": ram.start().0,
                    "bytes": ram.size().0,
                    "backing": ram.plan().backing(),
                    "page": ram.plan().page(),
                });
                match ram.resident() {
                    Ok(obtained) => zone["resident"] = json!(obtained.resident),
                    Err(error) => zone["error"] = json!(error.to_string()),
                }
                if let Err(error) = ram.obtained() {
                    zone["not_as_asked"] = json!(error.to_string());
                }
                zone
            })
            .collect();
        let balloon = self.machine.balloon.as_ref().map(|balloon| {
            let statistics = balloon.statistics();
            json!({
                "actual_bytes": balloon.actual().0,
                "inflated_bytes": balloon.inflated().0,
                "reported_bytes": balloon.reported().0,
                // By tag, as virtio 1.2, section 5.5.6.3, has them; those of the last time asked.
                "statistics": statistics.into_iter().collect::<BTreeMap<_, _>>(),
            })
        });
        (200, json!({ "zones": zones, "balloon": balloon }))
    }

    /// Collapses the zones that can be; the answer says what became of each.
    fn collapse(&self) -> Answer {
        let zones = self.machine.memory.zones.iter();
        let zones = zones.map(|ram| match ram.collapse() {
            Ok(obtained) => json!({ "start": ram.start().0, "resident": obtained.resident }),
            Err(error) => json!({ "start": ram.start().0, "error": error.to_string() }),
        });
        (200, json!({ "zones": zones.collect::<Vec<_>>() }))
    }

    fn fill_balloon(&self, size: Bytes) -> Answer {
        let Some(balloon) = &self.machine.balloon else {
            return refusal(
                409,
                "this machine has no balloon: start it with --balloon on",
            );
        };
        balloon.set_target(size);
        (
            200,
            json!({ "wanted_bytes": size.0, "actual_bytes": balloon.actual().0 }),
        )
    }

    fn counters(&mut self) -> Answer {
        match self.meter.read() {
            Ok(reading) => (200, json!(reading)),
            Err(error) => refusal(500, &error.to_string()),
        }
    }

    fn switch_logging(&mut self, on: bool) -> Result<Value, KvmError> {
        if on && self.dirty.is_empty() {
            self.log_all().inspect_err(|_| {
                // Logging is of the whole memory or of none; what went wrong first is told.
                let _ = self.log_none();
            })?;
        } else if !on {
            self.log_none()?;
        }
        Ok(self.state())
    }

    fn log_all(&mut self) -> Result<(), KvmError> {
        let vm = &self.machine.vm;
        for slot in &self.machine.slots {
            let mut log = DirtyLog::new(vm, self.config.dirty, self.machine.rings.clone())?;
            let switched = log.switch(vm, slot, true);
            // In any case: what failed behind the switch has to be switched off as well.
            self.dirty.push(log);
            switched?;
        }
        Ok(())
    }

    /// Switches every log off, whatever becomes of another.
    fn log_none(&mut self) -> Result<(), KvmError> {
        let vm = &self.machine.vm;
        let logs = self.machine.slots.iter().zip(self.dirty.drain(..));
        logs.map(|(slot, mut log)| log.switch(vm, slot, false))
            .fold(Ok(()), Result::and)
    }

    fn dirty_pages(&mut self) -> Result<Value, KvmError> {
        self.need_logging()?;
        let (mut zones, mut all_pages, mut all_bytes) = (Vec::new(), 0, 0);
        for (slot, log) in self.machine.slots.iter().zip(&mut self.dirty) {
            let words = log.read(&self.machine.vm, slot)?;
            let pages: u64 = words.iter().map(|word| u64::from(word.count_ones())).sum();
            let page = slot.ram().plan().base_page().0;
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

    fn clear(&mut self) -> Result<Value, KvmError> {
        self.need_logging()?;
        for (slot, log) in self.machine.slots.iter().zip(&mut self.dirty) {
            log.clear(&self.machine.vm, slot)?;
        }
        Ok(json!({ "dirty_pages": 0 }))
    }

    const fn need_logging(&self) -> Result<(), KvmError> {
        if self.dirty.is_empty() {
            return Err(KvmError::NotLogging);
        }
        Ok(())
    }
}

fn or_error(result: Result<Value, KvmError>) -> Answer {
    match result {
        Ok(value) => (200, value),
        Err(error @ KvmError::NotLogging) => {
            refusal(409, &format!("{error}: POST /v1/dirty/start first"))
        }
        Err(error) => refusal(500, &format!("{error}")),
    }
}
