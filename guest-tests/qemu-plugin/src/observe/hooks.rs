// SPDX-License-Identifier: GPL-2.0-or-later
//! The observer's callbacks in QEMU.

use std::{
    ffi::{c_uint, c_void},
    fs::File,
    io::BufWriter,
    path::Path,
    sync::OnceLock,
};

use granule_stage2::{PhysAddr, check::StoreKind};
use qemu_plugin_sys as sys;

use super::{
    arguments::TraceArguments,
    instruction::{accesses_memory, store_kind},
    observer::{Observer, Store},
    qemu::QemuMachine,
};
use crate::running_cpu;

static OBSERVER: OnceLock<Observer> = OnceLock::new();

/// Creates the trace of a machine.
///
/// # Errors
/// This QEMU does not let plugins observe it, or the output file cannot be created.
pub fn install(path: &Path, cpus: usize, arguments: TraceArguments) -> Result<(), String> {
    let machine = QemuMachine::find().ok_or(
        "this QEMU does not let plugins read registers and memory: omit trace, or use a \
         distribution's QEMU 9.1 or later",
    )?;
    let out = File::create(path).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    let out = Box::new(BufWriter::with_capacity(1 << 16, out));
    let observer = Observer::new(Box::new(machine), cpus, arguments, out);
    OBSERVER.set(observer).map_err(|_| "the plugin is already loaded".to_owned())
}

/// Ends the trace, if there is one.
///
/// # Errors
/// A line of the trace cannot be written.
pub fn finish() -> std::io::Result<()> {
    OBSERVER.get().map_or(Ok(()), Observer::finish)
}

/// Compares the copies of the tables with memory, if there is a trace.
pub fn verify() {
    if let Some(observer) = OBSERVER.get() {
        observer.verify();
    }
}

/// Registers the callbacks of an instruction that is being translated.
pub fn instrument(insn: *mut sys::qemu_plugin_insn, address: u64, word: u32) {
    let Some(observer) = OBSERVER.get() else { return };
    for number in observer.callbacks(address, word) {
        on_execution(insn, number);
    }
    if accesses_memory(word) {
        // QEMU translates an instruction for one exception level, that of the running CPU.
        let callback = if observer.is_at_el2() { on_store_at_el2 } else { on_store };
        on_stores(insn, callback, address, store_kind(word));
    }
}

/// Registers the callback with this number before each execution of an instruction.
fn on_execution(insn: *mut sys::qemu_plugin_insn, number: usize) {
    let registers = sys::qemu_plugin_cb_flags::QEMU_PLUGIN_CB_R_REGS;
    let data = std::ptr::without_provenance_mut(number);
    // SAFETY: `insn` is valid during translation; the callback takes `data` as a number.
    unsafe {
        sys::qemu_plugin_register_vcpu_insn_exec_cb(insn, Some(on_instruction), registers, data);
    }
}

type StoreCallback = unsafe extern "C" fn(c_uint, sys::qemu_plugin_meminfo_t, u64, *mut c_void);

/// Registers a callback behind each store of an instruction. Its data are the address, and the kind
/// in the two low bits, which are zero in addresses of A64 instructions.
fn on_stores(
    insn: *mut sys::qemu_plugin_insn,
    callback: StoreCallback,
    address: u64,
    kind: StoreKind,
) {
    let registers = sys::qemu_plugin_cb_flags::QEMU_PLUGIN_CB_R_REGS;
    let stores = sys::qemu_plugin_mem_rw::QEMU_PLUGIN_MEM_W;
    let kind = match kind {
        StoreKind::Plain => 0,
        StoreKind::Release => 1,
        StoreKind::Swap => 2,
        StoreKind::RelaxedSwap => 3,
    };
    let number = usize::try_from(address & !3 | kind).unwrap_or(0);
    let data = std::ptr::without_provenance_mut(number);
    // SAFETY: `insn` is valid during translation; the callback takes `data` as a number.
    unsafe {
        sys::qemu_plugin_register_vcpu_mem_cb(insn, Some(callback), registers, stores, data);
    }
}

unsafe extern "C" fn on_store(
    _: c_uint,
    info: sys::qemu_plugin_meminfo_t,
    virt: u64,
    data: *mut c_void,
) {
    // SAFETY: QEMU calls this behind a store.
    unsafe { report_store(info, virt, data, false) };
}

/// Reports a store at EL2, also while HCR_EL2 selects a guest.
unsafe extern "C" fn on_store_at_el2(
    _: c_uint,
    info: sys::qemu_plugin_meminfo_t,
    virt: u64,
    data: *mut c_void,
) {
    // SAFETY: QEMU calls this behind a store.
    unsafe { report_store(info, virt, data, true) };
}

/// # Safety
/// `info` describes the access that has just been executed.
unsafe fn report_store(
    info: sys::qemu_plugin_meminfo_t,
    virt: u64,
    data: *mut c_void,
    is_at_el2: bool,
) {
    let (Some(observer), Some(cpu)) = (OBSERVER.get(), cpu()) else { return };
    // SAFETY: QEMU passes the description of the access that has just been executed.
    let place = unsafe { sys::qemu_plugin_get_hwaddr(info, virt) };
    // SAFETY: QEMU returns null or a description that is valid until the next access.
    let is_io = place.is_null() || unsafe { sys::qemu_plugin_hwaddr_is_io(place) };
    if is_io {
        return;
    }
    // SAFETY: as above.
    let phys = PhysAddr(unsafe { sys::qemu_plugin_hwaddr_phys_addr(place) });
    let number = data.addr() as u64;
    let kind = match number & 3 {
        0 => StoreKind::Plain,
        1 => StoreKind::Release,
        2 => StoreKind::Swap,
        _ => StoreKind::RelaxedSwap,
    };
    let store = Store { cpu, address: number & !3, kind, is_at_el2 };
    // SAFETY: the description is valid during this call.
    observer.store(store, phys, || 1 << unsafe { sys::qemu_plugin_mem_size_shift(info) });
}

unsafe extern "C" fn on_instruction(_: c_uint, number: *mut c_void) {
    if let (Some(observer), Some(cpu)) = (OBSERVER.get(), cpu()) {
        observer.execute(cpu, number.addr());
    }
}

fn cpu() -> Option<u8> {
    running_cpu::number().and_then(|number| u8::try_from(number).ok())
}
