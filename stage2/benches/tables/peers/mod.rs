// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of other crates behind the operations that all have. Their pages come from one warm pool
//! and are not zeroed: a crate that needs zeroes writes them.

pub mod aarch64;
pub mod generic;
pub mod multiarch;
pub mod own;

use std::{
    alloc::{Layout, alloc_zeroed},
    slice::from_raw_parts,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

pub const PAGE: u64 = 4096;
pub const BLOCK: u64 = 2 << 20;
pub const GIB: u64 = 1 << 30;
/// Host address of all mapped memory.
pub const PHYS: u64 = 0x8_0000_0000;
/// Pages of the pool: more than a table needs for 2 GiB.
const TABLES: usize = 1200;

static PAGES: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Returns memory for all tables, aligned and touched; it is never freed.
fn memory() -> &'static [AtomicU64] {
    let layout = Layout::from_size_align(TABLES * 4096, 2 << 20).expect("a layout");
    // SAFETY: the layout has a size.
    let base = unsafe { alloc_zeroed(layout) };
    assert!(!base.is_null(), "no memory");
    // SAFETY: the memory is as large, aligned, zeroed, and has no other owner.
    let words = unsafe { from_raw_parts(base.cast::<AtomicU64>(), TABLES * 512) };
    words.iter().for_each(|w| w.store(0, Ordering::Relaxed));
    words
}

/// Fills the pool.
pub fn warm() {
    let mut pages = PAGES.lock().expect("the lock is not poisoned");
    if pages.is_empty() {
        let base = memory().as_ptr() as usize;
        pages.extend((0..TABLES).rev().map(|n| base + n * 4096));
    }
}

/// Sorts the pool, so that no benchmark depends on the order that another has left.
pub fn tidy() {
    let mut pages = PAGES.lock().expect("the lock is not poisoned");
    pages.sort_unstable_by(|a, b| b.cmp(a));
}

/// Takes a page, not zeroed.
pub fn page() -> usize {
    let page = PAGES.lock().expect("the lock is not poisoned").pop();
    page.expect("the pool is large enough")
}

/// Returns a page to the pool.
pub fn put_back(page: usize) {
    PAGES.lock().expect("the lock is not poisoned").push(page);
}

/// Returns pages to the pool together.
pub fn put_all_back(pages: impl Iterator<Item = usize>) {
    PAGES.lock().expect("the lock is not poisoned").extend(pages);
}

/// A table to benchmark.
pub trait Table {
    /// Name in the results.
    const NAME: &'static str;
    /// Creates an empty table.
    fn new() -> Self;
    /// Maps `size` bytes at `ipa` to the same distance from [`PHYS`], by pages or by 2M blocks.
    fn map(&mut self, ipa: u64, size: u64, blocks: bool);
    /// Maps `count` pages or 2M blocks (`SIZE`) from address 0 on, one by one.
    fn map_each<const SIZE: u64>(&mut self, count: u64);
    /// Translates an address. Each implementation is inlined into the benchmark's loop.
    fn translate(&self, ipa: u64) -> u64;
    /// Write-protects memory that is mapped by pages.
    fn protect(&mut self, ipa: u64, size: u64);
    /// Unmaps memory that is mapped by pages.
    fn unmap(&mut self, ipa: u64, size: u64);

    /// Set if the table can split blocks.
    const SPLITS: bool = false;
    /// Splits the 2M block at `ipa` into pages with its attributes.
    fn split(&mut self, _ipa: u64) {
        unreachable!("it cannot split");
    }
    /// Set if the table can coalesce.
    const COALESCES: bool = false;
    /// Coalesces the block at `ipa`, the `ipa / BLOCK`th that was split.
    fn coalesce(&mut self, _ipa: u64) {
        unreachable!("it cannot coalesce");
    }
    /// Set if addresses can be translated beside maps.
    const WALKS_BESIDE: bool = false;
    /// Coalesces `count` blocks from address 0 on, one by one.
    fn coalesce_each(&mut self, _count: u64) {
        unreachable!("it cannot coalesce");
    }
}
