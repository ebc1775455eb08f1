// SPDX-License-Identifier: GPL-2.0-or-later
//! The machine that QEMU emulates.
//!
//! Up to interface version 4, plugins can read memory by virtual address only. `cpu_physical_memory_rw`
//! and `cpu_get_phys_page_debug` of QEMU are not part of the interface, but QEMU exports them if
//! built with modules, as distributions do.

use std::{
    ffi::{c_int, c_void},
    mem,
    sync::OnceLock,
};

use granule_stage2::PhysAddr;

use super::{machine::Machine, pages::PAGE_SIZE};
use crate::{
    registers::{Register, find_symbol},
    running_cpu,
};

type ReadMemory = unsafe extern "C" fn(u64, *mut c_void, u64, c_int);
type TranslatePage = unsafe extern "C" fn(*mut c_void, u64) -> u64;

/// The machine of this process.
#[derive(Debug)]
pub struct QemuMachine {
    read: ReadMemory,
    translate: TranslatePage,
    registers: OnceLock<Option<Registers>>,
}

#[derive(Debug)]
struct Registers {
    general: Vec<Register>,
    state: Register,
}

impl Registers {
    fn find() -> Option<Self> {
        let general: Option<_> =
            (0..31).map(|number| Register::find(&format!("x{number}"))).collect();
        Some(Self { general: general?, state: Register::find("cpsr")? })
    }
}

impl QemuMachine {
    /// Looks up QEMU's functions; `None` if one is missing.
    pub fn find() -> Option<Self> {
        find_symbol(c"qemu_plugin_read_register")?;
        find_symbol(c"qemu_get_cpu")?;
        let read = find_symbol(c"cpu_physical_memory_rw")?;
        let translate = find_symbol(c"cpu_get_phys_page_debug")?;
        // SAFETY: QEMU's function of this name has this type; a `bool` is passed as an `int`.
        let read = unsafe { mem::transmute::<*mut c_void, ReadMemory>(read.as_ptr()) };
        // SAFETY: QEMU's function of this name has this type.
        let translate = unsafe { mem::transmute::<*mut c_void, TranslatePage>(translate.as_ptr()) };
        Some(Self { read, translate, registers: OnceLock::new() })
    }

    fn registers(&self) -> Option<&Registers> {
        self.registers.get_or_init(Registers::find).as_ref()
    }
}

impl Machine for QemuMachine {
    fn read(&self, phys: PhysAddr, bytes: &mut [u8]) -> bool {
        let is_write = 0;
        // SAFETY: QEMU writes as many bytes as the buffer has, also outside memory.
        unsafe {
            (self.read)(phys.0, bytes.as_mut_ptr().cast(), bytes.len() as u64, is_write);
        }
        true
    }

    fn translate(&self, virt: u64) -> Option<PhysAddr> {
        let cpu = running_cpu::current_cpu_pointer().filter(|cpu| !cpu.is_null())?;
        // SAFETY: the CPU runs on this thread; the function changes nothing.
        let page = unsafe { (self.translate)(cpu, virt & !(PAGE_SIZE - 1)) };
        (page != u64::MAX).then(|| PhysAddr(page) + virt % PAGE_SIZE)
    }

    fn register(&self, number: u8) -> u64 {
        let register = self.registers().and_then(|all| all.general.get(usize::from(number)));
        register.and_then(|register| register.read()).unwrap_or(0)
    }

    fn exception_level(&self) -> u8 {
        let state = self.registers().and_then(|all| all.state.read()).unwrap_or(0);
        u8::try_from((state >> 2) & 3).unwrap_or(0)
    }
}
