// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events of a machine that runs any hypervisor.

pub mod event;
