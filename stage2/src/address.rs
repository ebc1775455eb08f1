// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Addresses, typed by address space, so that a guest address cannot be passed as a host address.
//!
//! All types are transparent wrappers of a `u64` (field `.0`). Sizes are `u64` byte counts. Addresses of
//! entries and tables are physical, too, and step by entries instead of bytes.

use core::{
    fmt,
    ops::{Add, AddAssign, Sub},
};

macro_rules! format_in_hex {
    ($name:ident) => {
        impl fmt::LowerHex for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::LowerHex::fmt(&self.0, f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }
    };
}

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// Rounds down to a multiple of `size`, a power of two.
            #[inline]
            pub const fn align_down(self, size: u64) -> Self {
                Self(self.0 & !(size - 1))
            }

            /// Returns the offset from the next lower multiple of `size`, a power of two.
            #[inline]
            pub const fn offset_in(self, size: u64) -> u64 {
                self.0 & (size - 1)
            }

            /// Returns whether the address is a multiple of `size`, a power of two.
            #[inline]
            pub const fn is_aligned(self, size: u64) -> bool {
                self.offset_in(size) == 0
            }
        }

        impl Add<u64> for $name {
            type Output = Self;

            #[inline]
            fn add(self, bytes: u64) -> Self {
                Self(self.0 + bytes)
            }
        }

        impl AddAssign<u64> for $name {
            #[inline]
            fn add_assign(&mut self, bytes: u64) {
                self.0 += bytes;
            }
        }

        impl Sub for $name {
            type Output = u64;

            /// Returns the distance in bytes between two addresses of one space.
            #[inline]
            fn sub(self, base: Self) -> u64 {
                self.0 - base.0
            }
        }

        format_in_hex!($name);
    };
}

address! {
    /// An intermediate physical address (IPA): a guest physical address, the input of stage 2.
    Ipa
}

address! {
    /// A physical address of the host, the output of stage 2.
    PhysAddr
}

#[cfg(feature = "check")]
address! {
    /// A virtual address of a kernel, bits 55 to 0: the input of its stage 1. Hardware ignores the top
    /// byte or requires a copy of bit 55 in it.
    VirtAddr
}

/// Physical address of a table entry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct EntryAddress(pub u64);

impl EntryAddress {
    /// Returns the address of the entry `count` entries after this one in the same table.
    pub const fn skip(self, count: u64) -> Self {
        Self(self.0 + count * 8)
    }
}

/// Physical address of a table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct TableAddress(pub u64);

impl TableAddress {
    /// Returns the address of the entry with this index.
    pub const fn entry(self, index: u64) -> EntryAddress {
        EntryAddress(self.0 + index * 8)
    }
}

format_in_hex!(EntryAddress);
format_in_hex!(TableAddress);
