// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Populates the stage-2 tables of guest memory before vCPUs access it (`KVM_PRE_FAULT_MEMORY`).
//!
//! KVM maps memory as a read of the guest would, so it does not break copy-on-write: the host memory
//! must be populated before. Without FEAT_S2FWB, KVM cleans memory when it maps it, so the guest's
//! initial memory must be written before.
//!
//! A vCPU serves one call at a time, and a running vCPU none. Each thread has a vCPU, and takes the
//! next chunk of memory. Chunks start and end at a multiple of the backing's page size, so that no
//! two threads map one block. They are short, because a change of the memslots waits for a call.

use std::{
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use granule_types::units::{Bytes, GuestAddress};
use kvm_bindings::{KVM_CAP_PRE_FAULT_MEMORY, kvm_pre_fault_memory};
use kvm_ioctls::{VcpuFd, VmFd};
use vmm_sys_util::errno;

use super::{KvmError, ioctls::pre_fault_memory};
use crate::memory::GuestRam;

/// Size of a chunk, unless a page of the backing is larger.
const CHUNK_SIZE: Bytes = Bytes::mib(16);

/// Part of guest memory that one call populates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// First guest address.
    pub start: GuestAddress,
    /// Size, a multiple of the backing's page size.
    pub size: Bytes,
}

/// Returns the chunks of memory that starts at `start`, in ascending order.
pub fn chunks(start: GuestAddress, size: Bytes, page: Bytes) -> impl Iterator<Item = Chunk> {
    let step = CHUNK_SIZE.0.max(page.0);
    (0..size.0.div_ceil(step)).map(move |index| {
        let offset = index * step;
        Chunk { start: GuestAddress(start.0 + offset), size: Bytes(step.min(size.0 - offset)) }
    })
}

/// Returns the chunks of a region of guest memory.
pub fn chunks_of(ram: &GuestRam) -> impl Iterator<Item = Chunk> {
    chunks(ram.start(), ram.size(), ram.plan().page_size())
}

/// Populates stage 2 through the vCPUs of a VM.
#[derive(Debug)]
pub struct Stage2Populator {
    vcpus: Vec<OwnedFd>,
}

impl Stage2Populator {
    /// Returns a populator without vCPUs, or `None` if this host's KVM cannot populate stage 2.
    pub fn new(vm: &VmFd) -> Option<Self> {
        let is_supported = vm.check_extension_raw(KVM_CAP_PRE_FAULT_MEMORY.into()) > 0;
        is_supported.then(|| Self { vcpus: Vec::new() })
    }

    /// Duplicates the file descriptor of a vCPU, so that its owner can move it to another thread.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub fn add_vcpu(&mut self, vcpu: &VcpuFd) -> Result<(), KvmError> {
        // SAFETY: `vcpu` keeps the file descriptor open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        let call = "duplicating the file descriptor of a vCPU";
        self.vcpus.push(fd.try_clone_to_owned().map_err(|source| KvmError::Call { call, source })?);
        Ok(())
    }

    /// Populates stage 2 of all regions, with a thread for each CPU of the host, up to the number of
    /// vCPUs. No vCPU may run.
    ///
    /// # Errors
    /// KVM refuses the call, or the host cannot provide the memory.
    pub fn populate(&self, regions: &[Arc<GuestRam>]) -> Result<(), KvmError> {
        let chunks: Vec<Chunk> = regions.iter().flat_map(|ram| chunks_of(ram)).collect();
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = self.vcpus.iter().take(cpus).collect();
        let populate = |vcpu: &OwnedFd, chunk| populate_chunk(vcpu, chunk, &|| false);
        for_each_in_parallel(&workers, &chunks, populate)
            .map_err(|error| KvmError::call("KVM_PRE_FAULT_MEMORY", error))
    }

    /// Populates stage 2 of one chunk through the first vCPU. While the kernel asks to try again, this ends
    /// with an error after the stop, too.
    ///
    /// # Errors
    /// As for [`Self::populate`].
    pub fn populate_chunk(
        &self,
        chunk: Chunk,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<(), KvmError> {
        let first = self.vcpus.first();
        let populated = first.map_or(Ok(()), |vcpu| populate_chunk(vcpu, chunk, is_stopped));
        populated.map_err(|error| KvmError::call("KVM_PRE_FAULT_MEMORY", error))
    }
}

/// Maximum time without progress: the kernel asks to try again, and may do so for ever.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Time until a call is repeated.
const PAUSE: Duration = Duration::from_millis(1);

fn populate_chunk(
    vcpu: &OwnedFd,
    chunk: Chunk,
    is_stopped: &dyn Fn() -> bool,
) -> errno::Result<()> {
    let mut range = kvm_pre_fault_memory {
        gpa: chunk.start.0,
        size: chunk.size.0,
        ..kvm_pre_fault_memory::default()
    };
    let mut progress = Instant::now();
    while range.size > 0 {
        match pre_fault_memory(vcpu.as_fd(), &mut range).map_err(|error| (error, error.errno())) {
            Ok(()) => progress = Instant::now(),
            // A signal.
            Err((_, libc::EINTR)) => {}
            // A change of the memslots, or of the mapping.
            Err((_, libc::EAGAIN)) if progress.elapsed() < MAX_WAIT && !is_stopped() => {
                thread::sleep(PAUSE);
            }
            Err((error, _)) => return Err(error),
        }
    }
    Ok(())
}

/// Calls `work` with each item, in a thread for each worker. Returns the first error, after which
/// the threads take no more items.
fn for_each_in_parallel<W: Copy + Send, T: Copy + Sync, E: Send>(
    workers: &[W],
    items: &[T],
    work: impl Fn(W, T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    let take_items = |worker: W| {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            work(worker, *item).inspect_err(|_| next.store(items.len(), Ordering::Relaxed))?;
        }
        Ok(())
    };
    let Some((first, others)) = workers.split_first() else {
        return Ok(());
    };
    let useful = others.len().min(items.len().saturating_sub(1));
    thread::scope(|scope| {
        let threads: Vec<_> = others
            .iter()
            .take(useful)
            .map_while(|worker| {
                let (worker, take_items) = (*worker, &take_items);
                // Without a thread of the host, the others take its items.
                thread::Builder::new().spawn_scoped(scope, move || take_items(worker)).ok()
            })
            .collect();
        let result = take_items(*first);
        threads.into_iter().fold(result, |result, thread| match thread.join() {
            Ok(of_thread) => result.and(of_thread),
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn chunks_cover_memory_in_multiples_of_its_pages() {
        let start = GuestAddress(0x4000_0000);
        for (size, page, expected) in [
            (Bytes::mib(40), Bytes::kib(4), vec![16, 16, 8]),
            (Bytes::mib(32), Bytes::mib(2), vec![16, 16]),
            (Bytes::gib(2), Bytes::gib(1), vec![1024, 1024]),
            (Bytes::kib(1024), Bytes::kib(4), vec![1]),
        ] {
            let found: Vec<_> = chunks(start, size, page).collect();

            let sizes: Vec<_> = found.iter().map(|chunk| chunk.size.0 >> 20).collect();
            assert_eq!(sizes, expected);
            let mut next = start.0;
            for chunk in found {
                assert_eq!(chunk.start.0, next);
                next += chunk.size.0;
            }
            assert_eq!(next, start.0 + size.0);
        }
    }

    #[test]
    fn each_item_is_worked_on_once() {
        for workers in [1, 3, 9] {
            let workers: Vec<usize> = (0..workers).collect();
            let items: Vec<usize> = (0..5).collect();
            let done = Mutex::new(Vec::new());

            let result = for_each_in_parallel(&workers, &items, |_, item| {
                done.lock().unwrap().push(item);
                Ok::<(), ()>(())
            });

            assert_eq!(result, Ok(()));
            let mut done = done.into_inner().unwrap();
            done.sort_unstable();
            assert_eq!(done, items);
        }
    }

    #[test]
    fn an_error_ends_the_work_of_all_threads() {
        let items: Vec<usize> = (0..1000).collect();
        let count = AtomicUsize::new(0);

        let result = for_each_in_parallel(&[0], &items, |_, item| {
            count.fetch_add(1, Ordering::Relaxed);
            if item == 3 { Err("refused") } else { Ok(()) }
        });

        assert_eq!(result, Err("refused"));
        assert_eq!(count.into_inner(), 4);
        assert_eq!(for_each_in_parallel(&[], &items, |_: usize, _| Err("unused")), Ok(()));
    }
}
