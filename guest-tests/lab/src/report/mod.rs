// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reports of a run: comparison, selftest results, guest boots; as text and HTML.

pub mod boot_figures;
pub mod comparison;
pub mod guest_boot_report;
mod html;
pub mod output;
pub mod selftest_report;
mod tables;

pub use html::RunInfo;
pub use output::RunStatus;
