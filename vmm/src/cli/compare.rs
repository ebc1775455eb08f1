// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule compare`.

use super::{CommandResult, Outcome};

/// Options of `granule compare`.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Carries `granule compare` out.
///
/// # Errors
/// What was asked for cannot be done; the error says why.
pub fn run(_args: Args) -> CommandResult {
    Ok(Outcome::Done)
}
