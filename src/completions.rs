// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule completions` and `granule man`: what shells and `man` need, made from the command
//! line's own definition.

use std::{fs, io, path::PathBuf};

use clap::{Command, CommandFactory};
use clap_complete::Shell;

use super::{Cli, CommandResult, Outcome};

/// Options of `granule completions`.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// Shell that reads the completions
    shell: Shell,
}

/// Options of `granule man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Folder for the pages; it is created if missing
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Prints completions on standard output.
pub fn print(args: &CompletionsArgs) -> CommandResult {
    clap_complete::generate(args.shell, &mut Cli::command(), "granule", &mut io::stdout());
    Ok(Outcome::Done)
}

/// Writes a man page for the command and each subcommand.
///
/// # Errors
/// The folder cannot be written.
pub fn write_man_pages(args: &ManArgs) -> CommandResult {
    fs::create_dir_all(&args.folder)
        .and_then(|()| clap_mangen::generate_to(man_pages(), &args.folder))
        .map_err(|error| format!("cannot write man pages to {}: {error}", args.folder.display()))?;
    Ok(Outcome::Done)
}

/// Returns the command without the two subcommands of this module.
fn man_pages() -> Command {
    Cli::command().disable_help_subcommand(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subcommand_has_a_page() {
        let folder = tempfile::tempdir().unwrap();

        write_man_pages(&ManArgs { folder: folder.path().join("man1") }).unwrap();

        for name in ["granule", "granule-bench", "granule-compare", "granule-lab", "granule-run"] {
            let page = folder.path().join(format!("man1/{name}.1"));
            assert!(fs::metadata(&page).unwrap().len() > 500, "{name}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let error = write_man_pages(&ManArgs { folder: "/proc/man".into() }).unwrap_err();

        assert!(error.to_string().contains("/proc/man"));
    }

    #[test]
    fn completions_know_the_subcommands() {
        let mut script = Vec::new();

        clap_complete::generate(Shell::Bash, &mut Cli::command(), "granule", &mut script);

        let script = String::from_utf8(script).unwrap();
        assert!(script.contains("bench compare") && script.contains("--each-patch"));
    }
}
