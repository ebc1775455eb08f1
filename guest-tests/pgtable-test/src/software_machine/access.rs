// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The accesses of a task, as a vCPU without a guest performs them.

use granule_stage2::{Access as Stage2Access, Ipa};

use super::arch::RETURN;
use crate::{
    machine::VcpuFailure,
    task::{Access, Task},
};
use granule_types::units::GuestAddress;

/// Distance from a visited address to the planted instruction, after its own 8 bytes.
const PLANT_OFFSET: u64 = 8;

/// Memory of a vCPU, accessed through stage-2 translation.
pub(super) trait TranslatedMemory {
    /// Error of an access.
    type Error;

    /// Accesses 8 bytes without using their value.
    fn touch(&mut self, ipa: Ipa, access: Stage2Access) -> Result<(), Self::Error>;

    /// Reads 8 bytes.
    fn read(&mut self, ipa: Ipa, access: Stage2Access) -> Result<u64, Self::Error>;

    /// Writes 8 bytes.
    fn write(&mut self, ipa: Ipa, value: u64) -> Result<(), Self::Error>;
}

/// Performs a task's access at one address. Returns the value found there if it differs from the
/// expected one.
pub(super) fn visit<M: TranslatedMemory>(
    memory: &mut M,
    task: &Task,
    at: u64,
) -> Result<Option<u64>, M::Error> {
    let value = Task::value_at(task.seed, GuestAddress(at));
    let planted = Ipa(at + PLANT_OFFSET);
    let at = Ipa(at);
    let (found, expected) = match task.access {
        // These machines have no migration operations, so no task writes at random.
        Access::Nothing | Access::WriteAtRandom => return Ok(None),
        Access::Read => return memory.touch(at, Stage2Access::Read).map(|()| None),
        Access::Write => return memory.write(at, value).map(|()| None),
        Access::WriteThenRead => {
            memory.write(at, value)?;
            for inner in 0..task.inner_count {
                let offset = task.inner_first.0 + inner * task.inner_stride.0;
                memory.touch(Ipa(at.0 + offset), Stage2Access::Read)?;
            }
            return Ok(None);
        }
        Access::Plant => return memory.write(planted, RETURN).map(|()| None),
        Access::Execute => (memory.read(planted, Stage2Access::Fetch)?, RETURN),
        Access::Verify => (memory.read(at, Stage2Access::Read)?, value),
    };
    Ok((found != expected).then_some(found))
}

/// Returns the failure of a vCPU at an address.
pub(super) fn failure(vcpu: usize, exit: &str, address: u64, detail: String) -> VcpuFailure {
    VcpuFailure {
        vcpu,
        pc: None,
        exit: exit.to_owned(),
        syndrome: None,
        address: Some(GuestAddress(address)),
        detail,
    }
}

/// Returns the failure of a vCPU that found an unexpected value.
pub(super) fn unexpected_value(vcpu: usize, address: u64, found: u64) -> VcpuFailure {
    let detail = format!("the vCPU read {found:#x}, which no vCPU wrote");
    failure(vcpu, "VERIFY", address, detail)
}
