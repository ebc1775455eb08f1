// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From a Linux version and a series to kernels that are ready to boot, all in the cache.
//!
//! ```text
//! apt ─ source_package ─ sources ─┐
//! series ─ stacks ────────────────┼─ worktree ─┐
//! config_fragment ─────────────────────────────┴─ build ─ image
//! sources ─ selftests ─ selftest_build
//! sources ─ series ─ host_packages, series_check
//! ```

pub mod apt;
pub mod build;
pub mod config_fragment;
pub mod counted_functions;
pub mod host_packages;
pub mod image;
pub mod prepare;
pub mod selftest_build;
pub mod selftests;
pub mod series;
pub mod series_check;
pub mod source_package;
pub mod sources;
pub mod stacks;
pub mod worktree;

pub use image::Kernel;
pub use prepare::KernelError;
