// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The software machine in virtual time: a discrete-event simulation of the stage-2 engine on a
//! machine with one CPU for each vCPU.
//!
//! Every vCPU is a process with its own clock (`virtual_time`). It waits for the lock (`lock`)
//! and for entries that other vCPUs hold, and each event takes the time that a table of [`cost`]s
//! states. Resources that one CPU at a time can use are in `state`; the host's memory management is
//! in `host_faults`. Memory holds written words only, so 20G need memory for their tables alone.
//!
//! Results repeat to the byte: the simulation has one thread, integer time, and no randomness
//! except the seed. Records name `simulation` as their engine and the cost table with its digest as
//! their CPU. `docs/simulation.md` describes its accuracy.

pub mod cost;
mod host_faults;
mod lock;
mod machine;
pub mod published;
mod state;
mod virtual_time;

use granule_stage2::{CmoPlacement, Coalesce, ExistingLeaf, Policy};
use sha2::{Digest, Sha256};

use super::{SoftwareMachineConfig, SoftwareMachineError};
use cost::CostTable;

pub use machine::SimulatedMachine;

/// Configuration of a simulated machine.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulationConfig {
    /// Memory, vCPUs and policy, as for the software machine in real time.
    pub machine: SoftwareMachineConfig,
    /// The policy that [`SoftwareMachineConfig::policy`] names.
    pub policy: Policy,
    /// The cost of each event.
    pub costs: CostTable,
    /// Name and digest of the cost table, for the records.
    pub costs_name: String,
    /// Population of the memory by the host before the test.
    pub prefault: bool,
}

impl SimulationConfig {
    /// Returns a configuration with the costs of `cpu`, which is the name or the file of a table.
    ///
    /// # Errors
    /// The cost table or the policy does not exist, or the table is malformed.
    pub fn new(
        machine: SoftwareMachineConfig,
        cpu: &str,
        prefault: bool,
    ) -> Result<Self, SoftwareMachineError> {
        let mut published = PublishedKernel::ALL.iter();
        let policy = match published.find(|kernel| kernel.name() == machine.policy) {
            Some(kernel) => kernel.policy(),
            None => machine.parse_policy()?,
        };
        let text = cost::text_of(cpu)?;
        let costs = CostTable::parse(cpu, &text)?;
        let digest = Sha256::digest(text.as_bytes());
        let short: String = digest[..8].iter().map(|b| format!("{b:02x}")).collect();
        Ok(Self { machine, policy, costs, costs_name: format!("{cpu} (costs {short})"), prefault })
    }
}

/// A kernel of the published figures, as a policy of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PublishedKernel {
    /// Linux 5.12-rc2: 5.10, except that a leaf that differs in permissions only is kept.
    Base,
    /// With cache maintenance in the map handlers.
    Handlers,
    /// With cache maintenance in the map handlers, and the block installed before the tables are
    /// freed; as published, without cleaning the block's memory.
    InstallFirst,
}

impl PublishedKernel {
    /// The kernels, in the order of their changes.
    pub const ALL: [Self; 3] = [Self::Base, Self::Handlers, Self::InstallFirst];

    /// Returns the name that `--policy` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Base => "linux-5.12",
            Self::Handlers => "linux-5.12+handlers",
            Self::InstallFirst => "linux-5.12+handlers+install-first",
        }
    }

    /// Returns the policy of the kernel's fault path.
    pub const fn policy(self) -> Policy {
        let base = Policy { existing_leaf: ExistingLeaf::Retry, ..Policy::LINUX_5_10 };
        match self {
            Self::Base => base,
            Self::Handlers => Policy { cmo: CmoPlacement::BetweenBreakAndMake, ..base },
            Self::InstallFirst => Policy {
                cmo: CmoPlacement::BetweenBreakAndMake,
                coalesce: Coalesce::InstallWithoutCmo,
                ..base
            },
        }
    }
}
