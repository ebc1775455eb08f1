// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The values that options of `granule bench` take, and how they are read.

use std::{fmt, num::NonZeroU32};

use clap::ValueEnum;
use granule_pgtable_test::config::GuestMap;
use granule_types::units::{Bytes, GuestAddress};

use granule_vmm::kvm::dirty::DirtyMode;

/// What can run a guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// The kernel's hypervisor, /dev/kvm
    #[default]
    Kvm,
    /// Threads on the stage-2 engine: policies in real time on any computer
    Model,
}

/// Whose time the software machine goes by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Clock {
    /// This computer's
    #[default]
    Real,
    /// A simulated machine's: exact, repeatable, an estimate of elapsed time
    Virtual,
}

/// How dirty pages are logged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum DirtyLog {
    /// Reading the log clears it
    #[default]
    Plain,
    /// Clearing is a call of its own
    Manual,
    /// As manual, and at first every page counts as dirty
    InitiallySet,
    /// Each vCPU writes what it dirties into a ring
    Ring,
}

impl From<DirtyLog> for DirtyMode {
    fn from(log: DirtyLog) -> Self {
        match log {
            DirtyLog::Plain => Self::Plain,
            DirtyLog::Manual => Self::Manual,
            DirtyLog::InitiallySet => Self::ManualInitiallySet,
            DirtyLog::Ring => Self::Ring,
        }
    }
}

/// How the guest's own tables map the memory under test.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Map {
    /// By the largest blocks that fit
    #[default]
    Blocks,
    /// Page by page, as the kernel's test does; the tables then fault in create too
    Pages,
}

impl From<Map> for GuestMap {
    fn from(map: Map) -> Self {
        match map {
            Map::Blocks => Self::Blocks,
            Map::Pages => Self::Pages,
        }
    }
}

/// On or off.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes
    #[default]
    On,
    /// No
    Off,
}

/// Host CPUs, in the order given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpus: Vec<_> = self.0.iter().map(usize::to_string).collect();
        f.write_str(&cpus.join(","))
    }
}

impl CpuList {
    /// Reads `0-3,8`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("'{text}' is no list of CPUs: give numbers and ranges, such as 0-3,8");
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

    /// One CPU for each vCPU, beginning again where there are fewer.
    pub(super) fn for_vcpus(&self, vcpus: u32) -> Vec<usize> {
        self.0
            .iter()
            .copied()
            .cycle()
            .zip(0..vcpus)
            .map(|(cpu, _)| cpu)
            .collect()
    }
}

/// What a run is repeated over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sweep {
    /// These numbers of vCPUs.
    Vcpus(Vec<NonZeroU32>),
    /// These sizes of memory.
    Memory(Vec<Bytes>),
}

impl Sweep {
    /// Each kind is swept once at most.
    pub(super) fn one_of_each(sweeps: &[Self]) -> Result<(), String> {
        match sweeps {
            [] | [_] | [Self::Vcpus(_), Self::Memory(_)] | [Self::Memory(_), Self::Vcpus(_)] => {
                Ok(())
            }
            _ => Err("give one --sweep vcpus=… and one --sweep size=… at most".to_owned()),
        }
    }

    /// Reads `vcpus=1,2,4` and `size=64M,256M`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let Some((name, values)) = text.split_once('=') else {
            return Err("give vcpus=1,2,4 or size=64M,256M".to_owned());
        };
        let values: Vec<_> = values.split(',').map(str::trim).collect();
        let twice = (1..values.len()).find(|&at| values[..at].contains(&values[at]));
        if let Some(at) = twice {
            return Err(format!("'{}' stands there twice", values[at]));
        }
        let values = values.into_iter();
        match name {
            "vcpus" => {
                let number = |text| count(text).map_err(|what| format!("'{text}': {what}"));
                values
                    .map(number)
                    .collect::<Result<_, _>>()
                    .map(Self::Vcpus)
            }
            "size" => values.map(size).collect::<Result<_, _>>().map(Self::Memory),
            _ => Err(format!("'{name}' cannot be swept, only vcpus and size can")),
        }
    }
}

/// A choice's name on the command line, unless it is the default.
pub(super) fn unless_default<T: ValueEnum + Default + PartialEq>(value: T) -> Option<String> {
    if value == T::default() {
        return None;
    }
    Some(value.to_possible_value()?.get_name().to_owned())
}

/// How many of something that there must be one of.
pub fn count(text: &str) -> Result<NonZeroU32, String> {
    let wrong = |_| match text.parse::<u64>() {
        Ok(1..) => format!("give a whole number from 1 on, {} at most", u32::MAX),
        _ => "give a whole number from 1 on".to_owned(),
    };
    text.parse().map_err(wrong)
}

/// A size above zero.
pub fn size(text: &str) -> Result<Bytes, String> {
    match text.parse::<Bytes>() {
        Ok(Bytes(0)) => Err("the memory under test cannot be empty".to_owned()),
        Ok(size) => Ok(size),
        Err(error) => Err(error.to_string()),
    }
}

/// A guest physical address.
pub(super) fn address(text: &str) -> Result<GuestAddress, String> {
    match text.parse::<Bytes>() {
        Ok(Bytes(offset)) => Ok(GuestAddress(offset)),
        Err(_) => Err("give an address, such as 0x40000000 or 1G".to_owned()),
    }
}
