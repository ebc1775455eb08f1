// SPDX-License-Identifier: GPL-2.0-or-later
//! Symbols of QEMU and GLib, looked up by name, so that one binary loads in every QEMU version.

use std::{
    ffi::{CStr, c_char, c_uint, c_void},
    mem,
    ptr::NonNull,
};

/// `GArray` and `GByteArray` of GLib: the public part.
#[repr(C)]
#[derive(Debug)]
pub struct GlibArray {
    /// The elements.
    pub data: *mut c_char,
    /// Their number.
    pub len: c_uint,
}

type NewByteArray = unsafe extern "C" fn() -> *mut GlibArray;

/// A buffer that QEMU fills, and that is never freed. Only one thread uses it.
#[derive(Debug)]
pub struct ByteArray(NonNull<GlibArray>);

// SAFETY: under `-icount` one thread runs all CPUs, and only it uses buffers.
unsafe impl Send for ByteArray {}
// SAFETY: as above.
unsafe impl Sync for ByteArray {}

impl ByteArray {
    /// Returns an empty buffer; `None` if QEMU is linked without GLib's function.
    pub fn new() -> Option<Self> {
        let new = find_symbol(c"g_byte_array_new")?;
        // SAFETY: GLib's function of this name has this type.
        let new = unsafe { mem::transmute::<*mut c_void, NewByteArray>(new.as_ptr()) };
        // SAFETY: the function has no preconditions.
        NonNull::new(unsafe { new() }).map(Self)
    }

    /// Copies to `bytes` as many bytes as `append` appends, at most all; returns their number.
    pub fn fill(&self, bytes: &mut [u8], append: impl FnOnce(*mut GlibArray)) -> usize {
        let pointer = self.0.as_ptr();
        // SAFETY: the array is valid, and nothing else uses it.
        unsafe { (*pointer).len = 0 };
        append(pointer);
        // SAFETY: as above.
        let filled = unsafe { self.0.as_ref() };
        let length = (filled.len as usize).min(bytes.len());
        if length > 0 {
            // SAFETY: the array holds `len` bytes.
            let source = unsafe { std::slice::from_raw_parts(filled.data.cast(), length) };
            bytes[..length].copy_from_slice(source);
        }
        length
    }
}

/// Returns the address of a symbol of QEMU or its libraries.
pub fn find_symbol(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: `name` ends with a NUL.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}
