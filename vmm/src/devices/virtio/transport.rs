// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Virtio over MMIO (virtio 1.2, section 4.2): device status, initialisation and reset. The
//! registers are in [`registers`].
//!
//! Initialisation has a fixed order (section 3.1.1), and a register accepts a write only in its
//! step: features between `DRIVER` and `FEATURES_OK`, queues between `FEATURES_OK` and `DRIVER_OK`.
//! Other writes are refused. `DRIVER_OK` moves the device into its worker thread. Writing 0 to the
//! status register moves the device back and clears all state.

#[cfg(test)]
mod hostile_driver;
mod registers;
mod state;
#[cfg(test)]
mod tests;

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

pub use state::TransportState;

use super::{
    ConfigSpace, DeviceError, Interrupt, Queue, QueueState, RateLimitedLog, VirtioDevice,
    feature_bit,
    worker::{Worker, WorkerContext},
};
use crate::{devices::MmioDeviceInfo, memory::GuestMemory};

/// Features that every device offers.
const COMMON_FEATURES: u64 = feature_bit(VIRTIO_F_VERSION_1)
    | feature_bit(VIRTIO_RING_F_EVENT_IDX)
    | feature_bit(VIRTIO_RING_F_INDIRECT_DESC);

/// Registers of a device, and the device while it has no worker.
#[allow(missing_debug_implementations, reason = "it holds any device")]
pub struct Transport {
    name: String,
    device_type: u32,
    offered_features: u64,
    config: ConfigSpace,
    interrupt: Arc<Interrupt>,
    memory: Arc<GuestMemory>,
    queue_events: Vec<Arc<EventFd>>,
    queues: Vec<QueueState>,
    device: Activity,
    registers: Registers,
}

/// Registers that a reset clears.
#[derive(Default)]
struct Registers {
    status: u32,
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
}

enum Activity {
    /// Device that the transport owns.
    Inactive(WorkerContext),
    /// Device that its worker thread owns.
    Active(Worker),
    /// Device whose worker is suspended. Its queues are those of the transport.
    Suspended(WorkerContext),
    /// Device lost with a worker thread that panicked or could not be started.
    Lost,
}

impl Transport {
    /// Creates the transport of `device`, whose requests are in `memory` and which interrupts
    /// through `irq`. Its thread name and its warnings contain `name`.
    pub fn new(
        name: &str,
        device: Box<dyn VirtioDevice>,
        memory: Arc<GuestMemory>,
        irq: EventFd,
    ) -> std::io::Result<Self> {
        let interrupt = Arc::new(Interrupt::new(irq));
        let properties = device.properties();
        properties.config.set_interrupt(Arc::clone(&interrupt));
        let sizes = properties.queue_sizes.iter();
        let queue_events = sizes
            .clone()
            .map(|_| EventFd::new(libc::EFD_NONBLOCK).map(Arc::new))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            name: name.to_owned(),
            device_type: properties.device_type,
            offered_features: properties.features | COMMON_FEATURES,
            config: properties.config,
            interrupt,
            memory,
            queue_events,
            queues: sizes.map(|size| inactive_queue(*size)).collect(),
            device: Activity::Inactive(WorkerContext {
                name: name.to_owned(),
                device,
                log: RateLimitedLog::default(),
            }),
            registers: Registers::default(),
        })
    }

    /// Describes the device for the device tree.
    pub fn describe(&self, start: GuestAddress, irq: u32) -> MmioDeviceInfo {
        MmioDeviceInfo::new(&self.name, start, Some(irq), &["virtio,mmio"])
    }

    /// Offset of the `QueueNotify` register. To notify a queue, the driver writes its index to this
    /// register as a 32-bit word.
    pub const QUEUE_NOTIFY: u64 = reg::VIRTIO_MMIO_QUEUE_NOTIFY as u64;

    /// Returns the events that notify the queues, to register as ioeventfds. Without an ioeventfd,
    /// the write reaches the transport, which signals the event.
    pub fn queue_events(&self) -> &[Arc<EventFd>] {
        &self.queue_events
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

    fn activate(&mut self) {
        let queues = self.build_queues();
        let Activity::Inactive(mut context) = mem::replace(&mut self.device, Activity::Lost) else {
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
                Ok(worker) => self.device = Activity::Active(worker),
                Err((error, context)) => {
                    log::error!("{name} stopped until the guest resets it: no thread: {error}");
                    self.device = Activity::Inactive(context);
                    self.interrupt.set_needs_reset();
                }
            },
            Err(error) => {
                context.log.warn(format_args!("{name} cannot be activated: {error}"));
                self.device = Activity::Inactive(context);
                self.interrupt.set_needs_reset();
            }
        }
    }

    fn build_queues(&self) -> Result<Vec<Option<Queue>>, DeviceError> {
        let event_idx = self.registers.driver_features & feature_bit(VIRTIO_RING_F_EVENT_IDX) != 0;
        let queues = self.queues.iter().zip(&self.queue_events);
        let queues = queues.map(|(config, event)| {
            let config = QueueState { event_idx_enabled: event_idx, ..*config };
            let build = || Queue::new(config, &self.memory, event, &self.interrupt);
            config.ready.then(build).transpose()
        });
        queues.collect()
    }

    fn reset(&mut self) {
        self.device = match mem::replace(&mut self.device, Activity::Lost) {
            Activity::Active(worker) => match worker.stop() {
                Some(stopped) => Activity::Inactive(stopped.context),
                None => {
                    log::error!("{} is lost: its worker thread panicked", self.name);
                    Activity::Lost
                }
            },
            Activity::Suspended(context) => Activity::Inactive(context),
            other => other,
        };
        if let Activity::Inactive(context) = &mut self.device {
            context.device.reset();
        }
        for queue in &mut self.queues {
            *queue = inactive_queue(queue.max_size);
        }
        for event in &self.queue_events {
            // The read fails if no notification is pending.
            let _ = event.read();
        }
        self.interrupt.clear();
        self.registers = Registers::default();
    }
}

/// Returns the configuration of a queue after a reset.
fn inactive_queue(max_size: u16) -> QueueState {
    QueueState { max_size, size: max_size, ..QueueState::default() }
}

impl Drop for Transport {
    fn drop(&mut self) {
        self.reset();
    }
}
