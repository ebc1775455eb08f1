// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Verdicts of the kernel tree's selftests, side by side.

use std::fmt;

use super::{
    LabError, Verdict,
    execute::{JobError, Outcome, describe},
    job::Ending,
    kernel::Kernel,
    matrix::PlannedJob,
    pool::Outcomes,
    print,
    rundir::{RunDir, chain},
    step::Shell,
};

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

/// Prints the table; a verdict that differs from the first kernel's, or none, is a failure.
pub fn judge(
    shell: Shell,
    rundir: &RunDir,
    kernels: &[Kernel],
    jobs: &[PlannedJob],
    outcomes: Outcomes,
) -> Result<Verdict, LabError> {
    if shell.is_dry() {
        return Ok(Verdict::Fine);
    }
    let words: Vec<Vec<Word>> = outcomes
        .into_iter()
        .map(|outcomes| outcomes.into_iter().map(Word::of).collect())
        .collect();
    let names: Vec<&str> = kernels.iter().map(|kernel| kernel.name.as_str()).collect();
    let tests: Vec<&str> = jobs.iter().map(|job| job.name.as_str()).collect();
    let (table, verdict) = table(&names, &tests, &words);
    rundir.write_report(&table)?;
    print(&table)?;
    Ok(verdict)
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
        let mut differs = false;
        for (column, kernel) in kernels.iter().enumerate() {
            let word = &words[column][row];
            table.push_str(&format!("  {word:>0$}", kernel.len().max(8)));
            differs |= *word != words[0][row] || matches!(word, Word::Broken(_));
            if let Word::Fail(why) | Word::Broken(why) = word {
                remarks.push_str(&format!("\n{test} on {kernel}: {why}\n"));
            }
        }
        if differs {
            verdict = Verdict::Failed;
            table.push_str("  <- differs");
        }
        table.push('\n');
    }
    table.push_str(&remarks);
    (table, verdict)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        }
    }
}
