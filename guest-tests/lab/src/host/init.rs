// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! PID 1 of the emulated host.
//!
//! `granule` is also `/init` of the initramfs. As PID 1, it mounts file systems, reserves the huge
//! pages of the job, runs the test with a deadline, sends a report on the console, and powers off.
//! During the test it sleeps, and the test writes its output to files in memory, so that phases
//! contain no instructions of PID 1.

use std::{
    fmt,
    fs::{self, File},
    io,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use granule_types::{host::FACTS_VARIABLE, mark, record::HostInfo, units::Nanoseconds};
use rustix::{
    mount::{MountFlags, mount},
    process::{Pid, getpid},
    system::{RebootCommand, reboot},
    thread::{CpuSet, sched_setaffinity},
};

use crate::{
    host::{
        expect, guest_init,
        job::{
            self, CpuSchedule, FACTS_PATH, JOB_PATH, Job, JobReport, OwnWork, RESULTS_PATH,
            TestEnding,
        },
        kernel_tables::KernelTables,
        page_cache_load, program,
    },
    running_program::RunningProgram,
};

const STDOUT_PATH: &str = "/tmp/stdout";
const STDERR_PATH: &str = "/tmp/stderr";

/// Adds the name of the failed operation to an error.
trait Context<T> {
    fn context(self, operation: impl FnOnce() -> String) -> Result<T, String>;
}

impl<T, E: fmt::Display> Context<T> for Result<T, E> {
    fn context(self, operation: impl FnOnce() -> String) -> Result<T, String> {
        self.map_err(|error| format!("{}: {error}", operation()))
    }
}

/// Runs as PID 1 of the emulated host or of its guest, and powers the machine off. Returns `false`
/// if this process is not PID 1 of either, and `true` if the power-off failed.
pub fn run_as_pid_1() -> bool {
    if getpid() != Pid::INIT {
        return false;
    } else if Path::new(JOB_PATH).exists() {
        let ending = mount_all().and_then(|()| run_job());
        let ending = ending.unwrap_or_else(|error| TestEnding::InitFailed { error });
        if let Err(error) = send_report(ending) {
            eprintln!("granule: cannot send the report: {error}");
        }
    } else if let Ok(argv) = fs::read_to_string(guest_init::MARKER_PATH) {
        match argv.as_str() {
            "" => guest_init::check_guest(),
            guest_init::MARKED_INIT => {
                mark::begin_guest_init();
                guest_init::check_guest();
            }
            guest_init::KERNEL_TABLES => guest_init::report_tables(mount_all()),
            argv => run_guest_program(argv),
        }
    } else {
        return false;
    }
    if let Err(error) = reboot(RebootCommand::PowerOff) {
        eprintln!("granule: cannot power off: {error}");
    }
    true
}

fn mount_all() -> Result<(), String> {
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
            fs::create_dir_all(target).context(|| format!("cannot create {target}"))?;
        }
        let mounted = mount(kind, target, kind, MountFlags::empty(), None);
        if needed {
            mounted.context(|| format!("cannot mount {kind} on {target}"))?;
        }
    }
    Ok(())
}

/// Runs the program of a guest with its output in memory, because a console would add exits to the
/// counts, and prints the output and the ending.
fn run_guest_program(argv: &str) {
    let run = || -> Result<String, String> {
        mount_all()?;
        let argv: Vec<String> =
            serde_json::from_str(argv).context(|| "the arguments are no JSON".to_owned())?;
        let [program, arguments @ ..] = argv.as_slice() else {
            return Err("the program is missing".to_owned());
        };
        let mut command = program_command(program, arguments)?;
        mark::begin_unmarked_program();
        let status = command.status();
        mark::end_phase();
        let status = status.context(|| format!("cannot run {program}"))?;
        for path in [STDOUT_PATH, STDERR_PATH] {
            println!("{}", String::from_utf8_lossy(&fs::read(path).unwrap_or_default()));
        }
        Ok(guest_init::ending_line(status.code()))
    };
    println!("{}", run().unwrap_or_else(|error| format!("granule-guest: {error}")));
    if let Err(error) = rustix::termios::tcdrain(io::stdout()) {
        println!("granule-guest: tcdrain: {error}");
    }
}

/// Returns a command whose output goes to files in memory. A user's program runs in its directory.
fn program_command(program: &str, arguments: &[String]) -> Result<Command, String> {
    let output = |path: &str| File::create(path).context(|| format!("cannot create {path}"));
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(output(STDERR_PATH)?)
        .stdout(output(STDOUT_PATH)?);
    if Path::new(program).starts_with(program::DIRECTORY) {
        command.current_dir(program::DIRECTORY);
    }
    Ok(command)
}

fn run_job() -> Result<TestEnding, String> {
    let text = fs::read_to_string(JOB_PATH).context(|| format!("cannot read {JOB_PATH}"))?;
    let job: Job = serde_json::from_str(&text).context(|| format!("{JOB_PATH} is not a job"))?;
    if let Some(short) = reserve_pools(&job)? {
        return Ok(short);
    }
    for (path, value) in &job.settings {
        fs::write(path, value).context(|| format!("cannot write {value} to {path}"))?;
    }
    if job.seed != 0 {
        visit_cpus(job.seed)?;
    }
    run_test(&job)
}

/// Sets the CPU affinity of this process, which its children inherit.
fn set_affinity(cpus: &[usize]) -> Result<(), String> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu);
    }
    sched_setaffinity(None, &set)
        .context(|| format!("cannot set the affinity to the CPUs {cpus:?}"))
}

fn visit_cpus(seed: u64) -> Result<(), String> {
    let cpus = thread::available_parallelism().context(|| "cannot count the CPUs".to_owned())?;
    let cpus: Vec<usize> = (0..cpus.get()).collect();
    for (cpu, spins) in CpuSchedule::new(seed, &cpus) {
        set_affinity(&[cpu])?;
        for _ in 0..spins {
            std::hint::spin_loop();
        }
    }
    set_affinity(&cpus)
}

/// Reserves huge pages; returns an ending if a pool is too small. Pools of gigantic pages, which
/// the kernel reserves at boot, are only checked.
fn reserve_pools(job: &Job) -> Result<Option<TestEnding>, String> {
    for (&page_size, &required_pages) in &job.pools {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages", page_size >> 10);
        let count = || -> Result<u64, String> {
            let text = fs::read_to_string(&path).context(|| format!("cannot read {path}"))?;
            text.trim().parse().context(|| format!("{path} is not a number"))
        };
        if count()? < required_pages {
            // An error leaves the pool too small, which the check below detects.
            let _ = fs::write(&path, required_pages.to_string());
        }
        let available_pages = count()?;
        if available_pages < required_pages {
            return Ok(Some(TestEnding::PoolTooSmall {
                page_size,
                required_pages,
                available_pages,
            }));
        }
    }
    Ok(None)
}

fn run_test(job: &Job) -> Result<TestEnding, String> {
    let start = Instant::now();
    match &job.own_work {
        Some(OwnWork::ReportTables { loads_page_cache }) => report_tables(*loads_page_cache)?,
        Some(OwnWork::Zap(zap)) => {
            zap.run().context(|| "cannot measure the removal of memory".to_owned())?;
        }
        None => return run_program(job),
    }
    Ok(exited(0, start.elapsed()))
}

fn run_program(job: &Job) -> Result<TestEnding, String> {
    let [program, arguments @ ..] = job.argv.as_slice() else {
        return Err("the job has no program: argv is empty".to_owned());
    };
    let mut command = program_command(program, arguments)?;
    command.env(FACTS_VARIABLE, FACTS_PATH);
    let mut log = None;
    if !job.expect.is_empty() {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        log = Some(File::create(STDOUT_PATH).context(|| format!("cannot create {STDOUT_PATH}"))?);
    }
    if job.has_unmarked_program {
        mark::begin_unmarked_program();
    }
    let start = Instant::now();
    let mut running = RunningProgram::start(&mut command)
        .context(|| format!("cannot run {program} in the emulated host"))?;
    let script = log.zip(running.child().stdout.take()).zip(running.child().stdin.take());
    let script = script.map(|((log, output), input)| {
        let exchanges = job.expect.clone();
        thread::spawn(move || expect::run_script(&exchanges, output, log, input))
    });
    let in_time = running.wait_for_exit(Duration::from_secs(job.deadline_seconds));
    let elapsed = start.elapsed();
    if job.has_unmarked_program {
        mark::end_phase();
    }
    if !in_time.context(|| format!("cannot wait for {program}"))? {
        running.child().kill().context(|| format!("cannot kill {program}"))?;
    }
    if let Some(Err(error)) = script.and_then(|script| script.join().ok()) {
        return Err(error).context(|| format!("cannot read the output of {program}"));
    }
    test_ending(running.child(), elapsed, job).context(|| format!("cannot wait for {program}"))
}

/// Writes the page tables of this kernel to the results.
fn report_tables(loads_page_cache: bool) -> Result<(), String> {
    if loads_page_cache {
        let load = page_cache_load::run(Path::new("/tmp"));
        load.context(|| "cannot load the page cache".to_owned())?;
    }
    let tables = KernelTables::read().context(|| "cannot read the page tables".to_owned())?;
    let text = serde_json::to_string(&tables).context(|| "cannot write a report".to_owned())?;
    fs::write(RESULTS_PATH, text).context(|| format!("cannot write {RESULTS_PATH}"))
}

fn exited(code: i32, elapsed: Duration) -> TestEnding {
    let ns = Nanoseconds(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX));
    TestEnding::Exited { code, ns }
}

fn test_ending(child: &mut Child, elapsed: Duration, job: &Job) -> io::Result<TestEnding> {
    let status = child.wait()?;
    let seconds = job.deadline_seconds;
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => exited(code, elapsed),
        (None, Some(9)) if elapsed.as_secs() >= seconds => TestEnding::Deadline { seconds },
        (None, signal) => TestEnding::Killed { signal: signal.unwrap_or(0) },
    })
}

/// Sends the report with a lowered console log level. Restores the level, so that a later splat
/// reaches the console.
fn send_report(ending: TestEnding) -> io::Result<()> {
    const LOG_LEVELS: &str = "/proc/sys/kernel/printk";
    let levels = fs::read_to_string(LOG_LEVELS).unwrap_or_default();
    // If this fails, the checksum detects messages inside the report.
    let _ = fs::write(LOG_LEVELS, "1");
    let text = |path: &str| {
        let bytes = fs::read(path).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\r', "")
    };
    let host = HostInfo::with_facts(Path::new(FACTS_PATH));
    let report = JobReport {
        ending,
        host: host.inspect_err(|error| eprintln!("granule: {error}")).ok(),
        stdout: text(STDOUT_PATH),
        stderr: text(STDERR_PATH),
        results: text(RESULTS_PATH),
    };
    let mut console = io::stdout().lock();
    job::send_report(&mut console, &report)?;
    rustix::termios::tcdrain(&console)?;
    let _ = fs::write(LOG_LEVELS, levels);
    Ok(())
}
