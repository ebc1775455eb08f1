// SPDX-License-Identifier: GPL-2.0-or-later
//! The plugin interface of QEMU.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    fs::File,
    io::BufWriter,
    mem,
    path::Path,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use qemu_plugin_sys as sys;

use crate::{
    arguments::Arguments,
    blocks::ExecutedBlock,
    clock::{Block, Clock, CpuKey},
    costs::{CostRule, CostTable},
    decode::{DecodedInstruction, decode, may_halt},
    interface::{self, Callbacks},
    interval::CountedInterval,
    observe::hooks,
    registers::find_registers,
    running_cpu::{self, CpuExit},
    segments::{Event, SegmentTimes, Segments},
    span::{Boundary, Span},
    stores::{barrier_name, is_store},
    tlb::Tlbs,
    tlb_counts::CountedTlbs,
};

/// The installed plugin.
static PLUGIN: OnceLock<Plugin> = OnceLock::new();

struct Plugin {
    segments: Segments<BufWriter<File>>,
    /// Addresses of counted functions, and their slots.
    functions: Vec<(u64, usize)>,
    /// Function whose calls are segments of their own.
    span: Option<Span>,
    /// Intervals, if they are counted.
    interval: Option<CountedInterval>,
    /// Slot of all instructions, if they are counted.
    instruction_slot: Option<usize>,
    /// Slot of stores, if they are counted.
    store_slot: Option<usize>,
    /// Indicates that `DSB` and `ISB` are counted.
    counts_barriers: bool,
    /// Indicates that blocks are counted.
    counts_blocks: bool,
    /// TLBs, if they are modelled.
    tlbs: Option<CountedTlbs>,
    /// Elapsed time, if it is measured.
    elapsed_time_meter: Option<ElapsedTimeMeter>,
    /// Indicates that `qemu_plugin_insn_data` copies the bytes instead of returning a pointer.
    is_data_copied: bool,
}

/// Meter of elapsed time.
struct ElapsedTimeMeter {
    clock: Mutex<Clock>,
    cpu_exit: CpuExit,
    costs: CostTable,
}

impl ElapsedTimeMeter {
    /// Returns a meter with turns of `quantum` picoseconds, which vary if there is a seed.
    fn new(quantum: u64, seed: Option<u64>, costs: CostTable) -> Result<Self, String> {
        let cpu_exit = CpuExit::find().ok_or(
            "this QEMU does not export cpu_exit, which ends a turn: omit quantum, or use a \
             distribution's QEMU, which is built with modules",
        )?;
        Ok(Self { clock: Mutex::new(Clock::new(quantum, seed)), cpu_exit, costs })
    }

    /// Returns the meter of the installed plugin, if it measures elapsed time.
    fn get() -> Option<&'static Self> {
        PLUGIN.get()?.elapsed_time_meter.as_ref()
    }

    fn clock(&self) -> MutexGuard<'_, Clock> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accounts a block of the running CPU. A register identifies the CPU, or the number `cpu` if
    /// QEMU does not offer registers; 0 is that of no CPU.
    fn account_block(&self, cpu: c_uint, block: Block) {
        let key = CpuKey(running_cpu::read_register().unwrap_or_else(|| u64::from(cpu) + 1));
        let ends = self.clock().account_block(key, block);
        if ends {
            self.cpu_exit.end_turn();
        }
    }
}

/// Installs the plugin; returns 0 on success.
///
/// # Safety
/// `info` points to QEMU's description of the machine, `argv` to `argc` strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qemu_plugin_install(
    id: sys::qemu_plugin_id_t,
    info: *const sys::qemu_info_t,
    argc: c_int,
    argv: *const *const c_char,
) -> c_int {
    let raw: Vec<String> = (0..usize::try_from(argc).unwrap_or(0))
        .map(|i| {
            // SAFETY: `i` is less than `argc`.
            let argument = unsafe { argv.add(i) };
            // SAFETY: QEMU passes `argc` valid pointers.
            let text = unsafe { *argument };
            // SAFETY: each pointer is valid and its string ends with a NUL.
            let text = unsafe { CStr::from_ptr(text) };
            text.to_string_lossy().into_owned()
        })
        .collect();
    // SAFETY: QEMU passes a valid pointer for the duration of this call.
    let info = unsafe { &*info };
    let cpus = if info.system_emulation {
        // SAFETY: `system` is the union's member in system emulation.
        let system = unsafe { info.__bindgen_anon_1.system };
        usize::try_from(system.max_vcpus).unwrap_or(0)
    } else {
        eprintln!("qemu-plugin: user mode emulation is not supported");
        return 1;
    };
    let installed = Plugin::new(cpus, &raw).and_then(|plugin| {
        PLUGIN.set(plugin).map_err(|_| "the plugin is already loaded".to_owned())
    });
    if let Err(error) = installed {
        eprintln!("qemu-plugin: {error}");
        return 1;
    }
    interface::register(id, Callbacks { on_cpu_init, on_translate, on_exit });
    0
}

impl Plugin {
    fn new(cpus: usize, raw: &[String]) -> Result<Self, String> {
        let arguments =
            Arguments::parse(raw.iter().map(String::as_str)).map_err(|e| e.to_string())?;
        // One extra row: before the kernel sets their keys, all CPUs have the same key.
        let rows = cpus + 1;
        let segments = Segments::new(rows, create_output(&arguments.out)?);
        if let Some(file) = arguments.trace.file.clone() {
            hooks::install(&file, cpus, arguments.trace)?;
        }
        let functions = arguments
            .functions
            .into_iter()
            .map(|(name, address)| (address, segments.slot(Event::Function(name))))
            .collect();
        let interval = arguments.interval;
        let interval =
            interval.map(|own| CountedInterval::new(own, rows, |event| segments.slot(event)));
        let slot = |is_counted: bool, event| is_counted.then(|| segments.slot(event));
        let instruction_slot = slot(arguments.counts_instructions, Event::Instruction);
        let store_slot = slot(arguments.counts_stores, Event::Store);
        let tlbs = CountedTlbs::new(&arguments.tlb, cpus, |event| segments.slot(event))?;
        Ok(Self {
            segments,
            functions,
            span: arguments.span.map(|(name, entry)| Span::new(name, entry)),
            interval,
            instruction_slot,
            store_slot,
            counts_barriers: arguments.counts_barriers,
            counts_blocks: arguments.counts_blocks,
            tlbs,
            elapsed_time_meter: arguments
                .quantum
                .map(|quantum| ElapsedTimeMeter::new(quantum, arguments.seed, arguments.costs))
                .transpose()?,
            is_data_copied: interface::version() >= 3,
        })
    }

    /// Returns the first four bytes of an instruction.
    fn instruction_word(&self, insn: *const sys::qemu_plugin_insn) -> u32 {
        if self.is_data_copied {
            type Copying =
                unsafe extern "C" fn(*const sys::qemu_plugin_insn, *mut c_void, usize) -> usize;
            let pointing: unsafe extern "C" fn(*const sys::qemu_plugin_insn) -> *const c_void =
                sys::qemu_plugin_insn_data;
            // SAFETY: since interface version 3 this is the type of the function.
            let copying: Copying = unsafe { mem::transmute(pointing) };
            let mut bytes = [0; 4];
            // SAFETY: `insn` is valid during translation; at most `len` bytes are written.
            unsafe { copying(insn, bytes.as_mut_ptr().cast(), bytes.len()) };
            u32::from_le_bytes(bytes)
        } else {
            // SAFETY: `insn` is valid during translation.
            let data = unsafe { sys::qemu_plugin_insn_data(insn) };
            // SAFETY: an A64 instruction has four bytes; a T32 instruction of two bytes is in a
            // larger buffer.
            let bytes = unsafe { data.cast::<[u8; 4]>().read_unaligned() };
            u32::from_le_bytes(bytes)
        }
    }
}

fn create_output(path: &Path) -> Result<BufWriter<File>, String> {
    File::create(path)
        .map(BufWriter::new)
        .map_err(|e| format!("cannot write {}: {e}", path.display()))
}

/// Registers callbacks for a block of code when QEMU translates it.
fn on_translate(tb: *mut sys::qemu_plugin_tb) {
    let Some(plugin) = PLUGIN.get() else { return };
    // SAFETY: QEMU passes a valid block.
    let count = unsafe { sys::qemu_plugin_tb_n_insns(tb) };
    let mut block = Block { instructions: count as u64, cost: 0, may_halt: false };
    let mut stores = 0;
    for i in 0..count {
        // SAFETY: `i` is less than the block's number of instructions.
        let insn = unsafe { sys::qemu_plugin_tb_get_insn(tb, i) };
        // SAFETY: `insn` is valid during translation.
        let address = unsafe { sys::qemu_plugin_insn_vaddr(insn) };
        for (function, slot) in &plugin.functions {
            if *function == address {
                on_execution(insn, on_counted_instruction, *slot);
            }
        }
        if let Some(boundary) = plugin.interval.as_ref().and_then(|own| own.boundary(address)) {
            on_execution(insn, on_interval_boundary, boundary);
        }
        if let Some(observed) = &plugin.tlbs {
            observe_accesses(&observed.tlbs, insn, address);
        }
        let word = plugin.instruction_word(insn);
        if let Some(boundary) = plugin.span.as_ref().and_then(|span| span.observe(address, word)) {
            on_block_start(tb, on_boundary, usize::from(boundary == Boundary::Entry));
        }
        stores += usize::from(is_store(word));
        hooks::instrument(insn, address, word);
        if let Some(elapsed) = &plugin.elapsed_time_meter {
            match elapsed.costs.rule(word) {
                CostRule::Fixed(cost) => block.cost += cost,
                CostRule::DcLine => on_execution(insn, on_dc_line, 0),
                CostRule::RangeEnd(cost) => {
                    block.cost += cost;
                    on_execution(insn, on_dc_range_end, 0);
                }
                CostRule::Atomic(cost) => {
                    block.cost += cost;
                    on_access(insn, sys::qemu_plugin_mem_rw::QEMU_PLUGIN_MEM_W, on_atomic_write);
                }
            }
        }
        block.may_halt = may_halt(word);
        match decode(word) {
            Some(DecodedInstruction::Maintenance(operation)) => {
                let slot = plugin.segments.slot(Event::Maintenance(operation));
                on_execution(insn, on_counted_instruction, slot);
            }
            Some(DecodedInstruction::Mark(mark)) => on_execution(insn, on_mark, usize::from(mark)),
            None => {}
        }
        if let Some(name) = barrier_name(word).filter(|_| plugin.counts_barriers) {
            on_execution(insn, on_counted_instruction, plugin.segments.slot(Event::Barrier(name)));
        }
    }
    if plugin.store_slot.is_some() && stores > 0 {
        on_block_start(tb, on_stores, stores);
    }
    if plugin.counts_blocks {
        // SAFETY: `tb` is valid during translation.
        let address = unsafe { sys::qemu_plugin_tb_vaddr(tb) };
        let slot = plugin.segments.blocks().slot(address);
        on_block_start(tb, on_counted_block, ExecutedBlock { slot, instructions: count }.pack());
    }
    if plugin.instruction_slot.is_some()
        || plugin.elapsed_time_meter.is_some()
        || plugin.interval.is_some()
    {
        let flags = match plugin.elapsed_time_meter {
            Some(_) => sys::qemu_plugin_cb_flags::QEMU_PLUGIN_CB_R_REGS,
            None => sys::qemu_plugin_cb_flags::QEMU_PLUGIN_CB_NO_REGS,
        };
        let data = std::ptr::without_provenance_mut(block.pack());
        // SAFETY: `tb` is valid during translation; the callback takes `data` as a number.
        unsafe { sys::qemu_plugin_register_vcpu_tb_exec_cb(tb, Some(on_block), flags, data) };
    }
}

/// Registers a callback with `number` for each execution of a block.
fn on_block_start(
    tb: *mut sys::qemu_plugin_tb,
    callback: unsafe extern "C" fn(c_uint, *mut c_void),
    number: usize,
) {
    let no_registers = sys::qemu_plugin_cb_flags::QEMU_PLUGIN_CB_NO_REGS;
    let data = std::ptr::without_provenance_mut(number);
    // SAFETY: `tb` is valid during translation; the callbacks take `data` as a number.
    unsafe { sys::qemu_plugin_register_vcpu_tb_exec_cb(tb, Some(callback), no_registers, data) };
}

/// Registers a callback with `number` for each execution of an instruction.
fn on_execution(
    insn: *mut sys::qemu_plugin_insn,
    callback: unsafe extern "C" fn(c_uint, *mut c_void),
    number: usize,
) {
    let no_registers = sys::qemu_plugin_cb_flags::QEMU_PLUGIN_CB_NO_REGS;
    let data = std::ptr::without_provenance_mut(number);
    // SAFETY: `insn` is valid during translation; the callbacks take `data` as a number.
    unsafe {
        sys::qemu_plugin_register_vcpu_insn_exec_cb(insn, Some(callback), no_registers, data);
    }
}

/// Registers a callback for each access of an instruction, of this kind.
fn on_access(
    insn: *mut sys::qemu_plugin_insn,
    kind: sys::qemu_plugin_mem_rw,
    callback: unsafe extern "C" fn(c_uint, sys::qemu_plugin_meminfo_t, u64, *mut c_void),
) {
    let no_registers = sys::qemu_plugin_cb_flags::QEMU_PLUGIN_CB_NO_REGS;
    let no_data = std::ptr::null_mut();
    // SAFETY: `insn` is valid during translation; the callback takes no data.
    unsafe {
        sys::qemu_plugin_register_vcpu_mem_cb(insn, Some(callback), no_registers, kind, no_data);
    }
}

/// Registers the callbacks of the model of TLBs for an instruction.
fn observe_accesses(tlbs: &Tlbs, insn: *mut sys::qemu_plugin_insn, address: u64) {
    if let Some((entry, exit)) = tlbs.guest
        && (address == entry || address == exit)
    {
        on_execution(insn, on_guest, usize::from(address == entry));
    }
    on_access(insn, sys::qemu_plugin_mem_rw::QEMU_PLUGIN_MEM_RW, on_data);
}

impl Plugin {
    /// Returns the row of counts of the CPU that runs.
    fn counter_row(&self, cpu: c_uint) -> usize {
        match &self.elapsed_time_meter {
            Some(elapsed) => elapsed.clock().current_row(),
            None => cpu as usize,
        }
    }

    /// Ends the clock's segment and returns its times.
    fn end_clock_segment(&self) -> SegmentTimes {
        let Some(elapsed) = &self.elapsed_time_meter else { return SegmentTimes::default() };
        let mut clock = elapsed.clock();
        SegmentTimes { time: Some(clock.end_segment()), cpu_of_row: clock.cpu_of_row() }
    }
}

fn on_cpu_init() {
    find_registers();
    let needs_register =
        PLUGIN.get().is_some_and(|p| p.elapsed_time_meter.is_some() && p.is_data_copied);
    if needs_register && running_cpu::read_register().is_none() {
        eprintln!(
            "qemu-plugin: this QEMU does not offer TPIDR_EL2 to plugins, and its CPU numbers are \
             wrong under -icount: omit quantum, or use QEMU 7.2 or 10.0"
        );
        std::process::exit(1);
    }
}

unsafe extern "C" fn on_counted_instruction(cpu: c_uint, slot: *mut c_void) {
    if let Some(plugin) = PLUGIN.get() {
        plugin.segments.count(plugin.counter_row(cpu), slot.addr(), 1);
    }
}

unsafe extern "C" fn on_interval_boundary(cpu: c_uint, boundary: *mut c_void) {
    let Some(plugin) = PLUGIN.get() else { return };
    let Some(own) = &plugin.interval else { return };
    let row = plugin.counter_row(cpu);
    for (slot, increment) in own.pass(row, boundary.addr()).into_iter().flatten() {
        plugin.segments.count(row, slot, increment);
    }
}

unsafe extern "C" fn on_dc_line(_: c_uint, _: *mut c_void) {
    if let Some(elapsed) = ElapsedTimeMeter::get() {
        elapsed.clock().account_dc_line(&elapsed.costs);
    }
}

unsafe extern "C" fn on_dc_range_end(_: c_uint, _: *mut c_void) {
    if let Some(elapsed) = ElapsedTimeMeter::get() {
        elapsed.clock().end_dc_range();
    }
}

unsafe extern "C" fn on_atomic_write(
    _: c_uint,
    _: sys::qemu_plugin_meminfo_t,
    address: u64,
    _: *mut c_void,
) {
    if let Some(elapsed) = ElapsedTimeMeter::get() {
        elapsed.clock().account_atomic_write(address, &elapsed.costs);
    }
}

unsafe extern "C" fn on_guest(_: c_uint, is_entry: *mut c_void) {
    if let Some(observed) = PLUGIN.get().and_then(|plugin| plugin.tlbs.as_ref()) {
        observed.tlbs.set_guest(is_entry.addr() != 0);
    }
}

unsafe extern "C" fn on_data(
    cpu: c_uint,
    _: sys::qemu_plugin_meminfo_t,
    address: u64,
    _: *mut c_void,
) {
    let Some(plugin) = PLUGIN.get() else { return };
    let Some(observed) = &plugin.tlbs else { return };
    observed.access(address, |slot| plugin.segments.count(cpu as usize, slot, 1));
}

unsafe extern "C" fn on_block(cpu: c_uint, block: *mut c_void) {
    let Some(plugin) = PLUGIN.get() else { return };
    let block = Block::unpack(block.addr());
    if let Some(elapsed) = &plugin.elapsed_time_meter {
        elapsed.account_block(cpu, block);
    }
    if plugin.interval.is_none() && plugin.instruction_slot.is_none() {
        return;
    }
    let row = plugin.counter_row(cpu);
    if let Some(own) = &plugin.interval {
        own.execute(row, block.instructions);
    }
    if let Some(slot) = plugin.instruction_slot {
        plugin.segments.count(row, slot, block.instructions);
    }
}

unsafe extern "C" fn on_counted_block(_: c_uint, block: *mut c_void) {
    if let Some(plugin) = PLUGIN.get() {
        let ExecutedBlock { slot, instructions } = ExecutedBlock::unpack(block.addr());
        plugin.segments.blocks().count(slot, instructions as u64);
    }
}

unsafe extern "C" fn on_stores(cpu: c_uint, stores: *mut c_void) {
    if let Some(plugin) = PLUGIN.get()
        && let Some(slot) = plugin.store_slot
    {
        plugin.segments.count(plugin.counter_row(cpu), slot, stores.addr() as u64);
    }
}

unsafe extern "C" fn on_boundary(_: c_uint, is_entry: *mut c_void) {
    let is_entry = is_entry.addr() != 0;
    if let Some(plugin) = PLUGIN.get()
        && let Some(span) = &plugin.span
        && plugin.segments.is_in_span() != is_entry
    {
        let name = is_entry.then_some(span.name.as_str());
        if let Err(e) = plugin.segments.set_span(name, plugin.end_clock_segment()) {
            eprintln!("qemu-plugin: cannot write a segment: {e}");
        }
    }
}

unsafe extern "C" fn on_mark(cpu: c_uint, mark: *mut c_void) {
    hooks::verify();
    if let (Some(plugin), Ok(mark)) = (PLUGIN.get(), u8::try_from(mark.addr()))
        && plugin.segments.begins_segment(mark)
    {
        for (row, slot, increment) in plugin.interval.iter().flat_map(CountedInterval::split) {
            let row = row.unwrap_or_else(|| plugin.counter_row(cpu));
            plugin.segments.count(row, slot, increment);
        }
        if let Err(e) = plugin.segments.mark(mark, plugin.end_clock_segment()) {
            eprintln!("qemu-plugin: cannot write a segment: {e}");
        }
    }
}

fn on_exit() {
    if let Some(plugin) = PLUGIN.get()
        && let Err(e) = plugin.segments.finish(plugin.end_clock_segment())
    {
        eprintln!("qemu-plugin: cannot complete the counts: {e}");
    }
    if let Err(e) = hooks::finish() {
        eprintln!("qemu-plugin: cannot complete the trace: {e}");
    }
}
