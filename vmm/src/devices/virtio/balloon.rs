// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A balloon (virtio 1.2, section 5.5): memory that the guest does not need goes back to the host.
//!
//! Two ways lead there. The host asks for a number of pages, the guest takes them from its own
//! and names them ([`BalloonHandle::set_target`]); or the guest reports by itself what is free for the
//! moment (free-page reporting, section 5.5.6.9), in pieces of 2 MiB and more, which costs no
//! huge page. Either way the memory behind a page is dropped, and the guest gets zeros when it
//! touches the page again. The guest may take pages out of the balloon when it runs short.

use std::{
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use granule_types::units::{Bytes, GuestAddress};
use parking_lot::Mutex;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vmm_sys_util::eventfd::EventFd;

use super::{ConfigSpace, DescriptorChain, DeviceError, Direction, Queues, VirtioDevice, bit};
use crate::{memory::GuestMemory, scoped_thread::borrow_event};

const INFLATE: usize = 0;
const DEFLATE: usize = 1;

// Section 5.5.3; not in the bindings.
const F_STATS: u32 = 1;
const F_DEFLATE_ON_OOM: u32 = 2;
const F_REPORTING: u32 = 5;

/// Pages are named in this unit, whatever the guest's page is (section 5.5.6).
const PAGE: u64 = 4096;

/// Where the configuration space holds what the host wants and what the guest has given.
const WANTED: usize = 0;
const ACTUAL: usize = 4;

/// Bytes of page numbers in one request; Linux gives 256 numbers. Buffers may overlap, and each
/// number may cost a system call.
const MOST_NUMBERS: usize = 1 << 16;

/// Bytes of one entry of the statistics: a tag and a value.
const ENTRY: usize = 10;

/// What the guest says of its memory: values by tag (section 5.5.6.3), in bytes or counts.
pub type Statistics = Vec<(u16, u64)>;

/// The device.
#[derive(Debug)]
pub struct Balloon {
    shared: Arc<Shared>,
    /// What the queues behind the first two are for, in order.
    others: Vec<u32>,
    /// The buffer by which the next statistics are asked for.
    statistics: Option<u16>,
}

#[derive(Debug)]
struct Shared {
    config: ConfigSpace,
    ask: EventFd,
    statistics: Mutex<Statistics>,
    reported: AtomicU64,
    inflated: AtomicU64,
}

/// Controls a balloon.
#[derive(Debug, Clone)]
pub struct BalloonHandle(Arc<Shared>);

impl Balloon {
    /// An empty balloon.
    ///
    /// # Errors
    /// No event file descriptor can be had.
    pub fn new() -> std::io::Result<Self> {
        let shared = Shared {
            // Wanted, actual, the command of free-page hinting, the poison.
            config: ConfigSpace::new(vec![0; 16], ACTUAL..ACTUAL + 4),
            ask: EventFd::new(libc::EFD_NONBLOCK)?,
            statistics: Mutex::default(),
            reported: AtomicU64::new(0),
            inflated: AtomicU64::new(0),
        };
        Ok(Self {
            shared: Arc::new(shared),
            others: Vec::new(),
            statistics: None,
        })
    }

    /// Controls this balloon, also when it works in its thread.
    #[must_use]
    pub fn handle(&self) -> BalloonHandle {
        BalloonHandle(Arc::clone(&self.shared))
    }

    fn take_statistics(&mut self, queue: usize, queues: &mut Queues) -> Result<(), DeviceError> {
        let Some(ring) = queues.get(queue) else {
            return Ok(());
        };
        while let Some(chain) = ring.pop()? {
            let mut bytes = [0; ENTRY * 32];
            let length = chain.copy_out(ring.memory(), 0, &mut bytes);
            let entries = bytes[..length].chunks_exact(ENTRY).map(|entry| {
                let (tag, value) = entry.split_at(2);
                let number =
                    |bytes: &[u8]| bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
                (
                    u16::try_from(number(tag)).unwrap_or(u16::MAX),
                    number(value),
                )
            });
            *self.shared.statistics.lock() = entries.collect();
            // The guest sends one buffer and waits; another one means it may have both back.
            if let Some(head) = self.statistics.replace(chain.head()) {
                ring.finish(head, 0)?;
                ring.announce()?;
            }
        }
        ring.listen()?;
        Ok(())
    }
}

impl BalloonHandle {
    /// Asks the guest to put that much of its memory into the balloon. It takes its time, and may
    /// refuse; [`BalloonHandle::actual`] says how far it is.
    pub fn set_target(&self, bytes: Bytes) {
        let pages = u32::try_from(bytes.0 / PAGE).unwrap_or(u32::MAX);
        self.0.config.change(WANTED, &pages.to_le_bytes());
    }

    /// What the guest says is in the balloon.
    #[must_use]
    pub fn actual(&self) -> Bytes {
        Bytes(u64::from(self.0.config.read_u32(ACTUAL)) * PAGE)
    }

    /// What was dropped since the start because the guest reported it free.
    #[must_use]
    pub fn reported(&self) -> Bytes {
        Bytes(self.0.reported.load(Ordering::Relaxed))
    }

    /// What was dropped since the start because the guest put it into the balloon.
    #[must_use]
    pub fn inflated(&self) -> Bytes {
        Bytes(self.0.inflated.load(Ordering::Relaxed))
    }

    /// The guest's latest statistics, which may be none; asks for new ones.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        // It fails only when the counter is full: then it is asked for already.
        let _ = self.0.ask.write(1);
        self.0.statistics.lock().clone()
    }
}

impl VirtioDevice for Balloon {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        bit(F_STATS) | bit(F_DEFLATE_ON_OOM) | bit(F_REPORTING)
    }

    fn queue_sizes(&self) -> &[u16] {
        &[128, 128, 16, 64]
    }

    fn config(&self) -> &ConfigSpace {
        &self.shared.config
    }

    fn activate(&mut self, features: u64, _: &mut Queues) -> Result<(), DeviceError> {
        // Queues of features that were not taken do not exist, and the next one has their number.
        let optional = [F_STATS, F_REPORTING].into_iter();
        self.others = optional.filter(|f| features & bit(*f) != 0).collect();
        Ok(())
    }

    fn process_queue(&mut self, queue: usize, queues: &mut Queues) -> Result<(), DeviceError> {
        let other = queue.checked_sub(2).and_then(|at| self.others.get(at));
        if other == Some(&F_STATS) {
            return self.take_statistics(queue, queues);
        }
        let Some(ring) = queues.get(queue) else {
            return Ok(());
        };
        let shared = &self.shared;
        ring.drain(|memory, chain| {
            match (queue, other) {
                (INFLATE, _) if chain.length(Direction::Readable) > MOST_NUMBERS => {
                    return Err(DeviceError::Request("it names more than 16384 pages"));
                }
                (INFLATE, _) => {
                    let dropped = inflate(memory, chain);
                    shared.inflated.fetch_add(dropped, Ordering::Relaxed);
                }
                // The host gives memory back when it is touched.
                (DEFLATE, _) => {}
                (_, Some(&F_REPORTING)) => {
                    // A report names what is free by where its buffers lie.
                    let buffers = chain.buffers(Direction::Writable).iter();
                    let dropped = buffers
                        .map(|(start, length)| {
                            memory
                                .discard(GuestAddress(start.0), Bytes(*length as u64))
                                .0
                        })
                        .sum();
                    shared.reported.fetch_add(dropped, Ordering::Relaxed);
                }
                _ => {}
            }
            Ok(0)
        })
    }

    fn backend_fd(&self) -> Option<BorrowedFd<'_>> {
        self.statistics
            .is_some()
            .then(|| borrow_event(&self.shared.ask))
    }

    fn process_backend(&mut self, queues: &mut Queues) -> Result<(), DeviceError> {
        // Empty when asked for once already.
        let _ = self.shared.ask.read();
        let at = self.others.iter().position(|other| *other == F_STATS);
        let ring = at.and_then(|at| queues.get(at + 2));
        if let (Some(ring), Some(head)) = (ring, self.statistics.take()) {
            ring.finish(head, 0)?;
            ring.announce()?;
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.statistics = None;
    }
}

/// Drops the pages that the guest names; those that follow one another in one piece. Says how many
/// bytes were dropped.
fn inflate(memory: &GuestMemory, chain: &DescriptorChain) -> u64 {
    let mut dropped = 0;
    let mut run: Option<(u64, u64)> = None;
    let mut end = |run: Option<(u64, u64)>| {
        if let Some((first, pages)) = run {
            let start = GuestAddress(first * PAGE);
            dropped += memory.discard(start, Bytes(pages * PAGE)).0;
        }
    };
    let mut numbers = [0; 1024];
    let mut at = 0;
    loop {
        let count = chain.copy_out(memory, at, &mut numbers);
        for number in numbers[..count].chunks_exact(4) {
            let page = number.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
            run = match run {
                Some((first, pages)) if first + pages == page => Some((first, pages + 1)),
                other => {
                    end(other);
                    Some((page, 1))
                }
            };
        }
        at += count;
        if count < numbers.len() {
            break;
        }
    }
    end(run);
    dropped
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use vm_memory::Bytes as _;

    use super::*;
    use crate::devices::virtio::testing::{Buffer, Driver, START, memory};

    const PLACE: u64 = START + 0x80_0000;

    fn fill(driver: &Driver<'_>) {
        driver
            .memory
            .write_slice(&[7; 1 << 16], vm_memory::GuestAddress(PLACE))
            .unwrap();
    }

    fn first_bytes(driver: &Driver<'_>, page: u64) -> u8 {
        let place = vm_memory::GuestAddress(PLACE + page * PAGE);
        driver.memory.read_obj(place).unwrap()
    }

    #[test]
    fn pages_put_into_the_balloon_are_dropped_and_no_others() {
        let (memory, balloon) = (memory(), Box::new(Balloon::new().unwrap()));
        let handle = balloon.handle();
        let mut driver = Driver::start(&memory, balloon, 0);
        fill(&driver);
        let pages = [1, 2, 3, 7].map(|page| u32::try_from(PLACE / PAGE + page).unwrap());
        let numbers = pages.into_iter().chain([u32::MAX, 0]);

        driver.ask(
            0,
            &[Buffer::Out(numbers.flat_map(u32::to_le_bytes).collect())],
        );

        let left: Vec<u8> = (0..9).map(|page| first_bytes(&driver, page)).collect();
        assert_eq!(left, [7, 0, 0, 0, 7, 7, 7, 0, 7]);
        assert_eq!(handle.inflated(), Bytes(4 * PAGE));
    }

    #[test]
    fn what_is_reported_free_is_dropped() {
        let (memory, balloon) = (memory(), Box::new(Balloon::new().unwrap()));
        let handle = balloon.handle();
        let mut driver = Driver::start(&memory, balloon, bit(F_REPORTING));
        fill(&driver);
        let mut free = driver.put(2, &[Buffer::In(1 << 15)]);
        let descriptor = driver.queues[2].desc_table_addr();
        driver.memory.write_obj(PLACE, descriptor).unwrap();
        free[0] = vm_memory::GuestAddress(PLACE);

        driver.kick(2);
        driver.wait(2);

        assert_eq!((first_bytes(&driver, 0), first_bytes(&driver, 8)), (0, 7));
        assert_eq!(handle.reported(), Bytes(1 << 15));
    }

    #[test]
    fn the_host_says_what_it_wants_and_the_guest_what_it_gave() {
        let (memory, balloon) = (memory(), Box::new(Balloon::new().unwrap()));
        let handle = balloon.handle();
        let mut driver = Driver::start(&memory, balloon, 0);

        handle.set_target(Bytes(10 * PAGE));
        let wanted = driver.get(0x100);
        driver.set(0x104, 9);

        assert_eq!((wanted, driver.get(0x60)), (10, 2));
        assert_eq!(handle.actual(), Bytes(9 * PAGE));
    }

    #[test]
    fn statistics_come_when_asked_for() {
        let (memory, balloon) = (memory(), Box::new(Balloon::new().unwrap()));
        let handle = balloon.handle();
        let mut driver = Driver::start(&memory, balloon, bit(F_STATS));
        let entry = |tag: u16, value: u64| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat();

        driver.put(2, &[Buffer::Out([entry(4, 1000), entry(5, 2000)].concat())]);
        driver.kick(2);
        let until = Instant::now() + Duration::from_secs(10);
        while handle.0.statistics.lock().is_empty() {
            assert!(Instant::now() < until);
        }
        let statistics = handle.statistics();

        assert_eq!(driver.wait(2), 0);
        assert_eq!(statistics, [(4, 1000), (5, 2000)]);
    }
}
