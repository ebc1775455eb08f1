// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The figures published for a Kunpeng 920, and their simulation.
//!
//! Costs are [fitted](Fit) to four rows, so that the simulation reproduces their published figures.
//! All other rows test the simulation: the gain must have the published sign and be within
//! [`TOLERANCE`] percentage points. A row that misses states the reason; a row that states a reason
//! and holds is an error, too.
//!
//! The example `kunpeng920` fits, judges and prints the table of `docs/simulation.md`.

mod fit;
mod rows;
mod run;

pub use fit::{FITS, Fit, FitQuantity};
pub use rows::{ROWS, Row, Workload};
pub use run::{JudgedRow, PublishedError, Seconds, TOLERANCE, gain, judge, simulate};
