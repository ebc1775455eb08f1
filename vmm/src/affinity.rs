// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Affinity of threads to CPUs of the host.

use std::io;

use rustix::thread::{CpuSet, sched_setaffinity};

/// Restricts this thread, and threads that it starts later, to a CPU of the host.
///
/// # Errors
/// The CPU does not exist, or this process may not use it.
pub fn pin_thread(cpu: usize) -> io::Result<()> {
    let refused = || {
        let text = format!("CPU {cpu} of the host does not exist, or this process may not use it");
        io::Error::other(text)
    };
    if cpu >= CpuSet::MAX_CPU {
        return Err(refused());
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|_| refused())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rustix::thread::sched_getaffinity;

    use super::*;

    #[test]
    fn a_pinned_thread_runs_on_its_cpu_only() {
        let allowed = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rev().find(|cpu| allowed.is_set(*cpu)).unwrap();

        let set = thread::spawn(move || {
            pin_thread(last).unwrap();
            sched_getaffinity(None).unwrap()
        });

        let set = set.join().unwrap();
        assert!(set.is_set(last));
        assert_eq!(set.count(), 1);
    }

    #[test]
    fn a_cpu_that_is_not_there_is_refused_by_its_number() {
        for cpu in [CpuSet::MAX_CPU - 1, CpuSet::MAX_CPU] {
            let error = thread::spawn(move || pin_thread(cpu)).join().unwrap().unwrap_err();

            assert!(error.to_string().starts_with(&format!("CPU {cpu} of the host")), "{error}");
        }
    }
}
