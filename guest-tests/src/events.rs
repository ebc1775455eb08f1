// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counts of the host kernel's events: faults and exits.

use std::collections::BTreeMap;

/// Counts by name, sorted by it. What the host does not count is absent, never zero.
pub type EventCounts = BTreeMap<String, u64>;
