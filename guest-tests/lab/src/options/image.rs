// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of `granule lab check-image`.

use std::{convert::Infallible, path::PathBuf, str::FromStr};

use clap::value_parser;
use granule_types::units::Bytes;

use super::{FindingsOptions, Locations, host::DEFAULT_QEMU};

/// An image without Linux that QEMU's `virt` machine starts at EL2, and its checks.
#[derive(Debug, clap::Args)]
pub struct ImageOptions {
    /// ELF file of the hypervisor
    #[arg(value_name = "ELF")]
    pub(crate) image: PathBuf,
    /// Function whose first argument plus OFFSET is the address of the lock of the tables: a word of 32
    /// bits, whose low byte is zero while the lock is free
    #[arg(long, value_name = "FUNCTION[:OFFSET]")]
    pub(crate) lock: Option<LockFunction>,
    /// Function that returns when no CPU may use a permission that it has removed; repeat the option
    /// for more functions
    #[arg(long, value_name = "FUNCTION")]
    pub(crate) call: Vec<String>,
    /// CPU model of the machine
    #[arg(long, value_name = "MODEL", default_value = "neoverse-n1", help_heading = "Machine")]
    pub(crate) cpu: String,
    /// CPUs of the machine
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Machine",
          value_parser = value_parser!(u32).range(1..=64))]
    pub(crate) smp: u32,
    /// Memory of the machine
    #[arg(long, value_name = "SIZE", default_value = "128M", help_heading = "Machine")]
    pub(crate) memory: Bytes,
    /// Seconds of real time after which the emulator is terminated
    #[arg(long, value_name = "SECONDS", default_value_t = 900, help_heading = "Machine",
          value_parser = value_parser!(u64).range(1..))]
    pub(crate) deadline: u64,
    /// QEMU's program for arm64
    #[arg(long, value_name = "PROGRAM", default_value = DEFAULT_QEMU, help_heading = "Machine")]
    pub(crate) qemu: PathBuf,
    /// The plugin [default: beside this program]
    #[arg(long, value_name = "FILE", help_heading = "Machine")]
    pub(crate) plugin: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) report: FindingsOptions,
    /// Keep the trace, compressed, for `granule check`
    #[arg(long, help_heading = "Check")]
    pub(crate) keep_trace: bool,
    /// Run directory [default: the next unused one below lab-runs]
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) locations: Locations,
}

/// A function that has the address of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockFunction {
    pub(crate) function: String,
    /// Bytes from its first argument to the word.
    pub(crate) offset: u64,
}

impl FromStr for LockFunction {
    type Err = Infallible;

    /// Parses `FUNCTION[:OFFSET]`. A name may contain colons, so that what follows the last one is an
    /// offset only if it is a number.
    fn from_str(text: &str) -> Result<Self, Infallible> {
        let number = |text: &str| match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        };
        let parts = text.rsplit_once(':').and_then(|(name, offset)| Some((name, number(offset)?)));
        let (function, offset) = parts.unwrap_or((text, 0));
        Ok(Self { function: function.to_owned(), offset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_has_an_offset_only_if_a_number_follows_its_function() {
        for (text, function, offset) in [
            ("lock", "lock", 0),
            ("lock:8", "lock", 8),
            ("SpinLock::with:0x10", "SpinLock::with", 16),
            ("SpinLock::with", "SpinLock::with", 0),
        ] {
            let expected = LockFunction { function: function.to_owned(), offset };
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
    }
}
