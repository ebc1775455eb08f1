// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Probe of the kernel's function that maps the memory of a fault, whose argument is the size: no
//! tracepoint has it.
//!
//! The probe is a tracepoint that this process adds to the kernel
//! (`Documentation/trace/kprobetrace.rst`). Its name is the same in all processes, which share it: the
//! last one removes it, and one that was killed leaves it to the next. A kernel probe of
//! `perf_event_open()` would end with its event, but the kernel sets it up anew for each thread that
//! inherits it, with the rights of that time.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    path::Path,
};

use rustix::io::Errno;

use crate::{
    arch::host,
    kvm::tracepoints::{add_cause, find_tracefs},
};

/// Name of the probe among the tracepoints.
pub const NAME: &str = "granule/stage2_map";
/// Field of its samples with the mapped bytes.
pub const SIZE_FIELD: &str = "size";

/// The probe. Dropping the value removes it, unless an event uses it.
#[derive(Debug)]
pub struct MapProbe {
    /// The kernel's file of probes, which stays open because the sandbox allows no later `open()`.
    probes: File,
}

impl MapProbe {
    /// Adds the probe, if the kernel lacks it.
    ///
    /// # Errors
    /// The kernel has no probes or not this function, or the process may not add one.
    pub fn new() -> io::Result<Self> {
        let tracefs = find_tracefs().ok_or_else(|| io::Error::other("no tracefs"))?;
        let (function, register) = host::MAP_FUNCTION
            .ok_or_else(|| io::Error::other("KVM of this architecture has no such function"))?;
        let probe = format!("p:{NAME} {function} {SIZE_FIELD}={register}:u64");
        Self::add(&probe, &tracefs.join("kprobe_events"))
    }

    fn add(probe: &str, path: &Path) -> io::Result<Self> {
        let failed = |error| add_cause(&path.display().to_string(), error);
        // Without O_APPEND the kernel removes all other probes.
        let mut probes = OpenOptions::new().append(true).open(path).map_err(failed)?;
        match probes.write_all(probe.as_bytes()) {
            Err(error) if error.raw_os_error() != Some(Errno::EXIST.raw_os_error()) => {
                Err(failed(error))
            }
            _ => Ok(Self { probes }),
        }
    }
}

impl Drop for MapProbe {
    fn drop(&mut self) {
        if let Err(error) = self.probes.write_all(format!("-:{NAME}").as_bytes()) {
            log::debug!("the probe {NAME} stays: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_is_added_beside_others_and_removed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "p:other f\n").unwrap();
        let added = "p:other f\np:granule/stage2_map map size=%x2:u64";

        let probe = "p:granule/stage2_map map size=%x2:u64";
        let probe = MapProbe::add(probe, file.path()).unwrap();

        assert_eq!(std::fs::read_to_string(file.path()).unwrap(), added);
        drop(probe);
        let removed = format!("{added}-:granule/stage2_map");
        assert_eq!(std::fs::read_to_string(file.path()).unwrap(), removed);
    }

    #[test]
    fn a_kernel_without_probes_is_named_by_its_file() {
        let folder = tempfile::tempdir().unwrap();

        let error = MapProbe::add("p:f g", &folder.path().join("kprobe_events")).unwrap_err();

        assert!(error.to_string().contains("kprobe_events: No such file"), "{error}");
    }
}
