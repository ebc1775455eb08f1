// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The `granule` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    granule::cli::main()
}
