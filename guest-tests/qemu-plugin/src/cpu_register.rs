// SPDX-License-Identifier: GPL-2.0-or-later
//! Tells CPUs apart by a register.
//!
//! From QEMU 9.1 to at least 10.0, the CPU number that callbacks get is wrong under `-icount`: a block
//! of code keeps the number of the CPU that translated it. Registers are read from the CPU that runs.
//! `TPIDR_EL2` holds the kernel's per-CPU offset, with VHE and without; KVM never lets a guest write
//! it. Before the kernel sets it up, all CPUs have the same value.
//!
//! QEMU has the functions since interface version 2; they are looked up by name, so that one binary
//! loads in older versions, too. Older versions have right CPU numbers.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem,
    ptr::NonNull,
    sync::OnceLock,
};

/// Name of the register in QEMU's list.
const NAME: &CStr = c"TPIDR_EL2";

/// `GArray` and `GByteArray` of GLib: the public part.
#[repr(C)]
struct Array {
    data: *mut c_char,
    len: c_uint,
}

/// `qemu_plugin_reg_descriptor`.
#[repr(C)]
struct Descriptor {
    handle: *mut c_void,
    name: *const c_char,
    feature: *const c_char,
}

type GetRegisters = unsafe extern "C" fn() -> *mut Array;
type ReadRegister = unsafe extern "C" fn(*mut c_void, *mut Array) -> c_int;
type NewByteArray = unsafe extern "C" fn() -> *mut Array;

/// The register, and a buffer to read it into.
#[derive(Debug)]
struct Register {
    handle: *mut c_void,
    buffer: NonNull<Array>,
    read: ReadRegister,
}

// SAFETY: the only instance is used by the thread of all CPUs (`-icount`); see `read`.
unsafe impl Send for Register {}
// SAFETY: as above.
unsafe impl Sync for Register {}

static REGISTER: OnceLock<Option<Register>> = OnceLock::new();

/// Looks up the register. Called when a CPU is initialised, on its thread.
pub fn find() {
    REGISTER.get_or_init(|| {
        let get = function(c"qemu_plugin_get_registers")?;
        let read = function(c"qemu_plugin_read_register")?;
        let new = function(c"g_byte_array_new")?;
        // SAFETY: QEMU's function of this name has this type.
        let get = unsafe { mem::transmute::<*mut c_void, GetRegisters>(get) };
        // SAFETY: as above.
        let read = unsafe { mem::transmute::<*mut c_void, ReadRegister>(read) };
        // SAFETY: GLib's function of this name has this type.
        let new = unsafe { mem::transmute::<*mut c_void, NewByteArray>(new) };
        // SAFETY: a CPU is being initialised on this thread, as the function requires.
        let list = unsafe { get() };
        // SAFETY: QEMU returns null or an array, which is never freed here.
        let list = unsafe { list.as_ref() }?;
        let descriptors = list.data.cast::<Descriptor>();
        let handle = (0..list.len as usize).find_map(|i| {
            // SAFETY: the array holds `len` descriptors.
            let descriptor = unsafe { descriptors.add(i) };
            // SAFETY: as above; GLib aligns its arrays for any type.
            let descriptor = unsafe { descriptor.as_ref() }?;
            // SAFETY: QEMU's names end with a NUL and live as long as QEMU.
            let name = unsafe { CStr::from_ptr(descriptor.name) };
            (name == NAME).then_some(descriptor.handle)
        })?;
        // SAFETY: has no conditions.
        let buffer = NonNull::new(unsafe { new() })?;
        Some(Register { handle, buffer, read })
    });
}

/// Returns the value of the register of the CPU that runs; `None` if QEMU does not offer it.
pub fn read() -> Option<u64> {
    let register = REGISTER.get()?.as_ref()?;
    let mut buffer = register.buffer;
    // SAFETY: the buffer lives as long as QEMU, and only the thread of all CPUs uses it.
    let bytes = unsafe { buffer.as_mut() };
    // QEMU appends.
    bytes.len = 0;
    // SAFETY: the callers are callbacks that QEMU lets read registers.
    let length = unsafe { (register.read)(register.handle, buffer.as_ptr()) };
    if length != 8 {
        return None;
    }
    // SAFETY: as above.
    let value = unsafe { buffer.as_ref() }.data.cast::<[u8; 8]>();
    // SAFETY: the function has appended eight bytes.
    let value = unsafe { value.read_unaligned() };
    Some(u64::from_le_bytes(value))
}

/// Returns the function of this name in QEMU or its libraries.
fn function(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: `name` ends with a NUL.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}
