// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One vCPU of the page-table test: a task into its mailbox, into the guest, out at a bell.

use std::{fmt, io, sync::Arc};

use crate::guest::{
    layout::Layout,
    mailbox::{Bell, Mailbox},
};
use crate::machine::{Kick, MachineError, Task, Vcpu, VcpuFailure};
use kvm_bindings::KVM_EXIT_DIRTY_RING_FULL;
use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::thread::{CpuSet, sched_setaffinity, set_name};
use vm_memory::Bytes as _;

use super::arch as native;

use granule_vmm::{
    arch::vm::program_counter,
    kvm::{
        dirty_ring::DirtyRings,
        exit,
        kick::{KickTarget, Kicker},
    },
    memory::GuestMemory,
};

/// Kicks a vCPU out of the guest.
#[derive(Debug)]
struct VcpuKick(Kicker);

impl Kick for VcpuKick {
    fn kick(&self) {
        self.0.kick();
    }
}

/// A vCPU, ready to enter the guest at its program's entry.
pub struct GuestVcpu {
    // Before `fd`: kicks must have become harmless when the vCPU goes.
    pub anchor: KickTarget,
    pub fd: VcpuFd,
    pub index: usize,
    pub cpu: Option<usize>,
    pub layout: Arc<Layout>,
    pub memory: GuestMemory,
    pub rings: Option<Arc<DirtyRings>>,
}

impl fmt::Debug for GuestVcpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestVcpu")
            .field("index", &self.index)
            .field("cpu", &self.cpu)
            .finish_non_exhaustive()
    }
}

/// How the guest came back.
enum Left {
    /// By a bell.
    Rang(Bell),
    /// The kernel was interrupted, or had us make room in the dirty ring.
    Interrupted,
    /// In a way nobody expected: its name, and what more there is to say.
    Unexpected(String, String),
}

/// What to say of an exit that is no bell.
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
    /// Enters the guest once.
    fn enter(&mut self) -> Left {
        let detail = match self.fd.run() {
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) if self.rings.is_some() => {
                let made = self.rings.as_ref().map_or(Ok(()), |rings| rings.drain());
                match made {
                    Ok(()) => return Left::Interrupted,
                    Err(error) => format!("{error}"),
                }
            }
            Ok(exit) => match native::bell(&exit) {
                Some(bell) => return Left::Rang(bell),
                None => unexpected(&exit),
            },
            // EAGAIN: nothing happened, and the kernel asks to be called again.
            Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => {
                return Left::Interrupted;
            }
            Err(error) => {
                let hint = match error.errno() {
                    libc::EFAULT => ": the host has no memory behind an address the guest used",
                    _ => "",
                };
                let detail = format!("{}{hint}", io::Error::from(error));
                return Left::Unexpected("an error of KVM_RUN".to_owned(), detail);
            }
        };
        let name = exit::name(self.fd.get_kvm_run().exit_reason);
        Left::Unexpected(name, detail)
    }

    fn failure(&self, exit: impl Into<String>, detail: impl Into<String>) -> VcpuFailure {
        VcpuFailure {
            vcpu: self.index,
            pc: program_counter(&self.fd),
            exit: exit.into(),
            syndrome: None,
            address: None,
            detail: detail.into(),
        }
    }

    /// What the guest's bell means.
    fn answer(&self, bell: Bell, task: &Task) -> Result<(), VcpuFailure> {
        if bell == Bell::Done {
            return Ok(());
        }
        let mailbox: Mailbox = self
            .memory
            .map()
            .read_obj(self.layout.mailbox(self.index))
            .map_err(|error| self.failure("no mailbox", error.to_string()))?;
        let mut failure = self.failure("a bell", "");
        if bell == Bell::Differs {
            let address = self.layout.physical_of(mailbox.differs_at);
            failure.address = Some(address);
            failure.detail = format!(
                "the guest found {:#x} where {:#x} was written",
                mailbox.differs_found,
                Task::value_at(task.seed, address),
            );
        } else {
            let crash = native::explain(&mailbox);
            failure.pc = Some(mailbox.pc);
            failure.syndrome = Some(mailbox.syndrome);
            failure.address = crash
                .has_address
                .then(|| self.layout.physical_of(mailbox.fault_address));
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
                    "there is no such CPU, or this process may not use it",
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
            .anchor
            .bind(&mut self.fd)
            .map_err(|error| MachineError::new("installing the kick signal's handler", error))?;
        Ok(Box::new(VcpuKick(kicker)))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        let mailbox = Mailbox::of_task(
            task,
            self.layout.virtual_of(task.start),
            native::DOORBELL_IN_MAILBOX,
        );
        self.memory
            .map()
            .write_obj(mailbox, self.layout.mailbox(self.index))
            .map_err(|error| self.failure("no mailbox", error.to_string()))?;
        loop {
            match self.enter() {
                Left::Rang(bell) => return self.answer(bell, task),
                Left::Interrupted if !self.anchor.kicked() => {}
                Left::Interrupted => {
                    return Err(self.failure("KVM_EXIT_INTR", "stopped before it was done"));
                }
                Left::Unexpected(name, detail) => return Err(self.failure(name, detail)),
            }
        }
    }
}
