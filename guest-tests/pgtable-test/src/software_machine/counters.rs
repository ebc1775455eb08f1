// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Event counts of the software machine, in real and in virtual time.

/// A counted event.
#[derive(Debug, Clone, Copy)]
pub(super) enum Count {
    Faults,
    Retries,
    CleanedLines,
    InvalidatedLines,
    InvalidatedAll,
    TlbiAddress,
    TlbiAll,
    Tables,
    TopUps,
}

/// Names of the counts in results, in the order of [`Count`].
pub(super) const NAMES: [&str; 9] = [
    "model_faults",
    "model_retries",
    "model_dc_lines",
    "model_ic_lines",
    "model_ic_all",
    "model_tlbi_ipa",
    "model_tlbi_all",
    "model_tables",
    "model_topups",
];
