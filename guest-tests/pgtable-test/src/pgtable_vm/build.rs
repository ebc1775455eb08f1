// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Construction of the machine on KVM.
//!
//! Guest mode, layout and memory come first, as they can fail without a VM; then the VM with the
//! smallest address width that fits, its two memslots and its vCPUs.

use std::{collections::BTreeMap, sync::Arc};

use kvm_ioctls::{Kvm, VmFd};
use vm_memory::Bytes as _;

use super::{KvmConfig, arch as native, doing, vcpu::GuestVcpu};
use crate::{
    guest::{
        layout::{LOW_MEMORY, Layout, LayoutError, place_region},
        program,
    },
    machine::{MachineError, Vcpu},
};
use granule_types::{
    backing::Backing,
    guest_mode::GuestMode,
    units::{Bytes, GuestAddress},
};
use granule_vmm::{
    arch::{
        aarch64::vm::enable_eager_split,
        host,
        vm::{choose_ipa_bits, create_vm},
    },
    kvm::{
        self,
        dirty_ring::DirtyRings,
        kick::KickTarget,
        memslot::{DirtyLog, DirtyMode, Memslot},
        stats::Statistics,
    },
    memory::{GuestMemory, GuestRam, HostPages, Plan},
};

/// The parts of a machine.
pub(super) struct Parts {
    pub(super) vm: VmFd,
    pub(super) slot: Memslot,
    pub(super) low_slot: Memslot,
    pub(super) dirty: DirtyLog,
    pub(super) memory: GuestMemory,
    pub(super) layout: Arc<Layout>,
    pub(super) vcpus: Vec<Box<dyn Vcpu>>,
    pub(super) statistics: Statistics,
    pub(super) mode: GuestMode,
    pub(super) ipa_bits: u8,
    pub(super) features: BTreeMap<String, u64>,
}

/// Memory of a guest, laid out and loaded.
struct LoadedMemory {
    layout: Layout,
    low: Arc<GuestRam>,
    region: Arc<GuestRam>,
    memory: GuestMemory,
    ipa_bits: u8,
}

/// Builds a machine.
///
/// # Errors
/// The host cannot provide the configuration.
pub(super) fn build(config: &KvmConfig) -> Result<Parts, MachineError> {
    let kvm = kvm::open(host::explain_missing_driver).map_err(doing("opening KVM"))?;
    kvm::check_vcpus(&kvm, config.vcpus).map_err(doing("creating vCPUs"))?;
    let (mode, end) = native::choose_mode(&kvm, config.mode)?;
    let loaded = load_memory(config, &kvm, mode, end)?;

    let vm = create_vm(&kvm, loaded.ipa_bits).map_err(doing("creating the VM"))?;
    let logging = "preparing dirty logging";
    let rings = (config.dirty == DirtyMode::Ring)
        .then(|| DirtyRings::enable(&vm).map(Arc::new))
        .transpose()
        .map_err(doing(logging))?;
    if let Some(chunk) = config.eager_split {
        enable_eager_split(&vm, chunk).map_err(doing(logging))?;
    }
    let dirty = DirtyLog::new(&vm, config.dirty, rings.clone()).map_err(doing(logging))?;
    let slots = "creating memslots";
    let low_slot = Memslot::new(&vm, 0, loaded.low).map_err(doing(slots))?;
    let slot = Memslot::new(&vm, 1, loaded.region).map_err(doing(slots))?;

    let mut parts = Parts {
        vm,
        slot,
        low_slot,
        dirty,
        memory: loaded.memory,
        layout: Arc::new(loaded.layout),
        vcpus: Vec::new(),
        statistics: Statistics::default(),
        mode,
        ipa_bits: loaded.ipa_bits,
        features: BTreeMap::new(),
    };
    add_vcpus(&mut parts, config, &kvm, rings.as_ref())?;
    Ok(parts)
}

/// Lays out guest memory, allocates it and loads the guest's program.
fn load_memory(
    config: &KvmConfig,
    kvm: &Kvm,
    mode: GuestMode,
    end: GuestAddress,
) -> Result<LoadedMemory, MachineError> {
    let choosing = "choosing guest memory";
    let pages = HostPages::of_this_host().map_err(doing("reading the host's page sizes"))?;
    let plan = Plan::new(config.backing, &pages).map_err(doing(choosing))?;
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
        .map_err(doing(placing))?;
    let start = place_region(end, mode.page_size(), size, align, config.phys_offset)
        .map_err(doing(placing))?;
    let layout =
        Layout::new(native::abi(mode), pages.base, config.vcpus, start, size, config.guest_map)
            .map_err(doing(placing))?;
    let ipa_bits = choose_ipa_bits(kvm, GuestAddress(start.0 + size.0), config.ipa_bits)
        .map_err(doing(placing))?;

    let low_plan = Plan::new(Backing::Anonymous, &pages).map_err(doing(choosing))?;
    let low = GuestRam::new(low_plan, &pages, LOW_MEMORY, layout.low_size(), true)
        .map_err(doing("allocating memory for the guest's program"))?;
    let region = GuestRam::new(plan, &pages, start, size, config.prefault)
        .map_err(doing("allocating the memory under test"))?;
    let memory = GuestMemory::new(vec![Arc::clone(&low), Arc::clone(&region)])
        .map_err(doing("describing guest memory"))?;
    load_program(&layout, &memory)?;
    Ok(LoadedMemory { layout, low, region, memory, ipa_bits })
}

/// Creates the vCPUs, and opens their statistics where configured.
fn add_vcpus(
    parts: &mut Parts,
    config: &KvmConfig,
    kvm: &Kvm,
    rings: Option<&Arc<DirtyRings>>,
) -> Result<(), MachineError> {
    if config.events {
        parts.statistics.add_vm(&parts.vm);
    }
    for index in 0..usize::try_from(config.vcpus).unwrap_or(usize::MAX) {
        let fd = native::make_vcpu(kvm, &parts.vm, index, &parts.layout)?;
        if let Some(rings) = rings {
            rings.add_vcpu(&fd).map_err(doing("preparing dirty logging"))?;
        }
        if index == 0 {
            parts.features = native::features(&fd).map_err(doing("reading CPU features"))?;
        }
        if config.events {
            parts.statistics.add_vcpu(&fd);
        }
        parts.vcpus.push(Box::new(GuestVcpu {
            kick_target: KickTarget::default(),
            fd,
            index,
            cpu: config.pin.get(index).copied(),
            layout: Arc::clone(&parts.layout),
            memory: parts.memory.clone(),
            rings: rings.cloned(),
        }));
    }
    Ok(())
}

/// Copies program and tables into guest memory.
fn load_program(layout: &Layout, memory: &GuestMemory) -> Result<(), MachineError> {
    let loading = "loading the guest's program";
    let program = program();
    if program.len() as u64 > layout.program_room().0 {
        return Err(MachineError::new(loading, "the program exceeds its area"));
    }
    let map = memory.map();
    map.write_slice(program, layout.program()).map_err(doing(loading))?;
    map.write_slice(&bytes(layout.tables().words()), layout.tables().base())
        .map_err(doing(loading))?;
    map.write_slice(&bytes(&native::extra(layout)), layout.extra()).map_err(doing(loading))
}

/// Returns words as little-endian bytes.
fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
