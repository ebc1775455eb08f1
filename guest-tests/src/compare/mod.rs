// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stub.
pub mod raw_log;
