// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Costs as the virtual clock counts them.

use super::{
    cost::{CostTable, Number, picoseconds},
    virtual_time::Picoseconds,
};
use crate::software_machine::config::PAGE;

/// A cost table in picoseconds, for a number of CPUs.
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
    pub(super) zero_rate: f64,
    pub(super) memory_rate: f64,
}

impl Prices {
    /// Converts a table for this number of vCPUs.
    pub(super) fn new(table: &CostTable, vcpus: u32) -> Self {
        let price = |number: &Number| picoseconds(number.value);
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

    /// Returns one CPU's time to clean and invalidate that many lines.
    #[expect(
        clippy::cast_precision_loss,
        reason = "the number of lines is below 2^53"
    )]
    pub(super) fn clean(&self, lines: u64) -> Picoseconds {
        let short = (lines as f64).min(self.clean_reach);
        let long = lines as f64 - short;
        picoseconds(self.clean_start + short * self.clean_line + long * self.clean_line_long)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "parse() checks the numbers of a table"
)]
fn whole_pages(bytes: f64) -> u64 {
    bytes as u64 & !(PAGE - 1)
}
