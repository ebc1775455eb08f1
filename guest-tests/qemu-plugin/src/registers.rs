// SPDX-License-Identifier: GPL-2.0-or-later
//! Registers of the running CPU, by their names in QEMU's list.
//!
//! All functions are looked up by name, so that one binary loads in every QEMU version.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem,
    ptr::NonNull,
    sync::OnceLock,
};

/// `GArray` and `GByteArray` of GLib: the public part.
#[repr(C)]
struct GlibArray {
    data: *mut c_char,
    len: c_uint,
}

/// `qemu_plugin_reg_descriptor`.
#[repr(C)]
struct RegisterDescriptor {
    handle: *mut c_void,
    name: *const c_char,
    feature: *const c_char,
}

type GetRegisters = unsafe extern "C" fn() -> *mut GlibArray;
type ReadRegister = unsafe extern "C" fn(*mut c_void, *mut GlibArray) -> c_int;
type NewByteArray = unsafe extern "C" fn() -> *mut GlibArray;

/// The registers of a CPU model, and a buffer to read them into.
#[derive(Debug)]
struct RegisterList {
    registers: Vec<(String, *mut c_void)>,
    buffer: NonNull<GlibArray>,
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
        let new = find_symbol(c"g_byte_array_new")?;
        // SAFETY: QEMU's function of this name has this type.
        let get = unsafe { mem::transmute::<*mut c_void, GetRegisters>(get.as_ptr()) };
        // SAFETY: as above.
        let read = unsafe { mem::transmute::<*mut c_void, ReadRegister>(read.as_ptr()) };
        // SAFETY: GLib's function of this name has this type.
        let new = unsafe { mem::transmute::<*mut c_void, NewByteArray>(new.as_ptr()) };
        // SAFETY: a CPU is being initialised on this thread, as the function requires.
        let list = unsafe { get() };
        // SAFETY: QEMU returns null or an array, which is never freed here.
        let list = unsafe { list.as_ref() }?;
        let descriptors = list.data.cast::<RegisterDescriptor>();
        let registers = (0..list.len as usize).filter_map(|i| {
            // SAFETY: the array holds `len` descriptors.
            let descriptor = unsafe { descriptors.add(i) };
            // SAFETY: as above; GLib aligns its arrays for any type.
            let descriptor = unsafe { descriptor.as_ref() }?;
            // SAFETY: QEMU's names end with a NUL and live as long as QEMU.
            let name = unsafe { CStr::from_ptr(descriptor.name) };
            Some((name.to_string_lossy().into_owned(), descriptor.handle))
        });
        let registers = registers.collect();
        // SAFETY: the function has no preconditions.
        let buffer = NonNull::new(unsafe { new() })?;
        Some(RegisterList { registers, buffer, read })
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
        let mut buffer = list.buffer;
        // SAFETY: the buffer lives as long as QEMU, and only the thread of all CPUs uses it.
        let bytes = unsafe { buffer.as_mut() };
        // QEMU appends to the buffer.
        bytes.len = 0;
        // SAFETY: the callers are callbacks that QEMU lets read registers.
        let length = unsafe { (list.read)(self.0, buffer.as_ptr()) };
        // SAFETY: as above.
        let value = unsafe { buffer.as_ref() }.data;
        match length {
            4 => {
                // SAFETY: the function has appended four bytes.
                let value = unsafe { value.cast::<[u8; 4]>().read_unaligned() };
                Some(u64::from(u32::from_le_bytes(value)))
            }
            8 => {
                // SAFETY: the function has appended eight bytes.
                let value = unsafe { value.cast::<[u8; 8]>().read_unaligned() };
                Some(u64::from_le_bytes(value))
            }
            _ => None,
        }
    }
}

/// Returns the address of a symbol of QEMU or its libraries.
pub fn find_symbol(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: `name` ends with a NUL.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}
