// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Threads that fill all data of an image beside the guest.
//!
//! The regions are divided into stripes, and each thread takes the next one. The last thread that finds no
//! more of them ends the faults, if no other one failed or was stopped: before, the kernel's huge pages
//! would hide what is missing.

use std::{
    io,
    ops::{Range, RangeInclusive},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use super::{LARGEST_MOVED, Source, page_size};
use crate::{
    memory::{GuestMemory, GuestRam, image::file_offsets},
    scoped_thread::{ScopedThread, catch_panic, is_stop_requested},
};

/// Size of a stripe, unless a page of its region is larger: a multiple of all other parts. Tests divide
/// small memory, too.
const STRIPE: u64 = if cfg!(test) { 2 << 20 } else { 64 << 20 };
/// Number of threads: the guest needs CPUs, too.
const THREADS: RangeInclusive<usize> = if cfg!(test) { 3..=8 } else { 1..=8 };

/// Returns the number of threads for this memory. Each has a buffer of the size of a huge page, unless it
/// reads pages to their place, so there is one for pages beyond those that are moved.
pub(super) fn thread_count(source: &Source) -> usize {
    let has_small_buffer = |(start, ram): (u64, &GuestRam)| {
        page_size(ram) <= LARGEST_MOVED || source.files.contains_key(&start)
    };
    match file_offsets(&source.memory).all(has_small_buffer) {
        true => {
            let half = thread::available_parallelism().map_or(1, usize::from) / 2;
            half.clamp(*THREADS.start(), *THREADS.end())
        }
        false => 1,
    }
}

/// Work of the threads.
#[derive(Debug)]
pub(super) struct Filling {
    source: Arc<Source>,
    threads: usize,
    /// Number of the next stripe.
    next: AtomicUsize,
    /// Number of threads that have found no more stripes.
    complete: AtomicUsize,
    /// Result of the first thread that has failed, or of the end of the faults. Without one, the threads
    /// work or were stopped.
    result: OnceLock<io::Result<()>>,
}

impl Filling {
    pub(super) fn new(source: Arc<Source>, threads: usize) -> Self {
        let (next, complete) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { source, threads, next, complete, result: OnceLock::new() }
    }

    /// Starts the threads.
    ///
    /// # Errors
    /// A thread cannot be started. Those before it are stopped.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<Vec<ScopedThread>> {
        let start = |_| {
            let filling = Arc::clone(self);
            ScopedThread::start("memory-filler", move |stop| {
                let is_stopped = || is_stop_requested(stop);
                // After a panic, too, the others must not wait for this thread.
                let Some(result) = catch_panic(|| filling.run(&is_stopped)).transpose() else {
                    return;
                };
                if let Err(error) = &result {
                    log::warn!("the snapshot's memory is filled on demand only: {error}");
                    // Their faults may have been left to this thread: they are read once more.
                    filling.source.wake_all();
                }
                let _ = filling.result.set(result);
            })
        };
        (0..self.threads).map(start).collect()
    }

    /// Returns the result, if there is one.
    pub(super) fn result(&self) -> Option<&io::Result<()>> {
        self.result.get()
    }

    /// Fills stripes, and ends the faults if all are filled. Returns `None` if this thread was stopped, or
    /// others still fill stripes.
    fn run(&self, is_stopped: &dyn Fn() -> bool) -> io::Result<Option<()>> {
        let mut buffer = Vec::new();
        let may_continue = || !is_stopped() && self.result.get().is_none();
        let mut stripes = stripes(&self.source.memory).enumerate();
        // The numbers of a thread ascend.
        let mut next = || {
            let next = self.next.fetch_add(1, Ordering::Relaxed);
            stripes.find(|(number, _)| *number == next)
        };
        while let Some((_, (start, ram, stripe))) = next() {
            if self.source.fill_data(start, ram, stripe, &may_continue, &mut buffer)?.is_none() {
                return Ok(None);
            }
        }
        // What the others have filled is seen by the thread that ends the faults.
        if self.complete.fetch_add(1, Ordering::AcqRel) + 1 < self.threads {
            return Ok(None);
        }
        self.source.end_faults(&|| !is_stopped()).map(Some)
    }
}

/// Returns the stripes: for each the offset of its region in the file, the region, and its part of it.
fn stripes(memory: &GuestMemory) -> impl Iterator<Item = (u64, &GuestRam, Range<u64>)> {
    file_offsets(memory).flat_map(|(start, ram)| {
        let (size, stripe) = (ram.size().0, STRIPE.max(page_size(ram)));
        let stripes = (0..size.div_ceil(stripe)).map(move |index| index * stripe);
        stripes.map(move |at| (start, ram, at..(at + stripe).min(size)))
    })
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{START, check_contents, image_and_faults, memory, source},
        *,
    };
    use crate::memory::{BackingPlan, HostPages, RamOptions, on_demand::Order};
    use granule_types::units::{Bytes, GuestAddress};

    /// Returns memory and the work of a number of threads on it, if the host has faults.
    fn filling(threads: usize) -> Option<(GuestMemory, Filling)> {
        let (file, faults) = image_and_faults()?;
        let memory = memory("anonymous").unwrap();
        faults.register(&memory.regions()[0].host_range()).unwrap();
        let source = source(file, faults, &memory, Order::new());
        Some((memory, Filling::new(Arc::new(source), threads)))
    }

    #[test]
    fn the_last_of_several_threads_ends_the_faults() {
        let Some((memory, filling)) = filling(3) else { return };

        let results = [(); 3].map(|()| filling.run(&|| false).unwrap());

        assert_eq!(results, [None, None, Some(())]);
        check_contents(&memory, 0..2048);
    }

    #[test]
    fn a_thread_that_is_stopped_keeps_the_others_from_ending_the_faults() {
        let Some((_, filling)) = filling(2) else { return };

        let results = [true, false].map(|is_stopped| filling.run(&|| is_stopped).unwrap());

        assert_eq!(results, [None, None]);
    }

    #[test]
    fn stripes_have_all_memory_and_whole_pages() {
        let host = HostPages::of_this_host().unwrap();
        let plan = BackingPlan::new("anonymous".parse().unwrap(), &host).unwrap();
        let rams =
            [(START, Bytes::mib(5)), (START + (1 << 30), Bytes::mib(3))].map(|(at, size)| {
                let options = RamOptions::default();
                GuestRam::new(plan.clone(), &host, GuestAddress(at), size, options).unwrap()
            });
        let memory = GuestMemory::new(rams.into()).unwrap();

        let mib = |(start, _, part): (u64, &GuestRam, Range<u64>)| {
            (start >> 20, part.start >> 20..part.end >> 20)
        };
        let stripes: Vec<_> = stripes(&memory).map(mib).collect();

        assert_eq!(stripes, [(0, 0..2), (0, 2..4), (0, 4..5), (5, 0..2), (5, 2..3)]);
    }
}
