// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds a VM whose vCPU threads wait at the kernel's entry point.
//!
//! The order is the same on all architectures: kernel image or [snapshot](super::snapshot) and
//! memory, then the VM and its memslots, vCPUs, interrupt controller, devices, boot data or the state
//! of the snapshot, and vCPU threads.
//! [`crate::arch::guest`] implements the architecture-specific part of each step.

use std::{cell::Cell, fs::File, sync::Arc};

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vmm_sys_util::eventfd::EventFd;

use super::{
    config::{MemoryZone, Stage2Prefault, VmConfig},
    device_manager::{DeviceManager, SharedSerialPort, interrupt_count},
    fault_stalls::PendingStalls,
    generation,
    open_files::OpenFiles,
    outcome::{VmError, failed},
    snapshot::OpenSnapshot,
    stage2_prefault,
    start::{PlacedStart, Start, resume_devices},
    vcpu::{RunControl, RunState, VcpuContext},
    vcpu_threads::VcpuThreads,
};
use crate::{
    arch::{
        guest::{self, InterruptController},
        place_memory,
    },
    devices::{
        BootTimer, Bus, Rtc,
        console_output::ConsoleOutput,
        serial::SerialOutput,
        virtio::{balloon::BalloonHandle, block::Disk, console::Console},
    },
    kvm::{
        self, KvmError, dirty_ring::DirtyRings, memslot::Memslot, read_only_page::ReadOnlyPage,
        stats::Statistics,
    },
    memory::{
        self, BackingPlan, GuestMemory, GuestRam, HostPages, RamOptions, on_demand::OnDemand,
    },
    scoped_thread::ScopedThread,
};

/// Connections of a VM's devices and vCPUs to the rest of the process.
pub struct VmConnections {
    /// Memory of the boot before a reset of the guest, which no other VM uses any more.
    pub earlier_memory: Option<GuestMemory>,
    pub serial_output: SerialOutput,
    /// Console output, which applies backpressure to vCPUs that write to the serial port.
    pub console_output: ConsoleOutput,
    pub console: Option<Console>,
    pub boot_timer: BootTimer,
    /// Event signalled when the guest exits.
    pub guest_exit: EventFd,
    pub confines_vcpus: bool,
    /// The CPUs on which vCPUs run, in their order.
    pub vcpu_cpus: Vec<usize>,
    pub collects_statistics: bool,
}

/// A VM. The fields are declared in drop order: users before the resources that they use.
pub struct Vm {
    /// The thread that populates memory beside the guest.
    _prefault: Option<ScopedThread>,
    pub vcpus: VcpuThreads,
    pub serial: SharedSerialPort,
    pub bus: Arc<Bus>,
    pub balloon: Option<Arc<BalloonHandle>>,
    /// The disks of its devices.
    pub disks: Vec<Disk>,
    /// Dirty rings, if the dirty logging mode uses them.
    pub rings: Option<Arc<DirtyRings>>,
    /// Memslots, in the order of the memory zones.
    pub slots: Vec<Memslot>,
    /// The interrupt controller.
    pub controller: InterruptController,
    pub fd: VmFd,
    /// The page with the VM's generation, if it has one.
    _generation: Option<ReadOnlyPage>,
    pub ipa_bits: u8,
    /// The threads that fill memory on demand.
    pub on_demand: Option<OnDemand>,
    /// Memory, one region for each zone of the configuration.
    pub memory: GuestMemory,
    /// Devices wait for [`Self::resume`] and keep the state of a snapshot.
    pub has_suspended_devices: Cell<bool>,
    /// The guest's counter while it is paused, from which it goes on. Otherwise the guest would take a pause
    /// for a CPU that hangs.
    paused_counter: Cell<Option<u64>>,
    /// The stalls that a pause ends, if they are measured.
    pub pending_stalls: Option<PendingStalls>,
    /// Limits threads of devices by seccomp.
    pub confines_threads: bool,
    pub statistics: Statistics,
}

impl Vm {
    /// Pauses the vCPUs and the guest's counter.
    ///
    /// # Errors
    /// The counter cannot be read: the vCPUs are paused.
    pub fn pause(&self) -> Result<(), VmError> {
        self.vcpus.pause();
        let counter = match self.paused_counter.get() {
            None if !self.vcpus.has_ended() => {
                let first = self.vcpus.lock_first();
                first.as_deref().map(guest::counter).transpose()
            }
            counter => Ok(counter),
        };
        // After the guest's clock, as this may take long.
        if let Some(stalls) = &self.pending_stalls {
            stalls.end();
        }
        self.paused_counter.set(counter?);
        Ok(())
    }

    /// Continues suspended devices, and then the vCPUs.
    ///
    /// # Errors
    /// A device's thread cannot be confined, or the counter cannot be set: the vCPUs stay paused.
    pub fn resume(&self) -> Result<(), VmError> {
        if self.has_suspended_devices.get() {
            resume_devices(&self.bus, self.confines_threads)?;
            self.has_suspended_devices.set(false);
        }
        self.rewind_counter()?;
        self.paused_counter.set(None);
        self.vcpus.request(RunState::Running);
        Ok(())
    }

    /// Sets the guest's counter to its value at the pause, if the VM is paused.
    ///
    /// # Errors
    /// The counter cannot be set.
    pub fn rewind_counter(&self) -> Result<(), VmError> {
        let first = self.paused_counter.get().and_then(|at| Some((self.vcpus.lock_first()?, at)));
        first.map_or(Ok(()), |(vcpu, counter)| Ok(guest::set_counter(&vcpu, counter)?))
    }
}

/// Builds a VM with paused vCPUs. Devices of a snapshot are suspended.
pub fn build(
    config: &VmConfig,
    files: &OpenFiles,
    connections: VmConnections,
) -> Result<Vm, VmError> {
    let start = Start::new(config, files)?;
    let stage2_prefault = config.stage2_prefault.filter(|_| start.allows_prefault());
    let has_helper = stage2_prefault == Some(Stage2Prefault::Background);
    kvm::check_vcpu_count(&files.kvm, config.vcpus.saturating_add(has_helper.into()))?;
    let generation = generation::new_page(&start)?;
    let interrupts = interrupt_count(&config.devices, generation.is_some())?;
    let memory = guest_memory(config, &start, connections.earlier_memory)?;
    let start = start.with_memory(&memory)?;
    let snapshot = start.snapshot();

    let (vm, ipa_bits, rings) = create_vm(config, &files.kvm, &memory, &start)?;
    let slots = (0..)
        .zip(memory.regions())
        .map(|(number, ram)| Memslot::new(&vm, number, Arc::clone(ram)))
        .collect::<Result<Vec<_>, _>>()?;
    let vcpus = guest::create_vcpus(&vm, config.vcpus, has_helper, interrupts)?;
    if let Some(rings) = &rings {
        vcpus.fds.iter().try_for_each(|vcpu| rings.add_vcpu(vcpu))?;
    }

    let mut devices = DeviceManager::new(&vm, Arc::new(memory.clone()), interrupts);
    let (serial, serial_registers) =
        devices.add_serial(config.serial, connections.serial_output)?;
    devices.add_platform_device(Rtc::describe, Rtc::default())?;
    devices.add_platform_device(BootTimer::describe, connections.boot_timer)?;
    let disks = files.disks.iter().map(Disk::try_clone).collect::<Result<_, _>>();
    let disks = disks.map_err(failed("--disk"))?;
    let balloon = devices.add_virtio_devices(&config.devices, files, connections.console)?;
    if let Some(page) = &generation {
        // Behind the others, whose interrupts and memslots do not depend on it.
        devices.add_generation(page, slots.len())?;
    }
    let bus = Arc::new(devices.into_bus());

    let on_demand = start.load(&vm, &memory, &bus, &vcpus)?;
    let prefault = stage2_prefault
        .map(|mode| stage2_prefault::start(mode, &vm, &vcpus, &memory))
        .transpose()?
        .flatten();
    let paused_counter = snapshot.map(|snapshot| restore_counter(snapshot, &vcpus.fds));
    let paused_counter = paused_counter.transpose()?.flatten();

    let mut statistics = Statistics::default();
    if connections.collects_statistics {
        statistics.add_vm(&vm);
        vcpus.fds.iter().for_each(|vcpu| statistics.add_vcpu(vcpu));
    }
    let context = VcpuContext {
        control: RunControl::new(vcpus.fds.len()),
        bus: Arc::clone(&bus),
        rings: rings.clone(),
        serial_registers,
        console_output: connections.console_output,
        exits: Arc::default(),
        guest_exit: connections.guest_exit,
    };
    let controller = vcpus.controller;
    let (cpus, confine) = (connections.vcpu_cpus, connections.confines_vcpus);
    let vcpus = VcpuThreads::start(vcpus.fds, context, &cpus, confine)
        .map_err(failed("the vCPU threads cannot be started"))?;
    Ok(Vm {
        _prefault: prefault,
        vcpus,
        serial,
        bus,
        balloon,
        disks,
        rings,
        slots,
        controller,
        fd: vm,
        _generation: generation,
        ipa_bits,
        on_demand,
        memory,
        has_suspended_devices: Cell::new(snapshot.is_some()),
        paused_counter: Cell::new(paused_counter),
        pending_stalls: None,
        confines_threads: connections.confines_vcpus,
        statistics,
    })
}

/// Allocates guest memory, or makes that of the boot before a reset zero: the guest must not depend on
/// what was there, nor learn secrets of that boot. Such memory stays mapped, so that no other process can
/// take its hugetlb pages, and keeps its node and advice.
fn guest_memory(
    config: &VmConfig,
    start: &Start<'_>,
    earlier: Option<GuestMemory>,
) -> Result<GuestMemory, VmError> {
    let Some(memory) = earlier else {
        return allocate_memory(&zones(config, start), start.mapped_image())
            .map_err(failed("guest memory cannot be allocated"));
    };
    memory.clear().map_err(failed("guest memory cannot be cleared for the reset"))?;
    Ok(memory)
}

/// Returns the memory zones, of a restored VM without nodes that this host lacks.
fn zones(config: &VmConfig, start: &Start<'_>) -> Vec<MemoryZone> {
    let is_restored = matches!(start, Start::Restore(..));
    let zones = config.memory.iter().map(|zone| MemoryZone {
        prefault: zone.prefault && start.allows_prefault(),
        node: zone.node.filter(|node| !is_restored || has_node(*node)),
        ..*zone
    });
    zones.collect()
}

/// Restores the guest's counter, and returns it.
fn restore_counter(snapshot: &OpenSnapshot, vcpus: &[VcpuFd]) -> Result<Option<u64>, VmError> {
    guest::restore_counter(vcpus, &snapshot.state.machine)
        .map_err(failed(snapshot.name.as_str()))?;
    Ok(vcpus.first().map(guest::counter).transpose()?)
}

/// Creates a VM with its capabilities. Returns it, its IPA width and its dirty rings.
fn create_vm(
    config: &VmConfig,
    kvm: &Kvm,
    memory: &GuestMemory,
    start: &PlacedStart<'_>,
) -> Result<(VmFd, u8, Option<Arc<DirtyRings>>), VmError> {
    let snapshot = start.snapshot();
    let ipa_bits = start.ipa_bits().or(config.ipa_bits);
    let create = || {
        let (vm, ipa_bits) = guest::create_vm(kvm, memory.regions(), ipa_bits)?;
        let eager_split = config.eager_split.map(|chunk| guest::enable_eager_split(&vm, chunk));
        match eager_split {
            Some(Err(error)) if snapshot.is_some() => {
                log::warn!("the VM of the snapshot goes on without an option: {error}");
            }
            enabled => enabled.unwrap_or(Ok(()))?,
        }
        kvm::enable_vm_capabilities(&vm, &config.vm_capabilities)?;
        let rings = config.dirty_log.enable_rings(&vm)?;
        Ok((vm, ipa_bits, rings))
    };
    create().map_err(|error: KvmError| match snapshot {
        // Its options cannot be changed.
        Some(snapshot) => failed(format!(
            "{}: this host cannot create a VM with the options of the saved one",
            snapshot.name
        ))(error),
        None => error.into(),
    })
}

/// Reports whether the host has the NUMA node of a zone; a restored VM goes on without it.
fn has_node(node: u32) -> bool {
    let exists = memory::has_node(node);
    if !exists {
        log::warn!(
            "the VM of the snapshot goes on without node={node}: this host has no such node"
        );
    }
    exists
}

/// Places the memory zones in the guest-physical address space and allocates them, or maps them
/// from an image.
pub(super) fn allocate_memory(
    zones: &[MemoryZone],
    image: Option<Arc<File>>,
) -> Result<GuestMemory, VmError> {
    let host = HostPages::of_this_host()?;
    let name = |index: usize, zone: &MemoryZone| {
        format!("--memory {}: {} of {}", index + 1, zone.size, zone.backing)
    };
    let overflow = || {
        let text = "guest memory ends above the 64-bit address space: request less --memory";
        VmError::Refused(text.to_owned())
    };
    let mut plans = Vec::new();
    for (index, zone) in zones.iter().enumerate() {
        let plan = BackingPlan::new(zone.backing, &host).map_err(failed(name(index, zone)))?;
        let size = zone.size.checked_align_up(plan.page_size()).ok_or_else(overflow)?;
        plans.push((plan, size));
    }
    let starts = place_memory(plans.iter().zip(zones).map(|((plan, size), zone)| {
        let align = zone.alignment.map_or(plan.page_size(), |align| align.max(plan.page_size()));
        (*size, align)
    }));
    let starts = starts.ok_or_else(overflow)?;
    let mut rams = Vec::new();
    let mut end_in_image = 0;
    for (index, ((zone, start), (plan, size))) in zones.iter().zip(starts).zip(plans).enumerate() {
        let options = RamOptions {
            prefault: zone.prefault,
            alignment: zone.alignment,
            node: zone.node,
            populates_in_parallel: true,
        };
        let ram = match &image {
            Some(file) => {
                let part = (Arc::clone(file), end_in_image);
                GuestRam::mapped(plan, start, size, options, part)
            }
            None => GuestRam::new(plan, &host, start, size, options),
        };
        end_in_image += size.0;
        rams.push(ram.map_err(failed(name(index, zone)))?);
    }
    Ok(GuestMemory::new(rams)?)
}
