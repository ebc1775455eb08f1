// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What simulated CPUs share: the table and its lock, the memory system, the host's memory.
//!
//! What is shared *and narrow* is where parallel machines wait, so each has a time until which it is
//! taken: the path to memory ([`World::transfer`]), which carries so many bytes a nanosecond for all
//! CPUs together, and the line of the host's mmap lock ([`World::shared_line`]), which one CPU at a
//! time can write.

use granule_types::mix::mix;
use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap},
    hash::{BuildHasherDefault, Hasher},
};

use granule_stage2::{
    EntryAddress, Stage2, descriptor::Descriptor, epoch::EpochReclaim, fault::Mmu,
};

use super::{
    clock::{self, Picoseconds},
    cost::{CostTable, picoseconds},
    host::{HostMemory, SMALL},
    lock::VirtualLock,
    tables::Tables,
};
use crate::software_machine::shared::{Count, NAMES};
use granule_types::record::EventCounts;

/// How much of a long transfer goes in one piece, so that several share the path.
const PIECE: u64 = 256 << 10;

/// A cost table as the clock counts, with what depends on the number of CPUs worked out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prices {
    pub(super) guest_touch: Picoseconds,
    pub(super) fault_entry: Picoseconds,
    pub(super) fault_exit: Picoseconds,
    pub(super) page_lookup: Picoseconds,
    pub(super) shared_line: Picoseconds,
    pub(super) fault_locked: Picoseconds,
    pub(super) host_locked: Picoseconds,
    pub(super) numa_scan_period: Picoseconds,
    pub(super) numa_scan_bytes: u64,
    pub(super) lock_take: Picoseconds,
    pub(super) lock_handoff: Picoseconds,
    pub(super) entry_load: Picoseconds,
    pub(super) entry_store: Picoseconds,
    pub(super) entry_exchange: Picoseconds,
    pub(super) table_reference: Picoseconds,
    pub(super) table_allocate: Picoseconds,
    pub(super) table_free: Picoseconds,
    pub(super) tlbi_local: Picoseconds,
    pub(super) tlbi_broadcast: Picoseconds,
    pub(super) icache_line: Picoseconds,
    pub(super) icache_all: Picoseconds,
    pub(super) host_fault: Picoseconds,
    pub(super) locked_wait: Picoseconds,
    clean_start: f64,
    clean_line: f64,
    clean_reach: f64,
    clean_line_long: f64,
    zero_rate: f64,
    memory_rate: f64,
}

impl Prices {
    pub(super) fn new(table: &CostTable, vcpus: u32) -> Self {
        let price = |number: &super::cost::Number| picoseconds(number.value);
        let touch = table.guest_touch.value + table.guest_touch_shared.value * f64::from(vcpus);
        let scan = table.numa_scan_period.value * f64::from(vcpus);
        let broadcast = table.tlbi_broadcast.value + table.tlbi_each_cpu.value * table.cpus.value;
        Self {
            guest_touch: picoseconds(touch),
            fault_entry: price(&table.fault_entry),
            fault_exit: price(&table.fault_exit),
            page_lookup: price(&table.page_lookup),
            shared_line: price(&table.shared_line),
            fault_locked: price(&table.fault_locked),
            host_locked: price(&table.host_locked),
            numa_scan_period: picoseconds(scan.min(table.numa_scan_longest.value)),
            numa_scan_bytes: whole_pages(table.numa_scan_bytes.value),
            lock_take: price(&table.lock_take),
            lock_handoff: price(&table.lock_handoff),
            entry_load: price(&table.entry_load),
            entry_store: price(&table.entry_store),
            entry_exchange: price(&table.entry_exchange),
            table_reference: price(&table.table_reference),
            table_allocate: price(&table.table_allocate),
            table_free: price(&table.table_free),
            tlbi_local: price(&table.tlbi_local),
            tlbi_broadcast: picoseconds(broadcast),
            icache_line: price(&table.icache_line),
            icache_all: price(&table.icache_all),
            host_fault: price(&table.host_fault),
            locked_wait: price(&table.locked_wait),
            clean_start: table.clean_start.value,
            clean_line: table.clean_line.value,
            clean_reach: table.clean_reach.value,
            clean_line_long: table.clean_line_long.value,
            zero_rate: table.zero_rate.value,
            memory_rate: table.memory_rate.value,
        }
    }

    /// One CPU's time for cleaning that many lines.
    #[expect(clippy::cast_precision_loss, reason = "far fewer lines than 2^53")]
    fn clean(&self, lines: u64) -> Picoseconds {
        let short = (lines as f64).min(self.clean_reach);
        let long = lines as f64 - short;
        picoseconds(self.clean_start + short * self.clean_line + long * self.clean_line_long)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a table's numbers are checked"
)]
fn whole_pages(bytes: f64) -> u64 {
    bytes as u64 & !(SMALL - 1)
}

/// Keys are page addresses: mixing their bits is all that is needed, and the same every time.
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

/// The state of a simulated machine.
#[derive(Debug)]
pub(super) struct World {
    pub(super) prices: Prices,
    pub(super) mmu: Mmu<VirtualLock>,
    pub(super) tables: Tables,
    pub(super) reclaim: EpochReclaim,
    pub(super) host: HostMemory,
    /// Grows whenever an entry changes.
    pub(super) changes: Cell<u64>,
    pub(super) logging: Cell<bool>,
    /// A bit a page.
    pub(super) dirty: RefCell<Vec<u64>>,
    /// What was written; all else reads as zero.
    contents: RefCell<Contents>,
    counts: [Cell<u64>; NAMES.len()],
    pub(super) invalidations: Cell<u64>,
    /// vCPUs that are at work.
    pub(super) working: Cell<usize>,
    memory_free: Cell<Picoseconds>,
    line_free: Cell<Picoseconds>,
}

impl World {
    pub(super) fn new(
        prices: Prices,
        table: Stage2,
        tables: Tables,
        host: HostMemory,
        cpus: usize,
    ) -> Self {
        let pages = usize::try_from(host.size() / 4096).unwrap_or(usize::MAX);
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
        events.insert(
            "model_host_invalidations".to_owned(),
            self.invalidations.get(),
        );
        events
    }

    /// Cleans and invalidates lines.
    pub(super) fn clean(&self, lines: u64) {
        self.transfer(lines * 64, self.prices.clean(lines));
    }

    /// Zeroes memory.
    #[expect(clippy::cast_precision_loss, reason = "far fewer bytes than 2^53")]
    pub(super) fn zero(&self, bytes: u64) {
        let alone = picoseconds(bytes as f64 / self.prices.zero_rate);
        self.transfer(bytes, alone);
    }

    /// Moves bytes to memory, which takes one CPU `alone`, or longer where the path is taken.
    #[expect(clippy::cast_precision_loss, reason = "far fewer bytes than 2^53")]
    fn transfer(&self, bytes: u64, alone: Picoseconds) {
        let pieces = bytes.div_ceil(PIECE).max(1);
        for piece in 0..pieces {
            // What rounding leaves over goes with the last.
            let part = |whole: u64| match piece + 1 == pieces {
                true => whole - whole / pieces * (pieces - 1),
                false => whole / pieces,
            };
            let carried = picoseconds(part(bytes) as f64 / self.prices.memory_rate);
            let start = clock::now().max(self.memory_free.get());
            self.memory_free.set(start + carried);
            clock::spend_until((clock::now() + part(alone)).max(start + carried));
        }
    }

    /// Writes the line that all CPUs write.
    pub(super) fn shared_line(&self) {
        let start = clock::now().max(self.line_free.get());
        let end = start + self.prices.shared_line;
        self.line_free.set(end);
        clock::spend_until(end);
    }

    pub(super) fn read(&self, phys: u64) -> u64 {
        self.contents.borrow().get(&phys).copied().unwrap_or(0)
    }

    pub(super) fn write(&self, phys: u64, value: u64) {
        self.contents.borrow_mut().insert(phys, value);
    }

    /// All memory is gone.
    pub(super) fn forget(&self) {
        self.contents.borrow_mut().clear();
        self.host.forget();
    }
}
