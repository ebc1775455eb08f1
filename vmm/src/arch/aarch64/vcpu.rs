// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One vCPU of the page-table test: a task into its mailbox, into the guest, out at a bell.

use std::{fmt, io, sync::Arc};

use granule_guest_tests::{
    arch::aarch64::{
        layout::{DOORBELL, Layout},
        mailbox::{Bell, Mailbox},
    },
    machine::{Kick, MachineError, Task, Vcpu, VcpuFailure},
    units::GuestAddress,
};
use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::thread::{CpuSet, sched_setaffinity, set_name};
use vm_memory::Bytes as _;

use super::{registers, syndrome};
use crate::{
    kvm::{exit, kick::Anchor},
    memory::GuestMemory,
};

/// A vCPU, ready to enter the guest at its program's entry.
pub struct GuestVcpu {
    // Before `fd`: kicks must have become harmless when the vCPU goes.
    pub anchor: Anchor,
    pub fd: VcpuFd,
    pub index: usize,
    pub cpu: Option<usize>,
    pub layout: Arc<Layout>,
    pub memory: GuestMemory,
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
    /// The kernel was interrupted.
    Interrupted,
    /// In a way nobody expected.
    Unexpected(String),
}

impl GuestVcpu {
    /// Enters the guest once.
    fn enter(&mut self) -> Left {
        let detail = match self.fd.run() {
            Ok(VcpuExit::MmioWrite(address, _)) => match Bell::at(DOORBELL, address) {
                Some(bell) => return Left::Rang(bell),
                None => format!("it stored to {address:#x}, where there is no memory"),
            },
            Ok(VcpuExit::MmioRead(address, _)) => {
                format!("it read {address:#x}, where there is no memory")
            }
            Ok(other) => format!("{other:?}"),
            Err(error) if error.errno() == libc::EINTR => return Left::Interrupted,
            // Nothing happened; the kernel asks to be called again.
            Err(error) if error.errno() == libc::EAGAIN => return Left::Interrupted,
            Err(error) => {
                return Left::Unexpected(format!("KVM_RUN failed: {}", io::Error::from(error)));
            }
        };
        Left::Unexpected(detail)
    }

    fn failure(&mut self, detail: String) -> Box<VcpuFailure> {
        Box::new(VcpuFailure {
            vcpu: self.index,
            pc: registers::get_pc(&self.fd).ok(),
            exit: exit::name(self.fd.get_kvm_run().exit_reason),
            syndrome: None,
            address: None,
            detail,
        })
    }

    fn answer(&mut self, bell: Bell, task: &Task) -> Result<(), Box<VcpuFailure>> {
        if bell == Bell::Done {
            return Ok(());
        }
        let at = self.layout.mailbox(self.index);
        let mailbox: Mailbox = match self.memory.map().read_obj(at) {
            Ok(mailbox) => mailbox,
            Err(error) => return Err(self.failure(format!("its mailbox is gone: {error}"))),
        };
        let mut failure = self.failure(String::new());
        if bell == Bell::Differs {
            let address = self.layout.physical_of(mailbox.differs_at, task.start);
            failure.address = Some(address);
            failure.detail = format!(
                "it found {:#x} where {:#x} was written",
                mailbox.differs_found,
                Task::value_at(task.seed, address),
            );
        } else {
            failure.pc = Some(mailbox.elr);
            failure.syndrome = Some(mailbox.syndrome);
            failure.address = Some(GuestAddress(mailbox.far));
            failure.detail = syndrome::describe(mailbox.vector, mailbox.syndrome);
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
            .tie(&mut self.fd)
            .map_err(|error| MachineError::new("installing the kick signal's handler", error))?;
        Ok(Box::new(kicker))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        let mailbox = Mailbox::of_task(task, self.layout.virtual_of(task.start), DOORBELL.0);
        if let Err(error) = self
            .memory
            .map()
            .write_obj(mailbox, self.layout.mailbox(self.index))
        {
            return Err(*self.failure(format!("its mailbox is gone: {error}")));
        }
        loop {
            match self.enter() {
                Left::Rang(bell) => return self.answer(bell, task).map_err(|failure| *failure),
                Left::Interrupted if !self.anchor.kicked() => {}
                Left::Interrupted => {
                    return Err(*self.failure("it was stopped before it was done".to_owned()));
                }
                Left::Unexpected(detail) => return Err(*self.failure(detail)),
            }
        }
    }
}
