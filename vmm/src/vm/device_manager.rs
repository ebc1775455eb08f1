// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Creates the devices of a VM. Each device has a register range on the bus and, if it raises
//! interrupts, an interrupt with an irqfd. Queue notifications of virtio devices are ioeventfds.

use std::{iter::StepBy, ops::Range, sync::Arc};

use granule_types::units::GuestAddress;
use kvm_ioctls::{IoEventAddress, VmFd};
use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::{
    config::{SerialModel, VirtioConfig},
    open_files::OpenFiles,
    outcome::{VmError, failed},
};
use crate::{
    arch::{PLATFORM_DEVICE_STEP, PLATFORM_DEVICES, VIRTIO_DEVICES},
    devices::{
        Bus, MmioDevice, MmioDeviceInfo, Pl011, REGISTER_RANGE_SIZE, Serial, VmGeneration,
        serial::{SerialOutput, SerialPort},
        virtio::{
            Transport, VirtioDevice,
            balloon::{Balloon, BalloonHandle},
            block::Block,
            console::Console,
            net::{Net, mac_from_tap_name},
            rng::Rng,
            vsock::Vsock,
        },
    },
    kvm::{KvmError, read_only_page::ReadOnlyPage},
    memory::GuestMemory,
};

/// Maximum number of interrupts for devices.
const MAX_INTERRUPTS: u32 = 257;

const EVENTFD_ERROR: &str = "a device's eventfd cannot be created";

/// A serial port that vCPU threads and the console input thread share.
pub type SharedSerialPort = Arc<Mutex<dyn SerialPort>>;

/// Returns the number of interrupts that the devices of a VM need: one for each virtio device, the
/// serial port's, and that of the VM's generation if there is one. KVM allocates memory for each.
///
/// # Errors
/// The VM has too many devices.
pub fn interrupt_count(config: &VirtioConfig, has_generation: bool) -> Result<u32, VmError> {
    let count = 1 + usize::from(has_generation) + config.device_count();
    let count = u32::try_from(count).ok();
    count.filter(|count| *count <= MAX_INTERRUPTS).ok_or_else(too_many_devices)
}

/// Adds devices to a VM and its bus.
#[derive(Debug)]
pub struct DeviceManager<'a> {
    vm: &'a VmFd,
    memory: Arc<GuestMemory>,
    bus: Bus,
    platform_addresses: StepBy<Range<u64>>,
    virtio_addresses: StepBy<Range<u64>>,
    interrupts: Range<u32>,
}

impl<'a> DeviceManager<'a> {
    /// Returns a manager without devices. The interrupt controller of `vm` must exist, and have
    /// `interrupts` for devices.
    #[must_use]
    pub fn new(vm: &'a VmFd, memory: Arc<GuestMemory>, interrupts: u32) -> Self {
        Self {
            vm,
            memory,
            bus: Bus::default(),
            platform_addresses: addresses(PLATFORM_DEVICES, PLATFORM_DEVICE_STEP),
            virtio_addresses: addresses(VIRTIO_DEVICES, REGISTER_RANGE_SIZE),
            interrupts: 0..interrupts,
        }
    }

    /// Adds the serial port. Returns it and its register range.
    pub fn add_serial(
        &mut self,
        model: SerialModel,
        output: SerialOutput,
    ) -> Result<(SharedSerialPort, Range<GuestAddress>), VmError> {
        let start = next_address(&mut self.platform_addresses)?;
        let (number, irq) = self.allocate_interrupt()?;
        let port: SharedSerialPort = match model {
            SerialModel::Ns16550a => {
                let serial =
                    Arc::new(Mutex::new(Serial::new(irq, output).map_err(failed(EVENTFD_ERROR))?));
                self.bus.add(Serial::describe(start, number), Arc::clone(&serial) as _)?;
                serial
            }
            SerialModel::Pl011 => {
                let serial =
                    Arc::new(Mutex::new(Pl011::new(irq, output).map_err(failed(EVENTFD_ERROR))?));
                self.bus.add(Pl011::describe(start, number), Arc::clone(&serial) as _)?;
                serial
            }
        };
        Ok((port, start..GuestAddress(start.0 + REGISTER_RANGE_SIZE)))
    }

    /// Adds a platform device without an interrupt; `describe` takes its address.
    pub fn add_platform_device(
        &mut self,
        describe: impl FnOnce(GuestAddress) -> MmioDeviceInfo,
        device: impl MmioDevice + 'static,
    ) -> Result<(), VmError> {
        let info = describe(next_address(&mut self.platform_addresses)?);
        Ok(self.bus.add(info, Arc::new(Mutex::new(device)))?)
    }

    /// Adds the device of the VM's generation, whose page becomes this memslot.
    pub fn add_generation(&mut self, page: &ReadOnlyPage, memslot: usize) -> Result<(), VmError> {
        let start = next_address(&mut self.platform_addresses)?;
        let (number, irq) = self.allocate_interrupt()?;
        page.map(self.vm, u32::try_from(memslot).unwrap_or(u32::MAX), start)?;
        let device = VmGeneration::new(irq);
        Ok(self.bus.add(VmGeneration::describe(start, number), Arc::new(Mutex::new(device)))?)
    }

    /// Adds the virtio devices. Returns the handle of the balloon, if there is one.
    pub fn add_virtio_devices(
        &mut self,
        config: &VirtioConfig,
        files: &OpenFiles,
        console: Option<Console>,
    ) -> Result<Option<Arc<BalloonHandle>>, VmError> {
        for (index, disk) in files.disks.iter().enumerate() {
            let name = format!("disk{index}");
            let device = Block::new(disk.try_clone().map_err(failed("--disk"))?, &name);
            self.add_virtio(&name, Box::new(device))?;
        }
        for (index, (net, tap)) in config.nets.iter().zip(&files.taps).enumerate() {
            let mac = net.mac.unwrap_or_else(|| mac_from_tap_name(&net.tap));
            let device = Net::new(tap.clone(), mac);
            self.add_virtio(&format!("net{index}"), Box::new(device))?;
        }
        self.add_virtio("entropy", Box::new(Rng))?;
        if let Some(console) = console {
            self.add_virtio("console", Box::new(console))?;
        }
        if let Some(backend) = &files.vsock {
            let device = Vsock::new(backend.clone()).map_err(failed("--vsock"))?;
            self.add_virtio("vsock", Box::new(device))?;
        }
        if !config.has_balloon {
            return Ok(None);
        }
        let balloon = Balloon::default();
        let handle = balloon.handle();
        self.add_virtio("balloon", Box::new(balloon))?;
        Ok(Some(handle))
    }

    #[must_use]
    pub fn into_bus(self) -> Bus {
        self.bus
    }

    fn add_virtio(&mut self, name: &str, device: Box<dyn VirtioDevice>) -> Result<(), VmError> {
        let start = next_address(&mut self.virtio_addresses)?;
        let (number, irq) = self.allocate_interrupt()?;
        let transport = Transport::new(name, device, Arc::clone(&self.memory), irq)
            .map_err(failed(EVENTFD_ERROR))?;
        let address = IoEventAddress::Mmio(start.0 + Transport::QUEUE_NOTIFY);
        for (index, event) in (0_u32..).zip(transport.queue_events()) {
            self.vm
                .register_ioevent(event.as_ref(), &address, index)
                .map_err(|error| KvmError::call("KVM_IOEVENTFD", error))?;
        }
        let info = transport.describe(start, number);
        Ok(self.bus.add(info, Arc::new(Mutex::new(transport)))?)
    }

    /// Returns the next interrupt and the irqfd that raises it.
    fn allocate_interrupt(&mut self) -> Result<(u32, EventFd), VmError> {
        let number = self.interrupts.next().ok_or_else(too_many_devices)?;
        let event = EventFd::new(libc::EFD_NONBLOCK).map_err(failed(EVENTFD_ERROR))?;
        self.vm
            .register_irqfd(&event, number)
            .map_err(|error| KvmError::call("KVM_IRQFD", error))?;
        Ok((number, event))
    }
}

fn addresses(range: Range<GuestAddress>, step: u64) -> StepBy<Range<u64>> {
    (range.start.0..range.end.0).step_by(usize::try_from(step).unwrap_or(usize::MAX))
}

fn next_address(addresses: &mut StepBy<Range<u64>>) -> Result<GuestAddress, VmError> {
    addresses.next().map(GuestAddress).ok_or_else(too_many_devices)
}

/// Returns the error for a device without a free address or interrupt.
fn too_many_devices() -> VmError {
    VmError::Refused("too many devices: use fewer --disk and --net options".to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::vm::config::{DiskConfig, VsockConfig};

    #[test]
    fn each_device_has_an_interrupt_and_too_many_devices_are_refused() {
        let disk = DiskConfig { path: PathBuf::new(), is_read_only: true };
        let with_disks = |count| VirtioConfig {
            disks: vec![disk.clone(); count],
            vsock: Some(VsockConfig { cid: 3 }),
            has_balloon: true,
            has_console: true,
            ..VirtioConfig::default()
        };

        // The serial port and the entropy device are always present.
        assert_eq!(interrupt_count(&VirtioConfig::default(), false).unwrap(), 2);
        assert_eq!(interrupt_count(&with_disks(2), true).unwrap(), 8);
        assert_eq!(interrupt_count(&with_disks(251), true).unwrap(), 257);
        let error = interrupt_count(&with_disks(252), true).unwrap_err().to_string();
        assert!(error.contains("use fewer --disk"), "{error}");
    }
}
