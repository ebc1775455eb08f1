// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule bench`.

use super::{CommandResult, Outcome};

/// Options of `granule bench`.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Carries `granule bench` out.
///
/// # Errors
/// What was asked for cannot be done; the error says why.
pub fn run(_args: Args) -> CommandResult {
    Ok(Outcome::Done)
}
