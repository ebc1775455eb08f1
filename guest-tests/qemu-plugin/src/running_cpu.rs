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
//! All functions are looked up by name, so that one binary loads in every QEMU version.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem,
    ptr::NonNull,
    sync::OnceLock,
};

/// Name of the register in QEMU's list.
const REGISTER_NAME: &CStr = c"TPIDR_EL2";

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
type CpuExitFn = unsafe extern "C" fn(*mut c_void);

/// The register, and a buffer to read it into.
#[derive(Debug)]
struct Register {
    handle: *mut c_void,
    buffer: NonNull<GlibArray>,
    read: ReadRegister,
}

// SAFETY: under `-icount` one thread runs all CPUs, and only it uses the register.
unsafe impl Send for Register {}
// SAFETY: as above.
unsafe impl Sync for Register {}

static REGISTER: OnceLock<Option<Register>> = OnceLock::new();

/// Looks up the register. QEMU calls this on the thread of each CPU that it initialises.
pub fn find_register() {
    REGISTER.get_or_init(|| {
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
        let handle = (0..list.len as usize).find_map(|i| {
            // SAFETY: the array holds `len` descriptors.
            let descriptor = unsafe { descriptors.add(i) };
            // SAFETY: as above; GLib aligns its arrays for any type.
            let descriptor = unsafe { descriptor.as_ref() }?;
            // SAFETY: QEMU's names end with a NUL and live as long as QEMU.
            let name = unsafe { CStr::from_ptr(descriptor.name) };
            (name == REGISTER_NAME).then_some(descriptor.handle)
        })?;
        // SAFETY: the function has no preconditions.
        let buffer = NonNull::new(unsafe { new() })?;
        Some(Register { handle, buffer, read })
    });
}

/// Returns the value of the register of the running CPU; `None` if QEMU does not offer it.
pub fn read_register() -> Option<u64> {
    let register = REGISTER.get()?.as_ref()?;
    let mut buffer = register.buffer;
    // SAFETY: the buffer lives as long as QEMU, and only the thread of all CPUs uses it.
    let bytes = unsafe { buffer.as_mut() };
    // QEMU appends to the buffer.
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
        let Some(address) = current_cpu() else { return };
        // SAFETY: `current_cpu` is a pointer.
        let cpu = unsafe { address.read() };
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

/// Returns the address of a symbol of QEMU or its libraries.
pub fn find_symbol(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: `name` ends with a NUL.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}
