// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! [`Machine`] on KVM: memory, dirty bitmap, counters, and migration, which accesses two words of
//! each mailbox page while the vCPUs run.

use std::{
    error::Error,
    fmt,
    sync::{Arc, atomic::Ordering},
};

use kvm_ioctls::VmFd;
use vm_memory::Bytes as _;

use super::{POPULATING_STAGE2, context};
use crate::{
    clock,
    guest::{
        layout::Layout,
        mailbox::{STOP_OFFSET, WRITES_OFFSET},
    },
    machine::{Machine, MachineError, MigrationOps, Region, TestVcpu},
};
use granule_types::{
    guest_mode::GuestMode,
    record::{EventCounts, HostInfo, ResidentPages},
    units::{GuestAddress, Nanoseconds},
};
use granule_vmm::{
    kvm::{
        memslot::{DirtyLog, Memslot},
        pre_fault::Stage2Populator,
        stage2_tables::{mapped_bytes, stage2_table_bytes},
        stats::{StatisticKind, Statistics},
        tracepoints::PerfCounters,
    },
    memory::GuestMemory,
};

/// A virtual machine on KVM with one region of memory under test.
pub struct KvmMachine {
    pub(super) vm: VmFd,
    pub(super) region_slot: Memslot,
    pub(super) low_memory_slot: Memslot,
    pub(super) dirty_log: DirtyLog,
    pub(super) memory: GuestMemory,
    pub(super) layout: Arc<Layout>,
    /// The vCPUs, until [`Machine::take_vcpus`].
    pub(super) vcpus: Vec<Box<dyn TestVcpu>>,
    pub(super) vcpu_count: usize,
    pub(super) statistics: Statistics,
    pub(super) events: PerfCounters,
    pub(super) host: HostInfo,
    pub(super) ipa_bits: u8,
    pub(super) accepts_fallback: bool,
    pub(super) emulated_read_time: Option<Nanoseconds>,
    /// Populates stage 2 of the region, if configured.
    pub(super) populator: Option<Stage2Populator>,
}

impl KvmMachine {
    /// Returns the guest mode.
    pub fn mode(&self) -> GuestMode {
        self.layout.mode()
    }

    /// Returns the width of the VM's guest-physical addresses, in bits.
    pub const fn ipa_bits(&self) -> u8 {
        self.ipa_bits
    }

    /// Returns a warning if this host's KVM emulates guest instructions.
    pub fn emulation_warning(&self) -> Option<String> {
        let time = self.emulated_read_time?;
        Some(format!(
            "this host's KVM takes {} ns for four guest instructions: it emulates them, and the \
             emulation dominates the measured times",
            time.0
        ))
    }

    /// Populates stage 2 of the region, if configured. No vCPU may run.
    pub(super) fn populate_stage2(&self) -> Result<(), MachineError> {
        let Some(populator) = &self.populator else {
            return Ok(());
        };
        populator
            .populate(std::slice::from_ref(self.region_slot.ram()))
            .map_err(context(POPULATING_STAGE2))
    }

    /// Returns the address of the word at `offset` in each vCPU's mailbox page.
    fn mailbox_words(&self, offset: u64) -> impl Iterator<Item = GuestAddress> {
        let layout = &self.layout;
        (0..self.vcpu_count).map(move |vcpu| GuestAddress(layout.mailbox(vcpu).0 + offset))
    }

    fn statistics(&self, kind: StatisticKind) -> Result<EventCounts, MachineError> {
        self.statistics.read(kind).map_err(context("reading KVM's statistics"))
    }
}

/// Returns a function that adds the guest address to an error of reading guest memory.
fn read_error<E: Error + Send + Sync + 'static>(at: GuestAddress) -> impl Fn(E) -> MachineError {
    move |error| MachineError::new(format!("reading guest memory at {:#x}", at.0), error)
}

impl fmt::Debug for KvmMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmMachine")
            .field("mode", &self.mode())
            .field("ipa_bits", &self.ipa_bits)
            .field("region_slot", &self.region_slot)
            .field("low_slot", &self.low_memory_slot)
            .finish_non_exhaustive()
    }
}

impl Machine for KvmMachine {
    fn host(&self) -> &HostInfo {
        &self.host
    }

    fn engine(&self) -> &'static str {
        "kvm"
    }

    fn region(&self) -> Region {
        let ram = self.region_slot.ram();
        Region {
            start: ram.start(),
            size: ram.size(),
            host_page_size: ram.plan().base_page_size(),
            backing_page_size: ram.plan().page_size(),
            host_address: ram.host_address(),
        }
    }

    fn take_vcpus(&mut self) -> Vec<Box<dyn TestVcpu>> {
        let vcpus = std::mem::take(&mut self.vcpus);
        assert!(!vcpus.is_empty(), "take_vcpus is called once");
        vcpus
    }

    fn resident_pages(&self) -> Result<ResidentPages, MachineError> {
        let ram = self.region_slot.ram();
        let obtained =
            if self.accepts_fallback { ram.resident_pages() } else { ram.checked_resident_pages() };
        obtained.map_err(context("checking the memory under test"))
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let Self { vm, region_slot, dirty_log, .. } = self;
        clock::time_call(|| dirty_log.set_enabled(vm, region_slot, on))
            .map_err(context("switching dirty logging"))
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let Self { vm, region_slot, dirty_log, .. } = self;
        dirty_log.read(vm, region_slot).map_err(context("reading the dirty bitmap"))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        let ram = self.region_slot.ram();
        clock::time_call(|| ram.drop_backing()).map_err(context("dropping the memory under test"))
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        let restored = self.region_slot.ram().restore_backing();
        restored.map_err(context("restoring the memory under test"))?;
        self.populate_stage2()
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        self.memory.map().read_obj(address).map_err(read_error(address))
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        let mut counts = self.events.read().map_err(context("reading event counts"))?;
        counts.extend(self.statistics(StatisticKind::Cumulative)?);
        Ok(counts)
    }

    fn gauges(&mut self) -> Result<EventCounts, MachineError> {
        let mut gauges = self.statistics(StatisticKind::Instant)?;
        if let Some(bytes) = stage2_table_bytes() {
            gauges.insert("host.page_table_bytes".to_owned(), bytes);
        }
        let all = GuestAddress(0)..GuestAddress(u64::MAX);
        let mapped = mapped_bytes(&self.vm, &[all]).unwrap_or_default();
        for (level, bytes) in mapped.into_iter().flatten() {
            gauges.insert(format!("stage2.level{level}_bytes"), bytes);
        }
        Ok(gauges)
    }

    fn migration_ops(&mut self) -> Option<&mut dyn MigrationOps> {
        Some(self)
    }
}

impl MigrationOps for KvmMachine {
    fn set_stop_request(&mut self, stop: bool) -> Result<(), MachineError> {
        let map = self.memory.map();
        let writing = "writing the stop request to the mailboxes";
        if !stop {
            for word in self.mailbox_words(WRITES_OFFSET) {
                map.store(0_u64, word, Ordering::Release).map_err(context(writing))?;
            }
        }
        for word in self.mailbox_words(STOP_OFFSET) {
            map.store(u64::from(stop), word, Ordering::Release).map_err(context(writing))?;
        }
        Ok(())
    }

    fn write_counts(&self) -> Result<Vec<u64>, MachineError> {
        let map = self.memory.map();
        self.mailbox_words(WRITES_OFFSET)
            .map(|word| map.load(word, Ordering::Acquire))
            .collect::<Result<_, _>>()
            .map_err(context("reading the write counts from the mailboxes"))
    }

    fn collect_dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let Self { vm, region_slot, dirty_log, .. } = self;
        dirty_log.read_and_clear(vm, region_slot).map_err(context("collecting the dirty bitmap"))
    }

    fn read(&self, address: GuestAddress, buffer: &mut [u8]) -> Result<(), MachineError> {
        let map = self.memory.map();
        map.read_slice(buffer, address).map_err(read_error(address))
    }
}
