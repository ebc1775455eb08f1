// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Values of options that several subcommands have.

use clap::ValueEnum;
use granule_vmm::kvm::memslot::DirtyMode;

/// Mode of dirty logging.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum DirtyLogOption {
    /// A read of the bitmap clears it
    #[default]
    Plain,
    /// A separate call clears the bitmap
    Manual,
    /// Manual mode with every page initially dirty
    InitiallySet,
    /// A dirty ring for each vCPU
    Ring,
    /// A dirty ring for each vCPU, and no bitmap for writes outside of vCPUs
    RingOnly,
}

impl From<DirtyLogOption> for DirtyMode {
    fn from(log: DirtyLogOption) -> Self {
        match log {
            DirtyLogOption::Plain => Self::Plain,
            DirtyLogOption::Manual => Self::Manual,
            DirtyLogOption::InitiallySet => Self::ManualInitiallySet,
            DirtyLogOption::Ring => Self::Ring,
            DirtyLogOption::RingOnly => Self::RingOnly,
        }
    }
}

/// Value of an option that is on or off.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Enabled
    #[default]
    On,
    /// Disabled
    Off,
}
