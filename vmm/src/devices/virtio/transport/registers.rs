// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Register accesses (virtio 1.2, section 4.2.2).

use virtio_bindings::virtio_mmio as reg;

use super::{DRIVER, DRIVER_OK, FAILED, FEATURES_OK, NEEDS_RESET, Transport};
use crate::devices::{DeviceState, MmioDevice, RestoreError};

/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
/// Version of the transport: 2 since virtio 1.0.
const VERSION: u32 = 2;
/// Vendor identifier; drivers ignore it.
const VENDOR_ID: u32 = 0x4e52_4752;
const CONFIG_OFFSET: u64 = reg::VIRTIO_MMIO_CONFIG as u64;

impl Transport {
    fn load(&self, offset: u32) -> Option<u32> {
        let queue = self.queues.get(self.registers.queue_sel as usize);
        Some(match offset {
            reg::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            reg::VIRTIO_MMIO_VERSION => VERSION,
            reg::VIRTIO_MMIO_DEVICE_ID => self.device_type,
            reg::VIRTIO_MMIO_VENDOR_ID => VENDOR_ID,
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

    /// Writes a register. Returns whether it accepts the value at this time.
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
                    // The write fails only if the counter is full, with a notification pending.
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
            // The activation refuses a size of 0.
            reg::VIRTIO_MMIO_QUEUE_NUM => queue.size = u16::try_from(value).unwrap_or(0),
            reg::VIRTIO_MMIO_QUEUE_READY => queue.ready = value == 1,
            reg::VIRTIO_MMIO_QUEUE_DESC_LOW => set_half(&mut queue.desc_table, 0, value),
            reg::VIRTIO_MMIO_QUEUE_DESC_HIGH => set_half(&mut queue.desc_table, 1, value),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_half(&mut queue.avail_ring, 0, value),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_half(&mut queue.avail_ring, 1, value),
            reg::VIRTIO_MMIO_QUEUE_USED_LOW => set_half(&mut queue.used_ring, 0, value),
            reg::VIRTIO_MMIO_QUEUE_USED_HIGH => set_half(&mut queue.used_ring, 1, value),
            _ => return false,
        }
        true
    }
}

impl MmioDevice for Transport {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> bool {
        if let Some(offset) = offset.checked_sub(CONFIG_OFFSET) {
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
        if let Some(offset) = offset.checked_sub(CONFIG_OFFSET) {
            return self.config.write_by_driver(offset, data);
        }
        match (u32::try_from(offset), <[u8; 4]>::try_from(data)) {
            (Ok(offset), Ok(word)) => self.store(offset, u32::from_le_bytes(word)),
            _ => false,
        }
    }

    fn suspend(&mut self) -> Result<Option<DeviceState>, String> {
        self.suspend_device().map(Some)
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), RestoreError> {
        self.restore_device(state)
    }

    fn resume(&mut self) {
        self.resume_device();
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
