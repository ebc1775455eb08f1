// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The hypervisor on aarch64-paging.
#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
granule_small_hypervisor::program!(granule_small_hypervisor::live_mapping::LiveTable<false>);

#[cfg(not(target_os = "none"))]
fn main() {}
