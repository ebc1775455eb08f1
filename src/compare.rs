// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The subcommand `granule compare`.

mod lab_origin;

use std::{
    error::Error,
    fs,
    path::{Path, PathBuf},
    slice,
};

use clap::ValueEnum;
use granule_report::{
    Comparison, ComparisonOptions, ComparisonSet, FailOn, LabelledSide, Metric, SetupField,
    Verdict, command_line, input, render,
};
use granule_types::units::parse_percentage;

use self::lab_origin::LabOrigin;
use super::{CommandOutcome, CommandResult, write_stdout};

/// Options of `granule compare`.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "granule compare [OPTIONS] BEFORE AFTER\n       \
                      granule compare [OPTIONS] BEFORE... -- AFTER...\n       \
                      granule compare [OPTIONS] --by FIELD RESULTS...",
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
    /// Compare two configurations of one kernel: those that differ in this field, with the first of
    /// them in the results
    #[arg(long, value_enum, value_name = "FIELD", conflicts_with_all = ["after", "bisect"])]
    by: Option<SetupField>,
    /// Smallest slowdown that is a regression [default: 1; under emulation 3]
    #[arg(long, value_name = "PERCENT", value_parser = parse_percentage)]
    min_effect: Option<f64>,
    /// Judge a count, such as guest_aborts, 'DC CIVAC', or TLBI for all TLBI instructions, instead
    /// of the time; repeat the option to judge several, of which one may be time
    #[arg(long, value_name = "COUNT")]
    metric: Vec<Metric>,
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
    let options = ComparisonOptions {
        labels: None,
        is_forced: args.force,
        min_effect: args.min_effect.map(|percent| percent / 100.0),
        metrics: args.metric,
        phases: args.phase,
        is_paired: args.paired,
        command: Some(command_line()),
    };
    let (set, text) = match args.by {
        Some(field) => {
            let set = ComparisonSet::by(&input::read_side(&args.paths)?, field, &options)?;
            let text = render_set(args.format, &set, &LabOrigin::default())?;
            (set, text)
        }
        None => {
            let (sides, origin) = kernel_sides(&args.paths, &args.after)?;
            let set = ComparisonSet::new(sides.into(), &options)?;
            let text = render_pair(args.format, &set, &origin)?;
            (set, text)
        }
    };
    if let Some(path) = &args.output {
        refuse_input(path, args.paths.iter().chain(&args.after))?;
        fs::write(path, text)
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    } else {
        write_stdout(&text)?;
    }
    let comparisons = set.comparisons();
    Ok(if comparisons.iter().any(|comparison| args.fail_on.is_failure(comparison)) {
        CommandOutcome::Failed
    } else if args.bisect && comparisons.iter().any(is_inconclusive) {
        CommandOutcome::Inconclusive
    } else {
        CommandOutcome::Done
    })
}

/// Reports whether a bisection learns nothing of a commit: a row is inconclusive, or a metric not judged.
fn is_inconclusive(comparison: &Comparison) -> bool {
    comparison.count(Verdict::Inconclusive) > 0 || comparison.has_unjudged_metric()
}

/// Reads both sides of a comparison of kernels, and their origin in runs of the lab.
fn kernel_sides(
    paths: &[PathBuf],
    after: &[PathBuf],
) -> Result<([LabelledSide; 2], LabOrigin), Box<dyn Error>> {
    let (before, after) = match (paths, after) {
        ([before, after], []) => (slice::from_ref(before), slice::from_ref(after)),
        (before, [_, ..]) => (before, after),
        _ => {
            return Err("expected BEFORE and AFTER, or BEFORE... -- AFTER...".into());
        }
    };
    let path_label = |paths: &[PathBuf]| match paths {
        [path] => path.display().to_string(),
        [path, rest @ ..] => format!("{} and {} more", path.display(), rest.len()),
        [] => String::new(),
    };
    let (labels, origin) = match (before, after) {
        ([before], [after]) => LabOrigin::read([before.as_path(), after.as_path()]),
        _ => (None, LabOrigin::default()),
    };
    let labels = labels.unwrap_or_else(|| [path_label(before), path_label(after)]);
    let [before, after] = [before, after].map(input::read_side);
    let [label_before, label_after] = labels;
    let sides = [
        LabelledSide { label: label_before, samples: before? },
        LabelledSide { label: label_after, samples: after? },
    ];
    Ok((sides, origin))
}

/// Renders the comparison of two kernels, the only one of the set.
fn render_pair(
    format: OutputFormat,
    set: &ComparisonSet,
    origin: &LabOrigin,
) -> Result<String, Box<dyn Error>> {
    let [comparison] = set.comparisons() else {
        return render_set(format, set, origin);
    };
    Ok(match format {
        OutputFormat::Html => render::html(comparison),
        OutputFormat::Csv => render::csv(comparison),
        OutputFormat::Json => render::json(comparison)?,
        OutputFormat::Ktap => render::ktap(comparison),
        OutputFormat::Benchstat => render::benchstat(comparison),
        OutputFormat::Text | OutputFormat::Markdown | OutputFormat::Cover => {
            render_set(format, set, origin)?
        }
    })
}

fn render_set(
    format: OutputFormat,
    set: &ComparisonSet,
    origin: &LabOrigin,
) -> Result<String, Box<dyn Error>> {
    let each = |render: fn(&Comparison) -> String| {
        let texts: Vec<String> = set.comparisons().iter().map(render).collect();
        texts.join("\n")
    };
    Ok(match format {
        OutputFormat::Text => each(render::text),
        OutputFormat::Markdown => each(render::markdown),
        OutputFormat::Html => render::html_set(set),
        OutputFormat::Cover => render::cover(set, &origin.titles, &origin.commands()),
        OutputFormat::Csv => render::csv_set(set),
        OutputFormat::Json => render::json_set(set)?,
        OutputFormat::Ktap | OutputFormat::Benchstat => {
            let name = format.to_possible_value().map(|value| value.get_name().to_owned());
            return Err(format!(
                "--format {} conflicts with --by; expected text, markdown, html, cover, csv or json",
                name.unwrap_or_default()
            )
            .into());
        }
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
