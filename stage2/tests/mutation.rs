// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mutations: the engine with one operation omitted, weakened, shortened, misplaced or delayed. The
//! checker must report it.
//!
//! A fixed scenario exercises every function of the engine. The first run counts the operations and
//! determines the effect of each ([`Effect`]) from the checker's state. Then the scenario runs once
//! for each operation and [`Mutation`]. An operation without effect may be omitted without harm and
//! is skipped.
//!
//! Mutations that the checker does not report, and why each is harmless:
//!
//! - `Clean`: 6.12 cleans a block's memory inside the break-before-make window although the memory
//!   has been clean since it was first mapped.
//! - `Instructions`: the whole I-cache is invalidated; its stale lines belong to other memory.
//! - `Ish` missing or weaker, `Tlbi All` late: 6.12's CMOs inside the window end with their own DSB
//!   before the make, which completes the invalidation too.
//! - `Ish` late: it is swapped with a store that links an empty table or writes another entry.
//! - `Clean` late: it is swapped with the DSB of another range of the same operation; the DSB of
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
    collections::BTreeSet,
    sync::Mutex,
};

use granule_stage2::{
    Access, Features, Ipa, Operations, Policy,
    check::{Call, Checker, Effect, Hook, Hooked, Recorder, Reply},
    descriptor::EntryKind,
    geometry::Level,
    operations::{Dsb, Order, Scope, Tlbi, Vmid},
};
use support::{
    BLOCK, Cpu, PAGE, VMID,
    test_vm::{TestVm, Vcpu},
};

/// A defect to inject into an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mutation {
    Drop,
    /// Affects only this CPU, or orders only stores.
    Weaken,
    /// Covers too little.
    Shorten,
    /// Affects another address.
    Misplace,
    /// Follows the next operation.
    Late,
}

const MUTATIONS: [Mutation; 5] =
    [Mutation::Drop, Mutation::Weaken, Mutation::Shorten, Mutation::Misplace, Mutation::Late];

#[derive(Debug, Default)]
struct Mutator {
    /// The index of the operation to mutate, and the mutation; `None` to record `effects` instead.
    target: Option<(u64, Mutation)>,
    next: Cell<u64>,
    late: Cell<Option<Call>>,
    /// The effect of each operation in a run without a mutation.
    effects: RefCell<Vec<Effect>>,
    /// The mutated operation; `None` if this mutation does not apply to it.
    hit: RefCell<Option<String>>,
}

impl Mutator {
    fn new(target: Option<(u64, Mutation)>) -> Self {
        Self { target, ..Self::default() }
    }

    fn next_mutation(&self) -> Option<Mutation> {
        let index = self.next.replace(self.next.get() + 1);
        let (target, mutation) = self.target?;
        (target == index).then_some(mutation)
    }

    /// Records the effect of an operation. Calls that are not architectural always count, as the
    /// checker cannot judge them.
    fn note_effect(&self, call: Call, of_checker: Effect) {
        let counts = matches!(
            call,
            Call::Defer(_)
                | Call::TakeReferences(..)
                | Call::DropReferences(..)
                | Call::SwitchVmid(_)
        );
        self.effects
            .borrow_mut()
            .push(Effect { any: of_checker.any || counts, strong: of_checker.strong || counts });
    }

    fn mutate<O: Operations>(&self, inner: &O, call: Call, mutation: Mutation) -> Reply {
        let hit = || *self.hit.borrow_mut() = Some(name(call));
        match mutation {
            Mutation::Late if is_delayable(call) => {
                hit();
                self.late.set(Some(call));
                Reply::Done
            }
            Mutation::Drop if !matches!(call, Call::Store { .. } | Call::Defer(_)) => {
                hit();
                match call {
                    Call::DropReferences(table, _) => Reply::Count(inner.references(table)),
                    // Returns the VMID that the engine expects.
                    Call::SwitchVmid(Vmid(0)) => Reply::Vmid(VMID),
                    Call::SwitchVmid(_) => Reply::Vmid(Vmid(0)),
                    _ => Reply::Done,
                }
            }
            _ => match mutated(call, mutation) {
                Some(wrong) => {
                    hit();
                    wrong.run(inner)
                }
                None => call.run(inner),
            },
        }
    }
}

impl<'a> Hook<Recorder<'a, Cpu<'a>, Checker>> for &Mutator {
    fn call(&self, inner: &Recorder<'a, Cpu<'a>, Checker>, call: Call) -> Reply {
        let reply = if !is_mutable(call) {
            call.run(inner)
        } else if let Some(mutation) = self.next_mutation() {
            return self.mutate(inner, call, mutation);
        } else {
            let reply = call.run(inner);
            if self.target.is_none() {
                self.note_effect(call, inner.sink().effect());
            }
            reply
        };
        let ends_delay = is_delayable(call)
            || matches!(call, Call::Store { .. } | Call::CompareExchange { .. } | Call::Free(_));
        if ends_delay && let Some(late) = self.late.take() {
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
                | Call::Defer(_)
                | Call::TakeReferences(..)
                | Call::DropReferences(..)
                | Call::Isb
                | Call::SwitchVmid(_)
        )
}

const fn is_delayable(call: Call) -> bool {
    matches!(
        call,
        Call::Dsb(_)
            | Call::Tlbi(_)
            | Call::CleanInvalidate { .. }
            | Call::InvalidateInstructions(_)
    )
}

/// Returns the mutated call, or `None` if the mutation does not apply.
fn mutated(mut call: Call, mutation: Mutation) -> Option<Call> {
    match (&mut call, mutation) {
        (Call::Store { order, .. }, Mutation::Weaken) => *order = Order::Plain,
        (Call::Defer(unlinked), Mutation::Misplace) => return Some(Call::Free(unlinked.table)),
        (Call::Dsb(kind), Mutation::Weaken) => {
            *kind = match kind {
                Dsb::Ish => Dsb::IshSt,
                Dsb::IshSt | Dsb::Nsh => Dsb::NshSt,
                Dsb::NshSt => return None,
            }
        }
        (Call::Tlbi(kind), _) => *kind = mutated_tlbi(*kind, mutation)?,
        (Call::CleanInvalidate { size, .. }, Mutation::Shorten) => *size -= 64,
        (Call::CleanInvalidate { phys, .. }, Mutation::Misplace) => *phys += 64,
        (Call::InvalidateInstructions(Some((_, size))), Mutation::Shorten) => *size -= 64,
        _ => return None,
    }
    Some(call)
}

fn mutated_tlbi(mut kind: Tlbi, mutation: Mutation) -> Option<Tlbi> {
    match (&mut kind, mutation) {
        (
            Tlbi::Ipa { scope, .. }
            | Tlbi::Range { scope, .. }
            | Tlbi::Stage1 { scope }
            | Tlbi::All { scope },
            Mutation::Weaken,
        ) if *scope == Scope::Broadcast => *scope = Scope::Local,
        // The wrong translation regime.
        (Tlbi::All { scope }, Mutation::Shorten) => return Some(Tlbi::Stage1 { scope: *scope }),
        (Tlbi::Range { size, .. }, Mutation::Shorten) => *size /= 2,
        // The level above the leaf's; without a level, only the leaf.
        (Tlbi::Ipa { ttl, leaf_only, .. }, Mutation::Shorten) => match ttl {
            Some(level) => *ttl = level.up(),
            None => *leaf_only = true,
        },
        (Tlbi::Ipa { ipa, .. } | Tlbi::Range { ipa, .. }, Mutation::Misplace) => {
            *ipa = Ipa(ipa.0 ^ 1 << 33)
        }
        _ => return None,
    }
    Some(kind)
}

/// Returns the type of an operation, for the statistics.
fn name(call: Call) -> String {
    let level_2 = Level::new(2).unwrap();
    let name = match call {
        Call::Store { new, .. } if matches!(new.kind(level_2), EntryKind::Table(_)) => {
            "release store of a table or page"
        }
        Call::Store { .. } => "release store of a block",
        Call::Defer(_) => "grace period",
        Call::TakeReferences(..) => "reference taken",
        Call::DropReferences(..) => "reference dropped",
        Call::Tlbi(Tlbi::Range { .. }) => "Tlbi Range",
        Call::Tlbi(Tlbi::All { .. }) => "Tlbi All",
        Call::SwitchVmid(_) => "VMID switch",
        Call::CleanInvalidate { .. } => "Clean",
        Call::InvalidateInstructions(_) => "Instructions",
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
    let [mut a, mut b] =
        [0, 1].map(|cpu| vm.vcpu_with(cpu, &checker, |inner| Hooked { inner, hook: &mutator }));
    write_and_log(&mut a, &mut b);
    reuse_and_unmap(&mut a, &mut b);
    a.finish();
    b.finish();
    let (effects, hit) = (mutator.effects.take(), mutator.hit.take());
    (checker.into_inner().unwrap(), effects, hit)
}

type MutatedVcpu<'a> = Vcpu<'a, Hooked<Recorder<'a, Cpu<'a>, Checker>, &'a Mutator>, Checker>;

/// Accesses memory. A mutation may prevent the guest's progress; the violations until then count.
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

/// Mutates operations one by one. Returns the number of mutations that the checker reports, and the
/// other mutations by type.
fn score(policy: Policy, features: Features) -> (usize, Vec<(String, Mutation)>) {
    let (plain, effects, _) = scenario(policy, features, None);
    let usual = plain.violated().clone();
    let (mut caught, mut missed) = (0, Vec::new());
    for (at, effect) in (0..).zip(effects) {
        for mutation in MUTATIONS {
            let counts = if mutation == Mutation::Weaken { effect.strong } else { effect.any };
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
            if more || !checker.violated().is_subset(&usual) {
                caught += 1;
            } else {
                missed.push((name, mutation));
            }
        }
    }
    (caught, missed)
}

#[test]
fn the_checker_catches_97_percent_of_mutations() {
    let plain = Features::default();
    let ranges = Features { tlb_range: true, bbm: 1, ..plain };
    let (mut caught, mut missed) = (0, Vec::new());
    for (policy, features) in [
        (Policy::LINUX_5_10, plain),
        (Policy::LINUX_5_10_SERIES, plain),
        (Policy::LINUX_6_12, plain),
        (Policy::LINUX_6_12_SERIES, plain),
        (Policy::GRANULE, plain),
        (Policy::GRANULE, ranges),
    ] {
        let (more, survivors) = score(policy, features);
        caught += more;
        missed.extend(survivors);
    }

    println!("{caught} caught, {} missed", missed.len());
    assert!(caught > 1000, "too few mutations: {caught}");
    assert!(caught * 100 >= (caught + missed.len()) * 97, "{caught} caught, {}", missed.len());
    let survivors: BTreeSet<_> =
        missed.iter().map(|(name, mutation)| (name.as_str(), *mutation)).collect();
    let known = BTreeSet::from([
        ("Clean", Mutation::Drop),
        ("Clean", Mutation::Shorten),
        ("Clean", Mutation::Misplace),
        ("Clean", Mutation::Late),
        ("Instructions", Mutation::Drop),
        ("Ish", Mutation::Drop),
        ("Ish", Mutation::Weaken),
        ("Ish", Mutation::Late),
        ("IshSt", Mutation::Weaken),
        ("IshSt", Mutation::Late),
        ("Tlbi All", Mutation::Late),
        ("Tlbi Ipa Broadcast", Mutation::Drop),
        ("Tlbi Ipa Broadcast", Mutation::Weaken),
        ("Tlbi Ipa Broadcast", Mutation::Misplace),
        ("Tlbi Ipa Broadcast", Mutation::Late),
        ("Tlbi Range", Mutation::Shorten),
    ]);
    assert_eq!(survivors, known, "survivors, and those that were examined");
}
