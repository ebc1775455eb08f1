// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A hook that makes one operation of a run wrong.

use std::cell::{Cell, RefCell};

use granule_stage2::{
    Ipa, Operations,
    check::{Call, Checker, Effect, Hook, Recorder, Reply},
    descriptor::EntryKind,
    geometry::Level,
    operations::{Dsb, Order, Scope, Tlbi, Vmid},
};

use crate::support::{Cpu, VMID};

/// A way to make an operation wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mutation {
    /// The operation is missing.
    Drop,
    /// It affects only this CPU, or orders only stores.
    Weaken,
    /// It covers too little.
    Shorten,
    /// It affects another address.
    Misplace,
    /// It follows the next operation.
    Late,
}

pub const MUTATIONS: [Mutation; 5] =
    [Mutation::Drop, Mutation::Weaken, Mutation::Shorten, Mutation::Misplace, Mutation::Late];

/// The hook, shared by all CPUs of a run.
#[derive(Debug, Default)]
pub struct Mutator {
    /// The operation to mutate, counted among those that can be; without one, `effects` are noted.
    target: Option<(u64, Mutation)>,
    next: Cell<u64>,
    late: Cell<Option<Call>>,
    /// The effect of each operation in a run without a mutation.
    pub effects: RefCell<Vec<Effect>>,
    /// The mutated operation; `None` if this mutation does not apply to it.
    pub hit: RefCell<Option<String>>,
}

impl Mutator {
    pub fn new(target: Option<(u64, Mutation)>) -> Self {
        Self { target, ..Self::default() }
    }

    fn next_mutation(&self) -> Option<Mutation> {
        let index = self.next.replace(self.next.get() + 1);
        let (target, mutation) = self.target?;
        (target == index).then_some(mutation)
    }

    /// Notes what an operation achieved. The checker cannot judge calls that are not architectural;
    /// all of those count.
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
                    // The engine sees the VMID that it expects.
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

/// Returns the wrong call; `None` where the mutation does not apply.
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
        // The wrong regime.
        (Tlbi::All { scope }, Mutation::Shorten) => return Some(Tlbi::Stage1 { scope: *scope }),
        (Tlbi::Range { size, .. }, Mutation::Shorten) => *size /= 2,
        // The level above the leaf's; without a level, the leaf alone.
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

/// Returns the kind of an operation, for the statistics.
fn name(call: Call) -> String {
    let level_2 = Level::new(2).unwrap();
    match call {
        Call::Store { new, .. } if matches!(new.kind(level_2), EntryKind::Table(_)) => {
            "release store of a table or page".to_owned()
        }
        Call::Store { .. } => "release store of a block".to_owned(),
        Call::Defer(_) => "grace period".to_owned(),
        Call::TakeReferences(..) => "reference taken".to_owned(),
        Call::DropReferences(..) => "reference dropped".to_owned(),
        Call::Dsb(kind) => format!("{kind:?}"),
        Call::Tlbi(Tlbi::Ipa { scope, .. }) => format!("Tlbi Ipa {scope:?}"),
        Call::Tlbi(Tlbi::Range { .. }) => "Tlbi Range".to_owned(),
        Call::Tlbi(Tlbi::Stage1 { scope }) => format!("Tlbi Stage1 {scope:?}"),
        Call::Tlbi(Tlbi::All { .. }) => "Tlbi All".to_owned(),
        Call::SwitchVmid(_) => "VMID switch".to_owned(),
        Call::CleanInvalidate { .. } => "Clean".to_owned(),
        Call::InvalidateInstructions(_) => "Instructions".to_owned(),
        _ => format!("{call:?}"),
    }
}
