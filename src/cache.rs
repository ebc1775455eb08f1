// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule cache`: lists and prunes the cache of the lab.

use granule_lab::{CacheCommand, execute_cache_command};

use super::{CommandOutcome, CommandResult};

/// Options of `granule cache`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: CacheCommand,
}

/// Runs `granule cache`.
pub fn run(args: &Args) -> CommandResult {
    execute_cache_command(&args.command)?;
    Ok(CommandOutcome::Done)
}
