// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The operations that all tables have, and the warm pool that their pages come from. Pages are not
//! zeroed: a crate that needs zeroes writes them.

use std::{
    alloc::{Layout, alloc_zeroed},
    slice::from_raw_parts,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

pub const PAGE: u64 = 4096;
pub const BLOCK: u64 = 2 << 20;
pub const GIB: u64 = 1 << 30;
/// Host address of all mapped memory.
pub const PHYS: u64 = 0x8_0000_0000;
/// Pages of the pool: more than a table needs for 2 GiB.
pub const TABLES: usize = 1200;

static PAGES: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Returns memory for all tables, aligned and touched; it is never freed.
pub fn memory() -> &'static [AtomicU64] {
    let layout = Layout::from_size_align(TABLES * 4096, 2 << 20).expect("a layout");
    // SAFETY: the layout has a size.
    let base = unsafe { alloc_zeroed(layout) };
    assert!(!base.is_null(), "no memory");
    // SAFETY: the memory is as large, aligned, zeroed, and has no other owner.
    let words = unsafe { from_raw_parts(base.cast::<AtomicU64>(), TABLES * 512) };
    words.iter().for_each(|w| w.store(0, Ordering::Relaxed));
    words
}

fn pages() -> MutexGuard<'static, Vec<usize>> {
    PAGES.lock().expect("the lock is not poisoned")
}

/// Fills the pool.
pub fn fill_pool() {
    let base = memory().as_ptr() as usize;
    pages().extend((0..TABLES).rev().map(|n| base + n * 4096));
}

/// Sorts the pool, so that no benchmark depends on the order that another has left.
pub fn sort_pool() {
    pages().sort_unstable_by(|a, b| b.cmp(a));
}

/// Takes a page, not zeroed.
pub fn page() -> usize {
    pages().pop().expect("the pool is large enough")
}

/// Returns a page to the pool.
pub fn return_page(page: usize) {
    pages().push(page);
}

/// Returns pages to the pool together.
pub fn return_pages(all: impl Iterator<Item = usize>) {
    pages().extend(all);
}

/// A table to benchmark.
pub trait Table {
    /// Name in the results.
    const NAME: &'static str;
    /// Set if the table can split blocks.
    const CAN_SPLIT: bool = false;
    /// Set if the table can coalesce.
    const CAN_COALESCE: bool = false;
    /// Set if addresses can be translated during maps.
    const CONCURRENT_WALKS: bool = false;
    /// Pages that a thread takes from the pool before it locks the table.
    type ThreadState: Default;

    /// Takes pages for this many tables, if the table needs them beforehand.
    fn ready(_state: &mut Self::ThreadState, _tables: usize) {}
    /// Creates an empty table.
    fn new() -> Self;
    /// Maps `size` bytes at `ipa` to the same distance from [`PHYS`], by pages or by 2M blocks.
    fn map(&mut self, state: &mut Self::ThreadState, ipa: u64, size: u64, blocks: bool);
    /// Maps `count` pages or 2M blocks (`SIZE`) from address 0 on, one by one.
    fn map_each<const SIZE: u64>(&mut self, state: &mut Self::ThreadState, count: u64) {
        (0..count).for_each(|n| self.map(state, n * SIZE, SIZE, SIZE == BLOCK));
    }
    /// Translates an address. Each implementation is inlined into the benchmark's loop.
    fn translate(&self, ipa: u64) -> u64;
    /// Write-protects memory that is mapped by pages.
    fn protect(&mut self, ipa: u64, size: u64);
    /// Unmaps memory that is mapped by pages.
    fn unmap(&mut self, ipa: u64, size: u64);
    /// Splits the 2M block at `ipa` into pages with its attributes.
    fn split(&mut self, _state: &mut Self::ThreadState, _ipa: u64) {
        unreachable!("it cannot split");
    }
    /// Coalesces the block at `ipa`, the `ipa / BLOCK`th that was split.
    fn coalesce(&mut self, _state: &mut Self::ThreadState, _ipa: u64) {
        unreachable!("it cannot coalesce");
    }
    /// Coalesces `count` blocks from address 0 on, one by one.
    fn coalesce_each(&mut self, state: &mut Self::ThreadState, count: u64) {
        (0..count).for_each(|n| self.coalesce(state, n * BLOCK));
    }
}
