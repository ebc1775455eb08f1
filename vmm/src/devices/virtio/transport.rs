// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The registers of a virtio device (virtio 1.2, section 4.2.2).
//!
//! The driver goes through a fixed order (section 3.1.1), and a register takes a write only at its
//! time: features between `DRIVER` and `FEATURES_OK`, queues between `FEATURES_OK` and
//! `DRIVER_OK`. Writes at another time are refused and counted. With `DRIVER_OK` the device goes
//! into its thread; writing 0 to the status gets it back and forgets everything.

use std::sync::Arc;

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
    ConfigSpace, Interrupt, QueueConfig, Queues, RateLimitedLog, VirtioDevice, bit,
    worker::{Worker, WorkerContext},
};
use crate::{
    devices::{MmioDevice, MmioDeviceInfo},
    memory::GuestMemory,
};

/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
/// The transport's version: 2 since virtio 1.0.
const VERSION: u32 = 2;
/// Nobody's in particular; drivers do not look at it.
const VENDOR: u32 = 0x4e52_4752;
const CONFIG: u64 = reg::VIRTIO_MMIO_CONFIG as u64;

/// What is offered whatever the device is.
pub(super) const EVERY_DEVICE: u64 =
    bit(VIRTIO_F_VERSION_1) | bit(VIRTIO_RING_F_EVENT_IDX) | bit(VIRTIO_RING_F_INDIRECT_DESC);

/// A write by which the driver tells of new requests, and the event that stands for it: what KVM
/// takes as an ioeventfd. Where none is registered the write reaches [`Transport`] and does the
/// same.
#[derive(Debug, Clone)]
pub struct Notifier {
    /// The register, counted from the device's first address; written as a word.
    pub offset: u64,
    /// The value written.
    pub value: u32,
    /// The event.
    pub event: Arc<EventFd>,
}

/// A device's registers, and the device.
#[derive(Debug)]
pub struct Transport {
    name: String,
    kind: u32,
    offered: u64,
    config: ConfigSpace,
    interrupt: Arc<Interrupt>,
    memory: Arc<GuestMemory>,
    kicks: Vec<Arc<EventFd>>,
    queues: Vec<QueueConfig>,
    status: u32,
    offered_select: u32,
    accepted_select: u32,
    accepted: u64,
    queue_select: u32,
    state: State,
    refused: u64,
}

#[derive(Debug)]
enum State {
    /// With us.
    Idle(WorkerContext),
    /// In its thread.
    Working(Worker),
    /// Its thread died; there is no device any more.
    Gone,
}

impl Transport {
    /// Bytes of registers.
    pub const SIZE: u64 = 0x1000;

    /// Registers for `device`, whose requests lie in `memory` and which interrupts by `irq`.
    /// `name` names its thread and its warnings.
    ///
    /// # Errors
    /// No event file descriptor can be had.
    pub fn new(
        name: &str,
        device: Box<dyn VirtioDevice>,
        memory: Arc<GuestMemory>,
        irq: EventFd,
    ) -> std::io::Result<Self> {
        let interrupt = Arc::new(Interrupt::new(irq));
        let config = device.config().clone();
        config.announce_by(Arc::clone(&interrupt));
        let sizes = device.queue_sizes();
        let kicks = sizes
            .iter()
            .map(|_| EventFd::new(libc::EFD_NONBLOCK).map(Arc::new))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            name: name.to_owned(),
            kind: device.device_type(),
            offered: device.features() | EVERY_DEVICE,
            config,
            interrupt,
            memory,
            kicks,
            queues: sizes.iter().map(|size| QueueConfig::new(*size)).collect(),
            status: 0,
            offered_select: 0,
            accepted_select: 0,
            accepted: 0,
            queue_select: 0,
            state: State::Idle(WorkerContext {
                name: name.to_owned(),
                device,
                complaints: RateLimitedLog::default(),
            }),
            refused: 0,
        })
    }

    /// For the device tree.
    #[must_use]
    pub fn describe(&self, start: u64, irq: u32) -> MmioDeviceInfo {
        MmioDeviceInfo {
            name: self.name.clone(),
            start,
            size: Self::SIZE,
            irq: Some(irq),
            compatible: &["virtio,mmio"],
        }
    }

    /// The writes that are better taken as ioeventfds.
    pub fn notifiers(&self) -> impl Iterator<Item = Notifier> {
        (0..).zip(&self.kicks).map(|(value, event)| Notifier {
            offset: u64::from(reg::VIRTIO_MMIO_QUEUE_NOTIFY),
            value,
            event: Arc::clone(event),
        })
    }

    fn load(&self, offset: u32) -> Option<u32> {
        let queue = self.queues.get(self.queue_select as usize);
        Some(match offset {
            reg::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            reg::VIRTIO_MMIO_VERSION => VERSION,
            reg::VIRTIO_MMIO_DEVICE_ID => self.kind,
            reg::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            reg::VIRTIO_MMIO_DEVICE_FEATURES => half(self.offered, self.offered_select),
            reg::VIRTIO_MMIO_QUEUE_NUM_MAX => queue.map_or(0, |queue| queue.most.into()),
            reg::VIRTIO_MMIO_QUEUE_READY => queue.is_some_and(|queue| queue.ready).into(),
            reg::VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt.reasons(),
            reg::VIRTIO_MMIO_STATUS => self.status(),
            // There is no shared memory: its length is all ones (section 4.2.2.2).
            reg::VIRTIO_MMIO_SHM_LEN_LOW..=reg::VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            reg::VIRTIO_MMIO_CONFIG_GENERATION => self.config.generation(),
            _ => return None,
        })
    }

    /// Says whether the register takes the value now.
    fn store(&mut self, offset: u32, value: u32) -> bool {
        let negotiating = self.status & (DRIVER | FEATURES_OK | FAILED) == DRIVER;
        match offset {
            reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.offered_select = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.accepted_select = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES if negotiating => {
                set_half(&mut self.accepted, self.accepted_select, value);
            }
            reg::VIRTIO_MMIO_QUEUE_SEL => self.queue_select = value,
            reg::VIRTIO_MMIO_QUEUE_NOTIFY => match self.kicks.get(value as usize) {
                Some(kick) => {
                    // It fails only when the counter is full: the device knows.
                    let _ = kick.write(1);
                }
                None => return false,
            },
            reg::VIRTIO_MMIO_INTERRUPT_ACK => self.interrupt.acknowledge(value),
            reg::VIRTIO_MMIO_STATUS => return self.set_status(value),
            reg::VIRTIO_MMIO_SHM_SEL => {}
            _ => return self.set_up_queue(offset, value),
        }
        true
    }

    fn set_up_queue(&mut self, offset: u32, value: u32) -> bool {
        let setting_up = self.status & (FEATURES_OK | DRIVER_OK | FAILED) == FEATURES_OK;
        let Some(queue) = self.queues.get_mut(self.queue_select as usize) else {
            return false;
        };
        if !setting_up || (queue.ready && offset != reg::VIRTIO_MMIO_QUEUE_READY) {
            return false;
        }
        match offset {
            reg::VIRTIO_MMIO_QUEUE_NUM => queue.size = value,
            reg::VIRTIO_MMIO_QUEUE_READY => queue.ready = value == 1,
            reg::VIRTIO_MMIO_QUEUE_DESC_LOW => set_half(&mut queue.descriptors, 0, value),
            reg::VIRTIO_MMIO_QUEUE_DESC_HIGH => set_half(&mut queue.descriptors, 1, value),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_half(&mut queue.available, 0, value),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_half(&mut queue.available, 1, value),
            reg::VIRTIO_MMIO_QUEUE_USED_LOW => set_half(&mut queue.used, 0, value),
            reg::VIRTIO_MMIO_QUEUE_USED_HIGH => set_half(&mut queue.used, 1, value),
            _ => return false,
        }
        true
    }

    fn status(&self) -> u32 {
        match self.interrupt.wants_reset() {
            true => self.status | NEEDS_RESET,
            false => self.status,
        }
    }

    fn set_status(&mut self, value: u32) -> bool {
        if value == 0 {
            self.reset();
            return true;
        }
        // The driver adds bits, in order, and takes none away (section 2.1.1).
        let value = value & !NEEDS_RESET;
        let needed = match value & !self.status {
            new if new & DRIVER_OK != 0 => ACKNOWLEDGE | DRIVER | FEATURES_OK,
            new if new & FEATURES_OK != 0 => ACKNOWLEDGE | DRIVER,
            new if new & DRIVER != 0 => ACKNOWLEDGE,
            _ => 0,
        };
        let known = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | FAILED;
        if value & self.status != self.status || value & needed != needed || value & !known != 0 {
            return false;
        }
        let new = value & !self.status;
        let unknown = self.accepted & !self.offered;
        let modern = self.accepted & bit(VIRTIO_F_VERSION_1) != 0;
        if new & FEATURES_OK != 0 && (unknown != 0 || !modern) {
            // The bit stays clear, by which the driver knows (section 3.1.1).
            self.status |= value & !FEATURES_OK & !DRIVER_OK;
            return true;
        }
        self.status = value;
        if new & DRIVER_OK != 0 {
            self.start();
        }
        true
    }

    fn start(&mut self) {
        let queues = self.queues();
        let State::Idle(mut crew) = std::mem::replace(&mut self.state, State::Gone) else {
            return self.interrupt.needs_reset();
        };
        let name = &self.name;
        let ready = queues.and_then(|mut queues| {
            crew.device.activate(self.accepted, &mut queues)?;
            Ok(queues)
        });
        match ready {
            Ok(queues) => match Worker::start(crew, queues, Arc::clone(&self.interrupt)) {
                Ok(worker) => self.state = State::Working(worker),
                Err(error) => {
                    log::error!("{name} is lost: no thread for it can be started: {error}");
                    self.interrupt.needs_reset();
                }
            },
            Err(error) => {
                crew.complaints
                    .warn(format_args!("{name} cannot start: {error}"));
                self.state = State::Idle(crew);
                self.interrupt.needs_reset();
            }
        }
    }

    fn queues(&self) -> Result<Queues, super::DeviceError> {
        let event_idx = self.accepted & bit(VIRTIO_RING_F_EVENT_IDX) != 0;
        let queues = self.queues.iter().zip(&self.kicks);
        let queues = queues.map(|(setup, kick)| {
            let ring = || setup.ring(event_idx, &self.memory, kick, &self.interrupt);
            setup.ready.then(ring).transpose()
        });
        Ok(Queues::new(queues.collect::<Result<_, _>>()?))
    }

    fn reset(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Gone) {
            State::Working(worker) => worker.stop().map_or_else(
                || {
                    log::error!("{} is lost: its thread ended by itself", self.name);
                    State::Gone
                },
                State::Idle,
            ),
            other => other,
        };
        for queue in &mut self.queues {
            *queue = QueueConfig::new(queue.most);
        }
        for kick in &self.kicks {
            // Empty already, mostly.
            let _ = kick.read();
        }
        self.interrupt.clear();
        self.status = 0;
        self.accepted = 0;
        (self.offered_select, self.accepted_select, self.queue_select) = (0, 0, 0);
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        self.reset();
    }
}

impl MmioDevice for Transport {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let answered = if offset >= CONFIG {
            let at = usize::try_from(offset - CONFIG).unwrap_or(usize::MAX);
            self.config.read(at, data)
        } else if let Ok(word) = <&mut [u8; 4]>::try_from(data) {
            let value = u32::try_from(offset)
                .ok()
                .and_then(|offset| self.load(offset));
            *word = value.unwrap_or(0).to_le_bytes();
            value.is_some()
        } else {
            false
        };
        self.refused += u64::from(!answered);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let taken = if offset >= CONFIG {
            let at = usize::try_from(offset - CONFIG).unwrap_or(usize::MAX);
            self.config.write_by_driver(at, data)
        } else {
            match (u32::try_from(offset), <[u8; 4]>::try_from(data)) {
                (Ok(offset), Ok(word)) => self.store(offset, u32::from_le_bytes(word)),
                _ => false,
            }
        };
        self.refused += u64::from(!taken);
    }

    fn refused(&self) -> u64 {
        self.refused
    }
}

/// The low (0) or high (1) half of a number; there are no others.
fn half(value: u64, select: u32) -> u32 {
    let bytes = value.to_le_bytes();
    let half = match select {
        0 => bytes.first_chunk(),
        1 => bytes.last_chunk(),
        _ => None,
    };
    half.map_or(0, |half| u32::from_le_bytes(*half))
}

fn set_half(value: &mut u64, select: u32, half: u32) {
    match select {
        0 => *value = *value >> 32 << 32 | u64::from(half),
        1 => *value = u64::from(half) << 32 | *value << 32 >> 32,
        // Features that no device offers: bits past 63 cannot be accepted.
        _ => {}
    }
}

#[cfg(test)]
mod tests;
