// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The holders of a lock, from the changes of its word.
//!
//! A queued spinlock is held while its low byte is not zero, by the CPU that changed it from zero. A
//! queued reader-writer lock has its writer in the low byte, and its readers in the bits from 9 on: a
//! reader adds itself, and holds the lock as soon as there is no writer. Functions that are inlined
//! into their callers change the word too, so no symbol of the lock is needed.

use alloc::{vec, vec::Vec};

/// Type of a lock word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockType {
    /// Linux: `struct qspinlock`.
    Spinlock,
    /// Linux: `struct qrwlock`.
    ReaderWriter,
}

/// A CPU's hold on a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hold {
    Exclusive,
    Shared,
}

#[derive(Debug, Clone)]
pub(super) struct Lock {
    kind: LockType,
    has_owner: bool,
    owner: Option<usize>,
    /// Readers that each CPU has added.
    readers: Vec<i64>,
    /// The event of the last change.
    changed_at: u64,
}

const OWNER: u64 = 0xff;
const READER_SHIFT: u32 = 9;

impl Lock {
    pub(super) fn new(kind: LockType, cpus: usize) -> Self {
        Self { kind, has_owner: false, owner: None, readers: vec![0; cpus], changed_at: 0 }
    }

    /// Records a change of the word by a CPU in an event.
    pub(super) fn change(&mut self, cpu: usize, old: u64, new: u64, event: u64) {
        self.changed_at = event;
        match (old & OWNER != 0, new & OWNER != 0) {
            (false, true) => self.owner = Some(cpu),
            (true, false) => self.owner = None,
            _ => {}
        }
        self.has_owner = new & OWNER != 0;
        let change = (new >> READER_SHIFT).cast_signed() - (old >> READER_SHIFT).cast_signed();
        if self.kind == LockType::ReaderWriter
            && let Some(readers) = self.readers.get_mut(cpu)
        {
            *readers += change;
        }
    }

    pub(super) const fn changed_at(&self) -> u64 {
        self.changed_at
    }

    pub(super) fn hold(&self, cpu: usize) -> Option<Hold> {
        if self.owner == Some(cpu) {
            return Some(Hold::Exclusive);
        }
        let reads = self.readers.get(cpu).is_some_and(|count| *count > 0);
        (reads && !self.has_owner).then_some(Hold::Shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spinlock_belongs_to_the_cpu_that_sets_its_byte() {
        let mut lock = Lock::new(LockType::Spinlock, 2);

        lock.change(0, 0, 1, 0);
        lock.change(1, 1, 0x101, 0); // CPU 1 waits.
        let while_waiting = (lock.hold(0), lock.hold(1));
        lock.change(0, 0x101, 0x100, 0);
        lock.change(1, 0x100, 1, 0);

        assert_eq!(while_waiting, (Some(Hold::Exclusive), None));
        assert_eq!((lock.hold(0), lock.hold(1)), (None, Some(Hold::Exclusive)));
    }

    #[test]
    fn a_reader_holds_the_lock_when_the_writer_has_left() {
        let mut lock = Lock::new(LockType::ReaderWriter, 2);

        lock.change(0, 0, 0xff, 0);
        lock.change(1, 0xff, 0x2ff, 0);
        let beside_writer = lock.hold(1);
        lock.change(0, 0x2ff, 0x200, 0);
        let after_writer = lock.hold(1);
        lock.change(1, 0x200, 0, 0);

        assert_eq!((beside_writer, after_writer), (None, Some(Hold::Shared)));
        assert_eq!(lock.hold(1), None);
    }
}
