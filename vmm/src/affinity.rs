// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Affinity of threads to CPUs of the host.

use std::{io, sync::OnceLock};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// CPUs of the first thread that was pinned, before that: those of this process.
static PROCESS_CPUS: OnceLock<CpuSet> = OnceLock::new();

/// Restricts this thread, and threads that it starts later, to a CPU of the host.
///
/// # Errors
/// The CPU does not exist, or this process may not use it.
pub fn pin_thread(cpu: usize) -> io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(refused(cpu));
    }
    let all = sched_getaffinity(None)?;
    PROCESS_CPUS.get_or_init(|| all);
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|_| refused(cpu))
}

/// Lets this thread run on all CPUs of this process, also if a pinned thread has started it.
///
/// # Errors
/// The process may use none of them any more.
pub fn unpin_thread() -> io::Result<()> {
    let restore = |cpus| Ok(sched_setaffinity(None, cpus)?);
    PROCESS_CPUS.get().map_or(Ok(()), restore)
}

/// Checks that a thread can be pinned to each of these CPUs.
///
/// # Errors
/// A CPU does not exist, or this process may not use it.
pub fn check_cpus(cpus: &[usize]) -> io::Result<()> {
    let allowed = sched_getaffinity(None)?;
    match cpus.iter().find(|cpu| **cpu >= CpuSet::MAX_CPU || !allowed.is_set(**cpu)) {
        Some(cpu) => Err(refused(*cpu)),
        None => Ok(()),
    }
}

fn refused(cpu: usize) -> io::Error {
    io::Error::other(format!(
        "CPU {cpu} of the host does not exist, or this process may not use it"
    ))
}

/// Returns the first CPU that this thread may use, for tests.
#[cfg(test)]
pub fn first_cpu() -> usize {
    let allowed = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_pinned_thread_runs_on_its_cpu_only() {
        let cpu = first_cpu();

        let set = thread::spawn(move || {
            pin_thread(cpu).unwrap();
            sched_getaffinity(None).unwrap()
        });

        let set = set.join().unwrap();
        assert!(set.is_set(cpu));
        assert_eq!(set.count(), 1);
    }

    #[test]
    fn a_thread_of_a_pinned_one_leaves_its_cpu() {
        let allowed = sched_getaffinity(None).unwrap();
        let cpu = first_cpu();

        let set = thread::spawn(move || {
            pin_thread(cpu).unwrap();
            let started = thread::spawn(|| {
                unpin_thread().unwrap();
                sched_getaffinity(None).unwrap()
            });
            started.join().unwrap()
        });

        assert_eq!(set.join().unwrap(), allowed);
    }

    #[test]
    fn a_cpu_that_is_not_there_is_refused_by_its_number() {
        for cpu in [CpuSet::MAX_CPU - 1, CpuSet::MAX_CPU] {
            let error = thread::spawn(move || pin_thread(cpu)).join().unwrap().unwrap_err();

            let checked = check_cpus(&[cpu]).unwrap_err();
            assert_eq!(checked.to_string(), error.to_string());
            assert!(error.to_string().starts_with(&format!("CPU {cpu} of the host")), "{error}");
        }
    }
}
