// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Detection of hosts whose KVM emulates the guest's instructions.
//!
//! On a host without hardware virtualisation (a virtual machine without nesting), some KVM
//! implementations emulate a guest's kernel mode instruction by instruction. The test works there,
//! but the guest's own instructions dominate every time. Before the test, vCPU 0 reads one address of
//! the guest's program a thousand times, in no phase; a time that no CPU takes is logged as a
//! warning.

use crate::{
    clock,
    machine::{Vcpu, VcpuFailure},
    task::{Access, Task},
};
use granule_types::units::{Bytes, GuestAddress, Nanoseconds};

/// Number of reads.
const READS: u64 = 1000;

/// Limit of the time per read. A CPU takes a few nanoseconds; guest entry and exit, divided by the
/// number of reads, add a few tens.
const LIMIT: Nanoseconds = Nanoseconds(200);

/// Measures the time of one iteration of the guest's loop of four instructions: the least of three
/// measurements.
///
/// # Errors
/// The guest does not run.
pub fn time_per_read(
    vcpu: &mut dyn Vcpu,
    address: GuestAddress,
) -> Result<Nanoseconds, VcpuFailure> {
    let task = Task::new(Access::Read, address, READS, Bytes(0));
    let mut least = u64::MAX;
    for _ in 0..3 {
        let start = clock::now();
        vcpu.run(&task)?;
        least = least.min(clock::between(start, clock::now()).0);
    }
    Ok(Nanoseconds(least / READS))
}

/// Logs a warning if the time per read shows emulation.
pub fn warn_if_emulated(time: Nanoseconds) {
    if time > LIMIT {
        log::warn!(
            "this host's KVM takes {} ns for four guest instructions: it emulates them, and the \
             emulation dominates the measured times",
            time.0
        );
    }
}
