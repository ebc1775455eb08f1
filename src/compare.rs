// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The subcommand `granule compare`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::ValueEnum;
use granule_report::{
    Comparison, ComparisonOptions, ComparisonSet, FailOn, LabelledSide, Verdict, command_line,
    input, render,
};
use granule_types::units::parse_percentage;

use super::{CommandOutcome, CommandResult, write_stdout};

/// Options of `granule compare`.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "granule compare [OPTIONS] BEFORE AFTER\n       \
                      granule compare [OPTIONS] BEFORE... -- AFTER...",
    after_help = "Exit code: 1 for a verdict of --fail-on, by default a regression by more than \
                  --min-effect; 2 if the sides are not comparable; otherwise 0. With --bisect: 125 \
                  for an inconclusive result, and 128, which ends `git bisect run`, instead of 2."
)]
pub struct Args {
    /// Inputs of both sides: results (`granule bench --json`), logs of the kernel's
    /// kvm_page_table_test, dirty_log_perf_test or demand_paging_test, a kernel's folder in a run
    /// directory of `granule lab`, or target/criterion (target/criterion@NAME for a baseline)
    #[arg(required = true, value_name = "BEFORE AFTER")]
    paths: Vec<PathBuf>,
    /// Paths of AFTER, if a side has several
    #[arg(last = true, value_name = "AFTER")]
    after: Vec<PathBuf>,
    /// Smallest slowdown that is a regression [default: 1; under emulation 3]
    #[arg(long, value_name = "PERCENT", value_parser = parse_percentage)]
    min_effect: Option<f64>,
    /// Judge a count, such as guest_aborts, 'DC CIVAC', or TLBI for all TLBI instructions, instead
    /// of the time; repeat the option to judge several, of which one may be time
    #[arg(long, value_name = "COUNT")]
    metric: Vec<String>,
    /// Compare this phase only; repeat the option for more phases
    #[arg(long, value_name = "PHASE")]
    phase: Vec<String>,
    /// Pair the runs of both sides in order: first with first, second with second
    #[arg(long)]
    paired: bool,
    /// Compare although kernel version, CPU, page size, emulator, engine or backing differ or are
    /// unknown
    #[arg(long)]
    force: bool,
    /// Verdict for which the exit code is 1
    #[arg(long, value_enum, value_name = "VERDICT", default_value_t)]
    fail_on: FailOn,
    /// Use the exit codes of `git bisect run`
    #[arg(long)]
    bisect: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: OutputFormat,
    /// Write to this file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Output format of a comparison.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Plain text within 75 columns
    #[default]
    Text,
    /// Markdown tables
    Markdown,
    /// Page with charts, in one file
    Html,
    /// ASCII within 72 columns for a cover letter: the phases that differ, and their counts
    Cover,
    /// One row for each figure
    Csv,
    /// JSON (`granule.comparison/2`)
    Json,
    /// The kernel's test protocol; a regression is `not ok`
    Ktap,
    /// One line for each run in the Go benchmark format, for `benchstat -col side FILE`
    Benchstat,
}

/// Runs `granule compare`.
pub fn run(args: Args) -> CommandResult {
    let bisect = args.bisect;
    match compare_sides(args) {
        // `git bisect run` interprets exit code 2 as a bad commit.
        Err(error) if bisect => {
            super::print_error(error.as_ref());
            Ok(CommandOutcome::Abort)
        }
        result => result,
    }
}

fn compare_sides(args: Args) -> CommandResult {
    let (before, after) = match (args.paths.as_slice(), args.after.as_slice()) {
        ([before, after], []) => (std::slice::from_ref(before), std::slice::from_ref(after)),
        (before, [_, ..]) => (before, args.after.as_slice()),
        _ => {
            return Err("expected BEFORE and AFTER, or BEFORE... -- AFTER...".into());
        }
    };
    let label = |paths: &[PathBuf]| match paths {
        [path] => path.display().to_string(),
        [path, rest @ ..] => format!("{} and {} more", path.display(), rest.len()),
        [] => String::new(),
    };
    let options = ComparisonOptions {
        labels: None,
        is_forced: args.force,
        min_effect: args.min_effect.map(|percent| percent / 100.0),
        metrics: args.metric,
        phases: args.phase,
        is_paired: args.paired,
        command: Some(command_line()),
    };
    let mut sides = Vec::new();
    for paths in [before, after] {
        sides.push(LabelledSide { label: label(paths), samples: input::read_side(paths)? });
    }
    let set = ComparisonSet::new(sides, &options)?;
    let text = render_set(args.format, &set)?;
    if let Some(path) = &args.output {
        refuse_input(path, before.iter().chain(after))?;
        fs::write(path, text)
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    } else {
        write_stdout(&text)?;
    }
    let comparisons = set.comparisons();
    Ok(if comparisons.iter().any(|comparison| args.fail_on.is_failure(comparison)) {
        CommandOutcome::Failed
    } else if args.bisect && comparisons.iter().any(|one| one.count(Verdict::Inconclusive) > 0) {
        CommandOutcome::Inconclusive
    } else {
        CommandOutcome::Done
    })
}

fn render_set(format: OutputFormat, set: &ComparisonSet) -> Result<String, serde_json::Error> {
    let each = |render: fn(&Comparison) -> String| {
        let texts: Vec<String> = set.comparisons().iter().map(render).collect();
        texts.join("\n")
    };
    Ok(match format {
        OutputFormat::Text => each(render::text),
        OutputFormat::Markdown => each(render::markdown),
        OutputFormat::Html => each(render::html),
        OutputFormat::Cover => render::cover(set, &[command_line()]),
        OutputFormat::Csv => each(render::csv),
        OutputFormat::Json => {
            set.comparisons().iter().map(render::json).collect::<Result<_, _>>()?
        }
        OutputFormat::Ktap => each(render::ktap),
        OutputFormat::Benchstat => each(render::benchstat),
    })
}

/// Refuses an output path that is one of the inputs.
fn refuse_input<'a>(
    output: &Path,
    mut inputs: impl Iterator<Item = &'a PathBuf>,
) -> Result<(), String> {
    let Ok(output) = fs::canonicalize(output) else {
        return Ok(());
    };
    let is_output = |path: &Path| fs::canonicalize(path).is_ok_and(|path| path == output);
    if output.is_file()
        && inputs.any(|path| is_output(path) || is_output(&path.join(input::RESULTS_FILE)))
    {
        return Err(format!(
            "-o {} is an input of the comparison: choose another file",
            output.display()
        ));
    }
    Ok(())
}
