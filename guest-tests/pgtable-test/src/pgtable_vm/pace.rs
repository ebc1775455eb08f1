// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How fast this host runs a guest's instructions.
//!
//! Some hosts' KVM emulates what a guest does in kernel mode, instruction by instruction, because
//! their CPU has no virtualisation to offer (a virtual machine without nesting). Everything works
//! there, but a phase's time is mostly that of the guest's own few
//! instructions. So vCPU 0 reads one place of the guest's program a thousand times before the test,
//! which no phase contains, and a pace that no CPU has is told in the log.

use crate::machine::{Access, Task, Vcpu, VcpuFailure};
use crate::vcpu_threads::clock;
use granule_types::units::{Bytes, GuestAddress, Nanoseconds};

/// How often the place is read.
const READS: u64 = 1000;

/// What one turn of the loop may take: a CPU takes a few nanoseconds, entering and leaving the guest
/// once spread over all turns a few tens.
const SLOW: Nanoseconds = Nanoseconds(200);

/// The time that one turn of the guest's loop of four instructions takes, the fastest of three.
///
/// # Errors
/// The guest does not run.
pub fn measure(vcpu: &mut dyn Vcpu, place: GuestAddress) -> Result<Nanoseconds, VcpuFailure> {
    let task = Task {
        access: Access::Read,
        start: place,
        count: READS,
        stride: Bytes(0),
        inner_first: Bytes(0),
        inner_count: 0,
        inner_stride: Bytes(0),
        seed: 0,
    };
    let mut fastest = u64::MAX;
    for _ in 0..3 {
        let start = clock::now();
        vcpu.run(&task)?;
        fastest = fastest.min(clock::between(start, clock::now()).0);
    }
    Ok(Nanoseconds(fastest / READS))
}

/// Warns of a pace that no CPU has.
pub fn warn_if_slow(pace: Nanoseconds) {
    if pace > SLOW {
        log::warn!(
            "this host's KVM takes {} ns for four instructions of the guest: it emulates them, and \
             the times are mostly that",
            pace.0
        );
    }
}
