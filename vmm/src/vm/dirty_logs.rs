// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Dirty logs of all memslots of a VM.

use super::builder::Vm;
use crate::kvm::{
    KvmError,
    memslot::{DirtyLog, DirtyMode, Memslot},
};

/// Dirty logs, one for each memslot; none while logging is off.
#[derive(Debug, Default)]
pub struct DirtyLogs(Vec<DirtyLog>);

impl DirtyLogs {
    /// Returns whether logging is on.
    pub const fn are_on(&self) -> bool {
        !self.0.is_empty()
    }

    /// Starts logging, unless it is on.
    ///
    /// # Errors
    /// KVM cannot log in this mode; no memslot is then logged.
    pub fn start(&mut self, vm: &Vm, mode: DirtyMode) -> Result<(), KvmError> {
        if self.are_on() {
            return Ok(());
        }
        self.start_all(vm, mode).inspect_err(|_| {
            // The first error is returned.
            let _ = self.stop(vm);
        })
    }

    fn start_all(&mut self, vm: &Vm, mode: DirtyMode) -> Result<(), KvmError> {
        for slot in &vm.slots {
            let mut log = DirtyLog::new(&vm.fd, mode, vm.rings.clone())?;
            let switched = log.set_enabled(&vm.fd, slot, true);
            // The log is kept even after an error, so that `stop` stops it.
            self.0.push(log);
            switched?;
        }
        Ok(())
    }

    /// Stops all logs, even if one of them fails.
    pub fn stop(&mut self, vm: &Vm) -> Result<(), KvmError> {
        let logs = vm.slots.iter().zip(self.0.drain(..));
        logs.map(|(slot, mut log)| log.set_enabled(&vm.fd, slot, false)).fold(Ok(()), Result::and)
    }

    /// Calls `report` for each memslot with the pages that were written since the start of logging or
    /// the last [`clear`](Self::clear), one bit each.
    pub fn read(
        &mut self,
        vm: &Vm,
        mut report: impl FnMut(&Memslot, &[u64]),
    ) -> Result<(), KvmError> {
        self.require_on()?;
        for (slot, log) in vm.slots.iter().zip(&mut self.0) {
            report(slot, &log.read(&vm.fd, slot)?);
        }
        Ok(())
    }

    /// Clears the logs, and calls `report` for each memslot with the pages of its log.
    ///
    /// # Errors
    /// KVM cannot clear a log. The logs that were not reported keep their pages.
    pub fn clear(
        &mut self,
        vm: &Vm,
        mut report: impl FnMut(usize, &[u64]),
    ) -> Result<(), KvmError> {
        self.require_on()?;
        for (index, (slot, log)) in vm.slots.iter().zip(&mut self.0).enumerate() {
            report(index, &log.read_and_clear(&vm.fd, slot)?);
        }
        Ok(())
    }

    const fn require_on(&self) -> Result<(), KvmError> {
        if self.0.is_empty() {
            return Err(KvmError::NotLogging);
        }
        Ok(())
    }
}
