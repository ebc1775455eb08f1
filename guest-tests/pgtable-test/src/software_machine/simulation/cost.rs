// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables of the cost of each event; every number names its source.
//!
//! A table is built in (`software_machine/cost/NAME.toml`) or a file of the user's. Numbers without
//! a source and unknown names are refused.

use std::{fs, io, path::Path};

use serde::Deserialize;
use thiserror::Error;

use super::{super::PAGE, virtual_time::Picoseconds};

/// The built-in tables.
const BUILT_IN: [(&str, &str); 2] = [
    ("kunpeng920", include_str!("../cost/kunpeng920.toml")),
    ("neoverse-n1", include_str!("../cost/neoverse-n1.toml")),
];

/// A number and its source.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Number {
    /// The number, in the unit that its field documents.
    pub value: f64,
    /// Source: a publication, a fit, or an estimate.
    pub source: String,
}

/// Defines [`CostTable`] and [`Prices`] from the numbers that are times, those that the simulation
/// uses unchanged, and those that [`CostTable::for_vcpus`] adds to others.
macro_rules! costs {
    (
        times: { $($(#[$time_doc:meta])* $time:ident,)* }
        numbers: { $($(#[$number_doc:meta])* $number:ident,)* }
        added: { $($(#[$added_doc:meta])* $added:ident,)* }
    ) => {
        /// The cost of each event on one kind of machine.
        #[derive(Debug, Clone, PartialEq, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct CostTable {
            /// Description of the machine.
            pub machine: String,
            $($(#[$time_doc])* pub $time: Number,)*
            $($(#[$number_doc])* pub $number: Number,)*
            $($(#[$added_doc])* pub $added: Number,)*
        }

        impl CostTable {
            /// Returns every number by name.
            pub fn numbers(&mut self) -> Vec<(&'static str, &mut Number)> {
                vec![
                    $((stringify!($time), &mut self.$time),)*
                    $((stringify!($number), &mut self.$number),)*
                    $((stringify!($added), &mut self.$added),)*
                ]
            }
        }

        /// A cost table for a number of vCPUs, with times in picoseconds.
        #[derive(Debug, Clone, Copy)]
        pub(super) struct Prices {
            $(pub(super) $time: Picoseconds,)*
            $(pub(super) $number: f64,)*
        }

        impl Prices {
            /// Converts a table for this number of vCPUs.
            pub(super) fn new(table: &CostTable, vcpus: u32) -> Self {
                let table = table.for_vcpus(vcpus.into());
                Self {
                    $($time: picoseconds(table.$time.value),)*
                    $($number: table.$number.value,)*
                }
            }
        }
    };
}

costs! {
    times: {
        /// ns of a guest access to a page that it has not accessed recently.
        guest_touch,
        /// ns from the guest's access to the hypervisor's fault handler.
        fault_entry,
        /// ns from the fault handler back into the guest.
        fault_exit,
        /// ns of the lookup of VMA and page of a mapped address, without contention.
        page_lookup,
        /// ns of a write to a cache line that all CPUs write (the host's mmap lock).
        shared_line,
        /// ns of the fault path under the lock, without its operations on the tables.
        fault_locked,
        /// ns of the host's memory management under the lock, without its operations on the tables.
        host_locked,
        /// ns to take a free lock.
        lock_take,
        /// ns of a handoff of the lock to a waiting CPU.
        lock_handoff,
        /// ns to read an entry.
        entry_load,
        /// ns to write an entry.
        entry_store,
        /// ns to exchange an entry (compare and swap).
        entry_exchange,
        /// ns to change a table's reference count.
        table_reference,
        /// ns to allocate and zero a table.
        table_allocate,
        /// ns to free a table.
        table_free,
        /// ns of a local TLB invalidation with its barrier.
        tlbi_local,
        /// ns of a broadcast TLB invalidation with its barrier, without `tlbi_each_cpu`.
        tlbi_broadcast,
        /// ns to invalidate a line in the instruction caches.
        icache_line,
        /// ns to invalidate the instruction caches.
        icache_all,
        /// ns of a page fault of the host, without zeroing.
        host_fault,
        /// ns between two scans of automatic NUMA balancing for each vCPU that shares the memory,
        /// as in `task_scan_start()`; 0 disables it.
        numa_scan_period,
        /// ns between two reads of an entry that another vCPU has locked.
        locked_wait,
    }
    numbers: {
        /// ns to start a clean and invalidate, and to wait for its completion.
        clean_start,
        /// ns to clean and invalidate a line.
        clean_line,
        /// Number of lines at that rate: the reach of the TLB, by 4K pages of the linear map.
        clean_reach,
        /// ns for each line beyond `clean_reach`.
        clean_line_long,
        /// Bytes per ns (GB/s) at which one CPU zeroes memory.
        zero_rate,
        /// Bytes per ns (GB/s) at which all CPUs together write, zero or clean memory.
        memory_rate,
        /// Bytes that one scan protects, so that the next access faults.
        numa_scan_bytes,
    }
    added: {
        /// Number of CPUs that a broadcast invalidation reaches.
        cpus,
        /// ns of a guest access for each vCPU that accesses the same lines.
        guest_touch_shared,
        /// ns of a broadcast TLB invalidation for each CPU that it reaches.
        tlbi_each_cpu,
        /// Maximum ns between two scans.
        numa_scan_longest,
    }
}

/// Error returned for an unusable cost table.
#[derive(Debug, Error)]
pub enum CostError {
    /// The name is neither built in nor a file.
    #[error(
        "unknown --cpu {0}; use {list} or the path of a cost table",
        list = BUILT_IN.map(|(name, _)| name).join(" or ")
    )]
    Unknown(String, #[source] io::Error),
    /// The file is malformed.
    #[error("--cpu {0}: the cost table is malformed")]
    Malformed(String, #[source] Box<toml::de::Error>),
    /// A number is out of range.
    #[error("--cpu {0}: {1} is {2}, not a number from 0 (rates: from 1e-3) to 1e12")]
    OutOfRange(String, &'static str, f64),
    /// A number has no source.
    #[error("--cpu {0}: {1} has no source; add one")]
    NoSource(String, &'static str),
}

/// Returns the text of a built-in table or of a file.
///
/// # Errors
/// The name is neither.
pub fn text_of(name: &str) -> Result<String, CostError> {
    match BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
        Some((_, text)) => Ok((*text).to_owned()),
        None => fs::read_to_string(Path::new(name))
            .map_err(|error| CostError::Unknown(name.to_owned(), error)),
    }
}

impl CostTable {
    /// Reads a table; `name` is its name in errors.
    ///
    /// # Errors
    /// The table is malformed, or a number is missing, out of range or without a source.
    pub fn parse(name: &str, text: &str) -> Result<Self, CostError> {
        let name = name.to_owned();
        let mut table: Self = match toml::from_str(text) {
            Ok(table) => table,
            Err(error) => return Err(CostError::Malformed(name, Box::new(error))),
        };
        for (field, number) in table.numbers() {
            let least = if field.ends_with("_rate") { 1e-3 } else { 0.0 };
            if !(least..=1e12).contains(&number.value) {
                return Err(CostError::OutOfRange(name, field, number.value));
            }
            if number.source.trim().is_empty() {
                return Err(CostError::NoSource(name, field));
            }
        }
        Ok(table)
    }

    /// Returns the table with the costs that depend on the number of vCPUs and CPUs.
    fn for_vcpus(&self, vcpus: f64) -> Self {
        let mut table = self.clone();
        table.guest_touch.value += self.guest_touch_shared.value * vcpus;
        let scan = self.numa_scan_period.value * vcpus;
        table.numa_scan_period.value = scan.min(self.numa_scan_longest.value);
        table.tlbi_broadcast.value += self.tlbi_each_cpu.value * self.cpus.value;
        table
    }
}

/// Converts nanoseconds to the unit of the virtual clock.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "parse() limits it to 0 to 1e12"
)]
pub(super) fn picoseconds(ns: f64) -> Picoseconds {
    (ns * 1000.0).round() as Picoseconds
}

impl Prices {
    /// Returns one CPU's time to clean and invalidate `lines` lines.
    #[expect(clippy::cast_precision_loss, reason = "the number of lines is below 2^53")]
    pub(super) fn clean(&self, lines: u64) -> Picoseconds {
        let short = (lines as f64).min(self.clean_reach);
        let long = lines as f64 - short;
        picoseconds(self.clean_start + short * self.clean_line + long * self.clean_line_long)
    }

    /// Returns the size of one scan of NUMA balancing in bytes, rounded down to whole pages.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "parse() limits it to 0 to 1e12"
    )]
    pub(super) fn scanned_bytes(&self) -> u64 {
        self.numa_scan_bytes as u64 & !(PAGE - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_tables_are_valid() {
        for (name, text) in BUILT_IN {
            CostTable::parse(name, text).unwrap();
        }
    }

    #[test]
    fn invalid_tables_are_refused() {
        let text = text_of("kunpeng920").unwrap();
        let broken = |from: &str, to: &str| {
            let line = text.lines().find(|line| line.starts_with(from)).unwrap();
            let error = CostTable::parse("x", &text.replace(line, to)).unwrap_err();
            format!("{error:?}")
        };

        let unknown = text_of("pentium").unwrap_err().to_string();
        assert!(unknown.contains("kunpeng920"));
        assert!(broken("cpus", "").contains("Malformed"));
        assert!(broken("cpus", "cpus = { value = 1, source = ' ' }").contains("NoSource"));
        assert!(broken("cpus", "cpus = { value = -1, source = 'x' }").contains("OutOfRange"));
        assert!(broken("cpus", "cpsu = { value = 1, source = 'x' }").contains("Malformed"));
    }
}
