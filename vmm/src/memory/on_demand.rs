// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory that is filled from an [image](super::layers) when it is first accessed.
//!
//! All regions are registered for [faults](super::user_faults) before anything accesses them. One
//! thread answers the faults of vCPUs, devices and KVM; another one fills the other pages beside
//! them. A page is filled once, by whichever is first: the kernel refuses to fill a page that exists.
//! When all data is there, the regions are unregistered, so that the remaining pages are zero and
//! later faults are the kernel's own.
//!
//! While a region is registered, the kernel maps no transparent huge page in it, by a fault or by a
//! collapse, because that would hide missing pages. Regions with transparent huge pages are collapsed
//! at the end.

use std::{
    io,
    ops::Range,
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use granule_types::units::{Bytes, HostVirtAddr};
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};
use vmm_sys_util::eventfd::EventFd;

use super::{
    GuestMemory, GuestRam, MemoryError, PageSet,
    image::{self, file_offsets},
    layers::LayeredImage,
    user_faults::UserFaults,
};
use crate::{
    scoped_thread::{ScopedThread, borrow_event},
    stalls::StallHistogram,
};

/// Bytes that are filled at once for a fault on a page that is smaller.
const CLUSTER: u64 = 64 << 10;
/// Bytes of an order that are read and filled at once.
const CHUNK: u64 = 1 << 20;

/// Parts of an image that a guest accesses, by offset in the file: ascending and apart from each
/// other.
pub type Order = Vec<Range<u64>>;

/// Threads that fill memory. Drop the users of the memory before.
#[derive(Debug)]
pub struct OnDemand {
    /// Declared first: the thread that fills other pages ends before faults are no longer answered.
    _filler: Option<ScopedThread>,
    _handler: ScopedThread,
    source: Arc<Source>,
    is_complete: Arc<AtomicBool>,
}

/// Faults, and the image and memory that answer them.
#[derive(Debug)]
struct Source {
    faults: UserFaults,
    image: LayeredImage,
    memory: GuestMemory,
    /// Bytes that are filled for a fault, unless its page is larger.
    unit: u64,
    /// Pages of the image that faults have filled, if they are recorded. A guest can refault pages without
    /// end, so each has one bit.
    recorded: Option<Mutex<PageSet>>,
    /// Times in which faults were answered.
    fill_times: Arc<StallHistogram>,
}

impl OnDemand {
    /// Registers all memory and starts to fill it. First fills `order`, before the call returns.
    /// `fills_all` also fills the rest beside the guest, and 64K for a fault; without it, each page
    /// that is accessed takes a fault, so that all are [recorded](Self::recorded). `on_failure` is
    /// called if a fault cannot be answered: the thread that accesses the page then waits forever.
    ///
    /// # Errors
    /// The kernel refuses a call, or the image cannot be read.
    pub fn start(
        faults: UserFaults,
        memory: &GuestMemory,
        image: LayeredImage,
        order: &[Range<u64>],
        fills_all: bool,
        on_failure: impl Fn(io::Error) + Send + 'static,
    ) -> Result<Self, MemoryError> {
        let failed = |source| MemoryError::Image { operation: "read on demand", source };
        let unit = if fills_all { CLUSTER } else { 0 };
        let source = Arc::new(Source {
            faults,
            image,
            memory: memory.clone(),
            unit,
            recorded: (!fills_all).then(Mutex::default),
            fill_times: Arc::default(),
        });
        for ram in memory.regions() {
            source.faults.register(&ram.host_range()).map_err(failed)?;
        }
        source.fill_order(order).map_err(failed)?;
        let in_handler = Arc::clone(&source);
        let handler = ScopedThread::start("fault-handler", move |stop| {
            if let Err(error) = in_handler.answer_faults(stop) {
                on_failure(error);
            }
        });
        let handler = handler.map_err(failed)?;
        let is_complete = Arc::new(AtomicBool::new(false));
        let done = Arc::clone(&is_complete);
        let in_filler = Arc::clone(&source);
        let filler = fills_all.then(|| {
            ScopedThread::start("memory-filler", move |stop| {
                match in_filler.fill_all(|| stop.read().is_ok()) {
                    Ok(is_done) => done.store(is_done, Ordering::Release),
                    Err(error) => {
                        log::warn!("the snapshot's memory is filled on demand only: {error}");
                    }
                }
            })
        });
        let filler = filler.transpose().map_err(failed)?;
        Ok(Self { _filler: filler, _handler: handler, source, is_complete })
    }

    /// Returns whether all data is in memory, so that missing pages are zero.
    pub fn is_complete(&self) -> bool {
        self.is_complete.load(Ordering::Acquire)
    }

    /// Returns the histogram of the times in which faults were answered, from the read of the message to
    /// the wake-up.
    pub fn fill_times(&self) -> Arc<StallHistogram> {
        Arc::clone(&self.source.fill_times)
    }

    /// Returns what the faults have filled, if they are recorded.
    pub fn recorded(&self) -> Order {
        let Some(pages) = &self.source.recorded else {
            return Order::new();
        };
        pages.lock().parts(image::PAGE as u64, image::size(&self.source.memory).0)
    }
}

impl Source {
    /// Answers faults until the stop.
    fn answer_faults(&self, stop: &EventFd) -> io::Result<()> {
        let mut buffer = Vec::new();
        loop {
            let mut fds = [self.faults.as_fd(), borrow_event(stop)]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
            if !fds[1].revents().is_empty() {
                return Ok(());
            }
            while let Some(address) = self.faults.next()? {
                let start = Instant::now();
                self.answer(address, &mut buffer)?;
                self.fill_times.record(start.elapsed());
            }
        }
    }

    /// Records the part of a fault and fills it.
    fn answer(&self, address: HostVirtAddr, buffer: &mut Vec<u8>) -> io::Result<()> {
        let Some((start, ram, part)) = part_of_fault(&self.memory, self.unit, address) else {
            return Ok(());
        };
        if let Some(pages) = &self.recorded {
            let page = |offset| usize::try_from((start + offset) / image::PAGE as u64).unwrap_or(0);
            pages.lock().insert(page(part.start)..page(part.end));
        }
        self.fill(start, ram, part, buffer)?;
        // The page may exist since before the fault was read.
        let page = address.0 / page_size(ram) * page_size(ram);
        self.faults.wake(&(HostVirtAddr(page)..HostVirtAddr(page + page_size(ram))))
    }

    /// Fills what is missing of these parts of the file.
    fn fill_order(&self, order: &[Range<u64>]) -> io::Result<()> {
        let mut buffer = Vec::new();
        for (start, ram, part) in order.iter().flat_map(|part| pages_of(&self.memory, part)) {
            let mut at = part.start;
            while at < part.end {
                let end = part.end.min(at + CHUNK.max(page_size(ram)));
                self.fill(start, ram, at..end, &mut buffer)?;
                at = end;
            }
        }
        Ok(())
    }

    /// Fills all data, and then ends the faults. Returns whether it did, and was not stopped.
    fn fill_all(&self, is_stopped: impl Fn() -> bool) -> io::Result<bool> {
        let mut buffer = Vec::new();
        // A part may have several ranges of data, and is filled once.
        let mut filled = 0;
        for (start, ram) in file_offsets(&self.memory) {
            for data in self.image.data(start..start + ram.size().0)? {
                let mut at = data.start.max(filled);
                while at < data.end {
                    if is_stopped() {
                        return Ok(false);
                    }
                    #[cfg(test)]
                    self.end_faults_early(at)?;
                    let part = part_at(ram, self.unit, at - start);
                    at = start + part.end;
                    filled = at;
                    self.fill(start, ram, part, &mut buffer)?;
                }
            }
        }
        self.end_faults()?;
        Ok(true)
    }

    /// Makes missing pages zero, and then collapses transparent huge pages, whose other pages would be
    /// hidden. All data must be there.
    fn end_faults(&self) -> io::Result<()> {
        for ram in self.memory.regions() {
            self.faults.unregister(&ram.host_range())?;
            if let Err(error) = ram.collapse_if_transparent() {
                log::info!("memory stays in small pages: {error}");
            }
        }
        Ok(())
    }

    /// Fills what is missing of a part of a region, whose offset in the file is `start`.
    fn fill(
        &self,
        start: u64,
        ram: &GuestRam,
        part: Range<u64>,
        buffer: &mut Vec<u8>,
    ) -> io::Result<()> {
        buffer.resize(usize::try_from(part.end - part.start).unwrap_or(0), 0);
        self.image.read_exact_at(buffer, start + part.start)?;
        let to = ram.host_address().0 + part.start;
        let page = usize::try_from(page_size(ram)).unwrap_or(usize::MAX);
        let mut at = 0;
        while at < buffer.len() {
            at += match self.faults.fill(HostVirtAddr(to + at as u64), &buffer[at..]) {
                Ok(filled) => filled,
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::EXIST) => page,
                    // The mappings of the process have changed meanwhile.
                    Some(Errno::AGAIN) => 0,
                    // The range is no longer registered: its data is there.
                    Some(Errno::NOENT) => return Ok(()),
                    _ => return Err(error),
                },
            };
        }
        Ok(())
    }
}

/// Returns the part that is filled for a fault at an address, `unit` bytes or a page: the region, its
/// offset in the file, and the part by offset in the region. No region has other addresses.
pub fn part_of_fault(
    memory: &GuestMemory,
    unit: u64,
    address: HostVirtAddr,
) -> Option<(u64, &GuestRam, Range<u64>)> {
    let mut regions = file_offsets(memory);
    let (start, ram) = regions.find(|(_, ram)| ram.host_range().contains(&address))?;
    Some((start, ram, part_at(ram, unit, address.0 - ram.host_address().0)))
}

/// Returns the part of a region that is filled at once and contains an offset in the region.
fn part_at(ram: &GuestRam, unit: u64, offset: u64) -> Range<u64> {
    let unit = page_size(ram).max(unit);
    let start = offset / unit * unit;
    start..(start + unit).min(ram.size().0)
}

/// Returns the whole pages of a part of an image: for each region its offset in the file, and the
/// part of it by offset in the region.
pub fn pages_of<'a>(
    memory: &'a GuestMemory,
    part: &Range<u64>,
) -> impl Iterator<Item = (u64, &'a GuestRam, Range<u64>)> + use<'a> {
    let part = part.clone();
    file_offsets(memory).filter_map(move |(start, ram)| {
        let page = page_size(ram);
        let first = part.start.max(start);
        let end = part.end.min(start + ram.size().0);
        let pages = || (first - start) / page * page..(end - start).next_multiple_of(page);
        (first < end).then(|| (start, ram, pages()))
    })
}

/// Returns the size of the pages that are filled as a whole, in bytes.
const fn page_size(ram: &GuestRam) -> u64 {
    let plan = ram.plan();
    let Bytes(size) = if plan.is_hugetlb() { plan.page_size() } else { plan.base_page_size() };
    size
}

#[cfg(test)]
mod end_of_faults;
#[cfg(test)]
mod tests {
    use std::{fs::File, iter, time::Duration};

    use granule_types::{record::EventCounts, testing::skip, units::GuestAddress};
    use vm_memory::Bytes as _;

    use super::*;
    use crate::memory::{
        BackingPlan, HostPages, PageMap, RamOptions, changes::testing::changes_file,
    };

    pub(super) const START: u64 = 0x4000_0000;
    pub(super) const SIZE: Bytes = Bytes::mib(8);

    pub(super) fn memory(backing: &str) -> Result<GuestMemory, MemoryError> {
        let host = HostPages::of_this_host().unwrap();
        let plan = BackingPlan::new(backing.parse().unwrap(), &host)?;
        let ram = GuestRam::new(plan, &host, GuestAddress(START), SIZE, RamOptions::default())?;
        GuestMemory::new(vec![ram])
    }

    fn memory_or_skip(backing: &str) -> Option<GuestMemory> {
        memory(backing).map_err(|error| skip(format_args!("{backing}: {error}"))).ok()
    }

    /// Returns an image with a word at every third page, and faults, if the host has them.
    pub(super) fn image_and_faults() -> Option<(Arc<File>, UserFaults)> {
        let faults = match UserFaults::open() {
            Ok(faults) => faults,
            Err(error) => {
                skip(format_args!("userfaultfd: {error}"));
                return None;
            }
        };
        let saved = memory("anonymous").unwrap();
        for page in (0..SIZE.0 / 4096).step_by(3) {
            saved.map().write_obj(page + 1, GuestAddress(START + page * 4096)).unwrap();
        }
        let file = tempfile::tempfile().unwrap();
        image::save(&saved, &PageMap::open().unwrap(), &file, &|| Ok(())).unwrap();
        Some((Arc::new(file), faults))
    }

    pub(super) fn fail(error: io::Error) {
        panic!("{error}");
    }

    fn check_contents(memory: &GuestMemory, pages: impl Iterator<Item = u64>) {
        for page in pages {
            let word: u64 = memory.map().read_obj(GuestAddress(START + page * 4096)).unwrap();
            let expected = if page.is_multiple_of(3) { page + 1 } else { 0 };
            assert_eq!(word, expected, "{page}");
        }
    }

    fn resident(memory: &GuestMemory) -> u64 {
        memory.regions()[0].resident_pages().unwrap().resident_bytes.values().sum()
    }

    #[test]
    fn accesses_fill_their_pages_only_and_are_recorded() {
        let Some((file, faults)) = image_and_faults() else { return };
        let memory = memory("anonymous").unwrap();

        let demand = OnDemand::start(faults, &memory, file.into(), &[], false, fail).unwrap();
        check_contents(&memory, [2047, 3, 999, 4, 3].into_iter());
        // A page that the balloon returns is filled and recorded again.
        assert_eq!(memory.discard(GuestAddress(START + 3 * 4096), Bytes(4096)), Bytes(4096));
        check_contents(&memory, iter::once(3));

        let pages = [3..5, 999..1000, 2047..2048];
        assert_eq!(demand.recorded(), pages.map(|pages| pages.start * 4096..pages.end * 4096));
        assert_eq!(resident(&memory), 4 * 4096);
        let (times, mut counts) = (demand.fill_times(), EventCounts::new());
        // The handler ends after it has counted the last fault.
        drop(demand);
        times.add_to(&mut counts, "fill");
        assert_eq!(counts["fill.count"], 5);
    }

    #[test]
    fn the_order_is_filled_before_the_first_access() {
        let Some((file, faults)) = image_and_faults() else { return };
        let memory = memory("anonymous").unwrap();

        let order = [5 * CLUSTER..6 * CLUSTER, 9 * CLUSTER..9 * CLUSTER + 4096];
        let demand = OnDemand::start(faults, &memory, file.into(), &order, false, fail).unwrap();

        assert_eq!(resident(&memory), CLUSTER + 4096);
        check_contents(&memory, (5 * 16..6 * 16).chain([9 * 16]));
        assert!(demand.recorded().is_empty());
    }

    #[test]
    fn all_data_is_filled_beside_accesses_on_each_backing() {
        for backing in ["anonymous", "anonymous_thp", "anonymous_hugetlb_2mb", "shmem"] {
            let Some((file, faults)) = image_and_faults() else { return };
            let Some(memory) = memory_or_skip(backing) else { continue };

            let demand = OnDemand::start(faults, &memory, file.into(), &[], true, fail).unwrap();
            std::thread::scope(|scope| {
                for first in 0..4 {
                    let memory = &memory;
                    scope.spawn(move || check_contents(memory, (first..2048).rev().step_by(4)));
                }
            });
            // Written pages are not filled again.
            memory.map().write_obj(7_u64, GuestAddress(START)).unwrap();
            let deadline = Instant::now() + Duration::from_secs(10);
            while resident(&memory) < SIZE.0 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(demand.recorded().is_empty(), "{backing}");
            drop(demand);

            check_contents(&memory, 1..2048);
            let word: u64 = memory.map().read_obj(GuestAddress(START)).unwrap();
            assert_eq!(word, 7, "{backing}");
        }
    }

    #[test]
    fn a_page_is_filled_with_the_changes_in_it() {
        for backing in ["anonymous", "anonymous_hugetlb_2mb"] {
            let Some((file, faults)) = image_and_faults() else { return };
            let Some(memory) = memory_or_skip(backing) else { continue };
            let mut image = LayeredImage::from(file);
            for pages in [&[(3, 0), (4, 9), (513, 8)][..], &[(4, 10)]] {
                let (changes, data) = changes_file(pages);
                image.add(Arc::new(changes), data, SIZE).unwrap();
            }

            let demand = OnDemand::start(faults, &memory, image, &[], true, fail).unwrap();

            let byte =
                |page: u64| memory.map().read_obj::<u8>(GuestAddress(START + page * 4096)).unwrap();
            let bytes = [0, 1, 3, 4, 6, 513].map(byte);
            assert_eq!(bytes, [1, 0, 0, 10, 7, 8], "{backing}");
            drop(demand);
        }
    }

    #[test]
    fn regions_of_any_size_are_filled() {
        let Ok(faults) = UserFaults::open() else {
            return skip("userfaultfd is not available");
        };
        let host = HostPages::of_this_host().unwrap();
        let plan = BackingPlan::new("anonymous".parse().unwrap(), &host).unwrap();
        let regions = |pages: [u64; 2]| {
            let mut start = START;
            let rams = pages.map(|pages| {
                let (at, size) = (GuestAddress(start), Bytes(pages * 4096));
                start += size.0;
                GuestRam::new(plan.clone(), &host, at, size, RamOptions::default()).unwrap()
            });
            GuestMemory::new(rams.into()).unwrap()
        };
        let (saved, restored) = (regions([37, 50]), regions([37, 50]));
        for page in 0..87 {
            saved.map().write_obj(page + 1, GuestAddress(START + page * 4096)).unwrap();
        }
        let file = tempfile::tempfile().unwrap();
        image::save(&saved, &PageMap::open().unwrap(), &file, &|| Ok(())).unwrap();

        // The part is in both regions, and a file may have any ends.
        let order = [35 * 4096 + 512..38 * 4096 - 512, 86 * 4096..1 << 40];
        let demand =
            OnDemand::start(faults, &restored, Arc::new(file).into(), &order, false, fail).unwrap();

        for page in (0..87).rev() {
            let word: u64 = restored.map().read_obj(GuestAddress(START + page * 4096)).unwrap();
            assert_eq!(word, page + 1);
        }
        assert_eq!(demand.recorded(), [0..35 * 4096, 38 * 4096..86 * 4096]);
        assert!(!demand.is_complete());
    }
}
