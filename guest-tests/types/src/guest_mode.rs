// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest modes: the address widths and the granule of a guest, numbered and named as the kernel's
//! selftests do (`tools/testing/selftests/kvm/include/kvm_util_base.h` of Linux 6.1).
//!
//! The numbers are those of 6.1 because scripts pass them with `-m`; kernels number some modes
//! differently, the names are the same everywhere, so a name is accepted too.

use std::{fmt, str::FromStr};

use thiserror::Error;

use crate::units::Bytes;

/// One guest mode: physical and virtual address width, granule of the guest's stage-1 tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GuestMode {
    id: u32,
    name: &'static str,
    pa_bits: u8,
    va_bits: u8,
    page_shift: u8,
}

/// Why a text names no guest mode.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("'{0}' is no guest mode: use one of {known}", known = known_modes())]
pub struct ParseGuestModeError(String);

const fn mode(id: u32, name: &'static str, pa_bits: u8, va_bits: u8, page_shift: u8) -> GuestMode {
    GuestMode {
        id,
        name,
        pa_bits,
        va_bits,
        page_shift,
    }
}

impl GuestMode {
    /// 48-bit physical and virtual addresses, 4K granule: the default where the host can.
    pub const P48V48_4K: Self = mode(2, "P48V48_4K", 48, 48, 12);
    /// 40-bit physical addresses: the next default.
    pub const P40V48_4K: Self = mode(5, "P40V48_4K", 40, 48, 12);
    /// 36-bit physical addresses: the default of the smallest hosts.
    pub const P36V48_4K: Self = mode(11, "P36V48_4K", 36, 48, 12);
    /// As many bits of physical address as the CPU has: the only one where that is how it is done.
    pub const PXXV48_4K: Self = mode(8, "PXXV48_4K", 0, 48, 12);

    /// Every mode of the kernel's list, by number.
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

    /// The kernel's number for it (`-m`).
    pub const fn id(self) -> u32 {
        self.id
    }

    /// The kernel's name for it, without `VM_MODE_`.
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// Width of a guest-physical address, in bits; 0 in [`GuestMode::PXXV48_4K`] until it is
    /// [given](Self::with_pa_bits).
    pub const fn pa_bits(self) -> u8 {
        self.pa_bits
    }

    /// The same mode with this width of a guest-physical address.
    pub const fn with_pa_bits(self, pa_bits: u8) -> Self {
        Self { pa_bits, ..self }
    }

    /// Width of a guest-virtual address, in bits.
    pub const fn va_bits(self) -> u8 {
        self.va_bits
    }

    /// The granule of the guest's own tables.
    pub const fn page_size(self) -> Bytes {
        Bytes(1 << self.page_shift)
    }

    /// The granule as a power of two.
    pub const fn page_shift(self) -> u8 {
        self.page_shift
    }
}

fn known_modes() -> String {
    let all: Vec<String> = GuestMode::ALL
        .iter()
        .map(|mode| format!("{} ({})", mode.id, mode.name))
        .collect();
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
    /// As the kernel's test prints it: `PA-bits:48,  VA-bits:48,  4K pages`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (va_bits, kib) = (self.va_bits, 1 << (self.page_shift - 10));
        if self.id == Self::PXXV48_4K.id {
            return write!(f, "PA-bits:ANY, VA-bits:{va_bits}, {kib:>2}K pages");
        }
        write!(
            f,
            "PA-bits:{},  VA-bits:{va_bits}, {kib:>2}K pages",
            self.pa_bits
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_found_by_number_and_by_name() {
        for mode in GuestMode::ALL {
            assert_eq!(mode.id.to_string().parse(), Ok(mode));
            assert_eq!(mode.name.parse(), Ok(mode));
        }
    }

    #[test]
    fn numbers_are_unique_and_rising() {
        assert!(GuestMode::ALL.is_sorted_by(|a, b| a.id < b.id));
    }

    #[test]
    fn what_is_no_mode_is_refused_with_the_list() {
        let error = "99".parse::<GuestMode>().unwrap_err();
        assert!(error.to_string().contains("2 (P48V48_4K)"), "{error}");
    }

    #[test]
    fn a_mode_prints_as_the_kernels_test_prints_it() {
        assert_eq!(
            GuestMode::P48V48_4K.to_string(),
            "PA-bits:48,  VA-bits:48,  4K pages"
        );
        assert_eq!(
            GuestMode::PXXV48_4K.with_pa_bits(46).to_string(),
            "PA-bits:ANY, VA-bits:48,  4K pages"
        );
    }
}
