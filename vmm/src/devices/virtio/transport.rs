// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Virtio over MMIO: the registers of a device (virtio 1.2, section 4.2.2).
//!
//! Initialization has a fixed order (section 3.1.1), and a register accepts a write only in its
//! step: features between `DRIVER` and `FEATURES_OK`, queues between `FEATURES_OK` and `DRIVER_OK`.
//! Other writes are refused. `DRIVER_OK` moves the device into its worker thread. Writing 0 to the
//! status register moves the device back and clears all state.

use std::{mem, sync::Arc};

use granule_types::units::GuestAddress;
use virtio_bindings::{
    virtio_config::{
        VIRTIO_CONFIG_S_ACKNOWLEDGE as ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER as DRIVER,
        VIRTIO_CONFIG_S_DRIVER_OK as DRIVER_OK, VIRTIO_CONFIG_S_FAILED as FAILED,
        VIRTIO_CONFIG_S_FEATURES_OK as FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET as NEEDS_RESET,
        VIRTIO_F_VERSION_1,
    },
    virtio_mmio as reg,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use vmm_sys_util::eventfd::EventFd;

use super::{
    ConfigSpace, DeviceError, Interrupt, QueueConfig, Queues, RateLimitedLog, VirtioDevice,
    feature_bit,
    worker::{Worker, WorkerContext},
};
use crate::{
    devices::{MmioDevice, MmioDeviceInfo},
    memory::GuestMemory,
};

/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
/// Version of the transport: 2 since virtio 1.0.
const VERSION: u32 = 2;
/// Vendor identifier; drivers ignore it.
const VENDOR: u32 = 0x4e52_4752;
const CONFIG: u64 = reg::VIRTIO_MMIO_CONFIG as u64;

/// Features that every device offers.
pub(super) const COMMON_FEATURES: u64 = feature_bit(VIRTIO_F_VERSION_1)
    | feature_bit(VIRTIO_RING_F_EVENT_IDX)
    | feature_bit(VIRTIO_RING_F_INDIRECT_DESC);

/// Write by which the driver notifies a queue, and the event that stands for it: the arguments of
/// an ioeventfd. Without an ioeventfd, the write reaches [`Transport`], which signals the event.
#[derive(Debug, Clone)]
pub struct QueueNotifier {
    /// Offset of the register from the first address of the device; the driver writes a word.
    pub offset: u64,
    /// The value written: the index of the queue.
    pub value: u32,
    /// The event.
    pub event: Arc<EventFd>,
}

/// Registers of a device, and the device while it has no worker.
#[derive(Debug)]
pub struct Transport {
    name: String,
    device_type: u32,
    offered_features: u64,
    config: ConfigSpace,
    interrupt: Arc<Interrupt>,
    memory: Arc<GuestMemory>,
    queue_events: Vec<Arc<EventFd>>,
    queues: Vec<QueueConfig>,
    device: DeviceState,
    registers: Registers,
}

/// Registers that a reset clears.
#[derive(Debug, Default)]
struct Registers {
    status: u32,
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
}

#[derive(Debug)]
enum DeviceState {
    /// Owned by the transport.
    Inactive(WorkerContext),
    /// Owned by its worker thread.
    Active(Worker),
    /// Lost with a worker thread that panicked.
    Lost,
}

impl Transport {
    /// Creates the registers of `device`, whose requests lie in `memory` and which interrupts
    /// through `irq`. Its thread and its warnings carry `name`.
    ///
    /// # Errors
    /// The host is out of file descriptors.
    pub fn new(
        name: &str,
        device: Box<dyn VirtioDevice>,
        memory: Arc<GuestMemory>,
        irq: EventFd,
    ) -> std::io::Result<Self> {
        let interrupt = Arc::new(Interrupt::new(irq));
        let config = device.config().clone();
        config.set_interrupt(Arc::clone(&interrupt));
        let sizes = device.queue_sizes();
        let queue_events = sizes
            .iter()
            .map(|_| EventFd::new(libc::EFD_NONBLOCK).map(Arc::new))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            name: name.to_owned(),
            device_type: device.device_type(),
            offered_features: device.features() | COMMON_FEATURES,
            config,
            interrupt,
            memory,
            queue_events,
            queues: sizes.iter().map(|size| QueueConfig::new(*size)).collect(),
            device: DeviceState::Inactive(WorkerContext {
                name: name.to_owned(),
                device,
                log: RateLimitedLog::default(),
            }),
            registers: Registers::default(),
        })
    }

    /// Describes the device for the device tree.
    #[must_use]
    pub fn describe(&self, start: GuestAddress, irq: u32) -> MmioDeviceInfo {
        MmioDeviceInfo::new(&self.name, start, Some(irq), &["virtio,mmio"])
    }

    /// Returns the queue notifications, to register as ioeventfds.
    pub fn notifiers(&self) -> impl Iterator<Item = QueueNotifier> {
        (0..)
            .zip(&self.queue_events)
            .map(|(value, event)| QueueNotifier {
                offset: u64::from(reg::VIRTIO_MMIO_QUEUE_NOTIFY),
                value,
                event: Arc::clone(event),
            })
    }

    fn load(&self, offset: u32) -> Option<u32> {
        let queue = self.queues.get(self.registers.queue_sel as usize);
        Some(match offset {
            reg::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            reg::VIRTIO_MMIO_VERSION => VERSION,
            reg::VIRTIO_MMIO_DEVICE_ID => self.device_type,
            reg::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            reg::VIRTIO_MMIO_DEVICE_FEATURES => {
                half(self.offered_features, self.registers.device_features_sel)
            }
            reg::VIRTIO_MMIO_QUEUE_NUM_MAX => queue.map_or(0, |queue| queue.max_size.into()),
            reg::VIRTIO_MMIO_QUEUE_READY => queue.is_some_and(|queue| queue.ready).into(),
            reg::VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt.status(),
            reg::VIRTIO_MMIO_STATUS if self.interrupt.needs_reset() => {
                self.registers.status | NEEDS_RESET
            }
            reg::VIRTIO_MMIO_STATUS => self.registers.status,
            // A length of all ones: there is no shared memory region (section 4.2.2.2).
            reg::VIRTIO_MMIO_SHM_LEN_LOW..=reg::VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            reg::VIRTIO_MMIO_CONFIG_GENERATION => self.config.generation(),
            _ => return None,
        })
    }

    /// Returns whether the register accepts the value at this time.
    fn store(&mut self, offset: u32, value: u32) -> bool {
        let registers = &mut self.registers;
        let negotiating = registers.status & (DRIVER | FEATURES_OK | FAILED) == DRIVER;
        match offset {
            reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL => registers.device_features_sel = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL => registers.driver_features_sel = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES if negotiating => {
                let select = registers.driver_features_sel;
                set_half(&mut registers.driver_features, select, value);
            }
            reg::VIRTIO_MMIO_QUEUE_SEL => registers.queue_sel = value,
            reg::VIRTIO_MMIO_QUEUE_NOTIFY => match self.queue_events.get(value as usize) {
                Some(event) => {
                    // A full counter means that the notification is pending.
                    let _ = event.write(1);
                }
                None => return false,
            },
            reg::VIRTIO_MMIO_INTERRUPT_ACK => self.interrupt.acknowledge(value),
            reg::VIRTIO_MMIO_STATUS => return self.set_status(value),
            reg::VIRTIO_MMIO_SHM_SEL => {}
            _ => return self.configure_queue(offset, value),
        }
        true
    }

    fn configure_queue(&mut self, offset: u32, value: u32) -> bool {
        let registers = &self.registers;
        let configuring = registers.status & (FEATURES_OK | DRIVER_OK | FAILED) == FEATURES_OK;
        let Some(queue) = self.queues.get_mut(registers.queue_sel as usize) else {
            return false;
        };
        if !configuring || (queue.ready && offset != reg::VIRTIO_MMIO_QUEUE_READY) {
            return false;
        }
        match offset {
            reg::VIRTIO_MMIO_QUEUE_NUM => queue.size = value,
            reg::VIRTIO_MMIO_QUEUE_READY => queue.ready = value == 1,
            reg::VIRTIO_MMIO_QUEUE_DESC_LOW => set_half(&mut queue.desc_table.0, 0, value),
            reg::VIRTIO_MMIO_QUEUE_DESC_HIGH => set_half(&mut queue.desc_table.0, 1, value),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_half(&mut queue.avail_ring.0, 0, value),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_half(&mut queue.avail_ring.0, 1, value),
            reg::VIRTIO_MMIO_QUEUE_USED_LOW => set_half(&mut queue.used_ring.0, 0, value),
            reg::VIRTIO_MMIO_QUEUE_USED_HIGH => set_half(&mut queue.used_ring.0, 1, value),
            _ => return false,
        }
        true
    }

    fn set_status(&mut self, value: u32) -> bool {
        if value == 0 {
            self.reset();
            return true;
        }
        // The driver sets bits in order and clears none (section 2.1.1).
        let (value, status) = (value & !NEEDS_RESET, self.registers.status);
        let new = value & !status;
        let required = match new {
            _ if new & DRIVER_OK != 0 => ACKNOWLEDGE | DRIVER | FEATURES_OK,
            _ if new & FEATURES_OK != 0 => ACKNOWLEDGE | DRIVER,
            _ if new & DRIVER != 0 => ACKNOWLEDGE,
            _ => 0,
        };
        let known = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | FAILED;
        if value & status != status || value & required != required || value & !known != 0 {
            return false;
        }
        let features = self.registers.driver_features;
        let acceptable = features & !self.offered_features == 0
            && features & feature_bit(VIRTIO_F_VERSION_1) != 0;
        if new & FEATURES_OK != 0 && !acceptable {
            // A clear FEATURES_OK bit rejects the features (section 3.1.1).
            self.registers.status |= value & !FEATURES_OK & !DRIVER_OK;
            return true;
        }
        self.registers.status = value;
        if new & DRIVER_OK != 0 {
            self.activate();
        }
        true
    }

    /// Activates the device and moves it into its worker.
    fn activate(&mut self) {
        let queues = self.build_queues();
        let DeviceState::Inactive(mut context) = mem::replace(&mut self.device, DeviceState::Lost)
        else {
            return self.interrupt.set_needs_reset();
        };
        let name = &self.name;
        let features = self.registers.driver_features;
        let activated = queues.and_then(|mut queues| {
            context.device.activate(features, &mut queues)?;
            Ok(queues)
        });
        match activated {
            Ok(queues) => match Worker::start(context, queues, Arc::clone(&self.interrupt)) {
                Ok(worker) => self.device = DeviceState::Active(worker),
                Err(error) => {
                    log::error!("{name} is lost: its worker thread cannot be started: {error}");
                    self.interrupt.set_needs_reset();
                }
            },
            Err(error) => {
                context
                    .log
                    .warn(format_args!("{name} cannot be activated: {error}"));
                self.device = DeviceState::Inactive(context);
                self.interrupt.set_needs_reset();
            }
        }
    }

    fn build_queues(&self) -> Result<Queues, DeviceError> {
        let event_idx = self.registers.driver_features & feature_bit(VIRTIO_RING_F_EVENT_IDX) != 0;
        let queues = self.queues.iter().zip(&self.queue_events);
        let queues = queues.map(|(config, event)| {
            let build = || config.build(event_idx, &self.memory, event, &self.interrupt);
            config.ready.then(build).transpose()
        });
        Ok(Queues::new(queues.collect::<Result<_, _>>()?))
    }

    fn reset(&mut self) {
        self.device = match mem::replace(&mut self.device, DeviceState::Lost) {
            DeviceState::Active(worker) => worker.stop().map_or_else(
                || {
                    log::error!("{} is lost: its worker thread panicked", self.name);
                    DeviceState::Lost
                },
                DeviceState::Inactive,
            ),
            other => other,
        };
        for queue in &mut self.queues {
            *queue = QueueConfig::new(queue.max_size);
        }
        for event in &self.queue_events {
            // Fails if no notification is pending.
            let _ = event.read();
        }
        self.interrupt.clear();
        self.registers = Registers::default();
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        self.reset();
    }
}

impl MmioDevice for Transport {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> bool {
        if let Some(offset) = offset.checked_sub(CONFIG) {
            return self.config.read(offset, data);
        }
        let Ok(word) = <&mut [u8; 4]>::try_from(data) else {
            return false;
        };
        let value = u32::try_from(offset).ok().and_then(|at| self.load(at));
        *word = value.unwrap_or(0).to_le_bytes();
        value.is_some()
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        if let Some(offset) = offset.checked_sub(CONFIG) {
            return self.config.write_by_driver(offset, data);
        }
        match (u32::try_from(offset), <[u8; 4]>::try_from(data)) {
            (Ok(offset), Ok(word)) => self.store(offset, u32::from_le_bytes(word)),
            _ => false,
        }
    }
}

/// Returns the low (0) or high (1) half of `value`, and 0 for any other `select`.
fn half(value: u64, select: u32) -> u32 {
    let bytes = value.to_le_bytes();
    let half = match select {
        0 => bytes.first_chunk(),
        1 => bytes.last_chunk(),
        _ => None,
    };
    half.map_or(0, |half| u32::from_le_bytes(*half))
}

/// Sets the low (0) or high (1) half of `value`. Other values of `select` address feature bits that
/// no device offers.
fn set_half(value: &mut u64, select: u32, half: u32) {
    match select {
        0 => *value = *value >> 32 << 32 | u64::from(half),
        1 => *value = u64::from(half) << 32 | *value << 32 >> 32,
        _ => {}
    }
}

#[cfg(test)]
mod tests;
