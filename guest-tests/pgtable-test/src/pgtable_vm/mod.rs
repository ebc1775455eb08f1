// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page-table test's machine on KVM.
//!
//! [`KvmMachine::new`] creates memory, VM, memslots, vCPUs and guest program from a [`KvmConfig`].
//! Guest mode, layout and memory come first, as they can fail without a VM; then the VM with the
//! smallest address width that fits, its two memslots and its vCPUs.

mod machine;
mod vcpu;
/// Guest mode, vCPU registers and exits, by architecture.
mod arch {
    #[cfg(target_arch = "aarch64")]
    mod aarch64;
    #[cfg(target_arch = "x86_64")]
    mod x86_64;

    #[cfg(target_arch = "aarch64")]
    pub(super) use aarch64::*;
    #[cfg(target_arch = "x86_64")]
    pub(super) use x86_64::*;
}

use std::{error::Error, sync::Arc};

use kvm_ioctls::Kvm;
use vm_memory::Bytes as _;

use crate::{
    config::GuestMap,
    guest::{
        layout::{ARCH_TABLES, LOW_MEMORY, Layout, LayoutError, PROGRAM_AREA_SIZE, place_region},
        program,
    },
    machine::MachineError,
};
use arch as native;
use granule_types::{
    backing::Backing,
    guest_mode::GuestMode,
    record::Host,
    units::{Bytes, GuestAddress},
};
use granule_vmm::{
    arch::{
        aarch64::vm::enable_eager_split,
        host::{self, TRACEPOINTS},
        vm::{choose_ipa_bits, create_vm},
    },
    kvm::{
        self,
        dirty_ring::DirtyRings,
        kick::KickTarget,
        memslot::{DirtyLog, DirtyMode, Memslot},
        stats::Statistics,
        tracepoints::EventCounters,
    },
    memory::{GuestMemory, GuestRam, HostPages, Plan, RamOptions},
};
use vcpu::{GuestVcpu, time_per_read, warn_if_emulated};

pub use machine::KvmMachine;

/// Configuration of a machine for the page-table test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvmConfig {
    /// Backing of the region under test.
    pub backing: Backing,
    /// Size of the region, rounded up to the backing's page and the guest's granule.
    pub memory: Bytes,
    /// Number of vCPUs, at least one.
    pub vcpus: u32,
    /// Address widths and granule of the guest; `None` for the host's default.
    pub mode: Option<GuestMode>,
    /// Mapping of the region by the guest's stage-1 tables.
    pub guest_map: GuestMap,
    /// Start of the region, rounded down to the backing's page and the guest's granule; `None` for
    /// the top of the mode's physical addresses, as in the kernel's test.
    pub phys_offset: Option<GuestAddress>,
    /// `true` if the host populates the region before the guest accesses it.
    pub prefault: bool,
    /// `true` to continue when the host provides other pages than configured.
    pub accept_fallback: bool,
    /// Host CPUs to pin the vCPUs to, one for each in order; empty for no pinning.
    pub pin: Vec<usize>,
    /// Width of the VM's guest-physical addresses; `None` for the smallest that fits.
    pub ipa_bits: Option<u8>,
    /// Mode of dirty logging.
    pub dirty: DirtyMode,
    /// Chunk size of eager page splitting when logging starts; `None` for splits on write faults.
    pub eager_split: Option<Bytes>,
    /// `true` to count the kernel's events, which takes time.
    pub events: bool,
}

impl KvmConfig {
    /// Returns a configuration with defaults for all but backing, size and number of vCPUs.
    pub const fn new(backing: Backing, memory: Bytes, vcpus: u32) -> Self {
        Self {
            backing,
            memory,
            vcpus,
            mode: None,
            guest_map: GuestMap::Blocks,
            phys_offset: None,
            prefault: false,
            accept_fallback: false,
            pin: Vec::new(),
            ipa_bits: None,
            dirty: DirtyMode::Plain,
            eager_split: None,
            events: true,
        }
    }
}

/// Returns a function that adds the failed `operation` ("creating a vCPU") to an error.
fn during<E: Into<Box<dyn Error + Send + Sync>>>(
    operation: &'static str,
) -> impl Fn(E) -> MachineError {
    move |error| MachineError::new(operation, error)
}

/// Memory of a guest, laid out and loaded.
struct LoadedMemory {
    layout: Layout,
    low: Arc<GuestRam>,
    region: Arc<GuestRam>,
    memory: GuestMemory,
    ipa_bits: u8,
}

impl KvmMachine {
    /// Creates the machine: memory, VM, memslots, vCPUs, guest program.
    ///
    /// # Errors
    /// The host cannot provide the configuration.
    pub fn new(config: KvmConfig) -> Result<Self, MachineError> {
        let vcpus = usize::try_from(config.vcpus).unwrap_or(usize::MAX);
        if !config.pin.is_empty() && config.pin.len() != vcpus {
            let count = config.pin.len();
            let text =
                format!("the list has {count} host CPUs for {vcpus} vCPUs; list one for each");
            return Err(MachineError::new("pinning vCPUs", text));
        }
        // Before the machine, whose construction they do not count.
        let events =
            if config.events { EventCounters::open(TRACEPOINTS) } else { EventCounters::default() };
        let kvm = kvm::open(host::explain_missing_driver).map_err(during("opening KVM"))?;
        kvm::check_vcpus(&kvm, config.vcpus).map_err(during("creating vCPUs"))?;
        let (mode, end) = native::choose_mode(&kvm, config.mode)?;
        let loaded = load_memory(&config, &kvm, mode, end)?;

        let vm = create_vm(&kvm, loaded.ipa_bits).map_err(during("creating the VM"))?;
        let logging = "preparing dirty logging";
        let rings = (config.dirty == DirtyMode::Ring)
            .then(|| DirtyRings::enable(&vm).map(Arc::new))
            .transpose()
            .map_err(during(logging))?;
        if let Some(chunk) = config.eager_split {
            enable_eager_split(&vm, chunk).map_err(during(logging))?;
        }
        let slots = "creating memslots";
        let mut machine = Self {
            dirty: DirtyLog::new(&vm, config.dirty, rings.clone()).map_err(during(logging))?,
            low_slot: Memslot::new(&vm, 0, loaded.low).map_err(during(slots))?,
            slot: Memslot::new(&vm, 1, loaded.region).map_err(during(slots))?,
            vm,
            memory: loaded.memory,
            layout: Arc::new(loaded.layout),
            vcpus: Vec::new(),
            vcpu_count: vcpus,
            statistics: Statistics::default(),
            events,
            host: Host::of_this_machine()
                .map_err(during("detecting the properties of this host"))?,
            ipa_bits: loaded.ipa_bits,
            accept_fallback: config.accept_fallback,
        };
        machine.add_vcpus(&config, &kvm, rings.as_ref())?;
        machine.check_for_emulation()?;
        Ok(machine)
    }

    /// Creates the vCPUs, and opens their statistics where configured.
    fn add_vcpus(
        &mut self,
        config: &KvmConfig,
        kvm: &Kvm,
        rings: Option<&Arc<DirtyRings>>,
    ) -> Result<(), MachineError> {
        if config.events {
            self.statistics.add_vm(&self.vm);
        }
        for index in 0..self.vcpu_count {
            let fd = native::make_vcpu(kvm, &self.vm, index, &self.layout)?;
            if let Some(rings) = rings {
                rings.add_vcpu(&fd).map_err(during("preparing dirty logging"))?;
            }
            if index == 0 {
                let features = native::features(&fd).map_err(during("reading CPU features"))?;
                for (name, value) in features {
                    self.host.features.entry(name).or_insert(value);
                }
            }
            if config.events {
                self.statistics.add_vcpu(&fd);
            }
            self.vcpus.push(Box::new(GuestVcpu {
                kick_target: KickTarget::default(),
                fd,
                index,
                cpu: config.pin.get(index).copied(),
                layout: Arc::clone(&self.layout),
                memory: self.memory.clone(),
                rings: rings.cloned(),
            }));
        }
        Ok(())
    }

    /// Warns if KVM emulates guest instructions, and omits the counters that this KVM does not
    /// update. On an emulated host time counts instructions, so the check would detect nothing.
    fn check_for_emulation(&mut self) -> Result<(), MachineError> {
        let (None, Some(vcpu)) = (&self.host.emulator, self.vcpus.first_mut()) else {
            return Ok(());
        };
        let time =
            time_per_read(vcpu.as_mut(), LOW_MEMORY).map_err(during("entering the guest"))?;
        warn_if_emulated(time);
        self.statistics.leave_out_uncounted().map_err(during("reading KVM's statistics"))?;
        self.events.leave_out_uncounted().map_err(during("reading tracepoints"))
    }
}

/// Lays out guest memory, allocates it and loads the guest's program.
fn load_memory(
    config: &KvmConfig,
    kvm: &Kvm,
    mode: GuestMode,
    end: GuestAddress,
) -> Result<LoadedMemory, MachineError> {
    let choosing = "choosing guest memory";
    let pages = HostPages::of_this_host().map_err(during("reading the host's page sizes"))?;
    let plan = Plan::new(config.backing, &pages).map_err(during(choosing))?;
    let end = match config.ipa_bits {
        Some(bits @ ..64) => end.min(GuestAddress(1 << bits)),
        _ => end,
    };
    let placing = "placing guest memory";
    let align = Bytes(plan.page().0.max(mode.page_size().0));
    let size = config
        .memory
        .checked_align_up(align)
        .ok_or(LayoutError::TooLarge { size: config.memory, end: end.0 })
        .map_err(during(placing))?;
    let start = place_region(end, mode.page_size(), size, align, config.phys_offset)
        .map_err(during(placing))?;
    let layout =
        Layout::new(native::abi(mode), pages.base, config.vcpus, start, size, config.guest_map)
            .map_err(during(placing))?;
    let ipa_bits = choose_ipa_bits(kvm, GuestAddress(start.0 + size.0), config.ipa_bits)
        .map_err(during(placing))?;

    let low_plan = Plan::new(Backing::Anonymous, &pages).map_err(during(choosing))?;
    let options = |prefault| RamOptions { prefault, ..RamOptions::default() };
    let low = GuestRam::new(low_plan, &pages, LOW_MEMORY, layout.low_size(), options(true))
        .map_err(during("allocating memory for the guest's program"))?;
    let region = GuestRam::new(plan, &pages, start, size, options(config.prefault))
        .map_err(during("allocating the memory under test"))?;
    let memory = GuestMemory::new(vec![Arc::clone(&low), Arc::clone(&region)])
        .map_err(during("describing guest memory"))?;
    load_program(&layout, &memory)?;
    Ok(LoadedMemory { layout, low, region, memory, ipa_bits })
}

/// Copies program and tables into guest memory.
fn load_program(layout: &Layout, memory: &GuestMemory) -> Result<(), MachineError> {
    let loading = "loading the guest's program";
    let program = program();
    if program.len() as u64 > PROGRAM_AREA_SIZE {
        return Err(MachineError::new(loading, "the program exceeds its area"));
    }
    let map = memory.map();
    map.write_slice(program, LOW_MEMORY).map_err(during(loading))?;
    map.write_slice(&bytes(layout.tables().words()), layout.tables().base())
        .map_err(during(loading))?;
    map.write_slice(&bytes(&native::extra(layout)), ARCH_TABLES).map_err(during(loading))
}

/// Returns words as little-endian bytes.
fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
