// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The running kernel's own tables: translates the events of the machine for their checker.

use alloc::{collections::BTreeMap, vec, vec::Vec};

use super::{
    findings::{TableChange, TranslatedAddress},
    step::Thread,
};
use crate::{
    address::{EntryAddress, PhysAddr, TableAddress},
    check::{
        Cause, StoreKind,
        stage1::{self, KernelViolation, MemoryTypes, NewTable, Stage1Checker, Stage1Entry},
        tlbi_operand::Encoding,
    },
    engine::BbmLevel,
    geometry::{Geometry, Granule},
    operations::Dsb,
};

/// A call that changes the kernel's tables.
#[derive(Debug, Clone, Copy)]
struct KernelCall {
    function: u16,
    thread: Thread,
    /// The event of its start.
    since: u64,
}

/// A CPU's registers of the kernel's regime.
#[derive(Debug, Clone, Copy, Default)]
struct KernelRegisters {
    /// Exception level and root.
    root: Option<(u8, TableAddress)>,
    tcr: u64,
}

impl KernelRegisters {
    fn geometry(self) -> Option<Geometry> {
        Geometry::of_stage1(self.granule()?, 64 - (self.tcr >> 16 & 0x3f) as u32).ok()
    }

    const fn granule(self) -> Option<Granule> {
        Some(match self.tcr >> 30 & 3 {
            1 => Granule::K16,
            2 => Granule::K4,
            3 => Granule::K64,
            _ => return None,
        })
    }

    fn encoding(self) -> Option<Encoding> {
        const DS: u64 = 1 << 59;
        let has_52_bits = self.tcr & DS != 0;
        self.granule().map(|granule| Encoding { granule, has_52_bits })
    }
}

/// The kernel of a machine.
#[derive(Debug)]
pub(super) struct Kernel {
    registers: Vec<KernelRegisters>,
    types: MemoryTypes,
    /// Tables that were reported before the root.
    new_tables: Vec<(TableAddress, NewTable)>,
    /// Exists since the first root.
    pub(super) checker: Option<Stage1Checker>,
    calls: Vec<KernelCall>,
    /// The thread that has changed an entry last.
    changed_by: BTreeMap<EntryAddress, Thread>,
    /// The last change of the tables by each CPU.
    pub(super) last_changes: Vec<Option<TableChange>>,
    pub(super) root: TableAddress,
    pub(super) stores: u64,
    pub(super) unsupported_roots: u64,
}

impl Kernel {
    pub(super) fn new(cpus: u8) -> Self {
        let cpus = usize::from(cpus);
        Self {
            registers: vec![KernelRegisters::default(); cpus],
            types: MemoryTypes::default(),
            new_tables: Vec::new(),
            checker: None,
            calls: Vec::new(),
            changed_by: BTreeMap::new(),
            last_changes: vec![None; cpus],
            root: TableAddress(0),
            stores: 0,
            unsupported_roots: 0,
        }
    }

    pub(super) fn begin_event(&mut self, event: u64, cause: Cause) {
        if let Some(checker) = &mut self.checker {
            checker.begin_event(event, cause);
        }
    }

    pub(super) fn set_tcr(&mut self, cpu: u8, value: u64) {
        self.registers[usize::from(cpu)].tcr = value;
    }

    pub(super) fn set_mair(&mut self, value: u64) {
        self.types = MemoryTypes(value);
        if let Some(checker) = &mut self.checker {
            checker.set_types(self.types);
        }
    }

    /// Selects a root on a CPU whose kernel runs at an exception level.
    pub(super) fn select_root(&mut self, cpu: u8, (el, root): (u8, TableAddress), bbm: BbmLevel) {
        let registers = &mut self.registers[usize::from(cpu)];
        let geometry = registers.geometry();
        let before = registers.root.replace((el, root));
        if self.checker.is_none() {
            let cpus = u8::try_from(self.registers.len()).unwrap_or(u8::MAX);
            self.checker = geometry.map(|geometry| Stage1Checker::new(geometry, cpus, bbm));
        }
        self.set_mair(self.types.0);
        let Some(checker) = self.checker.as_mut().filter(|one| Some(one.geometry()) == geometry)
        else {
            self.unsupported_roots += 1;
            return;
        };
        for (table, contents) in self.new_tables.drain(..) {
            checker.add_table(table, contents);
        }
        if before.is_none_or(|(level, _)| level != el) {
            checker.start_cpu(usize::from(cpu));
        }
        let before = before.map(|(_, root)| root);
        let is_used = |root| self.registers.iter().any(|cpu| cpu.root.map(|one| one.1) == root);
        let unused = before.filter(|root| !is_used(Some(*root)));
        checker.select_root(root, unused);
        self.root = root;
    }

    pub(super) fn add_table(
        &mut self,
        table: TableAddress,
        unordered_writer: Option<u8>,
        entries: &[(u16, u64)],
    ) {
        let entries = entries.iter();
        let entries = entries.map(|(index, value)| (u64::from(*index), Stage1Entry(*value)));
        let unordered_writer = unordered_writer.map(usize::from);
        let contents = NewTable { entries: entries.collect(), unordered_writer };
        match &mut self.checker {
            Some(checker) => checker.add_table(table, contents),
            None => self.new_tables.push((table, contents)),
        }
    }

    pub(super) fn store(
        &mut self,
        (cpu, thread): (u8, Thread),
        entry: EntryAddress,
        (old, new): (u64, u64),
        kind: StoreKind,
    ) {
        let Some(checker) = &mut self.checker else { return };
        let values = (Stage1Entry(old), Stage1Entry(new));
        let Some(position) = checker.store(usize::from(cpu), entry, values, kind) else { return };
        self.stores += 1;
        self.changed_by.insert(entry, thread);
        let address = TranslatedAddress::Kernel(position.ipa);
        let change = TableChange { address, level: position.level, old, new };
        self.last_changes[usize::from(cpu)] = Some(change);
    }

    pub(super) fn invalidate(&mut self, cpu: u8, name: &str, operand: u64) {
        let encoding = self.registers[usize::from(cpu)].encoding();
        let kind = encoding.and_then(|encoding| stage1::decode(name, operand, encoding));
        if let (Some(kind), Some(checker)) = (kind, &mut self.checker) {
            checker.invalidate(usize::from(cpu), kind);
        }
    }

    pub(super) fn barrier(&mut self, cpu: u8, kind: Dsb, is_nxs: bool) {
        if let Some(checker) = &mut self.checker {
            if checker.is_alone(usize::from(cpu)) {
                checker.order_stores(usize::from(cpu));
            }
            checker.barrier(usize::from(cpu), kind, is_nxs);
        }
    }

    pub(super) fn order_stores(&mut self, cpu: u8) {
        if let Some(checker) = &mut self.checker {
            checker.order_stores(usize::from(cpu));
        }
    }

    /// Frees a page, or writes one that was a table.
    pub(super) fn reuse_page(&mut self, page: PhysAddr) {
        if let Some(checker) = &mut self.checker {
            let granule = checker.geometry().granule().size();
            checker.reuse_page(TableAddress(page.align_down(granule).0));
        }
    }

    pub(super) fn unknown_tables(&self) -> u64 {
        self.checker.as_ref().map_or(0, Stage1Checker::unknown_tables)
    }

    pub(super) fn forget_unlinked_tables(&mut self) {
        if let Some(checker) = &mut self.checker {
            checker.forget_unlinked();
        }
    }

    /// Removes and returns the violations.
    pub(super) fn take_violations(&mut self) -> Vec<KernelViolation> {
        self.checker.as_mut().map_or_else(Vec::new, Stage1Checker::take_violations)
    }

    pub(super) fn enter(&mut self, function: u16, thread: Thread, since: u64) {
        self.calls.push(KernelCall { function, thread, since });
    }

    /// Ends a call: what its thread has removed or restricted since its start must be invalidated.
    pub(super) fn leave(&mut self, function: u16, thread: Thread) {
        let is_same = |call: &KernelCall| call.function == function && call.thread == thread;
        let Some(index) = self.calls.iter().rposition(is_same) else { return };
        let since = self.calls.remove(index).since;
        let changed_by = &self.changed_by;
        if let Some(checker) = &mut self.checker {
            checker.end_call(|stale| {
                let is_own = || changed_by.get(&stale.entry.position.entry) == Some(&thread);
                stale.changed_at >= since && is_own()
            });
        }
    }
}
