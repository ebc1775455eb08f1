// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule lab bisect`: finds the commit that raised a count.
//!
//! The figure of GOOD determines the limit, and each measured commit above it is bad. The search
//! follows the first parents from GOOD to BAD; if it ends at a merge, it continues in the merged
//! branch. Counts are exact, so one boot for each commit is enough. A commit with the image of a
//! measured one is not booted. A commit that cannot be built or booted is skipped.
//!
//! ```text
//! lab-runs/NAME/bisect.json   options and figures; --resume continues from them
//! lab-runs/NAME/HASH/         kernel and results of a commit, as in every run
//! ```

mod figure;
mod options;
mod search;
mod state;

use std::path::Path;

use granule_types::backing::Backing;

pub use self::options::BisectOptions;
use self::{
    figure::Figure,
    search::{Search, Step, Verdict, max_measurements},
    state::{MeasuredCommit, State},
};
use crate::{
    RunStatus,
    error::{LabError, with_causes},
    file_lock::FileLock,
    interrupt,
    jobs::{
        JobQueue,
        execute::Executor,
        matrix::{self, PlannedJob},
        run_directory::RunDirectory,
        used_entries::mark_in_use,
    },
    kernel::{
        Kernel, lock_cache,
        recipe::Recipe,
        revisions::{Commit, UserTree},
        sources::Source,
        test_programs,
        toolchain::{Toolchain, environment_remark},
    },
    measure::{self, Measurement},
    options::{CommonOptions, Options, Paths, ReportOptions, RunPath},
    progress::Progress,
    report::print,
    shell::{Shell, absolute, sha256},
};

/// Number of commits from which BAD is measured first: a search without a bad commit takes long. With
/// a figure of 0 at GOOD, BAD is measured first in any case, because the metric may never occur.
const CHECK_BAD_FIRST_FROM: usize = 16;

/// Result of a search.
enum Found {
    /// The first bad commit and the figure of its parent.
    Culprit(Commit, u64),
    /// The first bad commit is among these; the others are skipped.
    Undecided(Vec<Commit>),
}

/// Bisects, prints the commit with both figures, and returns [`RunStatus::Failed`] if skipped
/// commits leave it undecided.
///
/// # Errors
/// A requirement is missing, a revision is unknown, GOOD cannot be measured, or no commit is bad.
pub fn bisect(given: BisectOptions) -> Result<RunStatus, LabError> {
    let resumed = match &given.serial.output.out {
        Some(out) if given.resume => {
            let out = absolute(out)?;
            let mut given = given.clone();
            given.serial.output.out = Some(out.clone());
            let mut state = State::open(&out)?;
            state.options = given.resumed(state.options, &out)?;
            Some(state)
        }
        _ => None,
    };
    let options = match &resumed {
        Some(state) => state.options.clone(),
        None => given.pinned(None)?,
    };
    let (Some(tree), Some(good), Some(bad), Some(figure)) =
        (&options.git, &options.good, &options.bad, options.figure.figure())
    else {
        return Err(LabError::Unusable("bisect requires GOOD, BAD, --git and --metric".to_owned()));
    };
    let user = UserTree(tree);
    let (good, bad) = (user.commit(good)?, user.commit(bad)?);
    let commits = user.commits(&good, &bad)?;
    if commits.is_empty() {
        return Err(LabError::Unusable(format!(
            "GOOD and BAD are the same commit, {}: set two revisions",
            good.title()
        )));
    }
    let mut bisection = Bisection::new((&options, figure), (tree, &good), resumed)?;
    bisection.progress.print_note(&format!(
        "bisecting {} commits after {} by {}, measured on {}: at most {} kernels",
        commits.len(),
        good.title(),
        bisection.figure.describe(),
        load(&bisection.jobs),
        1 + max_measurements(commits.len()) + u32::from(commits.len() >= CHECK_BAD_FIRST_FROM),
    ));
    let good_figure = bisection.measure(&good)?;
    if bisection.shell.is_dry_run() {
        return Ok(RunStatus::Passed);
    }
    let good_figure = good_figure.ok_or_else(|| {
        LabError::Unusable(format!("GOOD, {}, cannot be measured: set another", good.title()))
    })?;
    bisection.good_figure = good_figure;
    let found = bisection.search(user, &commits, good_figure)?;
    bisection.progress.finish();
    bisection.report(found)
}

/// Formats the load of each kernel.
fn load(jobs: &[PlannedJob]) -> String {
    match jobs {
        [job] => job.name.clone(),
        jobs => format!("{} jobs", jobs.len()),
    }
}

/// Returns the jobs of each kernel, by default one. A page-table test of a kernel tree is that of
/// Debian's Linux 6.1, the same for all commits, and is in use in the cache until the files are dropped.
fn plan_jobs(
    (shell, paths, progress): (Shell, &Paths, &Progress),
    options: &BisectOptions,
    common: CommonOptions,
) -> Result<(Vec<PlannedJob>, Vec<FileLock>), LabError> {
    let mut matrix = options.matrix.clone();
    let page_size = options.serial.build.page_size()?;
    let block = Backing::AnonymousHugetlb(Some(page_size.huge_page()));
    matrix.load = matrix.load.with_one_job(block);
    let run = Options::page_table_test(common, matrix, ReportOptions::default());
    run.workload.check(page_size)?;
    let _lock = lock_cache(shell, &paths.cache)?;
    let tests = test_programs(shell, &run, &paths.cache, None, progress)?;
    let jobs = matrix::jobs(&run, page_size, &tests);
    let in_use = mark_in_use(shell, &[], &jobs, &paths.cache)?;
    Ok((jobs, in_use))
}

struct Bisection<'a> {
    options: &'a BisectOptions,
    figure: Figure,
    shell: Shell,
    paths: Paths,
    progress: Progress,
    executor: Executor,
    jobs: Vec<PlannedJob>,
    /// Marks of the jobs' files in the cache.
    _in_use: Vec<FileLock>,
    run_directory: RunDirectory,
    /// Lock of the run directory; absent in a dry run.
    _lock: Option<FileLock>,
    source: Source,
    state: State,
    good_figure: u64,
    boots: usize,
}

impl<'a> Bisection<'a> {
    fn new(
        (options, figure): (&'a BisectOptions, Figure),
        (tree, good): (&Path, &Commit),
        resumed: Option<State>,
    ) -> Result<Self, LabError> {
        let common = options.serial.common(Some(tree));
        let shell = Shell::new(options.serial.output.dry_run);
        let paths = options.paths()?;
        let mut executor = Executor::new(shell, (&common, None), &paths)?;
        let progress = Progress::new(shell.is_dry_run());
        let (jobs, in_use) = plan_jobs((shell, &paths, &progress), options, common)?;
        let compiler = Toolchain::new(shell, &options.serial.build.variables)?.version;
        let files = options.input_hashes()?;
        let inputs = format!("{compiler} {} {files:?}", executor.emulator_version);
        let inputs = sha256(inputs.as_bytes());
        let (run_directory, state) = match (resumed, &paths.out) {
            (Some(state), RunPath::Given(path)) => {
                state.check_inputs(&inputs, path)?;
                (RunDirectory::of_path(path), state)
            }
            _ => {
                let state = State::new(options.clone(), inputs)?;
                (RunDirectory::create(shell, &paths.out)?, state)
            }
        };
        let lock = (!shell.is_dry_run()).then(|| run_directory.lock()).transpose()?;
        if lock.is_some() {
            state.write(shell, run_directory.path())?;
        }
        executor.copy_programs(shell, &run_directory)?;
        interrupt::set_run_directory("lab bisect", run_directory.path(), "");
        let source = {
            let _lock = lock_cache(shell, &paths.cache)?;
            Source::open_git(shell, &paths.cache, tree, good.tree.clone())?
        };
        environment_remark().iter().for_each(|remark| progress.print_note(remark));
        let (good_figure, boots) = (0, 0);
        Ok(Self {
            options,
            figure,
            shell,
            paths,
            progress,
            executor,
            jobs,
            _in_use: in_use,
            run_directory,
            source,
            _lock: lock,
            state,
            good_figure,
            boots,
        })
    }

    /// Searches a list of commits, whose parent has the figure `before`, and the branch of a merge.
    fn search(
        &mut self,
        user: UserTree<'_>,
        commits: &[Commit],
        before: u64,
    ) -> Result<Found, LabError> {
        let mut search = Search::new(commits.len());
        let last = commits.len() - 1;
        if (commits.len() >= CHECK_BAD_FIRST_FROM || self.good_figure == 0)
            && let verdict @ Verdict::Good = self.judge(&commits[last])?
        {
            search.record(last, verdict);
        }
        loop {
            match search.next() {
                Step::Measure(index) => search.record(index, self.judge(&commits[index])?),
                Step::Undecided(range) => return Ok(Found::Undecided(commits[range].to_vec())),
                Step::NoneBad => {
                    let figure = self.measure(&commits[last])?.unwrap_or_default();
                    if (self.good_figure, figure) == (0, 0) {
                        return Err(self.figure.never_occurs(&self.state.occurring));
                    }
                    return Err(LabError::Unusable(format!(
                        "no commit is bad: {} is {} at GOOD and {} at {}; the limit is {}",
                        self.figure.describe(),
                        self.good_figure,
                        figure,
                        commits[last].title(),
                        self.figure.limit(self.good_figure),
                    )));
                }
                Step::Found(index) => {
                    let culprit = &commits[index];
                    let before = match index.checked_sub(1) {
                        Some(parent) => self.measure(&commits[parent])?.unwrap_or(before),
                        None => before,
                    };
                    return self.descend(user, culprit, before);
                }
            }
        }
    }

    /// Searches the branch that a merge merged; the merge itself is the culprit if no commit is.
    fn descend(
        &mut self,
        user: UserTree<'_>,
        culprit: &Commit,
        before: u64,
    ) -> Result<Found, LabError> {
        let itself = || Found::Culprit(culprit.clone(), before);
        let [first, second, ..] = culprit.parents.as_slice() else { return Ok(itself()) };
        let branch = user.first_parents(first, second)?;
        let (Some(start), Some(tip)) = (branch.first(), branch.last()) else { return Ok(itself()) };
        self.progress.print_note(&format!(
            "{} is a merge of {} commits, which are searched",
            culprit.title(),
            branch.len()
        ));
        if self.judge(tip)? != Verdict::Bad {
            return Ok(itself());
        }
        let parent = match start.parents.first() {
            Some(parent) => self.measure(&user.commit(parent)?)?,
            None => None,
        };
        self.search(user, &branch, parent.unwrap_or(before))
    }

    fn judge(&mut self, commit: &Commit) -> Result<Verdict, LabError> {
        Ok(match self.measure(commit)? {
            None => Verdict::Skipped,
            Some(figure) if self.figure.is_bad(figure, self.good_figure) => Verdict::Bad,
            Some(_) => Verdict::Good,
        })
    }

    /// Returns the figure of a commit; `None` if it cannot be measured.
    fn measure(&mut self, commit: &Commit) -> Result<Option<u64>, LabError> {
        let known = self.state.measured.iter().find(|measured| measured.commit == commit.hash);
        if let Some(known) = known {
            return Ok(known.figure);
        }
        self.progress.start_stage(format!("kernel of {}", commit.title()));
        let (image_sha256, figure) = match self.build(commit)? {
            Ok(kernel) => {
                let image = kernel.image_sha256.clone();
                let mut measured = self.state.measured.iter();
                let same = measured.find(|one| one.image_sha256.as_ref() == Some(&image));
                let figure = match same {
                    Some(same) => same.figure,
                    None => self.boot(&kernel)?,
                };
                (Some(image), figure)
            }
            Err(error) => {
                self.progress.print_note(&with_causes(&error));
                (None, None)
            }
        };
        if self.shell.is_dry_run() {
            return Ok(None);
        }
        let text = figure.map_or_else(|| "skipped".to_owned(), |figure| figure.to_string());
        self.progress.print_note(&format!("{}: {text}", commit.title()));
        self.state.measured.push(MeasuredCommit {
            commit: commit.hash.clone(),
            subject: commit.subject.clone(),
            image_sha256,
            figure,
        });
        self.state.write(self.shell, self.run_directory.path())?;
        Ok(figure)
    }

    /// Builds the kernel of a commit; the inner error is that of a commit that is skipped.
    fn build(&self, commit: &Commit) -> Result<Result<Kernel, LabError>, LabError> {
        let recipe = Recipe::of_commit(commit.short_hash().to_owned(), commit.clone());
        let options = &self.options.serial.build;
        measure::build(self.shell, &self.paths, &self.source, options, &recipe, &self.progress)
    }

    /// Runs the jobs on a kernel and returns its figure; `None` if a job failed.
    fn boot(&mut self, kernel: &Kernel) -> Result<Option<u64>, LabError> {
        let queue = JobQueue {
            executor: &self.executor,
            shell: self.shell,
            progress: &self.progress,
            run_directory: &self.run_directory,
            emulator_count: self.options.serial.host.emulator_count(),
        };
        let measurement = measure::measure(&queue, kernel, &self.paths.cache, &self.jobs)?;
        self.boots += self.jobs.len();
        match measurement {
            Some(Measurement { records, failures }) if failures.is_empty() => {
                self.state.occurring.extend(self.figure.occurring(&records));
                self.figure.of(&records).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn report(&mut self, found: Found) -> Result<RunStatus, LabError> {
        let figure = self.figure.describe();
        let mut text = String::new();
        let status = match found {
            Found::Culprit(commit, before) => {
                let after = self.measure(&commit)?.unwrap_or_default();
                text += &format!(
                    "first bad commit: {}\n  {figure}: {before} before, {after} after{}\n",
                    commit.title(),
                    change(before, after),
                );
                RunStatus::Passed
            }
            Found::Undecided(commits) => {
                text +=
                    "undecided: the commits between are skipped; the first bad commit is one of\n";
                for commit in commits {
                    text += &format!("  {}\n", commit.title());
                }
                RunStatus::Failed
            }
        };
        let skipped = self.state.measured.iter().filter(|one| one.figure.is_none()).count();
        text += &format!(
            "  {} commits measured, {skipped} skipped, {} boots; GOOD has {}, the limit is {}\n",
            self.state.measured.len() - skipped,
            self.boots,
            self.good_figure,
            self.figure.limit(self.good_figure),
        );
        self.run_directory.write_report(&text)?;
        print(&text)?;
        eprintln!("lab: run directory: {}", self.run_directory.path().display());
        Ok(status)
    }
}

/// Formats the relative change of a figure.
#[expect(clippy::cast_precision_loss, reason = "a percentage need not be exact")]
fn change(before: u64, after: u64) -> String {
    match before {
        0 => String::new(),
        before => format!(" ({:+.1}%)", 100.0 * (after as f64 / before as f64 - 1.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::{options::tests::options, *};
    use crate::{
        host::{job::KERNEL_TEST_PATH, program::tests::arm64_program},
        jobs::work::Work,
    };

    #[test]
    fn a_bisection_measures_the_given_page_table_test() {
        let directory = tempfile::tempdir().unwrap();
        let test = directory.path().join("test");
        std::fs::write(&test, arm64_program()).unwrap();
        let (cache, file) = (directory.path().display(), test.display());
        let line = format!("bisect a b --git t --metric TLBI --cache {cache} --test-binary {file}");
        let options = options(&line);
        let common = options.serial.common(options.git.as_deref());
        let paths = Paths::new(&common).unwrap();
        let context = (Shell::new(true), &paths, &Progress::new(true));

        let (jobs, _) = plan_jobs(context, &options, common).unwrap();

        assert_eq!(jobs[0].work, Work::KernelTest(test));
        assert_eq!((jobs.len(), jobs[0].job.argv[0].as_str()), (1, KERNEL_TEST_PATH));
    }
}
