// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds a VM up to vCPU threads that wait at the kernel's entry point.
//!
//! The order is the same on all architectures: everything that can be refused without a VM (kernel
//! image, command line, memory), then the VM and its memslots, vCPUs, interrupt controller, devices,
//! boot data and vCPU threads. [`crate::arch::guest`] has the architecture's part of each step.

use std::{
    fmt,
    io::{self, Read as _},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use granule_types::units::Bytes;
use kvm_ioctls::VmFd;
use thiserror::Error;
use vm_memory::Bytes as _;
use vmm_sys_util::eventfd::EventFd;

use super::{
    config::VmConfig,
    device_manager::{DEVICE_INTERRUPTS, DeviceManager, DeviceManagerError, SharedSerialPort},
    memory_zones::{self, MemoryZoneError, VmMemory},
    open_files::{BootFile, OpenError, OpenFiles},
    vcpu::VcpuContext,
    vcpu_control::{ConsoleBackpressure, RunControl},
    vcpu_threads::{ThreadSetup, VcpuThreads},
};
use crate::{
    arch::{
        description::VmDescription,
        guest::{self, BootLayout, GuestError, Image, InterruptController},
        vm as arch_vm,
    },
    devices::{
        BootTimer, Bus,
        console_output::ConsoleOutput,
        serial::SerialOutput,
        virtio::{balloon::BalloonHandle, console::Console},
    },
    kvm::{
        self, KvmError, dirty::DirtyMode, dirty_ring::DirtyRings, memslot::Memslot,
        stats::Statistics,
    },
};

/// Largest kernel file that is read: above the maximum size of an uncompressed kernel.
const MAX_KERNEL_FILE: u64 = (512 << 20) + 1;

/// Error returned when a VM cannot be built.
#[derive(Debug, Error)]
pub enum BuildError {
    /// A file or device cannot be opened or read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The kernel image is refused.
    #[error("--kernel {path}", path = path.display())]
    Kernel {
        /// The file.
        path: PathBuf,
        /// The error.
        #[source]
        source: GuestError,
    },
    /// Guest memory cannot be allocated.
    #[error("guest memory cannot be allocated")]
    Memory(#[from] MemoryZoneError),
    /// The architecture's part of the VM cannot be set up.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// A KVM call failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A device cannot be created.
    #[error(transparent)]
    Device(#[from] DeviceManagerError),
    /// The initramfs cannot be copied into guest memory.
    #[error("the initramfs cannot be copied into guest memory")]
    Initrd(#[source] vm_memory::GuestMemoryError),
    /// A vCPU thread cannot be started.
    #[error("the vCPU threads cannot be started")]
    Threads(#[source] io::Error),
}

/// Callback for marks that the guest writes to the boot timer.
pub type BootMarkCallback = Box<dyn FnMut(u8, Duration) + Send>;

/// Connections of a VM to the rest of the process.
#[allow(missing_debug_implementations, reason = "it holds closures")]
pub struct VmConnections {
    /// Output of the serial port.
    pub serial_output: SerialOutput,
    /// Destination of the console output, for backpressure on the vCPUs that write to the serial port.
    pub console_output: ConsoleOutput,
    /// The virtio console, if there is one.
    pub console: Option<Console>,
    /// Callback for the boot timer.
    pub on_boot_mark: BootMarkCallback,
    /// Start time of the program.
    pub started: Instant,
    /// Event that is signalled when the guest exits.
    pub guest_exit: EventFd,
    /// Setup of each vCPU thread.
    pub vcpu_setup: ThreadSetup,
    /// Opens KVM's statistics if set.
    pub statistics: bool,
}

/// A VM. The order of its fields is the order in which they are dropped: users before their resources.
pub struct Vm {
    /// vCPU threads.
    pub vcpus: VcpuThreads,
    /// Serial port.
    pub serial: SharedSerialPort,
    /// Handle of the balloon, if there is one.
    pub balloon: Option<BalloonHandle>,
    /// Bus with all devices.
    pub bus: Arc<Bus>,
    /// Dirty rings, in that dirty logging mode.
    pub rings: Option<Arc<DirtyRings>>,
    /// Memslots, in the order of the memory zones.
    pub slots: Vec<Memslot>,
    _controller: InterruptController,
    /// The VM's file descriptor.
    pub fd: Arc<VmFd>,
    /// Width of guest-physical addresses.
    pub ipa_bits: u8,
    /// Guest memory.
    pub memory: VmMemory,
    /// KVM's statistics of the VM.
    pub statistics: Statistics,
}

impl fmt::Debug for Vm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm")
            .field("bus", &self.bus)
            .field("slots", &self.slots)
            .field("ipa_bits", &self.ipa_bits)
            .finish_non_exhaustive()
    }
}

/// Builds a VM; its vCPUs are paused.
///
/// # Errors
/// [`BuildError`].
pub fn build(
    config: &VmConfig,
    files: &OpenFiles,
    connections: VmConnections,
) -> Result<Vm, BuildError> {
    kvm::check_vcpus(&files.kvm, config.vcpus)?;
    let image = read_kernel(&files.kernel)?;
    let command_line = guest::parse_command_line(&config.command_line)?;
    let initrd_size = files.initrd.as_ref().map(initrd_size).transpose()?;
    let memory = memory_zones::allocate(&config.memory)?;
    let first = memory.zones.first().map_or(Bytes(0), |ram| ram.size());
    let layout = guest::boot_layout(&image, initrd_size, first)?;

    let ipa_bits = guest::choose_ipa_bits(&files.kvm, &memory.zones, config.ipa_bits)?;
    let vm = Arc::new(arch_vm::create_vm(&files.kvm, ipa_bits)?);
    let rings = (config.dirty == DirtyMode::Ring)
        .then(|| DirtyRings::enable(&vm).map(Arc::new))
        .transpose()?;
    guest::configure_vm(&vm, config.eager_split)?;
    let slots = (0..)
        .zip(&memory.zones)
        .map(|(number, ram)| Memslot::new(&vm, number, Arc::clone(ram)))
        .collect::<Result<Vec<_>, _>>()?;
    let vcpus = guest::create_vcpus(&vm, config.vcpus)?;
    if let Some(rings) = &rings {
        vcpus.fds.iter().try_for_each(|vcpu| rings.add_vcpu(vcpu))?;
    }
    let controller = guest::create_interrupt_controller(&vm, &vcpus, DEVICE_INTERRUPTS)?;

    let mut devices = DeviceManager::new(&vm, Arc::new(memory.map.clone()));
    let (serial, serial_registers) =
        devices.add_serial(config.serial, connections.serial_output)?;
    devices.add_rtc()?;
    let timer = BootTimer::new(connections.started, connections.on_boot_mark);
    devices.add_boot_timer(timer)?;
    let balloon = devices.add_virtio_devices(&config.devices, files, connections.console)?;
    let bus = Arc::new(devices.finish());

    load_images(&memory, &image, files.initrd.as_ref(), &layout)?;
    let ranges = memory.zones.iter().map(|ram| (ram.start(), ram.size()));
    let description = VmDescription {
        memory: ranges.collect(),
        devices: bus.infos().cloned().collect(),
        command_line,
    };
    guest::write_boot_data(memory.map.map(), &description, &vcpus, &controller, &layout)?;

    let mut statistics = Statistics::none();
    if connections.statistics {
        statistics.add_vm(&vm);
        vcpus.fds.iter().for_each(|vcpu| statistics.add_vcpu(vcpu));
    }
    let context = VcpuContext {
        control: RunControl::new(vcpus.fds.len()),
        bus: Arc::clone(&bus),
        rings: rings.clone(),
        backpressure: Some(ConsoleBackpressure {
            registers: serial_registers,
            output: connections.console_output,
        }),
        exits: Arc::default(),
        guest_exit: connections.guest_exit,
    };
    let vcpus = VcpuThreads::start(vcpus.fds, context, &connections.vcpu_setup)
        .map_err(BuildError::Threads)?;
    Ok(Vm {
        vcpus,
        serial,
        balloon,
        bus,
        rings,
        slots,
        _controller: controller,
        fd: vm,
        ipa_bits,
        memory,
        statistics,
    })
}

fn read_kernel(kernel: &BootFile) -> Result<Image, BuildError> {
    let bytes = kernel.read(|file| {
        let mut bytes = Vec::new();
        file.take(MAX_KERNEL_FILE).read_to_end(&mut bytes)?;
        Ok(bytes)
    })?;
    guest::parse_image(bytes)
        .map_err(|source| BuildError::Kernel { path: kernel.path().to_owned(), source })
}

fn initrd_size(initrd: &BootFile) -> Result<Bytes, OpenError> {
    initrd.read(|file| Ok(Bytes(file.metadata()?.len())))
}

/// Copies kernel and initramfs into guest memory.
fn load_images(
    memory: &VmMemory,
    image: &Image,
    initrd: Option<&BootFile>,
    layout: &BootLayout,
) -> Result<(), BuildError> {
    let map = memory.map.map();
    guest::load_kernel(map, image, layout)?;
    if let (Some(initrd), Some(range)) = (initrd, &layout.initrd) {
        let length = usize::try_from(range.end.0 - range.start.0).unwrap_or(usize::MAX);
        initrd
            .read(|mut file| Ok(map.read_exact_volatile_from(range.start, &mut file, length)))?
            .map_err(BuildError::Initrd)?;
    }
    Ok(())
}
