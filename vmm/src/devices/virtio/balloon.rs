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

const INFLATE: usize = 0;
/// Index of the free page reporting queue (`reporting_vq`, section 5.5.2), without `statsq`.
const REPORTING: usize = 2;

// Features of section 5.5.3, which the bindings lack.
const F_DEFLATE_ON_OOM: u32 = 2;
const F_REPORTING: u32 = 5;

/// Unit of page numbers, independent of the page size of the guest (section 5.5.6).
const PAGE: u64 = 4096;

/// Offset of the target in the configuration space.
const TARGET: usize = 0;
/// Offset of the actual size in the configuration space.
const ACTUAL: usize = 4;

/// Maximum bytes of page numbers per request; Linux sends 256 numbers. The limit bounds the number
/// of system calls for a request, whose buffers may overlap.
const MAX_NUMBERS: usize = 1 << 16;

/// Balloon device.
#[derive(Debug)]
pub struct Balloon {
    state: Arc<BalloonHandle>,
}

/// Handle that controls a balloon through the state shared with the device.
#[derive(Debug)]
pub struct BalloonHandle {
    config: ConfigSpace,
    reported: AtomicU64,
    inflated: AtomicU64,
}

impl Default for Balloon {
    /// Creates an empty balloon.
    fn default() -> Self {
        let state = BalloonHandle {
            // Target, actual size, free-page hinting command, poison value.
            config: ConfigSpace::new(vec![0; 16], ACTUAL..ACTUAL + 4),
            reported: AtomicU64::new(0),
            inflated: AtomicU64::new(0),
        };
        Self { state: Arc::new(state) }
    }
}

impl Balloon {
    /// Returns a handle, which stays valid while the worker owns the device.
    pub fn handle(&self) -> Arc<BalloonHandle> {
        Arc::clone(&self.state)
    }
}

impl BalloonHandle {
    /// Sets the balloon's target size. The guest may take time or refuse; [`BalloonHandle::actual`]
    /// returns the size reached.
    pub fn set_target(&self, bytes: Bytes) {
        let pages = u32::try_from(bytes.0 / PAGE).unwrap_or(u32::MAX);
        self.config.update(TARGET, &pages.to_le_bytes());
    }

    /// Returns the size of the balloon as the guest reports it.
    pub fn actual(&self) -> Bytes {
        Bytes(u64::from(self.config.read_u32(ACTUAL as u64)) * PAGE)
    }

    /// Returns the number of bytes discarded through free-page reporting.
    pub fn reported(&self) -> Bytes {
        Bytes(self.reported.load(Ordering::Relaxed))
    }

    /// Returns the number of bytes discarded through the inflate queue.
    pub fn inflated(&self) -> Bytes {
        Bytes(self.inflated.load(Ordering::Relaxed))
    }
}

impl VirtioDevice for Balloon {
    fn properties(&self) -> DeviceProperties {
        DeviceProperties {
            device_type: VIRTIO_ID_BALLOON,
            features: feature_bits(&[F_DEFLATE_ON_OOM, F_REPORTING]),
            queue_sizes: &[128, 128, 64],
            config: self.state.config.clone(),
        }
    }

    fn process_queue(&mut self, index: usize, queue: &mut Queue) -> Result<(), DeviceError> {
        let state = &self.state;
        queue.serve_available(|chain| {
            if index == INFLATE {
                if chain.length(Direction::Readable) > MAX_NUMBERS {
                    return Err(DeviceError::Request("it names more than 16384 pages"));
                }
                state.inflated.fetch_add(inflate(chain), Ordering::Relaxed);
            } else if index == REPORTING {
                // The buffers themselves are the free memory.
                for &(start, length) in chain.buffers(Direction::Writable) {
                    let discarded = chain.memory.discard(start, Bytes(length as u64)).0;
                    state.reported.fetch_add(discarded, Ordering::Relaxed);
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
        let size = Bytes(run.len() as u64 * PAGE);
        chain.memory.discard(GuestAddress(run[0] * PAGE), size).0
    };
    runs.map(discard).sum()
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes as _;

    use super::*;
    use crate::devices::virtio::{
        feature_bit,
        testing::{Buffer, Driver, START},
    };

    const PAGES: u64 = START + 0x80_0000;

    /// Returns the driver of a balloon, with memory that is not zero, and the balloon's handle.
    fn start(features: u64) -> (Driver, Arc<BalloonHandle>) {
        let balloon = Box::new(Balloon::default());
        let handle = balloon.handle();
        let driver = Driver::start(balloon, features);
        driver.memory.map().write_slice(&[7; 1 << 16], GuestAddress(PAGES)).unwrap();
        (driver, handle)
    }

    fn first_byte(driver: &Driver, page: u64) -> u8 {
        driver.load(PAGES + page * PAGE)
    }

    #[test]
    fn only_inflated_pages_are_discarded() {
        let (mut driver, handle) = start(0);
        let pages = [1, 2, 3, 7].map(|page| u32::try_from(PAGES / PAGE + page).unwrap());
        let numbers = pages.into_iter().chain([u32::MAX, 0]);

        driver.request(0, &[Buffer::Out(numbers.flat_map(u32::to_le_bytes).collect())]);

        let left: Vec<u8> = (0..9).map(|page| first_byte(&driver, page)).collect();
        assert_eq!(left, [7, 0, 0, 0, 7, 7, 7, 0, 7]);
        assert_eq!(handle.inflated(), Bytes(4 * PAGE));
    }

    #[test]
    fn reported_pages_are_discarded() {
        let (mut driver, handle) = start(feature_bit(F_REPORTING));
        driver.add(2, &[Buffer::In(1 << 15)]);
        driver.store(driver.queues[2].desc_table, PAGES);

        driver.notify(2);
        driver.wait_used(2);

        assert_eq!((first_byte(&driver, 0), first_byte(&driver, 8)), (0, 7));
        assert_eq!(handle.reported(), Bytes(1 << 15));
    }

    #[test]
    fn target_and_actual_size_are_in_the_configuration_space() {
        let (mut driver, handle) = start(0);

        handle.set_target(Bytes(10 * PAGE));
        let target = driver.get(0x100);
        driver.set(0x104, 9);

        assert_eq!((target, driver.get(0x60)), (10, 2));
        assert_eq!(handle.actual(), Bytes(9 * PAGE));
    }
}
