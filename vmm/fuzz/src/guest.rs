// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hostile guest: writes queues, descriptors and data to its memory as the input bytes determine,
//! makes the device process them, and changes them between these steps.
//!
//! Random bytes alone seldom pass the first check of a request. The guest therefore writes most of
//! a queue as a driver does, and may replace each part by random values.

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use granule_types::units::{Bytes, GuestAddress};
use granule_vmm::{
    devices::virtio::{DeviceProperties, Interrupt, Queue, QueueState, VirtioDevice},
    memory::{BackingPlan, GuestMemory, GuestRam, HostPages, RamOptions},
};
use vm_memory::Bytes as _;
use vmm_sys_util::eventfd::EventFd;

/// Memory regions: two adjacent ones, and one after a gap.
const REGIONS: [(u64, u64); 3] = [
    (MEMORY_START, 0x2_0000),
    (MEMORY_START + 0x2_0000, 0x2_0000),
    (MEMORY_START + 0x8_0000, 0x1_0000),
];
const MEMORY_START: u64 = 0x4000_0000;
const MEMORY_END: u64 = MEMORY_START + 0x9_0000;
/// Distance between queues; the rings follow the descriptor table.
const QUEUE_STRIDE: u64 = 0x4000;
const BUFFERS_START: u64 = MEMORY_START + 0x1_0000;

const DESC_F_NEXT: u16 = 1;
const DESC_F_WRITE: u16 = 2;
const DESC_F_INDIRECT: u16 = 4;

/// Returns the guest memory of this thread, filled with zeros.
pub fn zeroed_memory() -> Arc<GuestMemory> {
    thread_local! {
        static GUEST_MEMORY: Arc<GuestMemory> = map_regions();
    }
    let memory = GUEST_MEMORY.with(Arc::clone);
    for (start, size) in REGIONS {
        let zeros = vec![0; usize::try_from(size).unwrap_or(0)];
        let address = GuestAddress(start);
        memory.map().write_slice(&zeros, address).expect("mapped memory");
    }
    memory
}

pub fn event() -> EventFd {
    EventFd::new(libc::EFD_NONBLOCK).expect("an event file descriptor")
}

fn map_regions() -> Arc<GuestMemory> {
    let host = HostPages::of_this_host().expect("the page sizes of the host");
    let rams = REGIONS.map(|(start, size)| {
        let backing = "anonymous".parse().expect("a backing");
        let plan = BackingPlan::new(backing, &host).expect("small pages");
        let options = RamOptions::default();
        GuestRam::new(plan, &host, GuestAddress(start), Bytes(size), options).expect("memory")
    });
    Arc::new(GuestMemory::new(rams.into()).expect("disjoint regions"))
}

/// Hostile guest with the device that it uses and the queues that it has configured.
pub struct HostileGuest<'a> {
    device: Box<dyn VirtioDevice>,
    properties: DeviceProperties,
    memory: Arc<GuestMemory>,
    interrupt: Arc<Interrupt>,
    u: Unstructured<'a>,
    queues: Vec<QueueState>,
}

impl<'a> HostileGuest<'a> {
    pub fn new(device: impl VirtioDevice + 'static, u: Unstructured<'a>) -> Self {
        Self {
            properties: device.properties(),
            device: Box::new(device),
            memory: zeroed_memory(),
            interrupt: Arc::new(Interrupt::new(event())),
            u,
            queues: Vec::new(),
        }
    }

    /// Activates, uses and resets the device until the input ends. `host` acts on its backend.
    pub fn run(&mut self, mut host: impl FnMut(&mut Unstructured<'a>) -> Result<()>) -> Result<()> {
        while !self.u.is_empty() {
            let Some(mut queues) = self.activate()? else {
                continue;
            };
            while !self.u.is_empty() {
                let count = self.queues.len().max(1);
                let mut result = Ok(());
                match self.u.int_in_range(0..=9u8)? {
                    0..=3 => {
                        let index = self.u.choose_index(count)?;
                        if let Some(Some(queue)) = queues.get_mut(index) {
                            result = self.device.process_queue(index, queue);
                        }
                    }
                    4 if !self.device.backend_fds().is_empty() => {
                        result = self.device.process_backend(&mut queues);
                    }
                    5 => self.write_at_arbitrary_address()?,
                    6 => host(&mut self.u)?,
                    7 => {
                        let offset = self.u.arbitrary::<u16>()?;
                        self.properties.config.read(offset.into(), &mut [0; 8]);
                    }
                    8 if self.u.ratio(1, 4)? => break,
                    _ => {
                        let queue = self.u.choose_index(count)?;
                        self.add_request(queue)?;
                    }
                }
                if result.is_err() {
                    // The device has stopped until its reset.
                    break;
                }
            }
            self.device.reset();
        }
        Ok(())
    }

    /// Takes the device from reset to `DRIVER_OK`. Returns `None` if the device refuses.
    fn activate(&mut self) -> Result<Option<Vec<Option<Queue>>>> {
        let features = self.properties.features & self.u.arbitrary::<u64>()?;
        let event_idx_enabled = self.u.arbitrary()?;
        self.queues.clear();
        let mut queues = Vec::new();
        for (index, &max_size) in (0..).zip(self.properties.queue_sizes) {
            let area = MEMORY_START + index * QUEUE_STRIDE;
            let mut config = QueueState {
                max_size,
                size: max_size.min(1 << self.u.int_in_range(0..=8)?),
                ready: true,
                event_idx_enabled,
                desc_table: area,
                avail_ring: area + 0x2000,
                used_ring: area + 0x3000,
                ..QueueState::default()
            };
            match self.u.int_in_range(0..=31u8)? {
                0 => config.size = u16::try_from(self.u.arbitrary::<u32>()?).unwrap_or(0),
                1 => config.desc_table = self.arbitrary_address()?,
                2 => config.avail_ring = self.arbitrary_address()?,
                3 => config.used_ring = self.arbitrary_address()?,
                4 => config.ready = false,
                _ => {}
            }
            self.queues.push(config);
            if !config.ready {
                queues.push(None);
                continue;
            }
            match Queue::new(config, &self.memory, &Arc::new(event()), &self.interrupt) {
                Ok(queue) => queues.push(Some(queue)),
                Err(_) => return Ok(None),
            }
        }
        let activated = self.device.activate(features, &mut queues);
        Ok(activated.is_ok().then_some(queues))
    }

    /// Returns an address in memory, near the end of a region, or a random one.
    fn arbitrary_address(&mut self) -> Result<u64> {
        Ok(match self.u.int_in_range(0..=15u8)? {
            0 => self.u.arbitrary()?,
            1 => MEMORY_END - u64::from(self.u.arbitrary::<u8>()?),
            2 => MEMORY_START + 0x2_0000 - u64::from(self.u.arbitrary::<u8>()?),
            3 => MEMORY_START + 0x4_0000 - u64::from(self.u.arbitrary::<u8>()?),
            4 => MEMORY_START + u64::from(self.u.arbitrary::<u16>()?),
            _ => BUFFERS_START + u64::from(self.u.arbitrary::<u8>()?) * 512,
        })
    }

    fn arbitrary_length(&mut self) -> Result<u32> {
        Ok(match self.u.int_in_range(0..=7u8)? {
            0 => self.u.arbitrary()?,
            1 => 0,
            2 => self.u.arbitrary::<u16>()?.into(),
            3 => 1,
            4 => 16,
            5 => 4096,
            _ => self.u.arbitrary::<u8>()?.into(),
        })
    }

    /// Adds a chain of descriptors to a queue, mostly as a driver does.
    fn add_request(&mut self, queue: usize) -> Result<()> {
        let Some(config) = self.queues.get(queue).copied() else {
            return Ok(());
        };
        let size = u32::from(config.size.clamp(1, 256));
        let first = self.u.int_in_range(0..=size - 1)?;
        let count = self.u.int_in_range(1..=6u32)?;
        let readable = self.u.int_in_range(0..=count)?;
        for index in 0..count {
            let address = self.arbitrary_address()?;
            if index < readable {
                self.fill_buffer(address)?;
            }
            let length = self.arbitrary_length()?;
            let mut flags = if index < readable { 0 } else { DESC_F_WRITE };
            if index + 1 < count {
                flags |= DESC_F_NEXT;
            }
            let mut next = (first + index + 1) % size;
            match self.u.int_in_range(0..=31u8)? {
                0 => flags = self.u.arbitrary()?,
                1 => next = self.u.arbitrary::<u16>()?.into(),
                2 | 3 => flags |= DESC_F_INDIRECT,
                _ => {}
            }
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(length.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend(&next.to_le_bytes()[..2]);
            let slot = u64::from((first + index) % size);
            self.write_memory(config.desc_table.wrapping_add(slot * 16), &bytes);
        }
        let available = GuestAddress(config.avail_ring.wrapping_add(2));
        let index: u16 = self.memory.map().read_obj(available).unwrap_or(0);
        let slot = u64::from(index) % u64::from(size);
        let entry = config.avail_ring.wrapping_add(4 + slot * 2);
        self.write_memory(entry, &first.to_le_bytes()[..2]);
        let next = match self.u.int_in_range(0..=31u8)? {
            0 => self.u.arbitrary()?,
            _ => index.wrapping_add(1),
        };
        self.write_memory(available.0, &next.to_le_bytes());
        Ok(())
    }

    /// Writes the start of a buffer: random bytes or a block request header.
    fn fill_buffer(&mut self, address: u64) -> Result<()> {
        let mut bytes = [0; 16];
        match self.u.arbitrary()? {
            true => {
                bytes[0] = self.u.int_in_range(0..=15)?;
                bytes[8] = self.u.arbitrary()?;
                bytes[12] = self.u.int_in_range(0..=1)?;
            }
            false => self.u.fill_buffer(&mut bytes)?,
        }
        self.write_memory(address, &bytes);
        Ok(())
    }

    fn write_at_arbitrary_address(&mut self) -> Result<()> {
        let address = match self.u.arbitrary()? {
            true => MEMORY_START + u64::from(self.u.arbitrary::<u16>()?),
            false => self.arbitrary_address()?,
        };
        let bytes: [u8; 8] = self.u.arbitrary()?;
        self.write_memory(address, &bytes);
        Ok(())
    }

    /// Writes to guest memory; addresses outside of it are ignored.
    fn write_memory(&self, address: u64, bytes: &[u8]) {
        let _ = self.memory.map().write_slice(bytes, GuestAddress(address));
    }
}
