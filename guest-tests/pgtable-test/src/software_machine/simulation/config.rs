// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Configuration of the simulation.

use granule_stage2::Policy;
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::{
    cost::{self, CostError, CostTable},
    kernels::PublishedKernel,
};
use crate::software_machine::config::{SoftwareMachineConfig, SoftwareMachineError};

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

/// Error of a configuration.
#[derive(Debug, Error)]
pub enum SimulationError {
    /// The cost table is unusable.
    #[error(transparent)]
    Costs(#[from] CostError),
    /// The software machine does not support the configuration.
    #[error(transparent)]
    Machine(#[from] SoftwareMachineError),
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
    ) -> Result<Self, SimulationError> {
        let name = &machine.policy;
        let mut published = PublishedKernel::ALL.iter();
        let policy = match published.find(|kernel| kernel.name() == name) {
            Some(kernel) => kernel.policy(),
            None => name
                .parse()
                .map_err(|source| SoftwareMachineError::Policy {
                    name: name.clone(),
                    source,
                })?,
        };
        let text = cost::text_of(cpu)?;
        let costs = CostTable::parse(cpu, &text)?;
        let digest = Sha256::digest(text.as_bytes());
        let short: String = digest[..8].iter().map(|b| format!("{b:02x}")).collect();
        Ok(Self {
            machine,
            policy,
            costs,
            costs_name: format!("{cpu} (costs {short})"),
            prefault,
        })
    }
}
