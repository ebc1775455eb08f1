// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The subcommand `granule ledger`.

use granule_lab::{LedgerOptions, RunStatus, interrupt, ledger};

use super::{CommandOutcome, CommandResult};

/// Options of `granule ledger`.
#[derive(Debug, clap::Args)]
#[command(after_help = "The jobs are those of matrix 1: anonymous and THP with 16M and 4 vCPUs, \
                        hugetlb 2M with 64M and 4 or 16 vCPUs, one schedule, aborts counted by \
                        type. A kernel with figures of the same tree, matrix, compiler, \
                        configuration, emulator and programs is not measured again.\n\n\
                        Exit code: 0 done; 1 a kernel does not build or boot, or a job failed; 2 \
                        the run could not be completed.")]
pub struct Args {
    #[command(flatten)]
    options: LedgerOptions,
}

/// Runs `granule ledger`.
pub fn run(args: &Args) -> CommandResult {
    interrupt::announce_resume()?;
    Ok(match ledger(&args.options)? {
        RunStatus::Passed => CommandOutcome::Done,
        RunStatus::Failed => CommandOutcome::Failed,
    })
}
