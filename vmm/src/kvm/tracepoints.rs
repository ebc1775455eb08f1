// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counts of the host kernel's events: faults and exits.
//!
//! Each event is one of KVM's tracepoints, counted through perf events for this process and every
//! thread it starts *after* [`EventCounters::open`] (inherited counters): other machines on the same
//! host do not disturb the counts, and threads of the kernel itself (khugepaged) are not in them.
//! Open before the vCPU threads are started.
//!
//! A tracepoint is found by its number in tracefs, which only root reads. What cannot be opened is
//! absent from the counts, never zero, and the reason is in the log at debug level.
//!
//! Counting costs: every event executes a few hundred instructions more, and every switch of
//! threads saves and loads the counters. Leave it off where times matter most.

use std::{
    ffi::CStr,
    fs, io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use granule_types::record::EventCounts;
use perf_event::{Builder, Counter, events::Tracepoint};
use thiserror::Error;

use crate::arch::host::TRACEPOINTS;

/// Where tracefs may be mounted.
const TRACEFS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// Why counts could not be read.
#[derive(Debug, Error)]
#[error("the perf event of kvm:{name} can no longer be read; run without events")]
pub struct ReadEventsError {
    name: &'static str,
    #[source]
    source: io::Error,
}

/// Why one event is not counted. It is told in the log only.
#[derive(Debug, Error)]
enum OpenError {
    #[error("no tracefs at {} or {}", TRACEFS[0], TRACEFS[1])]
    NoTracefs,
    #[error("{path}: {source}")]
    Id { path: PathBuf, source: io::Error },
    #[error("perf_event_open: {0}")]
    Perf(io::Error),
    #[error("PERF_EVENT_IOC_SET_FILTER: {0}")]
    Filter(io::Error),
}

/// Counters of the kernel's events, running from [`EventCounters::open`] on.
#[derive(Debug, Default)]
pub struct EventCounters {
    counters: Vec<(&'static str, Counter)>,
}

impl EventCounters {
    /// Opens a counter for each event the host offers and this process may count.
    pub fn open() -> Self {
        let tracefs = tracefs();
        Self {
            counters: TRACEPOINTS
                .iter()
                .filter_map(|name| match open(tracefs, name) {
                    Ok(counter) => Some((*name, counter)),
                    Err(reason) => {
                        log::debug!("kvm:{name} is not counted: {reason}");
                        None
                    }
                })
                .collect(),
        }
    }

    /// Adds counters of a tracepoint's events by what is in them: `(name, filter)`, the filter in
    /// the kernel's own words (`Documentation/trace/events.rst`, 5.1). Open before the threads that
    /// are to be counted start.
    pub fn add_filtered(&mut self, tracepoint: &str, filters: &[(&'static str, &CStr)]) {
        let tracefs = tracefs();
        for (name, filter) in filters {
            match open(tracefs, tracepoint).and_then(|counter| filtered(counter, filter)) {
                Ok(counter) => self.counters.push((name, counter)),
                Err(reason) => log::debug!("{name} is not counted: {reason}"),
            }
        }
    }

    /// No counters: every count is absent.
    pub fn none() -> Self {
        Self::default()
    }

    /// Whether nothing is counted.
    pub const fn is_empty(&self) -> bool {
        self.counters.is_empty()
    }

    /// Leaves out what this KVM has tracepoints for and never reaches: a KVM with an entry path of its
    /// own, as told by a guest that has run and no exit that was counted. To be called then.
    ///
    /// # Errors
    /// The kernel no longer gives a count it gave before.
    pub fn leave_out_uncounted(&mut self) -> Result<(), ReadEventsError> {
        if self.read()?.get("kvm_exit") == Some(&0) {
            let of_the_entry_path = |name: &str| name == "kvm_exit" || name.ends_with("_fault");
            self.counters.retain(|(name, _)| !of_the_entry_path(name));
            log::debug!("this KVM counts neither exits nor faults by tracepoints: left out");
        }
        Ok(())
    }

    /// The counts since the counters were opened, of this thread and of all that it started since.
    ///
    /// # Errors
    /// The kernel no longer gives a count it gave before.
    pub fn read(&mut self) -> Result<EventCounts, ReadEventsError> {
        self.counters
            .iter_mut()
            .map(|(name, counter)| match counter.read() {
                Ok(count) => Ok(((*name).to_owned(), count)),
                Err(source) => Err(ReadEventsError { name, source }),
            })
            .collect()
    }
}

fn tracefs() -> Option<&'static Path> {
    TRACEFS
        .iter()
        .map(Path::new)
        .find(|path| path.join("events").is_dir())
}

/// Has a counter count only what a filter lets through.
fn filtered(counter: Counter, filter: &CStr) -> Result<Counter, OpenError> {
    /// `PERF_EVENT_IOC_SET_FILTER`: `_IOW('$', 6, char *)`.
    const SET_FILTER: libc::Ioctl = 0x4008_2406;
    // SAFETY: the descriptor is a counter's and the kernel reads a string that ends with a NUL.
    let result = unsafe { libc::ioctl(counter.as_raw_fd(), SET_FILTER, filter.as_ptr()) };
    if result < 0 {
        return Err(OpenError::Filter(io::Error::last_os_error()));
    }
    Ok(counter)
}

fn open(tracefs: Option<&Path>, name: &str) -> Result<Counter, OpenError> {
    let path = tracefs
        .ok_or(OpenError::NoTracefs)?
        .join("events/kvm")
        .join(name)
        .join("id");
    let id = fs::read_to_string(&path)
        .and_then(|text| text.trim().parse().map_err(io::Error::other))
        .map_err(|source| OpenError::Id { path, source })?;
    let mut counter = Builder::new(Tracepoint::with_id(id))
        .inherit(true)
        .include_kernel()
        .build()
        .map_err(OpenError::Perf)?;
    counter.enable().map_err(OpenError::Perf)?;
    Ok(counter)
}

/// What was counted between two readings; what is missing in either is absent.
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
    fn what_is_not_counted_on_both_sides_is_absent_and_not_zero() {
        let before = counts(&[("kvm_exit", 5), ("kvm_guest_fault", 7)]);
        let after = counts(&[("kvm_exit", 9), ("kvm_access_fault", 3)]);

        assert_eq!(difference(&before, &after), counts(&[("kvm_exit", 4)]));
    }

    #[test]
    fn an_unreadable_tracepoint_is_an_error_that_names_its_file() {
        let folder = tempfile::tempdir().unwrap();

        let error = open(Some(folder.path()), "kvm_exit").unwrap_err();

        assert!(error.to_string().contains("events/kvm/kvm_exit/id"));
    }

    #[test]
    fn no_counters_give_no_counts() {
        assert_eq!(EventCounters::none().read().unwrap(), EventCounts::new());
    }
}
