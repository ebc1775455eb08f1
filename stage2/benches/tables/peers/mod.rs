// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of other crates, behind the few operations that all have. Their pages come from one pool
//! that is warm: every page has been touched. Who needs zeroes writes them.

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
/// Where all that is mapped lies.
pub const PHYS: u64 = 0x8_0000_0000;
/// More than any of the tables needs for 2 GiB of pages.
const TABLES: usize = 1200;

static PAGES: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// Memory for all tables, aligned alike for everybody, touched, and never given back.
fn memory() -> &'static [AtomicU64] {
    let layout = Layout::from_size_align(TABLES * 4096, 2 << 20).expect("a layout");
    // SAFETY: the layout has a size.
    let base = unsafe { alloc_zeroed(layout) };
    assert!(!base.is_null(), "no memory");
    // SAFETY: it is as large as that, aligned, zeroed, and nobody else's.
    let words = unsafe { from_raw_parts(base.cast::<AtomicU64>(), TABLES * 512) };
    words.iter().for_each(|w| w.store(0, Ordering::Relaxed));
    words
}

/// Fills the pool.
pub fn warm() {
    let mut pages = PAGES.lock().expect("nobody panics");
    if pages.is_empty() {
        let base = memory().as_ptr() as usize;
        pages.extend((0..TABLES).rev().map(|n| base + n * 4096));
    }
}

/// Puts the pool in order: nobody inherits how others have left it.
pub fn tidy() {
    let mut pages = PAGES.lock().expect("nobody panics");
    pages.sort_unstable_by(|a, b| b.cmp(a));
}

/// A page, not zeroed.
pub fn page() -> usize {
    let page = PAGES.lock().expect("nobody panics").pop();
    page.expect("the pool is large enough")
}

/// Puts a page back.
pub fn put_back(page: usize) {
    PAGES.lock().expect("nobody panics").push(page);
}

/// Puts pages back, all at once.
pub fn put_all_back(pages: impl Iterator<Item = usize>) {
    PAGES.lock().expect("nobody panics").extend(pages);
}

/// A table under test.
pub trait Table {
    /// Its name in the results.
    const NAME: &'static str;
    /// An empty one.
    fn new() -> Self;
    /// Maps `size` bytes at `ipa` to the same distance from [`PHYS`], by pages or by 2M blocks.
    fn map(&mut self, ipa: u64, size: u64, blocks: bool);
    /// Maps `count` pages or 2M blocks (`SIZE`) from address 0 on, one by one.
    fn map_each<const SIZE: u64>(&mut self, count: u64);
    /// Where an address leads. Everybody's becomes part of the loop around it, as it does where it is
    /// called but once.
    fn translate(&self, ipa: u64) -> u64;
    /// Takes the permission to write from what was mapped by pages.
    fn protect(&mut self, ipa: u64, size: u64);
    /// Unmaps what was mapped by pages.
    fn unmap(&mut self, ipa: u64, size: u64);

    /// Whether it can split.
    const SPLITS: bool = false;
    /// Splits the 2M block at `ipa` into pages with its attributes.
    fn split(&mut self, _ipa: u64) {
        unreachable!("it cannot split");
    }
    /// Whether it can put blocks together again.
    const COALESCES: bool = false;
    /// Puts the block at `ipa` together again, the `ipa / BLOCK`th that was split.
    fn coalesce(&mut self, _ipa: u64) {
        unreachable!("it cannot coalesce");
    }
    /// Whether addresses can be looked up while others map.
    const WALKS_BESIDE: bool = false;
    /// Puts `count` blocks that were split together again, one by one from address 0 on, as their
    /// owner knows what they were.
    fn coalesce_each(&mut self, _count: u64) {
        unreachable!("it cannot coalesce");
    }
}
