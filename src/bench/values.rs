// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Values of the options of `granule bench`, and their parsers.

use std::{fmt, num::NonZeroU32};

use clap::ValueEnum;
use granule_pgtable_test::config::GuestMap;
use granule_types::units::{Bytes, GuestAddress, size_above_zero};

use granule_vmm::kvm::memslot::DirtyMode;

/// Engine that runs the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// KVM: /dev/kvm
    #[default]
    Kvm,
    /// The software machine: threads on the stage-2 engine, on any computer
    Model,
}

/// Mode of dirty logging.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum DirtyLogMode {
    /// Reading the bitmap clears it
    #[default]
    Plain,
    /// A separate call clears the bitmap
    Manual,
    /// As manual, with every page initially dirty
    InitiallySet,
    /// A dirty ring for each vCPU
    Ring,
}

impl From<DirtyLogMode> for DirtyMode {
    fn from(log: DirtyLogMode) -> Self {
        match log {
            DirtyLogMode::Plain => Self::Plain,
            DirtyLogMode::Manual => Self::Manual,
            DirtyLogMode::InitiallySet => Self::ManualInitiallySet,
            DirtyLogMode::Ring => Self::Ring,
        }
    }
}

/// Mapping of the memory under test by the guest's stage-1 tables.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum GuestMapping {
    /// By the largest blocks that fit
    #[default]
    Blocks,
    /// By pages, as the kernel's test does; create then contains the faults of the tables
    Pages,
}

impl From<GuestMapping> for GuestMap {
    fn from(map: GuestMapping) -> Self {
        match map {
            GuestMapping::Blocks => Self::Blocks,
            GuestMapping::Pages => Self::Pages,
        }
    }
}

/// A switch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Count
    #[default]
    On,
    /// Do not count
    Off,
}

/// Host CPUs, in list order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpus: Vec<_> = self.0.iter().map(usize::to_string).collect();
        f.write_str(&cpus.join(","))
    }
}

impl CpuList {
    /// Parses a CPU list such as `0-3,8`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("'{text}' is not a list of CPUs; expected numbers and ranges, such as 0-3,8")
        };
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<u16>().map_err(|_| wrong());
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wrong());
            }
            cpus.extend((first..=last).map(usize::from));
        }
        Ok(Self(cpus))
    }

    /// Assigns a CPU to each vCPU, round-robin.
    pub(super) fn for_vcpus(&self, vcpus: u32) -> Vec<usize> {
        self.0.iter().copied().cycle().zip(0..vcpus).map(|(cpu, _)| cpu).collect()
    }
}

/// Value of a swept quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SweepValue {
    /// Number of vCPUs.
    Vcpus(NonZeroU32),
    /// Size of the memory under test.
    Memory(Bytes),
}

/// Values of a swept quantity, at least one. The test runs once for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SweepValues(pub(super) Vec<SweepValue>);

impl SweepValues {
    /// Checks that each quantity is swept at most once.
    pub(super) fn one_of_each(sweeps: &[Self]) -> Result<(), String> {
        let vcpus = sweeps.iter().filter(|sweep| matches!(sweep.0[0], SweepValue::Vcpus(_)));
        let vcpus = vcpus.count();
        match vcpus <= 1 && sweeps.len() - vcpus <= 1 {
            true => Ok(()),
            false => Err("--sweep vcpus=… and --sweep size=… may each occur once".to_owned()),
        }
    }

    /// Parses a sweep such as `vcpus=1,2,4` or `size=64M,256M`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let Some((name, values)) = text.split_once('=') else {
            return Err("expected vcpus=1,2,4 or size=64M,256M".to_owned());
        };
        let values: Vec<_> = values.split(',').map(str::trim).collect();
        let twice = (1..values.len()).find(|&at| values[..at].contains(&values[at]));
        if let Some(at) = twice {
            return Err(format!("'{}' occurs twice", values[at]));
        }
        let value = |text: &&str| match name {
            "vcpus" => {
                count(text).map(SweepValue::Vcpus).map_err(|what| format!("'{text}': {what}"))
            }
            "size" => size_above_zero(text).map(SweepValue::Memory),
            _ => Err(format!("unknown sweep '{name}'; expected vcpus or size")),
        };
        values.iter().map(value).collect::<Result<_, _>>().map(Self)
    }
}

/// Returns a value's name on the command line, or `None` for the default.
pub(super) fn unless_default<T: ValueEnum + Default + PartialEq>(value: T) -> Option<String> {
    if value == T::default() {
        return None;
    }
    Some(value.to_possible_value()?.get_name().to_owned())
}

/// Parses a count of at least one.
pub(super) fn count(text: &str) -> Result<NonZeroU32, String> {
    let wrong = |_| match text.parse::<u64>() {
        Ok(1..) => format!("expected a whole number from 1 to {}", u32::MAX),
        _ => "expected a whole number from 1 on".to_owned(),
    };
    text.parse().map_err(wrong)
}

/// Parses a guest-physical address.
pub(super) fn address(text: &str) -> Result<GuestAddress, String> {
    match text.parse::<Bytes>() {
        Ok(Bytes(offset)) => Ok(GuestAddress(offset)),
        Err(_) => Err("expected an address, such as 0x40000000 or 1G".to_owned()),
    }
}
