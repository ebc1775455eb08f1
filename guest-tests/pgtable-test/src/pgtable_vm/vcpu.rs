// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One vCPU on KVM: writes a task into its mailbox, enters the guest, and reads the reply when the
//! guest exits through a doorbell.
//!
//! On a host without hardware virtualisation (a virtual machine without nesting), some KVM
//! implementations emulate the guest's kernel mode. The test works there, but the emulation
//! dominates all times. So vCPU 0 reads an address of the guest program a thousand times before the
//! first phase, and a time that is too long for any CPU is logged as a warning.

use std::{io, sync::Arc};

use kvm_bindings::KVM_EXIT_DIRTY_RING_FULL;
use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::thread::set_name;
use vm_memory::Bytes as _;

use super::arch as native;
use crate::{
    clock,
    guest::{
        layout::Layout,
        mailbox::{Doorbell, Mailbox},
        tables::GuestVirtAddr,
    },
    machine::{Kick, MachineError, TestVcpu, VcpuFailure},
    task::{Task, TaskAccess},
};
use granule_types::units::{Bytes, GuestAddress, Nanoseconds};
use granule_vmm::{
    affinity::pin_thread,
    arch::vm::program_counter,
    kvm::{
        dirty_ring::DirtyRings,
        ioctls::exit_name,
        kick::{KickTarget, Kicker},
    },
    memory::GuestMemory,
};

impl Kick for Kicker {
    fn kick(&self) {
        Self::kick(self);
    }
}

/// A vCPU that runs the guest program.
pub struct KvmVcpu {
    // The target drops before `fd` (declaration order), so later kicks have no effect.
    pub kick_target: KickTarget,
    pub fd: VcpuFd,
    pub index: usize,
    pub pinned_cpu: Option<usize>,
    pub layout: Arc<Layout>,
    pub memory: GuestMemory,
    pub rings: Option<Arc<DirtyRings>>,
}

/// Describes an exit other than through a doorbell.
fn describe_unexpected_exit(exit: &VcpuExit<'_>) -> String {
    match exit {
        VcpuExit::MmioWrite(address, _) => {
            format!("the guest stored to {address:#x}, where there is no memory")
        }
        VcpuExit::MmioRead(address, _) => {
            format!("the guest read {address:#x}, where there is no memory")
        }
        other => format!("{other:?}"),
    }
}

impl KvmVcpu {
    /// Enters the guest and returns the doorbell through which it exits. Returns `None` if a signal
    /// interrupted the vCPU, or if its dirty ring was full and has been harvested.
    fn enter(&mut self) -> Result<Option<Doorbell>, VcpuFailure> {
        let detail = match self.fd.run() {
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) if self.rings.is_some() => {
                match self.rings.as_ref().map_or(Ok(()), |rings| rings.harvest()) {
                    Ok(()) => return Ok(None),
                    Err(error) => error.to_string(),
                }
            }
            Ok(exit) => match native::doorbell(&exit) {
                Some(doorbell) => return Ok(Some(doorbell)),
                None => describe_unexpected_exit(&exit),
            },
            // EAGAIN: KVM_RUN must be called again.
            Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => return Ok(None),
            Err(error) => {
                let hint = match error.errno() {
                    libc::EFAULT => {
                        ": the host has no memory at an address that the guest accessed"
                    }
                    _ => "",
                };
                let detail = format!("{}{hint}", io::Error::from(error));
                return Err(self.failure("KVM_RUN failed", detail));
            }
        };
        let name = exit_name(self.fd.get_kvm_run().exit_reason);
        Err(self.failure(name, detail))
    }

    fn failure(&self, exit: impl Into<String>, detail: impl Into<String>) -> VcpuFailure {
        VcpuFailure { pc: program_counter(&self.fd), ..VcpuFailure::new(self.index, exit, detail) }
    }

    /// Returns the task's result, which the guest reports through a doorbell.
    fn task_result(&self, doorbell: Doorbell, task: &Task) -> Result<(), VcpuFailure> {
        if doorbell == Doorbell::Done {
            return Ok(());
        }
        let mailbox: Mailbox = self
            .memory
            .map()
            .read_obj(self.layout.mailbox(self.index))
            .map_err(|error| self.failure("mailbox access failed", error.to_string()))?;
        let mut failure = self.failure("doorbell", "");
        if doorbell == Doorbell::Mismatch {
            let address = self.layout.physical_address(GuestVirtAddr(mailbox.mismatch_address));
            failure.address = Some(address);
            failure.detail = format!(
                "the guest read {:#x}, but {:#x} was written",
                mailbox.mismatch_value,
                Task::value_at(task.seed, address),
            );
        } else {
            let crash = native::explain_exception(&mailbox);
            failure.pc = Some(mailbox.pc);
            failure.syndrome = Some(mailbox.syndrome);
            failure.address = crash
                .has_address
                .then(|| self.layout.physical_address(GuestVirtAddr(mailbox.fault_address)));
            failure.detail = crash.detail;
        }
        Err(failure)
    }
}

impl TestVcpu for KvmVcpu {
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError> {
        let failed = |what: &str, error: io::Error| {
            MachineError::new(format!("{what} vCPU {}'s thread", self.index), error)
        };
        let name = std::ffi::CString::new(format!("vcpu {}", self.index)).unwrap_or_default();
        set_name(&name).map_err(|error| failed("naming", error.into()))?;
        if let Some(cpu) = self.pinned_cpu {
            pin_thread(cpu).map_err(|error| failed("pinning", error))?;
        }
        let kicker = self
            .kick_target
            .bind(&mut self.fd)
            .map_err(|error| MachineError::new("installing the kick signal's handler", error))?;
        Ok(Box::new(kicker))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        let start = self.layout.virtual_address(task.start);
        let mailbox = Mailbox::of_task(task, start, native::DOORBELL_IN_MAILBOX);
        self.memory
            .map()
            .write_obj(mailbox, self.layout.mailbox(self.index))
            .map_err(|error| self.failure("mailbox access failed", error.to_string()))?;
        loop {
            match self.enter()? {
                Some(doorbell) => return self.task_result(doorbell, task),
                None if !self.kick_target.is_kicked() => {}
                None => {
                    return Err(self.failure("KVM_EXIT_INTR", "kicked before the task was done"));
                }
            }
        }
    }
}

const EMULATION_CHECK_READS: u64 = 1000;

/// Maximum time of a read without emulation. A CPU takes a few nanoseconds; guest entry and exit,
/// divided by the number of reads, add a few tens.
pub const MAX_TIME_PER_READ: Nanoseconds = Nanoseconds(200);

/// Returns the shortest of three measured times of a read, a guest loop of four instructions.
pub fn time_per_read(
    vcpu: &mut dyn TestVcpu,
    address: GuestAddress,
) -> Result<Nanoseconds, VcpuFailure> {
    let task = Task::new(TaskAccess::Read, address, EMULATION_CHECK_READS, Bytes(0));
    let mut shortest = u64::MAX;
    for _ in 0..3 {
        let start = clock::now();
        vcpu.run(&task)?;
        shortest = shortest.min(clock::elapsed(start, clock::now()).0);
    }
    Ok(Nanoseconds(shortest / EMULATION_CHECK_READS))
}
