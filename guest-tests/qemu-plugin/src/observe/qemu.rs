// SPDX-License-Identifier: GPL-2.0-or-later
//! The machine that QEMU emulates.
//!
//! Since interface version 5, plugins read physical memory and translate addresses. For version 4,
//! `cpu_physical_memory_rw` and `cpu_get_phys_page_debug` do so: QEMU exports these functions of its
//! own if built with modules, as distributions do.

use std::{
    ffi::{c_int, c_void},
    mem,
    sync::OnceLock,
};

use granule_stage2::PhysAddr;

use super::{machine::Machine, pages::PAGE_SIZE};
use crate::{
    glib::{ByteArray, GlibArray, find_symbol},
    registers::Register,
    running_cpu,
};

type ReadMemory = unsafe extern "C" fn(u64, *mut GlibArray, usize) -> c_int;
type Translate = unsafe extern "C" fn(u64, *mut u64) -> bool;
type InternalReadMemory = unsafe extern "C" fn(u64, *mut c_void, u64, c_int);
type InternalTranslatePage = unsafe extern "C" fn(*mut c_void, u64) -> u64;

/// QEMU's functions for memory.
#[derive(Debug)]
enum Memory {
    /// Interface version 5.
    Interface { read: ReadMemory, translate: Translate, buffer: ByteArray },
    /// Functions outside the interface.
    Internal { read: InternalReadMemory, translate: InternalTranslatePage },
}

impl Memory {
    fn find() -> Option<Self> {
        let read = find_symbol(c"qemu_plugin_read_memory_hwaddr");
        if let Some((read, translate)) = read.zip(find_symbol(c"qemu_plugin_translate_vaddr")) {
            // SAFETY: QEMU's function of this name has this type.
            let read = unsafe { mem::transmute::<*mut c_void, ReadMemory>(read.as_ptr()) };
            // SAFETY: as above.
            let translate = unsafe { mem::transmute::<*mut c_void, Translate>(translate.as_ptr()) };
            return Some(Self::Interface { read, translate, buffer: ByteArray::new()? });
        }
        let read = find_symbol(c"cpu_physical_memory_rw")?.as_ptr();
        let translate = find_symbol(c"cpu_get_phys_page_debug")?.as_ptr();
        // SAFETY: QEMU's function of this name has this type; a `bool` is passed as an `int`.
        let read = unsafe { mem::transmute::<*mut c_void, InternalReadMemory>(read) };
        // SAFETY: QEMU's function of this name has this type.
        let translate = unsafe { mem::transmute::<*mut c_void, InternalTranslatePage>(translate) };
        Some(Self::Internal { read, translate })
    }
}

/// The machine of this process.
#[derive(Debug)]
pub struct QemuMachine {
    memory: Memory,
    registers: OnceLock<Option<Registers>>,
}

#[derive(Debug)]
struct Registers {
    general: Vec<Register>,
    state: Register,
    thread_pointer: Option<Register>,
}

impl Registers {
    fn find() -> Option<Self> {
        let general: Option<_> =
            (0..31).map(|number| Register::find(&format!("x{number}"))).collect();
        let thread_pointer = Register::find("SP_EL0");
        Some(Self { general: general?, state: Register::find("cpsr")?, thread_pointer })
    }
}

impl QemuMachine {
    /// Looks up QEMU's functions; `None` if one is missing.
    pub fn find() -> Option<Self> {
        find_symbol(c"qemu_plugin_read_register")?;
        find_symbol(c"qemu_get_cpu")?;
        Some(Self { memory: Memory::find()?, registers: OnceLock::new() })
    }

    fn registers(&self) -> Option<&Registers> {
        self.registers.get_or_init(Registers::find).as_ref()
    }
}

impl Machine for QemuMachine {
    fn read(&self, phys: PhysAddr, bytes: &mut [u8]) -> bool {
        let length = bytes.len();
        match &self.memory {
            Memory::Interface { read, buffer, .. } => {
                let filled = buffer.fill(bytes, |buffer| {
                    // SAFETY: QEMU appends at most `length` bytes.
                    unsafe { read(phys.0, buffer, length) };
                });
                filled == length
            }
            Memory::Internal { read, .. } => {
                let is_write = 0;
                // SAFETY: QEMU writes as many bytes as the buffer has, zeros outside memory.
                unsafe { read(phys.0, bytes.as_mut_ptr().cast(), length as u64, is_write) };
                true
            }
        }
    }

    fn translate(&self, virt: u64) -> Option<PhysAddr> {
        match &self.memory {
            Memory::Interface { translate, .. } => {
                let mut phys = 0;
                // SAFETY: the caller is a callback of the running CPU.
                let is_mapped = unsafe { translate(virt, &raw mut phys) };
                is_mapped.then_some(PhysAddr(phys))
            }
            Memory::Internal { translate, .. } => {
                let cpu = running_cpu::current_cpu_pointer().filter(|cpu| !cpu.is_null())?;
                // SAFETY: the CPU runs on this thread; the function changes nothing.
                let page = unsafe { translate(cpu, virt & !(PAGE_SIZE - 1)) };
                (page != u64::MAX).then(|| PhysAddr(page) + virt % PAGE_SIZE)
            }
        }
    }

    fn register(&self, number: u8) -> u64 {
        let register = self.registers().and_then(|all| all.general.get(usize::from(number)));
        register.and_then(|register| register.read()).unwrap_or(0)
    }

    fn thread_pointer(&self) -> u64 {
        let register = self.registers().and_then(|all| all.thread_pointer);
        register.and_then(Register::read).unwrap_or(0)
    }

    fn identification(&self, name: &str) -> Option<u64> {
        Register::find(&name.to_uppercase())?.read()
    }

    fn exception_level(&self) -> u8 {
        let state = self.registers().and_then(|all| all.state.read()).unwrap_or(0);
        u8::try_from((state >> 2) & 3).unwrap_or(0)
    }
}
