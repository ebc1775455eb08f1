// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! State of a transport in a snapshot: registers, queues and configuration space.
//!
//! A suspended device has no worker, so its state is that of its queues. Requests that the worker
//! has taken are finished; others are still in the rings, and the worker that continues processes
//! every queue as if it had been notified.

use std::mem;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::{VIRTIO_ID_BLOCK, VIRTIO_ID_VSOCK};

use super::{Activity, DRIVER_OK, Queue, QueueState, Registers, Transport};
use crate::devices::{DeviceState, RestoreError};

/// Registers and queues of a virtio device, with its configuration space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransportState {
    device_type: u32,
    status: u32,
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    interrupt_status: u32,
    needs_reset: bool,
    config: Vec<u8>,
    queues: Vec<QueueRegisters>,
}

/// Registers of a queue, and the positions of the device in its rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueRegisters {
    size: u16,
    is_ready: bool,
    descriptor_table: u64,
    available_ring: u64,
    used_ring: u64,
    next_available: u16,
    next_used: u16,
}

impl Transport {
    /// Implements [`MmioDevice::suspend`](crate::devices::MmioDevice::suspend).
    pub(super) fn suspend_device(&mut self) -> Result<DeviceState, String> {
        let mut suspended = Ok(());
        self.device = match mem::replace(&mut self.device, Activity::Lost) {
            Activity::Active(worker) => match worker.stop() {
                Some(mut stopped) => {
                    suspended = stopped.context.device.suspend(&mut stopped.queues);
                    self.keep_positions(&stopped.queues);
                    Activity::Suspended(stopped.context)
                }
                None => Activity::Lost,
            },
            other => other,
        };
        if let Err(error) = suspended {
            // Its positions are unknown.
            self.interrupt.set_needs_reset();
            return Err(error.to_string());
        }
        if matches!(self.device, Activity::Lost) {
            return Err("its thread has failed".to_owned());
        }
        Ok(DeviceState::Virtio(self.state()))
    }

    /// Implements [`MmioDevice::restore`](crate::devices::MmioDevice::restore).
    pub(super) fn restore_device(&mut self, state: &DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Virtio(state) = state else {
            return Err(state.refused_by("a virtio device"));
        };
        let refused = |reason: &str| Err(RestoreError(reason.to_owned()));
        if state.device_type != self.device_type || state.queues.len() != self.queues.len() {
            return refused("it was a device of another type");
        }
        if state.driver_features & !self.offered_features != 0 {
            return refused("this host does not offer the features that the guest uses");
        }
        if self.device_type == VIRTIO_ID_BLOCK && state.config != self.config.bytes() {
            return refused("the disk has another size than when the snapshot was taken");
        }
        // A vsock keeps the CID of this process, which the guest reads again.
        if self.device_type != VIRTIO_ID_VSOCK && !self.config.replace(&state.config) {
            return refused("its configuration space has another size");
        }
        for (queue, saved) in self.queues.iter_mut().zip(&state.queues) {
            *queue = saved.to_queue_state(queue.max_size);
        }
        self.registers = Registers {
            status: state.status,
            device_features_sel: state.device_features_sel,
            driver_features_sel: state.driver_features_sel,
            driver_features: state.driver_features,
            queue_sel: state.queue_sel,
        };
        self.interrupt.restore(state.interrupt_status, state.needs_reset);
        if let Activity::Inactive(context) = &mut self.device {
            context.device.restored();
        }
        if state.status & DRIVER_OK != 0
            && let Activity::Inactive(context) = mem::replace(&mut self.device, Activity::Lost)
        {
            self.device = Activity::Suspended(context);
        }
        Ok(())
    }

    /// Implements [`MmioDevice::resume`](crate::devices::MmioDevice::resume).
    pub(super) fn resume_device(&mut self) {
        self.device = match mem::replace(&mut self.device, Activity::Lost) {
            Activity::Suspended(context) => Activity::Inactive(context),
            other => return self.device = other,
        };
        // A device that has failed waits for its reset.
        if !self.interrupt.needs_reset() {
            self.activate();
            for event in &self.queue_events {
                // The write fails only if the counter is full, with a notification pending.
                let _ = event.write(1);
            }
        }
        self.interrupt.raise_again();
    }

    fn keep_positions(&mut self, queues: &[Option<Queue>]) {
        for (kept, queue) in self.queues.iter_mut().zip(queues) {
            if let Some(queue) = queue {
                *kept = queue.state();
            }
        }
    }

    fn state(&self) -> TransportState {
        let registers = &self.registers;
        TransportState {
            device_type: self.device_type,
            status: registers.status,
            device_features_sel: registers.device_features_sel,
            driver_features_sel: registers.driver_features_sel,
            driver_features: registers.driver_features,
            queue_sel: registers.queue_sel,
            interrupt_status: self.interrupt.status(),
            needs_reset: self.interrupt.needs_reset(),
            config: self.config.bytes(),
            queues: self.queues.iter().map(QueueRegisters::of).collect(),
        }
    }
}

impl QueueRegisters {
    const fn of(queue: &QueueState) -> Self {
        Self {
            size: queue.size,
            is_ready: queue.ready,
            descriptor_table: queue.desc_table,
            available_ring: queue.avail_ring,
            used_ring: queue.used_ring,
            next_available: queue.next_avail,
            next_used: queue.next_used,
        }
    }

    /// Returns the state of a queue; the activation checks it as that of a driver.
    fn to_queue_state(self, max_size: u16) -> QueueState {
        QueueState {
            max_size,
            next_avail: self.next_available,
            next_used: self.next_used,
            size: self.size,
            ready: self.is_ready,
            desc_table: self.descriptor_table,
            avail_ring: self.available_ring,
            used_ring: self.used_ring,
            ..QueueState::default()
        }
    }
}
