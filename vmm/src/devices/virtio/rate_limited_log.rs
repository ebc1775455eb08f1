// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Warnings that a guest can cause, kept from filling the log.

use std::fmt;

/// How many warnings a device gives before it falls silent.
const MOST: u32 = 8;

/// A device's warnings.
#[derive(Debug, Default)]
pub struct RateLimitedLog(u32);

impl RateLimitedLog {
    /// Warns, unless too many warnings were given already.
    pub fn warn(&mut self, message: fmt::Arguments<'_>) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            ..MOST => log::warn!("{message}"),
            MOST => log::warn!("{message} (no more warnings of this kind)"),
            _ => log::debug!("{message}"),
        }
    }
}
