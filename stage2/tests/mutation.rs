// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Mutations: the engine with one operation left out or exchanged. The checker must see it.
//!
//! A fixed scenario goes through everything that the engine does. It is run once to learn how many
//! operations it has and which of them found something to do (by the checker's own state:
//! [`Work`]), then once for each of these and each way to get it wrong. An operation that found
//! nothing to do may just as well be left out, and is.
//!
//! Survivors, each looked at, and why leaving them wrong does no harm where they stand:
//!
//! - `Clean`: 6.12 cleans a block inside the window whose memory has been clean since it was first
//!   mapped.
//! - `Instructions`: all of the I-cache is invalidated, and what was stale in it is elsewhere.
//! - `Ish`, `Tlbi All` left out or late: 6.12's maintenance inside the window ends with a DSB of its
//!   own, before the make, which completes the invalidation just as well.
//! - `Ish` late: the store that it changes places with links an empty table, or is another entry's.
//! - `Tlbi Range` shortened: nothing was mapped in the half that is left out.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod support;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
};

use granule_stage2::{
    Access, Features, Operations, Policy,
    check::{Checker, Recorder, Rule, Work},
    descriptor::Descriptor,
    geometry::Level,
    operations::{Dsb, EntryAddress, Note, Order, Scope, TableAddress, Tlbi, Unlinked, Vmid},
};
use support::{BLOCK, Cpu, PAGE, Vcpu, World};

/// A way to get an operation wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum How {
    /// It is left out.
    Drop,
    /// Only this CPU, or only stores.
    Weaken,
    /// It covers too little.
    Shorten,
    /// It is about something else.
    Misplace,
    /// It comes behind the next operation.
    Late,
}

const HOWS: [How; 5] = [
    How::Drop,
    How::Weaken,
    How::Shorten,
    How::Misplace,
    How::Late,
];

/// What comes behind the next operation.
#[derive(Debug, Clone, Copy)]
enum Held {
    Dsb(Dsb),
    Tlbi(Tlbi),
    Clean(u64, u64),
    Instructions(Option<(u64, u64)>),
}

/// Operations of which the one at `target` goes wrong.
struct Mutant<'a, 'w> {
    inner: &'a Recorder<'w, Cpu<'w>, Checker>,
    /// Shared by all CPUs of the run.
    state: &'a State,
}

struct State {
    at: Cell<u64>,
    target: Option<(u64, How)>,
    held: RefCell<Option<Held>>,
    /// What each operation did when none was mutated.
    work: RefCell<Vec<Work>>,
    /// What the mutated operation was; `None` if it cannot go wrong in this way.
    hit: RefCell<Option<String>>,
}

impl Mutant<'_, '_> {
    /// Whether the operation that comes now goes wrong, and how.
    fn turn(&self) -> Option<How> {
        let at = self.state.at.get();
        self.state.at.set(at + 1);
        let (target, how) = self.state.target?;
        (target == at).then_some(how)
    }

    /// Notes what the operation that turned last did; `works` is how it can go wrong for sure.
    fn did(&self, all: bool) {
        if self.state.target.is_none() {
            let work = self.inner.sink().work();
            let all = Work {
                any: all,
                strong: all,
            };
            let mut noted = self.state.work.borrow_mut();
            noted.push(Work {
                any: work.any || all.any,
                strong: work.strong || all.strong,
            });
        }
    }

    fn hit(&self, name: impl Into<String>) {
        *self.state.hit.borrow_mut() = Some(name.into());
    }

    fn hold(&self, name: &str, held: Held) {
        self.hit(name);
        *self.state.held.borrow_mut() = Some(held);
    }

    /// Does what was held back.
    fn release(&self) {
        match self.state.held.borrow_mut().take() {
            None => {}
            Some(Held::Dsb(kind)) => self.inner.dsb(kind),
            Some(Held::Tlbi(kind)) => self.inner.tlbi(kind),
            Some(Held::Clean(phys, size)) => self.inner.clean_invalidate(phys, size),
            Some(Held::Instructions(range)) => self.inner.invalidate_instructions(range),
        }
    }
}

impl Operations for Mutant<'_, '_> {
    fn load(&self, entry: EntryAddress) -> Descriptor {
        self.inner.load(entry)
    }

    fn store(&self, entry: EntryAddress, new: Descriptor, mut order: Order) {
        let release = order == Order::Release;
        if release && self.turn() == Some(How::Weaken) {
            self.hit(
                if new.kind(Level::new(2).unwrap())
                    == granule_stage2::descriptor::Kind::Table(new.address())
                {
                    "release store of a table or page"
                } else {
                    "release store of a block"
                },
            );
            order = Order::Plain;
        }
        self.inner.store(entry, new, order);
        if release {
            self.did(false);
        }
        self.release();
    }

    fn compare_exchange(
        &self,
        entry: EntryAddress,
        old: Descriptor,
        new: Descriptor,
    ) -> Result<(), Descriptor> {
        let done = self.inner.compare_exchange(entry, old, new);
        self.release();
        done
    }

    fn allocate(&self) -> Option<TableAddress> {
        self.inner.allocate()
    }
    fn free(&self, table: TableAddress) {
        self.inner.free(table);
        self.release();
    }
    fn defer(&self, unlinked: Unlinked) {
        match self.turn() {
            Some(How::Misplace) => {
                self.hit("grace period");
                self.inner.free(unlinked.table);
            }
            _ => self.inner.defer(unlinked),
        }
        self.did(true);
    }
    fn begin_walk(&self) {
        self.inner.begin_walk();
    }
    fn end_walk(&self) {
        self.inner.end_walk();
    }
    fn take_references(&self, table: TableAddress, count: u32) {
        if self.turn() == Some(How::Drop) {
            return self.hit("reference taken");
        }
        self.inner.take_references(table, count);
        self.did(true);
    }
    fn drop_references(&self, table: TableAddress, count: u32) -> u32 {
        if self.turn() == Some(How::Drop) {
            self.hit("reference dropped");
            return self.inner.references(table);
        }
        let left = self.inner.drop_references(table, count);
        self.did(true);
        left
    }
    fn references(&self, table: TableAddress) -> u32 {
        self.inner.references(table)
    }

    fn dsb(&self, kind: Dsb) {
        let name = format!("{kind:?}");
        match self.turn() {
            Some(How::Drop) => self.hit(name),
            Some(How::Weaken) => {
                let weaker = match kind {
                    Dsb::Ish => Dsb::IshSt,
                    Dsb::IshSt => Dsb::NshSt,
                    Dsb::Nsh => Dsb::NshSt,
                    Dsb::NshSt => return self.inner.dsb(kind),
                };
                self.hit(name);
                self.inner.dsb(weaker);
            }
            Some(How::Late) => self.hold(&name, Held::Dsb(kind)),
            _ => {
                self.inner.dsb(kind);
                self.did(false);
                self.release();
            }
        }
    }

    fn isb(&self) {
        match self.turn() {
            Some(How::Drop) => self.hit("Isb"),
            _ => {
                self.inner.isb();
                self.did(false);
            }
        }
    }

    fn tlbi(&self, kind: Tlbi) {
        let name = match kind {
            Tlbi::Ipa { scope, .. } => format!("Tlbi Ipa {scope:?}"),
            Tlbi::Range { .. } => "Tlbi Range".to_owned(),
            Tlbi::Stage1 { scope } => format!("Tlbi Stage1 {scope:?}"),
            Tlbi::All { .. } => "Tlbi All".to_owned(),
        };
        let changed = match self.turn() {
            None => {
                self.inner.tlbi(kind);
                self.did(false);
                return self.release();
            }
            Some(How::Drop) => return self.hit(name),
            Some(How::Late) => return self.hold(&name, Held::Tlbi(kind)),
            Some(how) => mutate(kind, how),
        };
        match changed {
            Some(wrong) => {
                self.hit(name);
                self.inner.tlbi(wrong);
            }
            None => self.inner.tlbi(kind),
        }
    }

    fn switch_vmid(&self, vmid: Vmid) -> Vmid {
        match self.turn() {
            Some(How::Drop) => {
                self.hit("VMID switch");
                // As far as the engine can tell, all is well.
                Vmid(if vmid.0 == 0 { support::VMID.0 } else { 0 })
            }
            _ => {
                let before = self.inner.switch_vmid(vmid);
                self.did(true);
                before
            }
        }
    }

    fn clean_invalidate(&self, phys: u64, size: u64) {
        match self.turn() {
            Some(How::Drop) => self.hit("Clean"),
            Some(How::Late) => self.hold("Clean", Held::Clean(phys, size)),
            Some(How::Shorten) => {
                self.hit("Clean");
                self.inner.clean_invalidate(phys, size - 64);
            }
            Some(How::Misplace) => {
                self.hit("Clean");
                self.inner.clean_invalidate(phys + 64, size);
            }
            _ => {
                self.inner.clean_invalidate(phys, size);
                self.did(false);
                self.release();
            }
        }
    }

    fn invalidate_instructions(&self, range: Option<(u64, u64)>) {
        match (self.turn(), range) {
            (Some(How::Drop), _) => self.hit("Instructions"),
            (Some(How::Late), _) => self.hold("Instructions", Held::Instructions(range)),
            (Some(How::Shorten), Some((phys, size))) => {
                self.hit("Instructions");
                self.inner.invalidate_instructions(Some((phys, size - 64)));
            }
            _ => {
                self.inner.invalidate_instructions(range);
                self.did(false);
                self.release();
            }
        }
    }

    fn note(&self, note: Note) {
        self.inner.note(note);
    }
}

/// The same invalidation, wrong; `None` where this way of going wrong makes no sense.
fn mutate(kind: Tlbi, how: How) -> Option<Tlbi> {
    match (kind, how) {
        (
            Tlbi::Ipa {
                ipa,
                ttl,
                leaf_only,
                scope: Scope::Broadcast,
            },
            How::Weaken,
        ) => Some(Tlbi::Ipa {
            ipa,
            ttl,
            leaf_only,
            scope: Scope::Local,
        }),
        (
            Tlbi::Stage1 {
                scope: Scope::Broadcast,
            },
            How::Weaken,
        ) => Some(Tlbi::Stage1 {
            scope: Scope::Local,
        }),
        (Tlbi::All { .. }, How::Weaken) => Some(Tlbi::All {
            scope: Scope::Local,
        }),
        (Tlbi::Range { ipa, size, ttl, .. }, How::Weaken) => Some(Tlbi::Range {
            ipa,
            size,
            ttl,
            scope: Scope::Local,
        }),
        // Only stage 1: the wrong regime.
        (Tlbi::All { scope }, How::Shorten) => Some(Tlbi::Stage1 { scope }),
        (
            Tlbi::Range {
                ipa,
                size,
                ttl,
                scope,
            },
            How::Shorten,
        ) => Some(Tlbi::Range {
            ipa,
            size: size / 2,
            ttl,
            scope,
        }),
        // The level above the leaf's.
        (
            Tlbi::Ipa {
                ipa,
                ttl: Some(level),
                leaf_only,
                scope,
            },
            How::Shorten,
        ) => Some(Tlbi::Ipa {
            ipa,
            ttl: level.up(),
            leaf_only,
            scope,
        }),
        (
            Tlbi::Ipa {
                ipa,
                ttl: None,
                scope,
                ..
            },
            How::Shorten,
        ) => Some(Tlbi::Ipa {
            ipa,
            ttl: None,
            leaf_only: true,
            scope,
        }),
        (
            Tlbi::Ipa {
                ipa,
                ttl,
                leaf_only,
                scope,
            },
            How::Misplace,
        ) => Some(Tlbi::Ipa {
            ipa: ipa ^ (1 << 33),
            ttl,
            leaf_only,
            scope,
        }),
        (
            Tlbi::Range {
                ipa,
                size,
                ttl,
                scope,
            },
            How::Misplace,
        ) => Some(Tlbi::Range {
            ipa: ipa ^ (1 << 33),
            size,
            ttl,
            scope,
        }),
        _ => None,
    }
}

/// Everything that the engine does, on two CPUs in turn.
fn scenario(
    policy: Policy,
    features: Features,
    target: Option<(u64, How)>,
) -> (Checker, Vec<Work>, Option<String>) {
    let world = World::new(policy, features, 2, 4);
    let checker = Mutex::new(Checker::new(world.setup));
    let recorders = [0, 1].map(|cpu| Recorder::new(world.cpu(cpu), cpu, &checker));
    let state = State {
        at: Cell::new(0),
        target,
        held: RefCell::new(None),
        hit: RefCell::new(None),
        work: RefCell::new(Vec::new()),
    };
    {
        let [mut a, mut b] = [0u8, 1].map(|cpu| {
            let ops = Mutant {
                inner: &recorders[usize::from(cpu)],
                state: &state,
            };
            Vcpu::new(&world, ops, Recorder::new(world.cpu(cpu), cpu, &checker))
        });
        // A defect may leave the guest without a way on; what was found until then counts.
        let mut go = |which: u8, ipa: u64, access: Access| {
            let vcpu = if which == 0 { &mut a } else { &mut b };
            let _ = vcpu.touch(ipa, access);
        };
        go(0, 0, Access::Write);
        go(1, 3 * PAGE, Access::Fetch);
        go(0, 3 * BLOCK, Access::Read);
        go(1, 3 * BLOCK + PAGE, Access::Write);
        go(0, 3 * BLOCK + PAGE, Access::Fetch);
        go(1, BLOCK, Access::Read);
        a.set_logging(true);
        let mut go = |which: u8, ipa: u64, access: Access| {
            let vcpu = if which == 0 { &mut a } else { &mut b };
            let _ = vcpu.touch(ipa, access);
        };
        go(0, 5 * PAGE, Access::Write);
        go(1, 5 * PAGE, Access::Write);
        go(1, 6 * PAGE, Access::Write);
        go(0, BLOCK + 9 * PAGE, Access::Write);
        go(0, BLOCK + 9 * PAGE, Access::Fetch);
        b.read_log();
        let _ = a.touch(5 * PAGE, Access::Write);
        b.unmap(7 * PAGE, PAGE);
        let _ = b.touch(2 * BLOCK, Access::Write);
        a.split(2);
        b.read_log();
        a.set_logging(false);
        let _ = b.touch(8 * PAGE, Access::Read);
        let _ = a.touch(7 * PAGE, Access::Fetch);
        let _ = a.touch(BLOCK + 3 * PAGE, Access::Write);
        b.host_write(2 * BLOCK, 64);
        b.take_back(0);
        let _ = a.touch(0, Access::Write);
        b.unmap(3 * BLOCK, BLOCK);
        b.take_back(3);
        a.finish();
        b.finish();
    }
    let hit = state.hit.borrow_mut().take();
    (checker.into_inner().unwrap(), state.work.take(), hit)
}

#[derive(Default)]
struct Score {
    caught: u32,
    missed: u32,
}

fn score(policy: Policy, features: Features, scores: &mut BTreeMap<(String, How), Score>) {
    let (plain, work, _) = scenario(policy, features, None);
    let usual = plain.broken().clone();
    for (at, work) in (0..).zip(work) {
        for how in HOWS {
            // An operation that found nothing to do may just as well be left out.
            let counts = match how {
                How::Weaken => work.strong,
                _ => work.any,
            };
            if !counts {
                continue;
            }
            let run = std::panic::AssertUnwindSafe(|| scenario(policy, features, Some((at, how))));
            let Ok((checker, _, hit)) = std::panic::catch_unwind(run) else {
                panic!("operation {at}, {how:?}: the engine panics");
            };
            let Some(name) = hit else { continue };
            let found: BTreeSet<Rule> = checker.broken().difference(&usual).copied().collect();
            let score = scores.entry((name, how)).or_default();
            let more = checker.violations().len() > plain.violations().len();
            if found.is_empty() && !more {
                score.missed += 1;
            } else {
                score.caught += 1;
            }
        }
    }
}

#[test]
fn nineteen_of_twenty_mutations_are_caught() {
    let plain = Features::default();
    let ranges = Features {
        tlb_range: true,
        bbm: 1,
        ..plain
    };
    let mut scores = BTreeMap::new();
    for (policy, features) in [
        (Policy::LINUX_5_10, plain),
        (Policy::LINUX_5_10_SERIES, plain),
        (Policy::LINUX_6_12, plain),
        (Policy::GRANULE, plain),
        (Policy::GRANULE, ranges),
    ] {
        score(policy, features, &mut scores);
    }
    let caught: u32 = scores.values().map(|score| score.caught).sum();
    let missed: u32 = scores.values().map(|score| score.missed).sum();
    println!("{caught} caught, {missed} missed");
    for ((name, how), score) in &scores {
        println!(
            "{name:36} {how:?}: {} caught, {} missed",
            score.caught, score.missed
        );
    }
    let survivors: BTreeSet<_> = scores
        .iter()
        .filter(|(_, score)| score.missed > 0)
        .map(|((name, _), _)| name.as_str())
        .collect();
    let known = BTreeSet::from(["Clean", "Instructions", "Ish", "Tlbi All", "Tlbi Range"]);
    assert!(caught > 1000, "too few mutations: {caught}");
    assert!(
        caught * 100 >= (caught + missed) * 95,
        "{caught} caught, {missed} missed"
    );
    let unknown: Vec<_> = survivors.difference(&known).collect();
    assert!(
        unknown.is_empty(),
        "survivors that nobody has looked at: {unknown:?}"
    );
}
