// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest faults on memory by kind, level and access: its tracepoint gives an error code, whose bits
//! name no level, and `granule run`, which would count them, has no guests here.

use std::ffi::CStr;

/// The tracepoint.
pub const TRACEPOINT: &str = "kvm_page_fault";

/// What is counted: name and filter.
pub const FILTERS: &[(&str, &CStr)] = &[];
