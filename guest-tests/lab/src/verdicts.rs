// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Verdicts of the kernel tree's selftests, side by side.

use std::fmt;

use super::{
    LabError, Verdict,
    execute::{JobError, Outcome, describe},
    job::Ending,
    leave,
    page::{Remark, Run},
    pool::Outcomes,
    rundir::{RunDir, chain},
    step::Shell,
};
use granule_report::render::page::escaped;
use granule_types::units::counted;

/// Exit code of a kernel selftest that cannot run here (`KSFT_SKIP`).
const SKIP: i32 = 4;

/// What a selftest says of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Word {
    Pass,
    Skip,
    Fail(String),
    /// The kernel died or complained, or the run was lost: never equal to anything.
    Broken(String),
}

impl Word {
    fn of(outcome: Option<Result<Outcome, JobError>>) -> Self {
        match outcome {
            Some(Ok(outcome)) => match &outcome.ending {
                Ending::Exited { code: 0, .. } => Self::Pass,
                Ending::Exited { code: SKIP, .. } => Self::Skip,
                Ending::ShortPool { .. } | Ending::Init { .. } => {
                    Self::Broken(format!("the test {}", describe(&outcome.ending)))
                }
                ending => Self::Fail(describe(ending)),
            },
            Some(Err(error)) => Self::Broken(chain(&error)),
            None => Self::Broken("not run, this kernel does not boot".to_owned()),
        }
    }
}

impl Word {
    /// The word in its colour.
    fn html(&self) -> String {
        let class = match self {
            Self::Pass => "better",
            Self::Skip => "",
            Self::Fail(_) => "worse",
            Self::Broken(_) => "cannot-tell",
        };
        format!("<span class=\"tag {class}\">{self}</span>")
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pass => "pass",
            Self::Skip => "skip",
            Self::Fail(_) => "FAIL",
            Self::Broken(_) => "BROKEN",
        })
    }
}

/// What is said of a row beside its verdicts: empty, that they differ, or that there is none.
fn mark(row: &[&Word]) -> &'static str {
    // Why there is no verdict names files of the kernel's own.
    let alike = |word: &Word, first: &Word| match (word, first) {
        (Word::Broken(_), Word::Broken(_)) => true,
        _ => word == first,
    };
    if row.iter().any(|word| !alike(word, row[0])) {
        "differs"
    } else if row.iter().any(|word| matches!(word, Word::Broken(_))) {
        "no verdict"
    } else {
        ""
    }
}

/// Prints the table and leaves a page of it; a verdict that differs from the first kernel's, or
/// none, is a failure.
pub fn judge(
    shell: Shell,
    rundir: &RunDir,
    run: Run<'_>,
    outcomes: Outcomes,
) -> Result<Verdict, LabError> {
    if shell.is_dry() {
        return Ok(Verdict::Fine);
    }
    let words: Vec<Vec<Word>> = outcomes
        .into_iter()
        .map(|outcomes| outcomes.into_iter().map(Word::of).collect())
        .collect();
    let names: Vec<&str> = run.kernels.iter().map(|k| k.name.as_str()).collect();
    let tests: Vec<&str> = run.jobs.iter().map(|job| job.name.as_str()).collect();
    let (table, verdict) = table(&names, &tests, &words);
    leave(rundir, &table, &page(run, &words))?;
    Ok(verdict)
}

/// The same as a page.
fn page(run: Run<'_>, words: &[Vec<Word>]) -> String {
    let mut rows = Vec::new();
    let mut marked: [Vec<&str>; 2] = Default::default();
    let mut alike = [0_usize; 3];
    let mut remarks: Vec<Remark> = Vec::new();
    for (at, job) in run.jobs.iter().enumerate() {
        let row: Vec<&Word> = words.iter().map(|kernel| &kernel[at]).collect();
        let mark = mark(&row);
        match (mark, row.first()) {
            ("differs", _) => marked[0].push(&job.name),
            ("no verdict", _) => marked[1].push(&job.name),
            (_, Some(Word::Pass)) => alike[0] += 1,
            (_, Some(Word::Skip)) => alike[1] += 1,
            _ => alike[2] += 1,
        }
        let mut cells = vec![escaped(&job.name)];
        cells.extend(row.iter().map(|word| word.html()));
        cells.push(mark.to_owned());
        rows.push(cells);
        for (kernel, word) in run.kernels.iter().zip(row) {
            if let Word::Fail(why) | Word::Broken(why) = word {
                remarks.push((format!("{} on {}", job.name, kernel.name), why.clone()));
            }
        }
    }
    let [differ, none] = &marked;
    let [pass, skip, fail] = alike;
    let on = match run.kernels.len() {
        0 | 1 => String::new(),
        2 => ", the same on both kernels".to_owned(),
        kernels => format!(", the same on all {kernels} kernels"),
    };
    let mut summary = Vec::new();
    if !differ.is_empty() {
        summary.push(format!("Verdicts differ: {}.", differ.join(", ")));
    } else if run.kernels.len() > 1 {
        summary.push("No verdict differs between the kernels.".to_owned());
    }
    summary.push(format!(
        "Of {}{on}: {pass} pass, {skip} skipped, {fail} fail, {} without a verdict.",
        counted(run.jobs.len(), "selftest"),
        none.len(),
    ));
    if !none.is_empty() {
        summary.push(format!("No verdict: {}.", none.join(", ")));
    }
    let class = match (differ.is_empty(), none.is_empty()) {
        (false, _) => "worse",
        (true, false) => "cannot-tell",
        (true, true) => "",
    };
    run.selftests(class, &summary, &rows, &remarks)
}

fn table(kernels: &[&str], tests: &[&str], words: &[Vec<Word>]) -> (String, Verdict) {
    let width = tests
        .iter()
        .map(|name| name.len())
        .max()
        .unwrap_or(0)
        .max(8);
    let mut table = format!("{:width$}", "selftest");
    for kernel in kernels {
        table.push_str(&format!("  {kernel:>8}"));
    }
    table.push('\n');
    let mut verdict = Verdict::Fine;
    let mut remarks = String::new();
    for (row, test) in tests.iter().enumerate() {
        table.push_str(&format!("{test:width$}"));
        let row_words: Vec<&Word> = words.iter().map(|kernel| &kernel[row]).collect();
        for (column, kernel) in kernels.iter().enumerate() {
            let word = &words[column][row];
            table.push_str(&format!("  {word:>0$}", kernel.len().max(8)));
            if let Word::Fail(why) | Word::Broken(why) = word {
                remarks.push_str(&format!("\n{test} on {kernel}: {why}\n"));
            }
        }
        let mark = mark(&row_words);
        if !mark.is_empty() {
            verdict = Verdict::Failed;
            table.push_str(&format!("  <- {mark}"));
        }
        table.push('\n');
    }
    table.push_str(&remarks);
    (table, verdict)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        kernel::Kernel,
        matrix,
        options::{Matrix, Test},
    };
    use granule_report::render::browser::look_at;
    use granule_types::record::Series;

    #[test]
    fn verdicts_that_are_alike_are_fine_whatever_they_are() {
        let words = vec![vec![Word::Pass, Word::Skip, Word::Fail("x".to_owned())]; 2];

        let (table, verdict) = table(&["base", "series"], &["a", "b", "c"], &words);

        assert_eq!(verdict, Verdict::Fine);
        assert!(!table.contains("differs"));
        assert!(table.contains("c on series: x"));
    }

    #[test]
    fn a_verdict_that_differs_or_is_none_is_a_failure() {
        for (before, after) in [
            (Word::Pass, Word::Skip),
            (Word::Pass, Word::Fail("x".to_owned())),
            (
                Word::Fail("exit 1".to_owned()),
                Word::Fail("signal 9".to_owned()),
            ),
            (
                Word::Broken("oops".to_owned()),
                Word::Broken("oops".to_owned()),
            ),
        ] {
            let words = vec![vec![before], vec![after]];

            let (table, verdict) = table(&["base", "series"], &["a"], &words);

            assert_eq!(verdict, Verdict::Failed, "{table}");
            let differs = table.contains("<- differs");
            assert_eq!(differs, !table.contains("<- no verdict"), "{table}");
        }
    }

    /// The page of four tests on two kernels, one verdict differing, or all alike.
    fn sample(differing: bool) -> String {
        let matrix = Matrix {
            test: Test::Selftests,
            ..matrix::tests::matrix()
        };
        let jobs = ["a_test", "b_test", "c_test", "d_test"]
            .map(|name| matrix::selftest(&matrix, name.into(), &[]));
        let kernel = |name: &str, patches: u32| Kernel {
            series: Some(vec![Series {
                name: name.to_owned(),
                patches,
            }]),
            ..Kernel::planned(name.to_owned(), "Image".into(), None)
        };
        let kernels = [kernel("base", 0), kernel("<series>", 3)];
        let run = Run {
            kernels: &kernels,
            jobs: &jobs,
            emulator: "QEMU 7.2",
        };
        let fail = |why: &str| Word::Fail(why.to_owned());
        let broken = Word::Broken("lost\n  | <console>".to_owned());
        let lost = Word::Broken("lost elsewhere".to_owned());
        let before = vec![Word::Pass, Word::Skip, fail("exit 1"), broken];
        let other = if differing { "signal 9" } else { "exit 1" };
        let after = vec![Word::Pass, Word::Skip, fail(other), lost];
        page(run, &[before, after])
    }

    #[test]
    #[ignore = "takes Chromium; scripts/test runs it where that is installed"]
    fn in_chromium_the_page_of_verdicts_is_legible() {
        look_at(&sample(true), 0);
    }

    #[test]
    fn the_page_has_every_verdict_and_why() {
        let (page, alike) = (sample(true), sample(false));

        for wanted in [
            "<title>KVM selftests: &lt;series&gt; against base</title>",
            "<p class=\"verdict worse\">Verdicts differ: c_test.</p>",
            "Of 4 selftests, the same on both kernels: 1 pass, 1 skipped, 0 fail, 1 without",
            "No verdict: d_test.",
            "<span class=\"tag better\">pass</span>",
            "c_test on base: exit 1",
            "c_test on &lt;series&gt;: signal 9",
            "<summary>d_test on base: lost</summary>",
            "| &lt;console&gt;",
            "&lt;series&gt; (3 patches)",
            "QEMU 7.2 -M virt",
            "Made by",
        ] {
            assert!(page.contains(wanted), "{wanted}\n{page}");
        }
        assert!(!page.contains("<script") && !page.contains("http"));
        assert!(
            alike.contains("<p class=\"verdict cannot-tell\">No verdict differs"),
            "{alike}"
        );
    }
}
