// SPDX-License-Identifier: GPL-2.0-or-later
//! The observer, which turns instructions of the machine into events.

use std::{
    io::{self, Write},
    mem,
    ops::Range,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use granule_stage2::{
    EntryAddress, PhysAddr, TableAddress,
    check::{
        StoreKind,
        machine::{IDENTIFICATION, MachineAction},
    },
};

use super::{
    arguments::{FreeingCall, TraceArguments},
    barrier::Barrier,
    cache_operations::{LineOperation, LineSizes},
    callbacks::{Callback, Callbacks},
    functions::{Function, WatchedWords},
    instruction::{KernelRegister, Observed, Operand, SystemRegister},
    kernel::KernelTables,
    machine::Machine,
    pages::{PAGE_SIZE, PageFlag, Pages, Writer},
    system_registers::SystemRegisters,
    tables::{NewTable, StoredValue, Tables},
    trace::Trace,
};

/// Returns the event of a table and the CPU whose stores to it are not ordered.
type NewTableAction = fn(NewTable, Option<u8>) -> MachineAction;

fn table_action(table: NewTable, unordered_writer: Option<u8>) -> MachineAction {
    let NewTable { address, level, entries, .. } = table;
    MachineAction::Table { table: TableAddress(address.0), level, unordered_writer, entries }
}

fn kernel_table_action(table: NewTable, unordered_writer: Option<u8>) -> MachineAction {
    let NewTable { address, level, entries, .. } = table;
    MachineAction::KernelTable { table: TableAddress(address.0), level, unordered_writer, entries }
}

/// State of a CPU that every store reads.
#[derive(Debug, Default)]
struct Cpu {
    selects_guest: AtomicBool,
    /// Number of barriers that have ordered stores.
    epoch: AtomicU64,
}

/// State that changes with events.
#[derive(Debug)]
struct State {
    trace: Trace,
    tables: Tables,
    /// The kernel's own tables, if they are observed.
    kernel: Option<KernelTables>,
    words: WatchedWords,
    registers: Vec<SystemRegisters>,
    /// Indicates that the trace has the identification registers.
    is_identified: bool,
}

/// A store of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Store {
    /// The CPU.
    pub cpu: u8,
    /// Virtual address of the instruction.
    pub address: u64,
    /// Manner in which the instruction writes.
    pub kind: StoreKind,
    /// Indicates that the instruction is known to run at EL2. Other ones run the host unless
    /// HCR_EL2 selects a guest.
    pub is_at_el2: bool,
}

/// The observer of a machine.
pub struct Observer {
    machine: Box<dyn Machine + Send + Sync>,
    arguments: TraceArguments,
    cpus: Box<[Cpu]>,
    pages: Pages,
    callbacks: RwLock<Callbacks>,
    state: Mutex<State>,
    line_sizes: OnceLock<LineSizes>,
}

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observer").field("arguments", &self.arguments).finish_non_exhaustive()
    }
}

impl Observer {
    /// Returns an observer of `cpus` CPUs that writes to `out`.
    pub fn new(
        machine: Box<dyn Machine + Send + Sync>,
        cpus: usize,
        arguments: TraceArguments,
        out: Box<dyn Write + Send>,
    ) -> Self {
        let state = State {
            trace: Trace::new(out, cpus, !arguments.omits_stacks),
            tables: Tables::default(),
            kernel: arguments.watches_kernel.then(|| KernelTables::new(cpus)),
            words: WatchedWords::default(),
            registers: vec![SystemRegisters::default(); cpus],
            is_identified: false,
        };
        Self {
            machine,
            arguments,
            cpus: (0..cpus).map(|_| Cpu::default()).collect(),
            pages: Pages::default(),
            callbacks: RwLock::default(),
            state: Mutex::new(state),
            line_sizes: OnceLock::new(),
        }
    }

    /// Returns the numbers of the callbacks of an instruction, for [`Observer::execute`].
    pub fn callbacks(&self, address: u64, word: u32) -> Range<usize> {
        let callbacks = &mut *self.callbacks.write().unwrap_or_else(PoisonError::into_inner);
        callbacks.of_instruction(address, word, &self.arguments)
    }

    /// Records a store of the host to memory; `size` returns its bytes. A guest's stores return
    /// early: no guest can write tables.
    #[inline]
    pub fn store(&self, store: Store, phys: PhysAddr, size: impl FnOnce() -> u64) {
        let Some(cpu) = self.cpus.get(usize::from(store.cpu)) else { return };
        if !store.is_at_el2 && cpu.selects_guest.load(Ordering::Relaxed) {
            return;
        }
        let writer = Writer { cpu: store.cpu, epoch: cpu.epoch.load(Ordering::Relaxed) };
        if self.pages.record_store(phys, writer) {
            self.report_store(store, (phys, size()), StoredValue::InMemory);
        }
    }

    /// Processes the callback with this number, before the execution of its instruction.
    pub fn execute(&self, cpu: u8, number: usize) {
        let callbacks = self.callbacks.read().unwrap_or_else(PoisonError::into_inner);
        let Some((address, callback)) = callbacks.get(number) else { return };
        drop(callbacks);
        if !self.is_host(cpu) {
            return;
        }
        let at = (cpu, address);
        match callback {
            Callback::Instruction(observed) => self.execute_observed(at, observed),
            Callback::Enter(index) => self.enter(cpu, &self.arguments.functions[index]),
            Callback::Leave(index) => {
                let function = self.arguments.functions[index].number;
                let result = self.reported_address(function, self.machine.register(0));
                let action = MachineAction::Leave(function, result);
                let state = &mut *self.state();
                self.report_thread(state, cpu);
                state.trace.emit(cpu, action, None);
            }
            Callback::Free(index) => self.free(cpu, self.arguments.frees[index]),
        }
    }

    fn execute_observed(&self, at: (u8, u64), observed: Observed) {
        let (cpu, _) = at;
        match observed {
            Observed::Write(SystemRegister::Kernel(register), operand) => {
                self.write_kernel_register(at, register, operand);
            }
            Observed::Write(register, operand) => self.write_register(at, register, operand),
            Observed::Barrier(barrier) => self.barrier(cpu, barrier),
            Observed::Tlbi(operation, operand) => {
                let value = self.value(operand);
                self.tlbi(at, &operation.name(), value);
            }
            Observed::Dc(operation, operand) => {
                self.maintain_line(at, LineOperation::Data(operation), operand);
            }
            Observed::IcLine(operand) => {
                self.maintain_line(at, LineOperation::Instruction, operand);
            }
            Observed::IcAll(scope) => {
                self.state().trace.emit(cpu, MachineAction::Ic(scope), None);
            }
            Observed::Zero(operand) => {
                let size = self.line_sizes().zeroed;
                let block = self.value(operand) & !(size - 1);
                self.write_range(at, block, size, StoredValue::Zero);
            }
            Observed::Bulk { destination, size } => {
                let (start, size) = (self.value(destination), self.value(size).cast_signed());
                // Option A of FEAT_MOPS: a negative size counts from the end.
                let start = start.wrapping_add_signed(size.min(0));
                self.write_range(at, start, size.unsigned_abs(), StoredValue::InMemory);
            }
        }
    }

    /// Compares the copies of the tables with memory, if the arguments ask for it.
    pub fn verify(&self) {
        if self.arguments.verifies {
            let state = &mut *self.state();
            let (mut tables, mut differences) = state.tables.verify(&*self.machine);
            if let Some(kernel) = &state.kernel {
                let of_kernel = kernel.tables.verify(&*self.machine);
                tables += of_kernel.0;
                differences += of_kernel.1;
            }
            state.trace.write_runs();
            state.trace.comment(format_args!("verify tables={tables} different={differences}"));
        }
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// A line of the trace cannot be written.
    pub fn finish(&self) -> io::Result<()> {
        self.verify();
        self.state().trace.finish()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the sizes of the CPU model, which QEMU offers once it has initialised a CPU.
    fn line_sizes(&self) -> LineSizes {
        *self.line_sizes.get_or_init(|| {
            let register = |name| self.machine.identification(name);
            // Lines of 64 bytes, as in most CPU models.
            const CTR: u64 = 0x8444_c004;
            LineSizes::new(register("ctr_el0").unwrap_or(CTR), register("dczid_el0"))
        })
    }

    fn value(&self, operand: Operand) -> u64 {
        if operand.0 == 31 { 0 } else { self.machine.register(operand.0) }
    }

    /// Returns whether a CPU runs the host. Between a write of HCR_EL2 and the entry to the guest,
    /// and after the exit, it runs the host at EL2.
    fn is_host(&self, cpu: u8) -> bool {
        let Some(cpu) = self.cpus.get(usize::from(cpu)) else { return false };
        !cpu.selects_guest.load(Ordering::Relaxed) || self.is_at_el2()
    }

    /// Returns whether the running CPU is at EL2.
    pub fn is_at_el2(&self) -> bool {
        self.machine.exception_level() >= 2
    }

    fn enter(&self, cpu: u8, function: &Function) {
        let mut arguments = [0, 1, 2, 3].map(|number| self.machine.register(number));
        let state = &mut *self.state();
        for lock in self.arguments.locks.iter().filter(|lock| lock.function == function.number) {
            let word = self.machine.translate(arguments[0].wrapping_add(lock.offset));
            match word {
                Some(word) if state.words.watch(&*self.machine, word) => {
                    self.pages.set(word, PageFlag::Watched, true);
                }
                Some(_) => {}
                None => state.trace.skip("lock"),
            }
        }
        let registers = arguments;
        arguments[0] = self.reported_address(function.number, arguments[0]);
        for load in self.arguments.loads.iter().filter(|load| load.function == function.number) {
            let pointer = registers[usize::from(load.pointer)].wrapping_add(load.offset);
            arguments[load.argument] = self.machine.read_virtual(pointer).unwrap_or(0);
        }
        self.report_thread(state, cpu);
        let stack = state.trace.stack(&*self.machine, cpu, function.start);
        state.trace.emit(cpu, MachineAction::Enter(function.number, arguments), stack);
    }

    /// Returns the thread of the running CPU: SP_EL0, in which Linux keeps its current task. In user
    /// space, and during the switch to a guest, it is no address of the kernel.
    fn thread(&self) -> Option<u64> {
        let is_task = |pointer: &u64| pointer >> 63 != 0;
        let has_threads = self.arguments.has_threads;
        has_threads.then(|| Some(self.machine.thread_pointer()).filter(is_task).unwrap_or(0))
    }

    /// Reports the thread of the running CPU, if it is another one than before.
    fn report_thread(&self, state: &mut State, cpu: u8) {
        if let Some(thread) = self.thread() {
            state.trace.thread(cpu, thread);
        }
    }

    /// Returns the first argument or the result of a function as it is reported: a number that is no
    /// address of the kernel has no translation and stays the same.
    fn reported_address(&self, function: u16, value: u64) -> u64 {
        let is_translated = self.arguments.physical.contains(&function) && value >> 63 != 0;
        let phys = Some(value).filter(|_| is_translated).and_then(|at| self.machine.translate(at));
        phys.map_or(value, |phys| phys.0)
    }

    fn free(&self, cpu: u8, call: FreeingCall) {
        let pointer = self.machine.register(0).wrapping_add(call.offset);
        let root = self.machine.read_virtual(pointer);
        let Some(root) = root.and_then(|root| self.machine.translate(root)) else { return };
        let state = &mut *self.state();
        if state.tables.remove_root(&self.pages, root) {
            state.trace.emit(cpu, MachineAction::Free(TableAddress(root.0)), None);
        }
    }

    fn report_store(&self, store: Store, range: (PhysAddr, u64), value: StoredValue) {
        let (Store { cpu, address, kind, .. }, phys) = (store, range.0);
        let state = &mut *self.state();
        if self.pages.has(phys, PageFlag::Table) {
            let (machine, pages): (&dyn Machine, _) = (&*self.machine, &self.pages);
            let mut changes = state.tables.store(machine, pages, range, value);
            let mut action: NewTableAction = table_action;
            if let Some(kernel) = state.kernel.as_mut().filter(|_| changes.is_empty()) {
                changes = kernel.tables.store(machine, pages, range, value);
                action = kernel_table_action;
            }
            if !changes.is_empty() {
                self.report_thread(state, cpu);
            }
            for change in changes {
                self.report_tables(state, cpu, change.tables, action);
                let (entry, old, new) = (EntryAddress(change.entry.0), change.old, change.new);
                let stack = state.trace.stack(&*self.machine, cpu, address);
                state.trace.emit(cpu, MachineAction::Store { entry, old, new, kind }, stack);
            }
        } else if !self.pages.set(phys, PageFlag::Written, true) {
            let page = phys.align_down(PAGE_SIZE);
            state.trace.emit(cpu, MachineAction::HostWrite(page), None);
        }
        if self.pages.has(phys, PageFlag::Watched) {
            for change in state.words.store(&*self.machine, phys, range.1) {
                let (old, new) = (u64::from(change.old), u64::from(change.new));
                let action = MachineAction::Word { word: change.word, old, new };
                state.trace.emit(cpu, action, None);
            }
        }
    }

    fn report_tables(
        &self,
        state: &mut State,
        cpu: u8,
        tables: Vec<NewTable>,
        action: NewTableAction,
    ) {
        let epoch = |cpu: u8| {
            let cpu = self.cpus.get(usize::from(cpu));
            cpu.map_or(0, |cpu| cpu.epoch.load(Ordering::Relaxed))
        };
        for table in tables {
            let pages = 0..table.size / PAGE_SIZE;
            let mut pages = pages.map(|page| table.address + page * PAGE_SIZE);
            let unordered_writer = pages.find_map(|page| self.pages.unordered_writer(page, epoch));
            state.trace.emit(cpu, action(table, unordered_writer), None);
        }
    }

    fn write_register(
        &self,
        (cpu, address): (u8, u64),
        register: SystemRegister,
        operand: Operand,
    ) {
        let value = self.value(operand);
        let state = &mut *self.state();
        self.identify(state, cpu);
        let registers = &mut state.registers[usize::from(cpu)];
        let before = *registers;
        let Some(action) = registers.set(register, value) else { return };
        let registers = *registers;
        let selects_guest = &self.cpus[usize::from(cpu)].selects_guest;
        selects_guest.store(registers.select_guest(), Ordering::Relaxed);
        let root = registers.root_selected_by(register, before);
        let tables = root.map_or_else(Vec::new, |(vttbr, vtcr)| {
            state.tables.add_stage2(&*self.machine, &self.pages, vttbr, vtcr)
        });
        // Readers know the size of tables by VTCR_EL2.
        if register == SystemRegister::Vtcr {
            state.trace.emit(cpu, action, None);
            return self.report_tables(state, cpu, tables, table_action);
        }
        self.report_tables(state, cpu, tables, table_action);
        let stack = match register {
            SystemRegister::Vttbr => state.trace.stack(&*self.machine, cpu, address),
            _ => None,
        };
        state.trace.emit(cpu, action, stack);
    }

    fn write_kernel_register(
        &self,
        (cpu, address): (u8, u64),
        register: KernelRegister,
        operand: Operand,
    ) {
        let value = self.value(operand);
        let state = &mut *self.state();
        let others = state.registers[usize::from(cpu)];
        let Some(kernel) = &mut state.kernel else { return };
        let place: (&dyn Machine, _) = (&*self.machine, &self.pages);
        let Some((action, tables)) = kernel.set(place, cpu, (register, value), others) else {
            return;
        };
        self.identify(state, cpu);
        self.report_tables(state, cpu, tables, kernel_table_action);
        let stack = state.trace.stack(&*self.machine, cpu, address);
        state.trace.emit(cpu, action, stack);
    }

    /// Writes the identification registers once: all CPUs have the same model.
    fn identify(&self, state: &mut State, cpu: u8) {
        if mem::replace(&mut state.is_identified, true) {
            return;
        }
        for name in IDENTIFICATION {
            match self.machine.identification(name) {
                Some(value) => {
                    state.trace.emit(cpu, MachineAction::Identify(name.into(), value), None);
                }
                None => state.trace.skip(name),
            }
        }
    }

    fn barrier(&self, cpu: u8, barrier: Barrier) {
        let is_alone = || self.state().kernel.as_ref().is_some_and(|one| one.is_alone(cpu));
        if barrier.orders_stores() || (barrier.orders_stores_locally() && is_alone()) {
            self.cpus[usize::from(cpu)].epoch.fetch_add(1, Ordering::Relaxed);
        }
        self.state().trace.barrier(cpu, barrier);
    }

    /// Processes a TLB invalidation: only those that affect stage 2 are reported.
    fn tlbi(&self, (cpu, address): (u8, u64), name: &str, operand: u64) {
        let name = name.trim_start_matches("TLBI ").to_lowercase();
        let state = &mut *self.state();
        if state.kernel.is_some() {
            let others = state.registers[usize::from(cpu)];
            if KernelTables::concerns(&*self.machine, &name, operand, others) {
                let stack = state.trace.stack(&*self.machine, cpu, address);
                let action = MachineAction::KernelTlbi(name.clone(), operand);
                state.trace.emit(cpu, action, stack);
            }
        }
        let relevant = ["ipas2", "ripas2", "vmalle1", "vmalls12", "alle1"];
        if relevant.iter().any(|start| name.starts_with(start)) {
            let stack = state.trace.stack(&*self.machine, cpu, address);
            state.trace.emit(cpu, MachineAction::Tlbi(name, operand), stack);
        } else {
            state.trace.write_runs();
            state.trace.skip(&format!("tlbi-{name}"));
        }
    }

    fn maintain_line(&self, (cpu, address): (u8, u64), operation: LineOperation, operand: Operand) {
        let virt = self.value(operand);
        let state = &mut *self.state();
        let known = state.trace.translate_line(cpu, virt);
        let Some(phys) = known.or_else(|| self.machine.translate(virt)) else {
            return state.trace.skip("untranslated-line");
        };
        if operation.cleans_to_poc() {
            self.pages.set(phys, PageFlag::Written, false);
        }
        let line = self.line_sizes().line(operation, virt, phys);
        state.trace.line(&*self.machine, (cpu, address), line, || self.thread());
    }

    /// Records that the instruction at `address` writes a virtual range. Pages that are not mapped
    /// fault, and the instruction is executed again.
    fn write_range(&self, (cpu, address): (u8, u64), virt: u64, size: u64, value: StoredValue) {
        // A guest's instructions have no callback that writes a range.
        let store = Store { cpu, address, kind: StoreKind::Plain, is_at_el2: false };
        let epoch = self.cpus[usize::from(cpu)].epoch.load(Ordering::Relaxed);
        let end = virt.saturating_add(size);
        let mut start = virt;
        while start < end {
            let next = ((start | (PAGE_SIZE - 1)) + 1).min(end);
            if let Some(phys) = self.machine.translate(start)
                && self.pages.record_store(phys, Writer { cpu, epoch })
            {
                self.report_store(store, (phys, next - start), value);
            }
            start = next;
        }
    }
}
