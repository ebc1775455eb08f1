// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Balloon (virtio 1.2, section 5.5): returns unused guest memory to the host.
//!
//! When the host sets a target ([`BalloonHandle::set_target`]), the guest allocates that many pages
//! and adds them to the inflate queue. With free-page reporting (section 5.5.6.9), the guest
//! reports free pages in ranges of 2 MiB or more, which preserves huge pages. In both cases the
//! device discards the backing of the pages, which then read as zeros. The guest may deflate the
//! balloon when it runs out of memory.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use granule_types::units::{Bytes, GuestAddress};
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

use super::{
    ConfigSpace, DescriptorChain, DeviceError, DeviceProperties, Direction, Queue, VirtioDevice,
    feature_bits,
};

const INFLATE_QUEUE: usize = 0;
/// Index of `reporting_vq` (section 5.5.2) in a device without `statsq`.
const REPORTING_QUEUE: usize = 2;

// Features of section 5.5.3, which the bindings lack.
const VIRTIO_BALLOON_F_DEFLATE_ON_OOM: u32 = 2;
const VIRTIO_BALLOON_F_REPORTING: u32 = 5;

/// Size of a balloon page, independent of the guest's page size (section 5.5.6).
const PAGE_SIZE: u64 = 4096;
/// Offset of `num_pages`, the target, in the configuration space.
const NUM_PAGES_OFFSET: usize = 0;
/// Offset of `actual`, the size that the guest reports, in the configuration space.
const ACTUAL_OFFSET: usize = 4;
/// Maximum bytes of page numbers per request; Linux sends 256 numbers. The limit bounds the number
/// of system calls for a request, whose buffers may overlap.
const MAX_PAGE_NUMBER_BYTES: usize = 1 << 16;

/// Balloon device.
#[derive(Debug)]
pub struct Balloon {
    handle: Arc<BalloonHandle>,
}

/// Handle that controls a balloon through the state shared with the device.
#[derive(Debug)]
pub struct BalloonHandle {
    config: ConfigSpace,
    reported_bytes: AtomicU64,
    inflated_bytes: AtomicU64,
}

impl Default for Balloon {
    /// Creates an empty balloon.
    fn default() -> Self {
        let handle = BalloonHandle {
            // Target, actual size, free-page hinting command, poison value.
            config: ConfigSpace::new(vec![0; 16], ACTUAL_OFFSET..ACTUAL_OFFSET + 4),
            reported_bytes: AtomicU64::new(0),
            inflated_bytes: AtomicU64::new(0),
        };
        Self { handle: Arc::new(handle) }
    }
}

impl Balloon {
    /// Returns a handle, which stays valid while the worker owns the device.
    pub fn handle(&self) -> Arc<BalloonHandle> {
        Arc::clone(&self.handle)
    }
}

impl BalloonHandle {
    /// Sets the target size, which the guest reaches later or not at all;
    /// [`BalloonHandle::actual_size`] returns the size that it reports. Returns the target in whole pages.
    pub fn set_target(&self, bytes: Bytes) -> Bytes {
        let pages = u32::try_from(bytes.0 / PAGE_SIZE).unwrap_or(u32::MAX);
        self.config.update(NUM_PAGES_OFFSET, &pages.to_le_bytes());
        Bytes(u64::from(pages) * PAGE_SIZE)
    }

    /// Returns the target size.
    pub fn target(&self) -> Bytes {
        Bytes(u64::from(self.config.read_u32(NUM_PAGES_OFFSET as u64)) * PAGE_SIZE)
    }

    /// Returns the size of the balloon as the guest reports it.
    pub fn actual_size(&self) -> Bytes {
        Bytes(u64::from(self.config.read_u32(ACTUAL_OFFSET as u64)) * PAGE_SIZE)
    }

    /// Returns the number of bytes discarded through free-page reporting.
    pub fn reported_size(&self) -> Bytes {
        Bytes(self.reported_bytes.load(Ordering::Relaxed))
    }

    /// Returns the number of bytes discarded through the inflate queue.
    pub fn inflated_size(&self) -> Bytes {
        Bytes(self.inflated_bytes.load(Ordering::Relaxed))
    }
}

impl VirtioDevice for Balloon {
    fn properties(&self) -> DeviceProperties {
        DeviceProperties {
            device_type: VIRTIO_ID_BALLOON,
            features: feature_bits(&[VIRTIO_BALLOON_F_DEFLATE_ON_OOM, VIRTIO_BALLOON_F_REPORTING]),
            queue_sizes: &[128, 128, 64],
            config: self.handle.config.clone(),
        }
    }

    fn process_queue(&mut self, index: usize, queue: &mut Queue) -> Result<(), DeviceError> {
        let handle = &self.handle;
        queue.serve_available(|chain| {
            if index == INFLATE_QUEUE {
                if chain.length(Direction::Readable) > MAX_PAGE_NUMBER_BYTES {
                    return Err(DeviceError::Request("it names more than 16384 pages"));
                }
                handle.inflated_bytes.fetch_add(inflate(chain), Ordering::Relaxed);
            } else if index == REPORTING_QUEUE {
                // The buffers themselves are the free memory.
                for &(start, length) in chain.buffers(Direction::Writable) {
                    let discarded = chain.memory.discard(start, Bytes(length as u64)).0;
                    handle.reported_bytes.fetch_add(discarded, Ordering::Relaxed);
                }
            }
            // Deflated pages need no action: the next guest access faults them in.
            Ok(0)
        })
    }
}

/// Discards the pages listed in the request, consecutive pages in one call. Returns the number of
/// bytes discarded.
fn inflate(chain: &DescriptorChain) -> u64 {
    let mut bytes = vec![0; chain.length(Direction::Readable)];
    let count = chain.read(0, &mut bytes);
    let frame_numbers = bytes[..count].as_chunks().0.iter();
    let pages: Vec<u64> = frame_numbers.map(|number| u32::from_le_bytes(*number).into()).collect();
    let runs = pages.chunk_by(|page, next| page + 1 == *next);
    let discard = |run: &[u64]| {
        let size = Bytes(run.len() as u64 * PAGE_SIZE);
        chain.memory.discard(GuestAddress(run[0] * PAGE_SIZE), size).0
    };
    runs.map(discard).sum()
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes as _;

    use super::*;
    use crate::devices::virtio::{
        feature_bit,
        testing::{Buffer, Driver, MEMORY_START},
    };

    const TEST_PAGES_START: u64 = MEMORY_START + 0x80_0000;

    /// Returns the driver of a balloon in memory filled with 7, and the balloon's handle.
    fn start_driver(features: u64) -> (Driver, Arc<BalloonHandle>) {
        let balloon = Box::new(Balloon::default());
        let handle = balloon.handle();
        let driver = Driver::start(balloon, features);
        driver.memory.map().write_slice(&[7; 1 << 16], GuestAddress(TEST_PAGES_START)).unwrap();
        (driver, handle)
    }

    fn first_byte(driver: &Driver, page: u64) -> u8 {
        driver.load(TEST_PAGES_START + page * PAGE_SIZE)
    }

    #[test]
    fn only_inflated_pages_are_discarded() {
        let (mut driver, handle) = start_driver(0);
        let pages =
            [1, 2, 3, 7].map(|page| u32::try_from(TEST_PAGES_START / PAGE_SIZE + page).unwrap());
        let numbers = pages.into_iter().chain([u32::MAX, 0]);

        driver.request(0, &[Buffer::Out(numbers.flat_map(u32::to_le_bytes).collect())]);

        let first_bytes: Vec<u8> = (0..9).map(|page| first_byte(&driver, page)).collect();
        assert_eq!(first_bytes, [7, 0, 0, 0, 7, 7, 7, 0, 7]);
        assert_eq!(handle.inflated_size(), Bytes(4 * PAGE_SIZE));
    }

    #[test]
    fn reported_pages_are_discarded() {
        let (mut driver, handle) = start_driver(feature_bit(VIRTIO_BALLOON_F_REPORTING));
        driver.add_request(2, &[Buffer::In(1 << 15)]);
        driver.store(driver.queues[2].desc_table, TEST_PAGES_START);

        driver.notify(2);
        driver.wait_used(2);

        assert_eq!((first_byte(&driver, 0), first_byte(&driver, 8)), (0, 7));
        assert_eq!(handle.reported_size(), Bytes(1 << 15));
    }

    #[test]
    fn target_and_actual_size_are_in_the_configuration_space() {
        let (mut driver, handle) = start_driver(0);

        let stored = handle.set_target(Bytes(10 * PAGE_SIZE + 5));
        let target = driver.read_register(0x100);
        driver.write_register(0x104, 9);

        assert_eq!((target, driver.read_register(0x60)), (10, 2));
        assert_eq!(handle.actual_size(), Bytes(9 * PAGE_SIZE));
        assert_eq!((stored, handle.target()), (Bytes(10 * PAGE_SIZE), Bytes(10 * PAGE_SIZE)));
    }
}
