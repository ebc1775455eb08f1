// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The machine on KVM as the harness uses it: memory, dirty log, counters, and for migration two
//! words of each mailbox, which the guest and the harness use while the vCPUs run.

use std::{
    error::Error,
    fmt,
    sync::{Arc, atomic::Ordering},
};

use kvm_ioctls::VmFd;
use vm_memory::Bytes as _;

use super::during;
use crate::{
    clock,
    guest::{
        layout::Layout,
        mailbox::{STOP_OFFSET, WRITES_OFFSET},
    },
    machine::{Machine, MachineError, MigrationOps, Region, Vcpu},
};
use granule_types::{
    guest_mode::GuestMode,
    record::{EventCounts, Host, ResidentPages},
    units::{GuestAddress, Nanoseconds},
};
use granule_vmm::{
    kvm::{
        memslot::{DirtyLog, Memslot},
        stage2_tables::{mapped_by_level, stage2_table_bytes},
        stats::{StatisticKind, Statistics},
        tracepoints::EventCounters,
    },
    memory::GuestMemory,
};

/// A virtual machine on KVM with one region of memory under test.
pub struct KvmMachine {
    pub(super) vm: VmFd,
    pub(super) slot: Memslot,
    pub(super) low_slot: Memslot,
    pub(super) dirty: DirtyLog,
    pub(super) memory: GuestMemory,
    pub(super) layout: Arc<Layout>,
    /// The vCPUs until they are handed out.
    pub(super) vcpus: Vec<Box<dyn Vcpu>>,
    pub(super) vcpu_count: usize,
    pub(super) statistics: Statistics,
    pub(super) events: EventCounters,
    pub(super) host: Host,
    pub(super) ipa_bits: u8,
    pub(super) accept_fallback: bool,
}

impl KvmMachine {
    /// Returns the guest mode in use.
    pub fn mode(&self) -> GuestMode {
        self.layout.mode()
    }

    /// Returns the width of the VM's guest-physical addresses, in bits.
    pub const fn ipa_bits(&self) -> u8 {
        self.ipa_bits
    }

    /// Returns the addresses of a word in the mailbox page of each vCPU, in order.
    fn words(&self, offset: u64) -> impl Iterator<Item = GuestAddress> {
        let layout = &self.layout;
        (0..self.vcpu_count).map(move |vcpu| GuestAddress(layout.mailbox(vcpu).0 + offset))
    }

    fn statistics(&self, kind: StatisticKind) -> Result<EventCounts, MachineError> {
        self.statistics.read(kind).map_err(during("reading KVM's statistics"))
    }
}

/// Returns a function that adds the guest address to an error of reading guest memory.
fn reading<E: Error + Send + Sync + 'static>(at: GuestAddress) -> impl Fn(E) -> MachineError {
    move |error| MachineError::new(format!("reading guest memory at {:#x}", at.0), error)
}

impl fmt::Debug for KvmMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmMachine")
            .field("mode", &self.mode())
            .field("ipa_bits", &self.ipa_bits)
            .field("slot", &self.slot)
            .field("low_slot", &self.low_slot)
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
        let ram = self.slot.ram();
        Region {
            start: ram.start(),
            size: ram.size(),
            host_page: ram.plan().base_page(),
            backing_page: ram.plan().page(),
            host_address: ram.host_address(),
        }
    }

    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>> {
        let vcpus = std::mem::take(&mut self.vcpus);
        assert!(!vcpus.is_empty(), "the vCPUs are handed out once");
        vcpus
    }

    fn obtained(&self) -> Result<ResidentPages, MachineError> {
        let ram = self.slot.ram();
        let obtained = if self.accept_fallback { ram.resident() } else { ram.obtained() };
        obtained.map_err(during("checking the memory under test"))
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let Self { vm, slot, dirty, .. } = self;
        clock::timed(|| dirty.switch(vm, slot, on)).map_err(during("switching dirty logging"))
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let Self { vm, slot, dirty, .. } = self;
        dirty.read(vm, slot).map_err(during("reading the dirty bitmap"))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        let ram = self.slot.ram();
        clock::timed(|| ram.drop_backing()).map_err(during("dropping the memory under test"))
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        let restored = self.slot.ram().restore_backing();
        restored.map_err(during("restoring the memory under test"))
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        self.memory.map().read_obj(address).map_err(reading(address))
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        let mut counts = self.events.read().map_err(during("reading event counts"))?;
        counts.extend(self.statistics(StatisticKind::Cumulative)?);
        Ok(counts)
    }

    fn gauges(&mut self) -> Result<EventCounts, MachineError> {
        let mut gauges = self.statistics(StatisticKind::Instant)?;
        if let Some(bytes) = stage2_table_bytes() {
            gauges.insert("host.page_table_bytes".to_owned(), bytes);
        }
        for (level, bytes) in mapped_by_level(&self.vm) {
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
        let map = self.memory.map();
        let writing = "writing the stop request to the mailboxes";
        if !stop {
            for word in self.words(WRITES_OFFSET) {
                map.store(0_u64, word, Ordering::Release).map_err(during(writing))?;
            }
        }
        for word in self.words(STOP_OFFSET) {
            map.store(u64::from(stop), word, Ordering::Release).map_err(during(writing))?;
        }
        Ok(())
    }

    fn writes(&self) -> Result<Vec<u64>, MachineError> {
        let map = self.memory.map();
        self.words(WRITES_OFFSET)
            .map(|word| map.load(word, Ordering::Acquire))
            .collect::<Result<_, _>>()
            .map_err(during("reading the write counts from the mailboxes"))
    }

    fn collect_dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let Self { vm, slot, dirty, .. } = self;
        dirty.collect(vm, slot).map_err(during("collecting the dirty bitmap"))
    }

    fn read(&self, address: GuestAddress, into: &mut [u8]) -> Result<(), MachineError> {
        let map = self.memory.map();
        map.read_slice(into, address).map_err(reading(address))
    }
}
