// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Linux guests on arm64: the arm64-specific steps of the VM builder.

use std::{fs::File, io::Cursor, sync::Arc};

use granule_types::units::GuestAddress;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use linux_loader::loader::{KernelLoader as _, load_dtb, pe::PE};
use vm_memory::{Bytes as _, GuestMemoryMmap, bitmap::Bitmap};

use super::{
    boot::{self, fdt::Fdt},
    gic, save, save_gic,
    state::MachineState,
    vcpu, vm,
};
pub use super::{
    boot::{BootError, BootLayout, image::Image, parse_command_line},
    gic::InterruptController,
    save::{counter, set_counter},
    vm::enable_eager_split,
};
use crate::{
    arch::VmDescription,
    kvm::KvmError,
    memory::{GuestMap, GuestRam, MappedReader},
    random::random_bytes,
};

/// vCPUs of a guest and their interrupt controller.
#[derive(Debug)]
pub struct GuestVcpus {
    /// The vCPUs, the boot vCPU first.
    pub fds: Vec<VcpuFd>,
    /// A vCPU that never runs, and that the guest does not see, so that ioctls on it do not wait.
    pub helper: Option<VcpuFd>,
    /// Interrupt controller.
    pub controller: InterruptController,
    has_pmu: bool,
}

/// Returns an error if the architecture does not support Linux guests.
pub const fn check_supported() -> Result<(), KvmError> {
    Ok(())
}

/// Creates a VM with `KVM_EXIT_ARM_NISV` exits. Returns the VM and its IPA width: `requested`, or the
/// smallest width that covers `memory` and allows blocks of its page sizes, up to the host's limit.
pub fn create_vm(
    kvm: &Kvm,
    memory: &[Arc<GuestRam>],
    requested: Option<u8>,
) -> Result<(VmFd, u8), KvmError> {
    let limit = vm::max_ipa_width(kvm.get_host_ipa_limit());
    let end = memory.last().map_or(0, |ram| ram.start().0 + ram.size().0);
    let mut ipa_width = vm::memory_ipa_width(GuestAddress(end), requested, limit)?;
    if requested.is_none() {
        let for_blocks = memory
            .iter()
            .map(|ram| {
                vm::min_ipa_width_for_block(ram.plan().page_size(), ram.plan().base_page_size())
            })
            .max();
        ipa_width = ipa_width.max(for_blocks.unwrap_or(0).min(limit));
    }
    let fd = vm::create_vm(kvm, ipa_width)?;
    vcpu::enable_nisv_exits(&fd);
    Ok((fd, ipa_width))
}

/// Creates vCPUs with all features of the host, a helper if requested, and an interrupt controller
/// with `interrupts` SPIs.
pub fn create_vcpus(
    vm: &VmFd,
    count: u32,
    has_helper: bool,
    interrupts: u32,
) -> Result<GuestVcpus, KvmError> {
    let features = vcpu::host_features(vm);
    let fds: Vec<_> =
        (0..count).map(|index| vcpu::create_vcpu(vm, index, features)).collect::<Result<_, _>>()?;
    // Initialised, so that its MPIDR is not that of another vCPU.
    let helper = has_helper.then(|| vcpu::create_vcpu(vm, count, features)).transpose()?;
    let controller = gic::create_gic(vm, count.into(), has_helper, interrupts)?;
    let pmu = features & vcpu::PMU_FEATURE != 0;
    if pmu {
        // The PMU needs the interrupt controller.
        fds.iter().try_for_each(vcpu::init_pmu)?;
    }
    Ok(GuestVcpus { fds, helper, controller, has_pmu: pmu })
}

fn load_kernel(
    memory: &GuestMemoryMmap<impl Bitmap + 'static>,
    (image, file): (&Image, &File),
    layout: &BootLayout,
) -> Result<(), BootError> {
    if let Some(payload) = &image.payload {
        return payload.write(file, image.size, |offset, bytes| {
            let address = GuestAddress(layout.kernel.0 + offset);
            memory.write_slice(bytes, address).map_err(BootError::Write)
        });
    }
    let base = GuestAddress(layout.kernel.0 - image.text_offset.0);
    let loaded = PE::load(memory, Some(base), &mut MappedReader::new(file), None);
    loaded.map(drop).map_err(|source| BootError::Load { object: "the kernel", source })
}

/// Loads the kernel of an image and its file, writes the device tree, and sets the registers of the boot
/// vCPU.
pub fn write_boot_data(
    memory: &GuestMap,
    kernel: (&Image, &File),
    vm: &VmDescription,
    vcpus: &GuestVcpus,
    layout: &BootLayout,
) -> Result<(), BootError> {
    load_kernel(memory, kernel, layout)?;
    let affinities = affinities(&vcpus.fds)?;
    let command_line = vm.command_line.as_cstring().map_err(boot::command_line_error)?;
    let command_line = command_line.to_string_lossy();
    let seed = random_bytes::<SEED_SIZE>();
    let fdt = Fdt {
        memory: &vm.memory,
        affinities: &affinities,
        has_pmu: vcpus.has_pmu,
        gic: vcpus.controller.description,
        devices: &vm.devices,
        command_line: &command_line,
        initrd: layout.initrd.clone(),
        seed: seed.as_ref().map(<[u8; SEED_SIZE]>::as_slice),
    };
    load_dtb(memory, layout.fdt, &mut Cursor::new(fdt.write()?))
        .map_err(|source| BootError::Load { object: "the device tree", source })?;
    if let Some(boot) = vcpus.fds.first() {
        vcpu::set_entry_point(boot, layout.kernel, layout.fdt)?;
    }
    Ok(())
}

/// Returns the state of the paused vCPUs and the interrupt controller of a VM, the boot vCPU first.
/// No ioctl on a vCPU may be in progress, also not on a helper, and all device accesses must be
/// complete ([`save::save_vcpu`]).
///
/// KVM writes tables of the interrupt controller to guest memory: save the memory afterwards, and
/// all of it if the VM has dirty rings ([`save_gic::save_gic`]).
///
/// # Errors
/// The host has a GICv2, or KVM refuses an access.
pub fn save_machine(
    vcpus: &[&VcpuFd],
    controller: &InterruptController,
) -> Result<MachineState, KvmError> {
    let affinities = affinities(vcpus.iter().copied())?;
    // The GIC first, because it refuses hosts with a GICv2.
    let gic = save_gic::save_gic(controller, &affinities)?;
    let vcpus = vcpus.iter().map(|vcpu| save::save_vcpu(vcpu)).collect::<Result<_, _>>()?;
    Ok(MachineState { vcpus, gic })
}

/// Restores the registers of vCPUs that have not run, the boot vCPU first, but for their counter, and
/// their interfaces of the interrupt controller. No ioctl on a vCPU may be in progress, also not on a
/// helper.
///
/// # Errors
/// The VM has another number of vCPUs or interrupts, or this host has other registers, another
/// interrupt controller or does not accept their values.
pub fn restore_vcpus(
    vcpus: &[VcpuFd],
    controller: &InterruptController,
    state: &MachineState,
) -> Result<(), KvmError> {
    let (saved, created) = (state.vcpus.len(), vcpus.len());
    if saved != created {
        return Err(KvmError::Unsupported(format!(
            "the snapshot cannot be restored: it has {saved} vCPUs, and this VM has {created}; \
             request --vcpus {saved}"
        )));
    }
    vcpus.iter().zip(&state.vcpus).try_for_each(|(vcpu, state)| save::restore_vcpu(vcpu, state))?;
    save_gic::restore_interfaces(controller, &affinities(vcpus)?, &state.gic)
}

/// Restores the interrupts of restored vCPUs. Guest memory must be restored before. No ioctl on a vCPU
/// may be in progress, also not on a helper.
///
/// # Errors
/// This host does not accept a value.
pub fn restore_interrupts(
    vcpus: &[VcpuFd],
    controller: &InterruptController,
    state: &MachineState,
) -> Result<(), KvmError> {
    save_gic::restore_interrupts(controller, &affinities(vcpus)?, &state.gic)
}

/// Restores the counter of restored vCPUs, from which their time goes on.
///
/// # Errors
/// This host does not accept the value.
pub fn restore_counter(vcpus: &[VcpuFd], state: &MachineState) -> Result<(), KvmError> {
    let mut first = vcpus.iter().zip(&state.vcpus).take(1);
    first.try_for_each(|(vcpu, state)| save::restore_counter(vcpu, state))
}

fn affinities<'a>(vcpus: impl IntoIterator<Item = &'a VcpuFd>) -> Result<Vec<u64>, KvmError> {
    vcpus.into_iter().map(vcpu::mpidr_affinity).collect()
}

/// Size of the guest's seed: 8 bytes for KASLR, the rest for its random number generator.
const SEED_SIZE: usize = 8 + 64;

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::{Compression, write::GzEncoder};
    use granule_types::units::Bytes;

    use super::*;

    #[test]
    fn load_kernel_copies_the_image_to_its_load_address() {
        let start = GuestAddress(0x4000_0000);
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(start, 4 << 20)]).unwrap();
        let mut file = vec![0; 4096];
        file[8..16].copy_from_slice(&0x1000_u64.to_le_bytes());
        file[16..24].copy_from_slice(&4096_u64.to_le_bytes());
        file[56..60].copy_from_slice(b"ARM\x64");
        let mut compressed = GzEncoder::new(Vec::new(), Compression::fast());
        compressed.write_all(&file).unwrap();

        for bytes in [file.clone(), compressed.finish().unwrap()] {
            let mut stored = tempfile::tempfile().unwrap();
            stored.write_all(&bytes).unwrap();
            let image = Image::from_file(&stored).unwrap();
            let layout = BootLayout::new(&image, None, Bytes::mib(4)).unwrap();
            memory.write_slice(&[0; 4096], layout.kernel).unwrap();

            load_kernel(&memory, (&image, &stored), &layout).unwrap();

            assert_eq!(layout.kernel, GuestAddress(0x4000_1000));
            let mut copied = vec![0; 4096];
            memory.read_slice(&mut copied, layout.kernel).unwrap();
            assert_eq!(copied, file);
        }
    }
}
