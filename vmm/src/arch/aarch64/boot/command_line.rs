// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel command line, checked against the length that arm64 Linux reads.

use linux_loader::cmdline::{Cmdline, Error};
use thiserror::Error;

/// Size of the kernel's buffer, including the terminating NUL (`COMMAND_LINE_SIZE` in
/// `arch/arm64/include/uapi/asm/setup.h`).
pub const COMMAND_LINE_SIZE: usize = 2048;

/// Error returned when a command line is refused.
#[derive(Debug, Error)]
pub enum CommandLineError {
    /// The kernel would truncate the command line.
    #[error(
        "--cmdline has {length} bytes; arm64 Linux reads {}: shorten it",
        COMMAND_LINE_SIZE - 1
    )]
    TooLong {
        /// The length in bytes.
        length: usize,
    },
    /// The command line has characters other than printable ASCII.
    #[error("--cmdline is not valid: {0} Use printable ASCII only")]
    Invalid(Error),
}

/// Parses a command line.
///
/// # Errors
/// [`CommandLineError`].
pub fn parse(text: &str) -> Result<Cmdline, CommandLineError> {
    let parse = || {
        let mut line = Cmdline::new(COMMAND_LINE_SIZE)?;
        line.insert_str(text)?;
        Ok(line)
    };
    parse().map_err(|error| match error {
        Error::TooLarge => CommandLineError::TooLong { length: text.len() },
        error => CommandLineError::Invalid(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_that_the_kernel_would_truncate_is_refused() {
        let error = parse(&"a".repeat(2048)).unwrap_err().to_string();

        assert!(error.contains("2048 bytes; arm64 Linux reads 2047"), "{error}");
        assert!(parse(&"a".repeat(2047)).is_ok());
    }

    #[test]
    fn a_command_line_is_kept_as_it_is() {
        let text = "console=ttyS0 root=/dev/vda init=\"/bin/sh -c\" -- --verbose";

        let line = parse(text).unwrap().as_cstring().unwrap();

        assert_eq!(line.to_str(), Ok(text));
    }

    #[test]
    fn only_printable_ascii_is_accepted() {
        for text in ["a\0b", "a\tb", "gr\u{fc}n"] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains("printable ASCII"), "{error}");
        }
    }
}
