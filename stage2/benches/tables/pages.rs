// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A warm pool of pages for the tables of all crates. Pages are not zeroed: a crate that needs
//! zeroed pages clears them.

use std::{
    alloc::{Layout, alloc},
    ptr::write_bytes,
    sync::{Mutex, MutexGuard},
};

/// Number of pages: more than the tables for 1 GiB.
const PAGES: usize = 1200;

/// Free pages, in memory that is never freed.
fn free_pages() -> MutexGuard<'static, Vec<usize>> {
    static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    FREE.lock().expect("the lock is not poisoned")
}

/// Sorts the pool, so that each benchmark starts with the same order. The first call fills the
/// pool.
pub fn reset_pool() {
    let mut pages = free_pages();
    if pages.is_empty() {
        let layout = Layout::from_size_align(PAGES * 4096, 2 << 20).expect("a valid layout");
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc(layout) };
        assert!(!base.is_null(), "no memory");
        // SAFETY: the allocation has this size and no other owner.
        unsafe { write_bytes(base, 0, PAGES * 4096) };
        pages.extend((0..PAGES).map(|n| base as usize + n * 4096));
    }
    pages.sort_unstable_by(|a, b| b.cmp(a));
}

/// Takes a page, which is not zeroed.
pub fn take_page() -> usize {
    free_pages().pop().expect("the pool is large enough")
}

pub fn take_zeroed_page() -> usize {
    let page = take_page();
    // SAFETY: the page came from the pool and has no other owner.
    unsafe { write_bytes(page as *mut u8, 0, 4096) };
    page
}

pub fn return_page(page: usize) {
    free_pages().push(page);
}

pub fn return_pages(pages: impl Iterator<Item = usize>) {
    free_pages().extend(pages);
}
