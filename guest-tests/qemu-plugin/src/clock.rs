// SPDX-License-Identifier: GPL-2.0-or-later
//! Elapsed time of CPUs that run side by side, from their turns in one thread.
//!
//! Under `-icount` one thread of QEMU runs the CPUs in the order of their numbers. Since QEMU 8.1
//! every CPU that can run gets a *slice* of the same length in a *round*: the time to the next
//! deadline of a timer, divided by the number of CPUs. With a deadline every few microseconds a round
//! is a quantum of parallel time, and as long as the longest of its slices:
//!
//! ```text
//! elapsed = sum over rounds of (the longest slice of any CPU in that round)
//! work    = sum over all slices
//! ```
//!
//! A CPU is known by its [key](CpuKey), which grows with the CPU's number. A round ends where the key
//! falls. A CPU that runs alone has one long slice instead of many, with the same sum. A CPU that
//! spins by `WFE` or `YIELD` gives up the rest of its slice: the round is as long as the slice of the
//! CPU that it waits for.
//!
//! A handover within a round (one CPU wakes another and halts) counts as parallel; the error is at
//! most one slice each, so results of several quanta show it.
//!
//! A CPU that can run and gets no slice makes elapsed time meaningless: [`Time::starved`] is the
//! longest time that one had to wait for its turn.

use std::collections::BTreeMap;

use serde::Serialize;

/// Value of a register that holds another value on each CPU: the per-CPU offset of the kernel,
/// which grows with the number of the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuKey(pub u64);

/// A block of code that a CPU executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Number of its instructions.
    pub instructions: u64,
    /// Cost of its instructions in picoseconds.
    pub cost: u64,
    /// It ends with an instruction after which the CPU may not be able to run: `WFI`, `HVC`, `SMC`.
    pub may_halt: bool,
}

impl Block {
    const INSTRUCTION_BITS: u32 = 15;

    /// Packs the block into a word for a callback; a cost above some minutes is cut.
    #[expect(clippy::cast_possible_truncation, reason = "QEMU's hosts have 64 bits")]
    pub const fn pack(self) -> usize {
        let cost = self.cost << (Self::INSTRUCTION_BITS + 1);
        (cost | self.instructions << 1 | self.may_halt as u64) as usize
    }

    /// Returns the block of a packed word.
    pub const fn unpack(word: usize) -> Self {
        let word = word as u64;
        Self {
            instructions: (word >> 1) & ((1 << Self::INSTRUCTION_BITS) - 1),
            cost: word >> (Self::INSTRUCTION_BITS + 1),
            may_halt: word & 1 == 1,
        }
    }
}

/// Times of a segment, in picoseconds of virtual time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Time {
    /// Sum of the longest slices of all rounds.
    pub elapsed: u64,
    /// Sum of all slices.
    pub work: u64,
    /// Number of rounds.
    pub rounds: u64,
    /// Longest work of other CPUs while one that could run had no slice.
    pub starved: u64,
    /// Work and rounds of each CPU that executed, in the order of their numbers.
    pub cpus: Vec<CpuTime>,
}

/// Times of a CPU in a segment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CpuTime {
    /// Number of the CPU among those that have executed.
    pub cpu: usize,
    /// Sum of its slices.
    pub work: u64,
    /// Rounds in which it had a slice.
    pub rounds: u64,
}

#[derive(Debug)]
struct Cpu {
    key: CpuKey,
    /// Row of its counts.
    row: usize,
    work: u64,
    rounds: u64,
    may_halt: bool,
    /// Work of the machine when its last slice ended.
    ended: u64,
}

impl Cpu {
    /// Returns whether the CPU can run. CPUs share the key 0 until the kernel has set theirs.
    fn can_run(&self) -> bool {
        !self.may_halt && self.key != CpuKey(0)
    }
}

/// The clock of the machine.
#[derive(Debug, Default)]
pub struct Clock {
    /// Sorted by key.
    cpus: Vec<Cpu>,
    /// Index of the CPU whose slice it is.
    current: Option<usize>,
    slice: u64,
    longest: u64,
    /// Work of the machine up to the current slice.
    before: u64,
    time: Time,
}

impl Clock {
    /// Accounts a block that a CPU begins to execute; returns the row of the CPU's counts.
    pub fn execute(&mut self, key: CpuKey, block: Block) -> usize {
        let current = match self.current {
            Some(current) if self.cpus[current].key == key => current,
            _ => self.begin_slice(key),
        };
        self.slice += block.cost;
        let cpu = &mut self.cpus[current];
        cpu.may_halt = block.may_halt;
        cpu.row
    }

    /// Ends the segment and returns its times.
    pub fn take(&mut self) -> Time {
        self.end_slice();
        self.end_round();
        for cpu in self.cpus.iter().filter(|cpu| cpu.can_run()) {
            self.time.starved = self.time.starved.max(self.before - cpu.ended);
        }
        let mut time = std::mem::take(&mut self.time);
        time.cpus = self
            .cpus
            .iter_mut()
            .enumerate()
            .map(|(cpu, state)| {
                let time = CpuTime { cpu, work: state.work, rounds: state.rounds };
                (state.work, state.rounds) = (0, 0);
                time
            })
            .filter(|time| time.work > 0)
            .collect();
        time
    }

    /// Returns the number of the CPU of each row.
    pub fn numbers(&self) -> BTreeMap<usize, usize> {
        self.cpus.iter().enumerate().map(|(number, cpu)| (cpu.row, number)).collect()
    }

    /// Returns the row of the CPU whose slice it is.
    pub fn current_row(&self) -> usize {
        self.current.map_or(0, |current| self.cpus[current].row)
    }

    fn begin_slice(&mut self, key: CpuKey) -> usize {
        let last = self.current.map(|current| self.cpus[current].key);
        self.end_slice();
        if last.is_some_and(|last| key < last) {
            self.end_round();
        }
        let index = match self.cpus.binary_search_by_key(&key, |cpu| cpu.key) {
            Ok(index) => index,
            Err(index) => {
                let row = self.cpus.len();
                let ended = self.before;
                let cpu = Cpu { key, row, work: 0, rounds: 0, may_halt: true, ended };
                self.cpus.insert(index, cpu);
                index
            }
        };
        let cpu = &mut self.cpus[index];
        if cpu.can_run() {
            self.time.starved = self.time.starved.max(self.before - cpu.ended);
        }
        self.current = Some(index);
        index
    }

    fn end_slice(&mut self) {
        let Some(current) = self.current.take() else { return };
        let slice = std::mem::take(&mut self.slice);
        let cpu = &mut self.cpus[current];
        cpu.work += slice;
        cpu.rounds += 1;
        self.before += slice;
        cpu.ended = self.before;
        self.time.work += slice;
        self.longest = self.longest.max(slice);
    }

    fn end_round(&mut self) {
        let longest = std::mem::take(&mut self.longest);
        if longest > 0 {
            self.time.elapsed += longest;
            self.time.rounds += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(cost: u64, may_halt: bool) -> Block {
        Block { instructions: cost, cost, may_halt }
    }

    /// Runs slices of CPU and cost.
    fn run(clock: &mut Clock, slices: &[(u64, u64)]) {
        for (cpu, cost) in slices {
            clock.execute(CpuKey(*cpu), block(*cost, false));
        }
    }

    /// Returns elapsed time and work of slices.
    fn times(slices: &[(u64, u64)]) -> (u64, u64) {
        let mut clock = Clock::default();
        run(&mut clock, slices);
        let time = clock.take();
        (time.elapsed, time.work)
    }

    #[test]
    fn a_block_survives_packing() {
        for whole in [block(512, true), block(1, false), Block { cost: 1 << 40, ..block(7, true) }]
        {
            assert_eq!(Block::unpack(whole.pack()), whole);
        }
    }

    #[test]
    fn a_round_is_as_long_as_its_longest_slice() {
        for (slices, elapsed, work) in [
            (&[][..], 0, 0),
            (&[(1, 10)], 10, 10),
            (&[(1, 10), (1, 5)], 15, 15),
            (&[(1, 10), (2, 30), (3, 20)], 30, 60),
            (&[(1, 10), (2, 10), (1, 10), (2, 10)], 20, 40),
            (&[(2, 10), (1, 10)], 20, 20),
        ] {
            assert_eq!(times(slices), (elapsed, work), "{slices:?}");
        }
    }

    #[test]
    fn work_of_each_cpu_is_reported_by_its_number_and_reset() {
        let mut clock = Clock::default();
        run(&mut clock, &[(9, 1), (5, 2), (9, 4)]);

        let time = clock.take();

        let cpu = |cpu, work, rounds| CpuTime { cpu, work, rounds };
        assert_eq!(time.cpus, [cpu(0, 2, 1), cpu(1, 5, 2)]);
        assert_eq!(time.rounds, 2);
        assert_eq!((clock.take().elapsed, clock.take().cpus), (0, Vec::new()));
        assert_eq!(clock.numbers(), [(0, 1), (1, 0)].into());
    }

    #[test]
    fn a_cpu_that_can_run_without_a_slice_is_starved() {
        let mut clock = Clock::default();
        run(&mut clock, &[(1, 10), (2, 10), (1, 700), (2, 10)]);

        assert_eq!(clock.take().starved, 700);
    }

    #[test]
    fn a_cpu_without_any_further_slice_is_starved() {
        let mut clock = Clock::default();
        run(&mut clock, &[(1, 10), (2, 10), (1, 700)]);

        assert_eq!(clock.take().starved, 700);
    }

    #[test]
    fn a_halted_cpu_is_not_starved() {
        let mut clock = Clock::default();
        clock.execute(CpuKey(2), block(10, true));
        run(&mut clock, &[(1, 700), (2, 10)]);

        assert_eq!(clock.take().starved, 10, "CPU 1 waits for CPU 2");
    }
}
