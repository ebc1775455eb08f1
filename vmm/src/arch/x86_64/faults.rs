// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The tracepoint of guest page faults. It has no filters: its error code does not encode the level,
//! and `granule run`, which would count them, does not support x86_64 guests.

use std::ffi::CStr;

/// The tracepoint of guest page faults.
pub const TRACEPOINT: &str = "kvm_page_fault";

/// Counter names and their event filters.
pub const FILTERS: &[(&str, &CStr)] = &[];
