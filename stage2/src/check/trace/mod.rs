// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Traces as text, version 1: one event a line, so that other programs can write them.
//!
//! ```text
//! granule-trace 1 granule=0x1000 ipa-bits=40 vmid=1 root=0x80000000 cpus=2 fwb=0 dic=0 tlbrange=0 bbm=0
//! # CPU event arguments
//! 0 add-memory 0x0 0x100000000 0x200000
//! 0 lock exclusive
//! 0 store 0x80000000 0x0 0x80002003 release
//! 0 dsb ishst
//! 0 tlbi ipas2e1is 0x0 ttl=2
//! 0 unlock
//! ```
//!
//! | event | arguments |
//! |---|---|
//! | `store` | address of the entry, value before, value after, `plain` `release` or `swap` |
//! | `dsb` | `nshst` `nsh` `ishst` `ish`; `isb` has none |
//! | `tlbi` | `ipas2e1[is]` `ipas2le1[is]` address \[`ttl=`n\], `ripas2e1[is]` address bytes \[`ttl=`n\], `vmalle1[is]`, `vmalls12e1[is]` |
//! | `vmid` | number |
//! | `dc` | host address, bytes (`DC CIVAC` over them) |
//! | `ic` | host address, bytes (`IC IVAU`), or nothing (`IC IALLUIS`) |
//! | `allocate` `free` | table |
//! | `ref` | table, change |
//! | `walk` | `begin` or `end` |
//! | `lock` | `exclusive` or `shared`; `unlock` has none |
//! | `top-up` `empty` `look-up` `sequence` | – |
//! | `mark-dirty` `read-log` `remove-memory` | guest address, bytes |
//! | `logging` | guest address, bytes, `on` or `off` |
//! | `write` | host address, bytes |
//! | `add-memory` | guest address, host address, bytes \[`device`\] |
//! | `access` | guest address, `read` `write` or `fetch`, `cached` or `uncached` |
//! | `resume` | guest address, `read` `write` or `fetch`, `translation` `access-flag` or `permission`, level |
//!
//! Numbers are decimal, or hexadecimal with `0x`. Empty lines and text after `#` are ignored.

mod parse;
mod words;
mod write;

use alloc::{string::String, vec::Vec};

use thiserror::Error;

use super::event::{Event, Setup};

/// A recorded run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// The configuration of the run.
    pub setup: Setup,
    /// The events in order.
    pub events: Vec<Event>,
}

/// Error returned when a text is not a trace.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("line {line}: '{text}': {what}")]
pub struct ParseTraceError {
    /// The line, counted from 1.
    pub line: usize,
    /// The text of the line.
    pub text: String,
    /// The defect.
    pub what: &'static str,
}
