// SPDX-License-Identifier: GPL-2.0-or-later
//! The CPU that QEMU runs: its key, and the end of its turn.
//!
//! From QEMU 9.1 to at least 10.0, the CPU number passed to callbacks is wrong under `-icount`: a
//! block of code keeps the number of the CPU that translated it. The key is therefore the register
//! `TPIDR_EL2`, which holds the kernel's per-CPU offset with and without VHE. KVM never lets a
//! guest write it. Older versions do not let plugins read registers, but pass correct CPU numbers.
//!
//! `cpu_exit`, a function of QEMU, ends a turn: the running CPU leaves its loop after the current
//! block. It is not part of the plugin interface, but its signature has not changed since 2013,
//! and QEMU exports it if built with modules, as distributions do.
//!
//! The number of the running CPU is its place in the list that `qemu_get_cpu` returns, another
//! function outside the plugin interface.

use std::{
    ffi::{c_int, c_void},
    mem,
    ptr::NonNull,
    sync::OnceLock,
};

use crate::{glib::find_symbol, registers::Register};

type CpuExitFn = unsafe extern "C" fn(*mut c_void);
type GetCpu = unsafe extern "C" fn(c_int) -> *mut c_void;

/// Returns the value of `TPIDR_EL2` of the running CPU; `None` if QEMU does not offer it.
pub fn read_register() -> Option<u64> {
    static REGISTER: OnceLock<Option<Register>> = OnceLock::new();
    REGISTER.get_or_init(|| Register::find("TPIDR_EL2")).as_ref()?.read()
}

/// Returns the number of the running CPU in QEMU's order, if QEMU exports its list of CPUs.
pub fn number() -> Option<usize> {
    static CPUS: OnceLock<Vec<usize>> = OnceLock::new();
    let cpus = CPUS.get_or_init(|| {
        let Some(get) = find_symbol(c"qemu_get_cpu") else { return Vec::new() };
        // SAFETY: QEMU's function of this name has this type.
        let get = unsafe { mem::transmute::<*mut c_void, GetCpu>(get.as_ptr()) };
        // SAFETY: all CPUs exist before one runs; beyond the last, the function returns null.
        let cpus = (0..).map(|number| unsafe { get(number) });
        cpus.take_while(|cpu| !cpu.is_null()).map(|cpu| cpu.addr()).collect()
    });
    let running = current_cpu_pointer()?.addr();
    cpus.iter().position(|cpu| *cpu == running)
}

/// Returns QEMU's description of the running CPU.
pub fn current_cpu_pointer() -> Option<*mut c_void> {
    // SAFETY: `current_cpu` is a pointer of this thread.
    current_cpu().map(|address| unsafe { address.read() })
}

/// QEMU's function `cpu_exit`, which ends the turn of the running CPU.
#[derive(Debug, Clone, Copy)]
pub struct CpuExit(CpuExitFn);

impl CpuExit {
    /// Looks up the function; `None` if QEMU does not export it.
    pub fn find() -> Option<Self> {
        current_cpu()?;
        let exit = find_symbol(c"cpu_exit")?;
        // SAFETY: QEMU's function of this name has this type.
        Some(Self(unsafe { mem::transmute::<*mut c_void, CpuExitFn>(exit.as_ptr()) }))
    }

    /// Ends the turn after the current block. The caller is a callback of the running CPU.
    pub fn end_turn(self) {
        let Some(cpu) = current_cpu_pointer() else { return };
        if !cpu.is_null() {
            // SAFETY: a CPU that runs is a valid argument, on any thread.
            unsafe { (self.0)(cpu) }
        }
    }
}

/// Returns the address of `current_cpu`, QEMU's variable of this thread.
fn current_cpu() -> Option<NonNull<*mut c_void>> {
    thread_local! {
        static ADDRESS: Option<NonNull<*mut c_void>> =
            find_symbol(c"current_cpu").map(NonNull::cast);
    }
    ADDRESS.with(|address| *address)
}
