// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! State shared by the simulated CPUs: tables and lock, memory system, host memory.
//!
//! A resource that one CPU at a time can use has a time until which it is busy: the path to memory
//! ([`SimState::transfer`]), which carries a number of bytes per nanosecond for all CPUs together,
//! and the cache line of the host's mmap lock ([`SimState::shared_line`]), which one CPU at a time
//! can write.

use std::{
    cell::{Cell, OnceCell, RefCell},
    collections::{BTreeMap, HashMap},
    hash::{BuildHasherDefault, Hasher},
};

use granule_stage2::{
    EntryAddress, Stage2, TableAddress, descriptor::Descriptor, epoch::EpochReclaim, fault::Mmu,
};

use super::{
    super::{Count, NAMES, PAGE},
    cost::{Prices, picoseconds},
    host_memory::HostMemory,
    lock::VirtualLock,
    virtual_time::{self, Picoseconds},
};
use granule_types::{mix, record::EventCounts};

/// Size of the pieces of a long transfer, so that CPUs share the path to memory.
const PIECE: u64 = 256 << 10;

/// A hasher of addresses that mixes their bits, the same way in every run.
#[derive(Debug, Default)]
pub(super) struct PageHasher(u64);

impl Hasher for PageHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0 ^ value);
    }
}

/// Words by host address.
type Contents = HashMap<u64, u64, BuildHasherDefault<PageHasher>>;

/// State of a simulated machine.
#[derive(Debug)]
pub(super) struct SimState {
    pub(super) prices: Prices,
    pub(super) mmu: Mmu<VirtualLock>,
    pub(super) tables: Tables,
    pub(super) reclaim: EpochReclaim,
    pub(super) host: HostMemory,
    /// Number of changes of entries.
    pub(super) changes: Cell<u64>,
    pub(super) logging: Cell<bool>,
    /// Dirty bitmap: one bit for each page.
    pub(super) dirty: RefCell<Vec<u64>>,
    /// Written words; all others read as zero.
    contents: RefCell<Contents>,
    counts: [Cell<u64>; NAMES.len()],
    pub(super) invalidations: Cell<u64>,
    /// Number of vCPUs that execute a task.
    pub(super) working: Cell<usize>,
    memory_free: Cell<Picoseconds>,
    line_free: Cell<Picoseconds>,
}

impl SimState {
    pub(super) fn new(
        prices: Prices,
        table: Stage2,
        tables: Tables,
        host: HostMemory,
        cpus: usize,
    ) -> Self {
        let pages = usize::try_from(host.size() / PAGE).unwrap_or(usize::MAX);
        Self {
            prices,
            mmu: Mmu::new(table),
            tables,
            reclaim: EpochReclaim::new(cpus),
            host,
            changes: Cell::new(0),
            logging: Cell::new(false),
            dirty: RefCell::new(vec![0; pages.div_ceil(64)]),
            contents: RefCell::default(),
            counts: Default::default(),
            invalidations: Cell::new(0),
            working: Cell::new(0),
            memory_free: Cell::new(0),
            line_free: Cell::new(0),
        }
    }

    /// Writes an entry.
    pub(super) fn change(&self, entry: EntryAddress, new: Descriptor) {
        self.changes.set(self.changes.get() + 1);
        self.tables.store(entry, new);
    }

    pub(super) fn count(&self, what: Count, by: u64) {
        let count = &self.counts[what as usize];
        count.set(count.get() + by);
    }

    pub(super) fn events(&self) -> EventCounts {
        let mut events: BTreeMap<_, _> = NAMES
            .iter()
            .zip(&self.counts)
            .map(|(name, count)| ((*name).to_owned(), count.get()))
            .collect();
        events.insert("model_host_invalidations".to_owned(), self.invalidations.get());
        events
    }

    /// Cleans and invalidates lines.
    pub(super) fn clean(&self, lines: u64) {
        self.transfer(lines * 64, self.prices.clean(lines));
    }

    /// Zeroes memory.
    #[expect(clippy::cast_precision_loss, reason = "the number of bytes is below 2^53")]
    pub(super) fn zero(&self, bytes: u64) {
        let alone = picoseconds(bytes as f64 / self.prices.zero_rate);
        self.transfer(bytes, alone);
    }

    /// Moves bytes to memory, which takes one CPU `alone`, or longer where other CPUs use the path.
    #[expect(clippy::cast_precision_loss, reason = "the number of bytes is below 2^53")]
    fn transfer(&self, bytes: u64, alone: Picoseconds) {
        let pieces = bytes.div_ceil(PIECE).max(1);
        for piece in 0..pieces {
            // The last piece takes the remainder of the division.
            let part = |whole: u64| match piece + 1 == pieces {
                true => whole - whole / pieces * (pieces - 1),
                false => whole / pieces,
            };
            let carried = picoseconds(part(bytes) as f64 / self.prices.memory_rate);
            let start = virtual_time::now().max(self.memory_free.get());
            self.memory_free.set(start + carried);
            virtual_time::spend_until((virtual_time::now() + part(alone)).max(start + carried));
        }
    }

    /// Writes the cache line of the host's mmap lock.
    pub(super) fn shared_line(&self) {
        let start = virtual_time::now().max(self.line_free.get());
        let end = start + self.prices.shared_line;
        self.line_free.set(end);
        virtual_time::spend_until(end);
    }

    pub(super) fn read(&self, phys: u64) -> u64 {
        self.contents.borrow().get(&phys).copied().unwrap_or(0)
    }

    pub(super) fn write(&self, phys: u64, value: u64) {
        self.contents.borrow_mut().insert(phys, value);
    }

    /// Discards all memory.
    pub(super) fn forget(&self) {
        self.contents.borrow_mut().clear();
        self.host.forget();
    }
}

/// Host address of the tables, apart from the memory under test.
const BASE: u64 = 1 << 46;
const SHIFT: u32 = 12;
const ENTRIES: usize = 512;

type Entries = Box<[Cell<u64>]>;

/// A pool of 4K tables.
#[derive(Debug)]
pub(super) struct Tables {
    tables: Box<[OnceCell<Entries>]>,
    references: Box<[Cell<u32>]>,
    free: RefCell<Vec<u32>>,
    /// Number of tables that were ever in use.
    made: Cell<usize>,
}

fn index(address: u64) -> usize {
    usize::try_from((address - BASE) >> SHIFT).unwrap_or(usize::MAX)
}

impl Tables {
    /// Returns a pool of `most` tables, the first `root` of them in use.
    pub(super) fn new(root: usize, most: usize) -> Self {
        let tables = Self {
            tables: (0..most).map(|_| OnceCell::new()).collect(),
            references: (0..most).map(|_| Cell::new(1)).collect(),
            free: RefCell::new(Vec::new()),
            made: Cell::new(0),
        };
        for _ in 0..root {
            let _ = tables.allocate();
        }
        tables
    }

    pub(super) const fn root(&self) -> TableAddress {
        TableAddress(BASE)
    }

    /// Returns a zeroed table, or `None` when the pool is exhausted.
    pub(super) fn allocate(&self) -> Option<TableAddress> {
        let number = self.free.borrow_mut().pop().map_or_else(
            || {
                let number = self.made.get();
                self.made.set(number + 1);
                number
            },
            |number| number as usize,
        );
        let entries = self.tables.get(number)?;
        let zeroes = || (0..ENTRIES).map(|_| Cell::new(0)).collect();
        entries.get_or_init(zeroes).iter().for_each(|e| e.set(0));
        self.references[number].set(1);
        Some(TableAddress(BASE + ((number as u64) << SHIFT)))
    }

    pub(super) fn free(&self, table: TableAddress) {
        let number = u32::try_from(index(table.0)).unwrap_or(u32::MAX);
        self.free.borrow_mut().push(number);
    }

    fn entry(&self, entry: EntryAddress) -> &Cell<u64> {
        let at = usize::try_from((entry.0 >> 3) % ENTRIES as u64).unwrap_or(0);
        match self.tables[index(entry.0)].get() {
            Some(entries) => &entries[at],
            None => panic!("{:#x} is not in a table in use", entry.0),
        }
    }

    pub(super) fn load(&self, entry: EntryAddress) -> Descriptor {
        Descriptor(self.entry(entry).get())
    }

    pub(super) fn store(&self, entry: EntryAddress, new: Descriptor) {
        self.entry(entry).set(new.0);
    }

    /// Returns the reference count of a table.
    pub(super) fn references(&self, table: TableAddress) -> &Cell<u32> {
        &self.references[index(table.0)]
    }
}
