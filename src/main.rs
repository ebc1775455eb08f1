// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The `granule` command: one module per subcommand, each with `Args` and `run`. Shell completions
//! and man pages are generated from the definition of the command line.

pub mod advise;
pub mod bench;
#[cfg(feature = "lab")]
pub mod cache;
#[cfg(feature = "lab")]
pub mod check;
pub mod compare;
#[cfg(feature = "lab")]
pub mod doctor;
#[cfg(feature = "lab")]
pub mod lab;
#[cfg(feature = "lab")]
pub mod lab_commands;
#[cfg(feature = "lab")]
pub mod ledger;
pub mod run;
pub mod top;

use std::{
    env,
    error::Error,
    fs,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

/// Measures and reduces the cost of stage-2 page faults under KVM
#[derive(Debug, Parser)]
#[command(name = "granule", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure and rank the memory backings that this machine offers to a VM
    Advise(advise::Args),
    /// Run the page-table test on this machine
    Bench(bench::Args),
    /// Compare two sets of results
    Compare(compare::Args),
    #[cfg(feature = "lab")]
    #[command(flatten)]
    Lab(lab_commands::LabCommand),
    #[command(flatten)]
    Run(RunCommand),
    /// Show the counters of a running VM
    Top(top::Args),
    /// Print shell completions
    Completions(CompletionsArgs),
    /// Write man pages to a folder
    Man(ManArgs),
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
        Command::Advise(args) => advise::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Compare(args) => compare::run(args),
        #[cfg(feature = "lab")]
        Command::Lab(command) => command.run(),
        Command::Run(RunCommand::Run(args)) => run::run(args),
        Command::Top(args) => top::run(&args),
        Command::Completions(args) => print_completions(&args),
        Command::Man(args) => write_man_pages(&args),
    };
    match result {
        Ok(CommandOutcome::Done) => ExitCode::SUCCESS,
        Ok(CommandOutcome::Failed) => ExitCode::from(1),
        Ok(CommandOutcome::Inconclusive) => ExitCode::from(125),
        Ok(CommandOutcome::Abort) => ExitCode::from(128),
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
        _ => Cli::parse().command,
    }
}

/// Writes text to standard output; a pipe that its reader closed is no error.
pub(crate) fn write_stdout(text: &str) -> io::Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
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

/// Options of `granule completions`.
#[derive(Debug, clap::Args)]
struct CompletionsArgs {
    /// Shell for which the completions are
    shell: Shell,
}

/// Options of `granule man`.
#[derive(Debug, clap::Args)]
struct ManArgs {
    /// Folder for the pages, created if missing
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

fn print_completions(args: &CompletionsArgs) -> CommandResult {
    clap_complete::generate(args.shell, &mut Cli::command(), "granule", &mut io::stdout());
    Ok(CommandOutcome::Done)
}

fn write_man_pages(args: &ManArgs) -> CommandResult {
    let pages = Cli::command().disable_help_subcommand(true);
    fs::create_dir_all(&args.folder)
        .and_then(|()| clap_mangen::generate_to(pages, &args.folder))
        .map_err(|error| format!("cannot write man pages to {}: {error}", args.folder.display()))?;
    Ok(CommandOutcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subcommand_has_a_man_page() {
        let folder = tempfile::tempdir().unwrap();

        write_man_pages(&ManArgs { folder: folder.path().join("man1") }).unwrap();

        for name in
            ["", "-advise", "-bench", "-compare", "-doctor", "-lab", "-ledger", "-run", "-top"]
        {
            let page = folder.path().join(format!("man1/granule{name}.1"));
            assert!(fs::metadata(&page).unwrap().len() > 500, "{name}");
        }
    }

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

    #[test]
    fn an_error_names_a_folder_that_cannot_be_written() {
        let error = write_man_pages(&ManArgs { folder: "/proc/man".into() }).unwrap_err();

        assert!(error.to_string().contains("/proc/man"));
    }

    #[test]
    fn completions_include_subcommands_and_options() {
        let mut script = Vec::new();

        clap_complete::generate(Shell::Bash, &mut Cli::command(), "granule", &mut script);

        let script = String::from_utf8(script).unwrap();
        assert!(script.contains("granule,compare)") && script.contains("--each"));
    }
}
