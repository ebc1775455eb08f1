// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! PID 1 of the emulated host.
//!
//! The same `granule` program is the initramfs's `/init`. As PID 1 it mounts what tests read,
//! reserves the huge pages that the [job](super::job) asks for, runs the test with a deadline, sends what
//! came of it as [frames] on the console, and switches the machine off. Between the
//! start and the end of the test it sleeps: not one instruction of its own falls into a measured
//! phase. What the test prints goes to a file in memory meanwhile, for the same reason.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd, unix::process::ExitStatusExt},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    mount::{MountFlags, mount},
    process::{Pid, PidfdFlags, getpid, pidfd_open},
    system::{RebootCommand, reboot},
    thread::{CpuSet, sched_setaffinity},
    time::Timespec,
};
use thiserror::Error;

use super::{
    dialogue, frames,
    job::{
        ENDING_FRAME, Ending, FACTS_PATH, HOST_FRAME, JOB_PATH, Job, RESULTS_FRAME, RESULTS_PATH,
        STDERR_FRAME, STDOUT_FRAME, Walk,
    },
};
use granule_types::{host::FACTS_VARIABLE, mark, record::Host, units::Nanoseconds};

const STDOUT_PATH: &str = "/tmp/stdout";
const STDERR_PATH: &str = "/tmp/stderr";

/// What PID 1 could not do.
#[derive(Debug, Error)]
#[error("{doing}")]
struct InitError {
    doing: String,
    #[source]
    source: Box<dyn std::error::Error + Send + Sync>,
}

trait Doing<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, InitError>;
}

impl<T, E: Into<Box<dyn std::error::Error + Send + Sync>>> Doing<T> for Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, InitError> {
        self.map_err(|error| InitError {
            doing: what(),
            source: error.into(),
        })
    }
}

/// Whether this process is the emulated host's PID 1: process 1, with a job waiting for it.
pub fn is_wanted() -> bool {
    getpid() == Pid::INIT && Path::new(JOB_PATH).exists()
}

/// Does the job and switches the machine off; only a machine that cannot be switched off returns.
pub fn run() {
    let ending = mount_all().and_then(|()| do_job()).unwrap_or_else(|error| {
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        Ending::Init { error: text }
    });
    if let Err(error) = send(&ending) {
        eprintln!("granule: cannot send results: {error}");
    }
    if let Err(error) = reboot(RebootCommand::PowerOff) {
        eprintln!("granule: cannot switch off: {error}");
    }
}

fn mount_all() -> Result<(), InitError> {
    for (kind, target, needed) in [
        ("proc", "/proc", true),
        ("sysfs", "/sys", true),
        ("devtmpfs", "/dev", true),
        ("tmpfs", "/tmp", true),
        ("tmpfs", "/dev/shm", true),
        ("hugetlbfs", "/dev/hugepages", false),
        ("debugfs", "/sys/kernel/debug", false),
        ("tracefs", "/sys/kernel/tracing", false),
    ] {
        if !target.starts_with("/sys/") {
            fs::create_dir_all(target).doing(|| format!("cannot make {target}"))?;
        }
        let mounted = mount(kind, target, kind, MountFlags::empty(), None);
        if needed {
            mounted.doing(|| format!("cannot mount {kind} on {target}"))?;
        }
    }
    Ok(())
}

fn do_job() -> Result<Ending, InitError> {
    let text = fs::read_to_string(JOB_PATH).doing(|| format!("cannot read {JOB_PATH}"))?;
    let job: Job = serde_json::from_str(&text).doing(|| format!("{JOB_PATH} holds no job"))?;
    if let Some(short) = reserve_pools(&job)? {
        return Ok(short);
    }
    for (path, value) in &job.settings {
        fs::write(path, value).doing(|| format!("cannot write {value} to {path}"))?;
    }
    let working = take_every_other_cpu_off()?;
    if job.seed != 0 {
        walk(job.seed, &working)?;
    }
    run_test(&job)
}

/// Takes the CPUs with odd numbers off, and gives those that are left: the emulator needs an idle
/// one behind each that works (see [`super::emulator`]).
fn take_every_other_cpu_off() -> Result<Vec<usize>, InitError> {
    let cpus = std::thread::available_parallelism().doing(|| "cannot count the CPUs".to_owned())?;
    for cpu in (1..cpus.get()).step_by(2) {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/online");
        fs::write(&path, "0").doing(|| format!("cannot write 0 to {path}"))?;
    }
    Ok((0..cpus.get()).step_by(2).collect())
}

/// Keeps this process, and all that it starts from now on, to these CPUs.
fn keep_to(cpus: &[usize]) -> Result<(), InitError> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu);
    }
    sched_setaffinity(None, &set).doing(|| format!("cannot keep to the CPUs {cpus:?}"))
}

/// Goes over the CPUs as the seed says; see [`Walk`].
fn walk(seed: u64, cpus: &[usize]) -> Result<(), InitError> {
    for (cpu, turns) in Walk::new(seed, cpus) {
        keep_to(&[cpu])?;
        for _ in 0..turns {
            std::hint::spin_loop();
        }
    }
    keep_to(cpus)
}

/// Reserves huge pages; `Some` when the host has too few. A pool that was made at boot (pages too
/// large to be found later) is left as it is.
fn reserve_pools(job: &Job) -> Result<Option<Ending>, InitError> {
    for (&page, &wanted) in &job.pools {
        let path = format!(
            "/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
            page >> 10
        );
        let count = || -> Result<u64, InitError> {
            let text = fs::read_to_string(&path).doing(|| format!("cannot read {path}"))?;
            text.trim()
                .parse()
                .doing(|| format!("{path} holds no number"))
        };
        if count()? < wanted {
            // A kernel that makes such pages at boot only refuses; the count then tells.
            let _ = fs::write(&path, wanted.to_string());
        }
        let got = count()?;
        if got < wanted {
            return Ok(Some(Ending::ShortPool { page, wanted, got }));
        }
    }
    Ok(None)
}

fn run_test(job: &Job) -> Result<Ending, InitError> {
    let [program, arguments @ ..] = job.argv.as_slice() else {
        return Err(io::Error::other("it is empty"))
            .doing(|| "the job names no program".to_owned());
    };
    let output = |path: &str| File::create(path).doing(|| format!("cannot make {path}"));
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env(FACTS_VARIABLE, FACTS_PATH)
        .stdin(Stdio::null())
        .stderr(output(STDERR_PATH)?);
    let keep = output(STDOUT_PATH)?;
    let keep = match job.dialogue.is_empty() {
        true => {
            command.stdout(keep);
            None
        }
        false => {
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            Some(keep)
        }
    };
    if job.foreign {
        mark::foreign();
    }
    let start = Instant::now();
    let mut child = command
        .spawn()
        .doing(|| format!("cannot run {program}; is it in the initramfs?"))?;
    let talk =
        keep.zip(child.stdout.take())
            .zip(child.stdin.take())
            .map(|((keep, says), hears)| {
                let turns = job.dialogue.clone();
                thread::spawn(move || dialogue::hold(&turns, says, keep, hears))
            });
    let in_time = wait(&child, job.deadline_seconds);
    let ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    if job.foreign {
        mark::outside();
    }
    if !in_time? {
        child.kill().doing(|| format!("cannot end {program}"))?;
    }
    let status = child
        .wait()
        .doing(|| format!("cannot wait for {program}"))?;
    if let Some(Err(error)) = talk.and_then(|talk| talk.join().ok()) {
        return Err(error).doing(|| format!("cannot talk to {program}"));
    }
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => Ending::Exited {
            code,
            ns: Nanoseconds(ns),
        },
        (None, Some(9)) if Duration::from_nanos(ns).as_secs() >= job.deadline_seconds => {
            Ending::Deadline {
                seconds: job.deadline_seconds,
            }
        }
        (None, signal) => Ending::Killed {
            signal: signal.unwrap_or(0),
        },
    })
}

/// Sleeps until the child ends: true, or its time is up: false.
fn wait(child: &std::process::Child, seconds: u64) -> Result<bool, InitError> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid
        .ok_or_else(|| io::Error::other("its number is no process number"))
        .doing(|| "cannot watch the test".to_owned())?;
    let watch =
        pidfd_open(pid, PidfdFlags::empty()).doing(|| "cannot watch the test".to_owned())?;
    let timeout = Timespec {
        tv_sec: i64::try_from(seconds).unwrap_or(i64::MAX),
        tv_nsec: 0,
    };
    let mut watched = [PollFd::from_borrowed_fd(watch.as_fd(), PollFlags::IN)];
    let ready =
        poll(&mut watched, Some(&timeout)).doing(|| "cannot wait for the test".to_owned())?;
    Ok(ready != 0)
}

/// Sends everything there is. Kernel messages are held back meanwhile, and let through again
/// behind it, so that a late complaint still reaches the console.
fn send(ending: &Ending) -> io::Result<()> {
    const LEVELS: &str = "/proc/sys/kernel/printk";
    let levels = fs::read_to_string(LEVELS).unwrap_or_default();
    // Without the file the messages stay on; the checksums then tell whether one got in between.
    let _ = fs::write(LEVELS, "1");
    let mut console = io::stdout().lock();
    for (name, path) in [
        (STDOUT_FRAME, STDOUT_PATH),
        (STDERR_FRAME, STDERR_PATH),
        (RESULTS_FRAME, RESULTS_PATH),
    ] {
        if let Ok(payload) = fs::read(path) {
            frames::send(&mut console, name, &payload)?;
        }
    }
    match Host::with_facts(Path::new(FACTS_PATH)) {
        Ok(host) => frames::send(&mut console, HOST_FRAME, &serde_json::to_vec(&host)?)?,
        Err(error) => eprintln!("granule: {error}"),
    }
    frames::send(&mut console, ENDING_FRAME, &serde_json::to_vec(ending)?)?;
    rustix::termios::tcdrain(&console)?;
    let _ = fs::write(LEVELS, levels);
    Ok(())
}
