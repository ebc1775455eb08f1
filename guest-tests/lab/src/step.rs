// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Everything the lab does to the world, in a form that can be carried out or printed as shell.
//!
//! A [`Step`] is one external command. A [`Shell`] carries steps and file operations out, or, in a
//! dry run, prints each as a line that could be pasted into a terminal. A step's output goes to a
//! log; when it fails the error shows the log's last lines.

use std::{
    ffi::{OsStr, OsString},
    fmt,
    fs::{self, File},
    io::{self, Write},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use thiserror::Error;

/// How many of a log's last lines an error shows.
const TAIL_LINES: usize = 20;

/// Why a step failed.
#[derive(Debug, Error)]
pub enum StepError {
    /// The program is not there.
    #[error("cannot run '{0}': it is not installed; run scripts/setup")]
    Missing(String),
    /// The program cannot be started or watched.
    #[error("cannot run '{program}'")]
    Start {
        /// Which.
        program: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It failed.
    #[error("{what} failed ({status}); the log is {log}\n{tail}")]
    Failed {
        /// What was being done.
        what: String,
        /// How the program ended.
        status: String,
        /// Where its output is.
        log: PathBuf,
        /// The last lines of its output.
        tail: String,
    },
    /// It did not end in time.
    #[error("{what} was ended after {seconds} s of real time; the log is {log}\n{tail}")]
    Deadline {
        /// What was being done.
        what: String,
        /// How long it was given.
        seconds: u64,
        /// Where its output is.
        log: PathBuf,
        /// The last lines of its output.
        tail: String,
    },
    /// What was given as a kernel is none.
    #[error(
        "{0} is no arm64 kernel image: give an uncompressed Image, as a build leaves it in \
         arch/arm64/boot"
    )]
    NoImage(PathBuf),
    /// A file operation failed.
    #[error("cannot {doing} {path}")]
    File {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// One external command.
#[derive(Debug, Clone)]
pub struct Step {
    what: String,
    program: OsString,
    args: Vec<OsString>,
    envs: Vec<(OsString, OsString)>,
    dir: Option<PathBuf>,
    log: Option<PathBuf>,
    deadline: Option<Duration>,
}

impl Step {
    /// A command; `what` names it in errors ("building the kernel").
    pub fn new(what: impl Into<String>, program: impl Into<OsString>) -> Self {
        Self {
            what: what.into(),
            program: program.into(),
            args: Vec::new(),
            envs: Vec::new(),
            dir: None,
            log: None,
            deadline: None,
        }
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<T: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = T>) -> Self {
        self.args
            .extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.envs
            .push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Sets the folder to run in.
    #[must_use]
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = Some(dir.into());
        self
    }

    /// Sets the file that all output goes to.
    #[must_use]
    pub fn log(mut self, log: impl Into<PathBuf>) -> Self {
        self.log = Some(log.into());
        self
    }

    /// Sets the real time after which the program is ended.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).stdin(Stdio::null());
        command.envs(self.envs.iter().map(|(k, v)| (k, v)));
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
        command
    }

    fn starting(&self, source: io::Error) -> StepError {
        let program = self.program.to_string_lossy().into_owned();
        match source.kind() {
            io::ErrorKind::NotFound => StepError::Missing(program),
            _ => StepError::Start { program, source },
        }
    }

    /// Runs the command and gives its standard output: for questions that change nothing, asked in
    /// a dry run too.
    ///
    /// # Errors
    /// It cannot be started or fails.
    pub fn ask(&self) -> Result<String, StepError> {
        let output = self.command().output().map_err(|e| self.starting(e))?;
        if !output.status.success() {
            return Err(StepError::Failed {
                what: self.what.clone(),
                status: describe(output.status),
                log: PathBuf::from("-"),
                tail: String::from_utf8_lossy(&output.stderr).into_owned(),
            });
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn run(&self) -> Result<(), StepError> {
        let mut command = self.command();
        if let Some(log) = &self.log {
            let file = File::options().create(true).append(true).open(log);
            let file = file.map_err(|e| StepError::file("write", log, e))?;
            let copy = file
                .try_clone()
                .map_err(|e| StepError::file("write", log, e))?;
            command.stdout(file).stderr(copy);
        } else {
            command.stdout(Stdio::null());
        }
        let mut child = command.spawn().map_err(|e| self.starting(e))?;
        let status = match self.deadline {
            None => child.wait().map(Some),
            Some(deadline) => wait(&mut child, deadline),
        };
        let status = status.map_err(|e| self.starting(e))?;
        let log = self.log.clone().unwrap_or_else(|| PathBuf::from("-"));
        let tail = self.log.as_deref().map(tail).unwrap_or_default();
        match status {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(StepError::Failed {
                what: self.what.clone(),
                status: describe(status),
                log,
                tail,
            }),
            None => Err(StepError::Deadline {
                what: self.what.clone(),
                seconds: self.deadline.unwrap_or_default().as_secs(),
                log,
                tail,
            }),
        }
    }
}

/// As shell: `cd DIR && NAME=value program arguments >log 2>&1`.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(dir) = &self.dir {
            write!(f, "(cd {} && ", quote(dir))?;
        }
        for (name, value) in &self.envs {
            write!(f, "{}={} ", name.to_string_lossy(), quote(value))?;
        }
        if let Some(deadline) = self.deadline {
            write!(f, "timeout {} ", deadline.as_secs())?;
        }
        write!(f, "{}", quote(&self.program))?;
        for arg in &self.args {
            write!(f, " {}", quote(arg))?;
        }
        if let Some(log) = &self.log {
            write!(f, " >>{} 2>&1", quote(log))?;
        }
        f.write_str(if self.dir.is_some() { ")" } else { "" })
    }
}

impl StepError {
    /// A file operation that failed.
    pub fn file(doing: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::File {
            doing,
            path: path.into(),
            source,
        }
    }
}

/// Waits for the child until the deadline; then asks it to end (an emulator writes its counters
/// out), and makes it end if it will not.
fn wait(child: &mut Child, deadline: Duration) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    while start.elapsed() < deadline {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    if let Some(pid) = i32::try_from(child.id())
        .ok()
        .and_then(rustix::process::Pid::from_raw)
    {
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
    }
    for _ in 0..300 {
        if child.try_wait()?.is_some() {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "no exit code".to_owned(),
    }
}

/// The last lines of a log, each indented.
pub fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).replace('\r', "");
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..]
        .iter()
        .map(|line| format!("    | {line}\n"))
        .collect()
}

/// A word as the shell needs it.
fn quote(word: impl AsRef<OsStr>) -> String {
    let word = word.as_ref().to_string_lossy();
    match shlex::try_quote(&word) {
        Ok(quoted) => quoted.into_owned(),
        Err(_) => format!("{word:?}"),
    }
}

/// Carries steps out, or prints them.
#[derive(Debug, Clone, Copy)]
pub struct Shell {
    dry: bool,
}

impl Shell {
    /// A shell that acts (`dry` false) or prints on standard output.
    pub const fn new(dry: bool) -> Self {
        Self { dry }
    }

    /// Whether steps are only printed.
    pub const fn is_dry(self) -> bool {
        self.dry
    }

    /// Prints a line of a dry run; says nothing otherwise.
    pub fn print(self, line: impl fmt::Display) {
        if self.dry {
            // A reader that has seen enough (`| head`) closes the pipe: no reason to complain.
            let _ = writeln!(io::stdout(), "{line}");
        }
    }

    /// Runs a command.
    ///
    /// # Errors
    /// It cannot be started, fails, or takes too long.
    pub fn run(self, step: &Step) -> Result<(), StepError> {
        if self.dry {
            self.print(step);
            return Ok(());
        }
        step.run()
    }

    /// Makes a folder and those above it.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn make_dir(self, path: &Path) -> Result<(), StepError> {
        self.print(format_args!("mkdir -p {}", quote(path)));
        self.act(|| fs::create_dir_all(path))
            .map_err(|e| StepError::file("make the folder", path, e))
    }

    /// Writes a file.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(self, path: &Path, content: impl AsRef<[u8]>) -> Result<(), StepError> {
        if self.dry {
            let text = String::from_utf8_lossy(content.as_ref()).into_owned();
            self.print(format_args!("printf %s {} >{}", quote(text), quote(path)));
            return Ok(());
        }
        fs::write(path, content).map_err(|e| StepError::file("write", path, e))
    }

    /// Copies a file.
    ///
    /// # Errors
    /// It cannot be copied.
    pub fn copy(self, from: &Path, to: &Path) -> Result<(), StepError> {
        self.print(format_args!("cp {} {}", quote(from), quote(to)));
        self.act(|| fs::copy(from, to).map(drop))
            .map_err(|e| StepError::file("copy", from, e))
    }

    /// Renames a file or a folder.
    ///
    /// # Errors
    /// It cannot be renamed.
    pub fn rename(self, from: &Path, to: &Path) -> Result<(), StepError> {
        self.print(format_args!("mv -T {} {}", quote(from), quote(to)));
        self.act(|| fs::rename(from, to))
            .map_err(|e| StepError::file("rename", from, e))
    }

    /// Removes a folder and all in it; it need not be there.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove_dir(self, path: &Path) -> Result<(), StepError> {
        self.print(format_args!("rm -rf {}", quote(path)));
        self.act(|| match fs::remove_dir_all(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        })
        .map_err(|e| StepError::file("remove", path, e))
    }

    fn act(self, action: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        if self.dry { Ok(()) } else { action() }
    }
}

/// Where something is made before it is renamed to `path`, whole.
pub fn partial(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    path.with_file_name(name)
}

/// Reads a file.
///
/// # Errors
/// It cannot be read.
pub fn read(path: &Path) -> Result<Vec<u8>, StepError> {
    fs::read(path).map_err(|e| StepError::file("read", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_prints_as_shell_that_can_be_pasted() {
        let step = Step::new("x", "make")
            .env("A", "b c")
            .args(["-C", "it's"])
            .dir("/tmp/d")
            .log("/tmp/log");

        assert_eq!(
            step.to_string(),
            r#"(cd /tmp/d && A='b c' make -C "it's" >>/tmp/log 2>&1)"#
        );
    }

    #[test]
    fn a_step_that_fails_shows_the_end_of_its_log() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let step = Step::new("counting", "sh")
            .args(["-c", "seq 100; exit 3"])
            .log(&log);

        let error = Shell::new(false).run(&step).unwrap_err().to_string();

        assert!(error.contains("counting failed (exit code 3)"), "{error}");
        assert!(error.contains("| 81\n") && error.contains("| 100\n"));
        assert!(!error.contains("| 80\n"));
    }

    #[test]
    fn a_missing_program_is_named_with_the_remedy() {
        let error = Shell::new(false)
            .run(&Step::new("x", "no-such-program"))
            .unwrap_err()
            .to_string();

        assert!(error.contains("no-such-program") && error.contains("scripts/setup"));
    }

    #[test]
    fn a_step_that_takes_too_long_is_ended() {
        let step = Step::new("sleeping", "sleep")
            .arg("60")
            .deadline(Duration::from_millis(50));

        let error = Shell::new(false).run(&step).unwrap_err();

        assert!(matches!(error, StepError::Deadline { .. }));
    }

    #[test]
    fn a_dry_shell_does_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");

        Shell::new(true).make_dir(&path).unwrap();
        Shell::new(true)
            .run(&Step::new("x", "touch").arg(&path))
            .unwrap();

        assert!(!path.exists());
    }
}
