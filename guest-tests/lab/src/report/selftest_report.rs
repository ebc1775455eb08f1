// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Report of the kernel's selftests: the verdict of each on each kernel.

use std::fmt;

use granule_report::render::page;
use granule_types::units::pluralize;

use crate::{
    error::{LabError, with_causes},
    host::job::TestEnding,
    jobs::{
        JobResult, JobResults, KERNEL_DOES_NOT_BOOT, outcome::describe_ending,
        run_directory::RunDirectory,
    },
    report::{FailedJob, RunInfo, RunStatus, publish},
};

/// Exit code of a selftest that cannot run on this host.
const KSFT_SKIP: i32 = 4;

#[derive(Debug, Clone, PartialEq, Eq)]
enum SelftestVerdict {
    Pass,
    Skip,
    Fail(String),
    /// No verdict: the kernel crashed or printed a splat, or the report of PID 1 is missing.
    NoVerdict(String),
}

impl SelftestVerdict {
    fn from_result(result: JobResult) -> Self {
        match result {
            Some(Ok(outcome)) => match &outcome.report.ending {
                TestEnding::Exited { code: 0, .. } => Self::Pass,
                TestEnding::Exited { code: KSFT_SKIP, .. } => Self::Skip,
                TestEnding::PoolTooSmall { .. } | TestEnding::InitFailed { .. } => {
                    Self::NoVerdict(format!("the test {}", describe_ending(&outcome.report.ending)))
                }
                ending => Self::Fail(describe_ending(ending)),
            },
            Some(Err(error)) => Self::NoVerdict(with_causes(&error)),
            None => Self::NoVerdict(KERNEL_DOES_NOT_BOOT.to_owned()),
        }
    }

    fn html(&self) -> String {
        let class = match self {
            Self::Pass => "improvement",
            Self::Skip => "",
            Self::Fail(_) => "regression",
            Self::NoVerdict(_) => "inconclusive",
        };
        format!("<span class=\"tag {class}\">{self}</span>")
    }
}

impl fmt::Display for SelftestVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pass => "pass",
            Self::Skip => "skip",
            Self::Fail(_) => "FAIL",
            Self::NoVerdict(_) => "BROKEN",
        })
    }
}

/// Returns the remark on a row of verdicts; empty for equal verdicts.
fn remark(row: &[SelftestVerdict]) -> &'static str {
    // Messages of missing verdicts differ between kernels, because they contain paths.
    let equal = |a: &SelftestVerdict, b: &SelftestVerdict| match (a, b) {
        (SelftestVerdict::NoVerdict(_), SelftestVerdict::NoVerdict(_)) => true,
        _ => a == b,
    };
    if row.iter().any(|verdict| !equal(verdict, &row[0])) {
        "differs"
    } else if row.iter().any(|verdict| matches!(verdict, SelftestVerdict::NoVerdict(_))) {
        "no verdict"
    } else {
        ""
    }
}

/// Publishes the report. A missing verdict or a difference between kernels fails the run.
pub fn report(
    run_directory: &RunDirectory,
    run: RunInfo<'_>,
    results: JobResults,
) -> Result<RunStatus, LabError> {
    let verdicts = run.group_by_job(results, |_, result| SelftestVerdict::from_result(result));
    let tests: Vec<&str> = run.jobs.iter().map(|job| job.name.as_str()).collect();
    let (table, status) = table(&run.kernel_names(), &tests, &verdicts);
    publish(run_directory, &table, &html(run, &verdicts))?;
    Ok(status)
}

/// Returns the report as HTML. `verdicts` has the indices `[job][kernel]`.
fn html(run: RunInfo<'_>, verdicts: &[Vec<SelftestVerdict>]) -> String {
    let mut rows = Vec::new();
    let mut failures: Vec<FailedJob> = Vec::new();
    for (job, row) in run.jobs.iter().zip(verdicts) {
        let mut cells = vec![page::escape_html(&job.name)];
        cells.extend(row.iter().map(SelftestVerdict::html));
        cells.push(remark(row).to_owned());
        rows.push(cells);
        for (kernel, verdict) in run.kernels.iter().zip(row) {
            if let SelftestVerdict::Fail(why) | SelftestVerdict::NoVerdict(why) = verdict {
                failures.push((format!("{} on {}", job.name, kernel.name), why.clone()));
            }
        }
    }
    let (class, summary) = summary(run, verdicts);
    let mut body: String = summary.iter().map(|line| page::verdict(class, line)).collect();
    body.push_str("<h2>All selftests</h2>\n");
    let head = [&["selftest"], &run.kernel_names()[..], &[""]].concat();
    body.push_str(&page::table(&head, &rows));
    run.page("KVM selftests", body, &failures)
}

/// Returns the sentences above the table and their CSS class.
fn summary(run: RunInfo<'_>, verdicts: &[Vec<SelftestVerdict>]) -> (&'static str, Vec<String>) {
    let (mut differing, mut missing) = (Vec::new(), Vec::new());
    let [mut pass, mut skip, mut fail] = [0_usize; 3];
    for (job, row) in run.jobs.iter().zip(verdicts) {
        match (remark(row), row.first()) {
            ("differs", _) => differing.push(job.name.as_str()),
            ("no verdict", _) => missing.push(job.name.as_str()),
            (_, Some(SelftestVerdict::Pass)) => pass += 1,
            (_, Some(SelftestVerdict::Skip)) => skip += 1,
            _ => fail += 1,
        }
    }
    let kernels = match run.kernels.len() {
        0 | 1 => String::new(),
        2 => ", the same on both kernels".to_owned(),
        kernels => format!(", the same on all {kernels} kernels"),
    };
    let mut summary = Vec::new();
    if !differing.is_empty() {
        summary.push(format!("Verdicts differ: {}.", differing.join(", ")));
    } else if run.kernels.len() > 1 {
        summary.push("No verdict differs between the kernels.".to_owned());
    }
    summary.push(format!(
        "Of {}{kernels}: {pass} pass, {skip} skipped, {fail} fail, {} without a verdict.",
        pluralize(run.jobs.len(), "selftest"),
        missing.len(),
    ));
    if !missing.is_empty() {
        summary.push(format!("No verdict: {}.", missing.join(", ")));
    }
    let class = match (differing.is_empty(), missing.is_empty()) {
        (false, _) => "regression",
        (true, false) => "inconclusive",
        (true, true) => "",
    };
    (class, summary)
}

/// Returns the report as text, and the status of the run.
fn table(
    kernels: &[&str],
    tests: &[&str],
    verdicts: &[Vec<SelftestVerdict>],
) -> (String, RunStatus) {
    let longest = tests.iter().map(|name| name.len()).max();
    let width = longest.unwrap_or(0).max(8);
    let mut table = format!("{:width$}", "selftest");
    for kernel in kernels {
        table.push_str(&format!("  {kernel:>8}"));
    }
    table.push('\n');
    let mut status = RunStatus::Passed;
    let mut failures = String::new();
    for (test, row) in tests.iter().zip(verdicts) {
        table.push_str(&format!("{test:width$}"));
        for (kernel, verdict) in kernels.iter().zip(row) {
            table.push_str(&format!("  {verdict:>0$}", kernel.len().max(8)));
            if let SelftestVerdict::Fail(why) | SelftestVerdict::NoVerdict(why) = verdict {
                failures.push_str(&format!("\n{test} on {kernel}: {why}\n"));
            }
        }
        let remark = remark(row);
        if !remark.is_empty() {
            status = RunStatus::Failed;
            table.push_str(&format!("  <- {remark}"));
        }
        table.push('\n');
    }
    table.push_str(&failures);
    (table, status)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        jobs::matrix::{self, tests::options},
        kernel::Kernel,
        options::{Options, SelftestOptions, Workload},
        values::PageSize,
    };
    use granule_report::render::browser::check_page;
    use granule_types::record::Series;

    #[test]
    fn a_differing_or_missing_verdict_fails_the_run() {
        let [pass, skip] = [SelftestVerdict::Pass, SelftestVerdict::Skip];
        let fail = |why: &str| SelftestVerdict::Fail(why.to_owned());
        let no_verdict = SelftestVerdict::NoVerdict("oops".to_owned());
        for (before, after, remark) in [
            (pass.clone(), pass.clone(), "  pass\n"),
            (skip.clone(), skip.clone(), "  skip\n"),
            (fail("x"), fail("x"), "  FAIL\n\na on base: x\n\na on series: x\n"),
            (pass.clone(), skip, "<- differs"),
            (pass, fail("x"), "<- differs\n\na on series: x"),
            (fail("exit 1"), fail("signal 9"), "<- differs"),
            (no_verdict.clone(), no_verdict, "<- no verdict"),
        ] {
            let (table, status) = table(&["base", "series"], &["a"], &[vec![before, after]]);

            assert!(table.contains(remark), "{table}");
            assert_eq!(status == RunStatus::Failed, table.contains("<-"), "{table}");
        }
    }

    /// Returns the report of four tests on two kernels, with a differing verdict if `differing`.
    fn sample(differing: bool) -> String {
        let tests = ["a_test", "b_test", "c_test", "d_test"];
        let selftests = Options {
            workload: Workload::Selftests(SelftestOptions { tests: Vec::new(), tests_of: None }),
            ..options("lab")
        };
        let jobs =
            matrix::jobs(&selftests, PageSize::Kib4, &tests.map(|name| (name.into(), Vec::new())));
        let kernel = |name: &str, patches: u32| Kernel {
            series: Some(vec![Series { name: name.to_owned(), patches }]),
            ..Kernel::placeholder(name.to_owned(), "Image".into())
        };
        let kernels = [kernel("base", 0), kernel("<series>", 3)];
        let run = RunInfo { kernels: &kernels, jobs: &jobs, emulator: "QEMU 7.2" };
        let fail = |why: &str| SelftestVerdict::Fail(why.to_owned());
        let no_verdict = SelftestVerdict::NoVerdict("lost\n  | <console>".to_owned());
        let also_no_verdict = SelftestVerdict::NoVerdict("lost elsewhere".to_owned());
        let other = if differing { "signal 9" } else { "exit 1" };
        let verdicts = [
            vec![SelftestVerdict::Pass; 2],
            vec![SelftestVerdict::Skip; 2],
            vec![fail("exit 1"), fail(other)],
            vec![no_verdict, also_no_verdict],
        ];
        html(run, &verdicts)
    }

    #[test]
    #[ignore = "requires Chromium; scripts/test runs it if that is installed"]
    fn in_chromium_the_selftest_report_is_legible() {
        check_page(&sample(true), 0);
    }

    #[test]
    fn the_html_report_has_every_verdict_and_its_reason() {
        let (page, same_verdicts) = (sample(true), sample(false));

        for expected in [
            "<title>KVM selftests: &#60;series&#62; against base</title>",
            "<p class=\"verdict regression\">Verdicts differ: c_test.</p>",
            "Of 4 selftests, the same on both kernels: 1 pass, 1 skipped, 0 fail, 1 without",
            "No verdict: d_test.",
            "<span class=\"tag improvement\">pass</span>",
            "c_test on base: exit 1",
            "c_test on &#60;series&#62;: signal 9",
            "<summary>d_test on base: lost</summary>",
            "| &#60;console&#62;",
            "&#60;series&#62; (3 patches)",
            "QEMU 7.2 -M virt",
            "<p>Command:</p>",
        ] {
            assert!(page.contains(expected), "{expected}\n{page}");
        }
        assert!(!page.contains("<script") && !page.contains("http"));
        let summary = "<p class=\"verdict inconclusive\">No verdict differs";
        assert!(same_verdicts.contains(summary), "{same_verdicts}");
    }
}
