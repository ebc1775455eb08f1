// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What each event costs: tables in data files, every number with where it comes from.
//!
//! A table names a CPU (`cost/NAME.toml` beside the module, built in) or is a file of one's own. A
//! number without a source is refused, and so is a name that the simulation does not know.

use std::{fs, io, path::Path};

use serde::Deserialize;
use thiserror::Error;

use super::clock::Picoseconds;

/// The tables that are built in.
const BUILT_IN: [(&str, &str); 2] = [
    ("kunpeng920", include_str!("../cost/kunpeng920.toml")),
    ("neoverse-n1", include_str!("../cost/neoverse-n1.toml")),
];

/// A number and where it comes from.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Number {
    /// The number, in the unit that its field says.
    pub value: f64,
    /// Where it comes from: a publication, the study, a fit, or whose estimate it is.
    pub source: String,
}

macro_rules! costs {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What each event costs on one kind of machine.
        #[derive(Debug, Clone, PartialEq, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct CostTable {
            /// What the machine is.
            pub machine: String,
            $($(#[$doc])* pub $name: Number,)*
        }

        impl CostTable {
            /// Every number by name.
            pub fn numbers(&self) -> Vec<(&'static str, &Number)> {
                vec![$((stringify!($name), &self.$name)),*]
            }

            /// A number to be changed, by name.
            pub fn number_mut(&mut self, name: &str) -> Option<&mut Number> {
                match name {
                    $(stringify!($name) => Some(&mut self.$name),)*
                    _ => None,
                }
            }
        }
    };
}

costs! {
    /// CPUs that a broadcast invalidation reaches.
    cpus,
    /// ns: the guest reads or writes in a page that it has not touched for a while.
    guest_touch,
    /// ns for each vCPU that touches the same lines.
    guest_touch_shared,
    /// ns from the guest's access to the hypervisor's fault handler.
    fault_entry,
    /// ns from there back into the guest.
    fault_exit,
    /// ns: VMA and page of an address that the host has mapped, without waiting.
    page_lookup,
    /// ns that a line which all CPUs write (the host's mmap lock) stays with one of them.
    shared_line,
    /// ns of the fault path under the lock, besides what it does to the table.
    fault_locked,
    /// ns of the host's memory management under the lock, besides what it does to the table.
    host_locked,
    /// ns to take the lock when it is free.
    lock_take,
    /// ns from one holder of the lock to the next that waits.
    lock_handoff,
    /// ns to read an entry.
    entry_load,
    /// ns to write an entry.
    entry_store,
    /// ns to exchange an entry.
    entry_exchange,
    /// ns to count one entry of a table.
    table_reference,
    /// ns to allocate and zero a table.
    table_allocate,
    /// ns to free a table.
    table_free,
    /// ns of a TLB invalidation on this CPU alone, with its barrier.
    tlbi_local,
    /// ns of a broadcast TLB invalidation with its barrier, besides the next.
    tlbi_broadcast,
    /// ns of it for each CPU that it reaches.
    tlbi_each_cpu,
    /// ns to begin cleaning and, at the end, to wait until it is done.
    clean_start,
    /// ns to clean and invalidate a line.
    clean_line,
    /// Lines that go at that rate: what the TLB reaches, by 4K of linear map.
    clean_reach,
    /// ns for each line behind those.
    clean_line_long,
    /// ns to invalidate a line of the I-cache.
    icache_line,
    /// ns to invalidate all I-caches.
    icache_all,
    /// ns of a host page fault, besides zeroing.
    host_fault,
    /// Bytes a ns (GB/s) at which one CPU zeroes memory.
    zero_rate,
    /// Bytes a ns (GB/s) at which all CPUs together write, zero or clean memory.
    memory_rate,
    /// ns between two scans of automatic NUMA balancing for each vCPU that shares the memory, as
    /// `task_scan_start()` has it; 0 switches it off.
    numa_scan_period,
    /// ns that are the most between two scans.
    numa_scan_longest,
    /// Bytes that one scan takes away, so that the next access tells where it comes from.
    numa_scan_bytes,
    /// ns between two reads of an entry that another vCPU has locked.
    locked_wait,
}

/// Why there is no such table.
#[derive(Debug, Error)]
pub enum CostError {
    /// Neither built in nor a file.
    #[error(
        "--cpu {name} is no table of costs: use {}, or the path of a file like it",
        BUILT_IN.map(|(name, _)| name).join(" or ")
    )]
    Unknown {
        /// What was asked for.
        name: String,
        /// Why it is no file.
        #[source]
        source: io::Error,
    },
    /// The file does not hold a table.
    #[error("--cpu {name}: the table of costs is not well formed")]
    Malformed {
        /// Which.
        name: String,
        /// Where and why.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// A number that cannot be.
    #[error("--cpu {name}: {field} is {value}; it must be a number from 0 (rates: above 0) to 1e9")]
    OutOfRange {
        /// Which table.
        name: String,
        /// Which number.
        field: &'static str,
        /// Its value.
        value: f64,
    },
    /// A number without a source.
    #[error("--cpu {name}: {field} has no source; say where it comes from")]
    NoSource {
        /// Which table.
        name: String,
        /// Which number.
        field: &'static str,
    },
}

/// The text of a table: built in, or a file's.
///
/// # Errors
/// There is none of that name.
pub fn text_of(name: &str) -> Result<String, CostError> {
    match BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
        Some((_, text)) => Ok((*text).to_owned()),
        None => fs::read_to_string(Path::new(name)).map_err(|source| CostError::Unknown {
            name: name.to_owned(),
            source,
        }),
    }
}

impl CostTable {
    /// Reads a table; `name` is for errors.
    ///
    /// # Errors
    /// It is malformed, or a number is missing, out of range or without a source.
    pub fn parse(name: &str, text: &str) -> Result<Self, CostError> {
        let name = name.to_owned();
        let table: Self = match toml::from_str(text) {
            Ok(table) => table,
            Err(source) => {
                let source = Box::new(source);
                return Err(CostError::Malformed { name, source });
            }
        };
        for (field, number) in table.numbers() {
            let least = if field.ends_with("_rate") { 1e-3 } else { 0.0 };
            if !(least..=1e12).contains(&number.value) {
                let value = number.value;
                return Err(CostError::OutOfRange { name, field, value });
            }
            if number.source.trim().is_empty() {
                return Err(CostError::NoSource { name, field });
            }
        }
        Ok(table)
    }
}

/// Nanoseconds of a table as the clock counts them.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "parse() keeps it between 0 and 1e12"
)]
pub(super) fn picoseconds(ns: f64) -> Picoseconds {
    (ns * 1000.0).round() as Picoseconds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_that_is_built_in_is_well_formed() {
        for (name, text) in BUILT_IN {
            CostTable::parse(name, text).unwrap();
        }
    }

    #[test]
    fn what_is_no_table_is_refused() {
        let text = text_of("kunpeng920").unwrap();
        let broken = |from: &str, to: &str| {
            let line = text.lines().find(|line| line.starts_with(from)).unwrap();
            let error = CostTable::parse("x", &text.replace(line, to)).unwrap_err();
            format!("{error:?}")
        };

        assert!(
            text_of("pentium")
                .unwrap_err()
                .to_string()
                .contains("kunpeng920")
        );
        assert!(broken("cpus", "").contains("Malformed"));
        assert!(broken("cpus", "cpus = { value = 1, source = ' ' }").contains("NoSource"));
        assert!(broken("cpus", "cpus = { value = -1, source = 'x' }").contains("OutOfRange"));
        assert!(broken("cpus", "cpsu = { value = 1, source = 'x' }").contains("Malformed"));
    }
}
