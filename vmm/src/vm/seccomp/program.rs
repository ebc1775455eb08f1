// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The BPF program of a filter, a binary search by the number of the system call
//! (`Documentation/userspace-api/seccomp_filter.rst`), compiled when the crate is built.
//!
//! The kernel evaluates a new filter for each number of a system call, to learn which ones it allows
//! whatever their arguments. `seccompiler` compares the number with each allowed one, in a chain of
//! two instructions each; a search needs five on average. The kernel also translates each
//! instruction, in several passes: all jumps share the two instructions that end the program.
//!
//! In constants, an index beyond an array's end or a panic fails the build: a filter that is too long
//! does not compile.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "numbers of calls and lengths are below the sizes of the arrays that they index"
)]

use seccompiler::sock_filter;

/// Offsets of the fields of `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;

/// Argument of a call, by the offset of its low half on a little-endian machine.
#[derive(Debug, Clone, Copy)]
pub enum Argument {
    First = 16,
    Second = 24,
}

#[cfg(target_arch = "aarch64")]
const THIS_ARCHITECTURE: u32 = 0xc000_00b7; // AUDIT_ARCH_AARCH64
#[cfg(target_arch = "x86_64")]
const THIS_ARCHITECTURE: u32 = 0xc000_003e; // AUDIT_ARCH_X86_64

/// Number of a call, one of its arguments, and some values of it.
pub type ArgumentValues = (i64, Argument, &'static [u32]);

/// Action of a filter for a system call.
#[derive(Debug, Clone, Copy)]
enum Action {
    /// Raises SIGSYS.
    Trap,
    Allow,
    /// Allows some values of the low half of an argument.
    AllowValues(Argument, &'static [u32]),
    /// Allows all other values of the low half of an argument.
    ForbidValues(Argument, &'static [u32]),
}

/// Actions of a filter for all system calls, by their numbers. Without an action, a call raises SIGSYS.
#[derive(Debug, Clone)]
pub struct Actions([Action; Self::CALLS]);

impl Actions {
    /// One more than the largest number of a call that can have an action.
    pub const CALLS: usize = 512;

    /// No call is allowed.
    pub const NONE: Self = Self([Action::Trap; Self::CALLS]);

    pub const fn allow(&mut self, call: i64) {
        self.0[call as usize] = Action::Allow;
    }

    /// Allows a call with some values of an argument, unless it is allowed with all.
    pub const fn allow_values(&mut self, (call, argument, values): ArgumentValues) {
        if let Action::Trap = self.0[call as usize] {
            self.0[call as usize] = Action::AllowValues(argument, values);
        }
    }

    /// Forbids some values of an argument of an allowed call.
    pub const fn forbid_values(&mut self, (call, argument, values): ArgumentValues) {
        if let Action::Allow = self.0[call as usize] {
            self.0[call as usize] = Action::ForbidValues(argument, values);
        }
    }

    #[cfg(test)]
    pub fn forbid(&mut self, call: i64) {
        self.0[usize::try_from(call).unwrap()] = Action::Trap;
    }

    /// Returns whether a call is allowed with most arguments.
    #[cfg(test)]
    pub fn allows(&self, call: i64) -> bool {
        let action = self.0[usize::try_from(call).unwrap()];
        matches!(action, Action::Allow | Action::ForbidValues(..))
    }

    /// Returns whether a call has the same action as the one before it.
    const fn continues(&self, call: usize) -> bool {
        matches!(
            (self.0[call - 1], self.0[call]),
            (Action::Trap, Action::Trap) | (Action::Allow, Action::Allow)
        )
    }
}

/// The program of a filter.
#[derive(Debug, Clone)]
pub struct Program {
    instructions: [sock_filter; Self::MAX_LENGTH],
    length: usize,
}

/// Distances of jumps to the two instructions at the end of a program, until their place is known.
const TO_TRAP: u8 = 254;
const TO_ALLOW: u8 = 255;

impl Program {
    /// So all distances are below those of the end.
    const MAX_LENGTH: usize = TO_TRAP as usize;

    pub const fn compile(actions: &Actions) -> Self {
        let mut program = Self { instructions: [const { end(0) }; Self::MAX_LENGTH], length: 0 };
        program.push(load(ARCHITECTURE));
        program.push(jump(libc::BPF_JEQ, THIS_ARCHITECTURE, 1, 0));
        program.push(end(libc::SECCOMP_RET_KILL_PROCESS));
        program.push(load(NUMBER));

        // The first number of each range of calls with the same action; the last range has no end.
        let mut starts = [0; Actions::CALLS + 1];
        let mut ranges = 1;
        let mut call = 1;
        while call < Actions::CALLS {
            if !actions.continues(call) {
                starts[ranges] = call;
                ranges += 1;
            }
            call += 1;
        }
        assert!(matches!(actions.0[Actions::CALLS - 1], Action::Trap));
        program.push_search(actions, starts.split_at(ranges).0, Actions::CALLS);
        program.push_ends();
        program
    }

    pub const fn as_slice(&self) -> &[sock_filter] {
        self.instructions.split_at(self.length).0
    }

    const fn push(&mut self, instruction: sock_filter) {
        self.instructions[self.length] = instruction;
        self.length += 1;
    }

    /// Adds the search in the ranges that begin at `starts`, the last one before `end`, by the number in
    /// the accumulator. Each comparison halves the numbers, not the ranges: the kernel evaluates all
    /// numbers once.
    const fn push_search(&mut self, actions: &Actions, starts: &[usize], end: usize) {
        if starts.len() == 1 {
            return self.push_arguments(actions.0[starts[0]]);
        }
        let half = usize::midpoint(starts[0], end);
        let mut middle = 1;
        while middle + 1 < starts.len() && starts[middle + 1] <= half {
            middle += 1;
        }
        let (low, high) = starts.split_at(middle);
        let at = self.length;
        self.push(jump(libc::BPF_JGE, high[0] as u32, 0, 0));
        self.instructions[at].jf = self.push_branch(actions, low, high[0], at);
        self.instructions[at].jt = self.push_branch(actions, high, end, at);
    }

    /// Adds the search in some ranges for the jump at `at`, unless one of the ends is its result.
    /// Returns the distance of the jump.
    const fn push_branch(
        &mut self,
        actions: &Actions,
        starts: &[usize],
        end: usize,
        at: usize,
    ) -> u8 {
        match actions.0[starts[0]] {
            Action::Trap if starts.len() == 1 => TO_TRAP,
            Action::Allow if starts.len() == 1 => TO_ALLOW,
            _ => {
                let distance = (self.length - at - 1) as u8;
                self.push_search(actions, starts, end);
                distance
            }
        }
    }

    const fn push_arguments(&mut self, action: Action) {
        match action {
            // The end of a program without an allowed call, which follows.
            Action::Trap => {}
            Action::Allow => panic!("jumps lead to this end"),
            Action::AllowValues(argument, values) => {
                self.push_choice(argument, values, TO_ALLOW, TO_TRAP);
            }
            Action::ForbidValues(argument, values) => {
                self.push_choice(argument, values, TO_TRAP, TO_ALLOW);
            }
        }
    }

    /// Adds jumps `of_values` for some values of an argument, and `otherwise`.
    const fn push_choice(
        &mut self,
        argument: Argument,
        values: &[u32],
        of_values: u8,
        otherwise: u8,
    ) {
        assert!(!values.is_empty(), "the last comparison has the jump to the other end");
        self.push(load(argument as u32));
        let mut index = 0;
        while index < values.len() {
            // The next comparison follows.
            let other = if index + 1 < values.len() { 0 } else { otherwise };
            self.push(jump(libc::BPF_JEQ, values[index], of_values, other));
            index += 1;
        }
    }

    /// Adds the two ends, and sets the distances of the jumps to them.
    const fn push_ends(&mut self) {
        let trap = self.length;
        self.push(end(libc::SECCOMP_RET_TRAP));
        self.push(end(libc::SECCOMP_RET_ALLOW));
        let mut at = 0;
        while at < trap {
            let jump = &mut self.instructions[at];
            let trap = (trap - at - 1) as u8;
            (jump.jt, jump.jf) = (resolve(jump.jt, trap), resolve(jump.jf, trap));
            at += 1;
        }
    }
}

/// Returns the distance of a jump, where the end [`TO_TRAP`] is `trap` away and the other one follows.
const fn resolve(distance: u8, trap: u8) -> u8 {
    match distance {
        TO_TRAP => trap,
        TO_ALLOW => trap + 1,
        distance => distance,
    }
}

const fn load(offset: u32) -> sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset)
}

const fn jump(condition: u32, value: u32, if_true: u8, if_false: u8) -> sock_filter {
    instruction(libc::BPF_JMP | condition | libc::BPF_K, if_true, if_false, value)
}

const fn end(result: u32) -> sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, 0, 0, result)
}

/// Codes of BPF have 16 bits.
const fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule,
    };

    use super::*;

    const ARGUMENTS: &[u32] = &[7, 0x402c_542b];

    /// Executes a program for a call whose first argument is 0. Returns its result and the number of
    /// executed instructions.
    fn execute(program: &[sock_filter], call: u32, argument: u64) -> (u32, usize) {
        let (mut at, mut accumulator, mut executed) = (0, 0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            executed += 1;
            let jumps = match code {
                0x06 => return (k, executed),
                0x20 => {
                    accumulator = match k {
                        0 => call,
                        4 => THIS_ARCHITECTURE,
                        16 => 0,
                        24 => u32::try_from(argument & 0xffff_ffff).unwrap(),
                        offset => panic!("offset {offset}"),
                    };
                    continue;
                }
                0x05 => {
                    at += k as usize;
                    continue;
                }
                0x15 => accumulator == k,
                0x35 => accumulator >= k,
                code => panic!("code {code:#x}"),
            };
            at += usize::from(if jumps { jt } else { jf });
        }
    }

    /// Returns the program of seccompiler for the same calls.
    fn chain(calls: &BTreeSet<u32>, restricted: &[(u32, &'static [u32])]) -> BpfProgram {
        let rule = |value: &u32| {
            let (length, is) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Eq);
            let condition = SeccompCondition::new(1, length, is, (*value).into()).unwrap();
            SeccompRule::new(vec![condition]).unwrap()
        };
        let restricted =
            restricted.iter().map(|(call, values)| (*call, values.iter().map(rule).collect()));
        let rules = restricted.chain(calls.iter().map(|call| (*call, Vec::new())));
        let rules = rules.map(|(call, rules)| (i64::from(call), rules)).collect();
        let architecture = std::env::consts::ARCH.try_into().unwrap();
        let filter =
            SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, architecture);
        filter.unwrap().try_into().unwrap()
    }

    #[test]
    fn a_search_decides_as_the_chain_of_seccompiler() {
        // 120 calls, alone and in ranges, the first and neighbours with and without restrictions.
        let calls: BTreeSet<u32> = (0..300).filter(|call| call * call % 7 < 2).collect();
        let restricted: [(u32, &[u32]); 4] =
            [(0, ARGUMENTS), (2, ARGUMENTS), (5, &[9]), (400, &[1, 2, 3])];
        let mut actions = Actions::NONE;
        calls.iter().for_each(|call| actions.allow((*call).into()));
        for (call, values) in restricted {
            actions.allow_values((call.into(), Argument::Second, values));
        }
        let search = Program::compile(&actions);
        let (search, chain) = (search.as_slice(), chain(&calls, &restricted));

        for call in (0..500).chain([0x4000_0000, u32::MAX]) {
            for argument in [0, 1, 3, 7, 9, 1 << 32 | 7, 0x402c_542b] {
                let (result, executed) = execute(search, call, argument);
                assert_eq!(result, execute(&chain, call, argument).0, "{call} {argument:#x}");
                assert!(executed <= 20, "{executed} instructions for {call}");
            }
        }
    }

    #[test]
    fn forbidden_arguments_of_an_allowed_call_end_the_process() {
        let mut actions = Actions::NONE;
        actions.forbid_values((3, Argument::Second, ARGUMENTS));
        actions.allow(4);
        actions.forbid_values((4, Argument::Second, ARGUMENTS));
        let program = Program::compile(&actions);
        let result = |call, argument| execute(program.as_slice(), call, argument).0;

        assert_eq!(result(3, 1), libc::SECCOMP_RET_TRAP);
        assert_eq!(result(4, 1), libc::SECCOMP_RET_ALLOW);
        for argument in [7, 0x402c_542b, 1 << 32 | 7] {
            assert_eq!(result(4, argument), libc::SECCOMP_RET_TRAP, "{argument:#x}");
        }
    }

    #[test]
    fn a_value_of_the_first_argument_decides() {
        let mut actions = Actions::NONE;
        actions.allow_values((3, Argument::First, &[0]));
        actions.allow_values((4, Argument::First, &[7]));
        let program = Program::compile(&actions);

        assert_eq!(execute(program.as_slice(), 3, 7).0, libc::SECCOMP_RET_ALLOW);
        assert_eq!(execute(program.as_slice(), 4, 7).0, libc::SECCOMP_RET_TRAP);
    }

    #[test]
    fn another_architecture_ends_the_process() {
        let program = Program::compile(&Actions::NONE);

        assert_eq!(
            program.as_slice()[..3],
            [load(4), jump(libc::BPF_JEQ, THIS_ARCHITECTURE, 1, 0), end(1 << 31)]
        );
    }
}
