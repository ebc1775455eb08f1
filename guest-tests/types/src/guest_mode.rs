// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest modes: address widths and granule of a guest, with the numbers and names of the kernel's
//! selftests (`tools/testing/selftests/kvm/include/kvm_util_base.h` of Linux 6.1).
//!
//! Scripts pass the numbers of 6.1 with `-m`. Other kernels number some modes differently but use
//! the same names, so names are accepted too.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::units::Bytes;

/// A guest mode: physical and virtual address width, and granule of the guest's stage-1 tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GuestMode {
    /// The kernel's number (`-m`).
    pub id: u32,
    /// The kernel's name, without `VM_MODE_`.
    pub name: &'static str,
    /// Width of a guest-physical address, in bits; 0 in [`GuestMode::PXXV48_4K`].
    pub pa_bits: u8,
    /// Width of a guest-virtual address, in bits.
    pub va_bits: u8,
    /// Base-2 logarithm of the granule.
    pub page_shift: u8,
}

/// Error returned when a text is not a guest mode.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown guest mode '{0}'; expected one of {known}", known = known_modes())]
pub struct ParseGuestModeError(String);

const fn mode(id: u32, name: &'static str, pa_bits: u8, va_bits: u8, page_shift: u8) -> GuestMode {
    GuestMode { id, name, pa_bits, va_bits, page_shift }
}

impl GuestMode {
    /// 48-bit physical and virtual addresses, 4K granule: the default on hosts that support it.
    pub const P48V48_4K: Self = mode(2, "P48V48_4K", 48, 48, 12);
    /// 40-bit physical addresses: the default where 48 bits are not supported.
    pub const P40V48_4K: Self = mode(5, "P40V48_4K", 40, 48, 12);
    /// 36-bit physical addresses: the default where neither wider mode is supported.
    pub const P36V48_4K: Self = mode(11, "P36V48_4K", 36, 48, 12);
    /// Physical addresses as wide as the CPU's: the only mode on x86_64.
    pub const PXXV48_4K: Self = mode(8, "PXXV48_4K", 0, 48, 12);

    /// Modes of the kernel's list, sorted by number.
    pub const ALL: [Self; 15] = [
        mode(0, "P52V48_4K", 52, 48, 12),
        mode(1, "P52V48_64K", 52, 48, 16),
        Self::P48V48_4K,
        mode(3, "P48V48_16K", 48, 48, 14),
        mode(4, "P48V48_64K", 48, 48, 16),
        Self::P40V48_4K,
        mode(6, "P40V48_16K", 40, 48, 14),
        mode(7, "P40V48_64K", 40, 48, 16),
        Self::PXXV48_4K,
        mode(9, "P47V64_4K", 47, 64, 12),
        mode(10, "P44V64_4K", 44, 64, 12),
        Self::P36V48_4K,
        mode(12, "P36V48_16K", 36, 48, 14),
        mode(13, "P36V48_64K", 36, 48, 16),
        mode(14, "P36V47_16K", 36, 47, 14),
    ];

    /// Returns the granule of the guest's stage-1 tables.
    pub const fn page_size(self) -> Bytes {
        Bytes(1 << self.page_shift)
    }
}

fn known_modes() -> String {
    let all: Vec<String> =
        GuestMode::ALL.iter().map(|mode| format!("{} ({})", mode.id, mode.name)).collect();
    all.join(", ")
}

impl FromStr for GuestMode {
    type Err = ParseGuestModeError;

    /// Reads the kernel's number (`2`) or name (`P48V48_4K`).
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|mode| mode.name.eq_ignore_ascii_case(text) || text.parse() == Ok(mode.id))
            .ok_or_else(|| ParseGuestModeError(text.to_owned()))
    }
}

impl fmt::Display for GuestMode {
    /// Prints the mode as the kernel's test does: `PA-bits:48,  VA-bits:48,  4K pages`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (va_bits, kib) = (self.va_bits, 1 << (self.page_shift - 10));
        if self.id == Self::PXXV48_4K.id {
            return write!(f, "PA-bits:ANY, VA-bits:{va_bits}, {kib:>2}K pages");
        }
        write!(f, "PA-bits:{},  VA-bits:{va_bits}, {kib:>2}K pages", self.pa_bits)
    }
}

impl Serialize for GuestMode {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for GuestMode {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_parse_by_number_and_by_name() {
        for mode in GuestMode::ALL {
            assert_eq!(mode.id.to_string().parse(), Ok(mode));
            assert_eq!(mode.name.parse(), Ok(mode));
        }
    }

    #[test]
    fn an_unknown_mode_is_refused_with_the_list() {
        let error = "99".parse::<GuestMode>().unwrap_err();
        assert!(error.to_string().contains("2 (P48V48_4K)"), "{error}");
    }

    #[test]
    fn a_mode_prints_as_in_the_kernels_test() {
        assert_eq!(GuestMode::P48V48_4K.to_string(), "PA-bits:48,  VA-bits:48,  4K pages");
        assert_eq!(
            GuestMode { pa_bits: 46, ..GuestMode::PXXV48_4K }.to_string(),
            "PA-bits:ANY, VA-bits:48,  4K pages"
        );
    }
}
