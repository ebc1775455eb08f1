// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page-table test's machine on KVM.
//!
//! [`KvmMachine::new`] chooses the guest mode, lays out guest memory and loads the guest program,
//! then creates a VM of the smallest address width that fits, its two memslots and its vCPUs.

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

use kvm_ioctls::{Kvm, VmFd};
use vm_memory::Bytes as _;

use crate::{
    config::GuestMap,
    guest::{
        layout::{
            DESCRIPTOR_TABLES, LOW_MEMORY, Layout, LayoutError, PROGRAM_AREA_SIZE, place_region,
        },
        program,
    },
    machine::MachineError,
};
use arch as native;
use granule_types::{
    backing::Backing,
    guest_mode::GuestMode,
    record::HostInfo,
    units::{Bytes, GuestAddress},
};
use granule_vmm::{
    arch::{
        aarch64::vm::enable_eager_split,
        host::{self, FAULT_TRACEPOINT, FAULT_TYPE_FILTERS, TRACEPOINTS},
        vm::{choose_ipa_width, create_vm},
    },
    kvm::{
        self,
        dirty_ring::DirtyRings,
        kick::KickTarget,
        memslot::{DirtyLog, DirtyMode, Memslot},
        pre_fault::Stage2Populator,
        stats::Statistics,
        tracepoints::PerfCounters,
    },
    memory::{BackingPlan, GuestMemory, GuestRam, HostPages, RamOptions},
};
use vcpu::{KvmVcpu, MAX_TIME_PER_READ, time_per_read};

pub use machine::KvmMachine;

/// Configuration of a machine for the page-table test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvmConfig {
    /// Backing of the region under test.
    pub backing: Backing,
    /// Size of the region, rounded up to the backing's page size and the guest's granule.
    pub memory: Bytes,
    /// Number of vCPUs, at least one.
    pub vcpus: u32,
    /// Guest mode; `None` for the host's default.
    pub mode: Option<GuestMode>,
    /// Mapping of the region by the guest's stage-1 tables.
    pub guest_map: GuestMap,
    /// Start of the region, rounded down to the backing's page size and the guest's granule; `None`
    /// for the end of the mode's physical addresses, as in the kernel's test.
    pub phys_offset: Option<GuestAddress>,
    /// Indicates that the host populates the region before the guest accesses it.
    pub prefault: bool,
    /// Indicates that stage 2 of the region is populated before the guest accesses it. Requires
    /// `prefault`, because KVM maps memory that is not populated as a read does.
    pub populates_stage2: bool,
    /// Lets the run continue if the host provides pages of another size than configured.
    pub accepts_fallback: bool,
    /// Host CPU of each vCPU, in order; empty for no pinning.
    pub pinned_cpus: Vec<usize>,
    /// Width of the VM's guest-physical addresses; `None` for the smallest that fits.
    pub ipa_bits: Option<u8>,
    /// Mode of dirty logging.
    pub dirty_mode: DirtyMode,
    /// Chunk size of eager page splitting when dirty logging starts; `None` to split on faults.
    pub eager_split: Option<Bytes>,
    /// Numbers of other capabilities of the VM.
    pub vm_capabilities: Vec<u32>,
    /// Kernel events to count, which costs time.
    pub events: CountedEvents,
}

/// Kernel events that a machine counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CountedEvents {
    /// No events.
    None,
    /// Stage-2 aborts, exits and calls of the mmu_notifier.
    #[default]
    Tracepoints,
    /// [`Tracepoints`](Self::Tracepoints), and stage-2 aborts by type: an event filter for each.
    FaultTypes,
}

impl CountedEvents {
    fn open(self) -> PerfCounters {
        match self {
            Self::None => PerfCounters::default(),
            Self::Tracepoints => PerfCounters::open(TRACEPOINTS),
            Self::FaultTypes => {
                PerfCounters::open(TRACEPOINTS).and_filtered(FAULT_TRACEPOINT, FAULT_TYPE_FILTERS)
            }
        }
    }
}

impl KvmConfig {
    /// Returns a configuration with defaults for all other fields.
    pub const fn new(backing: Backing, memory: Bytes, vcpus: u32) -> Self {
        Self {
            backing,
            memory,
            vcpus,
            mode: None,
            guest_map: GuestMap::Blocks,
            phys_offset: None,
            prefault: false,
            populates_stage2: false,
            accepts_fallback: false,
            pinned_cpus: Vec::new(),
            ipa_bits: None,
            dirty_mode: DirtyMode::Plain,
            eager_split: None,
            vm_capabilities: Vec::new(),
            events: CountedEvents::Tracepoints,
        }
    }
}

/// Returns a function that adds the failed `operation` ("creating a vCPU") to an error.
fn context<E: Into<Box<dyn Error + Send + Sync>>>(
    operation: &'static str,
) -> impl Fn(E) -> MachineError {
    move |error| MachineError::new(operation, error)
}

const POPULATING_STAGE2: &str = "populating stage 2";

/// Returns a populator without vCPUs.
fn new_populator(vm: &VmFd) -> Result<Stage2Populator, MachineError> {
    Stage2Populator::new(vm).ok_or_else(|| {
        MachineError::new(
            POPULATING_STAGE2,
            "this host's KVM cannot do so (KVM_CAP_PRE_FAULT_MEMORY): omit --pre-fault; --prefault \
             populates host memory alone",
        )
    })
}

/// Guest memory with the loaded program.
struct LoadedMemory {
    layout: Layout,
    low_memory: Arc<GuestRam>,
    region: Arc<GuestRam>,
    memory: GuestMemory,
    ipa_bits: u8,
}

impl KvmMachine {
    /// Creates the machine.
    ///
    /// # Errors
    /// The host does not support the configuration.
    pub fn new(config: KvmConfig) -> Result<Self, MachineError> {
        let vcpus = usize::try_from(config.vcpus).unwrap_or(usize::MAX);
        if !config.pinned_cpus.is_empty() && config.pinned_cpus.len() != vcpus {
            let count = config.pinned_cpus.len();
            let text =
                format!("the list has {count} host CPUs for {vcpus} vCPUs; list one for each");
            return Err(MachineError::new("pinning vCPUs", text));
        }
        // The vCPU threads, which start later, inherit the counters.
        let events = config.events.open();
        let kvm = kvm::open(host::explain_missing_driver).map_err(context("opening KVM"))?;
        kvm::check_vcpu_count(&kvm, config.vcpus).map_err(context("creating vCPUs"))?;
        let (mode, end) = native::choose_mode(&kvm, config.mode)?;
        let loaded = load_memory(&config, &kvm, mode, end)?;

        let vm = create_vm(&kvm, loaded.ipa_bits).map_err(context("creating the VM"))?;
        kvm::enable_vm_capabilities(&vm, &config.vm_capabilities)
            .map_err(context("enabling capabilities"))?;
        let logging = "preparing dirty logging";
        let rings = config.dirty_mode.enable_rings(&vm).map_err(context(logging))?;
        if let Some(chunk) = config.eager_split {
            enable_eager_split(&vm, chunk).map_err(context(logging))?;
        }
        let slots = "creating memslots";
        let mut machine = Self {
            dirty_log: DirtyLog::new(&vm, config.dirty_mode, rings.clone())
                .map_err(context(logging))?,
            low_memory_slot: Memslot::new(&vm, 0, loaded.low_memory).map_err(context(slots))?,
            region_slot: Memslot::new(&vm, 1, loaded.region).map_err(context(slots))?,
            vm,
            memory: loaded.memory,
            layout: Arc::new(loaded.layout),
            vcpus: Vec::new(),
            vcpu_count: vcpus,
            statistics: Statistics::default(),
            events,
            host: HostInfo::of_this_host()
                .map_err(context("detecting the properties of this host"))?,
            ipa_bits: loaded.ipa_bits,
            accepts_fallback: config.accepts_fallback,
            emulated_read_time: None,
            populator: None,
        };
        machine.add_vcpus(&config, &kvm, rings.as_ref())?;
        machine.check_for_emulation()?;
        machine.populate_stage2()?;
        Ok(machine)
    }

    /// Creates the vCPUs, and opens their statistics if configured.
    fn add_vcpus(
        &mut self,
        config: &KvmConfig,
        kvm: &Kvm,
        rings: Option<&Arc<DirtyRings>>,
    ) -> Result<(), MachineError> {
        if config.events != CountedEvents::None {
            self.statistics.add_vm(&self.vm);
        }
        let mut populator = match config.populates_stage2 {
            true => Some(new_populator(&self.vm)?),
            false => None,
        };
        for index in 0..self.vcpu_count {
            let fd = native::create_vcpu(kvm, &self.vm, index, &self.layout)?;
            if let Some(rings) = rings {
                rings.add_vcpu(&fd).map_err(context("preparing dirty logging"))?;
            }
            if let Some(populator) = &mut populator {
                populator.add_vcpu(&fd).map_err(context(POPULATING_STAGE2))?;
            }
            if index == 0 {
                let features =
                    native::cpu_features(&fd).map_err(context("reading CPU features"))?;
                for (name, value) in features {
                    self.host.features.entry(name).or_insert(value);
                }
            }
            if config.events != CountedEvents::None {
                self.statistics.add_vcpu(&fd);
            }
            self.vcpus.push(Box::new(KvmVcpu {
                kick_target: KickTarget::default(),
                fd,
                index,
                pinned_cpu: config.pinned_cpus.get(index).copied(),
                layout: Arc::clone(&self.layout),
                memory: self.memory.clone(),
                rings: rings.cloned(),
            }));
        }
        self.populator = populator;
        Ok(())
    }

    /// Detects a KVM that emulates guest instructions, and removes the counters that this KVM does
    /// not update. Does nothing on an emulated host, whose time counts instructions.
    fn check_for_emulation(&mut self) -> Result<(), MachineError> {
        let (None, Some(vcpu)) = (&self.host.emulator, self.vcpus.first_mut()) else {
            return Ok(());
        };
        let time =
            time_per_read(vcpu.as_mut(), LOW_MEMORY).map_err(context("entering the guest"))?;
        self.emulated_read_time = (time > MAX_TIME_PER_READ).then_some(time);
        self.statistics.remove_uncounted().map_err(context("reading KVM's statistics"))?;
        self.events.remove_uncounted().map_err(context("reading tracepoints"))
    }
}

/// Lays out and allocates guest memory, and loads the guest program.
fn load_memory(
    config: &KvmConfig,
    kvm: &Kvm,
    mode: GuestMode,
    end: GuestAddress,
) -> Result<LoadedMemory, MachineError> {
    let choosing = "choosing guest memory";
    let pages = HostPages::of_this_host().map_err(context("reading the host's page sizes"))?;
    let plan = BackingPlan::new(config.backing, &pages).map_err(context(choosing))?;
    let end = match config.ipa_bits {
        Some(bits @ ..64) => end.min(GuestAddress(1 << bits)),
        _ => end,
    };
    let placing = "placing guest memory";
    let align = Bytes(plan.page_size().0.max(mode.page_size().0));
    let size = config
        .memory
        .checked_align_up(align)
        .ok_or(LayoutError::TooLarge { size: config.memory, end: end.0 })
        .map_err(context(placing))?;
    let start = place_region(end, mode.page_size(), size, align, config.phys_offset)
        .map_err(context(placing))?;
    let arch = native::guest_arch(mode);
    let layout =
        Layout::new(arch, pages.base_page_size, config.vcpus, start, size, config.guest_map)
            .map_err(context(placing))?;
    let ipa_bits = choose_ipa_width(kvm, GuestAddress(start.0 + size.0), config.ipa_bits)
        .map_err(context(placing))?;

    let low_plan = BackingPlan::new(Backing::Anonymous, &pages).map_err(context(choosing))?;
    let options = |prefault| RamOptions { prefault, ..RamOptions::default() };
    let low_memory =
        GuestRam::new(low_plan, &pages, LOW_MEMORY, layout.low_memory_size(), options(true))
            .map_err(context("allocating memory for the guest's program"))?;
    let region = GuestRam::new(plan, &pages, start, size, options(config.prefault))
        .map_err(context("allocating the memory under test"))?;
    let memory = GuestMemory::new(vec![Arc::clone(&low_memory), Arc::clone(&region)])
        .map_err(context("describing guest memory"))?;
    load_program(&layout, &memory)?;
    Ok(LoadedMemory { layout, low_memory, region, memory, ipa_bits })
}

/// Copies the guest program and its tables into guest memory.
fn load_program(layout: &Layout, memory: &GuestMemory) -> Result<(), MachineError> {
    let loading = "loading the guest's program";
    let program = program();
    if program.len() as u64 > PROGRAM_AREA_SIZE {
        return Err(MachineError::new(loading, "the program exceeds its area"));
    }
    let map = memory.map();
    map.write_slice(program, LOW_MEMORY).map_err(context(loading))?;
    map.write_slice(&to_le_bytes(layout.tables().entries()), layout.tables().root())
        .map_err(context(loading))?;
    map.write_slice(&to_le_bytes(&native::descriptor_tables(layout)), DESCRIPTOR_TABLES)
        .map_err(context(loading))
}

/// Returns words as little-endian bytes.
fn to_le_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
