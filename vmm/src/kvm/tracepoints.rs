// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counters of KVM tracepoints in the host kernel: faults, exits and mmu_notifier calls.
//!
//! A perf event counts a tracepoint in this process and in every thread that it starts *after*
//! [`PerfCounters::open`] (inherited counters), but not in other VMs of the host and kernel threads
//! (khugepaged). Open the counters before the vCPU threads start.
//!
//! A perf event selects a tracepoint by its ID in tracefs, which only root can read. An event that
//! cannot be opened is absent from the counts, never zero; the reason is logged at debug level.
//!
//! Each counted event executes additional instructions in the kernel, and each context switch saves
//! and restores the counters.

use std::{ffi::CStr, fs, io, os::fd::AsRawFd, path::Path};

use granule_types::record::EventCounts;
use perf_event::{Builder, Counter, events::Tracepoint};

use super::KvmError;

const TRACEFS_MOUNTS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// Open perf counters of KVM tracepoints.
#[derive(Debug, Default)]
pub struct PerfCounters {
    counters: Vec<(&'static str, Counter)>,
}

impl PerfCounters {
    /// Opens a counter for each of the KVM `tracepoints` that the host has and this process may
    /// count.
    pub fn open(tracepoints: &[&'static str]) -> Self {
        let mut counters = Self::default();
        let tracefs = find_tracefs();
        for name in tracepoints {
            counters.add(name, open_counter(tracefs, name));
        }
        counters
    }

    /// Opens also a counter of `tracepoint` for each name and kernel event filter
    /// (`Documentation/trace/events.rst`, 5.1).
    #[must_use]
    pub fn and_filtered(mut self, tracepoint: &str, filters: &[(&'static str, &CStr)]) -> Self {
        let tracefs = find_tracefs();
        for (name, filter) in filters {
            let counter = open_counter(tracefs, tracepoint);
            self.add(name, counter.and_then(|counter| set_filter(counter, filter)));
        }
        self
    }

    fn add(&mut self, name: &'static str, counter: io::Result<Counter>) {
        match counter {
            Ok(counter) => self.counters.push((name, counter)),
            Err(reason) => log::debug!("{name} is not counted: {reason}"),
        }
    }

    /// Returns whether no counter is open.
    pub const fn is_empty(&self) -> bool {
        self.counters.is_empty()
    }

    /// Removes exits and faults if this KVM does not trace them: no exit has been counted. Call it
    /// after the guest has run.
    pub fn remove_uncounted(&mut self) -> Result<(), KvmError> {
        if self.read()?.get("kvm_exit") == Some(&0) {
            let on_entry_path = |name: &str| name == "kvm_exit" || name.ends_with("_fault");
            self.counters.retain(|(name, _)| !on_entry_path(name));
            log::debug!("this KVM does not trace exits and faults: left out");
        }
        Ok(())
    }

    /// Returns the counts since the counters were opened.
    pub fn read(&mut self) -> Result<EventCounts, KvmError> {
        self.counters
            .iter_mut()
            .map(|(name, counter)| match counter.read() {
                Ok(count) => Ok(((*name).to_owned(), count)),
                Err(source) => Err(KvmError::ReadEvent { name, source }),
            })
            .collect()
    }
}

/// Checks that this process can count a KVM tracepoint.
///
/// # Errors
/// The error names the missing file or the refused call.
pub fn check_tracepoint(name: &str) -> io::Result<()> {
    open_counter(find_tracefs(), name).map(drop)
}

/// Returns the mounted tracefs.
pub fn find_tracefs() -> Option<&'static Path> {
    TRACEFS_MOUNTS.iter().map(Path::new).find(|path| path.join("events").is_dir())
}

/// Sets the event filter of a counter.
pub fn set_filter(counter: Counter, filter: &CStr) -> io::Result<Counter> {
    /// `PERF_EVENT_IOC_SET_FILTER`: `_IOW('$', 6, char *)`.
    const SET_FILTER: libc::Ioctl = 0x4008_2406;
    // SAFETY: the file descriptor is a perf event; the kernel reads a NUL-terminated string.
    let result = unsafe { libc::ioctl(counter.as_raw_fd(), SET_FILTER, filter.as_ptr()) };
    if result < 0 {
        return Err(add_cause("PERF_EVENT_IOC_SET_FILTER", io::Error::last_os_error()));
    }
    Ok(counter)
}

/// Returns the content of a file of a tracepoint: `GROUP/NAME`, or the name of one of KVM.
pub fn read_event_file(tracefs: Option<&Path>, tracepoint: &str, file: &str) -> io::Result<String> {
    let no_tracefs = || format!("no tracefs at {} or {}", TRACEFS_MOUNTS[0], TRACEFS_MOUNTS[1]);
    let tracefs = tracefs.ok_or_else(|| io::Error::other(no_tracefs()))?;
    let (group, name) = tracepoint.split_once('/').unwrap_or(("kvm", tracepoint));
    let path = tracefs.join("events").join(group).join(name).join(file);
    fs::read_to_string(&path).map_err(|error| add_cause(&path.display().to_string(), error))
}

/// Returns the event of a tracepoint, by its name as [`read_event_file`] takes it.
pub fn find_event(tracefs: Option<&Path>, tracepoint: &str) -> io::Result<Tracepoint> {
    let id = read_event_file(tracefs, tracepoint, "id")?;
    Ok(Tracepoint::with_id(id.trim().parse().map_err(io::Error::other)?))
}

fn open_counter(tracefs: Option<&Path>, name: &str) -> io::Result<Counter> {
    let mut counter = Builder::new(find_event(tracefs, name)?)
        .inherit(true)
        .include_kernel()
        .build()
        .map_err(|error| add_cause("perf_event_open", error))?;
    counter.enable().map_err(|error| add_cause("perf_event_open", error))?;
    Ok(counter)
}

/// Adds the failed call or file to the message of an error.
pub fn add_cause(cause: &str, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{cause}: {error}"))
}

/// Returns what each counter has counted since an earlier reading. One that is new has counted from 0.
pub fn counted_since(before: &EventCounts, after: &EventCounts) -> EventCounts {
    let earlier = |name: &str| before.get(name).copied().unwrap_or(0);
    let counted =
        |(name, count): (&String, &u64)| (name.clone(), count.saturating_sub(earlier(name)));
    after.iter().map(counted).collect()
}

/// Returns the counts between two readings. A counter missing in one of them is absent.
pub fn difference(before: &EventCounts, after: &EventCounts) -> EventCounts {
    after
        .iter()
        .filter_map(|(name, count)| {
            let earlier = before.get(name)?;
            Some((name.clone(), count.saturating_sub(*earlier)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(pairs: &[(&str, u64)]) -> EventCounts {
        pairs.iter().map(|(n, c)| ((*n).to_owned(), *c)).collect()
    }

    #[test]
    fn difference_omits_counters_missing_on_either_side() {
        let before = counts(&[("kvm_exit", 5), ("kvm_guest_fault", 7)]);
        let after = counts(&[("kvm_exit", 9), ("kvm_access_fault", 3)]);

        assert_eq!(difference(&before, &after), counts(&[("kvm_exit", 4)]));
    }

    #[test]
    fn an_unreadable_tracepoint_is_named_in_the_error() {
        let folder = tempfile::tempdir().unwrap();

        let error = open_counter(Some(folder.path()), "kvm_exit").unwrap_err();

        assert!(error.to_string().contains("events/kvm/kvm_exit/id"));
    }
}
