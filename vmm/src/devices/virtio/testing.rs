// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Driver for tests: configures a device through its registers as a guest does, and places requests
//! in queues in guest memory.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use granule_types::units::{Bytes, GuestAddress};
use virtio_bindings::virtio_mmio as reg;
use virtio_queue::{
    desc::{RawDescriptor, split::Descriptor},
    mock::{AvailRing, DescriptorTable, UsedRing},
};
use vm_memory::{Bytes as _, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::{Transport, VirtioDevice};
use crate::{
    devices::MmioDevice as _,
    memory::{GuestMemory, GuestRam, HostPages, Plan},
};

pub const START: u64 = 0x4000_0000;
pub const SIZE: u64 = 16 << 20;
/// Distance between queues, which begin at `START`.
const QUEUE_AREA: u64 = 0x1_0000;
/// First address of request buffers.
const BUFFERS: u64 = START + 0x10_0000;
const QUEUE_SIZE: u16 = 16;
pub const VERSION_1: u64 = 1 << 32;
pub const EVENT_IDX: u64 = 1 << 29;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

pub fn memory() -> Arc<GuestMemory> {
    let host = HostPages::of_this_host().unwrap();
    let plan = Plan::new("anonymous".parse().unwrap(), &host).unwrap();
    let ram = GuestRam::new(plan, &host, GuestAddress(START), Bytes(SIZE), false).unwrap();
    Arc::new(GuestMemory::new(vec![ram]).unwrap())
}

/// Calls `condition` until it holds.
///
/// # Panics
/// It does not hold within ten seconds.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "timeout: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Buffer of a request: contents for the device, or space for its answer.
#[derive(Debug, Clone)]
pub enum Buffer {
    Out(Vec<u8>),
    In(u32),
}

/// Queue from the view of the driver. (The rings of `MockSplitQueue` of virtio-queue 0.18 overlap
/// from the sixth entry on.)
pub struct DriverQueue<'m> {
    pub desc_table: DescriptorTable<'m, GuestMemoryMmap>,
    pub avail: AvailRing<'m, GuestMemoryMmap>,
    used: UsedRing<'m, GuestMemoryMmap>,
    pub desc_table_address: GuestAddress,
    pub avail_address: GuestAddress,
    used_address: GuestAddress,
    /// Number of chains received from the used ring.
    received: u16,
    next_free: u16,
}

impl<'m> DriverQueue<'m> {
    fn new(memory: &'m GuestMemoryMmap, start: u64) -> Self {
        let [desc, avail, used] = [0, 0x1000, 0x2000].map(|offset| GuestAddress(start + offset));
        Self {
            desc_table: DescriptorTable::new(memory, desc, QUEUE_SIZE),
            avail: AvailRing::new(memory, avail, QUEUE_SIZE),
            used: UsedRing::new(memory, used, QUEUE_SIZE),
            desc_table_address: desc,
            avail_address: avail,
            used_address: used,
            received: 0,
            next_free: 0,
        }
    }

    fn has_used(&self) -> bool {
        u16::from_le(self.used.idx().load()) != self.received
    }
}

pub struct Driver<'m> {
    pub transport: Transport,
    pub irq: EventFd,
    pub memory: &'m GuestMemoryMmap,
    pub queues: Vec<DriverQueue<'m>>,
    next_buffer: u64,
}

impl<'m> Driver<'m> {
    /// Returns a driver whose device is in its state after a reset.
    pub fn new(memory: &'m Arc<GuestMemory>, device: Box<dyn VirtioDevice>) -> Self {
        let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let line = irq.try_clone().unwrap();
        let transport = Transport::new("test", device, Arc::clone(memory), line).unwrap();
        Self { transport, irq, memory: memory.map(), queues: Vec::new(), next_buffer: BUFFERS }
    }

    /// Returns a driver whose device is active.
    pub fn start(
        memory: &'m Arc<GuestMemory>,
        device: Box<dyn VirtioDevice>,
        features: u64,
    ) -> Self {
        let mut driver = Self::new(memory, device);
        driver.activate(features);
        assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS), 15);
        driver
    }

    /// Reads a register; a refused access reads as zero.
    pub fn get(&mut self, register: u32) -> u32 {
        let mut word = [0; 4];
        let _ = self.transport.read(register.into(), &mut word);
        u32::from_le_bytes(word)
    }

    /// Writes a register and returns whether the device has accepted it.
    pub fn set(&mut self, register: u32, value: u32) -> bool {
        self.transport.write(register.into(), &value.to_le_bytes())
    }

    pub fn offered_features(&mut self) -> u64 {
        let halves = [1, 0].map(|select| {
            self.set(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, select);
            u64::from(self.get(reg::VIRTIO_MMIO_DEVICE_FEATURES))
        });
        halves[0] << 32 | halves[1]
    }

    /// Takes the device from reset to `FEATURES_OK`.
    pub fn negotiate(&mut self, features: u64) {
        for status in [0, 1, 3] {
            self.set(reg::VIRTIO_MMIO_STATUS, status);
        }
        for (select, shift) in [(0, 0), (1, 32)] {
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            let half = u32::try_from(features >> shift & 0xffff_ffff).unwrap();
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES, half);
        }
        self.set(reg::VIRTIO_MMIO_STATUS, 11);
    }

    /// Takes the device from reset to `DRIVER_OK` with all its queues.
    pub fn activate(&mut self, features: u64) {
        self.negotiate(features | VERSION_1);
        self.queues.clear();
        for index in 0.. {
            self.set(reg::VIRTIO_MMIO_QUEUE_SEL, index);
            if self.get(reg::VIRTIO_MMIO_QUEUE_NUM_MAX) == 0 {
                break;
            }
            let start = START + u64::from(index) * QUEUE_AREA;
            let queue = DriverQueue::new(self.memory, start);
            self.set(reg::VIRTIO_MMIO_QUEUE_NUM, QUEUE_SIZE.into());
            for (register, address) in [
                (reg::VIRTIO_MMIO_QUEUE_DESC_LOW, queue.desc_table_address),
                (reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, queue.avail_address),
                (reg::VIRTIO_MMIO_QUEUE_USED_LOW, queue.used_address),
            ] {
                self.set(register, u32::try_from(address.0 & 0xffff_ffff).unwrap());
                self.set(register + 4, u32::try_from(address.0 >> 32).unwrap());
            }
            self.set(reg::VIRTIO_MMIO_QUEUE_READY, 1);
            self.queues.push(queue);
        }
        self.set(reg::VIRTIO_MMIO_STATUS, 15);
    }

    /// Adds a request to a queue without a notification. Returns the addresses of its buffers.
    pub fn add(&mut self, index: usize, buffers: &[Buffer]) -> Vec<GuestAddress> {
        let queue = &mut self.queues[index];
        let first = queue.next_free;
        let count = u16::try_from(buffers.len()).unwrap();
        let mut addresses = Vec::new();
        for (slot, buffer) in (first..).zip(buffers) {
            if self.next_buffer > START + SIZE - 0x20_0000 {
                self.next_buffer = BUFFERS;
            }
            let address = GuestAddress(self.next_buffer);
            let (length, direction) = match buffer {
                Buffer::Out(bytes) => {
                    self.memory.write_slice(bytes, address).unwrap();
                    (u32::try_from(bytes.len()).unwrap(), 0)
                }
                Buffer::In(length) => (*length, WRITE),
            };
            self.next_buffer += u64::from(length).next_multiple_of(64) + 64;
            let (next, more) = match slot + 1 == first + count {
                true => (0, 0),
                false => (slot + 1, NEXT),
            };
            let descriptor = Descriptor::new(address.0, length, direction | more, next);
            let stored = queue.desc_table.store(slot, RawDescriptor::from(descriptor));
            stored.unwrap();
            addresses.push(address);
        }
        let available = u16::from_le(queue.avail.idx().load());
        let entry = queue.avail.ring().ref_at(usize::from(available % QUEUE_SIZE));
        entry.unwrap().store(first.to_le());
        queue.avail.idx().store(available.wrapping_add(1).to_le());
        // Tests have few requests in flight: descriptors are reused without a check.
        queue.next_free = if first + count + 4 >= QUEUE_SIZE { 0 } else { first + count };
        addresses
    }

    pub fn notify(&mut self, index: usize) {
        self.set(reg::VIRTIO_MMIO_QUEUE_NOTIFY, u32::try_from(index).unwrap());
    }

    /// Waits for the next used chain and returns the number of bytes written to it.
    pub fn wait_used(&mut self, index: usize) -> u32 {
        let queue = &mut self.queues[index];
        wait_until("a used chain", || queue.has_used());
        let slot = usize::from(queue.received % QUEUE_SIZE);
        queue.received = queue.received.wrapping_add(1);
        queue.used.ring().ref_at(slot).unwrap().load().len()
    }

    pub fn has_used(&self, index: usize) -> bool {
        self.queues[index].has_used()
    }

    /// Adds a request and waits for it. Returns the contents of its device-writable buffers and the
    /// number of bytes that the device reports as written.
    pub fn request(&mut self, index: usize, buffers: &[Buffer]) -> (Vec<Vec<u8>>, u32) {
        let addresses = self.add(index, buffers);
        self.notify(index);
        let written = self.wait_used(index);
        let answers = addresses.iter().zip(buffers).filter_map(|(address, buffer)| match buffer {
            Buffer::Out(_) => None,
            Buffer::In(length) => Some(self.bytes(*address, *length)),
        });
        (answers.collect(), written)
    }

    pub fn bytes(&self, address: GuestAddress, length: u32) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.memory.read_slice(&mut bytes, address).unwrap();
        bytes
    }

    /// Waits until the device has stopped until its next reset.
    pub fn wait_needs_reset(&mut self) {
        wait_until("DEVICE_NEEDS_RESET", || self.get(reg::VIRTIO_MMIO_STATUS) & 64 != 0);
    }
}
