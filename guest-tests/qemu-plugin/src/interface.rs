// SPDX-License-Identifier: GPL-2.0-or-later
//! Versions of QEMU's plugin interface.
//!
//! QEMU refuses a plugin whose `qemu_plugin_version` is outside the range that it supports: 0 to 1
//! before QEMU 9.0, 2 to 6 until 11.0, 7 since. No constant is in all ranges. A constructor, which
//! runs before QEMU reads the version, sets one that this QEMU supports. Of the functions used here
//! these changed:
//!
//! * `qemu_plugin_insn_data` returns a pointer to the bytes up to version 2 and copies them since
//!   version 3 (QEMU 9.1).
//! * Callbacks have the plugin's number as the first argument up to version 6, and user data as the
//!   last one since version 7 (QEMU 11.1).

use std::{
    ffi::{CStr, c_char, c_uint, c_void},
    mem,
    ptr::{self, NonNull},
    sync::{
        OnceLock,
        atomic::{AtomicI32, Ordering},
    },
};

use qemu_plugin_sys as sys;

use crate::glib::find_symbol;

/// Interface version of this plugin, read by QEMU as a C `int`.
#[unsafe(no_mangle)]
pub static qemu_plugin_version: AtomicI32 = AtomicI32::new(1);

/// Constructor that runs when QEMU opens the plugin.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = choose_version;

/// First version of the interface without the plugin's number in callbacks.
const USER_DATA: i32 = 7;

/// Functions, each with the interface version that introduced it.
const VERSION_OF_FUNCTION: [(&CStr, i32); 4] = [
    (c"qemu_plugin_translate_vaddr", 5),
    (c"qemu_plugin_read_memory_vaddr", 4),
    (c"qemu_plugin_register_vcpu_tb_exec_cond_cb", 3),
    (c"qemu_plugin_num_vcpus", 2),
];

extern "C" fn choose_version() {
    let functions = VERSION_OF_FUNCTION.into_iter();
    let newest = functions.filter(|(name, _)| find_symbol(name).is_some()).map(|(_, v)| v).max();
    let version = match qemu_version() {
        // Version 7 has the functions of version 6.
        Some(version) if version >= (11, 1) => USER_DATA,
        _ => newest.unwrap_or(1),
    };
    qemu_plugin_version.store(version, Ordering::Relaxed);
}

/// Returns the interface version of this QEMU.
pub fn version() -> i32 {
    qemu_plugin_version.load(Ordering::Relaxed)
}

/// `VersionTriple` of QEMU's management protocol.
#[repr(C)]
struct VersionTriple {
    major: i64,
    minor: i64,
    micro: i64,
}

/// `VersionInfo` of QEMU's management protocol.
#[repr(C)]
struct VersionInfo {
    qemu: *const VersionTriple,
    package: *const c_char,
}

/// Returns major and minor version of QEMU, if it exports the function of its management protocol.
fn qemu_version() -> Option<(i64, i64)> {
    type QueryVersion = unsafe extern "C" fn(*mut c_void) -> *const VersionInfo;
    let query = find_symbol(c"qmp_query_version")?;
    // SAFETY: QEMU's function of this name has this type.
    let query = unsafe { mem::transmute::<*mut c_void, QueryVersion>(query.as_ptr()) };
    // SAFETY: the argument is where errors are stored, and may be null.
    let info = unsafe { query(ptr::null_mut()) };
    // SAFETY: the function returns null or a description that is never freed here.
    let info = unsafe { info.as_ref() }?;
    // SAFETY: as above.
    let version = unsafe { info.qemu.as_ref() }?;
    Some((version.major, version.minor))
}

/// Callbacks that are not of an instruction.
#[derive(Debug, Clone, Copy)]
pub struct Callbacks {
    /// Called on the thread of each CPU that is initialised.
    pub on_cpu_init: fn(),
    /// Called for each block of code that is translated.
    pub on_translate: fn(*mut sys::qemu_plugin_tb),
    /// Called when QEMU exits.
    pub on_exit: fn(),
}

static CALLBACKS: OnceLock<Callbacks> = OnceLock::new();

type Register = unsafe extern "C" fn(sys::qemu_plugin_id_t, *const c_void, *mut c_void);

/// Registers the callbacks.
pub fn register(id: sys::qemu_plugin_id_t, callbacks: Callbacks) {
    CALLBACKS.get_or_init(|| callbacks);
    if version() >= USER_DATA {
        let functions: [(&CStr, *const c_void); 3] = [
            (c"qemu_plugin_register_vcpu_init_cb", init_with_data as *const c_void),
            (c"qemu_plugin_register_vcpu_tb_trans_cb", translate_with_data as *const c_void),
            (c"qemu_plugin_register_atexit_cb", exit_with_data as *const c_void),
        ];
        for (name, callback) in functions {
            let Some(register) = find_symbol(name).map(NonNull::as_ptr) else { continue };
            // SAFETY: since version 7 QEMU's functions of these names have this type.
            let register = unsafe { mem::transmute::<*mut c_void, Register>(register) };
            // SAFETY: QEMU passed `id`, and each callback has the type of its function.
            unsafe { register(id, callback, ptr::null_mut()) };
        }
        return;
    }
    // SAFETY: QEMU passed `id`, and the callback lives as long as the plugin.
    unsafe { sys::qemu_plugin_register_vcpu_init_cb(id, Some(init)) };
    // SAFETY: as above.
    unsafe { sys::qemu_plugin_register_vcpu_tb_trans_cb(id, Some(translate)) };
    // SAFETY: as above, without user data.
    unsafe { sys::qemu_plugin_register_atexit_cb(id, Some(exit), ptr::null_mut()) };
}

unsafe extern "C" fn init(_: sys::qemu_plugin_id_t, _: c_uint) {
    CALLBACKS.get().inspect(|callbacks| (callbacks.on_cpu_init)());
}

unsafe extern "C" fn init_with_data(_: c_uint, _: *mut c_void) {
    CALLBACKS.get().inspect(|callbacks| (callbacks.on_cpu_init)());
}

unsafe extern "C" fn translate(_: sys::qemu_plugin_id_t, block: *mut sys::qemu_plugin_tb) {
    CALLBACKS.get().inspect(|callbacks| (callbacks.on_translate)(block));
}

unsafe extern "C" fn translate_with_data(block: *mut sys::qemu_plugin_tb, _: *mut c_void) {
    CALLBACKS.get().inspect(|callbacks| (callbacks.on_translate)(block));
}

unsafe extern "C" fn exit(_: sys::qemu_plugin_id_t, _: *mut c_void) {
    CALLBACKS.get().inspect(|callbacks| (callbacks.on_exit)());
}

unsafe extern "C" fn exit_with_data(_: *mut c_void) {
    CALLBACKS.get().inspect(|callbacks| (callbacks.on_exit)());
}
