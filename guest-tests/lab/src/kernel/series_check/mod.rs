// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks Linux series against the source of their bases.
//!
//! The file `series` lists every patch in its directory, the cover letter lists all subjects, the last
//! line of its diffstat, if it has one, equals the changes, subjects have at most 72 characters, the
//! patches apply in order, and the kernel's checkpatch reports nothing except missing sign-offs. With
//! `--compile`, each patch is also compiled with W=1 and checked by sparse, and has no message that
//! the base lacks.
//!
//! ```text
//! mod ─┬─ list      lists, subjects, checkpatch
//!      ├─ patches   trees of the patches, verdicts
//!      ├─ targets   what a patch changes, and which objects that are
//!      └─ objects   objects of a configuration ─ warnings
//! CACHE/check-series/SOURCE/   git/, tree/: repository and work tree
//!                    objects/  one directory for each configuration
//!                    passed/   hashes of the inputs of passed checks
//! ```

mod list;
mod objects;
mod patches;
mod targets;
mod warnings;

use std::path::{Path, PathBuf};

use self::{
    objects::{Configuration, ObjectCheck, Programs},
    patches::{PassedChecks, SeriesCheck, WorkTree},
};
use crate::{
    command::CommandError,
    error::LabError,
    file_lock::FileLock,
    in_use,
    kernel::{
        git::{Repository, TreeId},
        lock_cache, series,
        sources::Source,
    },
    options::Locations,
    shell::Shell,
    values::{LinuxVersion, MakeVariable},
};

/// Options of `granule lab check-series`.
#[derive(Debug, Clone, clap::Args)]
pub struct SeriesCheckOptions {
    /// Check only series of this Linux version
    #[arg(long = "base", value_name = "VERSION")]
    bases: Vec<LinuxVersion>,
    /// Check only series of this name
    #[arg(long = "series", value_name = "NAME")]
    series: Vec<String>,
    /// Compile what each patch changes with W=1, run sparse, and compare the messages with those of
    /// the base
    #[arg(long)]
    compile: bool,
    /// Configuration of --compile [default: 4k, 16k, 64k and debug]
    #[arg(long = "configuration", value_name = "NAME", value_enum, requires = "compile")]
    configurations: Vec<Configuration>,
    /// Compile only the objects of changed files, and no directory of a complete series
    #[arg(long, requires = "compile")]
    objects_only: bool,
    /// Variable of make, such as LLVM=1
    #[arg(long = "make", value_name = "VARIABLE=VALUE", requires = "compile")]
    variables: Vec<MakeVariable>,
    /// Number of parallel compilers [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..),
          requires = "compile")]
    jobs: Option<u32>,
    /// Kernel source for all bases, instead of Debian's
    #[arg(long, value_name = "DIR")]
    source: Option<PathBuf>,
    #[command(flatten)]
    locations: Locations,
}

/// Series of a base.
type Selection = (LinuxVersion, Vec<String>);

impl SeriesCheckOptions {
    /// Checks the series, and prints a line for each patch, its problems, and a summary. Returns
    /// whether there are no problems.
    ///
    /// # Errors
    /// A base or series is unknown, a source is not available, or a program cannot be run.
    pub fn check(&self) -> Result<bool, LabError> {
        let (linux, cache) = (self.locations.linux()?, self.locations.cache()?);
        let selections = self.select(&linux)?;
        let programs =
            self.compile.then(|| Programs::new(&self.variables, self.jobs)).transpose()?;
        let mut counts = Counts::default();
        for (base, names) in &selections {
            self.check_base((&linux, &cache), (*base, names), programs.as_ref(), &mut counts)?;
        }
        if programs.as_ref().is_some_and(|programs| !programs.has_sparse) {
            println!("SKIP sparse: it is not installed; install the package sparse");
        }
        println!(
            "{} patches of {} series, {} problems",
            counts.patches, counts.series, counts.problems
        );
        Ok(counts.problems == 0)
    }

    /// Returns the requested series by base.
    fn select(&self, linux: &Path) -> Result<Vec<Selection>, LabError> {
        let known = series::bases(linux);
        if let Some(unknown) = self.bases.iter().find(|base| !known.contains(base)) {
            let known: Vec<String> = known.iter().map(LinuxVersion::to_string).collect();
            return Err(LabError::Unusable(format!(
                "--base {unknown} has no series; expected one of: {}",
                known.join(", ")
            )));
        }
        let bases = known.iter().filter(|base| self.bases.is_empty() || self.bases.contains(base));
        let names = |base: &LinuxVersion| (*base, series::series_names(linux, *base));
        let mut selections: Vec<Selection> = bases.map(names).collect();
        let has = |name: &String| selections.iter().any(|(_, names)| names.contains(name));
        if let Some(unknown) = self.series.iter().find(|name| !has(name)) {
            let mut known: Vec<&String> = selections.iter().flat_map(|(_, names)| names).collect();
            known.sort();
            known.dedup();
            return Err(LabError::Unusable(format!(
                "unknown series '{unknown}' of --series; expected one of: {}",
                known.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ")
            )));
        }
        for (_, names) in &mut selections {
            names.retain(|name| self.series.is_empty() || self.series.contains(name));
        }
        selections.retain(|(_, names)| !names.is_empty());
        Ok(selections)
    }

    fn check_base(
        &self,
        (linux, cache): (&Path, &Path),
        (base, names): (LinuxVersion, &[String]),
        programs: Option<&Programs>,
        counts: &mut Counts,
    ) -> Result<(), LabError> {
        let source = CheckedSource::open(cache, base, self.source.as_deref(), programs.is_some())?;
        let CheckedSource { directory, repository, base: base_tree, .. } = &source;
        let configurations: &[Configuration] = match self.configurations.as_slice() {
            [] => &Configuration::DEFAULT,
            some => some,
        };
        let open = |programs| {
            let open = |configuration: &Configuration| {
                let fragment = configuration.fragment(&linux.join("config"))?;
                let objects = directory.join("objects");
                let places = (base_tree, repository.work_tree(), objects.as_path());
                ObjectCheck::open(*configuration, fragment, programs, places)
            };
            configurations.iter().map(open).collect::<Result<Vec<_>, CommandError>>()
        };
        let mut objects = programs.map(open).transpose()?.unwrap_or_default();
        let mut work_tree = WorkTree::new(repository, base_tree);
        println!("{base}: {}", source.description);
        for name in names {
            let check = SeriesCheck {
                linux,
                base,
                name,
                objects_only: self.objects_only,
                passed: PassedChecks::new(&directory.join("passed"), base_tree, programs),
            };
            let (patches, problems) = check.run(&mut work_tree, &mut objects)?;
            counts.series += 1;
            counts.patches += patches;
            counts.problems += problems;
        }
        Ok(())
    }
}

/// Source of a base, and the entries of the cache that a check of its series uses.
#[derive(Debug)]
struct CheckedSource {
    description: String,
    base: TreeId,
    /// Directory of the check in the cache.
    directory: PathBuf,
    repository: Repository,
    /// Lock of the work tree.
    _lock: Option<FileLock>,
    /// Marks of the directory and of the source, whose objects the repository of a compilation reads.
    _in_use: [FileLock; 2],
}

impl CheckedSource {
    /// Opens the source of a base, in `path` instead of Debian's. Compilations take long, so they have
    /// their own work tree, and leave the cache unlocked.
    fn open(
        cache: &Path,
        base: LinuxVersion,
        path: Option<&Path>,
        compiles: bool,
    ) -> Result<Self, LabError> {
        let shell = Shell::new(false);
        let mut lock = lock_cache(shell, cache)?;
        let Source { mut repository, base, description, .. } = match path {
            Some(path) => Source::open_path(shell, cache, path)?,
            None => Source::open_package(shell, cache, base, None)?,
        };
        let source = repository.git_dir().parent().unwrap_or(cache).to_owned();
        let directory = cache.join("check-series").join(source.file_name().unwrap_or_default());
        shell.create_dir(&directory)?;
        let in_use = [in_use::mark(&directory)?, in_use::mark(&source)?];
        if compiles {
            let objects = repository.git_dir().join("objects");
            repository = Repository::open(shell, &directory, Some(&objects))?;
            // Another check may hold the lock of the work tree for long: the cache is unlocked before.
            drop(lock);
            lock = lock_cache(shell, &directory)?;
        }
        Ok(Self { description, base, directory, repository, _lock: lock, _in_use: in_use })
    }
}

/// Numbers of what was checked.
#[derive(Debug, Default)]
struct Counts {
    series: usize,
    patches: usize,
    problems: usize,
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use clap::Parser;

    use super::*;

    /// Makefile whose objects print the lines `warn…` of their source, and fail for a line `error`.
    const MAKEFILE: &str = "VERSION = 6\nPATCHLEVEL = 12\n\
        allnoconfig:\n\t@touch $(O)/.config\n\
        olddefconfig:\n\t@cp $(O)/granule.config $(O)/.config\n\
        %.o: FORCE\n\t@echo '  CC      $@'; \
        sed -n 's|^warn|$*.c:1:1: warning: &|p' $*.c; ! grep '^error' $*.c\n\
        %/: FORCE\n\t@:\nFORCE:\n";
    const SOURCE: &str = "arch/arm64/kvm/mmu.c";

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        options: SeriesCheckOptions,
    }

    /// A kernel tree, and a repository with one series for each text that a patch adds.
    struct Fixture(tempfile::TempDir);

    impl Fixture {
        fn new(series: &[(&str, &str)]) -> Self {
            let fixture = Self(tempfile::tempdir().unwrap());
            for (path, text) in [
                ("linux/Makefile", MAKEFILE),
                ("linux/scripts/kconfig/merge_config.sh", "exit 0\n"),
                ("linux/scripts/checkpatch.pl", "exit 0;\n"),
                (&format!("linux/{SOURCE}"), "warn of the base\n"),
                ("root/stage2/linux/config/lab.config", "CONFIG_KVM=y\n"),
                ("root/stage2/linux/config/debug.config", ""),
                ("root/stage2/linux/config/check.config", ""),
                ("root/stage2/linux/config/lpa2.config", "CONFIG_ARM64_VA_BITS_52=y\n"),
            ] {
                fixture.write(path, text);
            }
            for (name, line) in series {
                let directory = format!("root/stage2/linux/6.12/{name}");
                fixture.write_patch(name, "warn of the base", line);
                fixture.write(&format!("{directory}/series"), "1.patch\n");
                let cover = "x\n\nGranule developers (1):\n Add a line\n";
                fixture.write(&format!("{directory}/cover-letter.txt"), cover);
            }
            fixture
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        /// Writes the patch of a series, which adds a line below that of the base.
        fn write_patch(&self, series: &str, base: &str, line: &str) {
            let patch = format!(
                "From: x\nSubject: [PATCH 1/1] Add a line\n\n---\n\n\
                 diff --git a/{SOURCE} b/{SOURCE}\n--- a/{SOURCE}\n+++ b/{SOURCE}\n\
                 @@ -1 +1,2 @@\n {base}\n+{line}\n"
            );
            self.write(&format!("root/stage2/linux/6.12/{series}/1.patch"), &patch);
        }

        fn check(&self, options: &str) -> Result<bool, LabError> {
            let path = |name: &str| self.0.path().join(name).display().to_string();
            let (root, cache, source) = (path("root"), path("cache"), path("linux"));
            let line = format!("x --root {root} --cache {cache} --source {source} {options}");
            CommandLine::parse_from(line.split_ascii_whitespace()).options.check()
        }

        /// Returns the directories of a kind below the cache's entry of the source.
        fn entries(&self, kind: &str) -> PathBuf {
            let parent = self.0.path().join("cache/check-series");
            parent.join(&crate::shell::sorted_entries(&parent)[0]).join(kind)
        }
    }

    const COMPILE: &str = "--compile --make CC=echo --make LD=echo --jobs 1";

    #[test]
    fn a_new_warning_and_an_error_are_problems() {
        let fixture =
            Fixture::new(&[("clean", "int x;"), ("warning", "warn: new"), ("wrong", "error")]);
        let check = |name: &str, options: &str| {
            fixture.check(&format!("{options} --series {name}")).unwrap()
        };

        assert!(check("clean", COMPILE));
        assert!(!check("warning", COMPILE));
        assert!(!check("wrong", COMPILE));
        assert!(check("warning", "") && check("wrong", ""));
        assert!(!fixture.check(COMPILE).unwrap());
    }

    #[test]
    fn a_passed_check_is_not_repeated() {
        let fixture = Fixture::new(&[("clean", "int x;"), ("warning", "warn: new")]);
        let check = |name: &str| fixture.check(&format!("{COMPILE} --series {name}")).unwrap();

        assert!(check("clean"));
        fs::remove_dir_all(fixture.entries("objects")).unwrap();
        assert!(check("clean"));
        assert!(!fixture.entries("objects").exists());
        assert!(!check("warning") && !check("warning"));
    }

    #[test]
    fn a_diffstat_of_other_changes_is_a_problem_also_after_the_patches_passed() {
        let fixture = Fixture::new(&[("series", "int x;")]);
        let check_letter = |insertions: u32| {
            let summary = format!("1 file changed, {insertions} insertion(+)");
            let cover = format!("x\n\nGranule developers (1):\n Add a line\n\n {summary}\n");
            fixture.write("root/stage2/linux/6.12/series/cover-letter.txt", &cover);
            fixture.check(COMPILE).unwrap()
        };

        assert!(check_letter(1));
        assert!(!check_letter(2));
        assert!(check_letter(1));
    }

    #[test]
    fn a_message_of_an_earlier_base_is_new() {
        let fixture = Fixture::new(&[("series", "int x;")]);
        let of_first_base = fixture.check(COMPILE).unwrap();

        fixture.write(&format!("linux/{SOURCE}"), "int y;\n");
        fixture.write_patch("series", "int y;", "warn of the base");
        let of_second_base = fixture.check(COMPILE).unwrap();
        fixture.write(&format!("linux/{SOURCE}"), "warn of the base\n");
        fixture.write_patch("series", "warn of the base", "warn of the base");
        let twice = fixture.check(COMPILE).unwrap();
        fixture.write_patch("series", "warn of the base", "int z;");
        let of_first_base_again = fixture.check(COMPILE).unwrap();

        assert!(of_first_base && !of_second_base, "the second base lacks the message");
        assert!(!twice && of_first_base_again, "the first base has it once");
    }

    #[test]
    fn a_check_uses_its_directory_and_the_source_of_its_objects() {
        let fixture = Fixture::new(&[]);
        let (cache, linux) = (fixture.0.path().join("cache"), fixture.0.path().join("linux"));
        let base = "6.12".parse().unwrap();
        let is_in_use = |kind: &str| {
            let entries = crate::shell::sorted_entries(&cache.join(kind));
            let entry = cache.join(kind).join(&entries[0]);
            in_use::lock_for_removal(&entry).unwrap().is_none()
        };

        let check = CheckedSource::open(&cache, base, Some(&linux), true).unwrap();
        let during = ["sources", "check-series"].map(is_in_use);
        // Other runs and a removal of unused entries need not wait for the compilation.
        let other = File::open(cache.join("lock")).unwrap().try_lock();
        drop(check);

        assert_eq!(during, [true; 2]);
        assert!(other.is_ok(), "{other:?}");
        assert!(["sources", "check-series"].iter().all(|kind| !is_in_use(kind)));
    }

    #[test]
    fn an_unknown_base_or_series_is_refused_with_the_known_ones() {
        let fixture = Fixture::new(&[("clean", "int x;")]);
        let refused = |options: &str| fixture.check(options).unwrap_err().to_string();

        assert!(
            refused("--base 5.10").contains("--base 5.10 has no series; expected one of: 6.12")
        );
        assert!(refused("--series none").contains("'none' of --series; expected one of: clean"));
    }
}
