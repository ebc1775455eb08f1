// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rules of this repository that no compiler checks: the structure of crates and modules, the size
//! of files, and the words of comments and documents.

mod modules;
mod sources;
mod structure;
mod words;
