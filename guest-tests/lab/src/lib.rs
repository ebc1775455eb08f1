// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lab: a host kernel before and after a Linux series, under emulated EL2, and what changed.
//!
//! ```text
//! sources ─ series ─ worktree ─ build ─┐
//!            (fragment)                ├─ kernels ─┐
//!                        given images ─┘           ├─ execute (one boot a job) ─ records ─ compare
//! options ─ matrix ────────────────────────── jobs ┘     │
//!            initramfs, emulator ────────────────────────┤ outside
//!            init, frames, job ──────────────────────────┘ inside the emulated host
//! ```
//!
//! Sources are fetched and unpacked once, kernels built once ([`build`]), and each job is one boot
//! ([`matrix`]) whose results come out through the console ([`frames`]) and are paired with the
//! instructions counted ([`counts`]). Under `-icount` the same inputs give the same bytes. All that
//! a run did stays in its [run directory](rundir). Whatever goes to the outside goes through a
//! [`step::Shell`], so a dry run prints exactly what a run would do.

pub mod apt;
mod boots;
pub mod build;
pub mod counts;
pub mod dialogue;
pub mod emulator;
mod error;
pub mod execute;
pub mod fragment;
pub mod frames;
pub mod guest;
pub mod guest_init;
pub mod init;
pub mod initramfs;
pub mod job;
pub mod kernel;
pub mod matrix;
pub mod options;
mod page;
mod pool;
mod prepare;
pub mod progress;
pub mod rundir;
pub mod series;
pub mod sources;
pub mod splat;
pub mod step;
pub mod summary;
pub mod upstream;
mod verdicts;
pub mod worktree;

use std::io::{self, Write};

pub use self::{
    error::LabError,
    options::{Kernels, Matrix, Options, Places, Test},
};
use self::{
    execute::Bench, kernel::Kernel, pool::Work, prepare::prepare, progress::Progress,
    rundir::RunDir, step::Shell,
};
use granule_report::{self as compare, Comparison, input, render};

/// How a run that was carried out to its end came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing to complain about.
    Fine,
    /// A job failed, a phase became slower, or a selftest's verdict differs.
    Failed,
}

/// Fetches and unpacks the source and prints where its plain tree lies.
///
/// # Errors
/// It cannot be had.
pub fn fetch(options: &Options) -> Result<(), LabError> {
    let shell = Shell::new(options.dry_run);
    let _lock = prepare::lock(shell, &options.places.cache)?;
    let tree = sources::tree(shell, &options.places.cache, &options.kernels)?;
    worktree::restore(shell, &tree)?;
    print(&format!("{}\n", tree.path.display()))
}

/// Carries a run out, prints what changed and leaves a report of it.
///
/// # Errors
/// What is needed is missing, a kernel was not built, or nothing can be compared.
pub fn run(options: &Options) -> Result<Verdict, LabError> {
    let shell = Shell::new(options.dry_run);
    let progress = Progress::new(options.dry_run);
    prepare::check(options)?;
    let emulator = match emulator::version() {
        Err(_) if options.dry_run => "QEMU".to_owned(),
        version => version?,
    };
    let (kernels, tests) = prepare(shell, options, &progress)?;
    let rundir = RunDir::create(shell, &options.places.out, &kernels)?;
    let bench = Bench {
        init: options.places.init.clone(),
        plugin: options.places.plugin.clone(),
        emulator,
        deadline: options.deadline,
        strict: options.kernels.debug,
    };
    let work = Work {
        bench: &bench,
        shell,
        progress: &progress,
        rundir: &rundir,
        parallel: options.parallel,
    };
    let about = |kernels, jobs| page::Run {
        kernels,
        jobs,
        emulator: &bench.emulator,
    };
    let verdict = match options.matrix.test {
        Test::Selftests => {
            let jobs: Vec<_> = tests
                .iter()
                .map(|(path, arguments)| matrix::selftest(&options.matrix, path.clone(), arguments))
                .collect();
            let outcomes = work.run(&kernels, &jobs);
            progress.finish();
            verdicts::judge(shell, &rundir, about(&kernels, &jobs), outcomes)?
        }
        Test::Guest => {
            let jobs = guest::jobs(&options.matrix);
            let outcomes = work.run(&kernels, &jobs);
            progress.finish();
            boots::judge(shell, &rundir, about(&kernels, &jobs), outcomes)?
        }
        Test::Ours | Test::Upstream => {
            let upstream = tests.first().map(|(path, _)| path);
            let jobs = matrix::jobs(&options.matrix, upstream);
            let outcomes = work.run(&kernels, &jobs);
            let failed = rundir.keep(shell, &kernels, &jobs, outcomes, &progress)?;
            progress.finish();
            let compared = compare(options, &rundir, &kernels)?;
            if failed { Verdict::Failed } else { compared }
        }
    };
    if !options.dry_run {
        eprintln!("lab: everything is in {}", rundir.path().display());
    }
    Ok(verdict)
}

/// Compares each kernel with the one before it where every patch has its own, and the last with
/// the first.
fn compare(options: &Options, rundir: &RunDir, kernels: &[Kernel]) -> Result<Verdict, LabError> {
    let mut pairs: Vec<(&Kernel, &Kernel)> = Vec::new();
    if kernels.len() > 2 {
        pairs.extend(kernels.iter().zip(&kernels[1..]));
    }
    if let [first, .., last] = kernels {
        pairs.push((first, last));
    }
    let mut verdict = Verdict::Fine;
    let mut report = String::new();
    let mut page = None;
    if let ([only], false) = (kernels, options.dry_run) {
        report = summary::table(&input::read(&rundir.results(only))?);
    } else if kernels.len() > 2 && !options.dry_run {
        let sides = kernels
            .iter()
            .filter(|kernel| rundir.results(kernel).is_file())
            .map(|kernel| Ok((kernel.name.clone(), input::read(&rundir.results(kernel))?)))
            .collect::<Result<Vec<_>, LabError>>()?;
        report = summary::ladder(&sides);
    }
    let whole_series = pairs.len().saturating_sub(1);
    for (index, (before, after)) in pairs.into_iter().enumerate() {
        let [before_path, after_path] = [before, after].map(|kernel| rundir.results(kernel));
        if options.dry_run {
            print(&format!(
                "granule compare {} {}\n",
                before_path.display(),
                after_path.display()
            ))?;
            continue;
        }
        if !before_path.is_file() || !after_path.is_file() {
            continue;
        }
        let settings = compare::Options {
            labels: [before.name.clone(), after.name.clone()],
            min_effect: Some(options.min_effect_percent / 100.0),
            command: Some(compare::command_line()),
            ..compare::Options::default()
        };
        let comparison = Comparison::of(
            &input::side(&[before_path])?,
            &input::side(&[after_path])?,
            &settings,
        )?;
        let slower = comparison.regressions().next().is_some();
        if options.judge && index == whole_series && slower {
            verdict = Verdict::Failed;
        }
        report.push_str(&render::text(&comparison));
        report.push('\n');
        let html = render::html(&comparison);
        if index == whole_series {
            page = Some(html);
        } else {
            rundir.write_page(Some(after), &html)?;
        }
    }
    if !options.dry_run {
        rundir.write_report(&report)?;
        print(&report)?;
    }
    if page.is_none() && !options.dry_run {
        page = figures(rundir, kernels)?;
    }
    if let Some(page) = page {
        rundir.tell_page(None, &page)?;
    }
    Ok(verdict)
}

/// The page of the last kernel that has results, where there are no two to be compared.
fn figures(rundir: &RunDir, kernels: &[Kernel]) -> Result<Option<String>, LabError> {
    let mut those = kernels.iter().rev();
    let Some(kernel) = those.find(|kernel| rundir.results(kernel).is_file()) else {
        return Ok(None);
    };
    let samples = input::side(&[rundir.results(kernel)])?;
    let command = compare::command_line();
    Ok(Some(render::single(&samples, &kernel.name, Some(&command))))
}

/// Ends a run that compares no times: keeps and prints its table, and leaves a page of it.
fn leave(rundir: &RunDir, table: &str, page: &str) -> Result<(), LabError> {
    rundir.write_report(table)?;
    print(table)?;
    rundir.tell_page(None, page)?;
    Ok(())
}

fn print(text: &str) -> Result<(), LabError> {
    match io::stdout().write_all(text.as_bytes()) {
        // Whoever reads has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.map_err(LabError::Output),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use granule_report::results::record_lines;
    use granule_types::record::Record;

    #[test]
    fn a_run_of_one_kernel_leaves_a_page_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let kernels =
            ["base", "series"].map(|name| Kernel::planned(name.to_owned(), "Image".into(), None));
        let rundir = RunDir::create(Shell::new(false), folder.path(), &kernels).unwrap();
        assert_eq!(figures(&rundir, &kernels).unwrap(), None, "nothing ran");
        let record: Record = serde_json::from_value(serde_json::json!({
            "schema": granule_types::record::SCHEMA, "engine": "kvm", "phase": "create", "ns": 1_234_567,
            "config": {"mode": "", "backing": "anonymous", "memory": 65536, "vcpus": 1,
                       "seed": 0, "iteration": 0},
            "counters": {"DC CIVAC": 5},
        }))
        .unwrap();
        std::fs::write(
            rundir.results(&kernels[0]),
            record_lines(&[record]).unwrap(),
        )
        .unwrap();

        let page = figures(&rundir, &kernels).unwrap().unwrap();
        rundir.tell_page(None, &page).unwrap();

        let page = std::fs::read_to_string(folder.path().join("report.html")).unwrap();
        assert!(
            page.contains("Figures of base") && page.contains("1.235 ms"),
            "{page}"
        );
        assert!(
            page.contains("anonymous, 64K, 1 vCPU, by kvm; 1 run"),
            "{page}"
        );
    }
}
