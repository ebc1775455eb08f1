// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page-table test's machine on KVM.
//!
//! Its parts are built from a configuration; what the harness asks of a machine from then
//! on (memory, dirty log, counts) is here, and a vCPU's part beside it.

mod arch;
mod build;
mod config;
mod error;
mod live;
mod pace;
mod vcpu;

use std::{collections::BTreeMap, fmt, sync::Arc};

use crate::{
    guest::layout::{LOW_MEMORY, Layout},
    machine::{Live, Machine, MachineError, Region, Vcpu},
    vcpu_threads::clock,
};
use granule_types::{
    guest_mode::GuestMode,
    record::{EventCounts, Host, Obtained},
    units::{GuestAddress, Nanoseconds},
};
use kvm_ioctls::VmFd;
use vm_memory::Bytes as _;

use granule_vmm::{
    kvm::{
        dirty::DirtyLog,
        memslot::Memslot,
        stage2_tables::{mapped_by_level, stage2_table_bytes},
        stats::{StatisticKind, Statistics},
        tracepoints::EventCounters,
    },
    memory::GuestMemory,
};

pub use config::KvmConfig;
use error::doing;

/// What a machine is made of.
pub(crate) struct Parts {
    pub vm: VmFd,
    pub slot: Memslot,
    pub low_slot: Memslot,
    pub dirty: DirtyLog,
    pub memory: GuestMemory,
    pub layout: Arc<Layout>,
    pub vcpus: Vec<Box<dyn Vcpu>>,
    pub statistics: Statistics,
    pub mode: GuestMode,
    pub ipa_bits: u8,
    pub features: BTreeMap<String, u64>,
}

/// A virtual machine under KVM with one region of memory under test.
pub struct KvmMachine {
    parts: Parts,
    vcpus: usize,
    host: Host,
    events: EventCounters,
    accept_fallback: bool,
}

impl KvmMachine {
    /// Makes the machine: memory, VM, slots, vCPUs, guest program.
    ///
    /// # Errors
    /// What was asked for cannot be had on this host; the error says what and what to do.
    pub fn new(config: KvmConfig) -> Result<Self, MachineError> {
        if !config.pin.is_empty() && config.pin.len() as u64 != u64::from(config.vcpus) {
            return Err(MachineError::new(
                "pinning vCPUs",
                format!(
                    "{} host CPUs are listed for {} vCPUs: list one for each",
                    config.pin.len(),
                    config.vcpus
                ),
            ));
        }
        let mut events = if config.events {
            EventCounters::open(granule_vmm::arch::host::TRACEPOINTS)
        } else {
            EventCounters::none()
        };
        let mut parts = build::build(&config)?;
        let mut host = Host::of_this_machine()
            .map_err(|error| MachineError::new("finding out what this host is", error))?;
        for (name, value) in &parts.features {
            host.features.entry(name.clone()).or_insert(*value);
        }
        // An emulated host's time is counted in instructions: nothing to be found out there.
        if let (None, Some(vcpu)) = (&host.emulator, parts.vcpus.first_mut()) {
            let pace = pace::measure(vcpu.as_mut(), LOW_MEMORY)
                .map_err(|error| MachineError::new("entering the guest", error))?;
            pace::warn_if_slow(pace);
            parts
                .statistics
                .leave_out_uncounted()
                .map_err(doing("reading KVM's statistics"))?;
            events
                .leave_out_uncounted()
                .map_err(doing("reading tracepoints"))?;
        }
        Ok(Self {
            vcpus: parts.vcpus.len(),
            parts,
            host,
            events,
            accept_fallback: config.accept_fallback,
        })
    }

    /// The guest mode in use.
    pub const fn mode(&self) -> GuestMode {
        self.parts.mode
    }

    /// Width of the VM's guest-physical addresses, in bits.
    pub const fn ipa_bits(&self) -> u8 {
        self.parts.ipa_bits
    }
}

impl KvmMachine {
    fn statistics(&self, kind: StatisticKind) -> Result<EventCounts, MachineError> {
        self.parts
            .statistics
            .read(kind)
            .map_err(doing("reading KVM's statistics"))
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

/// The time a call takes, and its error told with what was being done.
fn timed<E>(
    doing: &'static str,
    call: impl FnOnce() -> Result<(), E>,
) -> Result<Nanoseconds, MachineError>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let start = clock::now();
    let result = call();
    let spent = clock::between(start, clock::now());
    result.map_err(|error| MachineError::new(doing, error))?;
    Ok(spent)
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
        assert!(!vcpus.is_empty(), "the vCPUs were taken before");
        vcpus
    }

    fn obtained(&self) -> Result<Obtained, MachineError> {
        let ram = self.parts.slot.ram();
        let obtained = if self.accept_fallback {
            ram.resident()
        } else {
            ram.obtained()
        };
        obtained.map_err(|error| MachineError::new("checking the memory under test", error))
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let Parts {
            vm, slot, dirty, ..
        } = &mut self.parts;
        timed("switching dirty logging", || dirty.switch(vm, slot, on))
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let Parts {
            vm, slot, dirty, ..
        } = &mut self.parts;
        dirty
            .read(vm, slot)
            .map_err(|error| MachineError::new("reading the dirty log", error))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        let ram = self.parts.slot.ram();
        timed("dropping the memory under test", || ram.drop_backing())
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
        let mut counts = self
            .events
            .read()
            .map_err(|error| MachineError::new("reading event counts", error))?;
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

    fn live(&mut self) -> Option<&mut dyn Live> {
        Some(self)
    }
}
