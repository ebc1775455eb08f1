// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that means harm: it lays out queues, descriptors and data in its memory as the bytes say,
//! has the device work on them, and changes them in between.
//!
//! Bytes that mean nothing in particular seldom make a request that gets past the first check. So
//! most of a queue is as a driver makes it, and each part may be something else.

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use granule_types::units::{Bytes, GuestAddress};
use granule_vmm::{
    devices::virtio::{Interrupt, Queue, QueueConfig, Queues, VirtioDevice},
    memory::{GuestMemory, GuestRam, HostPages, Plan},
};
use vm_memory::Bytes as _;
use vmm_sys_util::eventfd::EventFd;

/// Three pieces of memory: two that touch, and one behind a hole.
const PIECES: [(u64, u64); 3] = [
    (START, 0x2_0000),
    (START + 0x2_0000, 0x2_0000),
    (START + 0x8_0000, 0x1_0000),
];
/// Its first byte.
pub const START: u64 = 0x4000_0000;
const END: u64 = START + 0x9_0000;
/// Each queue has its descriptors here, its queues behind them.
const QUEUE_AREA: u64 = 0x4000;
const BUFFERS: u64 = START + 0x1_0000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A guest's memory, made once for a thread and cleared for each run.
///
/// # Panics
/// The host has none to give.
#[must_use]
pub fn memory() -> Arc<GuestMemory> {
    thread_local! {
        static MEMORY: Arc<GuestMemory> = make();
    }
    let memory = MEMORY.with(Arc::clone);
    for (start, size) in PIECES {
        let zeros = vec![0; usize::try_from(size).unwrap_or(0)];
        let place = vm_memory::GuestAddress(start);
        memory
            .map()
            .write_slice(&zeros, place)
            .expect("it is there");
    }
    memory
}

fn make() -> Arc<GuestMemory> {
    let host = HostPages::of_this_host().expect("the host tells its pages");
    let rams = PIECES.map(|(start, size)| {
        let backing = "anonymous".parse().expect("a backing");
        let plan = Plan::new(backing, &host).expect("small pages");
        GuestRam::new(plan, &host, GuestAddress(start), Bytes(size), false).expect("memory")
    });
    Arc::new(GuestMemory::new(rams.into()).expect("pieces that do not overlap"))
}

/// A device with its queues, and a guest that uses it.
pub(crate) struct Guest<'a, 'b, D> {
    pub device: D,
    memory: Arc<GuestMemory>,
    interrupt: Arc<Interrupt>,
    u: &'a mut Unstructured<'b>,
    queues: Vec<QueueConfig>,
}

impl<'a, 'b, D: VirtioDevice> Guest<'a, 'b, D> {
    pub fn new(device: D, u: &'a mut Unstructured<'b>) -> Result<Self> {
        let line = EventFd::new(libc::EFD_NONBLOCK).expect("an event");
        Ok(Self {
            device,
            memory: memory(),
            interrupt: Arc::new(Interrupt::new(line)),
            u,
            queues: Vec::new(),
        })
    }

    /// Lives of the device, one after the other, until the bytes end. `host` does something at the
    /// host's end of the device.
    pub fn live(
        &mut self,
        mut host: impl FnMut(&mut D, &mut Unstructured<'b>) -> Result<()>,
    ) -> Result<()> {
        while !self.u.is_empty() {
            let mut queues = match self.set_up()? {
                Some(queues) => queues,
                None => continue,
            };
            while !self.u.is_empty() {
                let count = self.queues.len().max(1);
                let done = match self.u.int_in_range(0..=9u8)? {
                    0..=3 => {
                        let queue = self.u.choose_index(count)?;
                        self.device.process_queue(queue, &mut queues)
                    }
                    4 if self.device.backend_fd().is_some() => {
                        self.device.process_backend(&mut queues)
                    }
                    5 => {
                        self.poke()?;
                        Ok(())
                    }
                    6 => {
                        host(&mut self.device, self.u)?;
                        Ok(())
                    }
                    7 => {
                        let config = self.device.config().clone();
                        let (at, mut data) = (self.u.arbitrary::<u16>()?, [0; 8]);
                        config.read(at.into(), &mut data);
                        Ok(())
                    }
                    8 if self.u.ratio(1, 4)? => break,
                    _ => {
                        let queue = self.u.choose_index(count)?;
                        self.request(queue)?;
                        Ok(())
                    }
                };
                if done.is_err() {
                    // The device stops until it is reset.
                    break;
                }
            }
            self.device.reset();
        }
        Ok(())
    }

    /// From reset to `DRIVER_OK`, if it comes to that.
    fn set_up(&mut self) -> Result<Option<Queues>> {
        let features = self.device.features() & self.u.arbitrary::<u64>()?;
        let event_idx = self.u.arbitrary()?;
        let sizes = self.device.queue_sizes().to_vec();
        self.queues.clear();
        let mut queues: Vec<Option<Queue>> = Vec::new();
        for (index, most) in (0..).zip(sizes) {
            let area = START + index * QUEUE_AREA;
            let mut setup = QueueConfig {
                size: u32::from(most).min(1 << self.u.int_in_range(0..=8)?),
                ready: true,
                descriptors: area,
                available: area + 0x2000,
                used: area + 0x3000,
                ..QueueConfig::new(most)
            };
            match self.u.int_in_range(0..=31u8)? {
                0 => setup.size = self.u.arbitrary()?,
                1 => setup.descriptors = self.address()?,
                2 => setup.available = self.address()?,
                3 => setup.used = self.address()?,
                4 => setup.ready = false,
                _ => {}
            }
            self.queues.push(setup);
            if !setup.ready {
                queues.push(None);
                continue;
            }
            let kick = Arc::new(EventFd::new(libc::EFD_NONBLOCK).expect("an event"));
            match setup.ring(event_idx, &self.memory, &kick, &self.interrupt) {
                Ok(ring) => queues.push(Some(ring)),
                Err(_) => return Ok(None),
            }
        }
        let mut queues = Queues::new(queues);
        Ok(match self.device.activate(features, &mut queues) {
            Ok(()) => Some(queues),
            Err(_) => None,
        })
    }

    /// An address in memory, at its edges, or anywhere.
    fn address(&mut self) -> Result<u64> {
        Ok(match self.u.int_in_range(0..=15u8)? {
            0 => self.u.arbitrary()?,
            1 => END - u64::from(self.u.arbitrary::<u8>()?),
            2 => START + 0x2_0000 - u64::from(self.u.arbitrary::<u8>()?),
            3 => START + 0x4_0000 - u64::from(self.u.arbitrary::<u8>()?),
            4 => START + u64::from(self.u.arbitrary::<u16>()?),
            _ => BUFFERS + u64::from(self.u.arbitrary::<u8>()?) * 512,
        })
    }

    fn length(&mut self) -> Result<u32> {
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

    /// Puts a chain of descriptors into a queue, mostly as a driver would.
    fn request(&mut self, queue: usize) -> Result<()> {
        let Some(setup) = self.queues.get(queue).copied() else {
            return Ok(());
        };
        let size = setup.size.clamp(1, 256);
        let first = self.u.int_in_range(0..=size - 1)?;
        let count = self.u.int_in_range(1..=6u32)?;
        let readable = self.u.int_in_range(0..=count)?;
        for index in 0..count {
            let address = self.address()?;
            if index < readable {
                self.fill(address)?;
            }
            let length = self.length()?;
            let mut flags = if index < readable { 0 } else { WRITE };
            if index + 1 < count {
                flags |= NEXT;
            }
            let mut next = (first + index + 1) % size;
            match self.u.int_in_range(0..=31u8)? {
                0 => flags = self.u.arbitrary()?,
                1 => next = self.u.arbitrary::<u16>()?.into(),
                2 | 3 => flags |= INDIRECT,
                _ => {}
            }
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(length.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            let [low, high, ..] = next.to_le_bytes();
            bytes.extend([low, high]);
            let slot = u64::from((first + index) % size);
            self.write(setup.descriptors.wrapping_add(slot * 16), &bytes);
        }
        let available = vm_memory::GuestAddress(setup.available.wrapping_add(2));
        let index: u16 = self.memory.map().read_obj(available).unwrap_or(0);
        let slot = u64::from(index) % u64::from(size);
        let [low, high, ..] = first.to_le_bytes();
        let entry = setup.available.wrapping_add(4 + slot * 2);
        self.write(entry, &[low, high]);
        let next = match self.u.int_in_range(0..=31u8)? {
            0 => self.u.arbitrary()?,
            _ => index.wrapping_add(1),
        };
        self.write(available.0, &next.to_le_bytes());
        Ok(())
    }

    /// What stands at the start of a buffer: the bytes' own, or a header like the disk's.
    fn fill(&mut self, address: u64) -> Result<()> {
        let mut bytes = [0; 16];
        match self.u.arbitrary()? {
            true => {
                bytes[0] = self.u.int_in_range(0..=15)?;
                bytes[8] = self.u.arbitrary()?;
                bytes[12] = self.u.int_in_range(0..=1)?;
            }
            false => self.u.fill_buffer(&mut bytes)?,
        }
        self.write(address, &bytes);
        Ok(())
    }

    /// Writes anywhere.
    fn poke(&mut self) -> Result<()> {
        let address = match self.u.arbitrary()? {
            true => START + u64::from(self.u.arbitrary::<u16>()?),
            false => self.address()?,
        };
        let bytes: [u8; 8] = self.u.arbitrary()?;
        self.write(address, &bytes);
        Ok(())
    }

    /// A write of the guest's; where no memory is, none.
    fn write(&self, address: u64, bytes: &[u8]) {
        let place = vm_memory::GuestAddress(address);
        let _ = self.memory.map().write_slice(bytes, place);
    }
}
