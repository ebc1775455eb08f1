// SPDX-License-Identifier: GPL-2.0-or-later
//! Elapsed time of CPUs that run in parallel, computed from their turns in one thread.
//!
//! Under `-icount` one thread of QEMU runs the CPUs by ascending number, each until a timer's
//! deadline. The clock ends a CPU's turn after a *quantum* of virtual time, so that in each *round*
//! every CPU that can run has a turn of the same length, up to a block of code. The turns of a
//! round count as parallel:
//!
//! ```text
//! elapsed = sum over rounds of (the longest turn of any CPU in that round)
//! work    = sum over all turns
//! ```
//!
//! With a seed, the turn length varies from round to round between 0.5 and 1.5 quanta, so that CPUs
//! that repeat the same code do not synchronize with their turns.
//!
//! A CPU is identified by its [key](CpuKey), which increases with the CPU's number; a round ends
//! when the key decreases. Consecutive turns of a CPU that runs alone count as one. A CPU that
//! spins with `WFE` or `YIELD` yields the rest of its turn: the round is as long as the turn of the
//! CPU that it waits for. A CPU that spins with loads uses its whole turn, as on hardware.
//!
//! A CPU that acquires a lock in the round of its release counts as parallel to the previous holder
//! in that round. The quantum must therefore be shorter than the work between lock handovers.
//!
//! Elapsed time is meaningless if a CPU that can run gets no turn: [`Time::starved`] is the longest
//! wait of such a CPU, in turns of the other CPUs.

use std::{collections::BTreeMap, mem};

use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng as _, SeedableRng as _},
};
use serde::Serialize;

use crate::costs::Costs;

/// Value of a register that differs between CPUs: the kernel's per-CPU offset, which increases with
/// the CPU's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuKey(pub u64);

/// A block of code that a CPU executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Number of its instructions.
    pub instructions: u64,
    /// Cost of its instructions in picoseconds.
    pub cost: u64,
    /// `true` if the last instruction may stop the CPU from running: `WFI`, `HVC`, `SMC`.
    pub may_halt: bool,
}

impl Block {
    const INSTRUCTION_BITS: u32 = 15;

    /// Packs the block into a word for a callback; a cost above some minutes is truncated.
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
    /// Sum of the longest turns of all rounds.
    pub elapsed: u64,
    /// Sum of all turns.
    pub work: u64,
    /// Number of rounds.
    pub rounds: u64,
    /// Largest number of turns of other CPUs while a CPU that could run had none. A turn of a whole
    /// quantum counts twice: when it ends, and when the next CPU begins.
    pub starved: u64,
    /// Work and rounds of each CPU that executed, sorted by number.
    pub cpus: Vec<CpuTime>,
}

/// Times of a CPU in a segment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CpuTime {
    /// Number of the CPU among those that have executed.
    pub cpu: usize,
    /// Sum of its turns.
    pub work: u64,
    /// Rounds in which it had a turn.
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
    /// Number of the machine's turns when this CPU's last turn ended.
    ended: u64,
    /// Cache lines maintained by `DC` since its last `DSB`.
    lines: u64,
}

impl Cpu {
    /// Returns the number of turns since this CPU's last one if it can run; `now` is the number of
    /// all turns. CPUs share the key 0 until the kernel has set one for each.
    fn wait(&self, now: u64) -> u64 {
        let can_run = !self.may_halt && self.key != CpuKey(0);
        if can_run { now - self.ended } else { 0 }
    }
}

/// CPU that executed the last atomic operation on each cache line.
#[derive(Debug)]
struct Owners(Box<[(u64, usize)]>);

impl Default for Owners {
    fn default() -> Self {
        Self(vec![(u64::MAX, 0); 1 << 14].into())
    }
}

impl Owners {
    /// Records an operation; returns whether another CPU executed the previous one on the line. A
    /// line is evicted when a line with the same low address bits is recorded.
    fn change(&mut self, address: u64, row: usize) -> bool {
        let line = address / 64;
        let place = line as usize % self.0.len();
        let (last_line, last_row) = mem::replace(&mut self.0[place], (line, row));
        last_line == line && last_row != row
    }
}

/// The clock of the machine.
#[derive(Debug, Default)]
pub struct Clock {
    /// Sorted by key.
    cpus: Vec<Cpu>,
    /// Average length of a turn.
    quantum: u64,
    /// Length of a turn of this round.
    length: u64,
    /// Lengths of turns, if they vary.
    lengths: Option<SplitMix64>,
    /// Index of the CPU whose turn it is.
    current: Option<usize>,
    turn: u64,
    /// Value of `turn` when the end of the turn was last requested.
    ended: u64,
    longest: u64,
    /// Number of turns of the machine.
    turns: u64,
    owners: Owners,
    time: Time,
}

impl Clock {
    /// Returns a clock with turns of `quantum` picoseconds, which vary if there is a seed.
    pub fn new(quantum: u64, seed: Option<u64>) -> Self {
        let lengths = seed.map(SplitMix64::seed_from_u64);
        Self { quantum, length: quantum, lengths, ..Self::default() }
    }

    /// Accounts a block that a CPU begins to execute; returns whether its turn ends with the block.
    pub fn execute(&mut self, key: CpuKey, block: Block) -> bool {
        let current = match self.current {
            Some(current) if self.cpus[current].key == key => current,
            _ => self.begin_turn(key),
        };
        self.turn += block.cost;
        self.cpus[current].may_halt = block.may_halt;
        let ends = self.turn - self.ended >= self.length;
        if ends {
            self.ended = self.turn;
            self.turns += 1;
        }
        ends
    }

    /// Accounts a `DC` of a line to the current CPU.
    pub fn clean_line(&mut self, costs: &Costs) {
        let Some(current) = self.current else { return };
        let lines = &mut self.cpus[current].lines;
        self.turn += costs.line(*lines);
        *lines += 1;
    }

    /// Ends the current CPU's range of maintained lines, at a `DSB`.
    pub fn end_range(&mut self) {
        if let Some(current) = self.current {
            self.cpus[current].lines = 0;
        }
    }

    /// Accounts an atomic operation at `address` to the current CPU.
    pub fn change_atomically(&mut self, address: u64, costs: &Costs) {
        let shared = self.owners.change(address, self.current_row());
        self.turn += costs.atomic(shared);
    }

    /// Ends the segment and returns its times.
    pub fn take(&mut self) -> Time {
        let current = self.current;
        self.end_turn();
        self.end_round();
        self.current = current;
        // The current CPU's turn has just ended.
        let waits = self.cpus.iter().map(|cpu| cpu.wait(self.turns));
        self.time.starved = waits.fold(self.time.starved, u64::max);
        let mut time = mem::take(&mut self.time);
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

    /// Returns the CPU number of each row.
    pub fn numbers(&self) -> BTreeMap<usize, usize> {
        self.cpus.iter().enumerate().map(|(number, cpu)| (cpu.row, number)).collect()
    }

    /// Returns the row of counts of the CPU whose turn it is.
    pub fn current_row(&self) -> usize {
        self.current.map_or(0, |current| self.cpus[current].row)
    }

    fn begin_turn(&mut self, key: CpuKey) -> usize {
        let last = self.current.map(|current| self.cpus[current].key);
        self.end_turn();
        if last.is_some_and(|last| key < last) {
            self.end_round();
        }
        let index = match self.cpus.binary_search_by_key(&key, |cpu| cpu.key) {
            Ok(index) => index,
            Err(index) => {
                let row = self.cpus.len();
                let ended = self.turns;
                let cpu = Cpu { key, row, work: 0, rounds: 0, may_halt: true, ended, lines: 0 };
                self.cpus.insert(index, cpu);
                index
            }
        };
        self.time.starved = self.time.starved.max(self.cpus[index].wait(self.turns));
        self.current = Some(index);
        index
    }

    fn end_turn(&mut self) {
        let Some(current) = self.current.take() else { return };
        let turn = mem::take(&mut self.turn);
        self.ended = 0;
        let cpu = &mut self.cpus[current];
        cpu.work += turn;
        cpu.rounds += u64::from(turn > 0);
        self.turns += 1;
        cpu.ended = self.turns;
        self.time.work += turn;
        self.longest = self.longest.max(turn);
    }

    fn end_round(&mut self) {
        let longest = mem::take(&mut self.longest);
        if longest > 0 {
            self.time.elapsed += longest;
            self.time.rounds += 1;
            if let Some(lengths) = &mut self.lengths {
                self.length = self.quantum / 2 + lengths.next_u64() % (self.quantum + 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::SHORT_RANGE;

    fn block(cost: u64, may_halt: bool) -> Block {
        Block { instructions: cost, cost, may_halt }
    }

    /// Runs turns, each a CPU and a cost.
    fn run(clock: &mut Clock, turns: &[(u64, u64)]) {
        for (cpu, cost) in turns {
            clock.execute(CpuKey(*cpu), block(*cost, false));
        }
    }

    /// Returns elapsed time and work of turns.
    fn times(turns: &[(u64, u64)]) -> (u64, u64) {
        let mut clock = Clock::new(100, None);
        run(&mut clock, turns);
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
    fn a_turn_ends_after_each_quantum() {
        let mut clock = Clock::new(100, None);

        let ends =
            [60, 60, 60, 60, 10, 100].map(|cost| clock.execute(CpuKey(1), block(cost, false)));

        assert_eq!(ends, [false, true, false, true, false, true]);
        assert_eq!(clock.take().elapsed, 350);
    }

    #[test]
    fn with_a_seed_turns_vary_by_half_a_quantum_and_repeat() {
        let lengths = |seed| -> Vec<u64> {
            let mut clock = Clock::new(100, Some(seed));
            let turns = (0..1000).map(|_| {
                run(&mut clock, &[(1, 1), (2, 1)]);
                clock.end_round();
                clock.length
            });
            turns.collect()
        };

        let seven = lengths(7);

        assert!(seven.iter().all(|length| (50..=150).contains(length)));
        assert!((95_000..105_000).contains(&seven.iter().sum::<u64>()));
        assert_eq!(lengths(7), seven);
        assert_ne!(lengths(8), seven);
    }

    #[test]
    fn cleaning_costs_by_the_range_of_the_cpu() {
        let mut costs = Costs::default();
        for cost in ["dc_line:1", "dc_long:10"] {
            costs.set(cost).unwrap();
        }
        let mut clock = Clock::new(1_000_000, None);

        for cpu in [1, 2] {
            run(&mut clock, &[(cpu, 0)]);
            for lines in [SHORT_RANGE + 3, 1] {
                (0..lines).for_each(|_| clock.clean_line(&costs));
                clock.end_range();
            }
        }

        let work = SHORT_RANGE + 30 + 1;
        assert_eq!(clock.take().cpus.iter().map(|cpu| cpu.work).collect::<Vec<_>>(), [work; 2]);
    }

    #[test]
    fn an_atomic_operation_costs_more_if_the_line_was_another_cpus() {
        let mut costs = Costs::default();
        costs.set("atomic:1").unwrap();
        costs.set("atomic_shared:100").unwrap();
        let mut clock = Clock::new(1_000_000, None);

        for (cpu, address) in [(1, 0), (1, 63), (2, 64), (2, 8), (2, 8), (1, 8)] {
            run(&mut clock, &[(cpu, 0)]);
            clock.change_atomically(address, &costs);
        }

        assert_eq!(clock.take().work, 4 + 200);
    }

    #[test]
    fn a_round_is_as_long_as_its_longest_turn() {
        for (turns, elapsed, work) in [
            (&[][..], 0, 0),
            (&[(1, 10)], 10, 10),
            (&[(1, 10), (1, 5)], 15, 15),
            (&[(1, 10), (2, 30), (3, 20)], 30, 60),
            (&[(1, 10), (2, 10), (1, 10), (2, 10)], 20, 40),
            (&[(2, 10), (1, 10)], 20, 20),
        ] {
            assert_eq!(times(turns), (elapsed, work), "{turns:?}");
        }
    }

    #[test]
    fn work_of_each_cpu_is_reported_by_its_number_and_reset() {
        let mut clock = Clock::new(100, None);
        run(&mut clock, &[(9, 1), (5, 2), (9, 4)]);

        let time = clock.take();

        let cpu = |cpu, work, rounds| CpuTime { cpu, work, rounds };
        assert_eq!(time.cpus, [cpu(0, 2, 1), cpu(1, 5, 2)]);
        assert_eq!(time.rounds, 2);
        assert_eq!((clock.take().elapsed, clock.take().cpus), (0, Vec::new()));
        assert_eq!(clock.numbers(), [(0, 1), (1, 0)].into());
    }

    #[test]
    fn the_row_of_the_current_cpu_outlasts_a_segment() {
        let mut clock = Clock::new(100, None);
        run(&mut clock, &[(9, 1), (5, 2)]);

        let before = clock.current_row();
        clock.take();

        assert_eq!((before, clock.current_row()), (1, 1));
    }

    #[test]
    fn a_cpu_that_can_run_without_a_turn_is_starved() {
        let mut clock = Clock::new(100, None);
        run(&mut clock, &[(1, 10), (2, 10)]);
        run(&mut clock, &[(1, 100); 8]);
        run(&mut clock, &[(2, 10)]);

        assert_eq!(clock.take().starved, 9);
    }

    #[test]
    fn a_cpu_without_any_further_turn_is_starved() {
        let mut clock = Clock::new(100, None);
        run(&mut clock, &[(1, 10), (2, 10)]);
        run(&mut clock, &[(1, 100); 8]);

        assert_eq!(clock.take().starved, 9);
    }

    #[test]
    fn a_halted_cpu_is_not_starved() {
        let mut clock = Clock::new(100, None);
        clock.execute(CpuKey(2), block(10, true));
        run(&mut clock, &[(1, 700), (2, 10)]);

        assert_eq!(clock.take().starved, 1, "CPU 1 waits for CPU 2");
    }
}
