// SPDX-License-Identifier: GPL-2.0-or-later
//! Elapsed time of CPUs that run in parallel, computed from their turns in one thread.
//!
//! Under `-icount` one thread of QEMU runs the CPUs by ascending number, each until a timer's
//! deadline. The clock ends a CPU's turn after a *quantum* of virtual time, so that in each *round*
//! every CPU that can run has a turn of the same length, to within a block of code. The turns of
//! a round count as parallel:
//!
//! ```text
//! elapsed = sum over rounds of (the longest turn of any CPU in that round)
//! work    = sum over all turns
//! ```
//!
//! With a seed, the turn length varies from round to round between 0.5 and 1.5 quanta, so that CPUs
//! that repeat the same code do not synchronise with their turns.
//!
//! A CPU is identified by its [key](CpuKey), which increases with the CPU's number; a round ends
//! when the key decreases. Consecutive turns of a CPU that runs alone count as one. A CPU that
//! spins with `WFE` or `YIELD` yields the rest of its turn: the round is as long as the turn of the
//! CPU that it waits for. A CPU that spins with loads uses its whole turn, as on hardware.
//!
//! A CPU that acquires a lock in the round of its release counts as parallel to the previous holder
//! in that round. The quantum must therefore be shorter than the work between lock handovers.
//!
//! Elapsed time is meaningless if a CPU that can run gets no turn: [`VirtualTime::longest_wait`] is
//! the longest wait of such a CPU, in turns of the other CPUs.

use std::{collections::BTreeMap, mem};

use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng as _, SeedableRng as _},
};
use serde::Serialize;

use crate::costs::CostTable;

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
    /// Indicates that the last instruction may stop the CPU from running: `WFI`, `HVC`, `SMC`.
    pub may_halt: bool,
}

impl Block {
    const INSTRUCTION_BITS: u32 = 15;

    /// Packs the block into a word for a callback; a cost of 2^48 ps or more is truncated.
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

/// Virtual time of a segment, in picoseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct VirtualTime {
    /// Sum of the longest turns of all rounds.
    pub elapsed: u64,
    /// Sum of all turns.
    pub work: u64,
    /// Number of rounds.
    pub rounds: u64,
    /// Maximum number of turns of other CPUs while a CPU that could run had none. A turn of a whole
    /// quantum counts twice: at its end, and at the start of the next CPU.
    #[serde(rename = "starved")]
    pub longest_wait: u64,
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
    /// Turn count of the machine when this CPU's last turn ended.
    last_turn: u64,
    /// Number of cache lines with a `DC` since its last `DSB`.
    dc_lines: u64,
}

impl Cpu {
    /// Returns the number of turns since this CPU's last one if it can run; `now` counts all turns.
    /// CPUs share the key 0 until the kernel sets their keys.
    fn turns_waited(&self, now: u64) -> u64 {
        let can_run = !self.may_halt && self.key != CpuKey(0);
        if can_run { now - self.last_turn } else { 0 }
    }
}

/// CPU that executed the last atomic operation on each cache line.
#[derive(Debug)]
struct LineOwners(Box<[(u64, usize)]>);

impl Default for LineOwners {
    fn default() -> Self {
        Self(vec![(u64::MAX, 0); 1 << 14].into())
    }
}

impl LineOwners {
    /// Records an operation; returns whether another CPU executed the previous one on the line.
    /// Lines with equal low address bits evict each other.
    fn record(&mut self, address: u64, row: usize) -> bool {
        let line = address / 64;
        let place = line as usize % self.0.len();
        let (last_line, last_row) = mem::replace(&mut self.0[place], (line, row));
        last_line == line && last_row != row
    }
}

/// The clock of the machine.
#[derive(Debug, Default)]
pub struct Clock {
    /// CPUs, sorted by key.
    cpus: Vec<Cpu>,
    /// Average turn length.
    quantum: u64,
    /// Turn length of this round.
    turn_length: u64,
    /// Generator of turn lengths, if they vary.
    length_generator: Option<SplitMix64>,
    /// Index of the CPU whose turn it is.
    current_cpu: Option<usize>,
    turn_cost: u64,
    /// Value of `turn_cost` when the end of the turn was last requested.
    end_requested_at: u64,
    longest_turn: u64,
    /// Number of turns of the machine.
    turn_count: u64,
    owners: LineOwners,
    time: VirtualTime,
}

impl Clock {
    /// Returns a clock with turns of `quantum` picoseconds, which vary if there is a seed.
    pub fn new(quantum: u64, seed: Option<u64>) -> Self {
        let length_generator = seed.map(SplitMix64::seed_from_u64);
        Self { quantum, turn_length: quantum, length_generator, ..Self::default() }
    }

    /// Accounts a block that a CPU begins to execute; returns whether its turn ends with the block.
    pub fn account_block(&mut self, key: CpuKey, block: Block) -> bool {
        let current = match self.current_cpu {
            Some(current) if self.cpus[current].key == key => current,
            _ => self.begin_turn(key),
        };
        self.turn_cost += block.cost;
        self.cpus[current].may_halt = block.may_halt;
        let ends = self.turn_cost - self.end_requested_at >= self.turn_length;
        if ends {
            self.end_requested_at = self.turn_cost;
            self.turn_count += 1;
        }
        ends
    }

    /// Accounts a `DC` of one cache line to the current CPU.
    pub fn account_dc_line(&mut self, costs: &CostTable) {
        let Some(current) = self.current_cpu else { return };
        let lines = &mut self.cpus[current].dc_lines;
        self.turn_cost += costs.dc_line_cost(*lines);
        *lines += 1;
    }

    /// Ends the current CPU's range of `DC` lines at a `DSB`.
    pub fn end_dc_range(&mut self) {
        if let Some(current) = self.current_cpu {
            self.cpus[current].dc_lines = 0;
        }
    }

    /// Accounts the write of an atomic operation at `address` to the current CPU, in addition to the
    /// operation's fixed cost.
    pub fn account_atomic_write(&mut self, address: u64, costs: &CostTable) {
        if self.owners.record(address, self.current_row()) {
            self.turn_cost += costs.shared_line_cost();
        }
    }

    /// Ends the segment and returns its times.
    pub fn end_segment(&mut self) -> VirtualTime {
        let current = self.current_cpu;
        self.end_turn();
        self.end_round();
        self.current_cpu = current;
        let waits = self.cpus.iter().map(|cpu| cpu.turns_waited(self.turn_count));
        self.time.longest_wait = waits.fold(self.time.longest_wait, u64::max);
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
    pub fn cpu_of_row(&self) -> BTreeMap<usize, usize> {
        self.cpus.iter().enumerate().map(|(number, cpu)| (cpu.row, number)).collect()
    }

    /// Returns the row of counts of the CPU whose turn it is.
    pub fn current_row(&self) -> usize {
        self.current_cpu.map_or(0, |current| self.cpus[current].row)
    }

    fn begin_turn(&mut self, key: CpuKey) -> usize {
        let last = self.current_cpu.map(|current| self.cpus[current].key);
        self.end_turn();
        if last.is_some_and(|last| key < last) {
            self.end_round();
        }
        let index = match self.cpus.binary_search_by_key(&key, |cpu| cpu.key) {
            Ok(index) => index,
            Err(index) => {
                let row = self.cpus.len();
                let last_turn = self.turn_count;
                let cpu =
                    Cpu { key, row, work: 0, rounds: 0, may_halt: true, last_turn, dc_lines: 0 };
                self.cpus.insert(index, cpu);
                index
            }
        };
        self.time.longest_wait =
            self.time.longest_wait.max(self.cpus[index].turns_waited(self.turn_count));
        self.current_cpu = Some(index);
        index
    }

    fn end_turn(&mut self) {
        let Some(current) = self.current_cpu.take() else { return };
        let turn = mem::take(&mut self.turn_cost);
        self.end_requested_at = 0;
        let cpu = &mut self.cpus[current];
        cpu.work += turn;
        cpu.rounds += u64::from(turn > 0);
        self.turn_count += 1;
        cpu.last_turn = self.turn_count;
        self.time.work += turn;
        self.longest_turn = self.longest_turn.max(turn);
    }

    fn end_round(&mut self) {
        let longest = mem::take(&mut self.longest_turn);
        if longest > 0 {
            self.time.elapsed += longest;
            self.time.rounds += 1;
            if let Some(lengths) = &mut self.length_generator {
                self.turn_length = self.quantum / 2 + lengths.next_u64() % (self.quantum + 1);
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

    /// Executes turns, each given as CPU and cost.
    fn run(clock: &mut Clock, turns: &[(u64, u64)]) {
        for (cpu, cost) in turns {
            clock.account_block(CpuKey(*cpu), block(*cost, false));
        }
    }

    /// Returns elapsed time and work of turns.
    fn times(turns: &[(u64, u64)]) -> (u64, u64) {
        let mut clock = Clock::new(100, None);
        run(&mut clock, turns);
        let time = clock.end_segment();
        (time.elapsed, time.work)
    }

    #[test]
    fn a_packed_block_unpacks_unchanged() {
        for whole in [block(512, true), block(1, false), Block { cost: 1 << 40, ..block(7, true) }]
        {
            assert_eq!(Block::unpack(whole.pack()), whole);
        }
    }

    #[test]
    fn a_turn_ends_after_each_quantum() {
        let mut clock = Clock::new(100, None);

        let ends = [60, 60, 60, 60, 10, 100]
            .map(|cost| clock.account_block(CpuKey(1), block(cost, false)));

        assert_eq!(ends, [false, true, false, true, false, true]);
        assert_eq!(clock.end_segment().elapsed, 350);
    }

    #[test]
    fn with_a_seed_turns_vary_by_half_a_quantum_and_repeat() {
        let lengths = |seed| -> Vec<u64> {
            let mut clock = Clock::new(100, Some(seed));
            let turns = (0..1000).map(|_| {
                run(&mut clock, &[(1, 1), (2, 1)]);
                clock.end_round();
                clock.turn_length
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
    fn a_dc_line_costs_more_in_a_long_range() {
        let mut costs = CostTable::default();
        for cost in ["dc_line:1", "dc_long:10"] {
            costs.set(cost).unwrap();
        }
        let mut clock = Clock::new(1_000_000, None);

        for cpu in [1, 2] {
            run(&mut clock, &[(cpu, 0)]);
            for lines in [SHORT_RANGE + 3, 1] {
                (0..lines).for_each(|_| clock.account_dc_line(&costs));
                clock.end_dc_range();
            }
        }

        let work: Vec<u64> = clock.end_segment().cpus.iter().map(|cpu| cpu.work).collect();
        assert_eq!(work, [SHORT_RANGE + 30 + 1; 2]);
    }

    #[test]
    fn an_atomic_operation_costs_more_if_the_line_was_another_cpus() {
        let mut costs = CostTable::default();
        costs.set("atomic:1").unwrap();
        costs.set("atomic_shared:100").unwrap();
        let mut clock = Clock::new(1_000_000, None);

        for (cpu, address) in [(1, 0), (1, 63), (2, 64), (2, 8), (2, 8), (1, 8)] {
            run(&mut clock, &[(cpu, 0)]);
            clock.account_atomic_write(address, &costs);
        }

        assert_eq!(clock.end_segment().work, 2 * 99);
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

        let time = clock.end_segment();

        let cpu = |cpu, work, rounds| CpuTime { cpu, work, rounds };
        assert_eq!(time.cpus, [cpu(0, 2, 1), cpu(1, 5, 2)]);
        assert_eq!(time.rounds, 2);
        assert_eq!((clock.end_segment().elapsed, clock.end_segment().cpus), (0, Vec::new()));
        assert_eq!(clock.cpu_of_row(), [(0, 1), (1, 0)].into());
    }

    #[test]
    fn the_current_row_stays_valid_after_a_segment_ends() {
        let mut clock = Clock::new(100, None);
        run(&mut clock, &[(9, 1), (5, 2)]);

        let before = clock.current_row();
        clock.end_segment();

        assert_eq!((before, clock.current_row()), (1, 1));
    }

    #[test]
    fn the_wait_of_a_runnable_cpu_is_measured_with_and_without_a_later_turn() {
        for later in [&[(2, 10)][..], &[]] {
            let mut clock = Clock::new(100, None);
            run(&mut clock, &[(1, 10), (2, 10)]);
            run(&mut clock, &[(1, 100); 8]);
            run(&mut clock, later);

            assert_eq!(clock.end_segment().longest_wait, 9);
        }
    }

    #[test]
    fn a_halted_cpu_does_not_wait() {
        let mut clock = Clock::new(100, None);
        clock.account_block(CpuKey(2), block(10, true));
        run(&mut clock, &[(1, 700), (2, 10)]);

        assert_eq!(clock.end_segment().longest_wait, 1, "CPU 1 waits for CPU 2");
    }
}
