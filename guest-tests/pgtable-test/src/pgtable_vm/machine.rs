// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machine on KVM as the harness uses it: memory, dirty log, counters, and for migration two words of each
//! mailbox, which the guest and the harness use while the vCPUs run.

use std::{fmt, sync::atomic::Ordering};

use crate::{
    clock,
    guest::{
        layout::LOW_MEMORY,
        mailbox::{STOP_OFFSET, WRITES_OFFSET},
    },
    machine::{Machine, MachineError, MigrationOps, Region, Vcpu},
};
use granule_types::{
    guest_mode::GuestMode,
    record::{EventCounts, Host, ResidentPages},
    units::{GuestAddress, Nanoseconds},
};
use vm_memory::Bytes as _;

use granule_vmm::{
    arch::host::TRACEPOINTS,
    kvm::{
        stage2_tables::{mapped_by_level, stage2_table_bytes},
        stats::StatisticKind,
        tracepoints::EventCounters,
    },
};

use super::{
    KvmConfig,
    build::{Parts, build},
    doing,
    vcpu::{time_per_read, warn_if_emulated},
};

/// A virtual machine on KVM with one region of memory under test.
pub struct KvmMachine {
    parts: Parts,
    vcpus: usize,
    host: Host,
    events: EventCounters,
    accept_fallback: bool,
}

impl KvmMachine {
    /// Makes the machine: memory, VM, memslots, vCPUs, guest program.
    ///
    /// # Errors
    /// The host cannot provide the configuration.
    pub fn new(config: KvmConfig) -> Result<Self, MachineError> {
        if !config.pin.is_empty() && config.pin.len() as u64 != u64::from(config.vcpus) {
            return Err(MachineError::new(
                "pinning vCPUs",
                format!(
                    "the list has {} host CPUs for {} vCPUs; list one for each",
                    config.pin.len(),
                    config.vcpus
                ),
            ));
        }
        let mut events =
            if config.events { EventCounters::open(TRACEPOINTS) } else { EventCounters::default() };
        let mut parts = build(&config)?;
        let mut host = Host::of_this_machine()
            .map_err(|error| MachineError::new("detecting the properties of this host", error))?;
        for (name, value) in &parts.features {
            host.features.entry(name.clone()).or_insert(*value);
        }
        // On an emulated host time is instructions, so the check would show nothing.
        if let (None, Some(vcpu)) = (&host.emulator, parts.vcpus.first_mut()) {
            let time = time_per_read(vcpu.as_mut(), LOW_MEMORY)
                .map_err(|error| MachineError::new("entering the guest", error))?;
            warn_if_emulated(time);
            parts.statistics.leave_out_uncounted().map_err(doing("reading KVM's statistics"))?;
            events.leave_out_uncounted().map_err(doing("reading tracepoints"))?;
        }
        Ok(Self {
            vcpus: parts.vcpus.len(),
            parts,
            host,
            events,
            accept_fallback: config.accept_fallback,
        })
    }

    /// Returns the guest mode in use.
    pub const fn mode(&self) -> GuestMode {
        self.parts.mode
    }

    /// Returns the width of the VM's guest-physical addresses, in bits.
    pub const fn ipa_bits(&self) -> u8 {
        self.parts.ipa_bits
    }

    /// Returns the addresses of a word in the mailbox page of each vCPU, in order.
    fn words(&self, offset: u64) -> impl Iterator<Item = GuestAddress> {
        let layout = &self.parts.layout;
        (0..self.vcpus).map(move |vcpu| GuestAddress(layout.mailbox(vcpu).0 + offset))
    }

    fn statistics(&self, kind: StatisticKind) -> Result<EventCounts, MachineError> {
        self.parts.statistics.read(kind).map_err(doing("reading KVM's statistics"))
    }
}

impl fmt::Debug for KvmMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmMachine")
            .field("mode", &self.parts.mode)
            .field("ipa_bits", &self.parts.ipa_bits)
            .field("slot", &self.parts.slot)
            .field("low_slot", &self.parts.low_slot)
            .finish_non_exhaustive()
    }
}

impl Machine for KvmMachine {
    fn host(&self) -> &Host {
        &self.host
    }

    fn engine(&self) -> &'static str {
        "kvm"
    }

    fn region(&self) -> Region {
        let ram = self.parts.slot.ram();
        Region {
            start: ram.start(),
            size: ram.size(),
            host_page: ram.plan().base_page(),
            backing_page: ram.plan().page(),
            host_address: Some(ram.host_address().0),
        }
    }

    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>> {
        let vcpus = std::mem::take(&mut self.parts.vcpus);
        assert!(!vcpus.is_empty(), "the vCPUs are handed out once");
        vcpus
    }

    fn obtained(&self) -> Result<ResidentPages, MachineError> {
        let ram = self.parts.slot.ram();
        let obtained = if self.accept_fallback { ram.resident() } else { ram.obtained() };
        obtained.map_err(|error| MachineError::new("checking the memory under test", error))
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let Parts { vm, slot, dirty, .. } = &mut self.parts;
        clock::timed(|| dirty.switch(vm, slot, on)).map_err(doing("switching dirty logging"))
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let Parts { vm, slot, dirty, .. } = &mut self.parts;
        dirty.read(vm, slot).map_err(doing("reading the dirty bitmap"))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        let ram = self.parts.slot.ram();
        clock::timed(|| ram.drop_backing()).map_err(doing("dropping the memory under test"))
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        self.parts
            .slot
            .ram()
            .restore_backing()
            .map_err(|error| MachineError::new("restoring the memory under test", error))
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        self.parts.memory.map().read_obj(address).map_err(|error| {
            MachineError::new(format!("reading guest memory at {:#x}", address.0), error)
        })
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        let mut counts =
            self.events.read().map_err(|error| MachineError::new("reading event counts", error))?;
        counts.extend(self.statistics(StatisticKind::Cumulative)?);
        Ok(counts)
    }

    fn gauges(&mut self) -> Result<EventCounts, MachineError> {
        let mut gauges = self.statistics(StatisticKind::Instant)?;
        if let Some(bytes) = stage2_table_bytes() {
            gauges.insert("host.page_table_bytes".to_owned(), bytes);
        }
        for (level, bytes) in mapped_by_level(&self.parts.vm) {
            gauges.insert(format!("stage2.level{level}_bytes"), bytes);
        }
        Ok(gauges)
    }

    fn migration_ops(&mut self) -> Option<&mut dyn MigrationOps> {
        Some(self)
    }
}

impl MigrationOps for KvmMachine {
    fn set_stopping(&mut self, stop: bool) -> Result<(), MachineError> {
        let map = self.parts.memory.map();
        let writing = "writing the stop request to the mailboxes";
        if !stop {
            for word in self.words(WRITES_OFFSET) {
                map.store(0_u64, word, Ordering::Release).map_err(doing(writing))?;
            }
        }
        for word in self.words(STOP_OFFSET) {
            map.store(u64::from(stop), word, Ordering::Release).map_err(doing(writing))?;
        }
        Ok(())
    }

    fn writes(&self) -> Result<Vec<u64>, MachineError> {
        let map = self.parts.memory.map();
        self.words(WRITES_OFFSET)
            .map(|word| map.load(word, Ordering::Acquire))
            .collect::<Result<_, _>>()
            .map_err(doing("reading the write counts from the mailboxes"))
    }

    fn collect_dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let Parts { vm, slot, dirty, .. } = &mut self.parts;
        dirty.collect(vm, slot).map_err(doing("collecting the dirty bitmap"))
    }

    fn read(&self, address: GuestAddress, into: &mut [u8]) -> Result<(), MachineError> {
        let map = self.parts.memory.map();
        map.read_slice(into, address).map_err(|error| {
            MachineError::new(format!("reading guest memory at {:#x}", address.0), error)
        })
    }
}
