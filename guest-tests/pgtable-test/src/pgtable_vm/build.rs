// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds a machine for the page-table test.
//!
//! First everything that can be refused without a VM (mode, place, memory), then the VM with the
//! smallest address width, its two slots, its vCPUs; at last the guest's program, tables and
//! registers.

use std::sync::Arc;

use crate::guest::{
    layout::{LOW_MEMORY, Layout, LayoutError, place_region},
    program::program,
};
use crate::machine::{MachineError, Vcpu};
use granule_types::{
    backing::Backing,
    units::{Bytes, GuestAddress},
};
use vm_memory::Bytes as _;

use super::{KvmConfig, Parts, arch as native, error::doing, vcpu::GuestVcpu};
use granule_vmm::{
    arch::{
        aarch64::eager_split,
        host,
        vm::{choose_ipa_bits, create_vm},
    },
    kvm::{
        self,
        dirty::{DirtyLog, DirtyMode},
        dirty_ring::DirtyRings,
        kick::KickTarget,
        memslot::Memslot,
        stats::Statistics,
    },
    memory::{GuestMemory, GuestRam, HostPages, Plan},
};

/// Builds the machine.
///
/// # Errors
/// What was asked for cannot be had; the error says what, and what to do.
pub fn build(config: &KvmConfig) -> Result<Parts, MachineError> {
    let kvm = kvm::open(host::explain_missing_driver).map_err(doing("opening KVM"))?;
    kvm::check_vcpus(&kvm, config.vcpus).map_err(doing("making vCPUs"))?;
    let host = HostPages::of_this_host().map_err(doing("asking the host for its page sizes"))?;
    let plan = Plan::new(config.backing, &host).map_err(doing("choosing guest memory"))?;
    let (mode, end) = native::choose_mode(&kvm, config.mode)?;
    let end = match config.ipa_bits {
        Some(bits @ ..64) => end.min(GuestAddress(1 << bits)),
        _ => end,
    };

    let placing = "placing guest memory";
    let align = Bytes(plan.page().0.max(mode.page_size().0));
    let size = config
        .memory
        .checked_align_up(align)
        .ok_or(LayoutError::TooLarge {
            size: config.memory,
            end: end.0,
        })
        .map_err(doing(placing))?;
    let start = place_region(end, mode.page_size(), size, align, config.phys_offset)
        .map_err(doing(placing))?;
    let layout = Layout::new(
        native::abi(mode),
        host.base,
        config.vcpus,
        start,
        size,
        config.guest_map,
    )
    .map_err(doing(placing))?;
    let ipa_bits =
        choose_ipa_bits(&kvm, start.0 + size.0, config.ipa_bits).map_err(doing(placing))?;

    let low_plan = Plan::new(Backing::Anonymous, &host).map_err(doing("choosing guest memory"))?;
    let low = GuestRam::new(low_plan, &host, LOW_MEMORY, layout.low_size(), true)
        .map_err(doing("obtaining memory for the guest's program"))?;
    let ram = GuestRam::new(plan, &host, start, size, config.prefault)
        .map_err(doing("obtaining the memory under test"))?;
    let memory = GuestMemory::new(vec![Arc::clone(&low), Arc::clone(&ram)])
        .map_err(doing("describing guest memory"))?;
    load(&layout, &memory)?;

    let vm = create_vm(&kvm, ipa_bits).map_err(doing("making the VM"))?;
    let logging = "preparing dirty logging";
    let ringed = config.dirty == DirtyMode::Ring;
    let rings = ringed.then(|| DirtyRings::enable(&vm)).transpose();
    let rings = rings.map_err(doing(logging))?.map(Arc::new);
    if let Some(chunk) = config.eager_split {
        eager_split::enable(&vm, chunk).map_err(doing(logging))?;
    }
    let dirty = DirtyLog::new(&vm, config.dirty, rings.clone()).map_err(doing(logging))?;
    let slots = "giving the VM its memory";
    let low_slot = Memslot::new(&vm, 0, low).map_err(doing(slots))?;
    let slot = Memslot::new(&vm, 1, ram).map_err(doing(slots))?;

    let layout = Arc::new(layout);
    let mut vcpus: Vec<Box<dyn Vcpu>> = Vec::new();
    let mut features = None;
    let mut statistics = Statistics::none();
    if config.events {
        statistics.add_vm(&vm);
    }
    for index in 0..usize::try_from(config.vcpus).unwrap_or(usize::MAX) {
        let fd = native::make_vcpu(&kvm, &vm, index, &layout)?;
        if let Some(rings) = &rings {
            rings.add_vcpu(&fd).map_err(doing(logging))?;
        }
        if features.is_none() {
            let reading = "reading CPU features";
            features = Some(native::features(&fd).map_err(doing(reading))?);
        }
        if config.events {
            statistics.add_vcpu(&fd);
        }
        vcpus.push(Box::new(GuestVcpu {
            anchor: KickTarget::default(),
            fd,
            index,
            cpu: config.pin.get(index).copied(),
            layout: Arc::clone(&layout),
            memory: memory.clone(),
            rings: rings.clone(),
        }));
    }
    Ok(Parts {
        vm,
        slot,
        low_slot,
        dirty,
        memory,
        layout,
        vcpus,
        statistics,
        mode,
        ipa_bits,
        features: features.unwrap_or_default(),
    })
}

/// Copies program and tables into the guest.
fn load(layout: &Layout, memory: &GuestMemory) -> Result<(), MachineError> {
    let loading = "loading the guest's program";
    let program = program();
    if program.len() as u64 > layout.program_room().0 {
        return Err(MachineError::new(loading, "it is larger than its room"));
    }
    let map = memory.map();
    map.write_slice(program, layout.program())
        .map_err(doing(loading))?;
    map.write_slice(&bytes(layout.tables().words()), layout.tables().base())
        .map_err(doing(loading))?;
    map.write_slice(&bytes(&native::extra(layout)), layout.extra())
        .map_err(doing(loading))
}

/// Words as they lie in memory.
fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
