// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The software machine in virtual time: a discrete-event simulation of the stage-2 engine on a
//! machine with one CPU for each vCPU.
//!
//! Every vCPU is a process with its own clock (`virtual_time`). It waits for the lock (`lock`)
//! and for entries that other vCPUs hold, and each event takes the time that a table of [`cost`]s
//! states. Resources that one CPU at a time can use are in `state`; the host's memory management is
//! in `host_memory` and `host_faults`. Memory holds written words only, so 20G need no memory.
//!
//! Results repeat to the byte: the simulation has one thread, integer time, and no randomness except
//! the seed. Records name `simulation` as their engine and the cost table with its digest as their
//! CPU. `docs/simulation.md` describes its accuracy.

mod config;
pub mod cost;
mod host_faults;
mod host_memory;
mod kernels;
mod lock;
mod machine;
mod operations;
mod prices;
pub mod published;
mod state;
mod tables;
#[cfg(test)]
mod tests;
mod vcpu;
mod virtual_time;

pub use config::{SimulationConfig, SimulationError};
pub use kernels::PublishedKernel;
pub use machine::SimulatedMachine;
