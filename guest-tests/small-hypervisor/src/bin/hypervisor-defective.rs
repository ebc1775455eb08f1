// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The hypervisor on the engine, without invalidations of stage-2 entries: a defect.
#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
granule_small_hypervisor::program!(granule_small_hypervisor::engine::EngineTable<false>);

#[cfg(not(target_os = "none"))]
fn main() {}
