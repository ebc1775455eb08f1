// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Probe of the kernel's function that maps the memory of a fault, whose argument is the size: no
//! tracepoint has it.
//!
//! The probe is a tracepoint that is added to the kernel (`Documentation/trace/kprobetrace.rst`), and
//! stays there for later runs: the kernel arms it only while an event uses it. Removing it would need
//! the kernel's file of probes to stay open beside the running guest, which could add others then. A kernel
//! probe of `perf_event_open()` would end with its event, but the kernel sets it up anew for each
//! thread that inherits it, with the rights of that time.

use std::{fs::OpenOptions, io, io::Write as _, path::Path};

use rustix::io::Errno;

use crate::{
    arch::host,
    kvm::tracepoints::{add_cause, find_tracefs, read_event_file},
};

/// Name of the probe among the tracepoints.
pub const NAME: &str = "granule/stage2_map";
/// Field of its samples with the mapped bytes.
pub const SIZE_FIELD: &str = "size";

/// Adds the probe, if the kernel lacks it.
///
/// # Errors
/// The kernel has no probes or not this function, or the process may not add one.
pub fn add() -> io::Result<()> {
    let tracefs = find_tracefs();
    // Later boots of a VM may read the format, but no longer add the probe.
    if read_event_file(tracefs, NAME, "format").is_ok() {
        return Ok(());
    }
    let tracefs = tracefs.ok_or_else(|| io::Error::other("no tracefs"))?;
    let (function, register) = host::MAP_FUNCTION
        .ok_or_else(|| io::Error::other("KVM of this architecture has no such function"))?;
    let probe = format!("p:{NAME} {function} {SIZE_FIELD}={register}:u64");
    append(&probe, &tracefs.join("kprobe_events"))
}

/// Appends a probe to the kernel's file. Without `O_APPEND` the kernel would remove all others.
fn append(probe: &str, path: &Path) -> io::Result<()> {
    let written = OpenOptions::new().append(true).open(path);
    match written.and_then(|mut probes| probes.write_all(probe.as_bytes())) {
        // Another process has added it meanwhile.
        Err(error) if error.raw_os_error() == Some(Errno::EXIST.raw_os_error()) => Ok(()),
        written => written.map_err(|error| add_cause(&path.display().to_string(), error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_is_added_beside_others() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "p:other f\n").unwrap();

        append("p:granule/stage2_map map size=%x2:u64", file.path()).unwrap();

        let probes = "p:other f\np:granule/stage2_map map size=%x2:u64";
        assert_eq!(std::fs::read_to_string(file.path()).unwrap(), probes);
    }

    #[test]
    fn a_kernel_without_probes_is_named_by_its_file() {
        let folder = tempfile::tempdir().unwrap();

        let error = append("p:f g", &folder.path().join("kprobe_events")).unwrap_err();

        assert!(error.to_string().contains("kprobe_events: No such file"), "{error}");
    }
}
