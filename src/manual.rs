// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The subcommands `granule completions` and `granule man`: shell completions and man pages, generated
//! from the definition of the command line.

use std::{fs, io, path::PathBuf};

use clap::CommandFactory as _;
use clap_complete::Shell;

use super::{Cli, CommandOutcome, CommandResult};

/// Options of `granule completions`.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// Shell for which the completions are
    shell: Shell,
}

/// Options of `granule man`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder for the pages, created if missing
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Runs `granule completions`.
pub fn print_completions(args: &CompletionsArgs) -> CommandResult {
    clap_complete::generate(args.shell, &mut Cli::command(), "granule", &mut io::stdout());
    Ok(CommandOutcome::Done)
}

/// Runs `granule man`.
pub fn run(args: &Args) -> CommandResult {
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

        run(&Args { folder: folder.path().join("man1") }).unwrap();

        for name in
            ["", "-advise", "-bench", "-compare", "-doctor", "-lab", "-ledger", "-run", "-top"]
        {
            let page = folder.path().join(format!("man1/granule{name}.1"));
            assert!(fs::metadata(&page).unwrap().len() > 500, "{name}");
        }
    }

    #[test]
    fn an_error_names_a_folder_that_cannot_be_written() {
        let error = run(&Args { folder: "/proc/man".into() }).unwrap_err();

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
