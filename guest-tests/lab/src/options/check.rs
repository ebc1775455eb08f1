// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of `granule lab check`.

use std::{convert::Infallible, path::PathBuf, str::FromStr};

use clap::ValueEnum;
use granule_stage2::check::MAX_CPUS;
use granule_types::{backing::Backing, guest_mode::GuestMode, units::Bytes};
use serde::{Deserialize, Serialize};

use super::{
    BootMatrix, CommonOptions, GuestMatrix, Matrix, Options, ReportOptions, SelftestOptions,
    TestProgram, Workload,
    workload::{Load, ProgramMatrix, ProgramPlace},
};
use crate::{
    check::{
        hypervisor::KernelCheck,
        suppressions::{self, Suppression},
    },
    error::LabError,
    host::{hold::Hold, program::Program},
    values::LinuxVersion,
};

/// CPUs and memory of a host whose boot is checked.
const BOOT_CPUS: u32 = 4;
const BOOT_MEMORY: Bytes = Bytes::gib(1);

/// Options of `granule lab check` beyond those of every run.
#[derive(Debug, Clone, clap::Args)]
#[command(
    next_help_heading = "Workload",
    mut_arg("backing", |arg| arg.help(
        "Backing of the memory [default: base pages, and hugetlb pages of a block]"
    )),
    mut_arg("size", |arg| arg.help(
        "Size of the memory, rounded up to the backing's pages [default: 16M, 128M for a guest]"
    )),
    mut_arg("seeds", |arg| arg.help("Boots of each job, each with another schedule [default: 1]")),
)]
pub struct CheckArgs {
    /// Load of the host: boot (none), bench, kvm_page_table_test, guest (boot of a Linux guest),
    /// selftests, one selftest with its arguments, or the path of a static arm64 program
    #[arg(long, value_name = "TEST", default_value = "bench")]
    test: CheckedTest,
    /// Additional argument of `granule bench`, of `granule run` (guest) or of the program
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    test_arg: Vec<String>,
    /// Run the selftests of Debian's linux-source-VERSION [default: those of the last kernel's tree];
    /// with --test selftests, or one selftest
    #[arg(long, value_name = "VERSION")]
    tests_of: Option<LinuxVersion>,
    #[command(flatten)]
    load: Load,
    /// Guest mode of the page-table test; a cortex-a72 supports P40V48_4K (5)
    #[arg(short = 'm', long, default_value = "2")]
    mode: GuestMode,
    /// Hold a CPU: once a CPU has called the host kernel's function AFTER, the next CPU that calls
    /// FUNCTION waits there until another CPU calls UNTIL (docs/checking-linux.md)
    #[arg(long, value_name = "AFTER:FUNCTION:UNTIL")]
    hold: Option<Hold>,
    #[command(flatten)]
    check: CheckOptions,
}

/// Checks of a run and their report.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Check")]
pub struct CheckOptions {
    /// Keep the trace of each job, compressed, for `granule check`
    #[arg(long)]
    pub(crate) keep_trace: bool,
    /// Also check the kernel's own tables (stage 1, TTBR1)
    #[arg(long)]
    #[serde(default)]
    pub(crate) stage1: bool,
    /// Level of FEAT_BBM of the CPUs, if it is not that of their identification register: 3 if they take no
    /// TLB conflict aborts
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(0..=3))]
    #[serde(default)]
    pub(crate) bbm: Option<u8>,
    #[command(flatten)]
    pub(crate) report: FindingsOptions,
}

impl CheckOptions {
    /// Returns what is checked in a kernel.
    pub(crate) const fn kernel(&self) -> KernelCheck {
        KernelCheck { stage1: self.stage1, bbm: self.bbm }
    }
}

/// Report of findings.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Check")]
pub struct FindingsOptions {
    /// Accept the findings in this file, of lines 'RULE FUNCTION[,FUNCTION…] # REASON'
    #[arg(long, value_name = "FILE")]
    pub(crate) suppress: Option<PathBuf>,
    /// Format of the printed report; a run directory contains all of them
    #[arg(long, value_enum, default_value_t)]
    pub(crate) format: CheckFormat,
}

impl FindingsOptions {
    /// Returns the accepted findings.
    ///
    /// # Errors
    /// The file cannot be read, or a line is malformed.
    pub(crate) fn suppressions(&self) -> Result<Vec<Suppression>, LabError> {
        self.suppress.as_deref().map_or(Ok(Vec::new()), suppressions::read)
    }
}

/// Format of the report of a check.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckFormat {
    /// Plain text
    #[default]
    Text,
    /// JSON lines: a summary, then each finding
    Json,
    /// SARIF 2.1.0
    Sarif,
}

/// Load of a checked host.
#[derive(Debug, Clone, PartialEq, Eq)]
enum CheckedTest {
    Bench,
    KernelPageTableTest,
    Guest,
    Boot,
    AllSelftests,
    /// Name and arguments.
    Selftest(String),
    Program(PathBuf),
}

impl FromStr for CheckedTest {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "bench" => Self::Bench,
            "kvm_page_table_test" | "upstream" => Self::KernelPageTableTest,
            "guest" => Self::Guest,
            "boot" => Self::Boot,
            "selftests" => Self::AllSelftests,
            path if path.split(' ').next().is_some_and(|word| word.contains('/')) => {
                Self::Program(PathBuf::from(path))
            }
            selftest => Self::Selftest(selftest.to_owned()),
        })
    }
}

impl CheckedTest {
    /// Returns the names of the options that have an effect on the load.
    const fn options(&self) -> &'static [&'static str] {
        match self {
            Self::Bench => &["-s", "-v", "-b", "--seeds", "-m", "--test-arg"],
            Self::KernelPageTableTest => &["-s", "-v", "-b", "--seeds", "-m"],
            Self::Guest => &["-s", "-v", "-b", "--seeds", "--test-arg"],
            Self::Boot => &["-b"],
            Self::AllSelftests | Self::Selftest(_) => &["--tests-of"],
            Self::Program(_) => &["-v", "--seeds", "--test-arg"],
        }
    }
}

impl CheckArgs {
    /// Refuses options without effect on the load.
    fn check_options(&self) -> Result<(), LabError> {
        let others = [
            ("-m", self.mode != GuestMode::P48V48_4K),
            ("--test-arg", !self.test_arg.is_empty()),
            ("--tests-of", self.tests_of.is_some()),
        ];
        let others = others.iter().filter(|(_, is_set)| *is_set).map(|(name, _)| *name);
        let mut set = self.load.set_options().chain(others);
        let Some(option) = set.find(|name| !self.test.options().contains(name)) else {
            return Ok(());
        };
        let is_selftest = matches!(self.test, CheckedTest::AllSelftests | CheckedTest::Selftest(_));
        Err(LabError::Unusable(if is_selftest {
            format!("{option} has no effect on selftests: set --test 'NAME ARGUMENTS'")
        } else {
            format!("{option} has no effect on this --test: omit it")
        }))
    }
}

impl Options {
    /// Returns a run whose jobs are checked: by default the page-table test with 4 vCPUs and 16M, in
    /// base pages and in hugetlb pages of a block.
    ///
    /// # Errors
    /// The page size of the kernels is unknown, an option has no effect, the emulated host has more CPUs
    /// than the checker supports, or it cannot execute the program.
    pub fn check(mut common: CommonOptions, args: CheckArgs) -> Result<Self, LabError> {
        args.check_options()?;
        let CheckArgs { test, test_arg, tests_of, load, mode, hold, check } = args;
        common.host.hold = hold;
        let cpus = common.host.smp.unwrap_or_else(|| load.most_vcpus());
        if cpus > u32::from(MAX_CPUS) {
            return Err(LabError::Unusable(format!(
                "the checker supports at most {MAX_CPUS} CPUs of the emulated host, not {cpus}: set \
                 --smp to fewer"
            )));
        }
        let small = Matrix::smoke(common.kernels.build.page_size()?);
        let workload = match test {
            CheckedTest::Bench | CheckedTest::KernelPageTableTest => {
                let test = match test {
                    CheckedTest::Bench => TestProgram::Bench,
                    _ => TestProgram::KernelPageTableTest,
                };
                let load = load.or(small.load);
                Workload::PageTableTest(Matrix { test, load, mode, bench_arg: test_arg, ..small })
            }
            CheckedTest::Guest => {
                let load = load.or(small.load.without_size());
                Workload::Guest(GuestMatrix {
                    distribution: None,
                    load,
                    vmm: None,
                    run_arg: test_arg,
                })
            }
            CheckedTest::Boot => {
                common.host.smp.get_or_insert(BOOT_CPUS);
                let memory = vec![load.size.unwrap_or(BOOT_MEMORY)];
                Workload::Boot(BootMatrix::of_host(memory))
            }
            CheckedTest::AllSelftests => {
                Workload::Selftests(SelftestOptions { tests: Vec::new(), tests_of })
            }
            CheckedTest::Selftest(test) => {
                Workload::Selftests(SelftestOptions { tests: vec![test], tests_of })
            }
            CheckedTest::Program(path) => Workload::Program(ProgramMatrix {
                program: Program::open(&path)?,
                place: ProgramPlace::Host,
                load: load.with_one_job(Backing::Anonymous),
                run_arg: Vec::new(),
                arguments: test_arg,
            }),
        };
        Ok(Self { common, workload, report: ReportOptions::default(), check: Some(check) })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{jobs::matrix, values::PageSize};

    #[derive(Debug, Parser)]
    struct TestArgs {
        #[command(flatten)]
        common: CommonOptions,
        #[command(flatten)]
        args: CheckArgs,
    }

    fn options(words: &[&str]) -> Result<Options, String> {
        let args = TestArgs::try_parse_from([&["check"], words].concat());
        let TestArgs { common, args } = args.map_err(|error| error.to_string())?;
        Options::check(common, args).map_err(|error| error.to_string())
    }

    fn job_names(words: &[&str]) -> Vec<String> {
        let tests = [("/x/dirty_log_test".into(), Vec::new())];
        let jobs = matrix::jobs(&options(words).unwrap(), PageSize::Kib4, &tests);
        jobs.into_iter().map(|job| job.name).collect()
    }

    #[test]
    fn a_test_selects_the_jobs() {
        let pair = ["anonymous-16M-4v-seed0", "anonymous_hugetlb_2mb-16M-4v-seed0"];
        assert_eq!(job_names(&[]), pair);
        assert_eq!(job_names(&["-s", "thp", "-v", "2", "-b", "4M"]), ["anonymous_thp-4M-2v-seed0"]);
        let guests = ["guest-anonymous-128M-4v-seed0", "guest-anonymous_hugetlb_2mb-128M-4v-seed0"];
        assert_eq!(job_names(&["--test", "guest"]), guests);
        assert_eq!(job_names(&["--test", "dirty_log_test -i 2"]), ["dirty_log_test"]);
    }

    #[test]
    fn a_hold_applies_to_the_emulated_host() {
        let hold = "a:b:c";

        let checked = options(&["--hold", hold]).unwrap();

        assert_eq!(checked.common.host.hold.map(|hold| hold.to_string()).as_deref(), Some(hold));
        assert!(options(&["--hold", "a:b"]).unwrap_err().contains("AFTER:FUNCTION:UNTIL"));
    }

    #[test]
    fn a_host_with_more_cpus_than_the_checker_supports_is_refused() {
        for refused in [&["--smp", "65"][..], &["-v", "65"], &["-v", "4", "-v", "65"]] {
            let error = options(refused).unwrap_err();

            assert!(error.contains("at most 64 CPUs") && error.contains("65"), "{error}");
        }
        for accepted in [&["--smp", "64"][..], &["-v", "65", "--smp", "64"]] {
            assert!(options(accepted).is_ok(), "{accepted:?}");
        }
    }

    #[test]
    fn an_option_without_effect_on_the_load_is_refused() {
        for words in [
            &["--test", "boot", "-s", "4k"][..],
            &["--test", "boot", "-v", "2"],
            &["--test", "boot", "--seeds", "2"],
            &["--test", "boot", "-m", "5"],
            &["--test", "boot", "--test-arg=x"],
            &["--test", "kvm_page_table_test", "--test-arg=-x"],
            &["--test", "guest", "--tests-of", "6.1"],
            &["--tests-of", "6.1"],
            &["--test", "dirty_log_test", "-b", "4M"],
        ] {
            let error = options(words).unwrap_err();

            assert!(error.contains("has no effect on"), "{words:?}: {error}");
        }
        for words in [
            &["--test", "boot", "-b", "2G", "--smp", "2"][..],
            &["--test", "kvm_page_table_test", "-m", "5", "-v", "2"],
            &["--test", "selftests", "--tests-of", "6.1"],
        ] {
            options(words).unwrap();
        }
    }

    #[test]
    fn the_arguments_of_a_selftest_follow_its_name() {
        let error = options(&["--test", "dirty_log_test", "--test-arg=-i"]).unwrap_err();

        assert!(error.contains("--test 'NAME ARGUMENTS'"), "{error}");
        assert!(options(&["--test", "/no/program"]).unwrap_err().contains("/no/program"));
    }
}
