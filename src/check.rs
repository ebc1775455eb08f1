// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule check`: checks a kept trace again.

use granule_lab::{FindingsOptions, ReplayOptions, RunStatus, check_trace};

use super::{CommandOutcome, CommandResult};

/// Options of `granule check`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit code: 0 no finding; 1 findings; 2 the trace cannot be checked.")]
pub struct Args {
    #[command(flatten)]
    replay: ReplayOptions,
    #[command(flatten)]
    findings: FindingsOptions,
}

/// Runs `granule check`.
pub fn run(args: &Args) -> CommandResult {
    Ok(match check_trace(&args.replay, &args.findings)? {
        RunStatus::Passed => CommandOutcome::Done,
        RunStatus::Failed => CommandOutcome::Failed,
    })
}
