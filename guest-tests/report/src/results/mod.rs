// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results: JSON Lines, one object for each phase of each iteration (`granule.result/1`).

mod read;
mod write;

pub use read::{ReadError, read_records};
pub use write::{RecordWriter, WriteError, record_lines};
