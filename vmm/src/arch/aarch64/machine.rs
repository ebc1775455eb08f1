// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds an arm64 machine for the page-table test.
//!
//! First everything that can be refused without a VM (mode, place, memory), then the VM with the
//! smallest address width, its two slots, its vCPUs; at last the guest's program, tables and
//! registers.

use std::{error::Error, sync::Arc};

use granule_guest_tests::{
    arch::aarch64::{
        layout::{LOW_MEMORY, Layout, LayoutError, place_region},
        payload,
        registers::{self as guest_registers, ID_AA64MMFR0_EL1, SCTLR_EL1, SystemRegister},
    },
    config::Backing,
    machine::{MachineError, Vcpu},
    results::stage2_features,
    units::Bytes,
};
use kvm_bindings::kvm_vcpu_init;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::Bytes as _;

use super::{ipa, registers, vcpu::GuestVcpu};
use crate::{
    kvm::{self, KvmError, dirty::DirtyLog, kick::Anchor, slot::Slot},
    machine::{KvmConfig, Parts},
    memory::{GuestMemory, GuestRam, HostPages, Plan},
};

/// Features that decide what the fault path costs; user space reads them of a vCPU only.
const ISAR0: SystemRegister = SystemRegister {
    name: "ID_AA64ISAR0_EL1",
    encoding: [3, 0, 0, 6, 0],
};
const MMFR2: SystemRegister = SystemRegister {
    name: "ID_AA64MMFR2_EL1",
    encoding: [3, 0, 0, 7, 2],
};

/// Builds the machine.
///
/// # Errors
/// What was asked for cannot be had; the error says what, and what to do.
pub(crate) fn build(config: &KvmConfig) -> Result<Parts, MachineError> {
    let kvm = kvm::open().map_err(doing("opening KVM"))?;
    kvm::check_vcpus(&kvm, config.vcpus).map_err(doing("making vCPUs"))?;
    let host = HostPages::of_this_host().map_err(doing("asking the host for its page sizes"))?;
    let plan = Plan::new(config.backing, &host).map_err(doing("choosing guest memory"))?;

    let limit = ipa::limit(kvm.get_host_ipa_limit());
    let choosing = "choosing the guest mode";
    let mode = match config.mode {
        Some(mode) => mode,
        None => ipa::default_mode(limit).map_err(doing(choosing))?,
    };
    guest_registers::check_mode(mode).map_err(doing(choosing))?;
    ipa::check_mode(mode, limit).map_err(doing(choosing))?;

    let placing = "placing guest memory";
    let align = Bytes(plan.page().0.max(mode.page_size().0));
    let size = config
        .memory
        .checked_align_up(align)
        .ok_or(LayoutError::TooLarge {
            size: config.memory,
            bits: mode.pa_bits(),
        })
        .map_err(doing(placing))?;
    let pa_bits = config.ipa_bits.unwrap_or(64).min(mode.pa_bits());
    let start = place_region(pa_bits, mode.page_size(), size, align, config.phys_offset)
        .map_err(doing(placing))?;
    let layout = Layout::new(mode, host.base, config.vcpus, start, size, config.guest_map)
        .map_err(doing(placing))?;
    let ipa_bits = ipa::choose(start.0 + size.0, config.ipa_bits, limit).map_err(doing(placing))?;

    let low_plan = Plan::new(Backing::Anonymous, &host).map_err(doing("choosing guest memory"))?;
    let low = GuestRam::new(low_plan, &host, LOW_MEMORY, layout.low_size(), true)
        .map_err(doing("obtaining memory for the guest's program"))?;
    let ram = GuestRam::new(plan, &host, start, size, config.prefault)
        .map_err(doing("obtaining the memory under test"))?;
    let memory = GuestMemory::new(vec![Arc::clone(&low), Arc::clone(&ram)])
        .map_err(doing("describing guest memory"))?;
    load(&layout, &memory)?;

    let vm = make_vm(&kvm, ipa_bits).map_err(doing("making the VM"))?;
    let dirty = DirtyLog::new(&vm, config.dirty).map_err(doing("preparing dirty logging"))?;
    let slots = "giving the VM its memory";
    let low_slot = Slot::new(&vm, 0, low).map_err(doing(slots))?;
    let slot = Slot::new(&vm, 1, ram).map_err(doing(slots))?;

    let layout = Arc::new(layout);
    let mut vcpus: Vec<Box<dyn Vcpu>> = Vec::new();
    let mut features = None;
    for index in 0..usize::try_from(config.vcpus).unwrap_or(usize::MAX) {
        let fd = make_vcpu(&vm, index, &layout)?;
        if features.is_none() {
            features = Some(read_features(&fd).map_err(doing("reading CPU features"))?);
        }
        vcpus.push(Box::new(GuestVcpu {
            anchor: Anchor::default(),
            fd,
            index,
            cpu: config.pin.get(index).copied(),
            layout: Arc::clone(&layout),
            memory: memory.clone(),
        }));
    }
    Ok(Parts {
        vm,
        slot,
        low_slot,
        dirty,
        memory,
        vcpus,
        mode,
        ipa_bits,
        features: features.unwrap_or_default(),
    })
}

/// Copies program and tables into the guest.
fn load(layout: &Layout, memory: &GuestMemory) -> Result<(), MachineError> {
    let loading = "loading the guest's program";
    let program = payload::program();
    if program.len() as u64 > layout.program_room().0 {
        return Err(MachineError::new(loading, "it is larger than its room"));
    }
    memory
        .map()
        .write_slice(program, layout.program())
        .map_err(doing(loading))?;
    let tables: Vec<u8> = layout
        .tables()
        .words()
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    memory
        .map()
        .write_slice(&tables, layout.tables().base())
        .map_err(doing(loading))
}

/// A VM with addresses of `ipa_bits`.
fn make_vm(kvm: &Kvm, ipa_bits: u8) -> Result<VmFd, KvmError> {
    // A kernel without the choice takes no size; its VMs have 40 bits, as many as asked for then.
    let made = if kvm.get_host_ipa_limit() > 0 {
        kvm.create_vm_with_ipa_size(ipa_bits.into())
    } else {
        kvm.create_vm_with_type(0)
    };
    made.map_err(|error| KvmError::call("KVM_CREATE_VM", error))
}

/// A vCPU that will begin with the guest's program, MMU and caches on.
fn make_vcpu(vm: &VmFd, index: usize, layout: &Layout) -> Result<VcpuFd, MachineError> {
    let mode = layout.mode();
    let fd = create(vm, index).map_err(doing("making a vCPU"))?;
    let setting = "setting a vCPU's registers";
    let mmfr0 = registers::get(&fd, ID_AA64MMFR0_EL1).map_err(doing(setting))?;
    guest_registers::check_granule(mode, mmfr0).map_err(doing("choosing the guest mode"))?;
    let program = layout.virtual_of(layout.program());
    let initial = guest_registers::initial(
        mode,
        layout.tables().base(),
        program,
        layout.virtual_of(layout.mailbox(index)),
    );
    for (register, value) in initial {
        registers::set(&fd, register, value).map_err(doing(setting))?;
    }
    let reset = registers::get(&fd, SCTLR_EL1).map_err(doing(setting))?;
    registers::set(&fd, SCTLR_EL1, guest_registers::sctlr(reset)).map_err(doing(setting))?;
    registers::set_pc(&fd, program + payload::entry()).map_err(doing(setting))?;
    Ok(fd)
}

fn create(vm: &VmFd, index: usize) -> Result<VcpuFd, KvmError> {
    let fd = vm
        .create_vcpu(index as u64)
        .map_err(|error| KvmError::call("KVM_CREATE_VCPU", error))?;
    let mut target = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut target)
        .map_err(|error| KvmError::call("KVM_ARM_PREFERRED_TARGET", error))?;
    fd.vcpu_init(&target)
        .map_err(|error| KvmError::call("KVM_ARM_VCPU_INIT", error))?;
    Ok(fd)
}

fn read_features(fd: &VcpuFd) -> Result<std::collections::BTreeMap<String, u64>, KvmError> {
    Ok(stage2_features(
        registers::get(fd, ISAR0)?,
        registers::get(fd, MMFR2)?,
    ))
}

/// Turns an error into the machine's, telling what was being done.
fn doing<E: Error + Send + Sync + 'static>(what: &'static str) -> impl Fn(E) -> MachineError {
    move |error| MachineError::new(what, error)
}
