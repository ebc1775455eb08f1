// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One vCPU on KVM: writes a task into its mailbox, enters the guest, and reads the reply when the
//! guest exits through a doorbell.
//!
//! On a host without hardware virtualisation (a virtual machine without nesting), some KVM
//! implementations emulate a guest's kernel mode instruction by instruction. The test works there,
//! but the guest's own instructions dominate every time. Before the first phase, vCPU 0 reads one
//! address of the guest's program a thousand times; a time above that of any CPU is logged as a
//! warning.

use std::{io, sync::Arc};

use kvm_bindings::KVM_EXIT_DIRTY_RING_FULL;
use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::thread::{CpuSet, sched_setaffinity, set_name};
use vm_memory::Bytes as _;

use super::arch as native;
use crate::{
    clock,
    guest::{
        layout::Layout,
        mailbox::{Doorbell, Mailbox},
        tables::GuestVirtAddr,
    },
    machine::{Kick, MachineError, Vcpu, VcpuFailure},
    task::{Task, TaskAccess},
};
use granule_types::units::{Bytes, GuestAddress, Nanoseconds};
use granule_vmm::{
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

/// A vCPU that enters the guest at its program's entry.
pub struct GuestVcpu {
    // Dropped before `fd`, so that later kicks have no effect.
    pub kick_target: KickTarget,
    pub fd: VcpuFd,
    pub index: usize,
    pub cpu: Option<usize>,
    pub layout: Arc<Layout>,
    pub memory: GuestMemory,
    pub rings: Option<Arc<DirtyRings>>,
}

/// Describes an exit that is not through a doorbell.
fn unexpected(exit: &VcpuExit<'_>) -> String {
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

impl GuestVcpu {
    /// Enters the guest and returns the doorbell of its exit; `None` if a signal interrupted the
    /// vCPU, or its dirty ring was full and has been harvested.
    fn enter(&mut self) -> Result<Option<Doorbell>, VcpuFailure> {
        let detail = match self.fd.run() {
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) if self.rings.is_some() => {
                match self.rings.as_ref().map_or(Ok(()), |rings| rings.drain()) {
                    Ok(()) => return Ok(None),
                    Err(error) => error.to_string(),
                }
            }
            Ok(exit) => match native::doorbell(&exit) {
                Some(doorbell) => return Ok(Some(doorbell)),
                None => unexpected(&exit),
            },
            // EAGAIN: the kernel asks for another call.
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

    /// Returns the result that the guest reports through a doorbell.
    fn result(&self, doorbell: Doorbell, task: &Task) -> Result<(), VcpuFailure> {
        if doorbell == Doorbell::Done {
            return Ok(());
        }
        let mailbox: Mailbox = self
            .memory
            .map()
            .read_obj(self.layout.mailbox(self.index))
            .map_err(|error| self.failure("mailbox access failed", error.to_string()))?;
        let mut failure = self.failure("doorbell", "");
        if doorbell == Doorbell::Differs {
            let address = self.layout.physical_of(GuestVirtAddr(mailbox.differs_at));
            failure.address = Some(address);
            failure.detail = format!(
                "the guest read {:#x}, but {:#x} was written",
                mailbox.differs_found,
                Task::value_at(task.seed, address),
            );
        } else {
            let crash = native::explain(&mailbox);
            failure.pc = Some(mailbox.pc);
            failure.syndrome = Some(mailbox.syndrome);
            failure.address = crash
                .has_address
                .then(|| self.layout.physical_of(GuestVirtAddr(mailbox.fault_address)));
            failure.detail = crash.detail;
        }
        Err(failure)
    }
}

impl Vcpu for GuestVcpu {
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError> {
        let failed = |what: &str, error: io::Error| {
            MachineError::new(format!("{what} vCPU {}'s thread", self.index), error)
        };
        let name = std::ffi::CString::new(format!("vcpu {}", self.index)).unwrap_or_default();
        set_name(&name).map_err(|error| failed("naming", error.into()))?;
        if let Some(cpu) = self.cpu {
            let no_cpu = || {
                MachineError::new(
                    format!("pinning vCPU {} to host CPU {cpu}", self.index),
                    "the CPU does not exist or this process may not use it",
                )
            };
            if cpu >= CpuSet::MAX_CPU {
                return Err(no_cpu());
            }
            let mut set = CpuSet::new();
            set.set(cpu);
            sched_setaffinity(None, &set).map_err(|_| no_cpu())?;
        }
        let kicker = self
            .kick_target
            .bind(&mut self.fd)
            .map_err(|error| MachineError::new("installing the kick signal's handler", error))?;
        Ok(Box::new(kicker))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        let mailbox =
            Mailbox::of_task(task, self.layout.virtual_of(task.start), native::DOORBELL_IN_MAILBOX);
        self.memory
            .map()
            .write_obj(mailbox, self.layout.mailbox(self.index))
            .map_err(|error| self.failure("mailbox access failed", error.to_string()))?;
        loop {
            match self.enter()? {
                Some(doorbell) => return self.result(doorbell, task),
                None if !self.kick_target.kicked() => {}
                None => {
                    return Err(self.failure("KVM_EXIT_INTR", "kicked before the task was done"));
                }
            }
        }
    }
}

const READS: u64 = 1000;

/// Limit of the time per read. A CPU takes a few nanoseconds; guest entry and exit, divided by the
/// number of reads, add a few tens.
const LIMIT: Nanoseconds = Nanoseconds(200);

/// Measures the time of one iteration of the guest's loop of four instructions: the least of three
/// measurements.
pub fn time_per_read(
    vcpu: &mut dyn Vcpu,
    address: GuestAddress,
) -> Result<Nanoseconds, VcpuFailure> {
    let task = Task::new(TaskAccess::Read, address, READS, Bytes(0));
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
