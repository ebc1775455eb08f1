// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of `granule lab boot`.

use std::{collections::BTreeMap, fmt};

use clap::ValueEnum;
use granule_types::{
    backing::Backing,
    units::{Bytes, parse_nonzero_size},
};
use serde::{Deserialize, Serialize};

use super::{CommonOptions, Options, ReportOptions, Workload};
use crate::{
    error::LabError,
    host::tlb::{TlbModel, TlbSizes, parse_grain},
    values::PageSize,
};

/// Configuration fragment of the measured kernels, with the dump of their tables.
const FRAGMENT: &str = "config/kernel-tables.config";

/// Boots of each kernel, whose own page tables are measured.
#[derive(Debug, Clone, clap::Args, Serialize, Deserialize)]
#[command(next_help_heading = "Workload")]
pub struct BootMatrix {
    /// Memory of the machine, or with --guest of the guest, rounded up to the backing's pages; separate
    /// sizes by commas
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "4G,16G",
          value_parser = parse_nonzero_size)]
    pub(crate) memory: Vec<Bytes>,
    /// Kernel parameter rodata; separate values by commas
    #[arg(long, value_enum, value_name = "VALUE", value_delimiter = ',', default_value = "full")]
    pub(crate) rodata: Vec<Rodata>,
    /// Measure the same kernel in a guest with one vCPU, which `granule run` boots on this backing
    #[arg(long, value_name = "BACKING")]
    pub(crate) guest: Option<Backing>,
    /// Model the CPU's TLBs, a fully associative level and one with sets, and count walks under loads
    #[arg(long, value_name = "FIRST:WAYSxSETS")]
    pub(crate) tlb: Option<TlbSizes>,
    /// Sizes of the linear map's leaves in the model of --tlb; separate sizes by commas
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "4K,64K,2M",
          value_parser = parse_grain, requires = "tlb")]
    pub(crate) grain: Vec<Bytes>,
    /// Accept that the kernels map the linear map differently
    #[arg(long)]
    pub(crate) accept_dump_change: bool,
}

/// Value of the kernel parameter `rodata`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rodata {
    /// Read-only also in the linear map, which is mapped by pages: 'full', and 'on' from Linux 7 on
    Full,
    /// 'on': up to Linux 6.12 with blocks in the linear map
    On,
    /// 'off'
    Off,
    /// 'noalias': with blocks in the linear map; from Linux 7 on
    Noalias,
}

impl Rodata {
    /// Returns the kernel parameters.
    pub(crate) const fn parameters(self) -> &'static str {
        match self {
            // Linux 7 names it 'on' and ignores 'full'; the last known value takes effect.
            Self::Full => "rodata=on rodata=full",
            Self::On => "rodata=on",
            Self::Off => "rodata=off",
            Self::Noalias => "rodata=noalias",
        }
    }
}

impl fmt::Display for Rodata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "full",
            Self::On => "on",
            Self::Off => "off",
            Self::Noalias => "noalias",
        })
    }
}

impl BootMatrix {
    /// Returns boots of the host alone, whose linear map has pages.
    pub(super) fn of_host(memory: Vec<Bytes>) -> Self {
        let (rodata, grain) = (vec![Rodata::Full], Vec::new());
        Self { memory, rodata, guest: None, tlb: None, grain, accept_dump_change: false }
    }

    /// Returns the model of TLBs, if there is one.
    pub(crate) fn tlb_model(&self) -> Option<TlbModel> {
        Some(TlbModel { sizes: self.tlb?, grains: self.grain.clone() })
    }

    /// Refuses what a host with this page size lacks: a backing, TLBs with leaves of 4K, or a size of
    /// memory that differs from another one.
    pub(super) fn check(&self, page_size: PageSize) -> Result<(), LabError> {
        if self.tlb.is_some() && page_size != PageSize::Kib4 {
            return Err(LabError::Unusable("--tlb models pages of 4K: omit --page-size".into()));
        }
        self.guest.map_or(Ok(()), |backing| page_size.check(backing, "--guest"))?;
        let mut requested = BTreeMap::new();
        for &memory in &self.memory {
            let rounded = self.round_memory(page_size, memory);
            let other = *requested.entry(rounded).or_insert(memory);
            if other != memory {
                return Err(LabError::Unusable(format!(
                    "--memory {other},{memory}: the pages of --guest round both up to {rounded}; \
                     omit one of them"
                )));
            }
        }
        Ok(())
    }

    /// Returns a size of memory, rounded up to the pages of the guest's backing.
    pub(crate) fn round_memory(&self, page_size: PageSize, memory: Bytes) -> Bytes {
        let page = self.guest.map_or(1, |backing| page_size.of_backing(backing).0);
        Bytes(memory.0.next_multiple_of(page))
    }
}

impl Options {
    /// Returns boots of each kernel, whose own page tables are measured.
    ///
    /// # Errors
    /// An option has no effect, or no repository is found.
    pub fn boot(mut common: CommonOptions, matrix: BootMatrix) -> Result<Self, LabError> {
        if matrix.guest.is_none() && common.host.host_memory.is_some() {
            return Err(LabError::Unusable(
                "--host-memory is the memory of the host of --guest: set --memory instead".into(),
            ));
        }
        if matrix.tlb.is_some() && common.host.smp.is_some_and(|cpus| cpus > 1) {
            return Err(LabError::Unusable("--tlb models the TLBs of one CPU: omit --smp".into()));
        }
        let fragment = common.kernels.origin.locations.linux()?.join(FRAGMENT);
        // Fragments of the user take precedence.
        common.kernels.build.fragments.insert(0, fragment);
        let workload = Workload::Boot(matrix);
        Ok(Self { common, workload, report: ReportOptions::default(), check: None })
    }
}
