// SPDX-License-Identifier: GPL-2.0-or-later
//! Registers of the running CPU, by their names in QEMU's list.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem,
    sync::OnceLock,
};

use crate::glib::{ByteArray, GlibArray, find_symbol};

/// `qemu_plugin_reg_descriptor`: the fields of every version. Later versions have more.
#[repr(C)]
struct RegisterDescriptor {
    handle: *mut c_void,
    name: *const c_char,
    feature: *const c_char,
}

type ElementSize = unsafe extern "C" fn(*mut GlibArray) -> c_uint;
type GetRegisters = unsafe extern "C" fn() -> *mut GlibArray;
/// The result is a length or, in later versions, a `bool`.
type ReadRegister = unsafe extern "C" fn(*mut c_void, *mut GlibArray) -> c_int;

/// The registers of a CPU model, and a buffer to read them into.
#[derive(Debug)]
struct RegisterList {
    registers: Vec<(String, *mut c_void)>,
    buffer: ByteArray,
    read: ReadRegister,
}

// SAFETY: under `-icount` one thread runs all CPUs, and only it uses the registers.
unsafe impl Send for RegisterList {}
// SAFETY: as above.
unsafe impl Sync for RegisterList {}

static REGISTERS: OnceLock<Option<RegisterList>> = OnceLock::new();

/// Reads QEMU's list. QEMU calls this on the thread of each CPU that it initialises.
pub fn find_registers() {
    REGISTERS.get_or_init(|| {
        let get = find_symbol(c"qemu_plugin_get_registers")?;
        let read = find_symbol(c"qemu_plugin_read_register")?;
        // SAFETY: QEMU's function of this name has this type.
        let get = unsafe { mem::transmute::<*mut c_void, GetRegisters>(get.as_ptr()) };
        // SAFETY: as above.
        let read = unsafe { mem::transmute::<*mut c_void, ReadRegister>(read.as_ptr()) };
        let size = find_symbol(c"g_array_get_element_size")?;
        // SAFETY: GLib's function of this name has this type.
        let size = unsafe { mem::transmute::<*mut c_void, ElementSize>(size.as_ptr()) };
        // SAFETY: a CPU is being initialised on this thread, as the function requires.
        let array = unsafe { get() };
        // SAFETY: QEMU returns null or an array, which is never freed here.
        let list = unsafe { array.as_ref() }?;
        // SAFETY: as above.
        let size = unsafe { size(array) } as usize;
        let registers = (0..list.len as usize).filter_map(|i| {
            // SAFETY: the array holds `len` descriptors of this size.
            let descriptor = unsafe { list.data.add(i * size) }.cast::<RegisterDescriptor>();
            // SAFETY: as above; GLib aligns its arrays for any type.
            let descriptor = unsafe { descriptor.as_ref() }?;
            // SAFETY: QEMU's names end with a NUL and live as long as QEMU.
            let name = unsafe { CStr::from_ptr(descriptor.name) };
            Some((name.to_string_lossy().into_owned(), descriptor.handle))
        });
        let registers = registers.collect();
        Some(RegisterList { registers, buffer: ByteArray::new()?, read })
    });
}

/// A register that QEMU offers.
#[derive(Debug, Clone, Copy)]
pub struct Register(*mut c_void);

// SAFETY: the handle is a number.
unsafe impl Send for Register {}
// SAFETY: as above.
unsafe impl Sync for Register {}

impl Register {
    /// Returns the register with a name; `None` if QEMU does not offer it.
    pub fn find(name: &str) -> Option<Self> {
        let list = REGISTERS.get()?.as_ref()?;
        let register = list.registers.iter().find(|(other, _)| other == name);
        register.map(|(_, handle)| Self(*handle))
    }

    /// Returns the value of a register of four or eight bytes of the running CPU.
    pub fn read(self) -> Option<u64> {
        let list = REGISTERS.get()?.as_ref()?;
        let mut value = [0; 8];
        let length = list.buffer.fill(&mut value, |buffer| {
            // SAFETY: the callers are callbacks that QEMU lets read registers.
            unsafe { (list.read)(self.0, buffer) };
        });
        matches!(length, 4 | 8).then(|| u64::from_le_bytes(value))
    }
}
