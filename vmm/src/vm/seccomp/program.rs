// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The BPF program of a filter, a binary search by the number of the system call
//! (`Documentation/userspace-api/seccomp_filter.rst`).
//!
//! The kernel evaluates a new filter for each number of a system call, to learn which ones it allows
//! whatever their arguments. `seccompiler` compares the number with each allowed one, in a chain of
//! two instructions each; a search needs eight comparisons.

use std::collections::BTreeSet;

use seccompiler::{BpfProgram, sock_filter};

/// Offsets of the fields of `struct seccomp_data`: number, architecture, and the low half of the second
/// argument on a little-endian machine.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const SECOND_ARGUMENT: u32 = 24;

#[cfg(target_arch = "aarch64")]
const THIS_ARCHITECTURE: u32 = 0xc000_00b7; // AUDIT_ARCH_AARCH64
#[cfg(target_arch = "x86_64")]
const THIS_ARCHITECTURE: u32 = 0xc000_003e; // AUDIT_ARCH_X86_64

/// Action of a filter for a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Raises SIGSYS.
    Trap,
    Allow,
    /// Allows some values of the low half of the second argument.
    AllowSecondArgument(&'static [u32]),
}

/// Returns the program that allows `calls`, and those of `restricted` with certain values of their second
/// argument.
pub fn compile(calls: &BTreeSet<u32>, restricted: &[(u32, &'static [u32])]) -> BpfProgram {
    let restricted = restricted.iter().filter(|(call, _)| !calls.contains(call));
    let restricted = restricted.map(|&(call, values)| (call, Action::AllowSecondArgument(values)));
    let mut actions: Vec<_> =
        calls.iter().map(|&call| (call, Action::Allow)).chain(restricted).collect();
    actions.sort_unstable_by_key(|(call, _)| *call);

    let mut program = vec![
        load(ARCHITECTURE),
        jump(libc::BPF_JEQ, THIS_ARCHITECTURE, 1, 0),
        end(libc::SECCOMP_RET_KILL_PROCESS),
        load(NUMBER),
    ];
    append_search(&ranges(&actions), &mut program);
    program
}

/// Returns the first number of each range of system calls with the same action, from 0 on.
fn ranges(actions: &[(u32, Action)]) -> Vec<(u32, Action)> {
    let mut ranges = vec![(0, Action::Trap)];
    for &(call, action) in actions {
        match ranges.last_mut() {
            // The range of the call before it.
            Some((start, last)) if *start == call => *last = action,
            _ => ranges.push((call, action)),
        }
        ranges.push((call + 1, Action::Trap));
    }
    ranges.dedup_by_key(|(_, action)| *action);
    ranges
}

/// Appends the search in `ranges`, at least one, by the number in the accumulator.
fn append_search(ranges: &[(u32, Action)], program: &mut BpfProgram) {
    if let [(_, action)] = ranges {
        return append_action(*action, program);
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let at = program.len();
    program.push(jump(libc::BPF_JGE, high[0].0, 0, 0));
    append_search(low, program);
    let distance = program.len() - at - 1;
    program[at].jt = u8::try_from(distance).expect("half a search is shorter than 256");
    append_search(high, program);
}

fn append_action(action: Action, program: &mut BpfProgram) {
    match action {
        Action::Trap => program.push(end(libc::SECCOMP_RET_TRAP)),
        Action::Allow => program.push(end(libc::SECCOMP_RET_ALLOW)),
        Action::AllowSecondArgument(values) => {
            program.push(load(SECOND_ARGUMENT));
            for value in values {
                program.push(jump(libc::BPF_JEQ, *value, 0, 1));
                program.push(end(libc::SECCOMP_RET_ALLOW));
            }
            program.push(end(libc::SECCOMP_RET_TRAP));
        }
    }
}

fn load(offset: u32) -> sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset)
}

fn jump(condition: u32, value: u32, if_true: u8, if_false: u8) -> sock_filter {
    instruction(libc::BPF_JMP | condition | libc::BPF_K, if_true, if_false, value)
}

fn end(result: u32) -> sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, 0, 0, result)
}

#[allow(clippy::cast_possible_truncation, reason = "codes of BPF have 16 bits")]
fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

#[cfg(test)]
mod tests {
    use seccompiler::{
        SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    };

    use super::*;

    const ARGUMENTS: &[u32] = &[7, 0x402c_542b];

    /// Executes a program. Returns its result and the number of executed instructions.
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
        let (search, chain) = (compile(&calls, &restricted), chain(&calls, &restricted));

        for call in (0..500).chain([0x4000_0000, u32::MAX]) {
            for argument in [0, 1, 3, 7, 9, 1 << 32 | 7, 0x402c_542b] {
                let (result, executed) = execute(&search, call, argument);
                assert_eq!(result, execute(&chain, call, argument).0, "{call} {argument:#x}");
                assert!(executed <= 20, "{executed} instructions for {call}");
            }
        }
    }

    #[test]
    fn another_architecture_ends_the_process() {
        let program = compile(&BTreeSet::from([1]), &[]);

        assert_eq!(
            program[..3],
            [load(4), jump(libc::BPF_JEQ, THIS_ARCHITECTURE, 1, 0), end(1 << 31)]
        );
    }
}
