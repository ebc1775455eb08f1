// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Driver for tests: configures a device through its registers as a guest does, and places requests
//! in queues in guest memory.

use std::{
    env,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use granule_types::units::{Bytes, GuestAddress};
use virtio_bindings::virtio_mmio as reg;
use vm_memory::{ByteValued, Bytes as _};
use vmm_sys_util::eventfd::EventFd;

use super::{QueueState, Transport, VirtioDevice};
use crate::{
    devices::{DeviceState, MmioDevice as _, RestoreError},
    memory::{BackingPlan, GuestMemory, GuestRam, HostPages, RamOptions},
};

pub const MEMORY_START: u64 = 0x4000_0000;
pub const MEMORY_SIZE: u64 = 16 << 20;
/// Distance between queues, which begin at `MEMORY_START`.
const QUEUE_STRIDE: u64 = 0x1_0000;
const BUFFERS_START: u64 = MEMORY_START + 0x10_0000;
const QUEUE_SIZE: u16 = 16;
pub const VERSION_1: u64 = 1 << 32;
pub const EVENT_IDX: u64 = 1 << 29;

const DESC_F_NEXT: u16 = 1;
const DESC_F_WRITE: u16 = 2;

/// Calls `condition` until it holds, or panics after ten seconds.
pub fn wait_until(expected: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "timeout: {expected}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the command that runs test `name` of this program in a child process.
pub fn child_test_command(name: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    command
}

/// Buffer of a request: contents for the device, or space for the device's reply.
#[derive(Debug, Clone)]
pub enum Buffer {
    Out(Vec<u8>),
    In(u32),
}

impl Buffer {
    /// Returns the header of a request to a block device (virtio 1.2, section 5.2.6).
    pub fn block_header(request_type: u32, sector: u64) -> Self {
        Self::Out([u64::from(request_type), sector].map(u64::to_le_bytes).concat())
    }
}

/// Returns zeroed guest memory.
pub fn guest_memory() -> Arc<GuestMemory> {
    let host = HostPages::of_this_host().unwrap();
    let plan = BackingPlan::new("anonymous".parse().unwrap(), &host).unwrap();
    let (start, size) = (GuestAddress(MEMORY_START), Bytes(MEMORY_SIZE));
    let ram = GuestRam::new(plan, &host, start, size, RamOptions::default()).unwrap();
    Arc::new(GuestMemory::new(vec![ram]).unwrap())
}

/// Returns a queue whose descriptor table is at `start`.
pub fn queue_at(start: u64, size: u16) -> QueueState {
    let (avail_ring, used_ring) = (start + 0x1000, start + 0x2000);
    QueueState { desc_table: start, avail_ring, used_ring, size, ..QueueState::default() }
}

/// Driver of one device, with its guest memory.
pub struct Driver {
    pub transport: Transport,
    pub irq: EventFd,
    pub memory: Arc<GuestMemory>,
    /// Queues; `next_avail` is the next free descriptor, `next_used` counts chains received.
    pub queues: Vec<QueueState>,
    next_buffer_address: u64,
}

impl Driver {
    /// Returns a driver of a device in its reset state.
    pub fn new(device: Box<dyn VirtioDevice>) -> Self {
        let memory = guest_memory();
        let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let line = irq.try_clone().unwrap();
        let transport = Transport::new("test", device, Arc::clone(&memory), line).unwrap();
        Self { transport, irq, memory, queues: Vec::new(), next_buffer_address: BUFFERS_START }
    }

    /// Returns a driver whose device is active.
    pub fn start(device: Box<dyn VirtioDevice>, features: u64) -> Self {
        let mut driver = Self::new(device);
        driver.activate(features);
        assert_eq!(driver.read_register(reg::VIRTIO_MMIO_STATUS), 15);
        driver
    }

    /// Replaces the device by a new one, as another process does, and sets its state.
    pub fn replace_device(
        &mut self,
        device: Box<dyn VirtioDevice>,
        state: &DeviceState,
    ) -> Result<(), RestoreError> {
        let line = self.irq.try_clone().unwrap();
        let memory = Arc::clone(&self.memory);
        self.transport = Transport::new("test", device, memory, line).unwrap();
        let text = serde_json::to_string(state).unwrap();
        self.transport.restore(&serde_json::from_str(&text).unwrap())
    }

    /// Reads a register; a refused access reads as zero.
    pub fn read_register(&mut self, register: u32) -> u32 {
        let mut word = [0; 4];
        let _ = self.transport.read(register.into(), &mut word);
        u32::from_le_bytes(word)
    }

    /// Writes a register and returns whether the device has accepted it.
    pub fn write_register(&mut self, register: u32, value: u32) -> bool {
        self.transport.write(register.into(), &value.to_le_bytes())
    }

    pub fn offered_features(&mut self) -> u64 {
        let halves = [1, 0].map(|select| {
            self.write_register(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, select);
            u64::from(self.read_register(reg::VIRTIO_MMIO_DEVICE_FEATURES))
        });
        halves[0] << 32 | halves[1]
    }

    /// Takes the device from reset to `FEATURES_OK`.
    pub fn negotiate(&mut self, features: u64) {
        for status in [0, 1, 3] {
            self.write_register(reg::VIRTIO_MMIO_STATUS, status);
        }
        for (select, half) in (0..).zip(halves(features)) {
            self.write_register(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.write_register(reg::VIRTIO_MMIO_DRIVER_FEATURES, half);
        }
        self.write_register(reg::VIRTIO_MMIO_STATUS, 11);
    }

    /// Takes the device from reset to `DRIVER_OK` with all its queues, which are empty.
    pub fn activate(&mut self, features: u64) {
        let memory = Arc::clone(&self.memory);
        self.activate_with(features, |index| {
            let queue = queue_at(MEMORY_START + u64::from(index) * QUEUE_STRIDE, QUEUE_SIZE);
            for ring in [queue.avail_ring, queue.used_ring] {
                memory.map().write_obj(0_u32, GuestAddress(ring)).unwrap();
            }
            queue
        });
    }

    /// Takes the device from reset to `DRIVER_OK` with the queues that `queue` returns by index.
    pub fn activate_with(&mut self, features: u64, mut queue: impl FnMut(u32) -> QueueState) {
        self.negotiate(features | VERSION_1);
        self.queues.clear();
        for index in 0.. {
            self.write_register(reg::VIRTIO_MMIO_QUEUE_SEL, index);
            if self.read_register(reg::VIRTIO_MMIO_QUEUE_NUM_MAX) == 0 {
                break;
            }
            let queue = queue(index);
            self.write_register(reg::VIRTIO_MMIO_QUEUE_NUM, queue.size.into());
            for (register, address) in [
                (reg::VIRTIO_MMIO_QUEUE_DESC_LOW, queue.desc_table),
                (reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, queue.avail_ring),
                (reg::VIRTIO_MMIO_QUEUE_USED_LOW, queue.used_ring),
            ] {
                let [low, high] = halves(address);
                self.write_register(register, low);
                self.write_register(register + 4, high);
            }
            self.write_register(reg::VIRTIO_MMIO_QUEUE_READY, 1);
            self.queues.push(queue);
        }
        self.write_register(reg::VIRTIO_MMIO_STATUS, 15);
    }

    pub fn store(&self, address: u64, value: impl ByteValued) {
        self.memory.map().write_obj(value, GuestAddress(address)).unwrap();
    }

    pub fn load<T: ByteValued>(&self, address: u64) -> T {
        self.memory.map().read_obj(GuestAddress(address)).unwrap()
    }

    /// Adds a request to a queue without a notification. Returns the addresses of its buffers.
    pub fn add_request(&mut self, index: usize, buffers: &[Buffer]) -> Vec<u64> {
        let queue = self.queues[index];
        let first = queue.next_avail;
        let end = first + u16::try_from(buffers.len()).unwrap();
        let mut addresses = Vec::new();
        for (slot, buffer) in (first..).zip(buffers) {
            if self.next_buffer_address > MEMORY_START + MEMORY_SIZE - 0x20_0000 {
                self.next_buffer_address = BUFFERS_START;
            }
            let address = self.next_buffer_address;
            let (length, direction) = match buffer {
                Buffer::Out(bytes) => {
                    let map = self.memory.map();
                    map.write_slice(bytes, GuestAddress(address)).unwrap();
                    (u32::try_from(bytes.len()).unwrap(), 0)
                }
                Buffer::In(length) => (*length, DESC_F_WRITE),
            };
            self.next_buffer_address += u64::from(length).next_multiple_of(64) + 64;
            let more = if slot + 1 == end { 0 } else { DESC_F_NEXT };
            let descriptor = queue.desc_table + u64::from(slot) * 16;
            self.store(descriptor, address);
            self.store(descriptor + 8, length);
            self.store(descriptor + 12, [direction | more, slot + 1]);
            addresses.push(address);
        }
        let available: u16 = self.load(queue.avail_ring + 2);
        self.store(queue.avail_ring + 4 + u64::from(available % queue.size) * 2, first);
        self.store(queue.avail_ring + 2, available.wrapping_add(1));
        // Tests have few requests in flight: descriptors are reused without a check.
        self.queues[index].next_avail = if end + 4 >= queue.size { 0 } else { end };
        addresses
    }

    pub fn notify(&mut self, index: usize) {
        self.write_register(reg::VIRTIO_MMIO_QUEUE_NOTIFY, u32::try_from(index).unwrap());
    }

    /// Waits for the next used chain and returns the number of bytes written to it.
    pub fn wait_used(&mut self, index: usize) -> u32 {
        wait_until("a used chain", || self.has_used(index));
        let queue = &mut self.queues[index];
        let slot = u64::from(queue.next_used % queue.size);
        queue.next_used = queue.next_used.wrapping_add(1);
        let entry = queue.used_ring + 4 + slot * 8;
        self.load(entry + 4)
    }

    pub fn has_used(&self, index: usize) -> bool {
        let queue = &self.queues[index];
        self.load::<u16>(queue.used_ring + 2) != queue.next_used
    }

    /// Adds a request and waits for it. Returns the contents of its device-writable buffers and the
    /// number of bytes that the device reports as written.
    pub fn request(&mut self, index: usize, buffers: &[Buffer]) -> (Vec<Vec<u8>>, u32) {
        let addresses = self.add_request(index, buffers);
        self.notify(index);
        let written = self.wait_used(index);
        let answers = addresses.iter().zip(buffers).filter_map(|(address, buffer)| match buffer {
            Buffer::Out(_) => None,
            Buffer::In(length) => Some(self.read_bytes(*address, *length)),
        });
        (answers.collect(), written)
    }

    pub fn read_bytes(&self, address: u64, length: u32) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.memory.map().read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    /// Waits until the device has set `DEVICE_NEEDS_RESET`.
    pub fn wait_needs_reset(&mut self) {
        wait_until("DEVICE_NEEDS_RESET", || self.read_register(reg::VIRTIO_MMIO_STATUS) & 64 != 0);
    }
}

fn halves(value: u64) -> [u32; 2] {
    [value, value >> 32].map(|half| u32::try_from(half & 0xffff_ffff).unwrap())
}
