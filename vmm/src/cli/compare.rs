// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule compare`.

use std::{
    io::{self, Write},
    path::PathBuf,
};

use clap::ValueEnum;
use granule_guest_tests::compare::{Comparison, Options, input, render};

use super::{CommandResult, Outcome};

/// Options of `granule compare`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit code: 0 no regression, 1 a phase is slower by more than --min-effect, \
                        2 the two sides cannot be compared."
)]
pub struct Args {
    /// Results (`granule bench --json`), a log of the kernel's kvm_page_table_test, or a run
    /// directory of `granule lab`
    before: PathBuf,
    /// What to hold against it, of any of these kinds
    after: PathBuf,
    /// How many percent slower a phase must be to be a regression
    #[arg(long, value_name = "PERCENT", default_value = "3", value_parser = percent)]
    min_effect: f64,
    /// Compare although kernel version, CPU, page size, emulator, engine or backing differ or are
    /// not known
    #[arg(long)]
    force: bool,
    /// How to print
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// How a comparison is printed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Plain text within 75 columns
    #[default]
    Text,
    /// Markdown tables
    Markdown,
    /// JSON (`granule.comparison/1`)
    Json,
}

/// Carries `granule compare` out.
///
/// # Errors
/// A side cannot be read, or the two do not compare.
pub fn run(args: Args) -> CommandResult {
    let before = input::read(&args.before)?;
    let after = input::read(&args.after)?;
    let options = Options {
        labels: [&args.before, &args.after].map(|path| path.display().to_string()),
        force: args.force,
        min_effect: args.min_effect / 100.0,
    };
    let comparison = Comparison::of(&before, &after, &options)?;
    let text = match args.format {
        Format::Text => render::text(&comparison),
        Format::Markdown => render::markdown(&comparison),
        Format::Json => render::json(&comparison)?,
    };
    match io::stdout().write_all(text.as_bytes()) {
        // Whoever reads has seen enough; the verdict stands.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        result => result?,
    }
    Ok(if comparison.regressions().next().is_some() {
        Outcome::Failed
    } else {
        Outcome::Done
    })
}

/// A percentage from 0 on, with or without its sign.
fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text);
    match number.parse::<f64>() {
        Ok(percent) if percent.is_finite() && percent >= 0.0 => Ok(percent),
        _ => Err("give a percentage of 0 or more, such as 3 or 0.5".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentage_is_read_with_and_without_its_sign() {
        assert_eq!(percent("3"), Ok(3.0));
        assert_eq!(percent("0.5%"), Ok(0.5));
        for text in ["", "-1", "NaN", "inf", "three", "3%%"] {
            assert!(percent(text).is_err(), "{text}");
        }
    }
}
