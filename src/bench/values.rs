// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Values of the options of `granule bench`, and their parsers.

use std::num::NonZeroU32;

use clap::ValueEnum;
use granule_pgtable_test::{config::GuestMap, pgtable_vm::CountedEvents};
use granule_types::units::{Bytes, GuestAddress, parse_nonzero_size};

/// Engine that runs the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// KVM: /dev/kvm
    #[default]
    Kvm,
    /// The software machine: threads on the stage-2 engine, on any computer
    #[value(alias = "model")]
    Software,
}

/// Kernel events to count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum EventsOption {
    /// Stage-2 aborts, exits and calls of the mmu_notifier
    #[default]
    On,
    /// Also stage-2 aborts by type (arm64): translation, permission, access flag
    FaultTypes,
    /// No events
    Off,
}

impl From<EventsOption> for CountedEvents {
    fn from(events: EventsOption) -> Self {
        match events {
            EventsOption::On => Self::Tracepoints,
            EventsOption::FaultTypes => Self::FaultTypes,
            EventsOption::Off => Self::None,
        }
    }
}

/// Mapping of the memory under test by the guest's stage-1 tables.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum GuestMapOption {
    /// Largest blocks that fit
    #[default]
    Blocks,
    /// Pages, as in the kernel's test; create then includes faults on the stage-1 tables
    Pages,
}

impl From<GuestMapOption> for GuestMap {
    fn from(map: GuestMapOption) -> Self {
        match map {
            GuestMapOption::Blocks => Self::Blocks,
            GuestMapOption::Pages => Self::Pages,
        }
    }
}

/// Value of a parameter in a sweep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SweepValue {
    /// Number of vCPUs.
    Vcpus(NonZeroU32),
    /// Size of the memory under test.
    Memory(Bytes),
}

/// Values of a parameter in a sweep, at least one. The test runs once for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SweepValues(pub(super) Vec<SweepValue>);

impl SweepValues {
    /// Checks that no parameter has two sweeps.
    pub(super) fn check_unique(sweeps: &[Self]) -> Result<(), String> {
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
                parse_count(text).map(SweepValue::Vcpus).map_err(|what| format!("'{text}': {what}"))
            }
            "size" => parse_nonzero_size(text).map(SweepValue::Memory),
            _ => Err(format!("unknown sweep '{name}'; expected vcpus or size")),
        };
        values.iter().map(value).collect::<Result<_, _>>().map(Self)
    }
}

/// Returns the name of a value on the command line, or `None` for the default.
pub(super) fn name_unless_default<T: ValueEnum + Default + PartialEq>(value: T) -> Option<String> {
    if value == T::default() {
        return None;
    }
    Some(value.to_possible_value()?.get_name().to_owned())
}

/// Parses a count of at least one.
pub(crate) fn parse_count(text: &str) -> Result<NonZeroU32, String> {
    let wrong = |_| match text.parse::<u64>() {
        Ok(1..) => format!("expected a whole number from 1 to {}", u32::MAX),
        _ => "expected a whole number of at least 1".to_owned(),
    };
    text.parse().map_err(wrong)
}

pub(super) fn parse_address(text: &str) -> Result<GuestAddress, String> {
    match text.parse::<Bytes>() {
        Ok(Bytes(offset)) => Ok(GuestAddress(offset)),
        Err(_) => Err("expected an address, such as 0x40000000 or 1G".to_owned()),
    }
}
