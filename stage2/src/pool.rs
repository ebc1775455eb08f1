// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A pool of tables in contiguous memory, without an allocator and without `unsafe`.
//!
//! The root tables come first. The other tables are on a free list, which CPUs access concurrently
//! by compare-and-swap; a tag in its head prevents ABA. The memory may be a `static`.

use core::ops::Deref;

use thiserror::Error;

use crate::{
    address::{EntryAddress, PhysAddr, TableAddress},
    descriptor::Descriptor,
    geometry::{ADDRESS_BITS, Geometry, RootError, to_usize},
    operations::{Dsb, Operations, Order, Tlbi, UnlinkedTable, Vmid},
    sync::{AtomicU64, Ordering, fence},
};

/// End of the free list.
const END_OF_LIST: u64 = u32::MAX as u64;

/// Error returned when a pool cannot be created in the given memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "fields are the pool's address and numbers of tables and words")]
pub enum PoolError {
    /// Error returned for a base at which no root can be.
    #[error(transparent)]
    Root(#[from] RootError),
    /// Error returned when the root does not fit into the pool, or the pool has more tables than the
    /// free list can number.
    #[error("pool of {tables} tables: the root has {root_tables}, and the limit is 4,294,967,294")]
    TableCount { tables: u64, root_tables: u64 },
    /// Error returned when the metadata has fewer than two words for each table.
    #[error("metadata of {words} words: {tables} tables need two words each")]
    Metadata { words: u64, tables: u64 },
    /// Error returned when the pool extends beyond the output address size of descriptors.
    #[error("pool of {tables} tables at {base}: beyond 48 address bits")]
    OutOfRange { base: PhysAddr, tables: u64 },
}

/// A pool of tables with their reference counts.
#[derive(Debug)]
pub struct TablePool<M> {
    base: u64,
    entries_in_table: u64,
    shift: u32,
    root_tables: u64,
    entries: M,
    /// Two words for each table: its reference count, and the next free table.
    metadata: M,
    /// Tag in the upper half, index of the first free table in the lower half.
    head: AtomicU64,
}

impl<M: Deref<Target = [AtomicU64]>> TablePool<M> {
    /// Creates a pool in `entries`, which CPUs access at `base` (a multiple of
    /// [`Geometry::root_alignment`]), with two words of `metadata` for each table. Entries that fill no
    /// whole table, and further words, stay unused.
    ///
    /// # Errors
    /// [`PoolError`] if the root or the pool cannot be at `base`, or a slice has the wrong length.
    pub fn new(
        base: PhysAddr,
        geometry: &Geometry,
        entries: M,
        metadata: M,
    ) -> Result<Self, PoolError> {
        let entries_in_table = geometry.granule().entries();
        let tables = entries.len() as u64 / entries_in_table;
        let (words, root_tables) = (metadata.len() as u64, geometry.root_tables());
        geometry.check_root(TableAddress(base.0))?;
        if tables < root_tables || tables >= END_OF_LIST {
            return Err(PoolError::TableCount { tables, root_tables });
        }
        if words < 2 * tables {
            return Err(PoolError::Metadata { words, tables });
        }
        if tables * geometry.granule().size() > (1 << ADDRESS_BITS) - base.0 {
            return Err(PoolError::OutOfRange { base, tables });
        }
        let pool = Self {
            base: base.0,
            entries_in_table,
            shift: geometry.granule().shift(),
            root_tables,
            entries,
            metadata,
            head: AtomicU64::new(END_OF_LIST),
        };
        for table in (root_tables..tables).rev() {
            pool.push(table, table);
        }
        (0..root_tables).for_each(|table| pool.zero_table(table));
        Ok(pool)
    }

    /// Returns the first table of the root.
    pub const fn root(&self) -> TableAddress {
        TableAddress(self.base)
    }

    fn table_index(&self, table: TableAddress) -> u64 {
        (table.0 - self.base) >> self.shift
    }

    fn reference_count(&self, table: TableAddress) -> &AtomicU64 {
        &self.metadata[to_usize(2 * self.table_index(table))]
    }

    fn next_free(&self, table: u64) -> &AtomicU64 {
        &self.metadata[to_usize(2 * table + 1)]
    }

    fn zero_table(&self, table: u64) {
        let from = to_usize(table * self.entries_in_table);
        let to = from + to_usize(self.entries_in_table);
        for line in self.entries[from..to].chunks_exact(8) {
            for word in line {
                word.store(0, Ordering::Relaxed);
            }
        }
        self.metadata[to_usize(2 * table)].store(1, Ordering::Relaxed);
    }

    /// Pushes a chain of tables onto the free list.
    fn push(&self, first: u64, last: u64) {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            self.next_free(last).store(head & END_OF_LIST, Ordering::Relaxed);
            let new = ((head >> 32).wrapping_add(1) << 32) | first;
            match self.head.compare_exchange_weak(head, new, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Allocates a zeroed table with a reference count of 1. Returns `None` if no table is free.
    pub fn allocate(&self) -> Option<TableAddress> {
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let table = head & END_OF_LIST;
            if table == END_OF_LIST {
                return None;
            }
            let next = self.next_free(table).load(Ordering::Relaxed);
            let new = ((head >> 32).wrapping_add(1) << 32) | next;
            match self.head.compare_exchange_weak(head, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    self.zero_table(table);
                    return Some(TableAddress(self.base + (table << self.shift)));
                }
                Err(now) => head = now,
            }
        }
    }

    /// Frees a table.
    ///
    /// # Panics
    /// Panics if the table is not in the pool.
    pub fn free(&self, table: TableAddress) {
        self.free_all(&[table]);
    }

    /// Frees several tables.
    ///
    /// # Panics
    /// Panics if a table is not in the pool.
    pub fn free_all(&self, tables: &[TableAddress]) {
        let (Some(first), Some(last)) = (tables.first(), tables.last()) else {
            return;
        };
        let root = |table| self.table_index(table) < self.root_tables;
        debug_assert!(!tables.iter().any(|t| root(*t)), "the root is never freed");
        for pair in tables.windows(2) {
            let next = self.table_index(pair[1]);
            self.next_free(self.table_index(pair[0])).store(next, Ordering::Relaxed);
        }
        self.push(self.table_index(*first), self.table_index(*last));
    }

    /// Returns the number of free tables; exact while no other thread allocates or frees.
    pub fn free_tables(&self) -> usize {
        let mut count = 0;
        let mut table = self.head.load(Ordering::Acquire) & END_OF_LIST;
        while table != END_OF_LIST {
            count += 1;
            table = self.next_free(table).load(Ordering::Relaxed);
        }
        count
    }

    #[inline]
    fn word(&self, entry: EntryAddress) -> &AtomicU64 {
        &self.entries[to_usize((entry.0 - self.base) >> 3)]
    }
}

/// Writes adjacent entries in memory, for [`Operations::store_adjacent`]: the first maps the memory of
/// `leaf`, and each further one the next `span` bytes.
#[inline]
pub fn store_adjacent(entries: &[AtomicU64], leaf: Descriptor, span: u64, order: Order) {
    if order == Order::Release {
        fence(Ordering::Release);
    }
    let mut next = leaf.0;
    // Whole cache lines: eight stores without a branch.
    let mut lines = entries.chunks_exact(8);
    for line in &mut lines {
        for entry in line {
            entry.store(next, Ordering::Relaxed);
            next += span;
        }
    }
    for entry in lines.remainder() {
        entry.store(next, Ordering::Relaxed);
        next += span;
    }
}

/// Returns zeroed words for a pool.
#[cfg(any(test, feature = "alloc"))]
pub fn zeroed_words(count: usize) -> alloc::boxed::Box<[AtomicU64]> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// Operations on a pool that access entries and perform no barriers, TLBIs or CMOs.
///
/// Use them for a table built before its guest first runs, and in tests. Once a CPU may walk the
/// table, a wrapper must add the barriers, TLBIs and CMOs that the architecture requires. Shared
/// walks must not coalesce: deferred tables ([`Operations::defer_free`]) are never freed. Entries and
/// tables outside the pool cause panics.
#[derive(Debug)]
pub struct NoMaintenance<'a, M>(pub &'a TablePool<M>);

impl<M: Deref<Target = [AtomicU64]>> Operations for NoMaintenance<'_, M> {
    #[inline]
    fn load(&self, entry: EntryAddress) -> Descriptor {
        Descriptor(self.0.word(entry).load(Ordering::Acquire))
    }

    #[inline]
    fn store(&self, entry: EntryAddress, new: Descriptor, order: Order) {
        let ordering = match order {
            Order::Plain => Ordering::Relaxed,
            Order::Release => Ordering::Release,
        };
        self.0.word(entry).store(new.0, ordering);
    }

    fn store_adjacent(
        &self,
        first: EntryAddress,
        count: u64,
        leaf: Descriptor,
        span: u64,
        order: Order,
    ) {
        let from = to_usize((first.0 - self.0.base) >> 3);
        store_adjacent(&self.0.entries[from..from + to_usize(count)], leaf, span, order);
    }

    #[inline]
    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        self.0
            .word(entry)
            .compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(Descriptor)
    }

    fn allocate(&self) -> Option<TableAddress> {
        self.0.allocate()
    }

    fn free(&self, table: TableAddress) {
        self.0.free(table);
    }

    fn free_all(&self, tables: &[TableAddress]) {
        self.0.free_all(tables);
    }

    fn defer_free(&self, _: UnlinkedTable) {}

    #[inline]
    fn take_references(&self, table: TableAddress, count: u32) {
        self.0.reference_count(table).fetch_add(count.into(), Ordering::Relaxed);
    }

    #[inline]
    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        let before = self.0.reference_count(table).fetch_sub(count.into(), Ordering::AcqRel);
        u32::try_from(before.saturating_sub(count.into())).unwrap_or(u32::MAX)
    }

    #[inline]
    fn references(&self, table: TableAddress) -> u32 {
        u32::try_from(self.0.reference_count(table).load(Ordering::Acquire)).unwrap_or(u32::MAX)
    }

    #[inline]
    fn dsb(&self, _: Dsb) {}

    #[inline]
    fn isb(&self) {}

    #[inline]
    fn tlbi(&self, _: Tlbi) {}

    #[inline]
    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        vmid
    }

    #[inline]
    fn clean_invalidate(&self, _: PhysAddr, _: u64) {}

    #[inline]
    fn invalidate_icache(&self, _: Option<(PhysAddr, u64)>) {}
}
