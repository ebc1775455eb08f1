// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory that is filled from an [image](super::layers) when it is first accessed.
//!
//! All regions are registered for [faults](super::user_faults) before anything accesses them. One
//! thread answers the faults of vCPUs, devices and KVM; others fill the other pages beside them (see
//! filling.rs). A page is filled once, by whichever is first: the kernel refuses to fill a page that
//! exists. When all data is there, the regions are unregistered, so that the remaining pages are zero
//! and later faults are the kernel's own.
//!
//! While a region is registered, the kernel maps no transparent huge page in it, by a fault or by a
//! collapse, because that would hide missing pages. A kernel that can move pages gets whole huge pages:
//! a page of a thread is filled and moved to the region. Blocks with pages of an order, and those of a NUMA
//! node or another kernel, are filled by smaller pages, and collapsed at the end.
//!
//! Shared hugetlb pages are read to their place if the kernel can map them then (see memory_file.rs).

use std::{
    collections::BTreeSet, io, ops::Range, os::fd::AsFd as _, slice, sync::Arc, time::Instant,
};

use granule_types::{
    error_text,
    units::{Bytes, GuestAddress, HostVirtAddr},
};
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};
use vmm_sys_util::eventfd::EventFd;

use self::{
    filling::Filling,
    memory_file::{MemoryFiles, PageState, memory_files},
};
use super::{
    GuestMemory, GuestRam, MemoryError, PageSet,
    image::{self, file_offsets},
    layers::LayeredImage,
    mapping::Mapping,
    user_faults::UserFaults,
};
use crate::{
    scoped_thread::{ScopedThread, borrow_event, catch_panic},
    stalls::StallHistogram,
};

/// Bytes that are filled at once for a fault on a page that is smaller.
const CLUSTER: u64 = 64 << 10;
/// Largest huge page that is filled as a whole for a fault, whose thread waits.
const LARGEST_MOVED: u64 = 2 << 20;
/// Bytes of an order that are read and filled at once.
const CHUNK: u64 = 1 << 20;

/// Parts of an image that a guest accesses, by offset in the file: ascending and apart from each
/// other.
pub type Order = Vec<Range<u64>>;

/// Threads that fill memory. Drop the users of the memory before.
#[derive(Debug)]
pub struct OnDemand {
    /// Declared first: the threads that fill other pages end before faults are no longer answered.
    _fillers: Vec<ScopedThread>,
    _handler: ScopedThread,
    source: Arc<Source>,
    /// Work of the former, if all memory is filled.
    filling: Option<Arc<Filling>>,
}

/// Faults, and the image and memory that answer them.
#[derive(Debug)]
struct Source {
    faults: UserFaults,
    image: LayeredImage,
    memory: GuestMemory,
    /// Parts that are filled first, by small pages.
    order: Order,
    /// Bytes that are filled for a fault, unless its page is larger.
    unit: u64,
    /// Pages of the image that faults have filled, if they are recorded. A guest can refault pages without
    /// end, so each has one bit.
    recorded: Option<Mutex<PageSet>>,
    /// Offsets of blocks in the image that were moved for faults, so that they are not read once more.
    moved: Mutex<BTreeSet<u64>>,
    /// Memory files that are read to their place.
    files: MemoryFiles,
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
        let files = memory_files(&faults, memory)?;
        let source = Source {
            faults,
            image,
            memory: memory.clone(),
            order: order.to_vec(),
            unit: if fills_all { CLUSTER } else { 0 },
            recorded: (!fills_all).then(Mutex::default),
            moved: Mutex::default(),
            files,
            fill_times: Arc::default(),
        };
        Self::fill_from(source, on_failure)
            .map_err(|source| MemoryError::Image { operation: "read on demand", source })
    }

    fn fill_from(
        source: Source,
        on_failure: impl Fn(io::Error) + Send + 'static,
    ) -> io::Result<Self> {
        source.register()?;
        source.fill_order()?;
        let source = Arc::new(source);
        let in_handler = Arc::clone(&source);
        let handler = ScopedThread::start("fault-handler", move |stop| {
            // After a panic, too, all threads that access a missing page would wait for ever.
            if let Err(error) = catch_panic(|| in_handler.answer_faults(stop)) {
                on_failure(error);
            }
        });
        let handler = handler?;
        let threads = filling::thread_count(&source);
        let filling = source.recorded.is_none().then(|| Filling::new(Arc::clone(&source), threads));
        let filling = filling.map(Arc::new);
        let fillers = filling.as_ref().map_or(Ok(Vec::new()), Filling::start)?;
        Ok(Self { _fillers: fillers, _handler: handler, source, filling })
    }

    /// Checks that all data is in memory, so that missing pages are zero.
    ///
    /// # Errors
    /// It is not, with the reason and what to do.
    pub fn check_complete(&self) -> Result<(), String> {
        let reason = match self.filling.as_ref().and_then(|filling| filling.result()) {
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) => format!("cannot be filled: {error}: restore the VM again"),
            None if self.filling.is_none() => {
                "is filled by faults only, to record them: restore the VM without a new order=FILE"
                    .to_owned()
            }
            None => "is not filled yet: try again".to_owned(),
        };
        Err(format!("memory of the snapshot that this VM was restored from {reason}"))
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
        pages.lock().parts(image::PAGE as u64, self.source.memory.size().0)
    }
}

impl Source {
    /// Registers all memory for faults.
    fn register(&self) -> io::Result<()> {
        file_offsets(&self.memory).try_for_each(|(start, ram)| {
            match self.files.contains_key(&start) {
                true => self.faults.register_file(&ram.host_range()),
                false => self.faults.register(&ram.host_range()),
            }
        })
    }

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
                if self.answer(address, &mut buffer)?.is_some() {
                    self.fill_times.record(start.elapsed());
                }
            }
        }
    }

    /// Records the part of a fault and fills it. Returns `None` if another thread answers the fault.
    fn answer(&self, address: HostVirtAddr, buffer: &mut Vec<u8>) -> io::Result<Option<()>> {
        let Some((start, ram, offset)) = region_of(&self.memory, address) else {
            return Ok(None);
        };
        let part = self.part_of(start, ram, offset);
        if let Some(pages) = &self.recorded {
            let page = |offset| usize::try_from((start + offset) / image::PAGE as u64).unwrap_or(0);
            pages.lock().insert(page(part.start)..page(part.end));
        }
        let page = page_at(ram, offset);
        match self.files.get(&start).map(|file| file.state(offset)) {
            None | Some(PageState::Absent) => self.fill(start, ram, part, buffer)?,
            // The thread that reads the page continues the access.
            Some(PageState::BeingRead) => return Ok(None),
            // The page is mapped, or the kernel has unmapped it, for example to move it.
            Some(PageState::There) => self.map(ram, &page)?,
        }
        // The page may exist since before the fault was read.
        self.faults.wake(&host_range(ram, &page)).map(Some)
    }

    /// Fills what is missing of the parts of the order.
    fn fill_order(&self) -> io::Result<()> {
        let mut buffer = Vec::new();
        for (start, ram, part) in self.order.iter().flat_map(|part| pages_of(&self.memory, part)) {
            let mut at = part.start;
            while at < part.end {
                let end = part.end.min(at + CHUNK.max(page_size(ram)));
                self.fill(start, ram, at..end, &mut buffer)?;
                at = end;
            }
        }
        Ok(())
    }

    /// Fills the data of a part of a region, whose offset in the file is `start`. Returns `None` if it may
    /// not continue.
    fn fill_data(
        &self,
        start: u64,
        ram: &GuestRam,
        within: Range<u64>,
        may_continue: &dyn Fn() -> bool,
        buffer: &mut Vec<u8>,
    ) -> io::Result<Option<()>> {
        // A part may have several ranges of data, and is filled once.
        let mut filled = 0;
        for data in self.image.data(start + within.start..start + within.end)? {
            let mut at = data.start.max(filled);
            while at < data.end {
                if !may_continue() {
                    return Ok(None);
                }
                #[cfg(test)]
                self.end_faults_early(at)?;
                let part = self.part_of(start, ram, at - start);
                at = start + part.end;
                filled = at;
                if !self.moved.lock().contains(&(start + part.start)) {
                    self.fill(start, ram, part, buffer)?;
                }
            }
        }
        Ok(Some(()))
    }

    /// Continues all threads that wait for a page. Those whose page is still missing refault.
    fn wake_all(&self) {
        for ram in self.memory.regions() {
            if let Err(error) = self.faults.wake(&ram.host_range()) {
                log::warn!("accesses to missing memory cannot be continued: {error}");
            }
        }
    }

    /// Makes missing pages zero, and then collapses transparent huge pages, whose other pages would be
    /// hidden. All data must be there.
    fn end_faults(&self, may_continue: &dyn Fn() -> bool) -> io::Result<()> {
        for (start, ram) in file_offsets(&self.memory) {
            // Before the kernel maps pages by itself, so that nothing is read over them.
            if let Some(file) = self.files.get(&start) {
                file.close();
            }
            self.faults.unregister(&ram.host_range())?;
            match ram.collapse_if_transparent(may_continue) {
                Ok(true) => {}
                Ok(false) => log::warn!(
                    "some of the restored memory stays in small pages, as the host has no memory for \
                     huge ones: POST /v1/memory/collapse repeats the collapse"
                ),
                Err(error) => {
                    log::warn!("the restored memory stays in small pages: {}", error_text(&error))
                }
            }
        }
        Ok(())
    }

    /// Returns the part of a region that is filled at once and contains an offset in the region, whose
    /// offset in the file is `start`.
    fn part_of(&self, start: u64, ram: &GuestRam, offset: u64) -> Range<u64> {
        self.moved_block(start, ram, offset).unwrap_or_else(|| part_at(ram, self.unit, offset))
    }

    /// Returns the block of a region that contains an offset in it, if it is filled by moving a huge page.
    fn moved_block(&self, start: u64, ram: &GuestRam, offset: u64) -> Option<Range<u64>> {
        let Bytes(size) = ram.plan().page_size();
        let block = offset / size * size..(offset / size + 1) * size;
        let is_movable = self.recorded.is_none()
            && self.faults.can_move()
            && ram.plan().is_movable()
            // Pages of a thread are of its node.
            && !ram.has_node()
            && size <= LARGEST_MOVED
            && block.end <= ram.size().0;
        let ordered = self.order.partition_point(|part| part.end <= start + block.start);
        let is_ordered = self.order.get(ordered).is_some_and(|part| part.start < start + block.end);
        (is_movable && !is_ordered).then_some(block)
    }

    /// Fills what is missing of a part of a region, whose offset in the file is `start`.
    fn fill(
        &self,
        start: u64,
        ram: &GuestRam,
        part: Range<u64>,
        buffer: &mut Vec<u8>,
    ) -> io::Result<()> {
        if let Some(file) = self.files.get(&start)
            && self.fill_file(file, start, ram, &part)?.is_some()
        {
            return Ok(());
        }
        let is_moved = self.moved_block(start, ram, part.start).as_ref() == Some(&part);
        if is_moved && let Ok(page) = new_page(ram) {
            return self.move_block(start, ram, part.start, &page);
        }
        self.copy_part(start, ram, &part, buffer)
    }

    /// Reads a part of the image to a buffer, and copies it to missing pages.
    fn copy_part(
        &self,
        start: u64,
        ram: &GuestRam,
        part: &Range<u64>,
        buffer: &mut Vec<u8>,
    ) -> io::Result<()> {
        buffer.resize(usize::try_from(part.end - part.start).unwrap_or(0), 0);
        self.image.read_exact_at(buffer, start + part.start)?;
        self.copy(ram, part.start, buffer)
    }

    /// Fills the block at an offset in a region by a page of its size. What exists in it stays, and its
    /// other pages are copied.
    fn move_block(
        &self,
        start: u64,
        ram: &GuestRam,
        offset: u64,
        page: &Mapping,
    ) -> io::Result<()> {
        // SAFETY: the page has this length, is writable, and has no other user.
        let bytes = unsafe { slice::from_raw_parts_mut(page.as_ptr(), page.len()) };
        self.image.read_exact_at(bytes, start + offset)?;
        // A part that cannot be moved, for whatever reason, is copied.
        let to = HostVirtAddr(ram.host_address().0 + offset);
        let moved = self.faults.move_pages(to, bytes).unwrap_or(0);
        if moved == bytes.len() {
            self.moved.lock().insert(start + offset);
            return Ok(());
        }
        self.copy(ram, offset + moved as u64, &bytes[moved..])
    }

    /// Copies bytes to the missing pages from an offset in a region on.
    fn copy(&self, ram: &GuestRam, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let to = ram.host_address().0 + offset;
        let page = usize::try_from(page_size(ram)).unwrap_or(usize::MAX);
        let mut at = 0;
        while at < bytes.len() {
            at += match self.faults.fill(HostVirtAddr(to + at as u64), &bytes[at..]) {
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

/// Returns memory of the size of a page of `ram`, which is a huge page when it is filled, if the host has
/// one. The kernel allocates none for memory whose page was moved, so each page needs a new mapping.
fn new_page(ram: &GuestRam) -> Result<Mapping, MemoryError> {
    let (plan, size) = (ram.plan(), ram.plan().page_size());
    Mapping::new(plan.clone(), size, GuestAddress(0), size, None)
}

/// Returns the region with an address, its offset in the file, and the offset of the address in the
/// region.
pub fn region_of(memory: &GuestMemory, address: HostVirtAddr) -> Option<(u64, &GuestRam, u64)> {
    let mut regions = file_offsets(memory);
    let (start, ram) = regions.find(|(_, ram)| ram.host_range().contains(&address))?;
    Some((start, ram, address.0 - ram.host_address().0))
}

/// Returns the part of a region that contains an offset in it: `unit` bytes or a page.
pub fn part_at(ram: &GuestRam, unit: u64, offset: u64) -> Range<u64> {
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

/// Returns the page of a region that contains an offset in it.
const fn page_at(ram: &GuestRam, offset: u64) -> Range<u64> {
    let start = offset / page_size(ram) * page_size(ram);
    start..start + page_size(ram)
}

/// Returns the addresses in this process of a part of a region.
fn host_range(ram: &GuestRam, part: &Range<u64>) -> Range<HostVirtAddr> {
    let start = ram.host_address().0;
    HostVirtAddr(start + part.start)..HostVirtAddr(start + part.end)
}

/// Returns the size of the pages that are filled as a whole, in bytes.
const fn page_size(ram: &GuestRam) -> u64 {
    let plan = ram.plan();
    let Bytes(size) = if plan.is_hugetlb() { plan.page_size() } else { plan.base_page_size() };
    size
}

#[cfg(test)]
mod end_of_faults;
mod filling;
mod memory_file;
#[cfg(test)]
mod tests;
