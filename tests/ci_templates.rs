// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Executes the commands of the CI templates with a lab that returns prepared results.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use tempfile::TempDir;

const ACTION: &str = include_str!("../.github/actions/compare/action.yml");
const GITLAB: &str = include_str!("../ci/gitlab.yml");

/// Machine of a CI service: a checkout of Linux, and a repository of Granule whose lab is fake.
struct CiMachine(TempDir);

impl CiMachine {
    /// Returns a machine whose lab exits with `lab_status` and finds `after` `DC CIVAC` instead of
    /// 1000.
    fn new(after: u64, lab_status: i32) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        let granule = machine.path("granule");
        let lab = format!(
            "#!/bin/bash\necho \"$@\" >{calls}\n\
             while [[ $1 != --out ]]; do shift; done\n\
             mkdir -p \"$2\"\ncp -r {results}/before {results}/after \"$2\"\nexit {lab_status}\n",
            calls = machine.path("calls").display(),
            results = machine.path("prepared").display(),
        );
        let script = include_str!("../scripts/ci-compare");
        write_program(&granule.join("scripts/lab"), &lab);
        write_program(&granule.join("scripts/ci-compare"), script);
        let program = format!("#!/bin/sh\nexec {} \"$@\"\n", env!("CARGO_BIN_EXE_granule"));
        write_program(&machine.path("target/release/granule"), &program);
        machine.write("prepared/before/results.jsonl", &results(1000));
        machine.write("prepared/after/results.jsonl", &results(after));
        commit(&granule, "Granule");
        machine.write("upstream/Makefile", "VERSION = 6\n");
        commit(&machine.path("upstream"), "Before");
        machine.write("upstream/Makefile", "VERSION = 7\n");
        commit(&machine.path("upstream"), "After");
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Clones the last `depth` commits of Linux.
    fn clone_linux(&self, depth: u32) {
        let upstream = format!("file://{}", self.path("upstream").display());
        let depth = format!("--depth={depth}");
        git(self.0.path(), &["clone", "--quiet", &depth, &upstream, "linux"]);
    }

    /// Runs a command in the checkout of Linux.
    fn run(&self, command: &str, variables: &[(&str, &str)]) -> Output {
        Command::new("bash")
            .args(["-euo", "pipefail", "-c", command])
            .current_dir(self.path("linux"))
            .env("CARGO_TARGET_DIR", self.path("target"))
            .envs(variables.iter().copied())
            .output()
            .unwrap()
    }
}

fn write_program(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn git(directory: &Path, arguments: &[&str]) -> String {
    let identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"];
    let output =
        Command::new("git").args(identity).args(arguments).current_dir(directory).output().unwrap();
    assert!(output.status.success(), "git {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn commit(repository: &Path, subject: &str) {
    git(repository, &["init", "--quiet"]);
    git(repository, &["add", "--all"]);
    git(repository, &["commit", "--quiet", "--no-verify", "--message", subject]);
}

/// Record of the lab; SEED and CLEANS are its seed and its number of `DC CIVAC`.
const RECORD: &str = r#"{"schema":"granule.result/1","host":{"arch":"aarch64","kernel":"6.12.1",
"series":[],"cpu":"neoverse-n1","features":{"bbm":0},"page_size":4096,"emulator":"QEMU"},
"engine":"kvm","config":{"mode":"4K pages","backing":"anonymous","memory":16777216,"vcpus":4,
"seed":SEED,"iteration":0,"prefault":false},"obtained":{"resident":{"4096":16777216}},
"phase":"create","ns":134270944,"elapsed_ns":51034670,"vcpu_ns":[51034670],
"counters":{"guest_aborts":4096,"DC CIVAC":CLEANS,"TLBI VAE2IS":2},"events":{},"left":0}"#;

/// Returns the records of three seeds.
fn results(cleans: u64) -> String {
    let line = RECORD.replace('\n', "").replace("CLEANS", &cleans.to_string()) + "\n";
    (0..3).map(|seed| line.replace("SEED", &seed.to_string())).collect()
}

/// Returns the items of a list of the GitLab template, each of one line.
fn items(list: &str) -> Vec<&'static str> {
    let lines = GITLAB.lines().skip_while(|line| line.trim() != format!("{list}:")).skip(1);
    lines.map_while(|line| line.strip_prefix("    - ")).collect()
}

/// Returns the command of the action, and the names and expressions of its variables.
fn action_step() -> (&'static str, Vec<(&'static str, &'static str)>) {
    let mut lines = ACTION.lines().skip_while(|line| !line.starts_with("    - run: "));
    let command = lines.next().and_then(|line| line.strip_prefix("    - run: ")).unwrap();
    let variables = lines
        .skip_while(|line| *line != "      env:")
        .skip(1)
        .map_while(|line| line.strip_prefix("        ")?.split_once(": "))
        .map(|(name, value)| (name, value.trim_start_matches("${{ ").trim_end_matches(" }}")))
        .collect();
    (command, variables)
}

/// Returns the default of an input of the action.
fn default_of(input: &str) -> &'static str {
    let name = format!("  {}:", input.strip_prefix("inputs.").unwrap());
    let mut lines = ACTION.lines().skip_while(|line| *line != name);
    let default = lines.find_map(|line| line.strip_prefix("    default: ")).unwrap();
    default.trim_matches('\'')
}

fn run_action(machine: &CiMachine) -> Output {
    let (command, variables) = action_step();
    let action = machine.path("granule/.github/actions/compare").display().to_string();
    fs::create_dir_all(&action).unwrap();
    let (temporary, summary) = (machine.path("temp"), machine.path("summary.md"));
    fs::create_dir_all(&temporary).unwrap();
    let mut values: Vec<(&str, &str)> = variables
        .into_iter()
        .map(|(name, expression)| match expression {
            "github.action_path" => (name, action.as_str()),
            input => (name, default_of(input)),
        })
        .collect();
    values.push(("RUNNER_TEMP", temporary.to_str().unwrap()));
    values.push(("GITHUB_STEP_SUMMARY", summary.to_str().unwrap()));
    machine.run(command, &values)
}

#[test]
fn the_action_fails_on_a_regression_and_writes_a_summary() {
    for (after, lab_status, expected) in
        [(1000, 0, 0), (2000, 0, 1), (1000, 1, 1), (1000, 2, 2), (1000, 101, 2)]
    {
        let machine = CiMachine::new(after, lab_status);
        machine.clone_linux(2);

        let output = run_action(&machine);

        let summary = machine.read("summary.md");
        assert_eq!(output.status.code(), Some(expected), "{output:?}");
        assert_eq!(summary.contains("DC CIVAC"), lab_status < 2, "{summary}");
        assert!(machine.read("calls").contains("--git . HEAD^1..HEAD --out"), "{output:?}");
    }
}

#[test]
fn the_gitlab_template_fetches_the_base_of_the_merge_request() {
    let machine = CiMachine::new(2000, 0);
    machine.clone_linux(1);
    let upstream = machine.path("upstream");
    let [before, after] = ["HEAD~1", "HEAD"].map(|name| git(&upstream, &["rev-parse", name]));
    let (checkout, repository) = (machine.path("checkout"), machine.path("granule"));
    let variables = [
        ("GRANULE_CHECKOUT", checkout.to_str().unwrap()),
        ("GRANULE_REPOSITORY", repository.to_str().unwrap()),
        ("GRANULE_OPTIONS", "-v 2"),
        ("CI_MERGE_REQUEST_DIFF_BASE_SHA", &before),
        ("CI_COMMIT_SHA", &after),
    ];
    let prepare: Vec<_> = items("before_script");
    let prepare = prepare.iter().filter(|line| !line.starts_with("apt-get ")).copied();
    let commands = prepare.chain(items("script")).collect::<Vec<_>>().join("\n");

    let output = machine.run(&commands, &variables);

    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(machine.read("linux/granule-results/counts.md").contains("DC CIVAC"), "{output:?}");
    let calls = machine.read("calls");
    assert!(calls.contains(&format!("--git . {before}..{after} --out granule-results")), "{calls}");
    assert!(calls.trim_end().ends_with("-v 2"), "{calls}");
    git(&machine.path("linux"), &["cat-file", "-e", &before]);
}

#[test]
fn an_option_without_its_value_has_no_result() {
    for options in ["--min-effect", "-v 2 --fail-on"] {
        let machine = CiMachine::new(1000, 0);
        machine.clone_linux(2);

        let output = machine.run(
            &format!("../granule/scripts/ci-compare . HEAD^1..HEAD ../results {options}"),
            &[],
        );

        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
}

#[test]
fn the_limit_of_the_verdict_is_an_option() {
    for (after, options, expected) in
        [(1020, "", 0), (1020, "--min-effect 1", 1), (2000, "--fail-on=never", 0)]
    {
        let machine = CiMachine::new(after, 0);
        machine.clone_linux(2);

        let output = machine.run(
            &format!("../granule/scripts/ci-compare . HEAD^1..HEAD ../results {options}"),
            &[],
        );

        assert_eq!(output.status.code(), Some(expected), "{output:?}");
        let calls = machine.read("calls");
        assert!(calls.ends_with("--fail-on never -s anonymous -s anonymous_hugetlb_2mb -b 16M\n"));
    }
}
