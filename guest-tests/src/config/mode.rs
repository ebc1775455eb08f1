// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest modes: how wide the guest's addresses are and how large its pages.
//!
//! Numbers and names are those of the kernel's selftests (`enum vm_guest_mode` and
//! `vm_guest_mode_string()` in Linux 6.1), so that `-m 2` means the same here and there.

use std::{fmt, str::FromStr};

use thiserror::Error;

use crate::units::Bytes;

/// A guest mode. Only the machine knows which of them it can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GuestMode {
    /// Bits of a guest physical address (the IPA size on arm64); `None`: as many as the host has.
    pub pa_bits: Option<u8>,
    /// Bits of a guest virtual address.
    pub va_bits: u8,
    /// The guest's page.
    pub page: Bytes,
}

/// Why a text names no guest mode.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("'{0}' is no guest mode: use a number from this list:{list}", list = Listed)]
pub struct ParseModeError(String);

struct Listed;

impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        GuestMode::NUMBERED
            .iter()
            .try_for_each(|(number, mode)| write!(f, "\n  {number:>2}: {mode}"))
    }
}

impl GuestMode {
    /// Every mode of arm64 and x86_64 with the number the kernel's tests give it.
    pub const NUMBERED: [(u8, Self); 13] = [
        (0, Self::new(Some(52), 48, 4)),
        (1, Self::new(Some(52), 48, 64)),
        (2, Self::new(Some(48), 48, 4)),
        (3, Self::new(Some(48), 48, 16)),
        (4, Self::new(Some(48), 48, 64)),
        (5, Self::new(Some(40), 48, 4)),
        (6, Self::new(Some(40), 48, 16)),
        (7, Self::new(Some(40), 48, 64)),
        (8, Self::new(None, 48, 4)),
        (11, Self::new(Some(36), 48, 4)),
        (12, Self::new(Some(36), 48, 16)),
        (13, Self::new(Some(36), 48, 64)),
        (14, Self::new(Some(36), 47, 16)),
    ];

    /// The mode used where none is asked for: what the kernel's tests call their default.
    pub const DEFAULT: Self = if cfg!(target_arch = "aarch64") {
        Self::new(Some(40), 48, 4)
    } else {
        Self::new(None, 48, 4)
    };

    const fn new(pa_bits: Option<u8>, va_bits: u8, page_kib: u64) -> Self {
        Self {
            pa_bits,
            va_bits,
            page: Bytes::kib(page_kib),
        }
    }
}

impl FromStr for GuestMode {
    type Err = ParseModeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::NUMBERED
            .iter()
            .find(|(number, _)| text.parse() == Ok(*number))
            .map(|(_, mode)| *mode)
            .ok_or_else(|| ParseModeError(text.to_owned()))
    }
}

impl fmt::Display for GuestMode {
    /// As the kernel's tests print it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pa_bits {
            Some(bits) => write!(f, "PA-bits:{bits},  ")?,
            None => f.write_str("PA-bits:ANY, ")?,
        }
        write!(
            f,
            "VA-bits:{}, {:>2}K pages",
            self.va_bits,
            self.page.0 >> 10
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_gives_the_mode_the_kernels_test_prints_for_it() {
        for (number, printed) in [
            ("2", "PA-bits:48,  VA-bits:48,  4K pages"),
            ("7", "PA-bits:40,  VA-bits:48, 64K pages"),
            ("8", "PA-bits:ANY, VA-bits:48,  4K pages"),
            ("14", "PA-bits:36,  VA-bits:47, 16K pages"),
        ] {
            assert_eq!(number.parse::<GuestMode>().unwrap().to_string(), printed);
        }
    }

    #[test]
    fn a_number_without_a_mode_is_refused_with_the_list() {
        for text in ["", "9", "15", "-1", "P48V48_4K"] {
            let error = text.parse::<GuestMode>().unwrap_err().to_string();
            assert!(error.contains(" 5: PA-bits:40"), "{error}");
        }
    }
}
