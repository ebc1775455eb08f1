// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Limit on the warnings that a guest can cause, so that no guest fills the log.

use std::fmt;

/// Number of warnings per device before further messages are logged at debug level.
const MAX_WARNINGS: u32 = 8;

/// Warnings of one device.
#[derive(Debug, Default)]
pub struct RateLimitedLog(u32);

impl RateLimitedLog {
    /// Logs a warning, or a debug message once the device has reached its limit.
    pub fn warn(&mut self, message: fmt::Arguments<'_>) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            ..MAX_WARNINGS => log::warn!("{message}"),
            MAX_WARNINGS => {
                log::warn!("{message} (further warnings of this device are debug messages)")
            }
            _ => log::debug!("{message}"),
        }
    }
}
