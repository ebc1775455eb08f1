// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results: JSON Lines, one object for each phase of each iteration, of schema `granule.result/1`
//! ([`Record`](granule_types::record::Record)).
//!
//! The schema is stable. Within `granule.result/1`
//!
//! - fields are only added; a field keeps its name, unit and meaning;
//! - a reader ignores fields that it does not know;
//! - a value that was not measured is absent, and never 0;
//! - an absent provenance field is unknown, and results with unknown provenance compare only by force.
//!
//! A change that breaks one of these rules gets a new schema, which readers of the old one refuse.

mod read;
mod write;

pub use self::{
    read::{ReadError, read_records},
    write::{RecordWriter, WriteError, record_lines},
};
