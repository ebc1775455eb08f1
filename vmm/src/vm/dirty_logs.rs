// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Dirty logs of all memslots of a VM, and the durations of operations on them.

use std::{collections::BTreeMap, time::Instant};

use super::builder::Vm;
use crate::{
    kvm::{
        KvmError,
        memslot::{DirtyLog, DirtyMode, Memslot},
    },
    stalls::StallHistogram,
};

/// Operations whose durations are recorded.
const OPERATIONS: [&str; 4] = ["dirty-start", "dirty-stop", "dirty-read", "dirty-clear"];

/// Dirty logs.
#[derive(Debug)]
pub struct DirtyLogs {
    /// One for each memslot; none while logging is off.
    logs: Vec<DirtyLog>,
    /// Durations of each operation, during which faults of the guest may wait for KVM's locks.
    durations: BTreeMap<&'static str, StallHistogram>,
}

impl Default for DirtyLogs {
    fn default() -> Self {
        // A count that is absent at the start of a phase is no part of its difference.
        let durations = OPERATIONS.map(|name| (name, StallHistogram::default()));
        Self { logs: Vec::new(), durations: durations.into() }
    }
}

impl DirtyLogs {
    /// Returns whether logging is on.
    pub const fn are_on(&self) -> bool {
        !self.logs.is_empty()
    }

    /// Returns the durations of each operation.
    pub const fn durations(&self) -> &BTreeMap<&'static str, StallHistogram> {
        &self.durations
    }

    /// Executes an operation and records its duration.
    fn timed<T>(&mut self, name: &'static str, operation: impl FnOnce(&mut Self) -> T) -> T {
        let start = Instant::now();
        let result = operation(self);
        self.durations.entry(name).or_default().record(start.elapsed());
        result
    }

    /// Starts logging, unless it is on.
    ///
    /// # Errors
    /// KVM cannot log in this mode; no memslot is then logged.
    pub fn start(&mut self, vm: &Vm, mode: DirtyMode) -> Result<(), KvmError> {
        if self.are_on() {
            return Ok(());
        }
        self.timed("dirty-start", |logs| logs.start_all(vm, mode)).inspect_err(|_| {
            // The first error is returned.
            let _ = self.stop(vm);
        })
    }

    fn start_all(&mut self, vm: &Vm, mode: DirtyMode) -> Result<(), KvmError> {
        for slot in &vm.slots {
            let mut log = DirtyLog::new(&vm.fd, mode, vm.rings.clone())?;
            let switched = log.set_enabled(&vm.fd, slot, true);
            // The log is kept even after an error, so that `stop` stops it.
            self.logs.push(log);
            switched?;
        }
        Ok(())
    }

    /// Stops all logs, even if one of them fails.
    pub fn stop(&mut self, vm: &Vm) -> Result<(), KvmError> {
        self.timed("dirty-stop", |own| {
            let logs = vm.slots.iter().zip(own.logs.drain(..));
            let stopped = logs.map(|(slot, mut log)| log.set_enabled(&vm.fd, slot, false));
            stopped.fold(Ok(()), Result::and)
        })
    }

    /// Calls `report` for each memslot with the pages that were written since the start of logging or
    /// the last [`clear`](Self::clear), one bit each.
    pub fn read(
        &mut self,
        vm: &Vm,
        mut report: impl FnMut(&Memslot, &[u64]),
    ) -> Result<(), KvmError> {
        self.require_on()?;
        self.timed("dirty-read", |own| {
            for (slot, log) in vm.slots.iter().zip(&mut own.logs) {
                report(slot, &log.read(&vm.fd, slot)?);
            }
            Ok(())
        })
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
        self.timed("dirty-clear", |own| {
            for (index, (slot, log)) in vm.slots.iter().zip(&mut own.logs).enumerate() {
                report(index, &log.read_and_clear(&vm.fd, slot)?);
            }
            Ok(())
        })
    }

    const fn require_on(&self) -> Result<(), KvmError> {
        if self.logs.is_empty() {
            return Err(KvmError::NotLogging);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use granule_types::record::EventCounts;

    use super::*;

    #[test]
    fn operations_without_a_call_are_counted_as_zero() {
        let mut logs = DirtyLogs::default();
        logs.timed("dirty-read", |_| ());
        let mut counts = EventCounts::new();

        logs.durations().iter().for_each(|(name, times)| times.add_to(&mut counts, name));

        let count = |name: &str| counts[&format!("dirty-{name}.count")];
        assert_eq!(["start", "stop", "read", "clear"].map(count), [0, 0, 1, 0]);
    }
}
