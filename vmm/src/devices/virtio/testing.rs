// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver for tests: goes through the registers as a guest's does, and puts requests into real
//! queues in guest memory.

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
/// Queues lie at the start, this far apart; requests' buffers from here on.
const QUEUE_AREA: u64 = 0x1_0000;
pub const BUFFERS: u64 = START + 0x10_0000;
const QUEUE_LENGTH: u16 = 16;
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

/// A buffer of a request: what the device finds in it, or how much room it has for an answer.
#[derive(Debug, Clone)]
pub enum Buffer {
    Out(Vec<u8>),
    In(u32),
}

/// A queue as the driver sees it. (`MockSplitQueue` of virtio-queue 0.18 has its two queues
/// overlap from the sixth entry on.)
pub struct MockQueue<'m> {
    table: DescriptorTable<'m, GuestMemoryMmap>,
    avail: AvailRing<'m, GuestMemoryMmap>,
    used: UsedRing<'m, GuestMemoryMmap>,
    start: u64,
}

impl<'m> MockQueue<'m> {
    fn new(memory: &'m GuestMemoryMmap, start: u64) -> Self {
        let at = |offset| vm_memory::GuestAddress(start + offset);
        Self {
            table: DescriptorTable::new(memory, at(0), QUEUE_LENGTH),
            avail: AvailRing::new(memory, at(0x1000), QUEUE_LENGTH),
            used: UsedRing::new(memory, at(0x2000), QUEUE_LENGTH),
            start,
        }
    }

    pub fn desc_table(&self) -> &DescriptorTable<'m, GuestMemoryMmap> {
        &self.table
    }

    pub fn avail(&self) -> &AvailRing<'m, GuestMemoryMmap> {
        &self.avail
    }

    pub fn used(&self) -> &UsedRing<'m, GuestMemoryMmap> {
        &self.used
    }

    pub fn desc_table_addr(&self) -> vm_memory::GuestAddress {
        vm_memory::GuestAddress(self.start)
    }

    pub fn avail_addr(&self) -> vm_memory::GuestAddress {
        vm_memory::GuestAddress(self.start + 0x1000)
    }

    pub fn used_addr(&self) -> vm_memory::GuestAddress {
        vm_memory::GuestAddress(self.start + 0x2000)
    }
}

pub struct Driver<'m> {
    pub transport: Transport,
    pub irq: EventFd,
    pub memory: &'m GuestMemoryMmap,
    pub queues: Vec<MockQueue<'m>>,
    used: Vec<u16>,
    free: Vec<u16>,
    buffer: u64,
}

impl<'m> Driver<'m> {
    /// A driver that has found its device and done nothing with it yet.
    pub fn find(memory: &'m Arc<GuestMemory>, device: Box<dyn VirtioDevice>) -> Self {
        let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let line = irq.try_clone().unwrap();
        let transport = Transport::new("test", device, Arc::clone(memory), line).unwrap();
        Self {
            transport,
            irq,
            memory: memory.map(),
            queues: Vec::new(),
            used: Vec::new(),
            free: Vec::new(),
            buffer: BUFFERS,
        }
    }

    /// A driver whose device works.
    pub fn start(
        memory: &'m Arc<GuestMemory>,
        device: Box<dyn VirtioDevice>,
        features: u64,
    ) -> Self {
        let mut driver = Self::find(memory, device);
        driver.set_up(features);
        assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS), 15);
        driver
    }

    pub fn get(&mut self, register: u32) -> u32 {
        let mut word = [0; 4];
        self.transport.read(register.into(), &mut word);
        u32::from_le_bytes(word)
    }

    pub fn set(&mut self, register: u32, value: u32) {
        self.transport.write(register.into(), &value.to_le_bytes());
    }

    pub fn offered(&mut self) -> u64 {
        self.set(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
        let high = self.get(reg::VIRTIO_MMIO_DEVICE_FEATURES);
        self.set(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
        u64::from(high) << 32 | u64::from(self.get(reg::VIRTIO_MMIO_DEVICE_FEATURES))
    }

    pub fn accept(&mut self, features: u64) {
        for (select, shift) in [(0, 0), (1, 32)] {
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            let half = u32::try_from(features >> shift & 0xffff_ffff).unwrap();
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES, half);
        }
    }

    /// From reset to `DRIVER_OK`.
    pub fn set_up(&mut self, features: u64) {
        self.set(reg::VIRTIO_MMIO_STATUS, 0);
        self.set(reg::VIRTIO_MMIO_STATUS, 1);
        self.set(reg::VIRTIO_MMIO_STATUS, 3);
        self.accept(features | VERSION_1);
        self.set(reg::VIRTIO_MMIO_STATUS, 11);
        self.queues.clear();
        self.used.clear();
        self.free.clear();
        for index in 0.. {
            self.set(reg::VIRTIO_MMIO_QUEUE_SEL, index);
            if self.get(reg::VIRTIO_MMIO_QUEUE_NUM_MAX) == 0 {
                break;
            }
            let start = START + u64::from(index) * QUEUE_AREA;
            let queue = MockQueue::new(self.memory, start);
            self.set(reg::VIRTIO_MMIO_QUEUE_NUM, QUEUE_LENGTH.into());
            let places = [
                (reg::VIRTIO_MMIO_QUEUE_DESC_LOW, queue.desc_table_addr()),
                (reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, queue.avail_addr()),
                (reg::VIRTIO_MMIO_QUEUE_USED_LOW, queue.used_addr()),
            ];
            for (register, address) in places {
                self.set(register, u32::try_from(address.0 & 0xffff_ffff).unwrap());
                self.set(register + 4, u32::try_from(address.0 >> 32).unwrap());
            }
            self.set(reg::VIRTIO_MMIO_QUEUE_READY, 1);
            self.queues.push(queue);
            self.used.push(0);
            self.free.push(0);
        }
        self.set(reg::VIRTIO_MMIO_STATUS, 15);
    }

    /// Puts a request into a queue without telling; gives where its buffers lie.
    pub fn put(&mut self, queue: usize, buffers: &[Buffer]) -> Vec<vm_memory::GuestAddress> {
        let mut places = Vec::new();
        let first = self.free[queue];
        for (index, buffer) in (0..).zip(buffers) {
            if self.buffer > START + SIZE - 0x20_0000 {
                self.buffer = BUFFERS;
            }
            let place = vm_memory::GuestAddress(self.buffer);
            let (length, flag) = match buffer {
                Buffer::Out(bytes) => {
                    self.memory.write_slice(bytes, place).unwrap();
                    (u32::try_from(bytes.len()).unwrap(), 0)
                }
                Buffer::In(length) => (*length, WRITE),
            };
            self.buffer += u64::from(length).next_multiple_of(64) + 64;
            let last = usize::from(index) + 1 == buffers.len();
            let (next, more) = if last {
                (0, 0)
            } else {
                (first + index + 1, NEXT)
            };
            let descriptor = Descriptor::new(place.0, length, flag | more, next);
            let table = self.queues[queue].desc_table();
            table
                .store(first + index, RawDescriptor::from(descriptor))
                .unwrap();
            places.push(place);
        }
        let count = u16::try_from(buffers.len()).unwrap();
        let available = self.queues[queue].avail();
        let index = u16::from_le(available.idx().load());
        let slot = usize::from(index % QUEUE_LENGTH);
        available.ring().ref_at(slot).unwrap().store(first.to_le());
        available.idx().store(index.wrapping_add(1).to_le());
        // No more than a few requests are under way at once.
        self.free[queue] = if first + count + 4 >= QUEUE_LENGTH {
            0
        } else {
            first + count
        };
        places
    }

    pub fn kick(&mut self, queue: usize) {
        self.set(reg::VIRTIO_MMIO_QUEUE_NOTIFY, u32::try_from(queue).unwrap());
    }

    /// Waits for the next request given back, and says how many bytes were written to it.
    pub fn wait(&mut self, queue: usize) -> u32 {
        let until = Instant::now() + Duration::from_secs(10);
        let used = self.queues[queue].used();
        let slot = usize::from(self.used[queue] % QUEUE_LENGTH);
        while u16::from_le(used.idx().load()) == self.used[queue] {
            assert!(Instant::now() < until, "nothing was given back");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.used[queue] = self.used[queue].wrapping_add(1);
        used.ring().ref_at(slot).unwrap().load().len()
    }

    pub fn has_answer(&self, queue: usize) -> bool {
        u16::from_le(self.queues[queue].used().idx().load()) != self.used[queue]
    }

    /// A whole request: gives what the device wrote into the buffers for answers, and how many
    /// bytes it says it wrote.
    pub fn ask(&mut self, queue: usize, buffers: &[Buffer]) -> (Vec<Vec<u8>>, u32) {
        let places = self.put(queue, buffers);
        self.kick(queue);
        let written = self.wait(queue);
        let answers = places
            .iter()
            .zip(buffers)
            .filter_map(|(place, buffer)| match buffer {
                Buffer::Out(_) => None,
                Buffer::In(length) => Some(self.bytes(*place, *length)),
            });
        (answers.collect(), written)
    }

    pub fn bytes(&self, place: vm_memory::GuestAddress, length: u32) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.memory.read_slice(&mut bytes, place).unwrap();
        bytes
    }

    /// Waits for the device to give up until it is reset.
    pub fn wait_for_failure(&mut self) {
        let until = Instant::now() + Duration::from_secs(10);
        while self.get(reg::VIRTIO_MMIO_STATUS) & 64 == 0 {
            assert!(Instant::now() < until, "the device did not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
