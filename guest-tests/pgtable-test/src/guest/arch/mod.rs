// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's architecture: its program, stage-1 entries, registers and exceptions.
//!
//! Both architectures build and are tested on every host, except the programs, which need an
//! assembler of their own architecture.

pub mod aarch64;
pub mod x86_64;
