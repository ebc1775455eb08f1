// SPDX-License-Identifier: GPL-2.0-or-later
//! Instructions between two functions, such as from the trace of a fault to that of the next entry into a
//! guest.
//!
//! Those of all CPUs each take a nanosecond of the machine's clock under `-icount`, which a program in
//! the machine reads. By CPU, each one has intervals of its own, such as those of a guest between entry
//! and exit, while other CPUs execute the VMM. Intervals of pinned threads are by CPU too, but last as long
//! as the machine's clock says.
//!
//! A call of the first function starts an interval, also one inside another, and a call of the second
//! one ends it. A call of a third one cancels it. Only one thread may call them, on any CPU; with intervals
//! by CPU, only one thread on each CPU, which does not change it meanwhile.

use std::{
    iter,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{hexadecimal::hexadecimal, segments::Event};

/// Name of an interval and the virtual addresses of its functions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IntervalArguments {
    /// Name of the number of intervals in the output; their instructions have the suffix `_ns`.
    pub name: String,
    /// Functions that start, end and cancel an interval.
    pub functions: [u64; 3],
    /// Threads that have intervals, and what counts in these.
    pub scope: Scope,
}

/// Threads that have intervals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// One thread, with the instructions of all CPUs.
    Thread,
    /// One thread on each CPU, with the instructions of this CPU.
    Cpu,
    /// One thread on each CPU, with the instructions of all CPUs.
    PinnedThreads,
}

impl IntervalArguments {
    /// Parses `NAME:HEXSTART:HEXEND:HEXCANCEL`, or this and `:cpu` or `:pinned`.
    pub fn parse(value: &str) -> Option<Self> {
        let mut parts = value.split(':');
        let name = parts.next().filter(|name| !name.is_empty())?.to_owned();
        let mut functions = [0; 3];
        for function in &mut functions {
            *function = hexadecimal(parts.next()?)?;
        }
        let scope = match parts.next() {
            None => Scope::Thread,
            Some("cpu") => Scope::Cpu,
            Some("pinned") => Scope::PinnedThreads,
            Some(_) => return None,
        };
        parts.next().is_none().then_some(Self { name, functions, scope })
    }
}

/// Intervals of a thread, or of one on each CPU.
#[derive(Debug)]
pub struct CountedInterval {
    functions: [u64; 3],
    /// Slots of the number of intervals and of their instructions.
    slots: [usize; 2],
    /// Instructions that all CPUs, or by their rows each one have executed.
    executed: Box<[AtomicU64]>,
    /// Instructions at the start of the interval of the thread, or by row; [`NONE`] outside.
    starts: Box<[AtomicU64]>,
}

/// No start.
const NONE: u64 = u64::MAX;

impl CountedInterval {
    /// Returns the intervals between functions of a machine whose CPUs have `rows`, with the slots of
    /// their counts.
    pub fn new(arguments: IntervalArguments, rows: usize, slot: impl Fn(Event) -> usize) -> Self {
        let IntervalArguments { name, functions, scope } = arguments;
        let slots = [Event::Interval(name.clone()), Event::InInterval(name)].map(slot);
        let (clocks, threads) = match scope {
            Scope::Thread => (1, 1),
            Scope::Cpu => (rows, rows),
            Scope::PinnedThreads => (1, rows),
        };
        let new = |count, value| iter::repeat_with(|| AtomicU64::new(value)).take(count).collect();
        Self { functions, slots, executed: new(clocks, 0), starts: new(threads, NONE) }
    }

    /// Returns the number of the function at an address: 0 starts an interval, 1 ends one, and 2
    /// cancels one.
    pub fn boundary(&self, address: u64) -> Option<usize> {
        self.functions.iter().position(|function| *function == address)
    }

    /// Adds instructions of the CPU of a row.
    pub fn execute(&self, row: usize, instructions: u64) {
        of_row(&self.executed, row).fetch_add(instructions, Ordering::Relaxed);
    }

    /// Divides the intervals at the end of a segment: returns the rows of the CPUs that have intervals of
    /// their own, the slot, and the numbers of the instructions that belong to the intervals so far. An
    /// interval counts in the segment in which it ends.
    pub fn split(&self) -> impl Iterator<Item = (Option<usize>, usize, u64)> {
        let is_by_row = self.starts.len() > 1;
        self.starts.iter().enumerate().filter_map(move |(row, part)| {
            let executed = of_row(&self.executed, row).load(Ordering::Relaxed);
            let start = part.load(Ordering::Relaxed);
            (start != NONE).then(|| {
                part.store(executed, Ordering::Relaxed);
                (is_by_row.then_some(row), self.slots[1], executed - start)
            })
        })
    }

    /// Passes a boundary on the CPU of a row. Returns the slots and increments of the interval that it
    /// ends.
    pub fn pass(&self, row: usize, boundary: usize) -> Option<[(usize, u64); 2]> {
        let executed = of_row(&self.executed, row).load(Ordering::Relaxed);
        let next = if boundary == 0 { executed } else { NONE };
        let start = of_row(&self.starts, row).swap(next, Ordering::Relaxed);
        let [count, instructions] = self.slots;
        (boundary == 1 && start != NONE).then(|| [(count, 1), (instructions, executed - start)])
    }
}

/// Returns the number of a row; a single one stands for all rows.
fn of_row(numbers: &[AtomicU64], row: usize) -> &AtomicU64 {
    numbers.get(row).unwrap_or(&numbers[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(functions: [u64; 3], scope: Scope) -> CountedInterval {
        let arguments = IntervalArguments { name: "f".to_owned(), functions, scope };
        let slot = |event| usize::from(event == Event::InInterval("f".to_owned()));
        CountedInterval::new(arguments, 3, slot)
    }

    #[test]
    fn an_interval_of_a_cpu_has_only_its_instructions() {
        for (scope, expected) in [(Scope::Thread, 12), (Scope::Cpu, 5), (Scope::PinnedThreads, 12)]
        {
            let interval = interval([0x10, 0x20, 0x20], scope);
            interval.execute(1, 3);
            interval.pass(1, 0);

            interval.execute(2, 7);
            interval.execute(1, 5);

            assert_eq!(interval.pass(1, 1), Some([(0, 1), (1, expected)]));
        }
    }

    #[test]
    fn intervals_of_several_cpus_overlap() {
        let interval = interval([0x10, 0x20, 0x20], Scope::Cpu);
        for (row, instructions) in [(1, 0), (2, 4)] {
            interval.execute(row, instructions);
            interval.pass(row, 0);
        }

        interval.execute(1, 5);
        interval.execute(2, 6);

        assert_eq!(interval.split().collect::<Vec<_>>(), [(Some(1), 1, 5), (Some(2), 1, 6)]);
        interval.execute(2, 2);
        assert_eq!(interval.pass(1, 1), Some([(0, 1), (1, 0)]));
        assert_eq!(interval.pass(2, 1), Some([(0, 1), (1, 2)]));
    }

    #[test]
    fn intervals_of_pinned_threads_have_the_instructions_of_all_cpus() {
        let interval = interval([0x10, 0x20, 0x20], Scope::PinnedThreads);
        interval.pass(1, 0);
        interval.execute(2, 4);
        interval.pass(2, 0);

        interval.execute(0, 6);

        assert_eq!(interval.split().collect::<Vec<_>>(), [(Some(1), 1, 10), (Some(2), 1, 6)]);
        interval.execute(1, 3);
        assert_eq!(interval.pass(1, 1), Some([(0, 1), (1, 3)]));
        assert_eq!(interval.pass(2, 1), Some([(0, 1), (1, 3)]));
        assert_eq!(interval.pass(0, 1), None);
    }

    #[test]
    fn an_interval_lasts_from_its_last_start_to_its_end() {
        let interval = interval([0x10, 0x20, 0x30], Scope::Thread);
        let pass = |instructions, address| {
            interval.execute(0, instructions);
            let counts = interval.pass(0, interval.boundary(address).unwrap());
            counts.map(|[count, (slot, length)]| {
                assert_eq!((count, slot), ((0, 1), 1));
                length
            })
        };

        assert_eq!(pass(5, 0x20), None, "an end without a start");
        assert_eq!(pass(1, 0x10), None);
        assert_eq!(pass(7, 0x20), Some(7));
        assert_eq!(pass(1, 0x20), None, "a second end");
        assert_eq!(pass(1, 0x10), None);
        assert_eq!(pass(1, 0x30), None);
        assert_eq!(pass(1, 0x20), None, "a cancelled interval");
        assert_eq!(pass(1, 0x10), None);
        assert_eq!(pass(3, 0x10), None);
        assert_eq!(pass(2, 0x20), Some(2));
        assert_eq!(interval.boundary(0x40), None);
    }

    #[test]
    fn the_end_of_a_segment_divides_an_interval() {
        let interval = interval([0x10, 0x20, 0x20], Scope::Thread);

        assert_eq!(interval.split().next(), None);
        interval.pass(0, 0);
        interval.execute(0, 5);
        assert_eq!(interval.split().next(), Some((None, 1, 5)));
        interval.execute(0, 2);
        assert_eq!(interval.pass(0, 1), Some([(0, 1), (1, 2)]));
        assert_eq!(interval.split().next(), None);
    }

    #[test]
    fn an_interval_has_a_name_and_three_addresses() {
        let expected = |scope| {
            let functions = [1, 2, 0xff];
            Some(IntervalArguments { name: "f".to_owned(), functions, scope })
        };

        assert_eq!(IntervalArguments::parse("f:1:2:0xff"), expected(Scope::Thread));
        assert_eq!(IntervalArguments::parse("f:1:2:0xff:cpu"), expected(Scope::Cpu));
        let pinned = IntervalArguments::parse("f:1:2:0xff:pinned");
        assert_eq!(pinned, expected(Scope::PinnedThreads));
        for malformed in
            ["f", ":1:2:3", "f:1:2", "f:1:2:3:4", "f:1:2:x", "f:1:2:3:cpu:", "f:1:2:3:pinned:"]
        {
            assert_eq!(IntervalArguments::parse(malformed), None, "{malformed}");
        }
    }
}
