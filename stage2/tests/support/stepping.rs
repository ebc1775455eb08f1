// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Operations and a lock for threads that take turns: before each operation another may go on.

use std::sync::atomic::{AtomicUsize, Ordering};

use granule_stage2::{
    EntryAddress, Operations, PhysAddr, TableAddress,
    descriptor::Descriptor,
    operations::{Dsb, Note, Order, Tlbi, Unlinked, Vmid},
};

/// Operations before each of which another thread may have its turn.
#[derive(Debug)]
pub struct Stepping<O>(pub O);

fn turn() {
    shuttle::thread::yield_now();
}

#[rustfmt::skip]
impl<O: Operations> Operations for Stepping<O> {
    fn load(&self, entry: EntryAddress) -> Descriptor { turn(); self.0.load(entry) }
    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) { turn(); self.0.store(entry, new, order); }
    fn compare_exchange(&self, entry: EntryAddress, old: Descriptor, new: Descriptor) -> Result<(), Descriptor> { turn(); self.0.compare_exchange(entry, old, new) }
    fn allocate(&self) -> Option<TableAddress> { self.0.allocate() }
    fn free(&self, table: TableAddress) { turn(); self.0.free(table); }
    fn defer(&self, unlinked: Unlinked) { turn(); self.0.defer(unlinked); }
    fn begin_walk(&self) { turn(); self.0.begin_walk(); }
    fn end_walk(&self) { self.0.end_walk(); }
    fn take_references(&self, table: TableAddress, count: u32) { turn(); self.0.take_references(table, count); }
    fn drop_references(&self, table: TableAddress, count: u32) -> u32 { turn(); self.0.drop_references(table, count) }
    fn references(&self, table: TableAddress) -> u32 { self.0.references(table) }
    fn dsb(&self, kind: Dsb) { turn(); self.0.dsb(kind); }
    fn isb(&self) { self.0.isb(); }
    fn tlbi(&self, kind: Tlbi) { turn(); self.0.tlbi(kind); }
    fn switch_vmid(&self, vmid: Vmid) -> Vmid { self.0.switch_vmid(vmid) }
    fn clean_invalidate(&self, phys: PhysAddr, size: u64) { turn(); self.0.clean_invalidate(phys, size); }
    fn invalidate_instructions(&self, range: Option<(PhysAddr, u64)>) { turn(); self.0.invalidate_instructions(range); }
    fn pause(&self) { turn(); }
    fn note(&self, note: Note) { turn(); self.0.note(note); }
}

/// A read-write lock that gives its turn away while it waits.
#[derive(Debug)]
pub struct TurnLock(AtomicUsize);

const WRITER: usize = usize::MAX;

// SAFETY: a writer is in alone: it gets in at 0 only, and nobody else as long as it is WRITER.
unsafe impl lock_api::RawRwLock for TurnLock {
    const INIT: Self = Self(AtomicUsize::new(0));
    type GuardMarker = lock_api::GuardSend;

    fn lock_shared(&self) {
        while !self.try_lock_shared() {
            turn();
        }
    }

    fn try_lock_shared(&self) -> bool {
        let more = |now: usize| (now != WRITER).then(|| now + 1);
        let done = self
            .0
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, more);
        done.is_ok()
    }

    unsafe fn unlock_shared(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    fn lock_exclusive(&self) {
        while !self.try_lock_exclusive() {
            turn();
        }
    }

    fn try_lock_exclusive(&self) -> bool {
        let done = self
            .0
            .compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed);
        done.is_ok()
    }

    unsafe fn unlock_exclusive(&self) {
        self.0.store(0, Ordering::Release);
    }
}
