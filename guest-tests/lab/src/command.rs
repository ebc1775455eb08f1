// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs external commands or, in a dry run, prints them as shell.
//!
//! [`Command`] stores program, arguments, environment and redirection as data, so that a dry run
//! prints exactly the commands of a run. The crates `duct` and `xshell` cannot print a command as
//! shell. A command's output is appended to a log, and an error quotes the last lines of the log.

use std::{
    ffi::{OsStr, OsString},
    fmt,
    fs::{self, File},
    io,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{self, ExitStatus, Stdio},
    time::Duration,
};

use thiserror::Error;

use crate::running_program::RunningProgram;

const TAIL_LINES: usize = 20;

/// Variables that would redirect Git to the repository of a caller, such as a hook
/// (`git rev-parse --local-env-vars`).
const GIT_VARIABLES: [&str; 9] = [
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_GRAFT_FILE",
];

#[derive(Debug, Error)]
pub enum CommandError {
    #[error("cannot run '{0}': it is not installed; run scripts/setup")]
    Missing(String),
    #[error("{task} failed ({status}){}\n{tail}", log_suffix(log))]
    Failed { task: String, status: String, log: Option<PathBuf>, tail: String },
    #[error(
        "{task} exceeded its deadline of {seconds} s of real time: set a longer --deadline{}\n{tail}",
        log_suffix(log)
    )]
    Deadline { task: String, seconds: u64, log: Option<PathBuf>, tail: String },
    #[error("cannot {operation} {path}")]
    File {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Formats the path of a log for the end of a message.
fn log_suffix(log: &Option<PathBuf>) -> String {
    log.as_ref().map_or_else(String::new, |log| format!("; log: {}", log.display()))
}

impl CommandError {
    pub fn file(operation: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::File { operation, path: path.into(), source }
    }
}

#[derive(Debug, Clone)]
pub struct Command {
    task: String,
    program: OsString,
    args: Vec<OsString>,
    envs: Vec<(OsString, OsString)>,
    /// Variables of the environment that the command does not inherit.
    removed_envs: Vec<OsString>,
    directory: Option<PathBuf>,
    input: Option<PathBuf>,
    log: Option<PathBuf>,
    deadline: Option<Duration>,
}

impl Command {
    /// Returns a command that errors call `task` ("building the kernel").
    pub fn new(task: impl Into<String>, program: impl Into<OsString>) -> Self {
        Self {
            task: task.into(),
            program: program.into(),
            args: Vec::new(),
            envs: Vec::new(),
            removed_envs: Vec::new(),
            directory: None,
            input: None,
            log: None,
            deadline: None,
        }
    }

    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    #[must_use]
    pub fn args<T: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = T>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.envs.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    #[must_use]
    pub fn without_envs(mut self, names: impl IntoIterator<Item = OsString>) -> Self {
        self.removed_envs.extend(names);
        self
    }

    #[must_use]
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }

    /// Reads standard input from a file.
    #[must_use]
    pub fn input(mut self, input: impl Into<PathBuf>) -> Self {
        self.input = Some(input.into());
        self
    }

    /// Appends standard output and standard error to `log`.
    #[must_use]
    pub fn log(mut self, log: impl Into<PathBuf>) -> Self {
        self.log = Some(log.into());
        self
    }

    /// Sets the real time after which the program is terminated.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Runs the command, also in a dry run, and returns its standard output. The command must have
    /// no side effect.
    pub fn query(&self) -> Result<String, CommandError> {
        let output = self.std_command()?.output().map_err(|e| self.start_error(e))?;
        if !output.status.success() {
            let tail = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(self.failure(output.status, tail));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub fn run(&self) -> Result<(), CommandError> {
        let mut command = self.std_command()?;
        if let Some(log) = &self.log {
            let open = || {
                let file = File::options().create(true).append(true).open(log)?;
                Ok((file.try_clone()?, file))
            };
            let (out, err) = open().map_err(|e| CommandError::file("write", log, e))?;
            command.stdout(out).stderr(err);
        } else {
            command.stdout(Stdio::null());
        }
        let mut program = RunningProgram::start(&mut command).map_err(|e| self.start_error(e))?;
        let status = match self.deadline {
            None => program.child().wait().map(Some),
            Some(deadline) => program.wait_or_terminate(deadline),
        };
        let tail = self.log.as_deref().map(log_tail).unwrap_or_default();
        match status.map_err(|e| self.start_error(e))? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(self.failure(status, tail)),
            None => Err(CommandError::Deadline {
                task: self.task.clone(),
                seconds: self.deadline.unwrap_or_default().as_secs(),
                log: self.log.clone(),
                tail,
            }),
        }
    }

    fn std_command(&self) -> Result<process::Command, CommandError> {
        let mut command = process::Command::new(&self.program);
        command.args(&self.args).stdin(Stdio::null());
        for name in GIT_VARIABLES {
            command.env_remove(name);
        }
        for name in &self.removed_envs {
            command.env_remove(name);
        }
        command.envs(self.envs.iter().map(|(name, value)| (name, value)));
        if let Some(directory) = &self.directory {
            command.current_dir(directory);
        }
        if let Some(input) = &self.input {
            command.stdin(File::open(input).map_err(|e| CommandError::file("read", input, e))?);
        }
        Ok(command)
    }

    fn start_error(&self, source: io::Error) -> CommandError {
        match source.kind() {
            io::ErrorKind::NotFound => {
                CommandError::Missing(self.program.to_string_lossy().into_owned())
            }
            _ => CommandError::file("run", &self.program, source),
        }
    }

    fn failure(&self, status: ExitStatus, tail: String) -> CommandError {
        CommandError::Failed {
            task: self.task.clone(),
            status: match (status.code(), status.signal()) {
                (Some(code), _) => format!("exit code {code}"),
                (None, Some(signal)) => format!("signal {signal}"),
                (None, None) => "no exit code".to_owned(),
            },
            log: self.log.clone(),
            tail,
        }
    }
}

/// Formats the command as shell: `(cd DIRECTORY && NAME=value program args <input >>log 2>&1)`.
impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(directory) = &self.directory {
            write!(f, "(cd {} && ", quote(directory))?;
        }
        for (name, value) in &self.envs {
            write!(f, "{}={} ", name.to_string_lossy(), quote(value))?;
        }
        if !self.removed_envs.is_empty() {
            f.write_str("env ")?;
        }
        for name in &self.removed_envs {
            write!(f, "-u {} ", quote(name))?;
        }
        if let Some(deadline) = self.deadline {
            write!(f, "timeout {} ", deadline.as_secs())?;
        }
        write!(f, "{}", quote(&self.program))?;
        for arg in &self.args {
            write!(f, " {}", quote(arg))?;
        }
        if let Some(input) = &self.input {
            write!(f, " <{}", quote(input))?;
        }
        if let Some(log) = &self.log {
            write!(f, " >>{} 2>&1", quote(log))?;
        }
        f.write_str(if self.directory.is_some() { ")" } else { "" })
    }
}

/// Returns the last lines of a log, indented.
pub fn log_tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).replace('\r', "");
    last_lines(&text.lines().collect::<Vec<_>>())
}

pub fn last_lines(lines: &[&str]) -> String {
    indent(&lines[lines.len().saturating_sub(TAIL_LINES)..])
}

/// Indents lines for display below an error message.
pub fn indent(lines: &[&str]) -> String {
    lines.iter().map(|line| format!("    | {line}\n")).collect()
}

pub fn quote(word: impl AsRef<OsStr>) -> String {
    let word = word.as_ref().to_string_lossy();
    match shlex::try_quote(&word) {
        Ok(quoted) => quoted.into_owned(),
        Err(_) => format!("{word:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_prints_as_shell_that_can_be_pasted() {
        let command = Command::new("x", "make")
            .env("A", "b c")
            .without_envs(["KCFLAGS".into()])
            .args(["-C", "it's"])
            .directory("/tmp/d")
            .input("/tmp/in")
            .log("/tmp/log");

        let shell =
            r#"(cd /tmp/d && A='b c' env -u KCFLAGS make -C "it's" </tmp/in >>/tmp/log 2>&1)"#;
        assert_eq!(command.to_string(), shell);
    }

    #[test]
    fn the_error_of_a_failed_command_quotes_the_end_of_its_log() {
        let directory = tempfile::tempdir().unwrap();
        let error = Command::new("counting", "sh")
            .args(["-c", "seq 100; exit 3"])
            .log(directory.path().join("log"))
            .run();

        let error = error.unwrap_err().to_string();

        assert!(error.contains("counting failed (exit code 3)"), "{error}");
        assert!(error.contains("| 81\n") && error.contains("| 100\n"));
        assert!(!error.contains("| 80\n"));
    }

    #[test]
    fn the_error_of_a_missing_program_names_program_and_remedy() {
        let error = Command::new("x", "no-such-program").run().unwrap_err();
        let error = error.to_string();

        assert!(error.contains("no-such-program") && error.contains("scripts/setup"));
    }

    #[test]
    fn a_command_is_terminated_at_its_deadline() {
        let command =
            Command::new("sleeping", "sleep").arg("60").deadline(Duration::from_millis(50));

        assert!(matches!(command.run().unwrap_err(), CommandError::Deadline { .. }));
    }
}
