// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results: reading and writing `granule.result/1`, and comparing two sets of records.

pub mod compare;
pub mod results;
