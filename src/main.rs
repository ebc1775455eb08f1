// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The `granule` command: one module per subcommand, each with `Args` and `run`.

#[cfg(feature = "bench")]
pub mod advise;
#[cfg(feature = "bench")]
pub mod bench;
#[cfg(feature = "lab")]
pub mod cache;
#[cfg(feature = "lab")]
pub mod check;
#[cfg(feature = "bench")]
pub mod compare;
#[cfg(feature = "lab")]
pub mod doctor;
#[cfg(feature = "lab")]
pub mod lab;
#[cfg(feature = "lab")]
pub mod lab_commands;
#[cfg(feature = "lab")]
pub mod ledger;
#[cfg(feature = "bench")]
pub mod manual;
#[cfg(feature = "bench")]
pub mod own_digest;
pub mod run;
pub mod top;
pub mod values;

use std::{
    env,
    error::Error,
    ffi::OsString,
    io::{self, Write},
    process::{self, ExitCode},
};

use clap::{Parser, Subcommand};

/// The C library of static programs maps each small slab of its heap on its own, and unmaps it again.
#[cfg(target_env = "musl")]
#[global_allocator]
static HEAP: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

/// Measures and reduces the cost of stage-2 page faults under KVM
#[derive(Debug, Parser)]
#[command(name = "granule", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
#[cfg_attr(
    not(feature = "bench"),
    expect(clippy::large_enum_variant, reason = "there is one command line")
)]
enum Command {
    #[cfg(feature = "bench")]
    /// Measure and rank the memory backings that this machine offers to a VM
    Advise(advise::Args),
    #[cfg(feature = "bench")]
    /// Run the page-table test on this machine
    Bench(bench::Args),
    #[cfg(feature = "bench")]
    /// Compare two sets of results
    Compare(compare::Args),
    #[cfg(feature = "lab")]
    #[command(flatten)]
    Lab(lab_commands::LabCommand),
    #[command(flatten)]
    Run(RunCommand),
    /// Show the counters of a running VM
    Top(top::Args),
    #[cfg(feature = "bench")]
    /// Print shell completions
    Completions(manual::CompletionsArgs),
    #[cfg(feature = "bench")]
    /// Write man pages to a folder
    Man(manual::Args),
}

/// `granule run` without the other subcommands, whose definitions are a tenth of the instructions
/// from its start to the guest's first one.
#[derive(Debug, Parser)]
#[command(name = "granule", version, propagate_version = true)]
struct RunCli {
    #[command(subcommand)]
    command: RunCommand,
}

#[derive(Debug, Subcommand)]
enum RunCommand {
    /// Launch a Linux guest with its console on this terminal
    Run(run::Args),
}

/// Outcome of a subcommand, which determines the exit code of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandOutcome {
    /// Completion of the command: 0.
    Done,
    /// Failure of a test or a guest, or a regression: 1.
    Failed,
    /// Inconclusive comparison: 125, with which `git bisect run` skips the commit.
    Inconclusive,
    /// Failure to run the command, for which `git bisect run` must stop: 128.
    Abort,
}

impl CommandOutcome {
    const fn exit_code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Inconclusive => 125,
            Self::Abort => 128,
        }
    }
}

/// Result of a subcommand: its outcome, or the error that ends the process with exit code 2.
pub type CommandResult = Result<CommandOutcome, Box<dyn Error>>;

fn main() -> ExitCode {
    #[cfg(feature = "lab")]
    // This program is PID 1 of the lab's emulated host and its guest.
    if granule_lab::run_as_pid_1() {
        return ExitCode::FAILURE;
    }
    env_logger::Builder::from_env(
        env_logger::Env::default().default_filter_or("warn,virtio_queue=off"),
    )
    .format_timestamp(None)
    .init();
    let result = match parse_command_line() {
        #[cfg(feature = "bench")]
        Command::Advise(args) => advise::run(args),
        #[cfg(feature = "bench")]
        Command::Bench(args) => bench::run(args),
        #[cfg(feature = "bench")]
        Command::Compare(args) => compare::run(args),
        #[cfg(feature = "lab")]
        Command::Lab(command) => command.run(),
        Command::Run(RunCommand::Run(args)) => run::run(args),
        Command::Top(args) => top::run(&args),
        #[cfg(feature = "bench")]
        Command::Completions(args) => manual::print_completions(&args),
        #[cfg(feature = "bench")]
        Command::Man(args) => manual::run(&args),
    };
    match result {
        Ok(outcome) => ExitCode::from(outcome.exit_code()),
        Err(error) => {
            #[cfg(feature = "lab")]
            granule_lab::interrupt::wait_if_ending();
            print_error(error.as_ref());
            ExitCode::from(2)
        }
    }
}

fn parse_command_line() -> Command {
    match env::args_os().nth(1) {
        Some(name) if name == "run" => Command::Run(RunCli::parse().command),
        _ => match Cli::try_parse() {
            Ok(cli) => cli.command,
            Err(error) if error.use_stderr() && is_bisection(env::args_os()) => {
                // `git bisect run` interprets clap's exit code 2 as a bad commit.
                let _ = error.print();
                process::exit(CommandOutcome::Abort.exit_code().into());
            }
            Err(error) => error.exit(),
        },
    }
}

/// Reports whether arguments that cannot be parsed are those of `granule compare --bisect`.
fn is_bisection(arguments: impl Iterator<Item = OsString>) -> bool {
    let mut arguments = arguments.skip(1);
    arguments.next().is_some_and(|name| name == "compare")
        && arguments.any(|argument| argument.to_string_lossy().starts_with("--bisect"))
}

/// Writes text to standard output. Returns whether more can be written: a pipe that its reader closed
/// is no error.
pub(crate) fn write_stdout(text: &str) -> io::Result<bool> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        result => result.map(|()| true),
    }
}

/// Prints an error and its causes, each on its own line.
pub(crate) fn print_error(error: &dyn Error) {
    eprintln!("granule: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        eprintln!("  because: {error}");
        cause = error.source();
    }
}

#[cfg(all(test, feature = "bench"))]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn run_alone_has_the_command_line_that_it_has_among_all_subcommands() {
        let help = |command: clap::Command| {
            let arguments = ["granule", "run", "--help"];
            command.try_get_matches_from(arguments).unwrap_err().render().to_string()
        };

        assert_eq!(help(RunCli::command()), help(Cli::command()));
        let refused = RunCli::try_parse_from(["granule", "run", "--vcpus", "0"]).unwrap_err();
        let among_all = Cli::try_parse_from(["granule", "run", "--vcpus", "0"]).unwrap_err();
        assert_eq!(refused.render().to_string(), among_all.render().to_string());
    }
}
