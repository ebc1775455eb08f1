// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Signals that end the process because of what one of its threads has done.
//!
//! A handler restores the terminal, writes one line and ends the process with exit code 1. Nothing
//! else is possible in it: the thread may hold any lock. The [filters](super::seccomp) of all threads
//! allow its calls.

use vmm_sys_util::signal::register_signal_handler;

use super::{
    outcome::{VmError, failed},
    terminal,
};

const BUS_ERROR: &[u8] = b"granule: memory cannot be accessed (SIGBUS): a mapped file (kernel, \
    initramfs, memory=map) became shorter or cannot be read, a cgroup limits hugetlb pages, or memory \
    of the host is broken\n";

/// Reports accesses to memory that the host cannot provide, of all threads.
///
/// # Errors
/// The handler cannot be installed.
pub fn report_bus_errors() -> Result<(), VmError> {
    register_signal_handler(libc::SIGBUS, report_bus_error)
        .map_err(failed("the handler of SIGBUS cannot be installed"))
}

/// Handles SIGBUS.
extern "C" fn report_bus_error(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    end_process(BUS_ERROR)
}

/// Restores the terminal, writes a line and ends the process. A signal handler may call it.
pub fn end_process(line: &[u8]) -> ! {
    terminal::restore();
    // SAFETY: the line is valid for its length; write is async-signal-safe.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
    // SAFETY: the call ends the process without running destructors.
    unsafe { libc::_exit(1) }
}

#[cfg(test)]
mod tests {
    use std::{env, sync::Arc, thread};

    use granule_types::{backing::Backing, units::Bytes};
    use vm_memory::Bytes as _;

    use super::*;
    use crate::{
        arch::MEMORY_START,
        devices::virtio::testing::child_test_command,
        vm::{builder::allocate_memory, config::MemoryZone, seccomp::ThreadRole},
    };

    const CHILD_VARIABLE: &str = "GRANULE_TEST_SIGBUS";

    /// Maps a file, truncates it, and accesses its memory as a device does.
    fn access_truncated_file() {
        report_bus_errors().unwrap();
        let zone = MemoryZone {
            size: Bytes::mib(4),
            backing: Backing::Anonymous,
            prefault: false,
            alignment: None,
            node: None,
        };
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(zone.size.0).unwrap();
        let memory = allocate_memory(&[zone], Some(Arc::clone(&file))).unwrap();
        assert_eq!(memory.map().read_obj::<u64>(MEMORY_START).unwrap(), 0);
        file.set_len(0).unwrap();
        let access = move || {
            ThreadRole::Vcpu.confine().unwrap();
            memory.map().read_obj::<u64>(MEMORY_START)
        };
        let read = thread::spawn(access).join();
        println!("the access has returned {read:?}");
    }

    #[test]
    fn an_access_to_a_truncated_file_ends_the_process_with_a_message() {
        if env::var_os(CHILD_VARIABLE).is_some() {
            return access_truncated_file();
        }
        let test = "an_access_to_a_truncated_file_ends_the_process_with_a_message";
        let mut child = child_test_command(&format!("vm::fatal_signals::tests::{test}"));

        let output = child.env(CHILD_VARIABLE, "1").output().unwrap();

        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(message.ends_with(&*String::from_utf8_lossy(BUS_ERROR)), "{output:?}");
    }
}
