// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What differs from one guest architecture to the next. The logic of each builds and is tested on
//! every host; only its program needs an assembler of its own.

pub mod aarch64;
