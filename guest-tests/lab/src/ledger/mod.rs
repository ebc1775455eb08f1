// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule ledger`: measures a fixed matrix on a list of kernels, and keeps a line for each.
//!
//! ```text
//! matrix ─┐
//! measure ┴─ line (release) ── file
//!              └── figures ── chart ── page
//! ```
//!
//! A kernel whose key the ledger contains with figures is not measured again. A kernel that does not
//! build or boot gets a line with the reason, and is tried again by the next run, because the cause
//! may be the machine.

mod chart;
mod figures;
mod file;
mod line;
mod matrix;
mod page;
mod release;
mod session;

use std::path::PathBuf;

use self::{
    figures::{configurations, label},
    file::LedgerFile,
    line::{Line, Outcome},
    page::PageFile,
    session::{Request, Session},
};
use crate::{
    RunStatus, error::LabError, interrupt, measure::SerialOptions, report::print,
    values::LinuxVersion,
};

/// Options of `granule ledger`.
#[derive(Debug, Clone, clap::Args)]
pub struct LedgerOptions {
    /// Ledger: one line of JSON for each kernel; created if it is missing
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Revisions of --git, in the order of the page
    #[arg(value_name = "REVISION", requires = "git")]
    revisions: Vec<String>,
    /// Git repository of the revisions, which is only read
    #[arg(long, value_name = "TREE", requires = "revisions")]
    git: Option<PathBuf>,
    /// Linux version of Debian's linux-source-VERSION; repeat the option for more versions, which
    /// precede the revisions
    #[arg(long, value_name = "VERSION")]
    base: Vec<LinuxVersion>,
    /// Debian suite of the source packages of versions whose suite is unknown
    #[arg(long, requires = "base")]
    suite: Option<String>,
    /// Write a page with trends: Markdown with a chart beside it, or HTML. It contains the kernels
    /// of this command or, if it has none, all kernels of the ledger by version
    #[arg(long, value_name = "PAGE.md|PAGE.html")]
    page: Option<PathBuf>,
    #[command(flatten)]
    serial: SerialOptions,
}

/// Measures the kernels that the ledger lacks, prints a row for each requested kernel, and writes
/// the page. Returns [`RunStatus::Failed`] if a requested kernel has no figures.
///
/// # Errors
/// A requirement is missing, a revision or version is unknown, or a file cannot be used.
pub fn ledger(options: &LedgerOptions) -> Result<RunStatus, LabError> {
    let mut file = LedgerFile::open(&options.file)?;
    let page = options.page.as_deref().map(|path| PageFile::open(path, file.path())).transpose()?;
    let requests = Request::all(options)?;
    if requests.is_empty() {
        let Some(page) = page.filter(|_| !options.serial.output.dry_run) else {
            return Err(LabError::Unusable(
                "nothing to do: set kernels with --base, or with --git TREE REVISION…, or --page"
                    .to_owned(),
            ));
        };
        if file.lines().is_empty() {
            return Err(LabError::Unusable(format!(
                "{} has no kernels for --page: set kernels with --base, or with --git TREE \
                 REVISION…, or the path of a ledger",
                options.file.display()
            )));
        }
        page.write(&latest_by_release(file.lines()))?;
        return Ok(RunStatus::Passed);
    }
    let mut session = Session::new(options)?;
    interrupt::set_message(
        "interrupted; to continue, run the same command again: the ledger has the kernels that ended"
            .to_owned(),
    );
    let mut shown: Vec<Line> = Vec::new();
    for request in &requests {
        let line = session.line(request, &file)?;
        let Some(line) = line.filter(|_| !options.serial.output.dry_run) else { continue };
        print(&summary(&line))?;
        file.append(line.clone())?;
        shown.retain(|known| known.key != line.key);
        shown.push(line);
    }
    session.finish();
    if options.serial.output.dry_run {
        return Ok(RunStatus::Passed);
    }
    if let Some(page) = page {
        page.write(&shown.iter().collect::<Vec<_>>())?;
    }
    Ok(match shown.iter().all(Line::is_measured) {
        true => RunStatus::Passed,
        false => RunStatus::Failed,
    })
}

/// Returns the last line of each tree, by release.
fn latest_by_release(lines: &[Line]) -> Vec<&Line> {
    let is_last = |(index, line): &(usize, &Line)| {
        !lines[index + 1..].iter().any(|later| later.key.tree == line.key.tree)
    };
    let mut latest: Vec<&Line> =
        lines.iter().enumerate().filter(is_last).map(|(_, line)| line).collect();
    latest.sort_by(|one, other| one.linux.cmp(&other.linux));
    latest
}

/// Formats a line of the ledger as text.
fn summary(line: &Line) -> String {
    let mut text = format!("{}\n", label(line));
    if let Outcome::Failure(reason) = &line.outcome {
        text += &format!("  no figures: {reason}\n");
    }
    for configuration in configurations(&[line]) {
        let row = figures::Row { line, figures: configuration };
        let figures = figures::FIGURES.iter().filter(|figure| figure.is_in_chart);
        let cells: Vec<String> = figures
            .map(|figure| format!("{}: {}", figure.heading, row.cell(figure, None)))
            .collect();
        text += &format!("  {:37} {}\n", configuration.title(), cells.join("; "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{line::tests::line, *};

    #[test]
    fn the_page_of_a_whole_ledger_has_the_last_line_of_each_tree_by_release() {
        let mut again = line("6.1.2", 9);
        again.key.compiler = "clang".to_owned();
        let lines = [line("6.12.1", 3), line("6.1.2", 7), again.clone(), line("5.10.262", 1)];

        let found = latest_by_release(&lines);

        assert_eq!(found, [&lines[3], &again, &lines[0]]);
    }

    #[test]
    fn a_summary_has_the_figures_or_the_reason() {
        let mut failed = line("6.1.2", 7);
        failed.outcome = Outcome::Failure("does not boot".to_owned());

        assert!(summary(&line("6.1.2", 7)).contains("guest aborts: 14; DC CIVAC: 14;"));
        assert_eq!(summary(&failed), "6.1.2\n  no figures: does not boot\n");
    }
}
