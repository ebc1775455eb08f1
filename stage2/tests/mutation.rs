// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mutation tests of the engine with one operation omitted, weakened, shortened, misplaced or
//! delayed. The checker must report the mutation.
//!
//! A fixed scenario exercises every function of the engine. The first run records the [`Effect`] of
//! each operation on the checker's state. Then the scenario runs once for each operation and
//! [`Mutation`]. It skips operations without effect, whose omission is harmless.
//!
//! The checker does not report these mutations, each of which is harmless:
//!
//! - `DC CIVAC`: 6.12 cleans and invalidates a block's memory inside the break-before-make window
//!   although the memory has been clean since it was first mapped.
//! - `IC`: the whole I-cache is invalidated; its stale lines belong to other memory.
//! - `Ish` missing or weaker, `Tlbi All` late: 6.12's CMOs inside the window end with their own DSB
//!   before the make, which completes the invalidation too.
//! - `Ish` late: it is swapped with a store that links an empty table or writes another entry.
//! - `DC CIVAC` late: it is swapped with the DSB of another range of the same operation; the DSB of
//!   the last range completes both.
//! - `IshSt` weaker: it precedes a broadcast for relaxed permissions. Only the faulting CPU must
//!   invalidate the old entry, and that CPU made the change itself.
//! - `Tlbi Ipa`, `IshSt` late: they are swapped with the invalidation of another page of the same
//!   batch. A DSB after all of them completes the first; the other page was invalidated earlier,
//!   with its contiguous run.
//! - `Tlbi Ipa` missing, local or misplaced, in 6.12 with the series: the same batch unmaps a
//!   table whose entry begins at the same address. The invalidation of that entry has no TTL hint,
//!   so it also covers the leaf.
//! - `Tlbi Range` shorter: no page is mapped in the second half of the range.
#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    sync::Mutex,
};

use granule_stage2::{
    Access, BbmLevel, Features, Ipa, Operations, Policy,
    check::{Call, Checker, Effect, Hook, HookedOperations, Recorder, Reply},
    descriptor::EntryKind,
    geometry::Level,
    operations::{Dsb, Order, Scope, Tlbi, Vmid},
};
use support::{
    BLOCK, PAGE, PoolOps, VMID,
    test_vm::{TestVcpu, TestVm},
};

/// A defect to inject into an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mutation {
    Drop,
    /// Limits the operation to this CPU, or to stores.
    Weaken,
    /// Covers a shorter range.
    Shorten,
    /// Affects another address.
    Misplace,
    /// Moves the operation after the next one.
    Delay,
}

const MUTATIONS: [Mutation; 5] =
    [Mutation::Drop, Mutation::Weaken, Mutation::Shorten, Mutation::Misplace, Mutation::Delay];

#[derive(Debug, Default)]
struct Mutator {
    /// The index of the operation to mutate, and the mutation; `None` to record `effects` instead.
    target: Option<(u64, Mutation)>,
    next_index: Cell<u64>,
    delayed_call: Cell<Option<Call>>,
    /// The effect of each operation in a run without a mutation.
    effects: RefCell<Vec<Effect>>,
    /// The mutated operation; `None` if this mutation does not apply to it.
    mutated_call: RefCell<Option<String>>,
}

impl Mutator {
    fn new(target: Option<(u64, Mutation)>) -> Self {
        Self { target, ..Self::default() }
    }

    fn next_mutation(&self) -> Option<Mutation> {
        let index = self.next_index.replace(self.next_index.get() + 1);
        let (target, mutation) = self.target?;
        (target == index).then_some(mutation)
    }

    /// Records the effect of an operation. The checker does not determine the effects of deferred
    /// frees, reference counts and VMID switches, so these calls always count.
    fn record_effect(&self, call: Call, of_checker: Effect) {
        let counts = matches!(
            call,
            Call::DeferFree(_)
                | Call::TakeReferences(..)
                | Call::DropReferences(..)
                | Call::SwitchVmid(_)
        );
        self.effects.borrow_mut().push(Effect {
            exists: of_checker.exists || counts,
            is_strong: of_checker.is_strong || counts,
        });
    }

    fn mutate<O: Operations>(&self, inner: &O, call: Call, mutation: Mutation) -> Reply {
        let hit = || *self.mutated_call.borrow_mut() = Some(operation_name(call));
        match mutation {
            Mutation::Delay if is_delayable(call) => {
                hit();
                self.delayed_call.set(Some(call));
                Reply::NoValue
            }
            Mutation::Drop if !matches!(call, Call::Store { .. } | Call::DeferFree(_)) => {
                hit();
                match call {
                    Call::DropReferences(table, _) => Reply::Count(inner.references(table)),
                    // Returns the VMID that the engine expects.
                    Call::SwitchVmid(Vmid(0)) => Reply::Vmid(VMID),
                    Call::SwitchVmid(_) => Reply::Vmid(Vmid(0)),
                    _ => Reply::NoValue,
                }
            }
            _ => match mutate_call(call, mutation) {
                Some(wrong) => {
                    hit();
                    wrong.run(inner)
                }
                None => call.run(inner),
            },
        }
    }
}

impl<'a> Hook<Recorder<'a, PoolOps<'a>, Checker>> for &Mutator {
    fn call(&self, inner: &Recorder<'a, PoolOps<'a>, Checker>, call: Call) -> Reply {
        let reply = if !is_mutable(call) {
            call.run(inner)
        } else if let Some(mutation) = self.next_mutation() {
            return self.mutate(inner, call, mutation);
        } else {
            let reply = call.run(inner);
            if self.target.is_none() {
                self.record_effect(call, inner.sink().effect());
            }
            reply
        };
        let ends_delay = is_delayable(call)
            || matches!(call, Call::Store { .. } | Call::CompareExchange { .. } | Call::Free(_));
        if ends_delay && let Some(late) = self.delayed_call.take() {
            late.run(inner);
        }
        reply
    }
}

const fn is_mutable(call: Call) -> bool {
    is_delayable(call)
        || matches!(
            call,
            Call::Store { order: Order::Release, .. }
                | Call::DeferFree(_)
                | Call::TakeReferences(..)
                | Call::DropReferences(..)
                | Call::Isb
                | Call::SwitchVmid(_)
        )
}

const fn is_delayable(call: Call) -> bool {
    matches!(
        call,
        Call::Dsb(_) | Call::Tlbi(_) | Call::CleanInvalidate { .. } | Call::InvalidateICache(_)
    )
}

/// Returns the mutated call, or `None` if the mutation does not apply.
fn mutate_call(mut call: Call, mutation: Mutation) -> Option<Call> {
    match (&mut call, mutation) {
        (Call::Store { order, .. }, Mutation::Weaken) => *order = Order::Plain,
        (Call::DeferFree(unlinked), Mutation::Misplace) => return Some(Call::Free(unlinked.table)),
        (Call::Dsb(kind), Mutation::Weaken) => {
            *kind = match kind {
                Dsb::Ish => Dsb::IshSt,
                Dsb::IshSt | Dsb::Nsh => Dsb::NshSt,
                Dsb::NshSt => return None,
            }
        }
        (Call::Tlbi(kind), _) => *kind = mutate_tlbi(*kind, mutation)?,
        (Call::CleanInvalidate { size, .. }, Mutation::Shorten) => *size -= 64,
        (Call::CleanInvalidate { phys, .. }, Mutation::Misplace) => *phys += 64,
        (Call::InvalidateICache(Some((_, size))), Mutation::Shorten) => *size -= 64,
        _ => return None,
    }
    Some(call)
}

fn mutate_tlbi(mut kind: Tlbi, mutation: Mutation) -> Option<Tlbi> {
    match (&mut kind, mutation) {
        (
            Tlbi::Ipa { scope, .. }
            | Tlbi::Range { scope, .. }
            | Tlbi::Stage1 { scope }
            | Tlbi::All { scope },
            Mutation::Weaken,
        ) if *scope == Scope::Broadcast => *scope = Scope::Local,
        // Stage 1 only.
        (Tlbi::All { scope }, Mutation::Shorten) => return Some(Tlbi::Stage1 { scope: *scope }),
        (Tlbi::Range { size, .. }, Mutation::Shorten) => *size /= 2,
        // A TTL hint one level too high, or without a hint, leaf entries only.
        (Tlbi::Ipa { ttl, leaf_only, .. }, Mutation::Shorten) => match ttl {
            Some(level) => *ttl = level.parent(),
            None => *leaf_only = true,
        },
        (Tlbi::Ipa { ipa, .. } | Tlbi::Range { ipa, .. }, Mutation::Misplace) => {
            *ipa = Ipa(ipa.0 ^ 1 << 33)
        }
        _ => return None,
    }
    Some(kind)
}

fn operation_name(call: Call) -> String {
    let level_2 = Level::new(2).unwrap();
    let name = match call {
        Call::Store { new, .. } if matches!(new.kind(level_2), EntryKind::Table(_)) => {
            "release store of a table or page"
        }
        Call::Store { .. } => "release store of a block",
        Call::DeferFree(_) => "grace period",
        Call::TakeReferences(..) => "reference taken",
        Call::DropReferences(..) => "reference dropped",
        Call::Tlbi(Tlbi::Range { .. }) => "Tlbi Range",
        Call::Tlbi(Tlbi::All { .. }) => "Tlbi All",
        Call::SwitchVmid(_) => "VMID switch",
        Call::CleanInvalidate { .. } => "DC CIVAC",
        Call::InvalidateICache(_) => "IC",
        Call::Dsb(kind) => return format!("{kind:?}"),
        Call::Tlbi(Tlbi::Ipa { scope, .. }) => return format!("Tlbi Ipa {scope:?}"),
        Call::Tlbi(Tlbi::Stage1 { scope }) => return format!("Tlbi Stage1 {scope:?}"),
        _ => return format!("{call:?}"),
    };
    name.to_owned()
}

/// Exercises every function of the engine, alternately on two CPUs.
fn scenario(
    policy: Policy,
    features: Features,
    target: Option<(u64, Mutation)>,
) -> (Checker, Vec<Effect>, Option<String>) {
    let vm = TestVm::new(policy, features, 2, 4);
    let checker = Mutex::new(Checker::new(vm.setup));
    let mutator = Mutator::new(target);
    let [mut a, mut b] = [0, 1]
        .map(|cpu| vm.vcpu_with(cpu, &checker, |inner| HookedOperations { inner, hook: &mutator }));
    write_and_log(&mut a, &mut b);
    reuse_and_unmap(&mut a, &mut b);
    a.finish();
    b.finish();
    let (effects, hit) = (mutator.effects.take(), mutator.mutated_call.take());
    (checker.into_inner().unwrap(), effects, hit)
}

type MutatedVcpu<'a> =
    TestVcpu<'a, HookedOperations<Recorder<'a, PoolOps<'a>, Checker>, &'a Mutator>, Checker>;

/// Accesses memory. If a mutation prevents progress, the violations until then count.
fn try_touch(vcpu: &mut MutatedVcpu<'_>, ipa: u64, access: Access) {
    let _ = vcpu.touch(ipa, access);
}

/// Maps, splits for the dirty log, relaxes, and coalesces when dirty logging stops.
fn write_and_log(a: &mut MutatedVcpu<'_>, b: &mut MutatedVcpu<'_>) {
    try_touch(a, 0, Access::Write);
    try_touch(b, 3 * PAGE, Access::Fetch);
    try_touch(a, 3 * BLOCK, Access::Read);
    try_touch(b, 3 * BLOCK + PAGE, Access::Write);
    try_touch(a, 3 * BLOCK + PAGE, Access::Fetch);
    try_touch(b, BLOCK, Access::Read);
    a.set_logging(true);
    try_touch(a, 5 * PAGE, Access::Write);
    try_touch(b, 5 * PAGE, Access::Write);
    try_touch(b, 6 * PAGE, Access::Write);
    try_touch(a, BLOCK + 9 * PAGE, Access::Write);
    try_touch(a, BLOCK + 9 * PAGE, Access::Fetch);
    b.read_log();
    try_touch(a, 5 * PAGE, Access::Write);
    b.unmap(7 * PAGE, PAGE);
    try_touch(b, 2 * BLOCK, Access::Write);
    a.split(2);
    b.read_log();
    a.set_logging(false);
    try_touch(b, 8 * PAGE, Access::Read);
    try_touch(a, 7 * PAGE, Access::Fetch);
    try_touch(a, BLOCK + 3 * PAGE, Access::Write);
}

/// Reuses memory, and changes single pages of a contiguous run.
fn reuse_and_unmap(a: &mut MutatedVcpu<'_>, b: &mut MutatedVcpu<'_>) {
    b.host_write(2 * BLOCK, 64);
    b.remove_memory(0);
    try_touch(a, 0, Access::Write);
    b.unmap(3 * BLOCK, BLOCK);
    b.remove_memory(3);
    a.populate(3);
    try_touch(b, 3 * BLOCK + 5 * PAGE, Access::Fetch);
    b.unmap(3 * BLOCK + 40 * PAGE, PAGE);
    a.unmap(3 * BLOCK + 64 * PAGE, 40 * PAGE);
    b.set_logging(true);
    try_touch(a, 3 * BLOCK + 200 * PAGE, Access::Write);
    b.set_logging(false);
    b.remove_memory(3);
}

/// Mutates operations one by one. Returns the number of reported mutations, and the type of each
/// unreported one.
fn count_caught(policy: Policy, features: Features) -> (usize, Vec<(String, Mutation)>) {
    let (plain, effects, _) = scenario(policy, features, None);
    let usual = plain.violated_rules().clone();
    let (mut caught, mut missed) = (0, Vec::new());
    for (at, effect) in (0..).zip(effects) {
        for mutation in MUTATIONS {
            let counts =
                if mutation == Mutation::Weaken { effect.is_strong } else { effect.exists };
            if !counts {
                continue;
            }
            let run =
                std::panic::AssertUnwindSafe(|| scenario(policy, features, Some((at, mutation))));
            let Ok((checker, _, hit)) = std::panic::catch_unwind(run) else {
                panic!("operation {at}, {mutation:?}: the engine panics");
            };
            let Some(name) = hit else { continue };
            let more = checker.violations().len() > plain.violations().len();
            if more || !checker.violated_rules().is_subset(&usual) {
                caught += 1;
            } else {
                missed.push((name, mutation));
            }
        }
    }
    (caught, missed)
}

/// Unreported mutations, which the head of the file explains: the policy, the operation, and the number
/// of each mutation.
#[rustfmt::skip]
const KNOWN: &[(&str, &str, Mutation, usize)] = &[
    ("granule", "DC CIVAC", Mutation::Delay, 2),
    ("granule", "IC", Mutation::Drop, 1),
    ("granule", "Ish", Mutation::Drop, 2),
    ("granule", "Ish", Mutation::Weaken, 2),
    ("granule", "Ish", Mutation::Delay, 5),
    ("granule", "IshSt", Mutation::Delay, 1),
    ("granule", "Tlbi Ipa Broadcast", Mutation::Delay, 7),
    ("granule, ranges", "DC CIVAC", Mutation::Delay, 2),
    ("granule, ranges", "IC", Mutation::Drop, 1),
    ("granule, ranges", "Ish", Mutation::Drop, 2),
    ("granule, ranges", "Ish", Mutation::Weaken, 2),
    ("granule, ranges", "Ish", Mutation::Delay, 5),
    ("granule, ranges", "Tlbi Range", Mutation::Shorten, 3),
    ("linux-5.10", "Ish", Mutation::Delay, 4),
    ("linux-5.10", "IshSt", Mutation::Weaken, 5),
    ("linux-5.10+series", "IC", Mutation::Drop, 1),
    ("linux-5.10+series", "Ish", Mutation::Delay, 1),
    ("linux-6.12", "DC CIVAC", Mutation::Drop, 2),
    ("linux-6.12", "DC CIVAC", Mutation::Shorten, 2),
    ("linux-6.12", "DC CIVAC", Mutation::Misplace, 2),
    ("linux-6.12", "IC", Mutation::Drop, 1),
    ("linux-6.12", "Ish", Mutation::Drop, 2),
    ("linux-6.12", "Ish", Mutation::Weaken, 2),
    ("linux-6.12", "Ish", Mutation::Delay, 5),
    ("linux-6.12", "Tlbi All", Mutation::Delay, 2),
    ("linux-6.12+series", "DC CIVAC", Mutation::Delay, 1),
    ("linux-6.12+series", "IC", Mutation::Drop, 1),
    ("linux-6.12+series", "Ish", Mutation::Drop, 2),
    ("linux-6.12+series", "Ish", Mutation::Weaken, 2),
    ("linux-6.12+series", "Ish", Mutation::Delay, 6),
    ("linux-6.12+series", "IshSt", Mutation::Delay, 2),
    ("linux-6.12+series", "Tlbi All", Mutation::Delay, 1),
    ("linux-6.12+series", "Tlbi Ipa Broadcast", Mutation::Drop, 3),
    ("linux-6.12+series", "Tlbi Ipa Broadcast", Mutation::Weaken, 3),
    ("linux-6.12+series", "Tlbi Ipa Broadcast", Mutation::Misplace, 3),
    ("linux-6.12+series", "Tlbi Ipa Broadcast", Mutation::Delay, 8),
];

#[test]
fn the_checker_catches_97_percent_of_mutations() {
    let plain = Features::default();
    let ranges = Features { tlb_range: true, bbm: BbmLevel::L1, ..plain };
    let (mut caught, mut missed) = (0, BTreeMap::new());
    for (name, policy, features) in [
        ("linux-5.10", Policy::LINUX_5_10, plain),
        ("linux-5.10+series", Policy::LINUX_5_10_SERIES, plain),
        ("linux-6.12", Policy::LINUX_6_12, plain),
        ("linux-6.12+series", Policy::LINUX_6_12_SERIES, plain),
        ("granule", Policy::GRANULE, plain),
        ("granule, ranges", Policy::GRANULE, ranges),
    ] {
        let (more, survivors) = count_caught(policy, features);
        caught += more;
        for (operation, mutation) in survivors {
            *missed.entry((name, operation, mutation)).or_insert(0) += 1;
        }
    }

    let total = missed.values().sum::<usize>();
    println!("{caught} caught, {total} missed");
    assert!(caught > 1000, "too few mutations: {caught}");
    assert!(caught * 100 >= (caught + total) * 97, "{caught} caught, {total} missed");
    let known = KNOWN.iter();
    let known: BTreeMap<_, _> =
        known.map(|(policy, operation, m, n)| ((*policy, (*operation).into(), *m), *n)).collect();
    assert_eq!(missed, known, "unreported mutations, and those known to be harmless");
}
