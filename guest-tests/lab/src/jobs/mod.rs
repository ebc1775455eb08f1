// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From a matrix to outcomes: one boot for each job on each kernel.

pub mod counts;
pub mod execute;
pub mod guest_matrix;
pub mod job_queue;
pub mod matrix;
pub mod outcome;
pub mod pack;
pub mod planned_job;
pub mod records;
pub mod run_directory;
pub mod splat;
